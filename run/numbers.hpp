// SPDX-License-Identifier: Apache-2.0
// The values of the Losses of a training step as numbers, their means over steps, and the record of a step.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "data/batch.hpp"
#include "dtr/dtr.hpp"
#include "images/boxes.hpp"
#include "losses.hpp"

namespace yolox {

// Statistics of one step, or means over several steps.
struct StepNumbers {
  using Kind = Losses::Kind;
  struct Value {
    std::string name;
    Kind kind;
    double value;
  };
  double total = 0;           // total loss
  std::vector<Value> values;  // those of Losses, and "grad_norm", the gradient norm before clipping

  // Returns the value with this name; 0 if there is none.
  double operator[](const std::string& name) const {
    for (const Value& v : values)
      if (v.name == name) return v.value;
    return 0;
  }
  // Returns the names and values of a kind.
  std::vector<std::pair<std::string, double>> all(Kind kind) const {
    std::vector<std::pair<std::string, double>> out;
    for (const Value& v : values)
      if (v.kind == kind) out.emplace_back(v.name, v.value);
    return out;
  }
  bool finite() const { return std::isfinite(total) && std::isfinite((*this)["grad_norm"]); }
  double per_object() const { return (*this)["positives"] / std::max((*this)["objects"], 1e-9); }
};

// Returns text such as "iou 2.1, obj 1.3, cls 0.9, l1 0, positives 31, objects 9, grad_norm 12".
inline std::string to_string(const StepNumbers& n) {
  std::string text;
  for (const auto& v : n.values) text += concat(text.empty() ? "" : ", ", v.name, " ", v.value);
  return text;
}

// Accumulates means over steps. The mean of a value is that of the steps that have it.
struct Means {
  StepNumbers sums;
  std::vector<int64_t> counts;  // number of steps that have the values of `sums`
  int64_t steps = 0;

  void add(const StepNumbers& n) {
    sums.total += n.total;
    for (const auto& v : n.values) {  // by name, because a step may log a value that the step before did not
      const auto same = [&](const auto& sum) { return sum.name == v.name; };
      auto sum = std::find_if(sums.values.begin(), sums.values.end(), same);
      if (sum == sums.values.end()) {
        sum = sums.values.insert(sum, {v.name, v.kind, 0});
        counts.push_back(0);
      }
      sum->value += v.value;
      ++counts[size_t(sum - sums.values.begin())];
    }
    ++steps;
  }
  // Returns the means over the steps since the last call; NaN if there was no step.
  StepNumbers take() {
    StepNumbers means = std::exchange(sums, {});
    const std::vector<int64_t> of_value = std::exchange(counts, {});
    means.total /= double(std::exchange(steps, 0));
    for (size_t k = 0; k < of_value.size(); ++k) means.values[k].value /= double(of_value[k]);
    return means;
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
