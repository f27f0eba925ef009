// SPDX-License-Identifier: Apache-2.0
// Tests that need a GPU: a real one, or the simulated one of tests/simulated_cuda (YOLOX_SIMULATED_CUDA),
// which also counts operators and waits, and checks the use of streams.
#include "programs.hpp"

#include <ATen/record_function.h>
#include <sys/wait.h>

#include "data/loader.hpp"
#include "evaluate.hpp"
#include "run/fit.hpp"
#include "run/setup.hpp"
#include "step.hpp"

#ifdef YOLOX_SIMULATED_CUDA
#include "simulated_cuda.hpp"
#endif

using namespace yolox;
using namespace yolox::test;

namespace {

const torch::Device kGpu(torch::kCUDA, 0);

// Fails the test case at the end of its scope if the simulated device found an error in the use of streams.
struct NoStreamErrors {
#ifdef YOLOX_SIMULATED_CUDA
  NoStreamErrors() { simulated_cuda::errors(); }
  ~NoStreamErrors() {
    for (const auto& error : simulated_cuda::errors()) FAIL_CHECK(error);
  }
#else
  NoStreamErrors() {}  // not trivial, so that the variable counts as used
#endif
};

// Random images with random boxes of 80 classes.
Loader::Make noise(int side, int objects) {
  return [=](int64_t position, Image& image) {
    cv::RNG random{uint64_t(position + 1)};
    random.fill(image, cv::RNG::UNIFORM, 0, 256);
    Item item;
    for (int i = 0; i < objects; ++i) {
      const double w = random.uniform(0.05, 0.5) * side, h = random.uniform(0.05, 0.5) * side;
      const double x = random.uniform(0.0, side - w), y = random.uniform(0.0, side - h);
      item.boxes.push_back({x, y, x + w, y + h, random.uniform(0, 80)});
    }
    item.index = position;
    return item;
  };
}

// The steps of train.cpp on one device.
struct Trainer {
  Config config;
  torch::Device device;
  YOLOX model{nullptr};
  std::optional<Training> training;
  std::optional<SavedStatistics> statistics;
  StepSettings step;

  Trainer(const std::string& name, torch::Device device, const std::string& amp,
          const std::string& optimizer = "sgd")
      : device(device), step{device.type(), dtype_of(amp)} {
    config.model = name;
    config.amp = amp;
    config.optimizer = optimizer;
    torch::manual_seed(0);
    model = YOLOX(name, 80);
    move(model, device, amp == "fp64" ? torch::kDouble : torch::kFloat);
    to_channels_last(*model);
    training.emplace(new_training(config, model, device));
    statistics.emplace(*model);
  }

  StepNumbers operator()(const Batch& batch, double lr) {
    Training& t = *training;
    const auto type = model->parameters()[0].scalar_type();
    const Input input = [&] {
      RECORD_USER_SCOPE("copy");
      statistics->save();
      const int side = int(batch.images.size(1));
      return make_network_input(batch, {side, side}, false, type);
    }();
    const Losses losses =
        compute_gradients(network_of(model), input.images, input.targets, 1, t.optimizer, t.scaler, step);
    const StepNumbers numbers = [&] {
      RECORD_USER_SCOPE("optimizer");
      const auto grads = gradients(t.optimizer.groups);
      t.scaler.unscale(grads);
      const Tensor norm = clip_gradients(grads, 10);
      StepNumbers read = step_numbers(losses, norm, batch.targets.total());
      if (read.finite()) t.optimizer.step(lr);
      return read;
    }();
    {
      RECORD_USER_SCOPE("EMA");
      ema_update(*t.ema, *model, ema_decay(0.9998, ++t.ema_updates));
    }
    t.scaler.update();
    return numbers;
  }
};

struct Trajectory {
  std::vector<StepNumbers> steps;
  std::vector<Tensor> weights;  // of the model and the EMA, on the CPU
};

Trajectory train_nano(torch::Device device, const std::string& amp, const std::string& optimizer = "sgd",
                      const std::function<void(Trainer&)>& prepare = {}) {
  constexpr int kSteps = 3, kBatch = 2, kSide = 96;
  Trainer trainer("yolox-nano", device, amp, optimizer);
  if (prepare) prepare(trainer);
  Loader loader(noise(kSide, 6), 0, kSteps * kBatch, kBatch, {kSide, kSide}, 2, device.is_cuda());
  DeviceLoader batches(loader, device);
  Trajectory out;
  for (int i = 0; i < kSteps; ++i) out.steps.push_back(trainer(batches.next(), 0.01));
  for (const YOLOX& m : {trainer.model, trainer.training->ema})
    for (const Tensor& p : m->parameters()) out.weights.push_back(p.detach().cpu());
  return out;
}

// Returns the largest relative difference of the losses.
double loss_error(const Trajectory& a, const Trajectory& b) {
  double most = 0;
  for (size_t i = 0; i < a.steps.size(); ++i)
    most = std::max(most, std::abs(a.steps[i].total - b.steps[i].total) / std::abs(b.steps[i].total));
  return most;
}

}  // namespace

// ---- numbers

TEST_CASE("gpu: three steps in float64 equal those of the CPU, with SGD and with Adam" * needs_gpu) {
  const NoStreamErrors no_stream_errors;
  for (const std::string optimizer : {"sgd", "adam"}) {
    INFO(optimizer);
    const Trajectory cpu = train_nano(torch::kCPU, "fp64", optimizer);
    const Trajectory gpu = train_nano(kGpu, "fp64", optimizer);
    CHECK(loss_error(gpu, cpu) < 1e-9);
    REQUIRE(gpu.weights.size() == cpu.weights.size());
    double most = 0;
    for (size_t i = 0; i < cpu.weights.size(); ++i)
      most = std::max(most, relative_error(gpu.weights[i], cpu.weights[i]));
    CHECK(most < 1e-6);
  }
}

TEST_CASE(
    "gpu: three steps in float32, bf16 and fp16 have the losses of the CPU within the precision of the type" *
    needs_gpu) {
  const NoStreamErrors no_stream_errors;
  const Trajectory cpu = train_nano(torch::kCPU, "fp64");
  const auto small_scale = [](Trainer& t) { t.training->scaler.scale.fill_(4); };
  for (const auto& [amp, most] : {std::pair("off", 0.03), {"bf16", 0.05}, {"fp16", 0.05}}) {
    const std::string name = amp;  // INFO cannot capture a structured binding
    INFO(name);
    const Trajectory gpu = train_nano(kGpu, amp, "sgd", small_scale);
    for (const StepNumbers& n : gpu.steps) CHECK(n.finite());
    CHECK(loss_error(gpu, cpu) < most);
  }
}

TEST_CASE("gpu: an overflow in fp16 is found" * needs_gpu) {
  const Trajectory gpu =
      train_nano(kGpu, "fp16", "sgd", [](Trainer& t) { t.training->scaler.scale.fill_(1e30); });
  CHECK_FALSE(gpu.steps[0].finite());
}

TEST_CASE("gpu: SyncBN over two ranks with equal images equals batch norm on one rank" * needs_gpu) {
  const NoStreamErrors no_stream_errors;
  const Trajectory cpu = train_nano(torch::kCPU, "fp64");
  const Trajectory gpu = train_nano(kGpu, "fp64", "sgd",
                                    [](Trainer& t) { use_sync_bn(*t.model, [](Tensor& x) { x.mul_(2); }); });
  CHECK(std::abs(gpu.steps[0].total / cpu.steps[0].total - 1) < 1e-9);
  CHECK(std::abs(gpu.steps[0].norm / cpu.steps[0].norm - 1) < 1e-6);
}

TEST_CASE("gpu: the pooling of --deterministic equals the plain one, forward and backward" * needs_gpu) {
  torch::manual_seed(4);
  YOLOX model("yolox-nano", 3);
  model->to(kGpu, torch::kDouble);
  set_training_mode(*model);
  const Tensor x = torch::rand({2, 3, 64, 64}, torch::TensorOptions(torch::kDouble).device(kGpu)) * 255;
  std::vector<std::vector<Tensor>> grads;
  for (const bool deterministic : {false, true}) {
    at::globalContext().setDeterministicAlgorithms(deterministic, /*warn_only=*/true);
    for (const Tensor& p : model->parameters()) p.mutable_grad() = Tensor();
    const Predictions p = model(x);
    (p.reg.square().mean() + p.obj.square().mean() + p.cls.square().mean()).backward();
    grads.emplace_back();
    for (const Tensor& w : model->parameters()) grads.back().push_back(w.grad().cpu());
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
  for (size_t i = 0; i < grads[0].size(); ++i) CHECK(relative_error(grads[1][i], grads[0][i]) < 1e-9);
}

// ---- data

TEST_CASE("gpu: batches of DeviceLoader equal those of the loader" * needs_gpu) {
  const NoStreamErrors no_stream_errors;
  Loader pinned(noise(64, 3), 0, 12, 2, {64, 64}, 2, true), plain(noise(64, 3), 0, 12, 2, {64, 64}, 2, false);
  DeviceLoader batches(pinned, kGpu);
  while (!plain.done()) {
    const Batch want = plain.next(), got = batches.next();
    CHECK(got.images.is_cuda());
    CHECK(torch::equal(got.images.cpu(), want.images));
    CHECK(torch::equal(got.targets.boxes.cpu(), want.targets.boxes));
    CHECK(torch::equal(got.targets.classes.cpu(), want.targets.classes));
  }
}

// ---- programs

TEST_CASE("gpu: train, evaluation, a resume on the CPU, and demo work from end to end" * needs_gpu *
          starts_programs) {
  TempDir dir;
  write_scenes(dir / "data", 8);
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 4 --epochs 4 --eval-interval 1 ";
  for (const std::string amp : {"off", "bf16", "fp16"}) {
    const std::string said =
        succeed(dir, "train", concat(flags, "--device cuda --amp ", amp, " --max-iters 3 --out ", amp));
    CHECK_MESSAGE(has(said, "cuda:0"), said);
  }
  const std::string on_cpu = succeed(dir, "train", "--resume off --device cpu --max-iters 4");
  CHECK_MESSAGE(has(on_cpu, "done: off/last.pth"), on_cpu);
  const std::string on_gpu = succeed(dir, "train", "--resume off --device cuda --max-iters 5");
  CHECK_MESSAGE(has(on_gpu, "done: off/last.pth"), on_gpu);
  for (const std::string device : {"cpu", "cuda"})
    succeed(dir, "eval",
            concat("--data data --weights off/last.pth --conf 0.001 --device ", device, " --json ", device,
                   ".json"));
  CHECK(json_number(dir / "cpu.json", "AP") ==
        doctest::Approx(json_number(dir / "cuda.json", "AP")).epsilon(1e-3));
  succeed(dir, "demo", "--source data/train --weights off/last.pth --device cuda --save drawn");
}

TEST_CASE("gpu: train: --bs auto and --dtr on a GPU" * needs_gpu * starts_programs) {
  TempDir dir;
  write_scenes(dir / "data", 8);
  const std::string flags =
      "--data data --model yolox-nano --size 64 --epochs 2 --eval-interval 0 --device cuda ";
  const std::string found = succeed(dir, "train", flags + "--bs auto --max-iters 1 --out auto");
  CHECK_MESSAGE(has(found, "--bs auto: "), found);
  succeed(dir, "train", flags + "--bs 4 --dtr auto --max-iters 2 --out dtr");
}

// ---- what only the simulated device shows

#ifdef YOLOX_SIMULATED_CUDA

namespace {

bool any_has(const std::vector<std::string>& errors, const std::string& part) {
  for (const auto& e : errors)
    if (has(e, part)) return true;
  return false;
}

int64_t waits() { return simulated_cuda::sum(simulated_cuda::host_waits()); }

// Returns the operator calls of one step in each phase of the step, and checks that the host waits once, for
// the numbers of the step.
std::map<std::string, int64_t> calls_of_step(const std::string& amp, bool sync_bn) {
  constexpr int kBatch = 16, kSide = 64;  // the counts do not depend on the size
  Trainer trainer("yolox-s", kGpu, amp);
  if (sync_bn) use_sync_bn(*trainer.model, [](Tensor& x) { x.mul_(2); });
  Loader loader(noise(kSide, 20), 0, 4 * kBatch, kBatch, {kSide, kSide}, 2, true);
  DeviceLoader batches(loader, kGpu);
  for (int i = 0; i < 3; ++i) {
    if (i == 2) simulated_cuda::reset_counts();
    const Batch batch = [&] {
      RECORD_USER_SCOPE("data");
      return batches.next();
    }();
    trainer(batch, 0.001);
  }
  const auto waited = simulated_cuda::host_waits();
  CHECK(simulated_cuda::sum(waited) == 1);
  CHECK(simulated_cuda::sum(simulated_cuda::unpinned_copies()) == 1);  // the counts of objects in simota.hpp
  for (const auto& w : waited) CHECK_MESSAGE(w.phase == "optimizer", w.phase << ": " << w.what);
  std::map<std::string, int64_t> calls;
  for (const auto& c : simulated_cuda::operator_calls()) {
    calls[c.phase] += c.times;
    // How many copies of batches a step starts depends on the speed of the loader.
    if (c.phase != "data") calls["all"] += c.times;
  }
  return calls;
}

}  // namespace

TEST_CASE("gpu: the host waits once in a step, and a step has the known number of operator calls") {
  const NoStreamErrors no_stream_errors;
  std::map<std::string, int64_t> all;
  for (const auto& [amp, sync_bn] :
       {std::pair("off", false), {"bf16", false}, {"fp16", false}, {"bf16", true}}) {
    const auto calls = calls_of_step(amp, sync_bn);
    std::string text;
    for (const auto& [phase, times] : calls) text += concat(" ", phase, " ", times);
    const std::string name = concat(amp, sync_bn ? "+sync" : "");
    MESSAGE(name << ":" << text);
    all[name] = calls.at("all");
  }
  // A change that lowers a count lowers its limit here and the table in bench/RESULTS.md.
  CHECK(all.at("off") <= 1179);
  CHECK(all.at("bf16") <= 1384);
  CHECK(all.at("fp16") <= 1392);
  CHECK(all.at("bf16+sync") <= 4270);
}

TEST_CASE("gpu: the simulated device counts the waits of the host") {
  const Tensor x = torch::arange(10, torch::TensorOptions(torch::kFloat).device(kGpu));
  simulated_cuda::reset_counts();
  const Tensor y = x * 2 + 1;
  CHECK(waits() == 0);
  CHECK(y.sum().item<float>() == 100);
  CHECK(waits() == 1);
  CHECK(x.index({x > 3}).numel() == 6);
  CHECK(waits() == 2);
  CHECK((x > 3).nonzero().numel() == 6);
  CHECK(waits() == 3);
  CHECK(torch::tensor({1.0f, 2.0f}, x.options()).is_cuda());
  CHECK(waits() == 4);
  CHECK(x.cpu()[3].item<float>() == 3);
  CHECK(waits() == 5);
  torch::cuda::synchronize();
  CHECK(waits() == 6);
}

TEST_CASE("gpu: the simulated device refuses tensors of two devices and operators without a kernel") {
  const Tensor x = torch::ones({10}, kGpu);
  CHECK_THROWS_WITH(x + torch::ones({10}), doctest::Contains("same device"));
  CHECK_THROWS_WITH(x.view({2, 5}).to_mkldnn(), doctest::Contains("no kernel for CUDA"));
}

TEST_CASE("gpu: the simulated device finds memory that is used on two streams without an order") {
  const c10::impl::VirtualGuardImpl guard(torch::kCUDA);
  // As DeviceLoader copies, but without the event, or without record_stream().
  for (const bool waits_for_event : {false, true}) {
    simulated_cuda::errors();
    const c10::Stream side = guard.getStreamFromGlobalPool(kGpu);
    c10::Event copied(torch::kCUDA);
    Tensor there;
    {
      const c10::StreamGuard on(side);
      there = torch::arange(1000, torch::kFloat).pin_memory().to(kGpu, /*non_blocking=*/true);
      copied.record(side);
    }
    if (waits_for_event) copied.block(guard.getStream(kGpu));
    const Tensor sum = there.sum();
    there = Tensor();
    const auto errors = simulated_cuda::errors();
    CHECK(any_has(errors, "without waiting for it") == !waits_for_event);
    CHECK(any_has(errors, "record_stream() is missing"));
  }
}

TEST_CASE("gpu: the simulated device finds pinned memory that is written before a copy from it is done") {
  simulated_cuda::errors();
  Tensor pinned = torch::arange(1000, torch::kFloat).pin_memory();
  Tensor there = pinned.to(kGpu, /*non_blocking=*/true);
  CHECK(simulated_cuda::pending_copies() == 1);
  pinned.fill_(-1);
  CHECK(there.cpu()[5].item<float>() == -1);
  CHECK(any_has(simulated_cuda::errors(), "pinned memory was written"));

  pinned = torch::arange(1000, torch::kFloat).pin_memory();
  there = pinned.to(kGpu, /*non_blocking=*/true);
  c10::Event copied(torch::kCUDA);
  copied.record(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(kGpu));
  copied.synchronize();
  pinned.fill_(-1);
  CHECK(there.cpu()[5].item<float>() == 5);
  CHECK(simulated_cuda::errors().empty());

  Tensor host = torch::zeros({1000}).pin_memory();
  host.copy_(there, /*non_blocking=*/true);
  CHECK(std::isnan(host.data_ptr<float>()[5]));
  torch::cuda::synchronize();
  CHECK(host.data_ptr<float>()[5] == 5);
}

TEST_CASE("gpu: the host cannot dereference memory of the simulated device") {
  const Tensor x = torch::ones({10}, kGpu);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL);
    volatile float value = x.data_ptr<float>()[0];
    _exit(value == 1 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGSEGV);
}

TEST_CASE("gpu: an allocation beyond the limit of the simulated device is an out-of-memory error") {
  simulated_cuda::set_limit(simulated_cuda::allocated() + (1 << 20));
  bool out_of_memory = false;
  try {
    torch::empty({1 << 20}, torch::TensorOptions(torch::kFloat).device(kGpu));
  } catch (const std::exception& e) {
    out_of_memory = is_out_of_memory(e);
  }
  simulated_cuda::set_limit(INT64_MAX);
  CHECK(out_of_memory);
}

#endif
