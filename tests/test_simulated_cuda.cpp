// SPDX-License-Identifier: Apache-2.0
// What only the simulated device shows: counts of operator calls and waits, errors in the use of streams,
// several GPUs, a GPU that cannot be used. And tests of the simulation itself.
#ifdef YOLOX_SIMULATED_CUDA
#include "gpu.hpp"

#include "evaluate.hpp"

using namespace yolox;
using namespace yolox::test;

GPU_PROGRAM_TEST("gpu: training on two GPUs equals training on one") {
  DataDir dir(8);
  const Env two_gpus("SIMULATED_CUDA_DEVICES", "2");
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 4 --epochs 2 --eval-interval 0 --max-iters 3 --amp ";
  succeed(dir, "train", flags + "fp64 --device cuda --out one");
  const std::string said = succeed(dir, "train", flags + "fp64 --gpus 2 --out two");
  succeed(dir, "train", flags + "fp64 --device cuda --max-iters 1 --lr 0 --out start");
  CHECK_MESSAGE(has(said, "on cuda:0, float64"), said);
  CHECK(relative_difference(dir, "two", "one", "start") < 1e-9);
  // With --dtr, autocast casts each weight by itself.
  succeed(dir, "train", flags + "bf16 --gpus 2 --out grouped");
  succeed(dir, "train", flags + "bf16 --gpus 2 --dtr 4 --out single");
  CHECK(difference(dir / "grouped/last.pth", dir / "single/last.pth") == "");
}

GPU_PROGRAM_TEST("gpu: ranks whose largest step does not fit begin with more micro-batches") {
  DataDir dir(8);
  const Env two_gpus("SIMULATED_CUDA_DEVICES", "2");
  const std::string flags =
      "--data data --model yolox-nano --size 192 --no-multiscale --bs 8 --gpus 2 --eval-interval 0 "
      "--max-iters 1 ";
  const auto peak = [&](const std::string& more) {  // bytes of the rank with more memory
    const std::string said = succeed(dir, "train", flags + more), mark = "ranks   memory ";
    const size_t at = said.find(mark);
    REQUIRE_MESSAGE(at != std::string::npos, said);
    CHECK_FALSE(has(said, "accum   "));
    return 1e6 * std::max(std::stod(said.substr(at + mark.size())),
                          std::stod(said.substr(said.find(' ', at + mark.size()))));
  };
  const double whole = peak("--out a"), quarters = peak("--accum 4 --out b");
  REQUIRE(whole > 1.3 * quarters);
  const Env limit("SIMULATED_CUDA_LIMIT", concat(int64_t(0.5 * (whole + quarters))).c_str());
  const std::string said = succeed(dir, "train", flags + "--out c");
  CHECK_MESSAGE(has(said, "instead of 1: with less, a step of 192x192 pixels does not fit"), said);
  const int accum = std::stoi(said.substr(said.find("accum   ") + 8));
  CHECK((accum == 2 || accum == 4));
  CHECK(json_number(dir / "c/config.json", "accum") == accum);
}

GPU_PROGRAM_TEST("gpu: a rank on a GPU that loses another rank ends with a message, not with SIGABRT") {
  DataDir dir(8);
  const Env two_gpus("SIMULATED_CUDA_DEVICES", "2");
  Process p(dir, "train", "--data data --model yolox-nano --size 64 --bs 4 --gpus 2 --out r --timeout 20");
  REQUIRE(p.until([&] { return has(contents(dir / "r/metrics.csv"), "\n1,"); }));
  const auto ranks = children_of(p.pid);
  REQUIRE(ranks.size() == 2);
  kill(ranks[1], SIGKILL);
  CHECK(p.ends());
  CHECK(p.wait() == 128 + SIGKILL);
  const std::string err = contents(p.err);
  CHECK_MESSAGE(has(err, "rank 1 of 2"), err);
  CHECK_MESSAGE(has(err, "rank 0 lost "), err);  // "rank 1", or "another rank" if NCCL noticed it first
  CHECK_MESSAGE(!has(err, "SIGABRT"), err);
}

GPU_PROGRAM_TEST("gpu: a driver without a usable GPU is an error, unless the CPU is selected") {
  DataDir dir(4);
  fs::create_directories(dir / "driver/nvidia");
  write_text(dir / "driver/nvidia/version", "NVRM version: 470.1");
  const auto run = [&](const std::string& before, const std::string& flags) {
    return shell(dir, concat("SIMULATED_CUDA_DEVICES=0 ", before, " unshare -rm sh -c 'mount --bind driver ",
                             "/proc/driver || exit 77; $YOLOX_PROGRAMS/train --data data --model ",
                             "yolox-nano --size 64 --bs 2 --max-iters 1 --eval-interval 0 ", flags, "'"));
  };
  const Outcome unusable = run("", "--out a");
  if (unusable.code == 77 || has(unusable.err, "unshare")) {
    MESSAGE("skipped: this machine does not let a test mount a folder");
    return;
  }
  CHECK(unusable.code == 2);
  CHECK_MESSAGE(has(unusable.err, "torch cannot use the GPU of this machine"), unusable.err);
  CHECK_MESSAGE(has(unusable.err, "--device cpu"), unusable.err);
  for (const auto& [before, flags] : {std::pair("", "--device cpu --out b"),
                                      {"", "--procs 2 --out c"},
                                      {"CUDA_VISIBLE_DEVICES=", "--out d"}}) {
    const Outcome o = run(before, flags);
    CHECK_MESSAGE(o.code == 0, o.err);
  }
}

namespace {

bool any_has(const std::vector<std::string>& errors, const std::string& part) {
  for (const auto& e : errors)
    if (has(e, part)) return true;
  return false;
}

int64_t waits() { return simulated_cuda::sum(simulated_cuda::host_waits()); }

// Returns the operator calls of one step in each phase of the step, and checks that the host does not wait
// for work of this step.
std::map<std::string, int64_t> calls_of_step(const std::string& amp, bool sync_bn) {
  constexpr int kBatch = 2, kSide = 64;  // the counts do not depend on the size
  Trainer trainer("yolox-s", kGpu, amp);
  if (sync_bn) use_sync_bn(*trainer.model, two_equal_ranks());
  GpuBatches batches(noise(kSide, 20), kSide, 4 * kBatch, kBatch);
  for (int i = 0; i < 3; ++i) {
    if (i == 2) simulated_cuda::reset_counts();
    const Batch batch = [&] {
      RECORD_USER_SCOPE("data");
      return batches.next();
    }();
    trainer.start(batch, 0.001);
  }
  for (const auto& w : simulated_cuda::host_waits()) FAIL_CHECK(w.phase << ": " << w.what);
  CHECK(simulated_cuda::sum(simulated_cuda::unpinned_copies()) == 0);
  std::map<std::string, int64_t> calls;
  for (const auto& c : simulated_cuda::operator_calls()) {
    calls[c.phase] += c.times;
    // How many copies of batches a step starts depends on the speed of the loader. The collectives of SyncBN
    // are those of a real group of ranks.
    if (c.phase != "data" && c.phase != "collectives") calls["all"] += c.times;
  }
  return calls;
}

}  // namespace

GPU_TEST("gpu: the host reads the numbers of several steps with one wait") {
  Trainer trainer("yolox-nano", kGpu, "off");
  GpuBatches batches(noise(64, 5), 64, 16);
  UnreadSteps& unread = trainer.steps->unread;
  for (int i = 0; i < 3; ++i) trainer.start(batches.next(), 0.001);
  simulated_cuda::reset_counts();
  const auto first = unread.read();
  REQUIRE(first.size() == 3);
  CHECK(waits() == 1);
  for (size_t i = 0; i < first.size(); ++i) {
    CHECK(first[i].step == int64_t(i));
    CHECK(first[i].numbers.total > 0);
    CHECK(first[i].numbers.total != first[(i + 1) % 3].numbers.total);
  }
  CHECK(unread.read().empty());
  CHECK_FALSE(unread.due(0.1));
  trainer.start(batches.next(), 0.001);
  CHECK_FALSE(unread.due(0.1));
  CHECK(unread.due(0.6));  // a step that takes long
}

TEST_CASE("gpu process: the GPU does not end a step" * doctest::skip()) {
  Trainer trainer("yolox-nano", kGpu, "off");
  GpuBatches batches(noise(64, 5), 64, 4);
  const Batch batch = batches.next();
  trainer.start(batch, 0.001);
  simulated_cuda::hang(true);
  start_timeout(5, "rank 3", std::getenv("ALONE"));
  made_progress("step 7");
  for (int i = 0; i < 3; ++i) trainer.start(batch, 0.001);
}
GPU_PROGRAM_TEST(
    "gpu: a GPU that does not end a step within --timeout ends the run; it may wait for other ranks") {
  const TempDir dir;
  for (const bool alone : {true, false}) {
    const Outcome o = shell(dir, concat(alone ? "ALONE=1" : "", " $YOLOX_PROGRAMS/tests --no-skip ",
                                        "-tc='gpu process: the GPU does not end a step'"));
    CHECK(o.code == (alone ? 1 : kLostRank));
    CHECK_HAS(o.err, concat("error: rank 3 has been at step 7 for 5 s (--timeout): it waits for the GPU",
                            alone ? "; if" : ", which may wait for other ranks; if",
                            " the GPU has failed, `dmesg` has a line with Xid"));
  }
}

GPU_TEST(
    "gpu: a step does not synchronise with the device, and the number of its operator calls has a limit") {
  std::map<std::string, int64_t> all;
  for (const auto& [amp, sync_bn, fused] : {std::tuple("off", false, false),
                                            {"bf16", false, false},
                                            {"fp16", false, false},
                                            {"bf16", true, false},
                                            {"bf16", false, true},
                                            {"bf16", true, true}}) {
    use_fused_norm(fused);
    const auto calls = calls_of_step(amp, sync_bn);
    use_fused_norm(false);
    std::string text;
    for (const auto& [phase, times] : calls) text += concat(" ", phase, " ", times);
    const std::string name = concat(amp, sync_bn ? "+sync" : "", fused ? "+fused" : "");
    MESSAGE(name << ":" << text);
    all[name] = calls.at("all");
  }
  // If a change lowers a count, lower the limit here and update the table in bench/RESULTS.md.
  CHECK(all.at("off") <= 790);
  CHECK(all.at("bf16") <= 819);
  CHECK(all.at("fp16") <= 827);
  CHECK(all.at("bf16+sync") <= 1337);
  CHECK(all.at("bf16+fused") <= 967);
  CHECK(all.at("bf16+sync+fused") <= 1041);
}

GPU_TEST("gpu: a checkpoint synchronises at most 10 times, an evaluation once per batch") {
  Trainer trainer("yolox-nano", kGpu, "off");
  TempDir dir;
  Log log(dir / "log.txt", /*quiet=*/true);
  Saver saver{dir.path.string(), {}, {}, 1, 1, true};
  saver.info.model = "yolox-nano";
  saver.info.classes.resize(80, "x");
  simulated_cuda::reset_counts();
  REQUIRE(saver.save(*trainer.training, "last.pth", log));
  const int64_t of_save = waits();

  constexpr int kImages = 10;
  const Dataset data = shapes_dataset(0, 0, kImages);
  YOLOX model = make_model("yolox-nano", int(data.classes.size()));
  move(model, kGpu, torch::kFloat);
  EvalSettings settings;
  settings.size = {64, 64};
  settings.batch = 4;
  settings.device = kGpu;
  simulated_cuda::reset_counts();
  const Evaluation e = evaluate(model, data, settings);
  const int64_t of_evaluation = waits();
  CHECK(e.images == kImages);
  MESSAGE("checkpoint " << of_save << ", evaluation of " << kImages << " images " << of_evaluation);
  CHECK(of_save <= 10);
  CHECK(of_evaluation == (kImages + settings.batch - 1) / settings.batch);
}

GPU_TEST("gpu: the simulated device detects errors in the use of streams and of pinned memory") {
  // As DeviceLoader copies, but without the event and without record_stream().
  Tensor there;
  {
    const c10::StreamGuard on(c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(kGpu));
    there = torch::arange(1000, torch::kFloat).pin_memory().to(kGpu, /*non_blocking=*/true);
  }
  const Tensor sum = there.sum();
  there = Tensor();
  const auto errors = simulated_cuda::errors();
  CHECK(any_has(errors, "without waiting for it"));
  CHECK(any_has(errors, "record_stream() is missing"));

  const Tensor pinned = torch::arange(1000, torch::kFloat).pin_memory();
  there = pinned.to(kGpu, /*non_blocking=*/true);
  pinned.fill_(-1);
  CHECK(there.cpu()[5].item<float>() == -1);
  CHECK(any_has(simulated_cuda::errors(), "pinned memory was written"));
}

#endif
