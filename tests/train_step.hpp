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
        micro_batches(t, 1, images, ranks, "", graphs, log),
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
