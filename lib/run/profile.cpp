// SPDX-License-Identifier: Apache-2.0
#include "run/profile.hpp"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "base/program.hpp"
#include "base/text.hpp"

namespace yolox {

namespace kineto = torch::autograd::profiler;

Profile::Profile(torch::Device device) : device(device) {
  // Otherwise torch with CUDA prints an error on a machine without a GPU, and its start and stop. Set it
  // here, before other threads read the environment.
  if (!device.is_cuda()) setenv("KINETO_LOG_LEVEL", "6", /*overwrite=*/0);
}

void Profile::step() {
  if (++done != kWarmUp) return;
  std::set<kineto::ActivityType> activities{kineto::ActivityType::CPU};
  if (device.is_cuda()) {
    activities.insert(kineto::ActivityType::CUDA);
    torch::cuda::synchronize(device.index());
  }
  using Scope = at::RecordScope;
  const kineto::ProfilerConfig config(kineto::ProfilerState::KINETO);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities, {Scope::FUNCTION, Scope::BACKWARD_FUNCTION, Scope::USER_SCOPE});
  began = now();
}

std::string Profile::stop(const std::string& path) {
  check(done == kWarmUp + kTraced, "--profile needs ", kWarmUp + kTraced, " steps; this run has ", done);
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  const double of_step = 1e3 * (now() - began) / double(kTraced), ms = 1e-6 / double(kTraced);
  const auto result = kineto::disableProfiler();
  result->save(path);  // does not report errors
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const size_t last = text.rfind("\"traceName\"");
  check(last != std::string::npos && text.find('}', last) != std::string::npos, "writing ", path,
        " failed; check folder, permissions and disk space");
  struct Part {
    std::string name;
    double host = 0, device = 0;  // milliseconds per step
  };
  std::vector<Part> parts;
  for (const auto& e : result->events()) {  // in the order of their starts
    auto part = std::ranges::find(parts, e.name(), &Part::name);
    if (e.scope() == uint8_t(at::RecordScope::USER_SCOPE)) {
      if (part == parts.end()) part = parts.insert(part, Part{e.name()});
      part->host += ms * double(e.durationNs());
    } else if (part != parts.end() && e.deviceType() != torch::kCPU) {
      // Kineto repeats each mark on the device, over the kernels that it launched.
      part->device += ms * double(e.durationNs());
    }
  }
  parts.push_back({"step", of_step, device.is_cuda() ? of_step : 0});
  std::string table = formatted("%-12s %9s %9s %7s", "ms per step", "host", "GPU", "share");
  for (const Part& p : parts)
    table += formatted("\n%-12s %9.2f %9.2f %6.1f%%", p.name.c_str(), p.host, p.device,
                       100 * std::max(p.host, p.device) / of_step);
  return concat(table, "\na part includes the parts inside it; the profiler itself slows the host down\n",
                "trace of these steps: ", path, ", for https://ui.perfetto.dev");
}

}  // namespace yolox
