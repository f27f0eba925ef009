// SPDX-License-Identifier: Apache-2.0
#include "base/threads.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>

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

Tasks::Tasks(int threads, size_t max_waiting) : max_waiting(max_waiting) {
  start_workers(workers, threads, [this](const std::stop_token& stop) { work(stop); });
}

void Tasks::add(std::function<void()> task) {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return waiting.size() < max_waiting || error; });
  if (error) std::rethrow_exception(error);
  waiting.push_back(std::move(task));
  changed.notify_all();
}

void Tasks::finish() {
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return waiting.empty() && busy == 0; });
  if (error) std::rethrow_exception(error);
}

void Tasks::work(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, stop, [&] { return !waiting.empty(); });
    if (waiting.empty()) return;
    auto task = std::move(waiting.front());
    waiting.pop_front();
    ++busy;
    lock.unlock();
    std::exception_ptr failed;
    try {
      task();
    } catch (...) {
      failed = std::current_exception();
    }
    task = nullptr;  // destroys the captured objects before the mutex is locked
    lock.lock();
    if (failed && !error) error = failed;
    if (error) waiting.clear();
    --busy;
    changed.notify_all();
  }
}

}  // namespace yolox
