// SPDX-License-Identifier: Apache-2.0
#include "run/step_graphs.hpp"

#include <ATen/record_function.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/cuda_graph.hpp"
#include "base/text.hpp"

namespace yolox {

// The loss of a graph computes with the largest number of objects for each image. With a crowded image in the
// batch, that is more work than the graph saves.
static constexpr int64_t kMostObjects = 512;

// A graph of yolox-s takes some MB on the host.
static constexpr int64_t kMostGraphs = 128;

struct StepGraphs::Kind {
  StepInput input;  // in the memory that graphs read
  int64_t steps = 0;
  CudaGraph graph;
  std::vector<Tensor> counts_per_step;  // increase of `counts` in each step
  Losses result;
};

StepGraphs::StepGraphs(bool on, const torch::nn::Module& model, torch::Device device, Ranks& ranks, Log& log)
    : on(on), device(device), ranks(ranks), log(log) {
  if (!on) return;
  for (const Tensor& t : model.buffers())
    if (t.is_cpu()) counts.push_back(t);
  // The kernels of the optimizers read the learning rate as float32.
  lr = torch::zeros({}, torch::TensorOptions(torch::kFloat).device(device));
  ema_decay = torch::zeros({}, torch::TensorOptions(torch::kDouble).device(device));
}

StepGraphs::~StepGraphs() {
  try {
    free_graphs();
  } catch (const std::exception&) {}  // a GPU that has failed fails in every call
}

void StepGraphs::free_graphs() {
  if (graphs == 0) return;
  torch::cuda::synchronize(device.index());  // the latest replay may still run
  for (auto& [key, kind] : kinds) kind->graph = nullptr;
  graphs = 0;
}

bool StepGraphs::free_memory() {
  if (!on || graphs == 0) return false;
  free_graphs();
  on = !std::exchange(was_freed, true);
  log.line(on ? "note: out of memory; CUDA graphs, which keep the memory of a step, are freed"
              : "note: out of memory again; training goes on without CUDA graphs");
  return true;
}

Losses StepGraphs::run(const StepInput& input, const Step& step) {
  Kind* kind = on ? kind_of(input) : nullptr;
  if (!kind) return step(input);
  // Eager, because NCCL connects at the first use of an algorithm, and then waits for other ranks.
  const bool first = kind->steps++ == 0;
  if (first || (!kind->graph && (graphs >= kMostGraphs || !record_graph(*kind, step))))
    return step(kind->input);
  RECORD_USER_SCOPE("graph");
  kind->graph();
  if (!counts.empty()) at::_foreach_add_(counts, kind->counts_per_step);
  return kind->result;
}

StepGraphs::Kind* StepGraphs::kind_of(const StepInput& input) {
  const Batch& batch = input.batch;
  const Targets& from = batch.targets;
  // An eighth of the images may have `rows` objects, the others `usual_rows`, so that one crowded image does
  // not set the work for all. All ranks use the graph of the largest counts.
  const int64_t n = batch.images.size(0), crowded = n / 8;
  std::vector<int64_t> sorted = from.counts;
  std::ranges::sort(sorted, std::greater());
  const auto most = ranks.max({double(sorted[0]), double(sorted[crowded]),
                               from.ignored.defined() ? double(from.ignored.size(1)) : 0});
  const auto in_steps = [](double count) { return (int64_t(count) + 31) / 32 * 32; };
  const int64_t rows = std::max<int64_t>(32, in_steps(most[0])),
                usual_rows = std::max<int64_t>(32, in_steps(most[1])), regions = in_steps(most[2]);
  if (std::max(rows, regions) > kMostObjects) return nullptr;
  if (input.use_l1 != with_l1) {  // the graphs of the other kinds are of no more use
    free_graphs();
    kinds.clear();
    with_l1 = input.use_l1;
  }
  if (!images.defined()) images = torch::empty_like(batch.images);
  check(images.sizes() == batch.images.sizes(), "all batches of a run must have the same size");
  std::unique_ptr<Kind>& kind = kinds[{input.size.height, input.size.width, rows, usual_rows, regions}];
  if (!kind) {
    kind = std::make_unique<Kind>(
        Kind{{batch, input.size, input.use_l1, {0, lr}, {0, ema_decay}}, 0, {}, {}, {}});
    kind->input.batch.images = images;
    kind->input.batch.targets = {
        torch::zeros({n, rows, 4}, from.boxes.options()), torch::zeros({n, rows}, from.classes.options()),
        std::vector<int64_t>(n, usual_rows), torch::zeros({n}, from.classes.options())};
    std::fill_n(kind->input.batch.targets.counts.begin(), crowded, rows);
    kind->input.batch.targets.sorted_bounds = true;
    if (regions > 0) kind->input.batch.targets.ignored = torch::zeros({n, regions, 4}, from.boxes.options());
  }
  Targets& targets = kind->input.batch.targets;
  images.copy_(batch.images, /*non_blocking=*/true);
  const int64_t used = from.boxes.size(1);
  targets.boxes.slice(1, 0, used).copy_(from.boxes, true);
  targets.classes.slice(1, 0, used).copy_(from.classes, true);
  targets.device_counts.copy_(from.device_counts, true);
  if (regions > 0) targets.ignored.zero_();
  if (from.ignored.defined()) targets.ignored.slice(1, 0, from.ignored.size(1)).copy_(from.ignored, true);
  lr.fill_(input.lr.value);
  ema_decay.fill_(input.ema_decay.value);
  kind->input.lr.value = input.lr.value;
  kind->input.ema_decay.value = input.ema_decay.value;
  return kind.get();
}

bool StepGraphs::record_graph(Kind& kind, const Step& step) {
  std::vector<Tensor> before;
  for (const Tensor& t : counts) before.push_back(t.clone());
  std::string why;
  try {
    kind.graph = record_cuda_graph(device, [&] { kind.result = step(kind.input); });
    if (++graphs == kMostGraphs)
      log.line(concat("note: there are ", kMostGraphs, " CUDA graphs; steps of other kinds run without one"));
  } catch (const std::exception& e) {
    why = e.what();
    free_failed_backward(device);
  }
  // Recording runs no kernel, but it has counted on the CPU.
  kind.counts_per_step.clear();
  for (size_t i = 0; i < counts.size(); ++i) {
    kind.counts_per_step.push_back(counts[i] - before[i]);
    counts[i].copy_(before[i]);
  }
  // Recording waits for no other rank (NCCL_GRAPH_REGISTER in lib/ddp/launch.cpp), so that all arrive here.
  if (ranks.max(!why.empty()) == 0) return true;
  why = why.empty() ? "another rank cannot record them" : why.substr(0, why.find('\n'));
  log.line("warning: training goes on without the CUDA graphs (--graph), because " + why);
  free_graphs();
  on = false;
  return false;
}

}  // namespace yolox
