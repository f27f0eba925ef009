// SPDX-License-Identifier: Apache-2.0
// Programs and several ranks on a GPU.
#include "gpu.hpp"
#include "models.hpp"

using namespace yolox;
using namespace yolox::test;

GPU_PROGRAM_TEST("gpu: train, --bs auto, --dtr, a resume on the CPU, and demo work from end to end") {
  DataDir dir(8);
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 4 --epochs 4 --eval-interval 1 ";
  for (const std::string amp : {"off", "bf16", "fp16"}) {
    const std::string said = succeed(dir, "train",
                                     concat(flags, "--device cuda --amp ", amp,
                                            amp == "bf16" ? " --graph" : "", " --max-iters 3 --out ", amp));
    CHECK_MESSAGE(has(said, "cuda:0"), said);
  }
  const std::string on_cpu = succeed(dir, "train", "--resume off --device cpu --max-iters 4");
  CHECK_MESSAGE(has(on_cpu, "done: off/last.pth"), on_cpu);
  const std::string on_gpu = succeed(dir, "train", "--resume off --device cuda --max-iters 5");
  CHECK_MESSAGE(has(on_gpu, "done: off/last.pth"), on_gpu);
  const std::string found =
      succeed(dir, "train", flags + "--bs auto --device cuda --epochs 2 --max-iters 1 --out auto");
  CHECK_MESSAGE(has(found, "--bs auto: "), found);
  succeed(dir, "train", flags + "--device cuda --dtr auto --max-iters 2 --out dtr");
  succeed(dir, "demo", "--source data/train --weights off/last.pth --device cuda --save drawn");
}

GPU_PROGRAM_TEST("gpu: yolox-s at 640 pixels trains, and how fast") {
  DataDir dir(32);
  // Multi-scale records graphs for each size.
  for (const auto& [kind, flags] : {std::pair("plain", "--no-multiscale"),
                                    {"graph", "--graph --no-multiscale"},
                                    {"multi-scale", "--graph"}}) {
    const std::string name = kind;
    succeed(dir, "train",
            concat("--data data --device cuda --eval-interval 0 --out ", name,
                   kSimulated ? " --model yolox-nano --size 32 --bs 2 --max-iters 4 "
                              : " --model yolox-s --bs 16 --max-iters 60 ",
                   flags));
    const auto rows = metric_rows(dir / (name + "/metrics.csv"));
    REQUIRE(!rows.empty());
    report_fact("images per second, " + name, concat(rounded(rows[0][kSpeed]), " in the first step, ",
                                                     rounded(rows.back()[kSpeed]), " in the last ones"));
  }
}

PROGRAM_TEST("gpu: ranks on several GPUs make the same steps with CUDA graphs as without" *
             doctest::skip(!torch::cuda::is_available() || kGpus < 2)) {
  DataDir dir(12);
  // One image has many objects. Alone, the ranks without it would record another graph.
  const std::string truth = dir / "data/annotations/instances_train.json";
  CocoDataset coco = read_coco(truth);
  for (int i = 0; i < 90; ++i)
    coco.annotations.push_back({1000 + i, coco.images[0].id, 1, double(i), double(i), 20, 20, 400});
  write_coco(truth, coco);
  const auto train = [&](int gpus, const std::string& of_run) {
    return shell(
        dir, concat("SIMULATED_CUDA_DEVICES=3 $YOLOX_PROGRAMS/train --gpus ", gpus,
                    " --data data --model yolox-nano --size 64 --bs 6 --epochs 6 --eval-interval 0 ",
                    "--deterministic --recipe official --lr 6e-6 --mosaic-prob 0 --max-iters 6 ", of_run));
  };
  for (int gpus = 2; gpus <= std::min(3, kGpus); ++gpus) {
    const std::string plain = concat("plain", gpus), graphs = concat("graphs", gpus);
    REQUIRE(train(gpus, "--amp off --out " + plain).code == 0);
    const Outcome o = train(gpus, "--amp off --graph --out " + graphs);
    REQUIRE_MESSAGE(o.code == 0, o.out << o.err);
    CHECK_MESSAGE(!has(o.out, "without the CUDA graphs"), o.out);
    const auto of_graphs = weights_of(dir, graphs, false), of_plain = weights_of(dir, plain, false);
    // With two ranks, sums do not depend on the order, so that the bits are equal.
    if (gpus == 2) CHECK(difference(of_graphs, of_plain) == "");
    for (const auto& e : of_graphs) {
      INFO(e.key().toStringRef());
      CHECK(relative_error(e.value().toTensor(), of_plain.at(e.key()).toTensor()) < 1e-3);
    }
  }
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

PROGRAM_TEST("gpu: fused kernels that differ from torch on a rank are used on none, and the log says so" *
             doctest::skip(!torch::cuda::is_available() || !kSimulated)) {
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
  TempDir dir;
  const Outcome o = train_two_ranks(dir, "SIMULATED_CUDA_DEVICES=2", "SIMULATED_CUDA_KERNELS=incomplete");
  CHECK_MESSAGE(o.code == 0, o.out << o.err);
  CHECK_MESSAGE(has(o.out, "is the tolerance (rank 1)"), o.out);
}

PROGRAM_TEST("gpu: a driver without a usable GPU is an error, unless the CPU is selected" *
             doctest::skip(!torch::cuda::is_available() || !kSimulated)) {
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

GPU_PROGRAM_TEST("gpu: ranks on the same GPU are refused") {
  TempDir dir;
  const Outcome o = train_two_ranks(dir, "CUDA_VISIBLE_DEVICES=0");
  CHECK(o.code != 0);
  CHECK_MESSAGE(has(o.err, "share a GPU"), o.err);
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

PROGRAM_TEST("simulated: cases of gpu-check fail if kernels or replays leave out a part of their work" *
             doctest::skip(!torch::cuda::is_available() || !kSimulated)) {
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
