// SPDX-License-Identifier: Apache-2.0
// Training steps as CUDA graphs (--graph). A step of yolox-s launches about a thousand kernels, which
// takes the host longer than a fast GPU needs to run them. A graph records the kernels of a step once, and
// then launches all of them with one call.
#pragma once
#include <torch/torch.h>

#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/cuda_graph.hpp"
#include "data/batch.hpp"
#include "data/multiscale.hpp"
#include "ddp.hpp"
#include "optim.hpp"

namespace yolox {

// Input of a step: everything that changes from step to step.
struct StepInput {
  Batch batch;
  StepScalar lr, ema_decay;
};

// Runs training steps, and replays them as CUDA graphs. There is a graph for each kind of step: input size,
// with or without L1 loss, and the largest number of objects of an image, rounded up to a multiple of 32. The
// first step of a kind runs without a graph, so that cuDNN selects its algorithms. The second one is
// recorded. All graphs read their input from the same memory, to which each batch is copied. All ranks record
// and replay the same kinds: a graph contains the collectives of its step.
class StepGraphs {
 public:
  // on: use graphs, on all ranks; false: each step runs as it is. model: its counts on the CPU
  // (num_batches_tracked) are increased in each replay. failed(reason): called once if a rank cannot record a
  // step. Graphs are then turned off. If empty, the exception is thrown.
  StepGraphs(bool on, const torch::nn::Module& model, torch::Device device, Ranks& ranks,
             std::function<void(const std::string&)> failed = {});
  ~StepGraphs();

  // Returns step(input), or the result of a replay. size: of the network input. step() must launch the same
  // kernels in each step of a kind, and must not read results on the host. Its result, for example tensors,
  // is valid until the next call.
  template <class Step>
  auto run(const StepInput& input, ImageSize size, bool use_l1, const Step& step) {
    using Result = decltype(step(input));
    Kind* kind = kind_of(input, size, use_l1);
    if (!kind) return step(input);
    run_step(*kind, [&] { kind->result = step(kind->input); });
    return std::any_cast<Result>(kind->result);
  }

  // After an out-of-memory error, frees all graphs, which keep the memory of a step. After the second one,
  // later steps run without graphs. May be called by step(). Returns false if there were none.
  bool free_memory();
  // Frees all graphs, after the latest replay.
  void free_graphs();
  bool is_on() const { return on; }

 private:
  struct Kind {
    StepInput input;  // in the memory that graphs read
    int64_t steps = 0;
    std::unique_ptr<CudaGraph> graph;
    std::vector<Tensor> counts_per_step;  // increase of `counts` in each step
    std::any result;
  };

  // Copies the input to the memory that graphs read. Returns the kind of the step, or null for a step without
  // a graph.
  Kind* kind_of(const StepInput& input, ImageSize size, bool use_l1);
  void run_step(Kind& kind, const std::function<void()>& step);
  // Records a step. Returns false if a rank cannot record it.
  bool record_graph(Kind& kind, const std::function<void()>& step);
  // Frees all graphs. Later steps run without graphs.
  void turn_off();

  bool on;
  bool was_freed = false;  // by free_memory()
  const torch::Device device;
  Ranks& ranks;
  const std::function<void(const std::string&)> failed;
  std::vector<Tensor> counts;  // integer buffers of the model on the CPU
  Tensor lr, ema_decay, images;
  bool with_l1 = false;  // of the latest step
  int64_t graphs = 0;
  using Key =
      std::tuple<int, int, int64_t, int64_t>;  // height, width, rows of objects and of ignored regions
  std::map<Key, Kind> kinds;
};

}  // namespace yolox
