// What the fuzzers of weights share: from what a reader made of a file to a module that is filled with it.
#pragma once
#include <torch/torch.h>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/pth.hpp"
#include "fuzz.hpp"

namespace yolox::fuzz {

inline void to_module(const c10::IValue& value, const std::string& path) {
  weights_info(value, path);
  const auto weights = find_weights(value, path);
  static torch::nn::Sequential module(torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 4, 1)),
                                      torch::nn::BatchNorm2d(4));
  to_string(load_state_dict(*module, weights, path));
}

}  // namespace yolox::fuzz
