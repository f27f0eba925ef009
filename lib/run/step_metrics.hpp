// SPDX-License-Identifier: Apache-2.0
// The values of the Losses of a training step as numbers, their means over steps, and their way from the
// device to the host, which reads those of ten steps together, so that the GPU need not wait for the host.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/program.hpp"
#include "base/text.hpp"
#include "base/timeout.hpp"
#include "base/torch.hpp"
#include "dtr/dtr.hpp"
#include "loss.hpp"

namespace yolox {

// Statistics of one step, or means over several steps.
struct StepMetrics {
  using Kind = Losses::Kind;
  struct Value {
    std::string name;
    Kind kind;
    double value;
    int64_t steps = 1;  // number of steps that have the value
  };
  double total = 0;           // total loss
  std::vector<Value> values;  // those of Losses, and "grad_norm", the gradient norm before clipping

  // Returns the value with this name. Throws if there is none.
  double operator[](const std::string& name) const {
    const auto v = std::ranges::find(values, name, &Value::name);
    check(v != values.end(), "the step has no number ", name);
    return v->value;
  }
  bool finite() const { return std::isfinite(total) && std::isfinite((*this)["grad_norm"]); }
  // Returns the positives per object. A loss of another kind may have no such counts.
  double per_object() const {
    if (!std::ranges::count(values, "objects", &Value::name)) return 0;
    return (*this)["positives"] / std::max((*this)["objects"], 1e-9);
  }
};

// Returns text such as "iou 2.1, obj 1.3, cls 0.9, l1 0, positives 31, objects 9, grad_norm 12".
inline std::string to_string(const StepMetrics& n) {
  std::string text;
  for (const auto& v : n.values) text += concat(text.empty() ? "" : ", ", v.name, " ", v.value);
  return text;
}

// Accumulates means over steps. The mean of a logged value is that of the steps that have it. A term counts
// as 0 in the steps that do not have it, so that the terms add up to the total.
struct Means {
  StepMetrics sums;
  int64_t steps = 0;

  void add(const StepMetrics& n) {
    ++steps;
    sums.total += n.total;
    for (const auto& v : n.values) {  // by name, because a step may log a value that the step before did not
      const auto sum = std::ranges::find(sums.values, v.name, &StepMetrics::Value::name);
      if (sum == sums.values.end()) {
        sums.values.push_back(v);
        continue;
      }
      sum->value += v.value;
      ++sum->steps;
    }
  }
  // Returns the means over the steps since the last call; NaN if there was no step.
  StepMetrics take() {
    StepMetrics means = std::exchange(sums, {});
    const int64_t all = std::exchange(steps, 0);
    means.total /= double(all);
    for (auto& v : means.values) v.value /= double(v.kind == StepMetrics::Kind::kTerm ? all : v.steps);
    return means;
  }
};

// Returns why training cannot continue after this step, or "" if it can. A non-finite gradient alone does not
// stop a run, because fp16 training overflows now and then and skips such a step. `skipped` counts these
// steps in a row; 20 of them stop the run.
inline std::string stop_reason(const StepMetrics& n, int64_t& skipped) {
  skipped = n.finite() ? 0 : skipped + 1;
  if (!std::isfinite(n.total)) return "the loss is not finite";
  return skipped == 20 ? "the gradient was not finite 20 times in a row" : "";
}

// A step whose numbers have been read.
struct StepRow {
  int64_t step;
  double lr;
  DtrStep dtr;
  StepMetrics numbers;      // without values if backward() failed
  bool gpu_waited = false;  // the GPU had ended the step before when the last kernel of this one was launched
};

// The step after which training cannot continue.
struct StepFailed : std::runtime_error {
  StepFailed(const std::string& why, StepRow row) : std::runtime_error(why), row(std::move(row)) {}
  StepRow row;
};

// The numbers of the latest steps, on the device until they are read together.
class UnreadSteps {
 public:
  UnreadSteps(torch::Device device, bool alone) : device(device), alone(alone) {}

  // Adds a step whose kernels have been launched. Waits until the GPU has ended the step before the previous
  // one, because each step in advance needs the memory of its batch.
  void add(int64_t step, double lr, const DtrStep& dtr, const Losses& l) {
    const WaitsFor gpu(alone ? "the GPU" : "the GPU, or other ranks");
    StepRow row{step, lr, dtr, {}};
    std::vector<Tensor> all{l.total};
    for (const auto& v : l.values) {
      all.push_back(v.value.to(l.total.options()));  // float32 is exact for up to 16 million positives
      row.numbers.values.push_back({v.name, v.kind, 0});
    }
    rows.push_back(std::move(row));
    values.push_back(torch::stack(all));  // a copy, because a graph overwrites its results
    if (device.is_cpu()) return;
    ended.emplace_back(torch::kCUDA);
    ended.back().record(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(device));
    rows.back().gpu_waited = ended.size() > 1 && ended[ended.size() - 2].query();
    for (; ended.size() > 2; ended.pop_front())
      while (!ended.front().query()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  // Returns true if the host should read the numbers: after each step on the CPU, and on a GPU that takes
  // long for it, else after ten steps; with one rank also after a signal. slowest: seconds per step, the same
  // on all ranks.
  bool due(double slowest) const {
    return rows.size() >= (device.is_cpu() || slowest > 0.5 ? 1 : 10) || (alone && stop_signal);
  }

  // Waits for the steps and returns them with their numbers.
  std::vector<StepRow> read() {
    if (rows.empty()) return {};
    const WaitsFor gpu(alone ? "the GPU" : "the GPU, or other ranks");
    const Tensor read = torch::cat(values).to(torch::kCPU, torch::kDouble);
    const double* next = read.const_data_ptr<double>();
    for (StepRow& row : rows) {
      row.numbers.total = *next++;
      for (auto& v : row.numbers.values) v.value = *next++;
    }
    values.clear();
    step_seconds = (now() - std::exchange(last_read, now())) / double(rows.size());
    return std::exchange(rows, {});
  }

  double step_seconds = 1;  // seconds per step before the latest read()

 private:
  const torch::Device device;
  const bool alone;  // one rank
  double last_read = now();
  std::vector<StepRow> rows;
  std::vector<Tensor> values;    // [1 + values of the row], of each row
  std::deque<c10::Event> ended;  // the ends of the latest two steps, on a GPU
};

}  // namespace yolox
