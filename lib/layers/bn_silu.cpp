// SPDX-License-Identifier: Apache-2.0
// Fused batch norm and SiLU for the CPU, float32 or bfloat16, channels-last. bn_silu_cuda.hpp has the
// operators for GPUs. All other cases use the two operations of torch.
//
// As separate operations, batch norm and SiLU make five passes over memory forward and more backward, and
// save two tensors for backward. The fused operation makes two passes forward and two backward. It saves only
// the input of the batch norm, from which backward recomputes the intermediate values.
//
// x is treated as a matrix [M, C] with M = batch x height x width rows. Batch norm: arXiv 1502.03167. SiLU:
// arXiv 1702.03118.
#include "layers/bn_silu.hpp"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "base/torch.hpp"
#include "layers/bn_silu_cuda.hpp"
#include "layers/sync_bn.hpp"

// Compiles a function for several instruction sets. The best one for the CPU is selected at program start.
// v3 is AVX2 with FMA, v4 AVX-512.
#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || defined(__SANITIZE_ADDRESS__) || \
    defined(__SANITIZE_THREAD__)
#define YOLOX_SIMD
#else
#if __GNUC__ < 12  // does not know v3 and v4
#define YOLOX_SIMD_SETS "avx512f", "avx2"
#else
#define YOLOX_SIMD_SETS "arch=x86-64-v4", "arch=x86-64-v3"
#endif
#define YOLOX_SIMD \
  __attribute__((target_clones(YOLOX_SIMD_SETS, "default"), optimize("O3", "no-trapping-math")))
#endif

namespace yolox {
namespace bn_silu_detail {

using torch::Tensor;

// Returns the number of rows per work item, which fits into the cache of a core. Sums are computed per work
// item and then added in order, so that the result does not depend on the number of threads, bit for bit.
static int64_t rows_per_work_item(int64_t channels) { return std::max<int64_t>(16, 16384 / channels); }

// Returns e^x with an error of about 1 ulp. Written without calls, so that the compiler can vectorise it: 2^n
// times a polynomial on -ln2/2..ln2/2 (coefficients of Cephes). x is clamped to a range in which sigmoid() is
// no denormal number: the compiler may compute the clamped case for all elements, and Intel's processors need
// a hundred times as long for denormal numbers.
static inline __attribute__((always_inline)) float exponential(float x) {
  x = x < -80.0f ? -80.0f : x > 80.0f ? 80.0f : x;      // std::min is a call, which prevents vectorisation
  const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 x 2^23 moves the integer to the low bits
  const float n = shifted - 12582912.0f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t exponent, bits;
  std::memcpy(&exponent, &shifted, 4);
  std::memcpy(&bits, &p, 4);
  bits += int32_t(uint32_t(exponent) << 23);
  std::memcpy(&p, &bits, 4);
  return p;
}
static inline __attribute__((always_inline)) float sigmoid(float z) {
  return 1.0f / (1.0f + exponential(-z));
}

// Elements in memory: float32, or bfloat16 as its bits, which are the upper half of a float32. c10::BFloat16
// is not vectorised. Loops compute in float32.
static inline __attribute__((always_inline)) float load(float x) { return x; }
static inline __attribute__((always_inline)) float load(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline __attribute__((always_inline)) void store(float& to, float x) { to = x; }
// Rounds to the nearest, ties to even.
static inline __attribute__((always_inline)) void store(uint16_t& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to = x == x ? uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : uint16_t(0x7fc0);
}

// Accumulates over the rows: sums += x - centre, squares += (x - centre)^2. sums, squares, centre: [C].
template <class T>
YOLOX_SIMD static inline void stats_rows(const T* __restrict x, int64_t rows, int64_t channels,
                                         const float* __restrict centre, float* __restrict sums,
                                         float* __restrict squares) {
  for (int64_t r = 0; r < rows; ++r, x += channels)
    for (int64_t c = 0; c < channels; ++c) {
      const float d = load(x[c]) - centre[c];
      sums[c] += d;
      squares[c] += d * d;
    }
}

// Computes y = silu((x - mean) * scale + bias).
template <class T>
YOLOX_SIMD static inline void forward_rows(const T* __restrict x, T* __restrict y, int64_t rows,
                                           int64_t channels, const float* __restrict mean,
                                           const float* __restrict scale, const float* __restrict bias) {
  for (int64_t r = 0; r < rows; ++r, x += channels, y += channels)
    for (int64_t c = 0; c < channels; ++c) {
      const float z = (load(x[c]) - mean[c]) * scale[c] + bias[c];
      store(y[c], z * sigmoid(z));
    }
}

// Computes dz, the gradient of the batch norm output, and accumulates sums += dz, products += dz * (x -
// mean).
template <class T>
YOLOX_SIMD static inline void backward_sums_rows(const T* __restrict g, const T* __restrict x,
                                                 T* __restrict dz, int64_t rows, int64_t channels,
                                                 const float* __restrict mean, const float* __restrict scale,
                                                 const float* __restrict bias, float* __restrict sums,
                                                 float* __restrict products) {
  for (int64_t r = 0; r < rows; ++r, x += channels, g += channels, dz += channels)
    for (int64_t c = 0; c < channels; ++c) {
      const float centred = load(x[c]) - mean[c], z = centred * scale[c] + bias[c], s = sigmoid(z),
                  d = load(g[c]) * s * (1.0f + z * (1.0f - s));
      store(dz[c], d);
      sums[c] += d;
      products[c] += d * centred;
    }
}

// Computes dx = scale * (dz - mean_dz - (x - mean) * slope) in place. dx: contains dz before the call.
template <class T>
YOLOX_SIMD static inline void backward_rows(const T* __restrict x, T* __restrict dx, int64_t rows,
                                            int64_t channels, const float* __restrict scale,
                                            const float* __restrict mean, const float* __restrict mean_dz,
                                            const float* __restrict slope) {
  for (int64_t r = 0; r < rows; ++r, x += channels, dx += channels)
    for (int64_t c = 0; c < channels; ++c)
      store(dx[c], scale[c] * (load(dx[c]) - mean_dz[c] - (load(x[c]) - mean[c]) * slope[c]));
}

// Calls rows(first, count) for each work item of `total` rows, in parallel.
template <class Rows>
void for_rows(int64_t total, int64_t channels, const Rows& rows) {
  const int64_t size = rows_per_work_item(channels);
  at::parallel_for(0, (total + size - 1) / size, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece)
      rows(piece * size, std::min(size, total - piece * size));
  });
}

// Returns 2 x channels sums over all rows. rows(first, count, sums) adds the values of some rows to `sums`.
// Sums are accumulated in float32 over 32 rows and in float64 beyond. The precision is needed in backward of
// the first layer, where the sums nearly cancel.
template <class Rows>
std::vector<double> sum_rows(int64_t total, int64_t channels, const Rows& rows) {
  const int64_t size = rows_per_work_item(channels), width = 2 * channels, few = 32;
  std::vector<double> pieces((total + size - 1) / size * width, 0.0), sums(width, 0.0);
  for_rows(total, channels, [&](int64_t first, int64_t count) {
    double* piece = pieces.data() + first / size * width;
    std::vector<float> some(width);
    for (int64_t at = 0; at < count; at += few) {
      std::fill(some.begin(), some.end(), 0.0f);
      rows(first + at, std::min(few, count - at), some.data());
      for (int64_t c = 0; c < width; ++c) piece[c] += some[c];
    }
  });
  for (size_t i = 0; i < pieces.size(); i += width)
    for (int64_t c = 0; c < width; ++c) sums[c] += pieces[i + c];
  return sums;
}

// Replaces means, biased variances and count of this rank by those over all ranks.
static void merge_moments(std::vector<double>& means, std::vector<double>& variances, double& count,
                          const CollectivesPtr& over) {
  const size_t channels = means.size();
  const Tensor sums = torch::empty({int64_t(2 * channels + 1)}, torch::kDouble);
  double* s = sums.data_ptr<double>();
  for (size_t c = 0; c < channels; ++c) {
    s[c] = count * means[c];
    s[channels + c] = count * (variances[c] + means[c] * means[c]);
  }
  s[2 * channels] = count;
  const auto all = sync_bn_detail::all_reduce_moments(sums, over);
  count = all.count.item<double>();
  std::copy_n(all.mean.data_ptr<double>(), channels, means.begin());
  std::copy_n(all.variance.data_ptr<double>(), channels, variances.begin());
}

// Calls run(T()) with the type of the elements of x in memory.
template <class Run>
void with_type_of(const Tensor& x, const Run& run) {
  x.scalar_type() == torch::kFloat ? run(float()) : run(uint16_t());
}
template <class T>
const T* elements(const Tensor& x, T) {
  return static_cast<const T*>(x.const_data_ptr());
}
template <class T>
T* elements_to_write(const Tensor& x, T) {
  return static_cast<T*>(x.data_ptr());
}

// ---- The operators. They are registered with torch's dispatcher, so that DTR (dtr/) sees their inputs
// and outputs. DTR never repeats operators of the namespace yolox_once, because they all-reduce over the
// ranks or update running statistics.

// Computes batch statistics and updates running_mean and running_var. x: [B, C, H, W] channels-last; weight,
// bias, running_mean, running_var: [C]. over: all-reduce of SyncBN, or none. Returns [4, C] (mean, 1 /
// standard deviation, scale, bias) and the number of values per channel over all ranks, [1] float64.
static std::tuple<Tensor, Tensor> statistics(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             const Tensor& running_mean, const Tensor& running_var,
                                             double momentum, double eps,
                                             const std::optional<CollectivesPtr>& over) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  // Sums are computed relative to the first row, so that large means do not cost precision.
  std::vector<float> centre(channels);
  std::vector<double> sums;
  with_type_of(x, [&](auto type) {
    const auto* in = elements(x, type);
    for (int64_t c = 0; c < channels && rows > 0; ++c) centre[c] = load(in[c]);
    sums = sum_rows(rows, channels, [&](int64_t first, int64_t count, float* s) {
      stats_rows(in + first * channels, count, channels, centre.data(), s, s + channels);
    });
  });
  std::vector<double> means(channels), variances(channels);
  for (int64_t c = 0; c < channels && rows > 0; ++c) {
    const double d = sums[c] / rows;
    means[c] = centre[c] + d;
    variances[c] = std::max(0.0, sums[channels + c] / rows - d * d);
  }
  double count = double(rows);
  if (over) merge_moments(means, variances, count, *over);
  const Tensor saved = torch::empty({4, channels}, weight.options());
  float *mean = saved.data_ptr<float>(), *inverse = mean + channels, *scale = inverse + channels,
        *offset = scale + channels;
  const float *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>();
  float *run_mean = running_mean.data_ptr<float>(), *run_var = running_var.data_ptr<float>();
  for (int64_t c = 0; c < channels; ++c) {
    mean[c] = float(means[c]);
    inverse[c] = float(1 / std::sqrt(variances[c] + eps));
    scale[c] = w[c] * inverse[c];
    offset[c] = b[c];
    run_mean[c] = float((1 - momentum) * run_mean[c] + momentum * means[c]);
    run_var[c] =
        float((1 - momentum) * run_var[c] + momentum * variances[c] * count / std::max(1.0, count - 1));
  }
  return {saved, torch::full({1}, count, torch::kDouble)};
}

// Returns silu(bn(x)). saved: [4, C] from statistics().
static Tensor forward(const Tensor& x, const Tensor& saved) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  const Tensor y = torch::empty_like(x);
  const float *mean = saved.const_data_ptr<float>(), *scale = mean + 2 * channels, *offset = scale + channels;
  with_type_of(x, [&](auto type) {
    const auto* in = elements(x, type);
    auto* out = elements_to_write(y, type);
    for_rows(rows, channels, [&](int64_t first, int64_t count) {
      forward_rows(in + first * channels, out + first * channels, count, channels, mean, scale, offset);
    });
  });
  return y;
}

// Returns dz, the gradient of the batch norm output, and the sums of dz and of dz (x - mean) over this rank,
// [2, C] float64. g: gradient of y, with the shape and memory format of x.
static std::tuple<Tensor, Tensor> backward_silu(const Tensor& g, const Tensor& x, const Tensor& saved) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  const float *mean = saved.const_data_ptr<float>(), *scale = mean + 2 * channels, *offset = scale + channels;
  const Tensor dz = torch::empty_like(x);
  std::vector<double> sums;
  with_type_of(x, [&](auto type) {
    const auto *gradient = elements(g, type), *in = elements(x, type);
    auto* out = elements_to_write(dz, type);
    sums = sum_rows(rows, channels, [&](int64_t first, int64_t count, float* s) {
      backward_sums_rows(gradient + first * channels, in + first * channels, out + first * channels, count,
                         channels, mean, scale, offset, s, s + channels);
    });
  });
  const Tensor both = torch::empty({2, channels}, x.options().dtype(torch::kDouble));
  std::copy(sums.begin(), sums.end(), both.data_ptr<double>());
  return {dz, both};
}

// Returns the gradients of weight and bias, [C] each, and mean_dz and slope for backward_norm(), [2, C].
// sums_here: from backward_silu(). count: from statistics(). All-reduces the sums with SyncBN.
static std::tuple<Tensor, Tensor, Tensor> backward_sums(const Tensor& sums_here, const Tensor& saved,
                                                        const Tensor& count,
                                                        const std::optional<CollectivesPtr>& over) {
  const int64_t channels = saved.size(1);
  const double values = *count.const_data_ptr<double>();
  const float* inverse = saved.const_data_ptr<float>() + channels;
  const double* here = sums_here.const_data_ptr<double>();
  std::vector<double> sums(here, here + 2 * channels);
  const Tensor d_weight = torch::empty({channels}, saved.options()),
               d_bias = torch::empty({channels}, saved.options()),
               means = torch::empty({2, channels}, saved.options());
  // The gradients of weight and bias are those of this rank. The Reducer all-reduces them later.
  for (int64_t c = 0; c < channels; ++c) {
    d_bias.data_ptr<float>()[c] = float(sums[c]);
    d_weight.data_ptr<float>()[c] = float(sums[channels + c] * inverse[c]);
  }
  if (over) {
    Tensor shared = torch::from_blob(sums.data(), {int64_t(sums.size())}, torch::kDouble);
    (*over)->functions.sum(shared);
  }
  float *mean_dz = means.data_ptr<float>(), *slope = mean_dz + channels;
  for (int64_t c = 0; c < channels; ++c) {
    mean_dz[c] = float(sums[c] / values);
    slope[c] = float(sums[channels + c] / values * inverse[c] * inverse[c]);
  }
  return {d_weight, d_bias, means};
}

// Computes dx in place of dz. means: mean_dz and slope from backward_sums().
static void backward_norm(const Tensor& dz, const Tensor& x, const Tensor& saved, const Tensor& means) {
  const int64_t channels = x.size(1), rows = x.numel() / channels;
  const float *mean = saved.const_data_ptr<float>(), *scale = mean + 2 * channels,
              *mean_dz = means.const_data_ptr<float>(), *slope = mean_dz + channels;
  with_type_of(x, [&](auto type) {
    const auto* in = elements(x, type);
    auto* out = elements_to_write(dz, type);
    for_rows(rows, channels, [&](int64_t first, int64_t count) {
      backward_rows(in + first * channels, out + first * channels, count, channels, scale, mean, mean_dz,
                    slope);
    });
  });
}

using sync_bn_detail::operation;

// Registers the operators, once per program. This is a function and not a global object, so that only sources
// that call it compile the operators.
static void register_operators() {
  sync_bn_detail::register_collectives();
  static const torch::Library once = [] {
    torch::Library l(torch::Library::FRAGMENT, "yolox_once", std::nullopt, __FILE__, __LINE__);
    l.def(
        "bn_silu_statistics(Tensor x, Tensor weight, Tensor bias, Tensor(a!) running_mean, "
        "Tensor(b!) running_var, float momentum, float eps, "
        "__torch__.torch.classes.yolox.Collectives? over) -> (Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CPU, &statistics));
    l.def(
        "bn_silu_backward_sums(Tensor sums, Tensor saved, Tensor count, "
        "__torch__.torch.classes.yolox.Collectives? over) -> (Tensor, Tensor, Tensor)",
        torch::dispatch(c10::DispatchKey::CPU, &backward_sums));
#ifdef YOLOX_FUSED_NORM
    l.impl("bn_silu_statistics", torch::dispatch(c10::DispatchKey::CUDA, &bn_silu_cuda::statistics));
#endif
    return l;
  }();
  static const torch::Library again = [] {
    torch::Library l(torch::Library::FRAGMENT, "yolox", std::nullopt, __FILE__, __LINE__);
    l.def("bn_silu_forward(Tensor x, Tensor saved) -> Tensor",
          torch::dispatch(c10::DispatchKey::CPU, &forward));
    l.def("bn_silu_backward_silu(Tensor g, Tensor x, Tensor saved) -> (Tensor, Tensor)",
          torch::dispatch(c10::DispatchKey::CPU, &backward_silu));
    l.def("bn_silu_backward_norm(Tensor(a!) dz, Tensor x, Tensor saved, Tensor means) -> ()",
          torch::dispatch(c10::DispatchKey::CPU, &backward_norm));
#ifdef YOLOX_FUSED_NORM
    constexpr auto cuda = c10::DispatchKey::CUDA;
    l.impl("bn_silu_forward", torch::dispatch(cuda, &bn_silu_cuda::forward));
    l.def("bn_silu_cuda_backward_sums(Tensor g, Tensor x, Tensor saved) -> (Tensor, Tensor, Tensor)",
          torch::dispatch(cuda, &bn_silu_cuda::backward_sums));
    l.def("bn_silu_cuda_backward_norm(Tensor g, Tensor x, Tensor saved, Tensor sums, Tensor count) -> Tensor",
          torch::dispatch(cuda, &bn_silu_cuda::backward_norm));
#endif
    return l;
  }();
}

// The fused operation with its gradient.
struct BnSilu : torch::autograd::Function<BnSilu> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& bias, const Tensor& running_mean, const Tensor& running_var,
                        double momentum, double eps, const CollectivesPtr& over) {
    register_operators();
    static const auto statistics =
        operation<decltype(bn_silu_detail::statistics)>("yolox_once::bn_silu_statistics");
    static const auto forward = operation<decltype(bn_silu_detail::forward)>("yolox::bn_silu_forward");
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const auto [saved, count] = statistics.call(x, weight, bias, running_mean, running_var, momentum, eps,
                                                over ? std::optional(over) : std::nullopt);
    ctx->save_for_backward({x, saved, count});
    if (over) ctx->saved_data["over"] = over;
    return forward.call(x, saved);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto kept = ctx->get_saved_variables();
    const Tensor &x = kept[0], &saved = kept[1], &count = kept[2];
    const bool as_it_is = x.is_cuda() && bn_silu_cuda::row_pitch(grads[0]) > 0;
    const Tensor g = as_it_is ? grads[0] : grads[0].contiguous(torch::MemoryFormat::ChannelsLast);
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    std::optional<CollectivesPtr> over;
    if (ctx->saved_data.count("over")) over = ctx->saved_data["over"].toCustomClass<Collectives>();
    const auto [dx, d_weight, d_bias] =
        x.is_cuda() ? backward_on_gpu(g, x, saved, count, over) : backward_on_cpu(g, x, saved, count, over);
    return {dx, d_weight, d_bias, {}, {}, {}, {}, {}};
  }

  // Returns the gradients of x, weight and bias, as backward_on_gpu() does.
  static std::tuple<Tensor, Tensor, Tensor> backward_on_cpu(const Tensor& g, const Tensor& x,
                                                            const Tensor& saved, const Tensor& count,
                                                            const std::optional<CollectivesPtr>& over) {
    static const auto silu = operation<decltype(backward_silu)>("yolox::bn_silu_backward_silu");
    static const auto sums = operation<decltype(backward_sums)>("yolox_once::bn_silu_backward_sums");
    static const auto norm = operation<decltype(backward_norm)>("yolox::bn_silu_backward_norm");
    const auto [dx, both] = silu.call(g, x, saved);
    const auto [d_weight, d_bias, means] = sums.call(both, saved, count, over);
    norm.call(dx, x, saved, means);
    return {dx, d_weight, d_bias};
  }
  // Reads g twice instead of storing the gradient of the batch norm output.
  static std::tuple<Tensor, Tensor, Tensor> backward_on_gpu(const Tensor& g, const Tensor& x,
                                                            const Tensor& saved, const Tensor& count,
                                                            const std::optional<CollectivesPtr>& over) {
    static const auto sums =
        operation<decltype(bn_silu_cuda::backward_sums)>("yolox::bn_silu_cuda_backward_sums");
    static const auto norm =
        operation<decltype(bn_silu_cuda::backward_norm)>("yolox::bn_silu_cuda_backward_norm");
    const auto [both, d_weight, d_bias] = sums.call(g, x, saved);
    if (over) sync_bn_detail::all_reduce_once(both, *over);
    return {norm.call(g, x, saved, both, count), d_weight, d_bias};
  }
};

}  // namespace bn_silu_detail

torch::Tensor SyncBatchNorm2dImpl::forward(const torch::Tensor& x) { return sync_batch_norm(x, *this, over); }

torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2dImpl& bn, const CollectivesPtr& over) {
  const bool has_kernels =
      x.is_cpu() ? x.scalar_type() == torch::kFloat || x.scalar_type() == torch::kBFloat16
                 : x.is_cuda() && bn_silu_kernels::enabled && bn_silu_cuda::supports(x.scalar_type());
  const bool fused = has_kernels && bn.weight.scalar_type() == torch::kFloat && bn.is_training() &&
                     x.size(1) > 1 && (over || x.numel() > x.size(1)) &&
                     x.is_contiguous(torch::MemoryFormat::ChannelsLast);
  if (!fused) return torch::silu(sync_batch_norm(x, bn, over));
  bn.num_batches_tracked += 1;
  return bn_silu_detail::BnSilu::apply(x, bn.weight, bn.bias, bn.running_mean, bn.running_var,
                                       bn.options.momentum().value(), bn.options.eps(), over);
}

bool has_fused_norm() {
#ifdef YOLOX_FUSED_NORM
  return true;
#else
  return false;
#endif
}

void use_fused_norm(bool on) {
  TORCH_CHECK(!on || has_fused_norm(),
              "this program has no fused norm kernels, because nvcc was not found when it was built");
  bn_silu_kernels::enabled = on;
}

}  // namespace yolox
