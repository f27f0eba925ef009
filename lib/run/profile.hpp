// SPDX-License-Identifier: Apache-2.0
// Profiling of training steps (--profile) with torch's profiler (Kineto). The code marks the parts of a step
// with torch's macro
//   RECORD_USER_SCOPE("forward");  // to the end of the block; once per block, as it declares a variable
// which costs tens of nanoseconds without a profiler.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace yolox {

// Milliseconds per step of a part of the step, with the parts inside it.
struct PartTime {
  std::string name;
  double host = 0;    // of the threads that ran the part
  double device = 0;  // from the first to the last kernel that the part launched; 0 on the CPU
};

// Records steps of the calling thread and of autograd's threads.
class Profile {
 public:
  // warm_up: steps before the recording, in which caches are filled and algorithms chosen; at least 1.
  // traced: recorded steps, 2 to 4 MB each in the trace.
  static constexpr int64_t kWarmUp = 3, kTraced = 10;
  explicit Profile(torch::Device device, int64_t warm_up = kWarmUp, int64_t traced = kTraced);

  int64_t steps() const { return warm_up + traced; }
  // Call it after each step. Returns true after the last one.
  bool step();
  // Writes the trace, for https://ui.perfetto.dev. Returns the parts in the order of their first start, and
  // then "step". Throws if a step is missing, or the file cannot be written.
  std::vector<PartTime> stop(const std::string& path);

 private:
  const torch::Device device;
  const int64_t warm_up, traced;
  int64_t done = 0;        // steps
  bool recording = false;  // torch's profiler is on
  double began = 0;        // start of the recording, in seconds
};

// Returns the times and the share of each part as text, without a newline at the end.
std::string profile_table(const std::vector<PartTime>& parts);

}  // namespace yolox
