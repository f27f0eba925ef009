// SPDX-License-Identifier: Apache-2.0
// Remarks: notes in the log if the statistics of the training steps look wrong.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "run/numbers.hpp"

namespace yolox {

// Checks the statistics of a run. Every member function returns lines for the log. Each remark is made at
// most once in a run.
class Remarks {
 public:
  // from_scratch: training does not start from weights, so that the loss must fall.
  explicit Remarks(bool from_scratch) : from_scratch(from_scratch) {}

  // Checks positives and loss after a step.
  std::vector<std::string> check_step(const StepNumbers& n);
  // Checks the time that training has waited for the data loader. waited: seconds of waiting in the last
  // `seconds` seconds.
  std::vector<std::string> check_waiting(double waited, double seconds);
  // Returns a note if the learning rate is unusual, or "".
  static std::string check_learning_rate(const std::string& optimizer, double lr, int64_t batch,
                                         bool fine_tuned);

 private:
  static constexpr int64_t kFew = 50, kMany = 1000;

  static void say(std::vector<std::string>& remarks, bool& said, const std::string& text) {
    if (!std::exchange(said, true)) remarks.push_back("note: " + text);
  }

  const bool from_scratch;
  int64_t without_positives = 0, steps = 0;
  double first = 0, latest = 0;
  bool noted_positives = false, noted_flat = false, noted_waiting = false;
};

}  // namespace yolox
