// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads of a step: small networks, and other programs on the same machine.
#include "programs.hpp"

#include "base/threads.hpp"
#include "models.hpp"
#include "run/compute_threads.hpp"

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
  // A container with a quota of 2 cores on a busy machine of 64
  CHECK(threads_beside(60, 64, 2, 2) == 2);
  CHECK(threads_beside(63, 64, 2, 2) == 1);
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
    const ComputeThreads set(config, model, {size, size}, torch::kCPU, world);
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
