// SPDX-License-Identifier: Apache-2.0
// Helpers of the tests that need a GPU: a real one, or the simulated one of tests/simulated_cuda
// (YOLOX_SIMULATED_CUDA), which also counts operators and waits, and checks the use of streams.
#pragma once
#include "programs.hpp"

#include "data/loader.hpp"
#include "train_step.hpp"

namespace yolox::test {

inline const torch::Device kGpu(torch::kCUDA, 0);
inline const int kGpus = kSimulated ? 3 : int(torch::cuda::device_count());

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

// Square batches on the device.
struct GpuBatches : Loader {
  GpuBatches(const Loader::Make& make, int side, int64_t images, int batch = 2, torch::Device device = kGpu)
      : Loader(make, 0, images, batch, {side, side}, 2, device) {}
};

// Cases that use the CUDA kernels of bn_silu().
struct FusedNorm : NoStreamErrors {
  FusedNorm() { use_fused_norm(true); }
  ~FusedNorm() { use_fused_norm(false); }
};
inline const doctest::skip needs_fused_norm(!torch::cuda::is_available() || !has_fused_norm());
#define FUSED_TEST(name) TEST_CASE_FIXTURE(FusedNorm, name* needs_fused_norm)
// Cases that only the simulated device can run.
#define SIMULATED_TEST(name) PROGRAM_TEST(name* doctest::skip(!torch::cuda::is_available() || !kSimulated))
#define SEVERAL_GPUS(name) PROGRAM_TEST(name* doctest::skip(!torch::cuda::is_available() || kGpus < 2))

// Returns the collectives of two ranks that have the same images, to try SyncBN in one process.
inline SyncBnCollectives two_equal_ranks() {
  return {[](Tensor& x) { x.mul_(2); }, [](const Tensor& x) { return x.repeat({2, 1}); }};
}

// The steps of train.cpp on one device.
struct Trainer {
  TempDir folder;
  Log log{folder / "log.txt", /*quiet=*/true};
  Config config;
  torch::Device device;
  YOLOX model{nullptr};
  std::shared_ptr<ObservedBackbone> observed;  // of the model
  std::optional<Training> training;
  std::optional<TrainSteps> steps;
  bool use_l1 = false;

  Trainer(const std::string& name, torch::Device device, const std::string& amp,
          const std::string& optimizer = "sgd")
      : device(device) {
    config.model = name;
    config.amp = amp;
    config.optimizer = optimizer;
    fill_in(config);
    torch::manual_seed(0);
    model = make_model(name, 80);
    move(model, device, amp == "fp64" ? torch::kDouble : torch::kFloat);
    to_channels_last(*model);
    training.emplace(
        new_training(config, model, copy_of(model, device), {}, {}, device, /*casts_together=*/true));
    observed = std::make_shared<ObservedBackbone>(model->backbone);
    model->backbone = observed;
    use_graphs(false);
  }
  void use_graphs(bool on) { steps.emplace(*training, device, log, on); }

  // Returns the numbers of a step. side: of the network input; 0: that of the images.
  StepMetrics operator()(const Batch& batch, double lr, int side = 0) {
    start(batch, lr, side);
    return steps->unread.read().back().numbers;
  }
  // Launches the kernels of a step.
  void start(const Batch& batch, double lr, int side = 0) {
    if (side == 0) side = int(batch.images.size(1));
    (*steps)(batch, {side, side}, use_l1, lr);
  }
};

struct Trajectory {
  std::vector<StepMetrics> steps;
  std::vector<Tensor> weights;  // of the model and the EMA, on the CPU
};

inline Trajectory train_nano(torch::Device device, const std::string& amp,
                             const std::string& optimizer = "sgd",
                             const std::function<void(Trainer&)>& prepare = {}) {
  constexpr int kSteps = 3, kBatch = 2, kSide = 96;
  Trainer trainer("yolox-nano", device, amp, optimizer);
  if (prepare) prepare(trainer);
  GpuBatches batches(noise(kSide, 6), kSide, kSteps * kBatch, kBatch, device);
  Trajectory out;
  for (int i = 0; i < kSteps; ++i)
    out.steps.push_back(trainer(batches.next(), 0.01, i == 1 ? kSide - 32 : kSide));  // one is resized
  for (const YOLOX& m : {trainer.model, trainer.training->ema})
    for (const Tensor& p : m->parameters()) out.weights.push_back(p.detach().cpu());
  return out;
}

}  // namespace yolox::test
