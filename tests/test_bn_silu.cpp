// SPDX-License-Identifier: Apache-2.0
#include "layers/bn_silu.hpp"

#include "tensors.hpp"

using namespace yolox;
using torch::Tensor;

namespace {
torch::nn::BatchNorm2d norm(int channels) {
  torch::manual_seed(4);
  torch::nn::BatchNorm2d bn(torch::nn::BatchNorm2dOptions(channels).eps(1e-3).momentum(0.03));
  torch::NoGradGuard no_grad;
  bn->weight.normal_();
  bn->bias.normal_();
  bn->running_mean.normal_();
  bn->running_var.uniform_(0.5, 2);
  return bn;
}

using Result = std::vector<Tensor>;  // y, dx, dw, db, mean, variance
// The gradient of the output is rounded to the type of the input.
Result run_bn(const Tensor& input, bool fused, bool training, torch::ScalarType dtype) {
  auto bn = norm(int(input.size(1)));
  bn->to(dtype == torch::kBFloat16 ? torch::kFloat : dtype);
  bn->train(training);
  const Tensor x = input.to(dtype).detach().clone().set_requires_grad(true);
  const Tensor y = fused ? bn_silu(x, *bn) : torch::silu(bn(x));
  torch::manual_seed(9);
  y.backward(torch::randn(y.sizes()).to(input.scalar_type()).to(dtype));
  return {y, x.grad(), bn->weight.grad(), bn->bias.grad(), bn->running_mean, bn->running_var};
}
void check_equal(const Result& a, const Result& b, double tolerance) {
  for (size_t i = 0; i < a.size(); ++i) {
    INFO(i);
    CHECK(relative_error(a[i], b[i]) < tolerance);
  }
}
}  // namespace

TEST_CASE("bn_silu: output, gradients and statistics equal batch norm and SiLU in float64") {
  torch::manual_seed(2);
  // A mean far from zero must not reduce the precision of the variance.
  for (const double offset : {0.0, 300.0})
    for (const auto& shape :
         {std::vector<int64_t>{2, 16, 40, 33}, {3, 5, 7, 9}, {1, 640, 4, 3}, {2, 2, 300, 300}}) {
      const Tensor x = (torch::randn(shape) * 3 + offset).contiguous(torch::MemoryFormat::ChannelsLast);
      CAPTURE(shape[1]);
      CAPTURE(offset);
      check_equal(run_bn(x, true, true, torch::kFloat), run_bn(x, false, true, torch::kDouble),
                  offset == 0 ? 2e-6 : 2e-4);
    }
}

TEST_CASE("bn_silu: bfloat16 is rounded once, its statistics and sums are those of float32") {
  torch::manual_seed(2);
  for (const int64_t channels : {3, 16, 640}) {
    CAPTURE(channels);
    const Tensor x = (torch::randn({2, channels, 40, 33}) * 3 + 1)
                         .to(torch::kBFloat16)
                         .contiguous(torch::MemoryFormat::ChannelsLast);
    const Result got = run_bn(x, true, true, torch::kBFloat16),
                 exact = run_bn(x, false, true, torch::kDouble);
    CHECK(got[0].grad_fn()->name().find("BnSilu") != std::string::npos);
    for (const int i : {0, 1}) CHECK((got[i].scalar_type() == torch::kBFloat16));
    CHECK(
        ((got[0].to(torch::kDouble) - exact[0]).abs() <= exact[0].abs() * 0x1p-8 + 1e-5).all().item<bool>());
    CHECK(relative_error(got[1], exact[1]) < 0x1p-8);  // rounded twice
    for (size_t i = 2; i < got.size(); ++i) CHECK(relative_error(got[i], exact[i]) < 1e-5);
  }
}

TEST_CASE("bn_silu: evaluation, other memory formats and other types equal batch norm and SiLU of torch") {
  torch::manual_seed(2);
  const Tensor x = torch::randn({2, 6, 9, 5});
  for (const bool training : {false, true}) {
    check_equal(run_bn(x, true, training, torch::kFloat), run_bn(x, false, training, torch::kFloat), 1e-6);
    check_equal(run_bn(x, true, training, torch::kDouble), run_bn(x, false, training, torch::kDouble), 1e-12);
  }
  // The fused operation is used only in training, with channels-last input.
  auto bn = norm(6);
  const Tensor in_order = x.contiguous(torch::MemoryFormat::ChannelsLast).set_requires_grad(true);
  const auto is_fused = [&](const Tensor& x) {
    return bn_silu(x, *bn).grad_fn()->name().find("BnSilu") != std::string::npos;
  };
  const int64_t before = bn->num_batches_tracked.item<int64_t>();
  CHECK(is_fused(in_order));
  CHECK(bn->num_batches_tracked.item<int64_t>() == before + 1);
  CHECK_FALSE(is_fused(in_order.contiguous()));
  bn->eval();
  CHECK_FALSE(is_fused(in_order));
  CHECK(bn_silu(in_order, *bn).is_contiguous(torch::MemoryFormat::ChannelsLast));
}

TEST_CASE("bn_silu: results are bit-identical for any number of threads") {
  torch::manual_seed(2);
  const Tensor x = torch::randn({4, 24, 50, 41}).contiguous(torch::MemoryFormat::ChannelsLast);
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);
  const auto one = run_bn(x, true, true, torch::kFloat);
  torch::set_num_threads(3);
  const auto three = run_bn(x, true, true, torch::kFloat);
  torch::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) CHECK(torch::equal(one[i], three[i]));
}

TEST_CASE("bn_silu: large inputs saturate without NaN") {
  for (const auto type : {torch::kFloat, torch::kBFloat16}) {
    const Tensor nan = torch::full({1, 2, 2, 2}, NAN, type).contiguous(torch::MemoryFormat::ChannelsLast);
    CHECK(torch::isnan(bn_silu(nan, *norm(2))).all().item<bool>());
  }
  Tensor x = torch::zeros({1, 2, 2, 4}).contiguous(torch::MemoryFormat::ChannelsLast);
  x.select(3, 0).fill_(1e18f);
  CHECK(torch::isfinite(run_bn(x, true, true, torch::kFloat)[0]).all().item<bool>());
}
