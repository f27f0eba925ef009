// Batch normalisation followed by SiLU.
#pragma once
#include <torch/torch.h>

namespace yolox {

inline torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2d& bn) {
  return torch::silu(bn(x));
}

}  // namespace yolox
