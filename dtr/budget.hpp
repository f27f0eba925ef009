// How much memory a step may take with --dtr: what was said, or what the device has left; and how that is
// measured, on the CPU and on a GPU.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "dtr/cost.hpp"
#include "dtr/dtr.hpp"

namespace yolox {

// --dtr auto. The budget follows what other programs leave: down at once, up in small parts, since what one
// has given back it may soon take again.
class AutomaticBudget {
 public:
  // Before each step. live: bytes that the device's allocator has given out; free: bytes that the device has
  // left beside, with a margin taken off; lacks: how often memory has run out all the same in the step
  // before, in fragments that an allocator cannot join, or because another program was quicker: then it is a
  // twentieth less, and carefully up again. Gives the budget of the step, bytes.
  double next(double live, double free, int64_t lacks) {
    if (lacks > 0)
      share *= 0.95, since_lack = 0;
    else if (++since_lack % 100 == 0)
      share = std::min(1.0, 1.02 * share);
    const double all = share * (live + std::max(0.0, free));
    return budget = budget == 0 || all < budget ? all : budget + 0.1 * (all - budget);
  }

 private:
  double budget = 0, share = 1;
  int64_t since_lack = 0;
};

// Before memory or a GPU is used. On a GPU, what is given back to torch's allocator in parts of all sizes is
// to fit together again, unless the user has set it up himself.
inline void prepare_for_dtr() {
  keep_freed_memory();
  if (!std::getenv("PYTORCH_ALLOC_CONF")) setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", 0);
}

// bytes: infinity: automatic; 0: DTR is off. ranks_here: that share the memory of the machine.
inline DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here) {
  DtrSettings s;
  if (bytes == 0) return s;
  if (device.is_cuda()) {
    s.used = [device] { return given_out(device); };
    s.device = device.type();
    const auto costs =
        std::make_shared<DeviceCosts>([device] { return std::make_unique<StreamMark>(device.type()); });
    s.cost = [costs](const auto& operation, auto given) { return (*costs)(operation, given); };
    s.min_size = 1 << 20;  // below, the allocator has pools of its own
  }
  if (std::isfinite(bytes)) {
    s.budget = bytes;
    return s;
  }
  const auto budget = std::make_shared<AutomaticBudget>();
  s.automatic = [budget, device, ranks_here](double live, int64_t lacks) {
    const double free = device.is_cpu() ? free_memory() / ranks_here : memory_budget(device) - live;
    return budget->next(live, free, lacks);
  };
  return s;
}

}  // namespace yolox
