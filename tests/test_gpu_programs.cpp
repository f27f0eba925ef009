// SPDX-License-Identifier: Apache-2.0
// Programs and several ranks on a GPU.
#include "gpu.hpp"

using namespace yolox;
using namespace yolox::test;

GPU_PROGRAM_TEST("gpu: train, --bs auto, --dtr, a resume on the CPU, and demo work from end to end") {
  DataDir dir(8);
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 4 --epochs 4 --eval-interval 1 ";
  for (const std::string amp : {"off", "bf16", "fp16"}) {
    const std::string graph = amp == "bf16" ? " --graph" : "";
    CHECK_HAS(succeed(dir, "train",
                      concat(flags, "--device cuda --amp ", amp, graph, " --max-iters 3 --out ", amp)),
              "cuda:0");
  }
  for (const char* more : {"--device cpu --max-iters 4", "--device cuda --max-iters 5"})
    CHECK_HAS(succeed(dir, "train", concat("--resume off ", more)), "done: off/last.pth");
  CHECK_HAS(succeed(dir, "train", flags + "--bs auto --device cuda --epochs 2 --max-iters 1 --out auto"),
            "--bs auto: ");
  succeed(dir, "train", flags + "--device cuda --dtr auto --max-iters 2 --out dtr");
  succeed(dir, "demo", "--source data/train --weights off/last.pth --device cuda --save drawn");
}

TEST_CASE("train: --graph is refused where steps cannot be recorded") {
  const auto refusal = [](const std::string& flags) {
    Config c;
    ::parse(c, split_list("--device cpu --graph " + flags, ' '));
    fill_in(c);
    return error_of([&] {
      check_config(c);
      prepare_process(c, RankInfo());
    });
  };
  CHECK(refusal("") == "--graph needs a GPU; give --no-graph");
  for (const std::string other : {"--dtr auto", "--debug", "--bs auto", "--profile"})
    CHECK(has(refusal(other), "--graph cannot be used with " + other.substr(0, other.find(' '))));
}

SIMULATED_TEST("gpu: fused kernels that differ from torch on a rank are used on none, and the log says so") {
  Ranks one(RankInfo(), kGpu, 60);
  const AtEnd off([] { use_fused_norm(false); });
  const auto is_fused = [] {
    torch::nn::BatchNorm2d bn(8);
    bn->to(kGpu);
    const Tensor x = torch::rand({2, 8, 6, 6}, kGpu).contiguous(torch::MemoryFormat::ChannelsLast);
    return has(bn_silu(x.requires_grad_(), *bn).grad_fn()->name(), "BnSilu");
  };
  CHECK(turn_on_fused_norm(kGpu, one) == "");
  CHECK(is_fused());
  {
    const Env wrong("SIMULATED_CUDA_KERNELS", "incomplete");
    CHECK(has(turn_on_fused_norm(kGpu, one),
              "run as operations of torch, which is slower: the fused kernels "
              "differ from torch by"));
  }
  CHECK_FALSE(is_fused());
  DataDir dir(4);
  const std::string train =
      concat("SIMULATED_CUDA_DEVICES=2 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=",
             20000 + getpid() % 9999,
             " $YOLOX_PROGRAMS/train --data data --model yolox-nano --size 64 --bs 2 --max-iters 1 --out a");
  const Outcome o = shell(dir, concat("{ SIMULATED_CUDA_KERNELS=incomplete RANK=1 LOCAL_RANK=1 ", train,
                                      " & RANK=0 LOCAL_RANK=0 ", train, "; code=$?; wait; exit $code; }"));
  CHECK_MESSAGE(o.code == 0, o.out << o.err);
  CHECK_HAS(o.out, "is the tolerance (rank 1)");
}

SIMULATED_TEST("gpu: a driver without a usable GPU is an error, unless the CPU is selected") {
  DataDir dir(4);
  fs::create_directories(dir / "driver/nvidia");
  write_text(dir / "driver/nvidia/version", "NVRM version: 470.1");
  const auto run = [&](const std::string& flags) {
    return shell(dir,
                 concat("SIMULATED_CUDA_DEVICES=0 unshare -rm sh -c 'mount --bind driver /proc/driver || ",
                        "exit 77; $YOLOX_PROGRAMS/train --data data --model yolox-nano --size 64 --bs 2 ",
                        "--max-iters 1 --eval-interval 0 ", flags, "'"));
  };
  const Outcome unusable = run("--out a");
  if (unusable.code == 77 || has(unusable.err, "unshare")) {
    MESSAGE("skipped: this machine does not let a test mount a folder");
    return;
  }
  CHECK(unusable.code == 2);
  CHECK_HAS(unusable.err, "torch cannot use the GPU of this machine");
  CHECK_HAS(unusable.err, "--device cpu");
  for (const std::string flags : {"--device cpu --out b", "--procs 2 --out c"}) {
    const Outcome o = run(flags);
    CHECK_MESSAGE(o.code == 0, o.err);
  }
}

GPU_PROGRAM_TEST("gpu: train: a trained model has the same AP on the CPU") {
  TempDir dir;
  if (kSimulated) write_scenes(dir / "data", 8);
  const std::string data = kSimulated ? "data" : "shapes", size = kSimulated ? "64" : "192";
  // On a real GPU: much as in quickstart.sh, but longer.
  succeed(dir, "train",
          concat("--data ", data, " --model yolox-nano --device cuda --no-multiscale --mosaic-prob 0 --size ",
                 size, kSimulated ? " --bs 4 --epochs 2" : " --bs 8 --epochs 10",
                 " --optimizer adam --lr 0.002 --eval-interval 0 --ema 0.998 --out r"));
  const auto ap = [&](const std::string& weights, const std::string& device) {
    succeed(dir, "eval",
            concat("--data ", data, " --conf 0 --nms 0.9 --weights ", weights, " --device ", device,
                   " --size ", size, " --json ap.json"));
    return json_number(dir / "ap.json", "AP");
  };
  const double on_gpu = ap("r/last.pth", "cuda");
  if (!kSimulated) CHECK(on_gpu > 0.3);  // 0.41 on a CPU
  report_fact("AP", rounded(on_gpu));
  check_figure("AP on the CPU", std::abs(ap("r/last.pth", "cpu") - on_gpu), 1e-3);
}

SIMULATED_TEST("simulated: cases of gpu-check fail if kernels or replays leave out a part of their work") {
  DataDir dir(8);
  const auto code = [&](const std::string& environment, const std::string& name) {
    return shell(dir, concat(environment, " $YOLOX_PROGRAMS/tests -tc='", name, "'")).code;
  };
  const std::string kernels = "gpu: the CUDA kernels of bn_silu equal batch norm and SiLU in float64",
                    graphs = "gpu: steps as CUDA graphs equal steps without*";
  CHECK(code("", kernels) == 0);
  CHECK(code("SIMULATED_CUDA_KERNELS=incomplete", kernels) == 1);
  CHECK(code("", graphs) == 0);
  CHECK(code("SIMULATED_CUDA_GRAPHS=incomplete", graphs) == 1);
}

// ---- ./train --gpus N

namespace {

const int kRanks = kSimulated ? 2 : std::min(kGpus, 4);
const std::string kTiny = concat(" --data data --size 64 --bs 12 --no-multiscale --lr 1e-4 --model ",
                                 kSimulated ? "yolox-pico " : "yolox-nano ");

std::string train(int gpus, const std::string& flags) {
  return concat("env SIMULATED_CUDA_DEVICES=4 NCCL_DEBUG=WARN $YOLOX_PROGRAMS/train --gpus ", gpus, " ",
                flags);
}

// Runs ./train, which must succeed. Returns what it has printed.
std::string trained(const TempDir& dir, int gpus, const std::string& flags) {
  const Outcome o = shell(dir, train(gpus, flags));
  REQUIRE_MESSAGE(o.code == 0, o.out << o.err);
  CHECK_MESSAGE(!has(o.out, "without the CUDA graphs"), o.out);
  return o.out;
}

// Trains on one GPU and on all, and reports how fast. On the simulated device, only on two.
void report_speed(const std::string& flags, int simulated_steps) {
  DataDir dir(32);
  for (const int gpus : std::set{kSimulated ? kRanks : 1, kRanks}) {
    const double start = now();
    trained(dir, gpus,
            concat("--data data --eval-interval 0 --out ", gpus, flags, " --bs ", 16 / kRanks * kRanks,
                   kSimulated ? concat(" --model yolox-pico --size 32 --max-iters ", simulated_steps)
                              : " --model yolox-s --max-iters 60"));
    const auto rows = metric_rows(dir / concat(gpus, "/metrics.csv"));
    REQUIRE(!rows.empty());
    report_fact(concat("images per second of ", gpus, " GPUs"),
                concat(rounded(rows[0][kSpeed]), " in the first step, ", rounded(rows.back()[kSpeed]),
                       " in the last ones; start to end ", short_time(now() - start)));
  }
}

// ./train on all GPUs in the background, after its first steps, with --graph as replays.
struct GpuRun {
  DataDir dir{36};
  Process process;
  std::vector<pid_t> ranks;

  explicit GpuRun(const std::string& flags)
      : process(dir, {train(kRanks, concat(kTiny, "--epochs 9999 --eval-interval 0 --out r ", flags))}) {
    const bool trains = process.until([&] {
      const auto rows = metric_rows(dir / "r/metrics.csv");
      return !rows.empty() && rows.back()[kIteration] > 5;
    });
    REQUIRE_MESSAGE(trains, contents(process.out) << contents(process.err));
    CHECK_FALSE(has(contents(process.out), "without the CUDA graphs"));
    ranks = children_of(process.pid);
  }
};

}  // namespace

GPU_PROGRAM_TEST("gpu: ranks: how fast yolox-s at 640 pixels trains on one GPU and on all") {
  report_speed(" --no-multiscale", 2);
}
GPU_PROGRAM_TEST("gpu: ranks: how fast yolox-s at 640 pixels trains with CUDA graphs") {
  report_speed(" --no-multiscale --graph", 3);
}
GPU_PROGRAM_TEST("gpu: ranks: multi-scale training with CUDA graphs runs to its end, and how fast") {
  report_speed(" --graph", 12);  // the size changes at step 10
}

SEVERAL_GPUS("gpu: ranks: N GPUs compute the steps of one in float64, and the AP of one") {
  DataDir dir(12);
  const std::string flags =
      concat(kTiny, "--amp fp64 --conf 0 --nms 0.9 --warmup-epochs 0 --eval-interval 1 --epochs 3 --out ");
  trained(dir, 1, flags + "one");
  for (int gpus = 2; gpus <= (kSimulated ? 4 : kRanks); ++gpus) {
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

SEVERAL_GPUS("gpu: ranks: steps with CUDA graphs equal steps without") {
  DataDir dir(12);
  // One image has many objects. Alone, the ranks without it would record another graph.
  const std::string truth = dir / "data/annotations/instances_train.json";
  CocoDataset coco = read_coco(truth);
  for (int i = 0; i < 90; ++i)
    coco.annotations.push_back({1000 + i, coco.images[0].id, 1, double(i), double(i), 20, 20, 400});
  write_coco(truth, coco);
  const std::string flags = concat(
      kTiny, "--epochs 4 --eval-interval 0 --deterministic --recipe official --lr 6e-6 --mosaic-prob 0 ");
  for (const int gpus : std::set{2, kSimulated ? 4 : kRanks}) {
    const std::string plain = concat("plain", gpus), graphs = concat("graphs", gpus);
    trained(dir, gpus, concat(flags, "--amp off --out ", plain));
    trained(dir, gpus, concat(flags, "--amp off --graph --out ", graphs));
    const auto of_graphs = weights_of(dir, graphs, false), of_plain = weights_of(dir, plain, false);
    // With two ranks, sums do not depend on the order, so that the bits are equal.
    if (gpus == 2) CHECK(difference(of_graphs, of_plain) == "");
    for (const auto& e : of_graphs) {
      INFO(e.key().toStringRef());
      CHECK(relative_error(e.value().toTensor(), of_plain.at(e.key()).toTensor()) < 1e-3);
    }
  }
}

SEVERAL_GPUS("gpu: ranks: after kill -9 of a rank the others end, also while graphs are replayed") {
  for (const std::string flags : {"", "--graph"}) {
    GpuRun run(flags);
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
  GpuRun run("--graph");
  kill(run.process.pid, SIGTERM);
  REQUIRE(run.process.ends());
  CHECK(run.process.wait() == 0);
  const int64_t steps = steps_of(run.dir);
  CHECK(steps > 5);
  trained(run.dir, kRanks / 2, concat("--resume r --max-iters ", steps + 2));
  CHECK(steps_of(run.dir) == steps + 2);
}

SIMULATED_TEST("gpu: ranks: a failed start of NCCL has an exit code, its cause and what helps") {
  DataDir dir(4);
  const Env error("SIMULATED_NCCL_ERROR",
                  "NCCL error in: x.cpp:1, system error\nLast error:\n/dev/shm is full");
  const Outcome o = shell(dir, train(2, kTiny + "--out r"));
  CHECK(o.code == kNcclFailed);
  CHECK_HAS(o.err,
            "error: NCCL cannot connect the GPUs: NCCL error in: x.cpp:1, system error: /dev/shm is full");
  CHECK_HAS(o.err, "--shm-size 1g");
}

SEVERAL_GPUS("gpu: ranks: torchrun starts the ranks, and again after one of them is killed") {
  const std::string python = cached_python_with("torch");
  if (python.empty()) MESSAGE("skipped: no Python with torch");
  if (python.empty()) return;
  DataDir dir(12);
  const int epochs = kSimulated ? 8 : 300;  // of one step
  Process p(dir, {concat("env SIMULATED_CUDA_DEVICES=4 ", python, " -m torch.distributed.run --no-python ",
                         "--standalone --max-restarts 1 --nproc-per-node ", kRanks, " $YOLOX_PROGRAMS/train",
                         kTiny, "--eval-interval 0 --resume auto --out r --epochs ", epochs)});
  REQUIRE_MESSAGE(p.until([&] { return metric_rows(dir / "r/metrics.csv").size() > 1; }), contents(p.err));
  kill(children_of(p.pid).at(0), SIGKILL);
  REQUIRE_MESSAGE(p.ends(), contents(p.out));
  CHECK_MESSAGE(p.wait() == 0, contents(p.err));
  CHECK_HAS(contents(p.out), "resuming r at step ");
  CHECK(steps_of(dir) == epochs);
}

SEVERAL_GPUS("gpu: ranks: if the largest step does not fit on one rank, all begin with more micro-batches") {
  DataDir dir(16);
  const std::string flags = concat("--data data --no-multiscale --bs 16 --eval-interval 0 --max-iters 1 ",
                                   kSimulated ? "--model yolox-pico --size 128 " : "--model yolox-s ");
  const auto peak = [&](const std::string& more) {  // bytes of a rank
    const std::string said = trained(dir, 2, flags + more), mark = "ranks   memory ";
    REQUIRE_MESSAGE(has(said, mark), said);
    CHECK_FALSE(has(said, "accum   "));
    return 1e6 * std::stod(said.substr(said.find(mark) + mark.size()));
  };
  const double whole = peak("--out a"), quarters = peak("--accum 4 --out b"), mean = (whole + quarters) / 2;
  REQUIRE(whole > 1.3 * quarters);
  const Env limit("SIMULATED_CUDA_LIMIT", concat("1:", int64_t(mean)).c_str());  // of rank 1
  Tensor held;
  if (!kSimulated) {
    const torch::Device second(torch::kCUDA, 1);
    const double of_others = 1.5e9;  // the context of a process, cuDNN and NCCL
    held = torch::empty({int64_t(memory_budget(second) / 0.9 - mean - of_others)},
                        torch::TensorOptions(torch::kByte).device(second));
  }
  CHECK_HAS(trained(dir, 2, flags + "--out c"),
            concat("instead of 1: with less, a step of ", kSimulated ? "128x128" : "640x640",
                   " pixels does not fit"));
  const double accum = json_number(dir / "c/config.json", "accum");
  CHECK((accum == 2 || accum == 4));
}
