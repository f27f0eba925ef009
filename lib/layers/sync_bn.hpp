// SPDX-License-Identifier: Apache-2.0
// SyncBN: batch norm with the statistics of the whole batch over all ranks. The share of one rank may be too
// small for good statistics. Needs one all-reduce forward (on a GPU one all-gather) and one backward. Ranks
// may have different numbers of images, also none.
#pragma once
#include <torch/custom_class.h>
#include <torch/library.h>

#include <tuple>

#include "base/torch.hpp"
#include "layers/bn_silu.hpp"

namespace yolox {

namespace sync_bn_detail {

using torch::Tensor;

// Makes Collectives and the two operators known to torch, once per program. The collectives are operators of
// torch's dispatcher, so that DTR sees which tensors they write. DTR never repeats operators of the namespace
// yolox_once, because the other ranks would not take part a second time.
inline void register_collectives() {
  static const auto type = torch::class_<Collectives>("yolox", "Collectives");
  static const torch::Library library = [] {
    torch::Library l(torch::Library::FRAGMENT, "yolox_once", std::nullopt, __FILE__, __LINE__);
    constexpr auto key = c10::DispatchKey::CompositeExplicitAutograd;
    l.def("all_reduce(Tensor(a!) x, __torch__.torch.classes.yolox.Collectives over) -> ()",
          torch::dispatch(key, [](Tensor t, const CollectivesPtr& ranks) { ranks->functions.sum(t); }));
    l.def("all_gather(Tensor x, __torch__.torch.classes.yolox.Collectives over) -> Tensor",
          torch::dispatch(
              key, [](const Tensor& t, const CollectivesPtr& ranks) { return ranks->functions.gather(t); }));
    return l;
  }();
}

// Returns the operator of this name. Function: its type.
template <class Function>
auto operation(const char* name) {
  register_collectives();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

// All-reduces x (sum) in place.
inline void all_reduce_once(const Tensor& x, const CollectivesPtr& over) {
  static const auto sum = operation<void(Tensor, const CollectivesPtr&)>("yolox_once::all_reduce");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  sum.call(x, over);
}

// All-gathers x [n]. Returns [world size, n].
inline Tensor all_gather_once(const Tensor& x, const CollectivesPtr& over) {
  static const auto gather =
      operation<Tensor(const Tensor&, const CollectivesPtr&)>("yolox_once::all_gather");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return gather.call(x, over);
}

// Batch statistics over all ranks.
struct Moments {
  Tensor mean, variance;  // [C] float64; the variance is biased
  Tensor count;           // [1] values per channel; a tensor, so that the host does not wait for the GPU
};

// All-reduces the sums and returns the moments. sums: [2 C + 1] float64, over this rank: the sums per channel
// of values and of squares, then the number of values per channel.
inline Moments all_reduce_moments(Tensor sums, const CollectivesPtr& over) {
  all_reduce_once(sums, over);
  const int64_t channels = sums.size(0) / 2;
  const Tensor count = sums.slice(0, 2 * channels);
  const Tensor mean = sums.slice(0, 0, channels) / count;
  return {mean, (sums.slice(0, channels, 2 * channels) / count - mean * mean).clamp_min(0), count};
}

// Updates the running statistics in place.
inline void update_running_statistics(const Tensor& running_mean, const Tensor& running_var, const Moments& m,
                                      double momentum) {
  const Tensor unbiased = m.count / (m.count - 1).clamp_min(1);
  running_mean.mul_(1 - momentum).add_(m.mean.to(running_mean.scalar_type()), momentum);
  running_var.mul_(1 - momentum).add_((m.variance * unbiased).to(running_var.scalar_type()), momentum);
}

// Returns a view [1, C, 1, 1] of t [C].
inline Tensor wide(const Tensor& t) { return t.view({1, -1, 1, 1}); }

// Computes the statistics over all ranks with one all-gather, and updates the running statistics in place.
// Returns mean and 1 / standard deviation [C], and the number of values per channel of each rank, [world
// size] int32. x: [B, C, H, W] on a GPU. The kernels are those of torch.nn.SyncBatchNorm.
inline std::tuple<Tensor, Tensor, Tensor> gpu_statistics(const Tensor& x, const Tensor& running_mean,
                                                         const Tensor& running_var, double momentum,
                                                         double eps, const CollectivesPtr& over) {
  const int64_t channels = x.size(1), values = x.numel() / channels;
  // Without images, a tiny count: with 0, the merge of the ranks would compute 0 / 0.
  const double count = values > 0 ? double(values) : 1e-20;
  const auto options = running_mean.options();
  const auto [mean, inverse] =
      values > 0 ? at::batch_norm_stats(x, eps)
                 : std::tuple(torch::zeros({channels}, options), torch::ones({channels}, options));
  const Tensor own = torch::full({1}, count, mean.options());
  const Tensor all = all_gather_once(torch::cat({mean, inverse, own}), over);
  const Tensor counts = all.select(1, 2 * channels);
  const auto [mean_of_all, inverse_of_all] = at::batch_norm_gather_stats_with_counts(
      x, all.slice(1, 0, channels), all.slice(1, channels, 2 * channels), running_mean, running_var, momentum,
      eps, counts);
  return {mean_of_all, inverse_of_all, counts.to(torch::kInt)};
}

// SyncBN with its gradient, on CPU and GPU.
struct SyncBatchNorm : torch::autograd::Function<SyncBatchNorm> {
  // x: [B, C, H, W], any floating-point dtype; weight, bias, running_mean, running_var: [C] float32 or
  // float64.
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& running_mean, const Tensor& running_var,
                        double momentum, double eps, const CollectivesPtr& over) {
    register_collectives();
    ctx->saved_data["over"] = over;
    if (x.is_cuda()) {
      const auto [mean, inverse, counts] = gpu_statistics(x, running_mean, running_var, momentum, eps, over);
      ctx->save_for_backward({x, weight, mean, inverse, counts});
      return x.numel() > 0 ? at::batch_norm_elemt(x, weight, bias, mean, inverse, eps) : x.clone();
    }
    const int64_t channels = x.size(1);
    const double values = double(x.numel()) / double(channels);
    Tensor sums = torch::zeros({2 * channels + 1}, x.options().dtype(torch::kDouble));
    if (x.numel() > 0) {
      const Tensor wider = x.to(torch::kDouble);
      const Tensor mean = wider.mean({0, 2, 3}), mean_square = wider.square().mean({0, 2, 3});
      sums.copy_(torch::cat({mean * values, mean_square * values, torch::full({1}, values, sums.options())}));
    }
    const Moments m = all_reduce_moments(sums, over);
    update_running_statistics(running_mean, running_var, m, momentum);
    const Tensor mean = m.mean.to(weight.scalar_type()),
                 inverse = (m.variance + eps).rsqrt().to(weight.scalar_type());
    ctx->save_for_backward({x, weight, mean, inverse, m.count});
    return ((x - wide(mean)) * wide(inverse * weight) + wide(bias)).to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &weight = kept[1], &mean = kept[2], &inverse = kept[3], &count = kept[4];
    const int64_t channels = x.size(1);
    const auto over = ctx->saved_data["over"].toCustomClass<Collectives>();
    if (x.is_cuda() && x.numel() > 0) {
      const Tensor g = grads[0].contiguous(x.suggest_memory_format());
      const auto [sum_g, sum_g_x, d_weight, d_bias] =
          at::batch_norm_backward_reduce(g, x, mean, inverse, weight, true, true, true);
      const Tensor sums = torch::cat({sum_g, sum_g_x});
      all_reduce_once(sums, over);
      const Tensor dx = at::batch_norm_backward_elemt(g, x, mean, inverse, weight, sums.slice(0, 0, channels),
                                                      sums.slice(0, channels), count);
      return {dx, d_weight, d_bias, {}, {}, {}, {}, {}};
    }
    const Tensor g = grads[0].to(weight.scalar_type());
    const Tensor d_bias = g.sum({0, 2, 3});
    const Tensor sum_g_x = (g * (x - wide(mean))).sum({0, 2, 3}), d_weight = sum_g_x * inverse;
    Tensor sums = torch::cat({d_bias, sum_g_x});
    if (x.is_cpu()) sums = sums.to(torch::kDouble);
    all_reduce_once(sums, over);
    if (x.is_cuda()) return {x.clone(), d_weight, d_bias, {}, {}, {}, {}, {}};  // no image on this rank
    sums = (sums / count).to(weight.scalar_type());
    const Tensor mean_g = sums.slice(0, 0, channels),
                 slope = sums.slice(0, channels, 2 * channels) * inverse * inverse;
    const Tensor dx = (grads[0] - wide(mean_g) - (x - wide(mean)) * wide(slope)) * wide(inverse * weight);
    return {dx.to(x.scalar_type()), d_weight, d_bias, {}, {}, {}, {}, {}};
  }
};

}  // namespace sync_bn_detail

// Returns bn(x), in training mode with SyncBN. x: [B, C, H, W]. over: the ranks; null: plain batch norm.
// Updates the running statistics in training mode.
inline torch::Tensor sync_batch_norm(const torch::Tensor& x, torch::nn::BatchNorm2dImpl& bn,
                                     const CollectivesPtr& over) {
  if (!over || !bn.is_training()) return bn.forward(x);
  bn.num_batches_tracked += 1;
  return sync_bn_detail::SyncBatchNorm::apply(x, bn.weight, bn.bias, bn.running_mean, bn.running_var,
                                              bn.options.momentum().value(), bn.options.eps(), over);
}

}  // namespace yolox
