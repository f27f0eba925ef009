// SPDX-License-Identifier: Apache-2.0
#include "run/profile.hpp"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>

#include "base/program.hpp"
#include "base/text.hpp"

namespace yolox {

namespace kineto = torch::autograd::profiler;

Profile::Profile(torch::Device device, int64_t warm_up, int64_t traced)
    : device(device), warm_up(warm_up), traced(traced) {
  // Otherwise torch with CUDA prints an error on a machine without a GPU, and its start and stop. Set it
  // here, before other threads read the environment.
  if (!device.is_cuda()) setenv("KINETO_LOG_LEVEL", "6", /*overwrite=*/0);
}

bool Profile::step() {
  if (++done == warm_up) {
    std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
    if (device.is_cuda()) {
      activities.insert(kineto::ActivityType::CUDA);
      torch::cuda::synchronize(device.index());
    }
    using Scope = at::RecordScope;
    const kineto::ProfilerConfig config(kineto::ProfilerState::KINETO);
    kineto::prepareProfiler(config, activities);
    kineto::enableProfiler(config, activities,
                           {Scope::FUNCTION, Scope::BACKWARD_FUNCTION, Scope::USER_SCOPE});
    recording = true;
    began = now();
  }
  return done >= steps();
}

std::vector<PartTime> Profile::stop(const std::string& path) {
  check(recording && done == steps(), "--profile needs ", steps(), " steps; this run has ", done);
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  const double ms_of_step = 1e3 * (now() - began) / double(traced), ms = 1e-6 / double(traced);
  recording = false;
  const auto result = kineto::disableProfiler();
  result->save(path);  // does not report errors
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t last = text.rfind("\"traceName\"");
  check(last != std::string::npos && text.find('}', last) != std::string::npos, "writing ", path,
        " failed; check folder, permissions and disk space");
  std::vector<PartTime> parts;
  for (const auto& e : result->events()) {  // in the order of their starts
    const auto named = [&](const PartTime& part) { return part.name == e.name(); };
    auto part = std::find_if(parts.begin(), parts.end(), named);
    if (e.scope() == uint8_t(at::RecordScope::USER_SCOPE)) {
      if (part == parts.end()) part = parts.insert(part, PartTime{e.name()});
      part->host += ms * double(e.durationNs());
    } else if (part != parts.end() && e.deviceType() != torch::kCPU) {
      // Kineto repeats each mark on the device, over the kernels that it launched.
      part->device += ms * double(e.durationNs());
    }
  }
  parts.push_back({"step", ms_of_step, device.is_cuda() ? ms_of_step : 0});
  return parts;
}

std::string profile_table(const std::vector<PartTime>& parts) {
  std::string table = formatted("%-12s %9s %9s %7s", "ms per step", "host", "GPU", "share");
  for (const PartTime& p : parts)
    table += formatted("\n%-12s %9.2f %9.2f %6.1f%%", p.name.c_str(), p.host, p.device,
                       100 * std::max(p.host, p.device) / parts.back().host);
  return table + "\na part includes the parts inside it; the profiler itself slows the host down";
}

}  // namespace yolox
