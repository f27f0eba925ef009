// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests that need a GPU: a real one, or the simulated one of tests/simulated_cuda
// (YOLOX_SIMULATED_CUDA), which also counts operators and waits, and checks the use of streams.
#pragma once
#include "models.hpp"
#include "programs.hpp"

#include <ATen/record_function.h>

#include "data/loader.hpp"
#include "run/fit.hpp"
#include "run/setup.hpp"
#include "run/step_graphs.hpp"
#include "step.hpp"

#ifdef YOLOX_SIMULATED_CUDA
#include "simulated_cuda.hpp"
#endif

namespace yolox::test {

inline const torch::Device kGpu(torch::kCUDA, 0);

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
inline Loader::Make noise(int side, int objects) {
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

// Uses the CUDA kernels of bn_silu() in its scope.
struct FusedNorm {
  FusedNorm() { use_fused_norm(true); }
  ~FusedNorm() { use_fused_norm(false); }
};
inline const doctest::skip needs_fused_norm(!torch::cuda::is_available() || !has_fused_norm());

// The steps of train.cpp on one device.
struct Trainer {
  Config config;
  torch::Device device;
  YOLOX model{nullptr};
  std::optional<Training> training;
  std::optional<SavedStatistics> statistics;
  EmaTensors averaged;
  StepGuard step_guard;
  StepSettings step;
  std::unique_ptr<StepGraphs> graphs;  // null: without graphs

  Trainer(const std::string& name, torch::Device device, const std::string& amp,
          const std::string& optimizer = "sgd")
      : device(device), step{device.type(), dtype_of(amp)} {
    config.model = name;
    config.amp = amp;
    config.optimizer = optimizer;
    fill_in(config);
    torch::manual_seed(0);
    model = make_model(name, 80);
    move(model, device, amp == "fp64" ? torch::kDouble : torch::kFloat);
    to_channels_last(*model);
    training.emplace(new_training(config, model, device));
    statistics.emplace(*model);
    averaged = ema_tensors(*training->ema, *model);
    step.cast_weights = cast_weights(*model, step.amp);
  }

  // Returns the numbers of a step.
  StepNumbers operator()(const Batch& batch, double lr) { return start(batch, lr).read(); }

  // Launches the kernels of a step.
  PendingNumbers start(const Batch& batch, double lr) {
    Training& t = *training;
    const int side = int(batch.images.size(1));
    {
      RECORD_USER_SCOPE("copy");
      statistics->save();
    }
    const StepInput next{batch, lr, ema_decay({}, t.ema_updates + 1)};
    const auto on_device = [&](const StepInput& in) { return compute(in, {side, side}); };
    const auto [losses, norm] =
        graphs ? graphs->run(next, {side, side}, step.use_l1, on_device) : on_device(next);
    t.count_step(lr);
    return {losses, norm, double(batch.targets.total())};
  }

 private:
  std::pair<Losses, Tensor> compute(const StepInput& in, ImageSize size) {
    Training& t = *training;
    const auto type = model->parameters()[0].scalar_type();
    const Input input = make_network_input(in.batch, size, false, type);
    const Losses losses =
        compute_gradients(network_of(model), input.images, input.targets, 1, t.optimizer, t.scaler, step);
    if (after_loss) after_loss(losses);
    RECORD_USER_SCOPE("optimizer");
    const auto grads = gradients(t.optimizer.groups);
    t.scaler.unscale(grads);
    const Tensor norm = clip_gradients(grads, 10);
    const Tensor skip = step_guard.skip(losses.total, norm);
    t.optimizer.step(in.lr, skip);
    {
      RECORD_USER_SCOPE("EMA");
      ema_update(averaged, in.ema_decay, skip);
    }
    t.scaler.update();
    return {losses, norm};
  }

 public:
  std::function<void(const Losses&)> after_loss;  // called in each step
};

struct Trajectory {
  std::vector<StepNumbers> steps;
  std::vector<Tensor> weights;  // of the model and the EMA, on the CPU
};

inline Trajectory train_nano(torch::Device device, const std::string& amp,
                             const std::string& optimizer = "sgd",
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
inline double loss_error(const Trajectory& a, const Trajectory& b) {
  double most = 0;
  for (size_t i = 0; i < a.steps.size(); ++i)
    most = std::max(most, std::abs(a.steps[i].total - b.steps[i].total) / std::abs(b.steps[i].total));
  return most;
}

}  // namespace yolox::test
