// SPDX-License-Identifier: Apache-2.0
// The state of a generator of random numbers, as far as CUDA graphs use it.
#pragma once

namespace at {
struct CUDAGeneratorState {
  bool capturing_ = false;
};
}  // namespace at
