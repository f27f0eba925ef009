// SPDX-License-Identifier: Apache-2.0
// ./train --gpus N: on the GPUs of this machine, or on simulated ones.
#include "gpu.hpp"
#include "models.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

constexpr const char* kTiny = " --data data --model yolox-nano --size 64 --bs 12 --no-multiscale --lr 1e-4 ";
const int kRanks = std::min(kGpus, 4);

std::string train(int gpus, const std::string& flags) {
  return concat("env SIMULATED_CUDA_DEVICES=4 NCCL_DEBUG=WARN $YOLOX_PROGRAMS/train --gpus ", gpus, " ",
                flags);
}

// Runs ./train, which must succeed. Returns what it has printed.
std::string trained(const TempDir& dir, int gpus, const std::string& flags) {
  const Outcome o = shell(dir, train(gpus, flags));
  REQUIRE_MESSAGE(o.code == 0, o.out << o.err);
  return o.out;
}

// ./train on all GPUs in the background, after its first step.
struct Endless {
  DataDir dir{12};
  Process process;
  std::vector<pid_t> ranks;

  explicit Endless(const std::string& flags)
      : process(dir, {train(kRanks, concat(kTiny, "--epochs 9999 --eval-interval 0 --out r ", flags))}) {
    REQUIRE_MESSAGE(process.until([&] { return has(contents(process.out), "epoch      iter"); }),
                    contents(process.err));
    ranks = children_of(process.pid);
  }
};

}  // namespace

#define SEVERAL_GPUS(name) PROGRAM_TEST(name* doctest::skip(!torch::cuda::is_available() || kGpus < 2))

SEVERAL_GPUS("gpu: ranks: --bs 16 --gpus N trains, and how fast") {
  DataDir dir(32);
  const std::string flags = concat(kSimulated ? " --data data --model yolox-nano --size 32 --max-iters 4 "
                                              : " --data data --model yolox-s --max-iters 40 ",
                                   "--bs ", 16 / kRanks * kRanks, " ");
  for (const auto& [name, gpus, more] :
       {std::tuple("plain", kRanks, ""), {"graph", kRanks, "--graph"}, {"one GPU", 1, "--graph"}}) {
    const double start = now();
    trained(dir, gpus, concat(flags, "--no-multiscale --eval-interval 0 --out '", name, "' ", more));
    const auto rows = metric_rows(dir / (std::string(name) + "/metrics.csv"));
    report_fact(concat("images per second, ", name),
                concat(rounded(rows.back()[kSpeed]), " on ", gpus, " GPUs; start to end ",
                       short_time(now() - start)));
  }
}

SEVERAL_GPUS("gpu: ranks: N GPUs compute the steps of one in float64, and the AP of one") {
  DataDir dir(12);
  const std::string flags =
      concat(kTiny, "--amp fp64 --conf 0 --nms 0.9 --warmup-epochs 0 --eval-interval 1 --epochs 3 --out ");
  trained(dir, 1, flags + "one");
  for (int gpus = 2; gpus <= kRanks; ++gpus) {
    const std::string several = concat("of", gpus);
    trained(dir, gpus, flags + several);
    const auto one = weights_of(dir, "one", false), all = weights_of(dir, several, false);
    double largest = 0;
    for (const auto& e : one)
      largest = std::max(largest, relative_error(all.at(e.key()).toTensor(), e.value().toTensor()));
    check_figure(concat("difference of the weights, ", gpus, " GPUs"), largest, 1e-9);
    CHECK(last_ap(dir, several) == doctest::Approx(last_ap(dir, "one")).epsilon(1e-6));
  }
}

SEVERAL_GPUS("gpu: ranks: after kill -9 of a rank the others end, also while graphs are replayed") {
  for (const std::string flags : {"", "--graph"}) {
    Endless run(flags);
    kill(run.ranks[1], SIGKILL);
    const double start = now();
    REQUIRE(run.process.ends());
    CHECK(now() - start < 20);
    CHECK(run.process.wait() == 128 + SIGKILL);
    for (const pid_t rank : run.ranks) CHECK(kill(rank, 0) != 0);
    CHECK_HAS(contents(run.process.err), "was killed by SIGKILL");
    CHECK_FALSE(has(contents(run.process.err), "SIGABRT"));
  }
}

SEVERAL_GPUS("gpu: ranks: SIGTERM saves, and fewer GPUs resume the run") {
  Endless run("--graph");
  kill(run.process.pid, SIGTERM);
  REQUIRE(run.process.ends());
  CHECK(run.process.wait() == 0);
  const int64_t steps = steps_of(run.dir);
  CHECK(steps > 0);
  trained(run.dir, kRanks / 2, concat("--resume r --max-iters ", steps + 2));
  CHECK(steps_of(run.dir) == steps + 2);
}

SEVERAL_GPUS("gpu: ranks: multi-scale with graphs trains to its end") {
  DataDir dir(12);
  const std::string printed = trained(
      dir, 2,
      "--data data --model yolox-nano --size 96 --bs 4 --epochs 12 --graph --eval-interval 0 --out r");
  CHECK_FALSE(has(printed, "without the CUDA graphs"));
  CHECK_HAS(printed, "done: r/last.pth");
}

PROGRAM_TEST("gpu: ranks: if the largest step does not fit on a rank, all begin with more micro-batches" *
             doctest::skip(!torch::cuda::is_available() || !kSimulated)) {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 192 --no-multiscale --bs 8 --eval-interval 0 --max-iters 1 ";
  const auto peak = [&](const std::string& more) {  // bytes of a rank
    const std::string said = trained(dir, 2, flags + more), mark = "ranks   memory ";
    REQUIRE_MESSAGE(has(said, mark), said);
    CHECK_FALSE(has(said, "accum   "));
    return 1e6 * std::stod(said.substr(said.find(mark) + mark.size()));
  };
  const double whole = peak("--out a"), quarters = peak("--accum 4 --out b");
  REQUIRE(whole > 1.3 * quarters);
  const Env limit("SIMULATED_CUDA_LIMIT", concat(int64_t(0.5 * (whole + quarters))).c_str());
  CHECK_HAS(trained(dir, 2, flags + "--out c"),
            "instead of 1: with less, a step of 192x192 pixels does not fit");
  const double accum = json_number(dir / "c/config.json", "accum");
  CHECK((accum == 2 || accum == 4));
}
