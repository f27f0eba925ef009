// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads of a step.
#include "tensors.hpp"

#include "base/device.hpp"
#include "base/threads.hpp"

using namespace yolox;

TEST_CASE("threads: the fastest number of threads computes, the smaller one if equal") {
  if (usable_cores() < 2) return;
  const AtEnd restored([before = torch::get_num_threads()] { torch::set_num_threads(before); });
  const Env none("OMP_NUM_THREADS", nullptr);
  int tried = 0;
  // costs: of a call with one thread, and with more
  const auto threads = [&](int before, double one, double several) {
    torch::set_num_threads(before);
    tried = 0;
    const int chosen = fastest_threads([&] {
      ++tried;
      return torch::get_num_threads() == 1 ? one : several;
    });
    CHECK(torch::get_num_threads() == chosen);
    return chosen;
  };
  CHECK(threads(2, 1, 2) == 1);
  CHECK(threads(2, 1, 1) == 1);
  CHECK(threads(2, 2, 1) == 2);
  CHECK(threads(usable_cores() + 3, 9, 1) == usable_cores());
  CHECK(threads(1, 9, 1) == 1);  // torch's number: logical cores of one physical core, MKL_NUM_THREADS
  for (const char* name : {"OMP_NUM_THREADS", "OMP_PLACES"}) {
    const Env given(name, "2");
    CHECK(threads(2, 1, 2) == 2);
    CHECK(tried == 0);
  }
}

TEST_CASE("threads: CPU quotas of control groups and of their parents limit the cores, in version 1 and 2") {
  const TempDir dir;
  const auto cores = [&] { return usable_cores(dir.path.string(), dir.path.string()); };
  const int all = cores();
  write_text(dir / "self/cgroup", "7:cpuset:/y\n5:cpu,cpuacct:/slurm/job_7\n0::/user/job_7\n");
  for (const std::string folder : {"cpu/slurm/job_7/", "cpu/slurm/", "cpu/", "user/job_7/", "user/", ""}) {
    const bool v1 = folder.starts_with("cpu");
    const std::string period = v1 ? "" : " 100000",
                      file = dir / (folder + (v1 ? "cpu.cfs_quota_us" : "cpu.max"));
    if (v1) write_text(dir / (folder + "cpu.cfs_period_us"), "100000\n");
    for (const std::string none : {"-1", "max"}) {
      write_text(file, none + period);
      CHECK(cores() == all);
    }
    write_text(file, "40000" + period);
    CHECK(cores() == 1);
    std::filesystem::remove(file);
  }
}
