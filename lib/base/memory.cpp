// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"

#include <malloc.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <new>

#include "base/text.hpp"
#include "base/threads.hpp"

namespace yolox {

// Returns the number after the word `name`, the first number of the file if `name` is empty, or `otherwise`.
static double number(const std::string& path, const std::string& name, double otherwise) {
  std::ifstream file(path);
  std::string word;
  double value;
  while (word != name && file >> word) continue;
  return word == name && file >> value ? value : otherwise;
}

double free_memory(const std::string& proc, const std::string& cgroup) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double all = 1024 * number(proc + "/meminfo", "MemTotal:", 0);
  double free = 1024 * number(proc + "/meminfo", "MemAvailable:", infinity) - 0.1 * all;
  const auto respect = [&](const std::string& folder, bool v2) {
    const double limit = number(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), "", infinity);
    if (limit >= 1e18 || (all > 0 && limit > all)) return;  // this group has no limit
    const double used = number(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), "", 0);
    const double files = number(folder + "/memory.stat", v2 ? "file" : "total_cache", 0);
    const double shared = number(folder + "/memory.stat", v2 ? "shmem" : "total_shmem", 0);
    // The kernel reclaims pages of files when memory runs out, except those of tmpfs (shmem).
    free = std::min(free, 0.9 * limit - used + files - shared);
  };
  for_each_control_group("memory", respect, proc, cgroup);
  return std::max(0.0, free);
}

double resident_bytes() { return 1024 * number("/proc/self/status", "RssAnon:", 0); }

double peak_bytes() { return 1024 * number("/proc/self/status", "VmHWM:", 0); }

void keep_freed_memory() {
  rlimit space;
  const bool limited = getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY;
  mallopt(limited ? M_MMAP_THRESHOLD : M_MMAP_MAX, limited ? 1 << 20 : 0);
  if (limited) return;
  mallopt(M_TOP_PAD, 64 << 20);
  mallopt(M_TRIM_THRESHOLD, -1);
}

void return_freed_memory() { malloc_trim(0); }

bool is_out_of_memory(const std::exception& e) {
  const std::string what = e.what();
  for (const char* words :
       {"out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "ALLOCATION_FAILED",
        "cudaErrorMemoryAllocation", "unable to find an engine to execute"})
    if (what.find(words) != std::string::npos) return true;
  // oneDNN does not name the cause. These errors do not occur while memory is left.
  for (const char* whole :
       {"could not create a primitive", "could not create a memory object", "could not execute a primitive"})
    if (what == whole) return true;
  return dynamic_cast<const std::bad_alloc*>(&e) != nullptr;
}

}  // namespace yolox
