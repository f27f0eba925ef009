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
  explicit Profile(torch::Device device, int64_t warm_up = 3, int64_t measured = 20, int64_t traced = 3)
      : device(device), warm_up(warm_up), measured(measured), traced(traced) {
    if (device.is_cuda()) wait = [device] { torch::cuda::synchronize(device.index()); };
    // Else torch with CUDA prints an error where there is no GPU. Here, since threads may read what is set.
    if (!device.is_cuda() && traced > 0) setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
  }
  ~Profile() {
    stop_listening();
    try {
      stop_tracing();
    } catch (...) {}  // another error is on its way
  }
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  int64_t steps() const { return warm_up + measured + traced; }

  // The first step begins.
  void start() {
    done = 0;
    next_phase();
  }

  // A step ends, and the next one begins. True at the end of the last one.
  bool step() {
    check(done >= 0, "a step ended in a profile that was not started, or was stopped");
    if (handle) {
      charge();
      for (auto& part : parts) part.end_step();
    }
    ++done;
    next_phase();
    return done >= steps();
  }

  // The parts in the order in which they first began, then "other", what is in none, and last "step", the
  // whole, to which all the others add up. Time in a part within a part counts for the inner one alone.
  // Throws before the end of the first step that is measured.
  std::vector<PartTime> times() const {
    const size_t n = parts.empty() ? 0 : parts[0].seconds.size();
    check(n > 0, "no step was measured; there must be more than the ", warm_up, " that warm up");
    Part whole{"step", std::vector<double>(n), int64_t(n)};
    for (const auto& part : parts)
      for (size_t i = 0; i < n; ++i) whole.seconds[i] += part.seconds[i];
    const double total = whole.sum();
    std::vector<PartTime> times;
    const auto add = [&](const Part& part) {
      times.push_back({part.name, part.sum() / n, part.median(), total > 0 ? part.sum() / total : 0,
                       double(part.calls) / n});
    };
    for (size_t k = 1; k < parts.size(); ++k)
      if (parts[k].calls > 0) add(parts[k]);  // not what began in an unfinished step
    add(parts[0]), add(whole);
    return times;
  }

  // The same as text, in milliseconds, and the speed. images: in a step. Does not end in a new line.
  std::string table(int64_t images) const {
    const auto rows = times();
    size_t width = 0;
    for (const auto& row : rows) width = std::max(width, row.name.size());
    char text[96];
    std::snprintf(text, sizeof text, "  %9s %9s %7s %6s\n", "ms/step", "median", "share", "calls");
    std::string table = std::string(width, ' ') + text;
    for (const auto& row : rows) {
      std::snprintf(text, sizeof text, "  %9.2f %9.2f %6.1f%% %6.4g\n", 1e3 * row.mean, 1e3 * row.median,
                    100 * row.share, row.calls);
      table += row.name + std::string(width - row.name.size(), ' ') + text;
    }
    std::snprintf(text, sizeof text, "%.1f images/s", images / rows.back().mean);
    return concat(table, text, ", mean of ", parts[0].seconds.size(), " steps of ", images, " images on ",
                  device.str(), wait ? "; faster when nothing waits for the device after each part" : "");
  }

  // Ends listening and tracing; the trace is for chrome://tracing and https://ui.perfetto.dev. Throws when
  // there is none, or when it cannot be written.
  void stop_and_write(const std::string& path) {
    done = -1;
    stop_listening();
    const auto trace = stop_tracing();
    check(trace != nullptr, "no step was traced for ", path, "; there must be more than the ", warm_up,
          " that warm up and the ", measured, " of the table");
    // Torch removes what is there, be it a device; does not say whether it could write; and what it left
    // unfinished does not end in a brace.
    namespace fs = std::filesystem;
    check(!fs::exists(path) || fs::is_regular_file(path), path, " is not a regular file; give another name");
    check(std::ofstream(path).good(), "cannot write ", path, "; check folder and rights");
    trace->save(path);
    std::ifstream file(path, std::ios::binary);
    char end = 0;
    for (int back = 1; back <= 4 && end != '}'; ++back) file.seekg(-back, std::ios::end), file.get(end);
    check(end == '}', "writing ", path, " failed; is the disk full?");
  }

  std::function<void()> wait;  // until the device has done what was asked of it; empty where there is no need

 private:
  struct Part {
    std::string name;
    std::vector<double> seconds;  // of every step that has ended
    int64_t calls = 0;            // in those
    double current = 0;           // seconds in the step that goes on
    int64_t current_calls = 0;

    void end_step() {
      seconds.push_back(current), calls += current_calls;
      current = 0, current_calls = 0;
    }
    double sum() const { return std::accumulate(seconds.begin(), seconds.end(), 0.0); }
    double median() const {
      auto sorted = seconds;
      std::sort(sorted.begin(), sorted.end());
      return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
    }
  };
  struct Mark {
    const at::RecordFunction* mark;
    size_t part;
  };

  void next_phase() {
    if (done == warm_up && measured > 0) start_listening();
    if (done == warm_up + measured) {
      stop_listening();
      if (traced > 0) start_tracing();
    }
  }

  // Time since the last look goes to the innermost part.
  void charge() {
    if (wait) wait();
    const double t = now();
    parts[open.empty() ? 0 : open.back().part].current += t - looked_at;
    looked_at = t;
  }

  void enter(const at::RecordFunction& mark) {
    charge();
    const std::string name = mark.name();
    size_t k = 0;
    while (k < parts.size() && parts[k].name != name) ++k;
    if (k == parts.size()) parts.push_back({name, std::vector<double>(parts[0].seconds.size())});
    ++parts[k].current_calls;
    open.push_back({&mark, k});
  }

  // A mark may end after listening has, and one that began in another profile ends here unknown.
  void leave(const at::RecordFunction& mark) {
    const auto it = std::find_if(open.begin(), open.end(), [&](const Mark& m) { return m.mark == &mark; });
    if (it == open.end()) return;
    charge();
    open.erase(it);
  }

  // Torch hands the callbacks of a thread on to those that compute its gradients: there `listener` is null.
  void start_listening() {
    check(!listener, "a profile listens on this thread already; stop it first");
    const auto began = [](const at::RecordFunction& mark) -> std::unique_ptr<at::ObserverContext> {
      // Asynchronous marks are those of collective operations, which end at any time and on any thread.
      if (listener && !mark.isAsync()) listener->enter(mark);
      return nullptr;
    };
    const auto ended = [](const at::RecordFunction& mark, at::ObserverContext*) {
      if (listener) listener->leave(mark);
    };
    parts = {{"other", {}}}, open.clear();
    handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(began, ended).scopes({at::RecordScope::USER_SCOPE}));
    listener = this;
    if (wait) wait();
    looked_at = now();
  }
  void stop_listening() {
    if (!handle) return;
    at::removeCallback(*handle);
    handle.reset();
    listener = nullptr;
  }

  void start_tracing() {
    namespace p = torch::autograd::profiler;
    std::set<p::ActivityType> activities{p::ActivityType::CPU};
    if (device.is_cuda()) activities.insert(p::ActivityType::CUDA);
    if (wait) wait();
    const p::ProfilerConfig config(p::ProfilerState::KINETO);
    p::prepareProfiler(config, activities);
    p::enableProfiler(
        config, activities,
        {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
    tracing = true;
  }
  // What was traced; null when nothing was.
  std::unique_ptr<torch::autograd::profiler::ProfilerResult> stop_tracing() {
    if (!tracing) return nullptr;
    tracing = false;
    if (wait) wait();
    return torch::autograd::profiler::disableProfiler();
  }

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
