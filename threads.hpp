// Work for all cores.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace yolox {

// f(i) for every i below n, from `most` threads, as many as there are cores when 0; from fewer where there
// are no more to be had. The first exception of f comes out of it.
template <class F>
void in_threads(int64_t n, const F& f, unsigned most = 0) {
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
  if (most == 0) most = std::thread::hardware_concurrency();
  try {
    for (unsigned t = 1; t < most && t < n; ++t) threads.emplace_back(work);
  } catch (const std::system_error&) {}
  work();
  for (auto& t : threads) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace yolox
