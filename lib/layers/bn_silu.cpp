// SPDX-License-Identifier: Apache-2.0
#include "layers/bn_silu.hpp"

#include "layers/bn_silu_cpu.hpp"

namespace yolox {

torch::Tensor SyncBatchNorm2dImpl::forward(const torch::Tensor& x) { return sync_batch_norm(x, *this, over); }

torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2dImpl& bn, const CollectivesPtr& over) {
  return bn_silu_detail::apply(x, bn, over);
}

}  // namespace yolox
