// SPDX-License-Identifier: Apache-2.0
// Parallel loops on the CPU.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace yolox {

// Calls f(folder, is_v2) for the folder of each control group that limits this process: its own groups and
// their parents, of version 2, and of version 1 for a controller, such as "memory". In a container, the root
// of the mounted folder is its own group, whatever the kernel says. proc, cgroup: for tests.
template <class F>
void for_each_control_group(const std::string& controller, const F& f, const std::string& proc = "/proc",
                            const std::string& cgroup = "/sys/fs/cgroup") {
  const auto visit = [&](std::string path, bool v2) {
    for (;; path.erase(path.rfind('/'))) {
      f(cgroup + (v2 ? "" : "/" + controller) + path, v2);
      if (path.find('/') == std::string::npos) break;
    }
  };
  visit("/", true);
  visit("/", false);
  std::ifstream groups(proc + "/self/cgroup");  // lines NUMBER:CONTROLLERS:PATH; 0::PATH is of version 2
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    if (line.starts_with("0::")) visit(line.substr(second + 1), true);
    if (controllers.find("," + controller + ",") != std::string::npos) visit(line.substr(second + 1), false);
  }
}

// Returns the number of CPU cores that this process may use: those of its affinity mask, and no more than the
// CPU quotas of its control groups. proc, cgroup: for tests.
inline int usable_cores(const std::string& proc = "/proc", const std::string& cgroup = "/sys/fs/cgroup") {
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  double usable = cores;
  const auto respect = [&](const std::string& folder, bool v2) {
    double quota = 0, period = 0;
    std::ifstream max(folder + (v2 ? "/cpu.max" : "/cpu.cfs_quota_us"));  // "400000 100000", "max 100000"
    std::ifstream v1(folder + "/cpu.cfs_period_us");
    if (max >> quota && (v2 ? max : v1) >> period && quota > 0 && period > 0)  // version 1: -1 is no quota
      usable = std::min(usable, std::ceil(quota / period));
  };
  for_each_control_group("cpu", respect, proc, cgroup);
  return std::max(1, int(usable));
}

// Returns the number of threads for a data loader. workers: value of --workers; 0 means auto:
// usable_cores() / loaders, at least 1. loaders: number of data loaders on this machine. gpu: leaves up to
// two cores to the threads that launch the work of the GPU.
inline int loader_threads(int workers, int loaders = 1, bool gpu = false) {
  const int share = usable_cores() / loaders, launching = gpu ? std::min(2, share / 4) : 0;
  return workers > 0 ? workers : std::max(1, share - launching);
}

// Calls f(i) for every i from 0 to n - 1 on up to `max_threads` threads (0: one per core), and on fewer if
// the system refuses to create them. Rethrows the first exception of f after all threads have ended.
template <class F>
void parallel_for(int64_t n, const F& f, unsigned max_threads = 0) {
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  std::vector<std::thread> threads;
  const auto work = [&] {
    try {
      for (int64_t i; (i = next++) < n;) f(i);
    } catch (...) {
      std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = n;
    }
  };
  if (max_threads == 0) max_threads = unsigned(usable_cores());
  try {
    for (unsigned t = 1; t < max_threads && t < n; ++t) threads.emplace_back(work);
  } catch (const std::system_error&) {}
  work();
  for (auto& t : threads) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace yolox
