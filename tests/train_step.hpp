// SPDX-License-Identifier: Apache-2.0
// The step of train.cpp, for tests and benchmarks.
#pragma once
#define YOLOX_WITHOUT_MAIN
#include "train.cpp"

namespace yolox::test {

// Uses deterministic algorithms in its scope.
struct Deterministic {
  Deterministic() { use_deterministic_algorithms(); }
  ~Deterministic() {
    at::globalContext().setDeterministicAlgorithms(false, false);
    at::globalContext().setDeterministicCuDNN(false);
  }
};

// The backbone of a model, with functions that replace its input and see its first output.
struct ObservedBackbone : Backbone {
  explicit ObservedBackbone(std::shared_ptr<Backbone> inner) : inner(std::move(inner)) {}
  std::vector<Tensor> forward(const Tensor& images) override {
    auto out = inner->forward(before ? before(images) : images);
    if (after_forward) after_forward(out[0]);
    return out;
  }
  const std::shared_ptr<Backbone> inner;
  std::function<Tensor(const Tensor&)> before;
  std::function<void(const Tensor&)> after_forward;
};

// Returns the training state of a model, with SGD and without EMA.
inline Training training_of(const YOLOX& model) {
  return {model, YOLOX(nullptr), Optimizer("sgd", parameter_groups(*model, 0), false),
          GradScaler(false, torch::kCPU)};
}

// yolox-nano with three classes and a batch for it, always with the same numbers.
struct SmallTraining {
  YOLOX model{nullptr};
  std::optional<Training> training;
  Input input;

  // objects: of each image. side: of the images. in_order: channels-last.
  explicit SmallTraining(const std::vector<int64_t>& objects, int64_t side, bool in_order = true,
                         at::ScalarType type = torch::kFloat, torch::Device device = torch::kCPU) {
    torch::manual_seed(3);
    model = make_model("yolox-nano", 3);
    move(model, device, type);
    if (in_order) to_channels_last(*model);
    training.emplace(training_of(model));
    const auto n = int64_t(objects.size());
    const auto format = in_order ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
    input = {torch::randint(0, 256, {n, 3, side, side}).to(device, type).contiguous(format),
             {torch::tensor({20.f, 30.f, 16.f, 24.f}).repeat({n, 2, 1}).to(device, type),
              torch::zeros({n, 2}, torch::kLong).to(device), objects}};
  }
  // Returns the losses of forward_backward() of a training with the same images.
  Losses compute(Training& t, int64_t parts = 1, bool use_l1 = false) {
    Ranks alone(RankInfo(), torch::kCPU, 0);
    return forward_backward(t, input, parts, use_l1, alone);
  }
  std::vector<Tensor> grads() const { return gradients(training->optimizer.groups); }
};

// Steps of train.cpp on one rank, without DTR.
struct TrainSteps {
  Training& t;
  Ranks ranks;
  StepGraphs graphs;
  MicroBatches micro_batches;
  UnreadSteps unread;
  Dtr dtr;
  TrainStep step;

  // images: the largest number of micro-batches. clip: of --clip.
  TrainSteps(Training& t, torch::Device device, Log& log, bool with_graphs = false, int64_t images = 1 << 20,
             double clip = 10)
      : t(t),
        ranks(RankInfo(), device, 60),
        graphs(with_graphs, *t.model, device, ranks, log),
        micro_batches{t, 1, images, ranks, "", graphs, log},
        unread(device, /*alone=*/true),
        step{t, micro_batches, dtr, ranks, clip} {}
  // Launches the kernels of a step.
  Losses operator()(const Batch& batch, ImageSize size, bool use_l1, double lr) {
    const Losses losses =
        graphs.run({batch, size, use_l1, lr, ema_decay({}, t.ema_updates + 1)}, std::ref(step));
    unread.add(t.iteration, lr, dtr.step(), losses);
    t.count_step(lr);
    return losses;
  }
};

// Returns the losses as numbers.
inline StepMetrics numbers_of(const Losses& losses) {
  UnreadSteps unread(losses.total.device(), true);
  unread.add(0, 0, {}, losses);
  return unread.read()[0].numbers;
}

}  // namespace yolox::test
