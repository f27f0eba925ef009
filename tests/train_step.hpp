// SPDX-License-Identifier: Apache-2.0
// The step of train.cpp for the tests: compute_gradients() and train_step().
#pragma once
#define YOLOX_WITHOUT_MAIN
#include "train.cpp"

namespace yolox::test {

// Uses deterministic algorithms in its scope.
struct Deterministic {
  Deterministic() { use_deterministic_algorithms(); }
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(false, false);
    at::globalContext().setDeterministicCuDNN(false);
  }
};

}  // namespace yolox::test
