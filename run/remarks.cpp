// SPDX-License-Identifier: Apache-2.0
#include "run/remarks.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "optim.hpp"

namespace yolox {

std::vector<std::string> Remarks::check_step(const StepNumbers& n) {
  std::vector<std::string> remarks;
  without_positives = n["positives"] > 0 ? 0 : without_positives + 1;
  if (without_positives >= 100)
    say(remarks, noted_positives,
        "no object had a positive anchor point for 100 steps, so nothing is learnt; check in "
        "train_batch0.jpg that the boxes are on the objects, and that --size is large enough");
  if (steps < kFew) first += n.total / kFew;
  ++steps;
  latest += (n.total - latest) / std::min(double(kFew), double(steps));
  if (from_scratch && steps == kMany && !(latest < 0.98 * first))
    say(remarks, noted_flat,
        concat("the loss has not fallen in ", kMany, " steps and is ", latest,
               "; check the labels (labels.jpg, train_batch0.jpg) and --lr"));
  return remarks;
}

std::vector<std::string> Remarks::check_waiting(double waited, double seconds) {
  std::vector<std::string> remarks;
  if (seconds > 30 && waited > 0.5 * seconds)
    say(remarks, noted_waiting,
        concat("training waits for the data loader ", int(100 * waited / seconds),
               " % of the time; use more --workers, --cache ram, or ./pack the data set"));
  return remarks;
}

std::string Remarks::check_learning_rate(const std::string& optimizer, double lr, int64_t batch,
                                         bool fine_tuned) {
  const double usual = default_lr(optimizer, batch);
  if (lr <= 8 * usual && (fine_tuned || lr >= usual / 64)) return "";
  return concat("note: --lr ", lr, " is unusual; usual for ", optimizer, " and a batch of ", batch, " is ",
                usual);
}

}  // namespace yolox
