// SPDX-License-Identifier: Apache-2.0
// The step of train.cpp for the tests: compute_gradients() and train_step().
#pragma once
#define YOLOX_WITHOUT_MAIN
#include "train.cpp"
