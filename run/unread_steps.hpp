// SPDX-License-Identifier: Apache-2.0
// Losses on their way from the device to the host. On a GPU, the numbers of a step are read while the next
// step runs, so that the GPU never waits for the host.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <chrono>
#include <deque>
#include <limits>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "ddp.hpp"
#include "losses.hpp"
#include "optim.hpp"
#include "run/numbers.hpp"

namespace yolox {

// The values of a step on their way to the host.
class PendingNumbers {
 public:
  // Starts the copy.
  PendingNumbers(const Losses& l) {
    std::vector<Tensor> all{l.total};
    for (const auto& v : l.values) {
      all.push_back(v.value.to(l.total.options()));  // float32 is exact for up to 16 million positives
      names.values.push_back({v.name, v.kind, 0});
    }
    values = torch::stack(all).to(torch::kCPU, /*non_blocking=*/true);  // to pinned memory
    if (!l.total.is_cuda()) return;
    copied.emplace(torch::kCUDA);
    copied->record(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(l.total.device()));
  }
  // Waits for the copy and returns the numbers. Throws std::runtime_error if the device needs longer than
  // `seconds` of run time.
  StepNumbers read(double seconds = std::numeric_limits<double>::infinity()) const {
    constexpr double kPause = 1e-4;
    for (double waited = 0; copied && !copied->query(); waited += kPause) {
      check(waited < seconds, "the GPU has not ended this step within ", seconds,
            " s (--timeout), so it has probably "
            "failed; look for Xid in `dmesg`, and see docs/troubleshooting.md");
      std::this_thread::sleep_for(std::chrono::duration<double>(kPause));
    }
    const Tensor read = values.to(torch::kDouble);
    const double* next = read.data_ptr<double>();
    StepNumbers numbers = names;
    numbers.total = *next++;
    for (auto& v : numbers.values) v.value = *next++;
    return numbers;
  }

 private:
  StepNumbers names;  // without the values
  Tensor values;
  std::optional<c10::Event> copied;
};

// The steps whose numbers are not read yet.
class UnreadSteps {
 public:
  // timeout: of a step, in seconds. With several ranks the watchdog ends the run, and names the rank.
  UnreadSteps(const Ranks& ranks, double timeout)
      : timeout(ranks.alone() ? timeout : std::numeric_limits<double>::infinity()) {}

  void add(StepRecord record, PendingNumbers numbers) {
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
  // Forgets all steps, because training goes back to a checkpoint.
  void reset() {
    steps.clear();
    guard.reset();
  }

  StepGuard guard;

 private:
  const double timeout;
  std::deque<std::pair<StepRecord, PendingNumbers>> steps;
};

}  // namespace yolox
