// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads that compute a step.
#pragma once
#include <torch/torch.h>

#include <string>

#include "config.hpp"

namespace yolox {

// CPU seconds since an unknown start.
struct CpuSeconds {
  double machine = 0;  // of all programs, on the cores that this process may run on
  double process = 0;  // of all threads of this process
};

// Returns the CPU seconds until now. `machine` is 0 if proc/stat cannot be read. It leaves out programs with
// a lower priority than this process (nice), because the kernel gives them only what this process leaves.
CpuSeconds cpu_seconds(const std::string& proc = "/proc");

// Returns how many cores other programs have used on average between two times, or 0 if it is unknown.
double cores_of_others(const CpuSeconds& before, const CpuSeconds& after, double elapsed);

// Returns how many threads compute best beside other programs. With as many threads as cores, each step would
// wait for the thread whose core is busy, and the other programs would wait, too.
// cores: of the machine that this process may run on. most: with a CPU quota, fewer than `cores`. others: the
// number of cores that other programs use, on average. current: the present number of threads. It is kept
// unless the difference is an eighth of the cores, because each number needs its own compiled convolutions.
// It grows only if half of a core is free, so that it does not change all the time.
int threads_beside(double others, int cores, int most, int current);

// Returns the largest useful number of threads: the cores that this process may use, but not more than
// torch's number, which is smaller where two logical cores are one physical core.
int most_threads();

// Sets torch's number of threads before the first step, and follows the load of the machine.
class ComputeThreads {
 public:
  // image_flops: conv_flops() of the run. Selects one thread if it is below 0.1 GFLOPs, because dividing so
  // little work takes longer than the work. Otherwise selects at most as many threads as a CPU
  // quota allows. Leaves the number of threads alone on a GPU, with several ranks, and if a variable of
  // OpenMP sets threads or their cores. With --deterministic, the load of the machine has no influence,
  // because the order of additions depends on the number of threads.
  ComputeThreads(const Config& config, double image_flops, torch::Device device, int world);

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
