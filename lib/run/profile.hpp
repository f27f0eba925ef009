// SPDX-License-Identifier: Apache-2.0
// Profiling of training steps (--profile) with torch's profiler (Kineto). The code marks the parts of a step
// with torch's macro
//   RECORD_USER_SCOPE("forward");  // to the end of the block; once per block, as it declares a variable
// which costs tens of nanoseconds without a profiler. Some steps record the marks alone, for a table. A few
// more record all operators, for a trace. Recording thousands of operators takes time that the table would
// include.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

namespace yolox {

// One line of the table, in milliseconds per step. A part includes the parts inside it.
struct PartTime {
  std::string name;
  double host = 0;    // of the threads that ran the part
  double device = 0;  // from the first to the last kernel that the part launched; 0 on the CPU
  double calls = 0;   // per step
};

// Records steps of the calling thread and of autograd's threads.
class Profile {
 public:
  // warm_up: steps before the measurement, in which caches are filled and algorithms chosen. measured: steps
  // of the table. traced: steps of the trace, 2 to 4 MB each in the file.
  explicit Profile(torch::Device device, int64_t warm_up = 3, int64_t measured = 20, int64_t traced = 3);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  int64_t steps() const { return warm_up + measured + traced; }

  // Starts the first step.
  void start();

  // Ends a step and starts the next one. Returns true after the last step.
  bool step();

  // Returns the parts in the order of their first start, then "step". Throws if the measured steps have not
  // ended.
  const std::vector<PartTime>& times() const;

  // Returns times() as text, with the images per second. images: batch size. The text does not end with a
  // newline.
  std::string table(int64_t images) const;

  // Ends the profile and writes the trace, for chrome://tracing or https://ui.perfetto.dev. Throws if no step
  // was traced or the file cannot be written.
  void write_trace(const std::string& path);

 private:
  void next_phase();
  void record(const std::unordered_set<at::RecordScope>& scopes);
  // Ends the measured steps and sums their marks.
  void measure();

  const torch::Device device;
  const int64_t warm_up, measured, traced;
  int64_t done = 0;        // steps since start()
  bool recording = false;  // torch's profiler is on
  double began = 0;        // start of the measured steps, in seconds
  std::vector<PartTime> parts;
};

}  // namespace yolox
