// SPDX-License-Identifier: Apache-2.0
#include "run/profile.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>

#include "base/error.hpp"
#include "base/new_file.hpp"

namespace yolox {

Profile::Profile(torch::Device device, int64_t warm_up, int64_t measured, int64_t traced)
    : device(device), warm_up(warm_up), measured(measured), traced(traced) {
  if (device.is_cuda()) synchronize = [device] { torch::cuda::synchronize(device.index()); };
  // Otherwise torch with CUDA prints an error on a machine without a GPU. Set it here, before other threads
  // read the environment.
  if (!device.is_cuda() && traced > 0) setenv("KINETO_LOG_LEVEL", "5", /*overwrite=*/0);
}

Profile::~Profile() {
  stop_listening();
  try {
    stop_tracing();
  } catch (...) {}  // a destructor must not throw
}

void Profile::start() {
  done = 0;
  next_phase();
}

bool Profile::step() {
  check(done >= 0, "Profile::step() was called before start() or after stop_and_write()");
  if (handle) {
    charge_elapsed();
    for (auto& part : parts) part.end_step();
  }
  ++done;
  next_phase();
  return done >= steps();
}

std::vector<PartTime> Profile::times() const {
  const size_t n = parts.empty() ? 0 : parts[0].seconds.size();
  check(n > 0, "--profile needs more than ", warm_up, " steps; this run has ", std::max<int64_t>(0, done));
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
    if (parts[k].calls > 0) add(parts[k]);  // not a part that has begun in the unfinished step
  add(parts[0]);
  add(whole);
  return times;
}

std::string Profile::table(int64_t images) const {
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
                device.str(), synchronize ? "; a plain run, which synchronises less, is faster" : "");
}

void Profile::stop_and_write(const std::string& path) {
  done = -1;
  stop_listening();
  const auto trace = stop_tracing();
  check(trace != nullptr, "no step was traced for ", path, "; --profile needs more than ", warm_up + measured,
        " steps");
  // torch would delete any file at this path, even a device, and does not report write errors. A complete
  // trace ends with a brace.
  check(!is_irregular_file(path), path, " is not a regular file; give another name");
  check(std::ofstream(path).good(), "cannot write ", path, "; check folder, permissions and disk space");
  trace->save(path);
  std::ifstream file(path, std::ios::binary);
  char end = 0;
  for (int back = 1; back <= 4 && end != '}'; ++back) {
    file.seekg(-back, std::ios::end);
    file.get(end);
  }
  check(end == '}', "writing ", path, " failed; is the disk full?");
}

void Profile::Part::end_step() {
  seconds.push_back(current);
  calls += current_calls;
  current = 0;
  current_calls = 0;
}

double Profile::Part::median() const {
  auto sorted = seconds;
  std::sort(sorted.begin(), sorted.end());
  return (sorted[(sorted.size() - 1) / 2] + sorted[sorted.size() / 2]) / 2;
}

void Profile::next_phase() {
  if (done == warm_up && measured > 0) start_listening();
  if (done == warm_up + measured) {
    stop_listening();
    if (traced > 0) start_tracing();
  }
}

void Profile::charge_elapsed() {
  if (synchronize) synchronize();
  const double t = now();
  parts[open.empty() ? 0 : open.back().part].current += t - last_time;
  last_time = t;
}

void Profile::enter(const at::RecordFunction& mark) {
  charge_elapsed();
  const std::string name = mark.name();
  size_t k = 0;
  while (k < parts.size() && parts[k].name != name) ++k;
  if (k == parts.size()) parts.push_back({name, std::vector<double>(parts[0].seconds.size())});
  ++parts[k].current_calls;
  open.push_back({&mark, k});
}

void Profile::leave(const at::RecordFunction& mark) {
  const auto it = std::find_if(open.begin(), open.end(), [&](const Mark& m) { return m.mark == &mark; });
  if (it == open.end()) return;
  charge_elapsed();
  open.erase(it);
}

void Profile::start_listening() {
  check(!listener, "another Profile is already active on this thread; stop it first");
  const auto began = [](const at::RecordFunction& mark) -> std::unique_ptr<at::ObserverContext> {
    // Asynchronous marks belong to collectives and may end at any time on any thread.
    if (listener && !mark.isAsync()) listener->enter(mark);
    return nullptr;
  };
  const auto ended = [](const at::RecordFunction& mark, at::ObserverContext*) {
    if (listener) listener->leave(mark);
  };
  parts = {{"other", {}}};
  open.clear();
  handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(began, ended).scopes({at::RecordScope::USER_SCOPE}));
  listener = this;
  if (synchronize) synchronize();
  last_time = now();
}

void Profile::stop_listening() {
  if (!handle) return;
  at::removeCallback(*handle);
  handle.reset();
  listener = nullptr;
}

void Profile::start_tracing() {
  namespace p = torch::autograd::profiler;
  std::set<p::ActivityType> activities{p::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(p::ActivityType::CUDA);
  if (synchronize) synchronize();
  const p::ProfilerConfig config(p::ProfilerState::KINETO);
  p::prepareProfiler(config, activities);
  p::enableProfiler(
      config, activities,
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE});
  tracing = true;
}

std::unique_ptr<torch::autograd::profiler::ProfilerResult> Profile::stop_tracing() {
  if (!tracing) return nullptr;
  tracing = false;
  if (synchronize) synchronize();
  return torch::autograd::profiler::disableProfiler();
}

}  // namespace yolox
