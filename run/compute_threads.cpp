// SPDX-License-Identifier: Apache-2.0
#include "run/compute_threads.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/program.hpp"
#include "base/threads.hpp"

namespace yolox {

// FLOPs of one image below which one thread computes. Measured on 2 cores with yolox-nano, tiny and s at 32
// to 224 pixels and batches of 2 to 64: one thread is up to 1.9 times as fast below it.
static constexpr double kSmallNetwork = 1e8;

static double seconds_of(const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); }

CpuSeconds cpu_seconds(const std::string& proc) {
  CpuSeconds all;
  rusage own;
  if (getrusage(RUSAGE_SELF, &own) == 0) all.process = seconds_of(own.ru_utime) + seconds_of(own.ru_stime);
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return all;
  const bool low_priority = getpriority(PRIO_PROCESS, 0) > 0;  // then its own time is in "nice"
  std::ifstream file(proc + "/stat");
  // Lines such as "cpu1 4705 356 584 3699 23 23 0 0 0 0": user, nice, system, idle, I/O wait, irq, soft irq
  for (std::string line, name; std::getline(file, line) && line.rfind("cpu", 0) == 0;) {
    std::istringstream in(line);
    double user, nice, system, idle, io, irq, soft_irq;
    if (!(in >> name >> user >> nice >> system >> idle >> io >> irq >> soft_irq) || name == "cpu") continue;
    const int core = std::atoi(name.c_str() + 3);
    if (core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &set))
      all.machine +=
          (user + (low_priority ? nice : 0) + system + irq + soft_irq) / double(sysconf(_SC_CLK_TCK));
  }
  return all;
}

double cores_of_others(const CpuSeconds& before, const CpuSeconds& after, double elapsed) {
  if (before.machine <= 0 || after.machine <= 0 || elapsed <= 0) return 0;
  return std::max(0.0, after.machine - before.machine - (after.process - before.process)) / elapsed;
}

int threads_beside(double others, int cores, int most, int current) {
  const auto threads = [&](double part) {
    return int(std::clamp(std::floor(cores - others + part), 1.0, double(most)));
  };
  // A core of which others use less than 3/4 still helps.
  const int wanted = std::clamp(current, threads(0.5), threads(0.75));
  return wanted == most || 8 * std::abs(wanted - current) >= most ? wanted : current;
}

int most_threads() { return std::min(usable_cores(), torch::get_num_threads()); }

ComputeThreads::ComputeThreads(const Config& config, double image_flops, torch::Device device, int world) {
  if (device.is_cuda() || world > 1) return;
  for (const char* name : {"OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
    if (std::getenv(name)) return;
  most = most_threads();
  cores = affinity_cores();
  const bool small = image_flops < kSmallNetwork;
  if (small || torch::get_num_threads() > most) torch::set_num_threads(small ? 1 : most);
  adapts = !small && !config.deterministic && most > 1;
  before = cpu_seconds();
  measured = now();
}

std::string ComputeThreads::adapt() {
  const double elapsed = now() - measured;
  if (!adapts || elapsed < 2) return "";
  const CpuSeconds latest = cpu_seconds();
  const double others = cores_of_others(before, latest, elapsed);
  before = latest;
  measured += elapsed;
  const int current = torch::get_num_threads();
  const int threads = threads_beside(others, cores, most, current);
  if (threads == current) return "";
  torch::set_num_threads(threads);
  if (noted || threads > current) return "";
  noted = true;
  return concat("note: other programs use the cores of this machine; while they do, training computes with ",
                threads, " of ", most, " threads; for equal bits in every run give --deterministic");
}

}  // namespace yolox
