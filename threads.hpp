// Work for all cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace yolox {

// f(i) for every i below n, from as many threads as there are cores. An exception of f comes out of it.
template <class F>
void in_threads(int64_t n, const F& f) {
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex mutex;
  std::vector<std::thread> threads;
  const auto work = [&] {
    try {
      for (int64_t i; (i = next++) < n;) f(i);
    } catch (...) {
      std::lock_guard lock(mutex);
      error = std::current_exception(), next = n;
    }
  };
  for (unsigned t = 1; t < std::max(1u, std::thread::hardware_concurrency()) && t < n; ++t)
    threads.emplace_back(work);
  work();
  for (auto& t : threads) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace yolox
