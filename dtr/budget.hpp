// SPDX-License-Identifier: Apache-2.0
// The memory budget of --dtr: the given number of bytes, or the free memory of the device (--dtr auto), and
// how used memory is measured on the CPU and on a GPU.
#pragma once
#include <torch/torch.h>
#include <cstdint>

#include "dtr/dtr.hpp"

namespace yolox {

// The budget of --dtr auto. It follows the memory that other programs leave free. It falls at once, and rises
// by 10 % of the difference per step, because a program that has freed memory may soon need it again.
class AutomaticBudget {
 public:
  // Returns the budget of the next step in bytes. live: bytes that the device's allocator has allocated.
  // free: bytes that are free on the device, minus a margin. out_of_memory: number of out-of-memory errors in
  // the previous step. These happen because of fragmentation, or because another program allocates at the
  // same time. After one, the budget is 5 % lower, and rises by 2 % after each 100 steps without one.
  double next(double live, double free, int64_t out_of_memory);

 private:
  double budget = 0, share = 1;
  int64_t steps_since_oom = 0;
};

// Returns the settings for --dtr. bytes: the budget; infinity: automatic; 0: DTR is off. ranks_here: number
// of ranks that share the memory of this machine.
DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here);

}  // namespace yolox
