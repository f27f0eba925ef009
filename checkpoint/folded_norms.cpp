// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/folded_norms.hpp"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "checkpoint/load.hpp"
#include "data.hpp"

namespace yolox {

StatisticsNorm::StatisticsNorm(const torch::nn::BatchNorm2d& norm)
    : BatchNorm2dImpl(norm->options), norm(norm) {
  weight = norm->weight;
  bias = norm->bias;
  running_mean = norm->running_mean;
  running_var = norm->running_var;
  eval();
}

void StatisticsNorm::_check_input_dim(const Tensor& x) {
  BatchNorm2dImpl::_check_input_dim(x);
  const Tensor exact = x.to(torch::kDouble), sum_here = exact.sum({0, 2, 3}),
               squares_here = exact.square().sum({0, 2, 3});
  sum = count > 0 ? sum + sum_here : sum_here;
  squares = count > 0 ? squares + squares_here : squares_here;
  count += double(x.numel() / x.size(1));
}

int64_t restore_folded_norms(YOLOX& model, const Dataset& data, ImageSize size, bool legacy, int workers,
                             int64_t most) {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<BaseConvImpl*, std::shared_ptr<StatisticsNorm>>> watched;
  for (const auto& module : model->modules()) {
    auto* block = module->as<BaseConvImpl>();
    if (!block) continue;
    const auto& bn = *block->bn;
    const bool folded = (bn.weight == 1).all().item<bool>() && (bn.running_mean == 0).all().item<bool>() &&
                        (bn.running_var - (1 - bn.options.eps())).abs().max().item<double>() < 1e-7;
    if (!folded) continue;
    watched.emplace_back(block, std::make_shared<StatisticsNorm>(block->bn));
    block->bn = std::shared_ptr<torch::nn::BatchNorm2dImpl>(watched.back().second);
  }
  if (watched.empty()) return 0;
  const EvalGuard evaluation(*model);
  const Tensor first = model->parameters()[0];
  const int64_t images = std::min<int64_t>(most, data.records.size());
  Loader loader(evaluation_items(data), 0, images, 1, {size.width, size.height}, workers, first.is_cuda());
  DeviceLoader batches(loader, first.device());
  for (int64_t i = 0; i < images; ++i)
    model(preprocess(batches.next().images, legacy).to(first.scalar_type()));
  for (const auto& [block, w] : watched) {
    block->bn = w->norm;
    const Tensor mean = w->sum / w->count, var = (w->squares / w->count - mean.square()).clamp_min(0);
    w->weight.copy_((var + w->options.eps()).sqrt());
    w->bias.add_(mean);
    w->running_mean.copy_(mean);
    w->running_var.copy_(var);
  }
  return images;
}

}  // namespace yolox
