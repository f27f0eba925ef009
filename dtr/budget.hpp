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
  double next(double live, double free, int64_t lacks);

 private:
  double budget = 0, share = 1;
  int64_t since_lack = 0;
};

// Before memory or a GPU is used. On a GPU, what is given back to torch's allocator in parts of all sizes is
// to fit together again, unless the user has set it up himself.
void prepare_for_dtr();

// bytes: infinity: automatic; 0: DTR is off. ranks_here: that share the memory of the machine.
DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here);

}  // namespace yolox
