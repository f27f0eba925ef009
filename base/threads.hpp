// Work for all cores.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"

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

// n threads that do work(). Where there are not so many to be had, end() ends those that there are.
template <class Work, class End>
void start_workers(std::vector<std::thread>& workers, int n, const Work& work, const End& end) {
  try {
    for (int i = 0; i < n; ++i) workers.emplace_back(work);
  } catch (const std::system_error& e) {
    end();
    fail("cannot start ", n, " threads (", e.what(), "); give fewer --workers");
  }
}

// Work beside that of the caller: what is added is taken up in that order, so one thread does it in that
// order. At most `most` wait to be taken up. The first exception of a task comes out of the next add() or
// finish(), and what waits then is dropped.
class Tasks {
 public:
  Tasks(int threads, size_t most);
  ~Tasks() { end_workers(); }  // does what waits
  Tasks(const Tasks&) = delete;
  Tasks& operator=(const Tasks&) = delete;

  void add(std::function<void()> task);
  // Waits until all is done.
  void finish();

 private:
  void end_workers();
  void work();

  const size_t most;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  size_t busy = 0;
  bool stop = false;
  std::exception_ptr error;
  std::vector<std::thread> workers;
};

}  // namespace yolox
