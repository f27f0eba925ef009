// SPDX-License-Identifier: Apache-2.0
// Remarks: notes in the log if the statistics of the training steps look wrong.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "optim.hpp"
#include "run/numbers.hpp"

namespace yolox {

// Checks the statistics of a run. Every function returns a line for the log, or "". Each remark is made at
// most once in a run.
class Remarks {
 public:
  // from_scratch: training does not start from weights, so that the loss must fall.
  explicit Remarks(bool from_scratch) : from_scratch(from_scratch) {}

  // Checks positives and loss after a step.
  std::string check_step(const StepNumbers& n) {
    if (steps < kFew) first += n.total / kFew;
    ++steps;
    latest += (n.total - latest) / std::min(double(kFew), double(steps));
    without_positives = n["positives"] > 0 ? 0 : without_positives + 1;
    if (without_positives >= 100 && !std::exchange(noted_positives, true))
      return "note: no object had a positive anchor point for 100 steps, so nothing is learnt; check in "
             "train_batch0.jpg that the boxes are on the objects, and that --size is large enough";
    if (from_scratch && steps == kMany && !(latest < 0.98 * first))
      return concat("note: the loss has not fallen in ", kMany, " steps and is ", latest,
                    "; check the labels (labels.jpg, train_batch0.jpg) and --lr");
    return "";
  }

  // Checks the time that training has waited for the data loader. waited: seconds of waiting in the last
  // `seconds` seconds.
  std::string check_waiting(double waited, double seconds) {
    if (seconds <= 30 || waited <= 0.5 * seconds || std::exchange(noted_waiting, true)) return "";
    return concat("note: training waits for the data loader ", int(100 * waited / seconds),
                  " % of the time; use more --workers, --cache ram, or ./pack the data set");
  }

  // Checks whether the learning rate is unusual.
  static std::string check_learning_rate(const std::string& optimizer, double lr, int64_t batch,
                                         bool fine_tuned) {
    const double usual = default_lr(optimizer, batch);
    if (lr <= 8 * usual && (fine_tuned || lr >= usual / 64)) return "";
    return concat("note: --lr ", lr, " is unusual; usual for ", optimizer, " and a batch of ", batch, " is ",
                  usual);
  }

 private:
  static constexpr int64_t kFew = 50, kMany = 1000;

  const bool from_scratch;
  int64_t without_positives = 0, steps = 0;
  double first = 0, latest = 0;
  bool noted_positives = false, noted_waiting = false;
};

}  // namespace yolox
