// SPDX-License-Identifier: Apache-2.0
// Training steps as CUDA graphs (--graph). A step of yolox-s launches about a thousand kernels, which
// takes the host longer than a fast GPU needs to run them. A graph records the kernels of a step once, and
// then launches all of them with one call.
//
// A graph replays the addresses and the numbers of its recording. Therefore each batch is copied to the same
// memory, numbers that change from step to step are tensors (StepScalar), and the counts of objects are upper
// bounds (Targets::counts).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/torch.hpp"
#include "ddp.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "run/log.hpp"

namespace yolox {

// Input of a step: everything that changes from step to step.
struct StepInput {
  Batch batch;
  ImageSize size;  // of the network input
  bool use_l1;     // with L1 loss
  StepScalar lr, ema_decay;
};

// Runs training steps, and replays them as CUDA graphs. There is a graph for each kind of step: input size,
// with or without L1 loss, and the largest numbers of objects of an image, rounded up to multiples of 32. The
// first step of a kind runs without a graph, so that cuDNN selects its algorithms. The second one is
// recorded. All ranks record and replay the same kinds: a graph contains the collectives of its step.
class StepGraphs {
 public:
  using Step = std::function<Losses(const StepInput&)>;

  // on: use graphs, on all ranks; false: each step runs as it is. model: its counts on the CPU
  // (num_batches_tracked) are increased in each replay. If a rank cannot record a step, a line in the log
  // says why, and graphs are turned off.
  StepGraphs(bool on, const torch::nn::Module& model, torch::Device device, Ranks& ranks, Log& log);
  ~StepGraphs();

  // Returns step(input), or the result of a replay, which is valid until the next call. step() must launch
  // the same kernels in each step of a kind, and must not read results on the host.
  Losses run(const StepInput& input, const Step& step);

  // After an out-of-memory error, frees all graphs, which keep the memory of a step. After the second one,
  // later steps run without graphs. May be called by step(). Returns false if there were none.
  bool free_memory();
  // Frees all graphs, after the latest replay and before the ranks close: NCCL waits for its graphs.
  void free_graphs();
  bool is_on() const { return on; }

 private:
  struct Kind;

  // Copies the input to the memory that graphs read. Returns the kind of the step, or null for a step without
  // a graph.
  Kind* kind_of(const StepInput& input);
  // Records a step. Returns false if a rank cannot record it.
  bool record_graph(Kind& kind, const Step& step);

  bool on;
  bool was_freed = false;  // by free_memory()
  const torch::Device device;
  Ranks& ranks;
  Log& log;
  std::vector<Tensor> counts;  // integer buffers of the model on the CPU
  Tensor lr, ema_decay, images;
  bool with_l1 = false;  // of the latest step
  int64_t graphs = 0;
  // By height, width, rows of objects of an eighth of the images and of the others, and of ignored regions.
  std::map<std::array<int64_t, 5>, std::unique_ptr<Kind>> kinds;
};

}  // namespace yolox
