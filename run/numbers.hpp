// SPDX-License-Identifier: Apache-2.0
// Statistics of a training step: loss and its terms, positives and gradient norm, and their means over steps.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace yolox {

// Statistics of one step, or means over several steps.
struct StepNumbers {
  using Values = std::vector<std::pair<std::string, double>>;  // names and values

  double total = 0;      // total loss
  Values terms;          // loss terms, in the order of Losses::terms
  double positives = 0;  // number of positive anchor points
  double norm = 0;       // gradient norm before clipping
  double objects = 0;    // number of ground truth boxes
  Values logged = {};    // what losses.log() has logged

  bool finite() const { return std::isfinite(total) && std::isfinite(norm); }
  double per_object() const { return positives / std::max(objects, 1e-9); }
};

// Returns text such as "iou 2.1, obj 1.3, cls 0.9, l1 0, gradient norm 12".
inline std::string to_string(const StepNumbers& n) {
  std::string text;
  for (const auto* list : {&n.terms, &n.logged})
    for (const auto& [name, value] : *list) text += concat(name, " ", value, ", ");
  return concat(text, "gradient norm ", n.norm);
}

// Accumulates means over steps.
struct Means {
  StepNumbers sums;
  int64_t steps = 0;

  void add(const StepNumbers& n) {
    sums.total += n.total;
    sums.positives += n.positives;
    sums.norm += n.norm;
    sums.objects += n.objects;
    add(sums.terms, n.terms);
    add(sums.logged, n.logged);
    ++steps;
  }
  // Returns the means over the steps since the last call; NaN if there was no step.
  StepNumbers take() {
    StepNumbers means = std::exchange(sums, {});
    const auto n = double(std::exchange(steps, 0));
    for (double* value : {&means.total, &means.positives, &means.norm, &means.objects}) *value /= n;
    for (auto* list : {&means.terms, &means.logged})
      for (auto& [_, value] : *list) value /= n;
    return means;
  }

 private:
  // By name, because a step may log a value that the step before did not.
  static void add(StepNumbers::Values& to, const StepNumbers::Values& values) {
    for (const auto& [name, value] : values) {
      const auto same = [&, &name = name](const auto& sum) { return sum.first == name; };
      auto sum = std::find_if(to.begin(), to.end(), same);
      if (sum == to.end()) sum = to.insert(to.end(), {name, 0});
      sum->second += value;
    }
  }
};

// Returns why training cannot continue after this step, or "" if it can. A non-finite gradient alone does not
// stop a run, because fp16 training overflows now and then and skips such a step. `skipped` counts these
// steps in a row; 20 of them stop the run.
inline std::string stop_reason(const StepNumbers& n, int64_t& skipped) {
  skipped = n.finite() ? 0 : skipped + 1;
  if (!std::isfinite(n.total)) return "the loss is not finite";
  return skipped == 20 ? "the gradient was not finite 20 times in a row" : "";
}

}  // namespace yolox
