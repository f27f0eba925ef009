// Tensors in tests. Includes torch before doctest, since torch brings a CHECK macro of its own.
#pragma once
#include <torch/torch.h>
#undef CHECK

#include "common.hpp"

// A flat fixture file (str -> tensor, number or list), read by torch itself: independent of checkpoint.hpp.
inline c10::impl::GenericDict fixture(const std::string& name) {
  std::ifstream file(shared("fixtures/" + name), std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::pickle_load(bytes).toGenericDict();
}
inline torch::Tensor tensor(const c10::impl::GenericDict& d, const std::string& key) {
  REQUIRE_MESSAGE(d.contains(key), "fixture has no " << key);
  return d.at(key).toTensor();
}

// |a - b| / |b| over the whole tensor (L2), in double.
inline double relative_error(const torch::Tensor& a, const torch::Tensor& b) {
  const auto x = a.detach().to(torch::kDouble).flatten(), y = b.detach().to(torch::kDouble).flatten();
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

// How far two results in float32 may be apart. Kernels of another processor add in another order: four times
// what this one is from the same in float64 here, and 1e-5 at least.
inline double rounding(const torch::Tensor& single, const torch::Tensor& exact) {
  return std::max(1e-5, 4 * relative_error(single, exact));
}
