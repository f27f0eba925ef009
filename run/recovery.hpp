// SPDX-License-Identifier: Apache-2.0
// Recovery from a step whose loss or gradient is not finite. The step is saved for inspection. Then the run
// ends, or continues from its last checkpoint (--keep-going).
#pragma once
#include <cstdint>
#include <string>

#include "data/dataset.hpp"
#include "run/run.hpp"
#include "run/step_record.hpp"

namespace yolox {

// Writes nonfinite.pth, with batch, weights and statistics of a step, and nonfinite.jpg. Returns a text with
// the paths of these files, or with the reason why they could not be written.
std::string save_failed_step(const std::string& run, Training& t, const StepRecord& step, const Dataset& data,
                             int rank = 0);

// Decides after each step whether training can continue, and goes back to a checkpoint if not.
class Recovery {
 public:
  Recovery(Run& run, Ranks& ranks) : run(run), ranks(ranks) {}

  // Returns why training cannot continue after this step, or "" if it can. A step with a non-finite gradient
  // is only skipped, unless it is the 20th in a row.
  std::string failure_reason(const StepRecord& step);
  // Saves the failed step. With --keep-going, loads the last good checkpoint on all ranks and halves the
  // learning rate, at most 3 times in a run. Throws otherwise.
  void roll_back(Training& t, const std::string& why, const StepRecord& step);

 private:
  Run& run;
  Ranks& ranks;
  int64_t skipped = 0;  // steps in a row whose gradient was not finite
};

}  // namespace yolox
