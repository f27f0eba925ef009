// SPDX-License-Identifier: Apache-2.0
// Fitting a step into memory: repetition in micro-batches after an out-of-memory error, --bs auto, and the
// trial step of --dtr.
#pragma once
#include <torch/torch.h>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "config.hpp"
#include "data/batch.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "run/log.hpp"
#include "run/saving.hpp"
#include "run/step_graphs.hpp"

namespace yolox {

// The number of parts of a computation, which grows while memory runs out.
struct RetryInParts {
  int64_t parts, max_parts;  // current and maximum number of parts
  int64_t retries = 0;       // number of computations that ran out of memory

  // Returns the next number of parts to try, twice as many as `now`. Call it in the catch block of an attempt
  // in `now` parts. Rethrows e if it is no out-of-memory error. Throws if `max_parts` parts do not fit.
  int64_t more_parts(const std::exception& e, int64_t now) const;
  // The computation has succeeded in `now` parts. The first time, the larger number of parts is for this
  // computation only, because one batch may be unusually large. From the second time on it is kept.
  void succeeded(int64_t now) {
    if (now > parts && ++retries > 1) parts = now;
  }
};

// A copy of the batch norm statistics, to restore them before a step is repeated, because an attempt that ran
// out of memory may have updated some of them.
struct SavedStatistics {
  explicit SavedStatistics(const torch::nn::Module& model) {
    for (const Tensor& t : model.buffers()) {
      auto& [live, saved] = lists[{t.device().type(), t.scalar_type()}];
      live.push_back(t);
      saved.push_back(t.clone());
    }
  }
  // Copies the current statistics.
  void save() {
    torch::NoGradGuard no_grad;
    for (auto& [type, list] : lists) at::_foreach_copy_(list.saved, list.live);
  }
  void restore() {
    torch::NoGradGuard no_grad;
    for (auto& [type, list] : lists) at::_foreach_copy_(list.live, list.saved);
  }

 private:
  struct Tensors {
    std::vector<Tensor> live, saved;
  };
  // A foreach operator uses one kernel for tensors of one type on one device.
  std::map<std::pair<torch::DeviceType, at::ScalarType>, Tensors> lists;
};

// The micro-batches of a step: --accum, and twice as many after an out-of-memory error.
class MicroBatches {
 public:
  // max_parts: maximum number of micro-batches: images of the smallest share of a rank. run: run folder.
  MicroBatches(Training& t, int64_t accum, int64_t max_parts, const Ranks& ranks, const std::string& run,
               StepGraphs& graphs, Log& log);
  // Begins a step: copies the batch norm statistics, and returns the number of micro-batches to try first.
  int64_t begin() {
    statistics.save();
    return in_parts.parts;
  }
  // Call it in the catch block of an attempt in `parts` micro-batches. Restores the state before the step and
  // returns the next number of micro-batches to try. Rethrows e if it is no out-of-memory error. Throws if
  // one image does not fit. With several ranks, which must all compute the same number of micro-batches,
  // calls save_parts() and throws NeedsRestart.
  int64_t retry(const std::exception& e, int64_t parts, ImageSize size);
  void succeeded(int64_t parts) { in_parts.succeeded(parts); }

 private:
  Training& t;
  const Ranks& ranks;
  const std::string run;
  StepGraphs& graphs;
  Log& log;
  RetryInParts in_parts;
  SavedStatistics statistics;
};

// Returns the largest number of images, at most `limit`, that fits; 0 if not even one does. fits(images)
// tries a step. The result is exact below 64 images and at most 3 % too small above.
int64_t largest_batch(int64_t limit, const std::function<bool(int64_t)>& fits);

// Tries steps of the largest size, on each rank separately and without all-reduce. The memory does not
// include the buffers of the all-reduce, which are small.
struct TrialStep {
  // Computes the gradients of a step in `parts` micro-batches; without ranks there is no all-reduce.
  using ForwardBackward = Losses(Training& t, const Input& input, int64_t parts, bool use_l1, Ranks* ranks,
                                 GradientReducer* reducer);

  Training& t;
  std::function<ForwardBackward> forward_backward;
  ImageSize base, largest;  // at which the loader makes images; of multi-scale training
  torch::Device device;
  Dtr& dtr;

  // Returns the peak memory of a step in bytes, or infinity if memory runs out. Afterwards dtr.step() has the
  // statistics of this step, batch norm statistics are as before, and there are no gradients.
  double operator()(int64_t images, int64_t accum) const;
};

// Returns the plan of a run whose steps fit into memory. With --bs auto, sets config.bs to the largest batch
// size that fits, at most `images` over all ranks. With several ranks on GPUs, where a step cannot be
// repeated, increases config.accum until the largest step fits on every rank. With --dtr, tries the largest
// step. Chooses the number of threads (--threads). Adds lines for the log to `notes`. Sets the momentum of
// the batch norms and the benchmark of cuDNN. Throws if one image at a time does not fit.
Plan fitting_plan(Config& config, const TrialStep& trial, int64_t images, const std::string& run,
                  Ranks& ranks, Log& log, std::vector<std::string>& notes);

}  // namespace yolox
