// SPDX-License-Identifier: Apache-2.0
#include "base/threads.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>

namespace yolox {

int usable_cores() {
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  double quota = 0, period = 0;
  std::ifstream limit("/sys/fs/cgroup/cpu.max");  // "400000 100000", or "max 100000"
  if (!(limit >> quota >> period) || period <= 0) return cores;
  return std::clamp(int(std::ceil(quota / period)), 1, cores);
}

int loader_threads(int workers, int loaders, bool gpu) {
  const int share = usable_cores() / loaders, launching = gpu ? std::min(2, share / 4) : 0;
  return workers > 0 ? workers : std::max(1, share - launching);
}

}  // namespace yolox
