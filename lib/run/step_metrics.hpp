// SPDX-License-Identifier: Apache-2.0
// The values of the Losses of a training step as numbers, their means over steps, the record of a step, and
// the way of the numbers from the device to the host. On a GPU, the numbers of a step are read while the next
// step runs, so that the GPU never waits for the host.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "data/batch.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "images/boxes.hpp"
#include "loss.hpp"
#include "optim.hpp"

namespace yolox {

// Statistics of one step, or means over several steps.
struct StepMetrics {
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
inline std::string to_string(const StepMetrics& n) {
  std::string text;
  for (const auto& v : n.values) text += concat(text.empty() ? "" : ", ", v.name, " ", v.value);
  return text;
}

// Accumulates means over steps. The mean of a logged value is that of the steps that have it. A term counts
// as 0 in the steps that do not have it, so that the terms add up to the total.
struct Means {
  StepMetrics sums;
  std::vector<int64_t> counts;  // number of steps that have the values of `sums`
  int64_t steps = 0;

  void add(const StepMetrics& n) {
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
  StepMetrics take() {
    StepMetrics means = std::exchange(sums, {});
    const std::vector<int64_t> of_value = std::exchange(counts, {});
    const auto all = double(std::exchange(steps, 0));
    means.total /= all;
    for (size_t k = 0; k < of_value.size(); ++k) {
      auto& v = means.values[k];
      v.value /= v.kind == StepMetrics::Kind::kTerm ? all : double(of_value[k]);
    }
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

// A step whose kernels have been launched.
struct StepRecord {
  int64_t step;
  Batch batch;
  double lr;
  ImageSize size;  // of the network input
  bool use_l1;     // the L1 loss was on
  DtrStep dtr;
  StepMetrics numbers;  // set by UnreadSteps::next(); without values if backward() failed
};

// The values of a step on their way to the host.
class PendingMetrics {
 public:
  // Starts the copy.
  PendingMetrics(const Losses& l) {
    std::vector<Tensor> all{l.total};
    for (const auto& v : l.values) {
      all.push_back(v.value.to(l.total.options()));  // float32 is exact for up to 16 million positives
      names.values.push_back({v.name, v.kind, 0});
    }
    const Tensor stacked = torch::stack(all);
    try {
      values = stacked.to(torch::kCPU, /*non_blocking=*/true);  // to pinned memory
    } catch (const c10::Error&) {  // WSL 2 has little pinned memory; this copy waits for the GPU
      values = stacked.to(torch::kCPU);
    }
    if (!l.total.is_cuda()) return;
    copied.emplace(torch::kCUDA);
    copied->record(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(l.total.device()));
  }
  // Waits for the copy and returns the numbers. Throws std::runtime_error if the device needs longer than
  // `seconds` of run time.
  StepMetrics read(double seconds = std::numeric_limits<double>::infinity()) const {
    double waited = 0;
    for (double last = now(); copied && !copied->query();) {
      check(waited < seconds, "the GPU has not ended this step within ", seconds,
            " s (--timeout), so it has probably "
            "failed; look for Xid in `dmesg`, and see docs/troubleshooting.md");
      std::this_thread::sleep_for(std::chrono::duration<double>(1e-4));
      const double time = now();
      waited += std::min(time - last, 1.0);  // the time in which this process is suspended does not count
      last = time;
    }
    const Tensor read = values.to(torch::kDouble);
    const double* next = read.data_ptr<double>();
    StepMetrics numbers = names;
    numbers.total = *next++;
    for (auto& v : numbers.values) v.value = *next++;
    return numbers;
  }

 private:
  StepMetrics names;  // without the values
  Tensor values;
  std::optional<c10::Event> copied;
};

// The steps whose numbers are not read yet.
class UnreadSteps {
 public:
  // timeout: of a step, in seconds. With several ranks the watchdog ends the run, and names the rank.
  UnreadSteps(const Ranks& ranks, double timeout)
      : timeout(ranks.alone() ? timeout : std::numeric_limits<double>::infinity()) {}

  void add(StepRecord record, PendingMetrics numbers) {
    steps.emplace_back(std::move(record), std::move(numbers));
  }
  // Returns the oldest step with its numbers. Returns nothing if all steps are read, or, unless `all`, if
  // only the latest step is unread and its numbers are on a GPU.
  std::optional<StepRecord> next(bool all) {
    if (steps.empty() || (steps.size() == 1 && !all && steps[0].first.batch.images.is_cuda())) return {};
    auto [record, numbers] = std::move(steps.front());
    steps.pop_front();
    record.numbers = numbers.read(timeout);
    return std::move(record);
  }

  StepGuard guard;

 private:
  const double timeout;
  std::deque<std::pair<StepRecord, PendingMetrics>> steps;
};

}  // namespace yolox
