// A step whose loss or gradient is not finite: saved for inspection, then the run ends, or resumes its last
// checkpoint (--keep-going).
#pragma once
#include <cstdint>
#include <string>

#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "run/numbers.hpp"
#include "run/run.hpp"

namespace yolox {

// A step, as it is saved when it fails.
struct StepRecord {
  int64_t step;
  const Batch& batch;
  const StepNumbers& numbers;
  double lr;
  ImageSize size;  // of the images in the network
  bool use_l1;
};

// Writes nonfinite.pth with batch, weights and numbers of a step, and nonfinite.jpg. Returns where they are,
// or why they could not be written.
std::string save_bad_step(const std::string& run, Training& t, const StepRecord& step, const Dataset& data,
                          int rank = 0);

class Recovery {
 public:
  Recovery(Run& run, Ranks& ranks) : run(run), ranks(ranks) {}

  // Returns why training cannot go on after this step, or "" if it can. A non-finite gradient alone skips its
  // step, unless 20 steps in a row have one. anomaly: what torch's anomaly mode found.
  std::string failure(const StepNumbers& numbers, const std::string& anomaly);
  // Saves the step. With --keep-going, resumes the last good checkpoint on all ranks at half the learning
  // rate, up to 3 times. Throws otherwise.
  void roll_back(Training& t, const std::string& why, const StepRecord& step);

 private:
  Run& run;
  Ranks& ranks;
  int64_t skipped = 0;  // steps in a row whose gradient was not finite
};

}  // namespace yolox
