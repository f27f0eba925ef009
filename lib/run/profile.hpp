// SPDX-License-Identifier: Apache-2.0
// Profiling of training steps (--profile) with torch's profiler (Kineto). The code marks the parts of a step
// with torch's macro
//   RECORD_USER_SCOPE("forward");  // to the end of the block; once per block, as it declares a variable
// which costs tens of nanoseconds without a profiler.
#pragma once
#include <ATen/record_function.h>

#include <cstdint>
#include <string>

#include "base/torch.hpp"

namespace yolox {

// Records steps of the calling thread and of autograd's threads.
class Profile {
 public:
  // Steps before the recording, in which caches are filled and algorithms chosen, and recorded steps, which
  // take 2 to 4 MB each in the trace.
  static constexpr int64_t kWarmUp = 3, kTraced = 10;
  explicit Profile(torch::Device device);

  // Call it after each step.
  void step();
  // Writes the trace, for https://ui.perfetto.dev. Returns a table, without a newline at the end:
  // milliseconds per step of each part, with the parts inside it, in the order of their first start, and then
  // of "step". The time on a GPU is that from the first to the last kernel that the part launched. Throws if
  // a step is missing, or the file cannot be written.
  std::string stop(const std::string& path);

 private:
  const torch::Device device;
  int64_t done = 0;  // steps
  double began = 0;  // start of the recording, in seconds
};

}  // namespace yolox
