// SPDX-License-Identifier: Apache-2.0
// Settings and numbers of one step.
#pragma once
#include <cstdint>
#include <string>

#include "data/batch.hpp"
#include "dtr/dtr.hpp"
#include "images/boxes.hpp"
#include "run/numbers.hpp"

namespace yolox {

// A step whose kernels have been launched.
struct StepRecord {
  int64_t step;
  Batch batch;
  double lr;
  ImageSize size;       // of the network input
  bool use_l1;          // the L1 loss was on
  std::string anomaly;  // message of torch's anomaly mode, or ""
  DtrStep dtr;
  StepNumbers numbers;  // set by UnreadSteps::next()
};

}  // namespace yolox
