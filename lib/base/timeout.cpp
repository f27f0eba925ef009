// SPDX-License-Identifier: Apache-2.0
#include "base/timeout.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/program.hpp"

namespace yolox {

static std::mutex timeout_mutex;
// Never destroyed, because the thread uses them until the process ends.
static std::string &timeout_process = *new std::string, &timeout_where = *new std::string;
static const char* timeout_remedy = nullptr;
static double timeout_seconds = 0, timeout_age = 0;  // age: seconds of run time since the last progress
static std::atomic<const char*> waited_for{nullptr};

[[noreturn]] static void end_after_timeout() {
  const char* waits_for = waited_for;
  const std::string_view what = waits_for ? waits_for : "";
  const bool for_ranks = what.ends_with("other ranks"), for_gpu = what.starts_with("the GPU");
  const std::string does = concat(
      what.empty() ? "it computes" : "it waits for ", what, for_ranks ? "; see the end of their output" : "",
      for_gpu ? "; if the GPU has failed, `dmesg` has a line with Xid, see docs/troubleshooting.md" : "");
  const std::string line =
      concat("error: ", timeout_process, " has been at ", timeout_where, " for ", int64_t(timeout_age), " s",
             timeout_remedy ? timeout_remedy : concat(" (--timeout): ", does), "\n");
  const int code = timeout_remedy ? kNcclFailed : for_ranks ? kLostRank : 1;
  _exit(write(2, line.data(), line.size()) > 0 ? code : 1);
}

void start_timeout(double seconds, const std::string& process, const char* nccl_remedy) {
  std::lock_guard lock(timeout_mutex);
  timeout_seconds = seconds;
  timeout_process = process;
  timeout_where.clear();
  timeout_remedy = nccl_remedy;
  static bool has_thread = false;
  if (std::exchange(has_thread, true)) return;
  std::thread([] {
    for (double before = now();;) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const double time = now();
      std::lock_guard lock(timeout_mutex);
      timeout_age += std::min(1.0, time - before);  // a longer interval means a suspended process
      before = time;
      if (!timeout_where.empty() && timeout_age >= timeout_seconds) end_after_timeout();
    }
  }).detach();
}

void made_progress(const std::string& where) {
  std::lock_guard lock(timeout_mutex);
  timeout_where = where;
  timeout_age = 0;
}

WaitsFor::WaitsFor(const char* what) : before(waited_for.exchange(what)) {}
WaitsFor::~WaitsFor() { waited_for = before; }

}  // namespace yolox
