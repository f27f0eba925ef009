// SPDX-License-Identifier: Apache-2.0
// SyncBN: batch norm with the statistics of the whole batch over all ranks. The share of one rank may be too
// small for good statistics. Needs one all-reduce forward and one backward. Ranks may have different numbers
// of images, also none.
#pragma once
#include <torch/custom_class.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <tuple>

#include "layers/all_reduce.hpp"

namespace yolox {

namespace sync_bn_detail {

using torch::Tensor;

// The all-reduce is an operator of torch's dispatcher, so that DTR sees which tensor it writes. DTR never
// repeats operators of the namespace yolox_once, because the other ranks would not take part a second time.
// Makes AllReduce known to torch, once per program.
inline void register_all_reduce() { static const auto type = torch::class_<AllReduce>("yolox", "AllReduce"); }

// All-reduces x (sum) in place through the operator above.
inline void all_reduce_once(const Tensor& x, const AllReducePtr& over) {
  register_all_reduce();
  static const torch::Library library = [] {
    torch::Library l(torch::Library::FRAGMENT, "yolox_once", std::nullopt, __FILE__, __LINE__);
    l.def("all_reduce(Tensor(a!) x, __torch__.torch.classes.yolox.AllReduce over) -> ()",
          torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd,
                          [](Tensor t, const AllReducePtr& ranks) { ranks->sum(t); }));
    return l;
  }();
  static const auto operation = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("yolox_once::all_reduce", "")
                                    .typed<void(Tensor, const AllReducePtr&)>();
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  operation.call(x, over);
}

// Batch statistics over all ranks.
struct Moments {
  Tensor mean, variance;  // [C] float64; the variance is biased
  Tensor count;           // [1] values per channel; a tensor, so that the host does not wait for the GPU
};

// All-reduces the sums and returns the moments. sums: [2 C + 1] float64, over this rank: the sums per channel
// of values and of squares, then the number of values per channel.
inline Moments all_reduce_moments(Tensor sums, const AllReducePtr& over) {
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

// SyncBN with its gradient, on CPU and GPU.
struct SyncBatchNorm : torch::autograd::Function<SyncBatchNorm> {
  // x: [B, C, H, W], any floating-point dtype; weight, bias, running_mean, running_var: [C] float32 or
  // float64.
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& running_mean, const Tensor& running_var,
                        double momentum, double eps, const AllReducePtr& over) {
    const int64_t channels = x.size(1);
    const double values = double(x.numel()) / double(channels);
    Tensor sums = torch::zeros({2 * channels + 1}, x.options().dtype(torch::kDouble));
    if (x.numel() > 0) {
      Tensor mean, mean_square;
      if (x.is_cuda()) {
        const auto [m, inverse] = at::batch_norm_stats(x, eps);
        mean = m.to(torch::kDouble);
        mean_square = inverse.to(torch::kDouble).pow(-2) - eps + mean * mean;
      } else {
        const Tensor wider = x.to(torch::kDouble);
        mean = wider.mean({0, 2, 3});
        mean_square = wider.square().mean({0, 2, 3});
      }
      sums.copy_(torch::cat({mean * values, mean_square * values, torch::full({1}, values, sums.options())}));
    }
    const Moments m = all_reduce_moments(sums, over);
    update_running_statistics(running_mean, running_var, m, momentum);
    const Tensor mean = m.mean.to(weight.scalar_type()),
                 inverse = (m.variance + eps).rsqrt().to(weight.scalar_type());
    ctx->save_for_backward({x, weight, mean, inverse, m.count});
    ctx->saved_data["over"] = over;
    if (x.is_cuda() && x.numel() > 0) return at::batch_norm_elemt(x, weight, bias, mean, inverse, eps);
    return ((x - wide(mean)) * wide(inverse * weight) + wide(bias)).to(x.scalar_type());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &weight = kept[1], &mean = kept[2], &inverse = kept[3], &count = kept[4];
    const int64_t channels = x.size(1);
    Tensor sum_g, sum_g_x, d_weight, d_bias;  // [C]; sum_g_x: the sum of g (x - mean)
    if (x.is_cuda() && x.numel() > 0) {
      std::tie(sum_g, sum_g_x, d_weight, d_bias) = at::batch_norm_backward_reduce(
          grads[0].contiguous(x.suggest_memory_format()), x, mean, inverse, weight, true, true, true);
    } else {
      const Tensor g = grads[0].to(weight.scalar_type());
      sum_g = g.sum({0, 2, 3});
      sum_g_x = (g * (x - wide(mean))).sum({0, 2, 3});
      d_weight = sum_g_x * inverse;
      d_bias = sum_g;
    }
    Tensor sums = torch::cat({sum_g, sum_g_x}).to(torch::kDouble);
    all_reduce_once(sums, ctx->saved_data["over"].toCustomClass<AllReduce>());
    if (x.is_cuda() && x.numel() > 0) {
      sums = sums.to(sum_g.scalar_type());
      const Tensor dx = at::batch_norm_backward_elemt(grads[0].contiguous(x.suggest_memory_format()), x, mean,
                                                      inverse, weight, sums.slice(0, 0, channels),
                                                      sums.slice(0, channels), count.to(torch::kInt));
      return {dx, d_weight, d_bias, {}, {}, {}, {}, {}};
    }
    sums = (sums / count).to(weight.scalar_type());
    const Tensor mean_g = sums.slice(0, 0, channels),
                 slope = sums.slice(0, channels, 2 * channels) * inverse * inverse;
    const Tensor dx = (grads[0] - wide(mean_g) - (x - wide(mean)) * wide(slope)) * wide(inverse * weight);
    return {dx.to(x.scalar_type()), d_weight, d_bias, {}, {}, {}, {}, {}};
  }
};

}  // namespace sync_bn_detail

// Returns bn(x) in training mode with SyncBN. x: [B, C, H, W]. Updates the running statistics.
inline torch::Tensor sync_batch_norm(const torch::Tensor& x, torch::nn::BatchNorm2d& bn,
                                     const AllReducePtr& over) {
  bn->num_batches_tracked += 1;
  return sync_bn_detail::SyncBatchNorm::apply(x, bn->weight, bn->bias, bn->running_mean, bn->running_var,
                                              bn->options.momentum().value(), bn->options.eps(), over);
}

}  // namespace yolox
