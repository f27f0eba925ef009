// SPDX-License-Identifier: Apache-2.0
// Profiling of training steps (--profile). The code marks the parts of a step with torch's macro
//   RECORD_USER_SCOPE("forward");  // to the end of the block; once per block, as it declares a variable
// which costs tens of nanoseconds without a profiler. Profile measures the parts of some steps for a table.
// Then torch records all operators of a few more steps as a Chrome trace. The two phases are separate,
// because recording thousands of operators takes time that the table would include.
//
// On a GPU the host runs ahead of the device. For the table, Profile synchronises with the device at both
// ends of every part, so that the time belongs to the right part. Without overlap, such as the copy of the
// next batch, these steps are slower than those of a plain run. The traced steps have no such
// synchronisation.
#pragma once
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace yolox {

// One line of the table.
struct PartTime {
  std::string name;
  double mean, median;  // seconds per step; 0 in a step without this part
  double share;         // fraction of the step time, 0..1
  double calls;         // calls per step
};

// Measures the marks of the thread that calls it, the training thread. Marks on other threads and
// asynchronous marks of torch do not count.
struct Profile {
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

  // Returns the times of the parts in the order of their first start, then "other" (time outside of all
  // parts), then "step" (the sum). The time of a nested part counts only for the inner part. Throws if no
  // measured step has ended.
  std::vector<PartTime> times() const;

  // Returns times() as text in milliseconds, with the images per second. images: batch size. The text does
  // not end with a newline.
  std::string table(int64_t images) const;

  // Ends the profile and writes the trace, for chrome://tracing or https://ui.perfetto.dev. Throws if no step
  // was traced or the file cannot be written.
  void stop_and_write(const std::string& path);

  std::function<void()> synchronize;  // synchronises with the device; empty on the CPU

 private:
  struct Part {
    std::string name;
    std::vector<double> seconds;  // for each step that has ended
    int64_t calls = 0;            // in all these steps
    double current = 0;           // seconds in the current step
    int64_t current_calls = 0;    // calls in the current step

    void end_step();
    double sum() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
    double median() const;
  };
  struct Mark {
    const at::RecordFunction* mark;
    size_t part;
  };

  void next_phase();

  // Adds the time since the last call to the innermost open part.
  void charge_elapsed();

  void enter(const at::RecordFunction& mark);

  // A mark of which enter() was not called is ignored. It began in another profile or before
  // start_listening().
  void leave(const at::RecordFunction& mark);

  // Installs and removes the callbacks. torch also installs the callbacks of a thread on its autograd
  // threads, where `listener` is null.
  void start_listening();
  void stop_listening();

  void start_tracing();
  // Returns the trace, or null if nothing was traced.
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> stop_tracing();

  inline static thread_local Profile* listener = nullptr;

  const torch::Device device;
  const int64_t warm_up, measured, traced;
  int64_t done = -1;                         // steps since start(); -1: not started, or stopped
  std::optional<at::CallbackHandle> handle;  // set while the callbacks are installed
  bool tracing = false;
  std::vector<Part> parts;  // the first one is "other"
  std::vector<Mark> open;   // marks that have begun, outermost first
  double last_time = 0;     // time of the last charge_elapsed(), in seconds
};

}  // namespace yolox
