// SPDX-License-Identifier: Apache-2.0
#include "run/step_graphs.hpp"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.hpp"

namespace yolox {

// The loss of a graph computes with the largest number of objects for each image. With a crowded image in the
// batch, that is more work than the graph saves.
static constexpr int64_t kMostObjects = 512;

// A graph of yolox-s takes some MB on the host.
static constexpr int64_t kMostGraphs = 128;

StepGraphs::StepGraphs(bool on, const torch::nn::Module& model, torch::Device device, Ranks& ranks,
                       std::function<void(const std::string&)> failed)
    : on(on), device(device), ranks(ranks), failed(std::move(failed)) {
  if (!on) return;
  for (const Tensor& t : model.buffers())
    if (t.is_cpu()) counts.push_back(t);
  // The kernels of the optimizers read the learning rate as float32.
  lr = torch::zeros({}, torch::TensorOptions(torch::kFloat).device(device));
  ema_decay = torch::zeros({}, torch::TensorOptions(torch::kDouble).device(device));
}

StepGraphs::~StepGraphs() {
  try {
    turn_off();
  } catch (const std::exception&) {}  // a GPU that has failed fails in every call
}

void StepGraphs::free_graphs() {
  if (graphs == 0) return;
  torch::cuda::synchronize(device.index());  // the latest replay may still run
  for (auto& [key, kind] : kinds) kind.graph.reset();
  graphs = 0;
}

void StepGraphs::turn_off() {
  if (std::exchange(on, false)) free_graphs();
}

bool StepGraphs::free_memory() {
  if (!on || graphs == 0) return false;
  free_graphs();
  on = !std::exchange(was_freed, true);
  return true;
}

StepGraphs::Kind* StepGraphs::kind_of(const StepInput& input, ImageSize size, bool use_l1) {
  if (!on) return nullptr;
  const Batch& batch = input.batch;
  const Targets& from = batch.targets;
  const auto rows_for = [&](int64_t here) { return (int64_t(ranks.max(double(here))) + 31) / 32 * 32; };
  const int64_t rows = std::max<int64_t>(32,
                                         rows_for(*std::max_element(from.counts.begin(), from.counts.end()))),
                regions = rows_for(from.ignored.defined() ? from.ignored.size(1) : 0),
                n = batch.images.size(0);
  if (std::max(rows, regions) > kMostObjects) return nullptr;
  if (use_l1 != with_l1) {  // the graphs of the other kinds are of no more use
    free_graphs();
    kinds.clear();
    with_l1 = use_l1;
  }
  if (!images.defined()) images = torch::empty_like(batch.images);
  check(images.sizes() == batch.images.sizes(), "all batches of a run must have the same size");
  Kind& kind = kinds[{size.height, size.width, rows, regions}];
  Targets& targets = kind.input.batch.targets;
  if (kind.steps == 0) {
    kind.input = {batch, {0, lr}, {0, ema_decay}};
    kind.input.batch.images = images;
    targets = {torch::zeros({n, rows, 4}, from.boxes.options()),
               torch::zeros({n, rows}, from.classes.options()), std::vector<int64_t>(n, rows),
               torch::zeros({n}, from.classes.options())};
    if (regions > 0) targets.ignored = torch::zeros({n, regions, 4}, from.boxes.options());
  }
  images.copy_(batch.images, /*non_blocking=*/true);
  const int64_t used = from.boxes.size(1);
  targets.boxes.slice(1, 0, used).copy_(from.boxes, true);
  targets.classes.slice(1, 0, used).copy_(from.classes, true);
  targets.device_counts.copy_(from.device_counts, true);
  if (regions > 0) targets.ignored.zero_();
  if (from.ignored.defined()) targets.ignored.slice(1, 0, from.ignored.size(1)).copy_(from.ignored, true);
  lr.fill_(input.lr.value);
  ema_decay.fill_(input.ema_decay.value);
  kind.input.lr.value = input.lr.value;
  kind.input.ema_decay.value = input.ema_decay.value;
  return &kind;
}

void StepGraphs::run_step(Kind& kind, const std::function<void()>& step) {
  const bool first = kind.steps++ == 0;
  if (first || (!kind.graph && (graphs >= kMostGraphs || !record_graph(kind, step)))) return step();
  RECORD_USER_SCOPE("graph");
  ranks.may_wait();
  kind.graph->replay();
  if (!counts.empty()) at::_foreach_add_(counts, kind.counts_per_step);
}

bool StepGraphs::record_graph(Kind& kind, const std::function<void()>& step) {
  std::vector<Tensor> before;
  for (const Tensor& t : counts) before.push_back(t.clone());
  const auto restore_counts = [&] {
    for (size_t i = 0; i < counts.size(); ++i) counts[i].copy_(before[i]);
  };
  std::string why;
  try {
    kind.graph = std::make_unique<CudaGraph>(device, step);
  } catch (const std::exception& e) {
    restore_counts();
    if (!failed) throw;
    why = e.what();
    free_failed_backward(device);
  }
  ++graphs;
  kind.counts_per_step.clear();
  for (size_t i = 0; i < counts.size(); ++i) kind.counts_per_step.push_back(counts[i] - before[i]);
  restore_counts();
  // Recording waits for no other rank (NCCL_GRAPH_REGISTER in ddp.hpp), so that all arrive here.
  if (ranks.max(!why.empty()) == 0) return true;
  failed(why.empty() ? "another rank cannot record them" : why.substr(0, why.find('\n')));
  turn_off();
  return false;
}

}  // namespace yolox
