// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of layers/bn_silu.cu in the emulation of emulated_cuda.hpp, compared with torch in
// float64.
#include "emulated_cuda.hpp"
#include "tensors.hpp"

// The program may contain the kernels for GPUs, too.
#define bn_silu_kernels emulated_bn_silu_kernels

namespace yolox::bn_silu_kernels {
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, int threads, void*, Arguments... arguments) {
  emulated_cuda::run(kernel, blocks, threads, arguments...);
}
}  // namespace yolox::bn_silu_kernels

#include "layers/bn_silu.cu"

using namespace yolox;
using namespace yolox::bn_silu_kernels;
using torch::Tensor;

namespace {

constexpr double kMomentum = 0.03, kEps = 1e-3;

float* floats(const Tensor& t) { return t.data_ptr<float>(); }

struct Layer {
  explicit Layer(int64_t channels)
      : weight(torch::randn({channels})),
        bias(torch::randn({channels})),
        mean(torch::randn({channels})),
        variance(torch::rand({channels}) + 0.5) {}
  Tensor weight, bias, mean, variance;  // the last two are the running statistics
};
struct Result {
  Tensor y, dx, d_weight, d_bias, mean, variance, saved;
};

// Runs forward and backward on several ranks. xs, gs: [rows, channels] of each rank. The results of the ranks
// are concatenated; gradients of weight and bias are added.
Result run_kernels(Layer layer, const std::vector<Tensor>& xs, const std::vector<Tensor>& gs, bool sync_bn) {
  layer.mean = layer.mean.clone();
  layer.variance = layer.variance.clone();
  const int channels = int(xs[0].size(1));
  const auto type = xs[0].scalar_type();
  const auto shape = [&](const Tensor& x) {
    return Shape{type == torch::kFloat  ? Type::float32
                 : type == torch::kHalf ? Type::float16
                                        : Type::bfloat16,
                 x.size(0), channels};
  };
  std::vector<Tensor> parts;
  for (const Tensor& x : xs) {
    parts.push_back(torch::full({parts_of(shape(x)), 2 * channels + 1}, NAN));
    moments(shape(x), x.data_ptr(), floats(parts.back()), nullptr);
    if (!sync_bn) continue;
    const Tensor merged = torch::full({1, 2 * channels + 1}, NAN);
    merge_moments(channels, floats(parts.back()), parts.back().size(0), floats(merged), nullptr);
    parts.back() = merged;
  }
  const Tensor all = torch::cat(parts);
  const Tensor saved = torch::full({4, channels}, NAN), count = torch::zeros({1}, torch::kDouble);
  finish_moments(channels, floats(all), all.size(0), floats(layer.weight), floats(layer.bias),
                 floats(layer.mean), floats(layer.variance), kMomentum, kEps, floats(saved),
                 count.data_ptr<double>(), nullptr);
  std::vector<Tensor> y, dx, sums, d_weight, d_bias;
  for (size_t i = 0; i < xs.size(); ++i) {
    y.push_back(torch::full_like(xs[i], NAN));
    normalise(shape(xs[i]), xs[i].data_ptr(), floats(saved), y.back().data_ptr(), nullptr);
    const Tensor some = torch::full({parts_of(shape(xs[i])), 2 * channels}, NAN);
    gradient_sums(shape(xs[i]), gs[i].data_ptr(), gs[i].stride(0), xs[i].data_ptr(), floats(saved),
                  floats(some), nullptr);
    sums.push_back(torch::full({2 * channels}, NAN));
    d_weight.push_back(torch::full({channels}, NAN));
    d_bias.push_back(torch::full({channels}, NAN));
    add_gradient_sums(channels, floats(some), some.size(0), floats(saved), floats(sums.back()),
                      floats(d_weight.back()), floats(d_bias.back()), nullptr);
  }
  const Tensor all_sums = torch::stack(sums).sum(0);
  for (size_t i = 0; i < xs.size(); ++i) {
    dx.push_back(torch::full_like(xs[i], NAN));
    gradient(shape(xs[i]), gs[i].data_ptr(), gs[i].stride(0), xs[i].data_ptr(), floats(saved),
             floats(all_sums), count.data_ptr<double>(), dx.back().data_ptr(), nullptr);
  }
  return {
      torch::cat(y),  torch::cat(dx), torch::stack(d_weight).sum(0), torch::stack(d_bias).sum(0), layer.mean,
      layer.variance, saved};
}

// The same with torch in float64.
Result run_torch(const Layer& layer, const Tensor& input, const Tensor& g) {
  const Tensor x = input.to(torch::kDouble).set_requires_grad(true);
  const Tensor weight = layer.weight.to(torch::kDouble).set_requires_grad(true);
  const Tensor bias = layer.bias.to(torch::kDouble).set_requires_grad(true);
  const Tensor mean = layer.mean.to(torch::kDouble), variance = layer.variance.to(torch::kDouble);
  const Tensor y =
      torch::silu(torch::batch_norm(x, weight, bias, mean, variance, true, kMomentum, kEps, false));
  y.backward(g.to(torch::kDouble));
  const Tensor inverse = (x.detach().var(0, false) + kEps).rsqrt();
  return {y.detach(),
          x.grad(),
          weight.grad(),
          bias.grad(),
          mean,
          variance,
          torch::stack({x.detach().mean(0), inverse, layer.weight * inverse, layer.bias.to(torch::kDouble)})};
}

// tolerance: of the matrices. Statistics and gradients of weight and bias are float32 for all types.
void check_equal(const Result& a, const Result& b, double tolerance, double float_tolerance) {
  for (const auto member : {&Result::y, &Result::dx}) CHECK(relative_error(a.*member, b.*member) < tolerance);
  for (const auto member :
       {&Result::saved, &Result::d_bias, &Result::d_weight, &Result::mean, &Result::variance})
    CHECK(relative_error(a.*member, b.*member) < float_tolerance);
}

double tolerance_of(torch::ScalarType type) {
  return type == torch::kFloat ? 2e-6 : type == torch::kHalf ? 1e-3 : 8e-3;
}
// Compares the kernels with torch, on one rank.
void check_kernels(const Layer& layer, const Tensor& x, const Tensor& g) {
  check_equal(run_kernels(layer, {x}, {g}, false), run_torch(layer, x, g), tolerance_of(x.scalar_type()),
              5e-6);
}

}  // namespace

TEST_CASE("bn_silu kernels: output, gradients and statistics equal batch norm and SiLU in float64") {
  torch::manual_seed(2);
  const std::vector<std::pair<int64_t, int64_t>> sizes{{9, 1},  {8, 80},   {7, 33},    {5, 3},     {777, 1},
                                                       {35, 3}, {999, 33}, {4097, 64}, {1234, 80}, {50, 520}};
  for (const auto type : {torch::kFloat, torch::kHalf, torch::kBFloat16})
    for (const auto& size : sizes) {
      INFO(type << ": " << size.first << " x " << size.second);
      const Layer layer(size.second);
      const Tensor x = torch::randn({size.first, size.second});
      check_kernels(layer, (x * 3 + 2).to(type), torch::randn_like(x).to(type));
    }
}

TEST_CASE("bn_silu kernels: a mean far from zero does not reduce the precision of the variance") {
  torch::manual_seed(2);
  const Layer layer(24);
  const Tensor g = torch::randn({3000, 24});
  Tensor x = torch::randn({3000, 24}) + 1000;
  x[0] = -1000;  // an outlier in the first row
  const Result result = run_kernels(layer, {x}, {g}, false), exact = run_torch(layer, x, g);
  CHECK(relative_error(result.saved[1], exact.saved[1]) < 1e-6);
  CHECK(relative_error(result.variance, exact.variance) < 1e-6);
  check_equal(result, exact, 2e-4, 2e-4);
}

TEST_CASE("bn_silu kernels: ranks with SyncBN, also one without images, equal one rank with all images") {
  torch::manual_seed(2);
  for (const auto type : {torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    CAPTURE(type);
    const Layer layer(40);
    const Tensor x = (torch::randn({1500, 40}) * 3 + 2).to(type), g = torch::randn({1500, 40}).to(type);
    const std::vector<int64_t> rows{1100, 0, 1, 399};
    const Result result = run_kernels(layer, x.split_with_sizes(rows), g.split_with_sizes(rows), true);
    check_equal(result, run_torch(layer, x, g), tolerance_of(type), 5e-6);
  }
}

TEST_CASE("bn_silu kernels: memory that is not aligned for vectors leads to the same results") {
  torch::manual_seed(2);
  const Layer layer(16);
  const auto shifted = [](const Tensor& t) {
    const Tensor memory = torch::empty({t.numel() + 1}, t.options());
    return memory.slice(0, 1).view(t.sizes()).copy_(t);
  };
  for (const auto type : {torch::kFloat, torch::kHalf}) {
    const auto random = [&] { return shifted(torch::randn({300, 16}).to(type)); };
    check_kernels(layer, random(), random());
  }
}

TEST_CASE("bn_silu kernels: the gradient may be a part of the channels of a larger tensor") {
  torch::manual_seed(2);
  const Layer layer(16);
  for (const int64_t first : {8, 3})  // with and without vectors
    for (const auto type : {torch::kFloat, torch::kHalf}) {
      const Tensor g = torch::randn({300, 40}).to(type).slice(1, first, first + 16);
      check_kernels(layer, torch::randn({300, 16}).to(type), g);
    }
}

TEST_CASE("bn_silu kernels: large inputs saturate, and NaN stays NaN") {
  const Layer layer(8);
  Tensor x = torch::zeros({40, 8});
  x[3].fill_(1e18f);
  const Result large = run_kernels(layer, {x}, {torch::ones_like(x)}, false);
  CHECK(torch::isfinite(large.y).all().item<bool>());
  CHECK(torch::isfinite(large.dx).all().item<bool>());
  x.fill_(0).select(1, 2)[7] = NAN;
  const Result nan = run_kernels(layer, {x}, {torch::ones_like(x)}, false);
  CHECK(torch::isnan(nan.y).sum(0).equal(torch::tensor({0, 0, 40, 0, 0, 0, 0, 0})));
  CHECK(torch::isnan(nan.variance).sum().item<int64_t>() == 1);
}
