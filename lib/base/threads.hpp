// SPDX-License-Identifier: Apache-2.0
// Parallel loops and worker threads on the CPU.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <fstream>
#include <mutex>
#include <stop_token>
#include <system_error>
#include <thread>
#include <vector>

#include "base/text.hpp"

namespace yolox {

// Returns the number of CPU cores that this process may use: those of its affinity mask, and no more than the
// CPU quota of its container (cgroup v2).
inline int usable_cores() {
  cpu_set_t set;
  const int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  double quota = 0, period = 0;
  std::ifstream limit("/sys/fs/cgroup/cpu.max");  // "400000 100000", or "max 100000"
  if (!(limit >> quota >> period) || period <= 0) return cores;
  return std::clamp(int(std::ceil(quota / period)), 1, cores);
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

// Starts n threads that call work(stop) with their std::stop_token. Throws if a thread cannot be created.
template <class Work>
void start_workers(std::vector<std::jthread>& workers, int n, const Work& work) {
  try {
    for (int i = 0; i < n; ++i) workers.emplace_back(work);
  } catch (const std::system_error& e) {
    for (std::jthread& w : workers) w.request_stop();  // all, before the first is joined
    fail("cannot start ", n, " threads (", e.what(), "); give fewer --workers");
  }
}

}  // namespace yolox
