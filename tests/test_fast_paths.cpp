// SPDX-License-Identifier: Apache-2.0
// The choice of fast paths (--fast), and ./gpu-check with wrong kernels and graphs on the simulated device.
#include "gpu.hpp"

#include "run/fast_paths.hpp"

using namespace yolox;
using namespace yolox::test;

PROGRAM_TEST("train: --fast without a GPU is refused, and config.json says off") {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 32 --bs 2 --max-iters 1 --eval-interval 0 --device cpu ";
  CHECK(has(run(dir, "train", flags + "--fast norm").err, "--fast norm needs a GPU"));
  CHECK(has(run(dir, "train", flags + "--fast quick").err,
            "--fast must be off, auto, norm or graph, got 'quick'"));
  succeed(dir, "train", flags + "--out r");
  CHECK(has(contents(dir / "r/config.json"), R"("fast":"off")"));
}

PROGRAM_TEST(
    "gpu: train: --fast auto uses the paths that gpu-check has noted; without its note it says to run it" *
    needs_fused_norm) {
  DataDir dir(8);
  const auto train = [&](const std::string& flags) {
    const Outcome o = shell(dir, concat("YOLOX_CACHE_DIR=", dir / "cache", " $YOLOX_PROGRAMS/train ", flags));
    CHECK_MESSAGE(o.code == 0, o.err);
    return o.out;
  };
  const std::string flags =
      "--data data --model yolox-nano --size 32 --bs 2 --max-iters 3 --eval-interval 0 --no-multiscale "
      "--device cuda ";
  const auto used = [&](const std::string& run) {
    const std::string text = contents(dir / (run + "/config.json"));
    const size_t from = text.find("\"fast\":\"") + 8;
    return text.substr(from, text.find('"', from) - from);
  };
  const std::string both = "fast    fused norm, CUDA graphs", advice = "run ./gpu-check once";
  const std::string note = fast_path_note(kGpu, false);
  CHECK(has(note, git_revision()));
  write_text(dir / "cache/fast-paths.txt", "another GPU: norm graph\n" + note + " of another revision\n");
  CHECK(has(train(flags + "--out none"), advice));
  CHECK(used("none") == "off");
  write_text(dir / "cache/fast-paths.txt", "another GPU: norm graph\n" + note + "\n");
  const std::string noted = train(flags + "--out noted");
  CHECK_MESSAGE(has(noted, both), noted);
  CHECK_FALSE(has(noted, advice));
  CHECK(used("noted") == "norm,graph");
  CHECK(has(train(flags + "--out budget --dtr auto"), "fast    fused norm\n"));
  // Names need no note. A resumed run keeps its paths.
  fs::remove(dir / "cache/fast-paths.txt");
  CHECK(has(train(flags + "--out forced --fast norm,graph"), both));
  CHECK(has(train("--resume noted --max-iters 4"), both));
  CHECK_FALSE(has(train("--resume none --max-iters 4"), advice));
  CHECK(used("none") == "off");
}

GPU_PROGRAM_TEST("gpu: train: --fast graph is refused where graphs are not possible") {
  DataDir dir(8);
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 4 --max-iters 5 --eval-interval 0 --device cuda --out b "
      "--fast graph ";
  for (const std::string other : {"--dtr auto", "--debug", "--bs auto", "--profile"})
    check_refusal(dir, "train", flags + other, 2,
                  "--fast graph is not possible with " + other.substr(0, other.find(' ')));
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
