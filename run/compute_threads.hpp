// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads that compute a step.
#pragma once
#include <torch/torch.h>

#include <string>

#include "config.hpp"
#include "yolox.hpp"

namespace yolox {

// CPU seconds since an unknown start.
struct CpuSeconds {
  double machine = 0;  // of all programs, on the cores that this process may run on
  double process = 0;  // of all threads of this process
};

// Returns the CPU seconds until now. `machine` is 0 if /proc/stat cannot be read.
CpuSeconds cpu_seconds();

// Returns how many threads compute best beside other programs. With as many threads as cores, each step would
// wait for the thread whose core is busy, and the other programs would wait, too.
// cores: of the machine that this process may run on. most: with a CPU quota, fewer than `cores`. others: the
// number of cores that other programs use, on average. current: the present number of threads. It is kept
// unless the difference is an eighth of the cores, because each number needs its own compiled convolutions.
int threads_beside(double others, int cores, int most, int current);

// Sets torch's number of threads before the first step, and follows the load of the machine.
class ComputeThreads {
 public:
  // Selects one thread if the network needs less than 0.1 GFLOPs for an image of size `base`, because
  // dividing so little work takes longer than the work. Leaves the number of threads alone on a GPU, with
  // several ranks, and if OMP_NUM_THREADS is set. With --deterministic, the load of the machine has no
  // influence, because the order of additions depends on the number of threads.
  ComputeThreads(const Config& config, YOLOX& model, ImageSize base, torch::Device device, int world);

  // Follows the load of the machine, every 2 seconds. Call it between steps. Returns a note for the log when
  // the number becomes smaller for the first time, or "".
  std::string adapt();

 private:
  int cores = 1, most = 1;
  bool adapts = false, noted = false;
  double measured = 0;  // time of `before`
  CpuSeconds before;
};

}  // namespace yolox
