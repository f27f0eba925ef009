// SPDX-License-Identifier: Apache-2.0
// Batch norm followed by SiLU, with optional SyncBN, as one function.
//
// The programs of this repository compile it once, in bn_silu.cpp, because that takes 10 seconds. In another
// project it is header-only.
#pragma once
#include <torch/torch.h>

#include "layers/collectives.hpp"
#ifndef YOLOX_COMPILED_LAYERS
#include "layers/bn_silu_cpu.hpp"
#endif

namespace yolox {

// Returns silu(bn(x)). x: [B, C, H, W]. Updates the running statistics in training mode. over: all-reduce for
// SyncBN in training mode; null: no SyncBN.
#ifdef YOLOX_COMPILED_LAYERS
torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2d& bn, const CollectivesPtr& over = {});
#else
inline torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2d& bn,
                             const CollectivesPtr& over = {}) {
  return bn_silu_detail::apply(x, bn, over);
}
#endif

}  // namespace yolox
