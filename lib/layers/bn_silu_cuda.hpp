// SPDX-License-Identifier: Apache-2.0
// The operators of bn_silu() for GPUs, with the kernels of bn_silu_kernels.hpp. For float32, float16 and
// bfloat16 in channels-last memory. Sums and statistics are float32 or float64 for all types.
//
// Nothing here waits for the GPU. With SyncBN, forward needs one all-gather and backward one all-reduce.
#pragma once
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <tuple>

#include "base/torch.hpp"
#include "layers/bn_silu_kernels.hpp"
#include "layers/sync_bn.hpp"

namespace yolox {
namespace bn_silu_cuda {

using bn_silu_kernels::Shape;
using torch::Tensor;

inline bool supports(torch::ScalarType type) {
  return type == torch::kFloat || type == torch::kHalf || type == torch::kBFloat16;
}
// x: [B, C, H, W] channels-last.
inline Shape shape_of(const Tensor& x) {
  using bn_silu_kernels::Type;
  const auto type = x.scalar_type();
  return {type == torch::kFloat  ? Type::float32
          : type == torch::kHalf ? Type::float16
                                 : Type::bfloat16,
          x.numel() / x.size(1), int(x.size(1))};
}
inline void* stream_of(const Tensor& x) {
  return native_stream(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(x.device()));
}
// Returns the distance of the rows of t [B, C, H, W] in elements if its memory is that of a channels-last
// tensor with at least as many channels. Otherwise returns 0.
inline int64_t row_pitch(const Tensor& t) {
  if (t.stride(1) != 1) return 0;
  int64_t pitch = 0, rows = 1;
  for (const int d : {3, 2, 0}) {
    if (t.size(d) != 1) {
      if (rows == 1) pitch = t.stride(d);
      if (pitch < t.size(1) || t.stride(d) != pitch * rows) return 0;
    }
    rows *= t.size(d);
  }
  return rows == 1 ? t.size(1) : pitch;
}
inline float* floats(const Tensor& t) { return t.data_ptr<float>(); }

// As bn_silu_detail::statistics().
inline std::tuple<Tensor, Tensor> statistics(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const Tensor& running_mean, const Tensor& running_var,
                                             double momentum, double eps,
                                             const std::optional<CollectivesPtr>& over) {
  const c10::DeviceGuard guard(x.device());
  const Shape shape = shape_of(x);
  const int64_t columns = 2 * shape.channels + 1;
  // All memory is allocated before the running statistics change, so that an out-of-memory error leaves them
  // as they were.
  const Tensor saved = torch::empty({4, shape.channels}, weight.options()),
               count = torch::empty({1}, weight.options().dtype(torch::kDouble));
  Tensor parts = torch::empty({bn_silu_kernels::parts_of(shape), columns}, weight.options());
  void* stream = stream_of(x);
  bn_silu_kernels::moments(shape, x.const_data_ptr(), floats(parts), stream);
  if (over) {
    const Tensor merged = torch::empty({columns}, weight.options());
    bn_silu_kernels::merge_moments(shape.channels, floats(parts), parts.size(0), floats(merged), stream);
    parts = sync_bn_detail::all_gather_once(merged, *over);
  }
  bn_silu_kernels::finish_moments(shape.channels, floats(parts), parts.size(0), floats(weight), floats(bias),
                                  floats(running_mean), floats(running_var), momentum, eps, floats(saved),
                                  count.data_ptr<double>(), stream);
  return {saved, count};
}

// Returns silu(bn(x)). saved: [4, C] from statistics().
inline Tensor forward(const Tensor& x, const Tensor& saved) {
  const c10::DeviceGuard guard(x.device());
  const Tensor y = torch::empty_like(x);
  bn_silu_kernels::normalise(shape_of(x), x.const_data_ptr(), floats(saved), y.data_ptr(), stream_of(x));
  return y;
}

// Returns the sums of dz and of dz (x - mean) over this rank, [2, C], where dz is the gradient of the batch
// norm output, and the gradients of weight and bias, [C] each. g: gradient of y, with the dtype of x and a
// row_pitch().
inline std::tuple<Tensor, Tensor, Tensor> backward_sums(const Tensor& g, const Tensor& x,
                                                        const Tensor& saved) {
  const c10::DeviceGuard guard(x.device());
  const Shape shape = shape_of(x);
  const Tensor parts = torch::empty({bn_silu_kernels::parts_of(shape), 2 * shape.channels}, saved.options());
  const Tensor sums = torch::empty({2, shape.channels}, saved.options()),
               d_weight = torch::empty({shape.channels}, saved.options()),
               d_bias = torch::empty({shape.channels}, saved.options());
  void* stream = stream_of(x);
  bn_silu_kernels::gradient_sums(shape, g.const_data_ptr(), row_pitch(g), x.const_data_ptr(), floats(saved),
                                 floats(parts), stream);
  bn_silu_kernels::add_gradient_sums(shape.channels, floats(parts), parts.size(0), floats(saved),
                                     floats(sums), floats(d_weight), floats(d_bias), stream);
  return {sums, d_weight, d_bias};
}

// Returns dx. sums: from backward_sums(), over all ranks. count: from statistics().
inline Tensor backward_norm(const Tensor& g, const Tensor& x, const Tensor& saved, const Tensor& sums,
                            const Tensor& count) {
  const c10::DeviceGuard guard(x.device());
  const Tensor dx = torch::empty_like(x);
  bn_silu_kernels::gradient(shape_of(x), g.const_data_ptr(), row_pitch(g), x.const_data_ptr(), floats(saved),
                            floats(sums), count.const_data_ptr<double>(), dx.data_ptr(), stream_of(x));
  return dx;
}

}  // namespace bn_silu_cuda
}  // namespace yolox
