// SPDX-License-Identifier: Apache-2.0
// The checks of fast paths (--fast), on the CPU and the simulated device, with paths that are broken on
// purpose.
#include "gpu.hpp"

#include "run/fast_paths.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// A path that calls `fault` with the first argument of each operator of this name.
struct BrokenPath {
  static inline std::string operation;
  static inline std::function<void(Tensor)> fault;

  static FastPath path(const std::string& name, const std::function<void(Tensor)>& what) {
    operation = name;
    fault = what;
    static at::CallbackHandle handle;
    return {"broken", "broken path",
            [](bool on) {
              if (!on) return at::removeCallback(handle);
              const auto call = [](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
                if (f.name() == operation) fault(f.inputs()[0].toTensor().variable_data());
                return nullptr;
              };
              handle = at::addGlobalCallback(
                  at::RecordFunctionCallback(call).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
            },
            check_operations};
  }
};

void set_case(FastPathCase& c) {
  c.model = "yolox-nano";
  c.classes = 3;
  c.size = "64";
  c.images = 2;
  c.device = "cpu";
}

}  // namespace

TEST_CASE(
    "fast paths: a path without a fault passes; a wrong layer, a wrong step, an exception and NaN do not") {
  FastPathCase c;
  set_case(c);
  for (const bool sync_bn : {false, true}) {
    c.sync_bn = sync_bn;
    const FastPathResult good = check_fast_path({"good", "good path", [](bool) {}, check_operations}, c);
    CHECK_MESSAGE(good.failure == "", good.failure);
    CHECK(good.difference < 1e-6);
  }
  const std::string norm = "yolox::bn_silu_forward";
  std::string said;
  const auto failure = [&](const std::string& operation, const std::function<void(Tensor)>& fault) {
    return check_fast_path(BrokenPath::path(operation, fault), c).failure;
  };
  const auto a_little = [](Tensor x) { x[0][0][0][0].add_(0.1); };
  CHECK_MESSAGE(has(said = failure(norm, a_little), "of a layer with shape [2, "), said);
  CHECK_MESSAGE(has(said = failure("aten::convolution", [](Tensor x) { x.mul_(0.9); }), " instead of "),
                said);
  CHECK_MESSAGE(
      has(said = failure("aten::convolution", [](Tensor x) { x.fill_(NAN); }), "the loss is not finite"),
      said);
  const auto fails = [](bool on) {
    if (on) throw std::runtime_error("a launch failed");
  };
  CHECK_THROWS_WITH(check_fast_path({"bad", "bad path", fails, check_operations}, c), "a launch failed");
  c.deterministic = true;
  CHECK(check_fast_path({"good", "good path", [](bool) {}, check_operations}, c).failure == "");
  const auto noise = [](Tensor x) {
    static int calls = 0;
    x[0][0][0][0].add_(++calls * 1e-5);
  };
  CHECK_MESSAGE(has(said = failure(norm, noise), "--deterministic excludes"), said);
}

TEST_CASE("train: --fast without a GPU is refused, and config.json says off" * starts_programs) {
  TempDir dir;
  const std::string flags =
      "--data shapes --model yolox-nano --size 32 --bs 2 --max-iters 1 --eval-interval 0 --device cpu ";
  CHECK(has(run(dir, "train", flags + "--fast norm").err, "--fast norm needs a GPU"));
  CHECK(has(run(dir, "train", flags + "--fast quick").err,
            "--fast must be off, auto, norm or graph, got 'quick'"));
  succeed(dir, "train", flags + "--out r");
  CHECK(has(contents(dir / "r/config.json"), R"("fast":"off")"));
}

TEST_CASE(
    "gpu: train: the fused norm is checked once and then used; one that crashes or is wrong is left out, and "
    "the run "
    "continues" *
    needs_fused_norm * starts_programs) {
  TempDir dir;
  const std::string flags =
      "--data shapes --model yolox-nano --size 64 --bs 4 --max-iters 2 --eval-interval 0 --device cuda ";
  const auto train = [&](const std::string& more, const std::string& environment = "") {
    const Outcome o = shell(
        dir, concat("YOLOX_CACHE_DIR=", dir / "cache ", environment, " $YOLOX_PROGRAMS/train ", flags, more));
    CHECK_MESSAGE(o.code == 0, o.err);
    return unwrapped(o.out);
  };
  const std::string said = train("--out a");
  CHECK_MESSAGE(has(said, "fast    fused norm (differs by at most 0.0"), said);
  CHECK(has(contents(dir / "a/config.json"), R"("fast":"norm,graph")"));
  // The next run reads the result from the cache.
  for (const auto& entry : fs::directory_iterator(dir / "cache")) {
    std::string text = contents(entry.path());
    text.replace(text.find("\nok ") + 4, std::string::npos, "0.125");
    std::ofstream(entry.path()) << text;
  }
  CHECK(has(train("--out b"), "differs by at most 0.125"));
  CHECK(has(train("--resume a --max-iters 3"), "fast    fused norm"));
  CHECK_FALSE(has(train("--out c --fast off"), "fused norm"));
  CHECK_FALSE(has(train("--out d --amp fp64"), "fused norm"));
  if (!kSimulated) return;
  const std::string crashed = train("--out e --accum 2", "SIMULATED_CUDA_KERNELS=crash");
  CHECK_MESSAGE(has(crashed, "because its check was killed by SIGSEGV"), crashed);
  CHECK(has(contents(dir / "e/config.json"), R"("fast":"graph")"));
  const std::string wrong = train("--out f --accum 2", "SIMULATED_CUDA_KERNELS=incomplete");
  CHECK_MESSAGE(has(wrong, "of a layer with shape"), wrong);
  // A crash is checked again the next time, a wrong result is not.
  CHECK(has(train("--out g --accum 2"), "of a layer with shape"));
}

TEST_CASE("gpu: train: CUDA graphs are checked and used; wrong ones are left out, and the run continues" *
          needs_gpu * starts_programs) {
  TempDir dir;
  const std::string flags =
      "--data shapes --model yolox-nano --size 64 --bs 4 --max-iters 5 --eval-interval 0 --device cuda ";
  const auto train = [&](const std::string& more, const std::string& environment = "") {
    return shell(
        dir, concat("YOLOX_CACHE_DIR=", dir / "cache ", environment, " $YOLOX_PROGRAMS/train ", flags, more));
  };
  const Outcome good = train("--out a --fast graph");
  CHECK_MESSAGE(has(unwrapped(good.out), "fast    CUDA graphs (differs by at most "), good.err);
  CHECK(has(contents(dir / "a/config.json"), R"("fast":"graph")"));
  const Outcome resumed = train("--resume a --max-iters 8");
  CHECK_MESSAGE(has(resumed.out, "CUDA graphs"), resumed.err);
  for (const std::string other : {"--dtr auto", "--debug", "--bs auto", "--profile", "--amp fp64"}) {
    const Outcome refused = train("--out b --fast graph " + other);
    CHECK_MESSAGE(refused.code == 2, refused.out);
    CHECK_MESSAGE(has(refused.err, "--fast graph "), refused.err);
    CHECK_MESSAGE(has(refused.err, other.substr(0, other.find(' '))), refused.err);
  }
  if (!kSimulated) return;
  const Outcome wrong = train("--out c --accum 2", "SIMULATED_CUDA_GRAPHS=incomplete");
  CHECK(wrong.code == 0);
  CHECK_MESSAGE(
      has(unwrapped(wrong.out), "warning: training goes on without the CUDA graphs (--fast graph), because "),
      wrong.out);
  CHECK_FALSE(has(contents(dir / "c/config.json"), "graph"));
}
