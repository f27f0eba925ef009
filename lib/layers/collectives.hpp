// SPDX-License-Identifier: Apache-2.0
// The collectives of SyncBN, as an argument of layers and operators.
#pragma once
#include <torch/custom_class.h>
#include <torch/torch.h>

#include <functional>
#include <utility>

namespace yolox {

struct SyncBnCollectives {
  // All-reduces a tensor (sum) in place.
  std::function<void(torch::Tensor&)> sum = {};
  // All-gathers x [n]. Returns [world size, n]. Called for tensors on a GPU only.
  std::function<torch::Tensor(const torch::Tensor&)> gather = {};
};

// SyncBnCollectives as a custom class of torch, so that operators accept it as an argument.
struct Collectives : torch::CustomClassHolder {
  explicit Collectives(SyncBnCollectives functions) : functions(std::move(functions)) {}
  const SyncBnCollectives functions;
};
// Null: no SyncBN.
using CollectivesPtr = c10::intrusive_ptr<Collectives>;

}  // namespace yolox
