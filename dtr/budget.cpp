// SPDX-License-Identifier: Apache-2.0
#include "dtr/budget.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

#include "base/memory.hpp"
#include "dtr/cost.hpp"

namespace yolox {

double AutomaticBudget::next(double live, double free, int64_t out_of_memory) {
  if (out_of_memory > 0) {
    share *= 0.95;
    steps_since_oom = 0;
  } else if (++steps_since_oom % 100 == 0)
    share = std::min(1.0, 1.02 * share);
  const double all = share * (live + std::max(0.0, free));
  return budget = budget == 0 || all < budget ? all : budget + 0.1 * (all - budget);
}

DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here) {
  DtrSettings s;
  if (bytes == 0) return s;
  if (device.is_cuda()) {
    s.used = [device] { return allocated_bytes(device); };
    s.device = device.type();
    const auto costs =
        std::make_shared<DeviceCosts>([device] { return std::make_unique<StreamEvent>(device.type()); });
    s.cost = [costs](const auto& operation, auto given) { return (*costs)(operation, given); };
    s.min_size = 1 << 20;  // the allocator has separate pools for smaller blocks
  }
  if (std::isfinite(bytes)) {
    s.budget = bytes;
    return s;
  }
  const auto budget = std::make_shared<AutomaticBudget>();
  s.automatic = [budget, device, ranks_here](double live, int64_t out_of_memory) {
    const double free = device.is_cpu() ? free_memory() / ranks_here : memory_budget(device) - live;
    return budget->next(live, free, out_of_memory);
  };
  return s;
}

}  // namespace yolox
