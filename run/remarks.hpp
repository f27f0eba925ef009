// Numbers of the steps: their means, and what looks wrong in them, said in plain words.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "run/numbers.hpp"

namespace yolox {

// Each of its remarks comes once in a run.
class Watch {
 public:
  // from_scratch: the loss is expected to fall.
  explicit Watch(bool from_scratch) : from_scratch(from_scratch) {}

  // After a step.
  std::vector<std::string> step(const StepNumbers& n);
  // waited: seconds without data in an epoch, or since the start, of so many seconds.
  std::vector<std::string> wait(double waited, double seconds);
  // lr: per image. An --lr that was meant for the whole batch is 64 times too large.
  static std::string learning_rate(const std::string& optimizer, double lr, int64_t batch, bool fine_tuned);

 private:
  static constexpr int64_t kFew = 50, kMany = 1000;

  static void say(std::vector<std::string>& remarks, bool& said, const std::string& text) {
    if (!std::exchange(said, true)) remarks.push_back("note: " + text);
  }

  const bool from_scratch;
  int64_t without_positives = 0, steps = 0;
  double first = 0, latest = 0;
  bool said_positives = false, said_flat = false, said_waiting = false;
};

}  // namespace yolox
