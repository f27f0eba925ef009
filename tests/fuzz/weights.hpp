// SPDX-License-Identifier: Apache-2.0
// Shared by the fuzzers of weights: loading of the value that a reader returned into a module.
#pragma once
#include <torch/torch.h>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/pth.hpp"
#include "fuzz.hpp"

namespace yolox::fuzz {

// Finds the weights in `value` and loads them into a small module. path: for error messages.
inline void to_module(const c10::IValue& value, const std::string& path) {
  weights_info(value, path);
  const auto weights = find_weights(value, path);
  static torch::nn::Sequential module(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 1)),
                                      torch::nn::BatchNorm2d(4));
  to_string(load_state_dict(*module, weights, path));
}

}  // namespace yolox::fuzz
