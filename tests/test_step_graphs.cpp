// SPDX-License-Identifier: Apache-2.0
// Training steps as CUDA graphs (run/step_graphs.hpp), on a real GPU and on the simulated one, which replays
// the operators that it has recorded.
#include "gpu.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

constexpr int kBatch = 2, kSide = kSimulated ? 64 : 96;

// Batches whose images have between 1 and 40 objects, for two kinds of steps.
struct BatchStream : GpuBatches {
  BatchStream()
      : GpuBatches(
            [](int64_t position, Image& image) {
              Item item = noise(kSide, 1 + int(position * 13 % 40))(position, image);
              // Some images have one to three ignored regions.
              for (int i = 0; i < position % 5 - 1; ++i)
                item.boxes.push_back({4.0 * i, 8, 4.0 * i + 20, 60, kIgnoredRegion});
              return item;
            },
            kSide, 1000 * kBatch, kBatch) {}
};

// Learning rates that are exact in float32.
double lr_of(int step) { return (1 + step % 4) / 1024.0; }

// Returns model, EMA, optimizer and scaler, on the CPU.
std::vector<Tensor> state_of(Trainer& t) {
  std::vector<Tensor> all;
  for (const Tensor& x : tensors_of(*t.training)) all.push_back(x.detach().cpu().clone());
  return all;
}

double largest_difference(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double scale = std::max(1e-3, b[i].to(torch::kDouble).abs().max().item<double>());
    most = std::max(most,
                    (a[i].to(torch::kDouble) - b[i].to(torch::kDouble)).abs().max().item<double>() / scale);
  }
  return most;
}

}  // namespace

GPU_TEST("gpu: steps as CUDA graphs equal steps without: losses, weights, EMA, statistics and counts") {
  const Deterministic deterministic;
  for (const auto& [amp, optimizer, limit] : {std::tuple("fp64", "sgd", 1e-9),
                                              {"off", "adamw", 1e-3},
                                              {"bf16", "sgd", 0.1},
                                              {"fp16", "adam", 0.1}}) {
    const std::string precision = amp;
    if (kSimulated && (precision == "off" || precision == "bf16")) continue;  // for time
    CAPTURE(precision);
    Trainer plain("yolox-nano", kGpu, amp, optimizer), graphs("yolox-nano", kGpu, amp, optimizer);
    graphs.use_graphs(true);
    BatchStream a, b;
    for (int i = 0; i < 14; ++i) {
      plain.use_l1 = graphs.use_l1 = i >= 8;
      const int side = i % 2 == 0 ? kSide : kSide - 32;  // the graphs of two sizes are replayed in turn
      const StepMetrics one = plain(a.next(), lr_of(i), side), two = graphs(b.next(), lr_of(i), side);
      CHECK(std::abs(two.total / one.total - 1) <= limit);
      CHECK(two["objects"] == one["objects"]);
      if (precision == "fp64") CHECK(two["positives"] == one["positives"]);
    }
    CHECK(largest_difference(state_of(graphs), state_of(plain)) <= limit);
    for (const auto& buffer : graphs.model->named_buffers())
      if (has(buffer.key(), "num_batches_tracked")) CHECK(buffer.value().item<int64_t>() == 14);
  }
}

GPU_TEST("gpu: with --deterministic, steps that are replayed have the bits of steps that run") {
  const Deterministic deterministic;
  // The second run is at another step when it records, as a resumed run is.
  std::vector<std::vector<Tensor>> states;
  for (const int record_from : {0, 3}) {
    Trainer t("yolox-nano", kGpu, "bf16");
    t.use_graphs(true);
    BatchStream batches;
    for (int i = 0; i < 7; ++i) {
      if (i == record_from) t.use_graphs(true);
      t(batches.next(), lr_of(i));
    }
    states.push_back(state_of(t));
  }
  for (size_t i = 0; i < states[0].size(); ++i) CHECK(torch::equal(states[0][i], states[1][i]));
}

GPU_TEST("gpu: a replayed step whose gradient overflows changes nothing but the loss scale") {
  Trainer t("yolox-nano", kGpu, "fp16", "adam");
  t.training->scaler.scale.fill_(4);
  t.use_graphs(true);
  BatchStream batches;
  for (int i = 0; i < 6; ++i) t(batches.next(), lr_of(i));
  const auto before = state_of(t);
  t.training->scaler.scale.fill_(1e30);
  for (int i = 6; i < 9; ++i) CHECK_FALSE(t(batches.next(), lr_of(i)).finite());
  const auto after = state_of(t);
  CHECK(t.training->scaler.scale.item<double>() < 1e30);
  t.training->scaler.scale.fill_(1);
  // The forward pass changes the batch norm statistics of the model, but not those of the EMA. The last two
  // tensors are those of the scaler.
  const size_t buffers = t.model->parameters().size(), ema = buffers + t.model->buffers().size();
  for (size_t i = 0; i < after.size() - 2; ++i) {
    INFO(i);
    if (i < buffers || i >= ema) CHECK(torch::equal(after[i], before[i]));
  }
  CHECK(torch::equal(t.training->optimizer.steps[0][0].cpu(), torch::full({}, 6.0f)));
  t(batches.next(), lr_of(9));
  CHECK(torch::equal(t.training->optimizer.steps[0][0].cpu(), torch::full({}, 7.0f)));
}

GPU_TEST("gpu: after a loss that is not finite, later replays change nothing") {
  Trainer t("yolox-nano", kGpu, "off");
  t.use_graphs(true);
  BatchStream batches;
  for (int i = 0; i < 6; ++i) t(batches.next(), lr_of(i));
  const auto weights = [&] { return t.model->parameters()[0].detach().cpu().clone(); };
  const Tensor first = t.model->parameters()[0].detach(), good = first.clone(), before = weights();
  first.fill_(NAN);
  CHECK_FALSE(t(batches.next(), lr_of(6)).finite());
  first.copy_(good);
  for (const Tensor& buffer : t.model->buffers())
    if (buffer.is_floating_point()) buffer.nan_to_num_(1);
  CHECK(t(batches.next(), lr_of(7)).finite());
  CHECK(torch::equal(weights(), before));
}

GPU_TEST("gpu: a step that reads a result on the host is not recorded, and training goes on without graphs") {
  const Deterministic deterministic;
  Trainer plain("yolox-nano", kGpu, "off"), t("yolox-nano", kGpu, "off");
  t.use_graphs(true);
  t.observed->after_forward = [](const Tensor& x) { x.sum().item<double>(); };
  BatchStream a, b;
  for (int i = 0; i < 5; ++i) {
    const StepMetrics one = plain(a.next(), lr_of(i)), two = t(b.next(), lr_of(i));
    CHECK(std::abs(two.total / one.total - 1) < 1e-3);
  }
  CHECK_FALSE(t.steps->graphs.is_on());
  const std::string log = contents(t.folder / "log.txt");
  CHECK_HAS(log, "captur");
  CHECK(log.find("without the CUDA graphs") == log.rfind("without the CUDA graphs"));
  for (const auto& buffer : t.model->named_buffers())
    if (has(buffer.key(), "num_batches_tracked")) CHECK(buffer.value().item<int64_t>() == 5);
}

GPU_TEST("gpu: a batch with a crowded image runs without a graph") {
  Trainer t("yolox-nano", kGpu, "off");
  t.use_graphs(true);
  int run = 0;
  t.observed->after_forward = [&](const Tensor&) { ++run; };
  GpuBatches crowded(noise(kSide, 600), kSide, 8 * kBatch, kBatch);
  for (int i = 0; i < 4; ++i) CHECK(t(crowded.next(), 0.001).finite());
  CHECK(run == 4);
  BatchStream usual;
  const Batch batch = usual.next();
  for (int i = 0; i < 4; ++i) t(batch, 0.001);
  CHECK(run == 6);  // one step, one recording
}

#ifdef YOLOX_SIMULATED_CUDA
GPU_TEST("gpu: if memory runs out beside graphs, they are freed; the second time there are no new ones") {
  BatchStream batches;
  GpuBatches crowded(noise(kSide, 600), kSide, 100, kBatch);  // these steps run without a graph
  const Batch few = batches.next(), many = crowded.next();
  const AtEnd no_limit([] { simulated_cuda::set_limit(INT64_MAX); });
  Trainer plain("yolox-nano", kGpu, "off"), t("yolox-nano", kGpu, "off");
  plain(many, 0.001);
  simulated_cuda::reset_peak();
  const int64_t start = simulated_cuda::allocated();
  plain(many, 0.001);
  const int64_t needed = simulated_cuda::peak_allocated() - start;  // bytes
  t.use_graphs(true);
  for (const std::string said : {"CUDA graphs, which keep the memory of a step, are freed",
                                 "out of memory again; training goes on without CUDA graphs"}) {
    for (int i = 0; i < 3; ++i) t(few, 0.001);
    simulated_cuda::reset_counts();
    t(few, 0.001);
    CHECK(simulated_cuda::operator_calls() < 20);
    simulated_cuda::set_limit(simulated_cuda::allocated() + needed * 3 / 4);
    CHECK(t(many, 0.001).finite());
    CHECK_HAS(contents(t.folder / "log.txt"), said);
    simulated_cuda::set_limit(INT64_MAX);
  }
  CHECK_FALSE(has(contents(t.folder / "log.txt"), "micro-batches"));
}
#endif
