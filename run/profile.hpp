// Where the time of a training step goes. The parts of a step are marked in the code with torch's own
//   RECORD_USER_SCOPE("forward");  // to the end of the block, and once in a block: it is a variable
// which takes tens of nanoseconds while nobody listens. Profile listens for some steps and makes a table of
// them, then has torch record a few more with all their operators, as a Chrome trace. These are apart, since
// recording thousands of operators takes time of its own, which the table would show.
//
// On a GPU the host runs ahead of the device. For the table it waits at both ends of every part, so that
// times belong to the part that caused them; nothing overlaps then, such as the next batch's copy, and steps
// are slower than those of a plain run. The steps of the trace are as in a plain run: nothing waits.
#pragma once
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "run/log.hpp"

namespace yolox {

// One line of the table.
struct PartTime {
  std::string name;
  double mean, median;  // seconds a step; a step without this part has 0
  double share;         // of the whole step, 0..1
  double calls;         // a step
};

// Lives on the thread that trains: marks on other threads are not counted, nor are those that torch makes
// itself for what goes on beside that thread.
struct Profile {
  // Steps: so many to warm up (the first ones fill caches and choose algorithms), so many for the table, so
  // many for the trace, where each is 2 to 4 MB in the file.
  explicit Profile(torch::Device device, int64_t warm_up = 3, int64_t measured = 20, int64_t traced = 3);
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  int64_t steps() const { return warm_up + measured + traced; }

  // The first step begins.
  void start();

  // A step ends, and the next one begins. True at the end of the last one.
  bool step();

  // The parts in the order in which they first began, then "other", what is in none, and last "step", the
  // whole, to which all the others add up. Time in a part within a part counts for the inner one alone.
  // Throws before the end of the first step that is measured.
  std::vector<PartTime> times() const;

  // The same as text, in milliseconds, and the speed. images: in a step. Does not end in a new line.
  std::string table(int64_t images) const;

  // Ends listening and tracing; the trace is for chrome://tracing and https://ui.perfetto.dev. Throws when
  // there is none, or when it cannot be written.
  void stop_and_write(const std::string& path);

  std::function<void()> wait;  // until the device has done what was asked of it; empty where there is no need

 private:
  struct Part {
    std::string name;
    std::vector<double> seconds;  // of every step that has ended
    int64_t calls = 0;            // in those
    double current = 0;           // seconds in the step that goes on
    int64_t current_calls = 0;

    void end_step();
    double sum() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
    double median() const;
  };
  struct Mark {
    const at::RecordFunction* mark;
    size_t part;
  };

  void next_phase();

  // Time since the last look goes to the innermost part.
  void charge();

  void enter(const at::RecordFunction& mark);

  // A mark may end after listening has, and one that began in another profile ends here unknown.
  void leave(const at::RecordFunction& mark);

  // Torch hands the callbacks of a thread on to those that compute its gradients: there `listener` is null.
  void start_listening();
  void stop_listening();

  void start_tracing();
  // What was traced; null when nothing was.
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> stop_tracing();

  inline static thread_local Profile* listener = nullptr;

  const torch::Device device;
  const int64_t warm_up, measured, traced;
  int64_t done = -1;                         // steps since start(); -1: not started, or stopped
  std::optional<at::CallbackHandle> handle;  // while listening
  bool tracing = false;
  std::vector<Part> parts;  // "other" first
  std::vector<Mark> open;   // outermost first
  double looked_at = 0;     // seconds
};

}  // namespace yolox
