// SPDX-License-Identifier: Apache-2.0
#include "layers/bn_silu.hpp"

#include "layers/bn_silu_cpu.hpp"

namespace yolox {

torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2d& bn, const CollectivesPtr& over) {
  return bn_silu_detail::apply(x, bn, over);
}

}  // namespace yolox
