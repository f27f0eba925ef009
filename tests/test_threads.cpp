// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads of a step: small networks, and other programs on the same machine.
#include "programs.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/threads.hpp"
#include "models.hpp"
#include "run/compute_threads.hpp"
#include "run/progress.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

struct KeepThreads {
  const int before = torch::get_num_threads();
  ~KeepThreads() { torch::set_num_threads(before); }
};

}  // namespace

TEST_CASE("threads: a step uses the cores that other programs leave, at least one") {
  CHECK(threads_beside(0, 2, 2, 2) == 2);
  CHECK(threads_beside(0.7, 2, 2, 2) == 2);
  CHECK(threads_beside(1, 2, 2, 2) == 1);
  CHECK(threads_beside(9, 2, 2, 2) == 1);
  CHECK(threads_beside(0, 2, 2, 1) == 2);
  CHECK(threads_beside(16, 64, 64, 64) == 48);
  // Small differences change nothing, until all cores are free.
  CHECK(threads_beside(20, 64, 64, 48) == 48);
  CHECK(threads_beside(0, 64, 64, 60) == 64);
  // A load that is now above, now below 3/4 of a core does not change the number all the time.
  CHECK(threads_beside(0.8, 2, 2, 2) == 1);
  CHECK(threads_beside(0.7, 2, 2, 1) == 1);
  CHECK(threads_beside(0.4, 2, 2, 1) == 2);
  // A container with a quota of 2 cores on a busy machine of 64
  CHECK(threads_beside(60, 64, 2, 2) == 2);
  CHECK(threads_beside(63, 64, 2, 2) == 1);
  // Odd times
  CHECK(threads_beside(1e12, 64, 64, 64) == 1);
  CHECK(threads_beside(-1e12, 64, 64, 64) == 64);
}

TEST_CASE("threads: unknown times of the machine and programs of low priority count as no load") {
  const TempDir dir;
  const CpuSeconds unknown = cpu_seconds(dir.path.string());
  CHECK(unknown.machine == 0);
  CHECK(unknown.process > 0);
  const CpuSeconds known{100000, 10}, later{100006, 12};
  CHECK(cores_of_others(known, later, 2) == doctest::Approx(2));
  CHECK(cores_of_others({0, 10}, later, 2) == 0);  // /proc/stat could not be read, for want of a descriptor
  CHECK(cores_of_others(known, {0, 12}, 2) == 0);
  CHECK(cores_of_others(known, {100001, 12}, 2) == 0);  // a container whose /proc/stat lacks some cores
  CHECK(cores_of_others(known, later, 0) == 0);

  cpu_set_t set;
  REQUIRE(sched_getaffinity(0, sizeof set, &set) == 0);
  int core = 0;
  while (!CPU_ISSET(core, &set)) ++core;
  const double ticks = double(sysconf(_SC_CLK_TCK));
  const bool nice = getpriority(PRIO_PROCESS, 0) > 0;
  write_text(dir / "stat", concat("cpu  9 9 9 9 9 9 9 0 0 0\ncpu", core, " 100 1000 20 5000 7 3 4 8 0 0\ncpu",
                                  CPU_SETSIZE - 1, " 9 9 9 9 9 9 9 0 0 0\nintr 5\n"));
  CHECK(cpu_seconds(dir.path.string()).machine == doctest::Approx((nice ? 1127 : 127) / ticks));
  write_text(dir / "stat", "cpu  0 0\ncpu0 1\n");
  CHECK(cpu_seconds(dir.path.string()).machine == 0);
}

TEST_CASE("threads: the CPU time of the machine includes that of this process") {
  const CpuSeconds before = cpu_seconds();
  REQUIRE(before.machine > 0);
  volatile double x = 1;
  while (cpu_seconds().process - before.process < 0.5)
    for (int i = 0; i < 100000; ++i) x = x * 1.0000001;
  CHECK(cpu_seconds().machine - before.machine > 0.4);
}

TEST_CASE("threads: one thread computes small networks, in a run without other settings") {
  if (usable_cores() < 2) return;
  const KeepThreads keep;
  const Env none("OMP_NUM_THREADS", nullptr);
  Config config;
  YOLOX model = make_model("yolox-nano", 3);
  const auto threads = [&](int size, int world) {
    torch::set_num_threads(2);
    const ComputeThreads set(config, conv_flops(model, {size, size}), torch::kCPU, world);
    return torch::get_num_threads();
  };
  CHECK(threads(128, 1) == 1);
  CHECK(threads(416, 1) == 2);
  CHECK(threads(128, 2) == 2);  // the launcher has divided the cores
  config.deterministic = true;
  CHECK(threads(128, 1) == 1);  // the same in every run
  const Env given("OMP_NUM_THREADS", "2");
  CHECK(threads(128, 1) == 2);
}

TEST_CASE(
    "threads: at most the cores of a quota, at most torch's own number, and none if OpenMP places them") {
  if (usable_cores() < 2) return;
  const KeepThreads keep;
  const Env none("OMP_NUM_THREADS", nullptr);
  YOLOX model = make_model("yolox-nano", 3);
  const auto threads = [&](int before) {
    torch::set_num_threads(before);
    ComputeThreads set(Config(), conv_flops(model, {416, 416}), torch::kCPU, 1);
    return torch::get_num_threads();
  };
  CHECK(threads(usable_cores() + 3) == usable_cores());
  // The number of torch is below that of the cores: logical cores of one physical core, MKL_NUM_THREADS
  torch::set_num_threads(1);
  CHECK(most_threads() == 1);
  for (const char* name : {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"}) {
    const Env given(name, "x");
    CHECK(threads(usable_cores() + 3) == usable_cores() + 3);
  }
}

TEST_CASE("train: config.json has the number of threads that compute" * starts_programs) {
  const TempDir dir;
  const Outcome trained =
      shell(dir,
            "unset OMP_NUM_THREADS; $YOLOX_PROGRAMS/train --data shapes --model yolox-nano "
            "--size 64 --bs 8 --max-iters 1 --eval-interval 0 --out a");
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  CHECK(has(contents(dir / "a/config.json"), R"("threads":"1")"));
}

TEST_CASE("train: leaves cores to other programs, but not with --deterministic" * starts_programs) {
  if (usable_cores() < 2) return;
  const TempDir dir;
  const std::string note = "note: other programs use the cores of this machine";
  const auto train = [&](const std::string& flags) {
    return shell(
        dir,
        concat(
            "{ unset OMP_NUM_THREADS; for i in $(seq ", usable_cores(),
            "); do timeout 60 sh -c 'while :; do :; done' & busy=\"$busy $!\"; done; $YOLOX_PROGRAMS/train "
            "--data shapes --model yolox-nano --size 160 --bs 8 --max-iters 25 "
            "--eval-interval 0 ",
            flags, "; code=$?; kill $busy; (exit $code); }"));
  };
  const Outcome leaves = train("--out a");
  REQUIRE_MESSAGE(leaves.code == 0, leaves.err);
  CHECK(has(unwrapped(leaves.out), note));
  const Outcome keeps = train("--out b --deterministic");
  REQUIRE_MESSAGE(keeps.code == 0, keeps.err);
  CHECK_FALSE(has(unwrapped(keeps.out), note));
}
