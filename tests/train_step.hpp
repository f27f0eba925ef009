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

// TrainSteps on one rank. The test "train.cpp: ..." compares step() with the loop of train().
struct TrainSteps {
  Training& t;
  Config config;  // of --clip
  Ranks ranks;
  StepGraphs graphs;
  MicroBatches micro_batches;
  UnreadSteps unread;
  StepGuard guard;
  Dtr dtr;  // off
  std::optional<GradientReducer> reducer;

  // images: the largest number of micro-batches.
  TrainSteps(Training& t, torch::Device device, Log& log, bool with_graphs = false, int64_t images = 1 << 20)
      : t(t),
        ranks(RankInfo(), device, 60),
        graphs(with_graphs, *t.model, device, ranks, log),
        micro_batches(t, 1, images, ranks, "", graphs, log),
        unread(device, /*alone=*/true) {}
  // Launches the kernels of a step.
  Losses step(const Batch& batch, ImageSize size, bool use_l1, double lr) {
    const StepInput next{batch, size, use_l1, lr, ema_decay({}, t.ema_updates + 1)};
    const Losses losses = graphs.run(next, [&](const StepInput& in) {
      Losses losses = fit_forward_backward(t, in, micro_batches, dtr, ranks, reducer);
      const std::vector<Tensor> grads = gradients(t.optimizer.groups);
      t.scaler.unscale(grads);
      const Tensor norm = ranks.agreed(gradient_norm(grads));
      clip_gradients(grads, norm, config.clip);
      losses.log("grad_norm", norm);
      const Tensor skip = guard.skip(losses.total, norm);  // 1: only the loss scale changes
      t.optimizer.step(in.lr, skip);
      ema_update(t.averaged, in.ema_decay, skip);
      t.scaler.update();
      return losses;
    });
    unread.add(t.iteration, next.lr.value, dtr.step(), losses);
    t.count_step(next.lr.value);
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
