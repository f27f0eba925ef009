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
#include "step.hpp"

namespace yolox {

// Each of its remarks comes once in a run.
class Watch {
 public:
  // from_scratch: the loss is expected to fall.
  explicit Watch(bool from_scratch) : from_scratch(from_scratch) {}

  // After a step.
  std::vector<std::string> step(const StepNumbers& n) {
    std::vector<std::string> remarks;
    without_positives = n.positives > 0 ? 0 : without_positives + 1;
    if (without_positives >= 100)
      say(remarks, said_positives,
          "no object had an anchor point for 100 steps: nothing is learnt; look at train_batch0.jpg: are "
          "there "
          "boxes, are they on the objects, is --size large enough for them?");
    if (steps < kFew) first += n.total / kFew;
    ++steps;
    latest += (n.total - latest) / std::min(double(kFew), double(steps));
    if (from_scratch && steps == kMany && !(latest < 0.98 * first))
      say(remarks, said_flat,
          concat("the loss is where it began, at ", latest, " after ", kMany,
                 " steps: check the labels (labels.jpg, train_batch0.jpg) and --lr"));
    return remarks;
  }
  // waited: seconds without data in an epoch, or since the start, of so many seconds.
  std::vector<std::string> wait(double waited, double seconds) {
    std::vector<std::string> remarks;
    if (seconds > 30 && waited > 0.5 * seconds)
      say(remarks, said_waiting,
          concat("half of the time and more goes by in waiting for images (", int(100 * waited / seconds),
                 " %): more --workers, --cache ram, or ./pack the data set"));
    return remarks;
  }
  // lr: per image. An --lr that was meant for the whole batch is 64 times too large.
  static std::string learning_rate(const std::string& optimizer, double lr, int64_t batch, bool fine_tuned) {
    const double usual = optimizer == "sgd" ? 0.01 / 64 : 0.001 / 64;
    if (lr <= 8 * usual && (fine_tuned || lr >= usual / 64)) return "";
    return concat("note: --lr ", lr, " is per image, which makes ", lr * double(batch), " for the batch of ",
                  batch, "; usual for ", optimizer, " is ", usual, ", which makes ", usual * double(batch));
  }

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
