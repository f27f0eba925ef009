// SPDX-License-Identifier: Apache-2.0
// The number of CPU threads of a step.
#include "programs.hpp"

#include "base/threads.hpp"
#include "models.hpp"
#include "run/progress.hpp"
#include "run/setup.hpp"

using namespace yolox;
using namespace yolox::test;

TEST_CASE("threads: one thread computes small networks, others have at most the usable cores") {
  if (usable_cores() < 2) return;
  const AtEnd restored([before = torch::get_num_threads()] { torch::set_num_threads(before); });
  const Env none("OMP_NUM_THREADS", nullptr);
  YOLOX model = make_model("yolox-nano", 3);
  const auto threads = [&](int before, int size, int world) {
    torch::set_num_threads(before);
    set_compute_threads(parameter_count(*model), {size, size}, torch::kCPU, world);
    return torch::get_num_threads();
  };
  CHECK(threads(2, 128, 1) == 1);
  CHECK(threads(2, 416, 1) == 2);
  CHECK(threads(2, 128, 2) == 2);  // the launcher has divided the cores
  CHECK(threads(usable_cores() + 3, 416, 1) == usable_cores());
  // The number of torch is below that of the cores: logical cores of one physical core, MKL_NUM_THREADS
  CHECK(threads(1, 416, 1) == 1);
  {
    const Env given("OMP_NUM_THREADS", "2");
    CHECK(threads(2, 128, 1) == 2);
  }
  const Env given("OMP_PLACES", "x");
  CHECK(threads(usable_cores() + 3, 416, 1) == usable_cores() + 3);
}

PROGRAM_TEST("train: config.json has the number of threads that compute") {
  const DataDir dir(8);
  const Outcome trained = shell(dir,
                                "unset OMP_NUM_THREADS; $YOLOX_PROGRAMS/train --data data --model yolox-nano "
                                "--size 64 --bs 8 --max-iters 1 --eval-interval 0 --out a");
  REQUIRE_MESSAGE(trained.code == 0, trained.err);
  CHECK(has(contents(dir / "a/config.json"), R"("threads":"1")"));
}
