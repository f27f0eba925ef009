// SPDX-License-Identifier: Apache-2.0
// Helpers for tests with tensors. Includes torch before doctest, because torch defines a CHECK macro too.
#pragma once
#undef CHECK

#include <torch/serialize.h>

#include "base/torch.hpp"
#include "common.hpp"

#ifdef YOLOX_SIMULATED_CUDA
#include "simulated_cuda.hpp"
constexpr bool kSimulated = true;  // the GPU is the one of tests/simulated_cuda
#else
constexpr bool kSimulated = false;
#endif
inline const doctest::skip needs_gpu(!torch::cuda::is_available());
inline const doctest::skip needs_real_gpu(!torch::cuda::is_available() || kSimulated);

// Cases on a GPU. Those of this process fail at their end if the simulated device found an error in the use
// of streams.
struct NoStreamErrors {
#ifdef YOLOX_SIMULATED_CUDA
  NoStreamErrors() { simulated_cuda::errors(); }
  ~NoStreamErrors() {
    for (const auto& error : simulated_cuda::errors()) FAIL_CHECK(error);
  }
#endif
};
#define GPU_TEST(name) TEST_CASE_FIXTURE(NoStreamErrors, name* needs_gpu)
#define GPU_PROGRAM_TEST(name) PROGRAM_TEST(name* needs_gpu)

// Reads a fixture file, a dict of str -> tensor, number or list. Uses the reader of torch, so that the tests
// do not depend on checkpoint.hpp.
inline c10::impl::GenericDict fixture(const std::string& name) {
  std::ifstream file(shared("fixtures/" + name), std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::pickle_load(bytes).toGenericDict();
}
inline torch::Tensor tensor(const c10::impl::GenericDict& d, const std::string& key) {
  REQUIRE_MESSAGE(d.contains(key), "fixture has no " << key);
  return d.at(key).toTensor();
}

// Returns |a - b| / |b|, L2 norms over the whole tensors, in float64.
inline double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().to(torch::kDouble).flatten(), y = b.detach().to(torch::kDouble).flatten();
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

// Returns the largest relative_error() of the tensors.
inline double largest_error(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, relative_error(a[i], b[i]));
  return largest;
}

// Returns the tolerance for the relative error of a float32 result: 4 times the error of `single` against the
// float64 result `exact`, and at least 1e-5. Kernels of another processor add in another order, so their
// errors differ.
inline double rounding_tolerance(const torch::Tensor& single, const torch::Tensor& exact) {
  return std::max(1e-5, 4 * relative_error(single, exact));
}
