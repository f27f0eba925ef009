// SPDX-License-Identifier: Apache-2.0
#include "run/profile.hpp"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>

#include "base/error.hpp"
#include "base/program.hpp"

namespace yolox {

namespace kineto = torch::autograd::profiler;

Profile::Profile(torch::Device device, int64_t warm_up, int64_t measured, int64_t traced)
    : device(device), warm_up(warm_up), measured(measured), traced(traced) {
  // Otherwise torch with CUDA prints an error on a machine without a GPU, and its start and stop. Set it
  // here, before other threads read the environment.
  if (!device.is_cuda()) setenv("KINETO_LOG_LEVEL", "6", /*overwrite=*/0);
}

Profile::~Profile() {
  try {
    if (recording) kineto::disableProfiler();
  } catch (...) {}  // a destructor must not throw
}

void Profile::start() {
  done = 0;
  parts.clear();
  next_phase();
}

bool Profile::step() {
  ++done;
  next_phase();
  return done >= steps();
}

void Profile::next_phase() {
  using Scope = at::RecordScope;
  if (done == warm_up) record({Scope::USER_SCOPE});
  if (done != warm_up + measured) return;
  measure();
  record({Scope::FUNCTION, Scope::BACKWARD_FUNCTION, Scope::USER_SCOPE});
}

void Profile::record(const std::unordered_set<at::RecordScope>& scopes) {
  std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
  if (device.is_cuda()) {
    activities.insert(kineto::ActivityType::CUDA);
    torch::cuda::synchronize(device.index());
  }
  const kineto::ProfilerConfig config(kineto::ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities, scopes);
  recording = true;
  began = now();
}

void Profile::measure() {
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  const double seconds = now() - began;
  recording = false;
  const auto result = kineto::disableProfiler();
  const double n = double(measured), ms = 1e-6 / n;
  for (const auto& e : result->events()) {  // in the order of their starts
    const auto named = [&](const PartTime& part) { return part.name == e.name(); };
    auto part = std::find_if(parts.begin(), parts.end(), named);
    if (e.scope() == uint8_t(at::RecordScope::USER_SCOPE)) {
      if (part == parts.end()) part = parts.insert(part, PartTime{e.name()});
      part->host += ms * double(e.durationNs());
      part->calls += 1 / n;
    } else if (part != parts.end() && e.deviceType() != torch::kCPU) {
      // Kineto repeats each mark on the device, over the kernels that it launched.
      part->device += ms * double(e.durationNs());
    }
  }
  parts.push_back({"step", 1e3 * seconds / n, device.is_cuda() ? 1e3 * seconds / n : 0, 1});
}

const std::vector<PartTime>& Profile::times() const {
  check(!parts.empty(), "--profile needs more than ", warm_up + measured, " steps; this run has ", done);
  return parts;
}

std::string Profile::table(int64_t images) const {
  const double step = times().back().host;
  size_t width = 0;
  for (const auto& part : parts) width = std::max(width, part.name.size());
  std::string table =
      std::string(width, ' ') + formatted("  %9s %9s %7s %6s\n", "host ms", "GPU ms", "share", "calls");
  for (const auto& part : parts) {
    const double most = std::max(part.host, part.device);
    table +=
        part.name + std::string(width - part.name.size(), ' ') +
        formatted("  %9.2f %9.2f %6.1f%% %6.4g\n", part.host, part.device, 100 * most / step, part.calls);
  }
  return concat(table, formatted("%.1f images/s", 1e3 * double(images) / step), ", mean of ", measured,
                " steps of ", images, " images on ", device.str(), "; a part includes the parts inside it");
}

void Profile::write_trace(const std::string& path) {
  check(recording && done > warm_up + measured, "no step was traced for ", path,
        "; --profile needs more than ", warm_up + measured, " steps");
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  recording = false;
  const auto trace = kineto::disableProfiler();
  trace->save(path);  // does not report errors
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t last = text.rfind("\"traceName\"");
  check(last != std::string::npos && text.find('}', last) != std::string::npos, "writing ", path,
        " failed; check folder, permissions and disk space");
}

}  // namespace yolox
