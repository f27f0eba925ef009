// SPDX-License-Identifier: Apache-2.0
// The all-reduce of SyncBN, as an argument of layers and operators.
#pragma once
#include <torch/custom_class.h>
#include <torch/torch.h>

#include <functional>
#include <utility>

namespace yolox {

// The all-reduce (sum, in place) of SyncBN. A custom class of torch, so that operators accept it as an
// argument.
struct AllReduce : torch::CustomClassHolder {
  explicit AllReduce(std::function<void(torch::Tensor&)> sum) : sum(std::move(sum)) {}
  const std::function<void(torch::Tensor&)> sum;
};
// Null: no SyncBN.
using AllReducePtr = c10::intrusive_ptr<AllReduce>;

}  // namespace yolox
