// SPDX-License-Identifier: Apache-2.0
// Fitting a step into memory and to the machine: repetition in micro-batches after an out-of-memory error,
// and the trial steps of --bs auto, --accum, --dtr and --threads.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/torch.hpp"
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

// A copy of the batch norm statistics, to restore them before a step is repeated, because an attempt that ran
// out of memory may have updated some of them.
struct SavedStatistics {
  explicit SavedStatistics(const torch::nn::Module& model) {
    for (const Tensor& t : model.buffers()) {
      auto& [live, saved] = lists[t.is_floating_point()];
      live.push_back(t);
      saved.push_back(t.clone());
    }
  }
  // Copies the current statistics.
  void save() {
    torch::NoGradGuard no_grad;
    for (auto& [kind, list] : lists) at::_foreach_copy_(list.second, list.first);
  }
  void restore() {
    torch::NoGradGuard no_grad;
    for (auto& [kind, list] : lists) at::_foreach_copy_(list.first, list.second);
  }

 private:
  // Counts, which are on the CPU, and statistics: a foreach operator uses one kernel for tensors of one type.
  std::map<bool, std::pair<std::vector<Tensor>, std::vector<Tensor>>> lists;
};

// The micro-batches of a step: --accum, and twice as many after an out-of-memory error.
struct MicroBatches {
  Training& t;
  int64_t parts,
      max_parts;  // number of micro-batches, and its maximum: images of the smallest share of a rank
  const Ranks& ranks;
  const std::string run;  // run folder
  StepGraphs& graphs;
  Log& log;
  SavedStatistics statistics{*t.model};
  int64_t retries = 0;  // number of steps that ran out of memory

  // Returns compute(parts), the losses of a step of this size in `parts` micro-batches. If memory runs out,
  // restores the state before the step, and computes it again in twice as many. The first time, the larger
  // number is for this step only, because one batch may be unusually large. From the second time on it is
  // kept. Throws if one image does not fit. With several ranks, which must all compute the same number of
  // micro-batches, calls save_parts() and throws NeedsRestart.
  Losses fit(ImageSize size, const std::function<Losses(int64_t)>& compute);
  // Prepares the repetition of a step of `now` micro-batches after the exception e, in its catch block.
  // Returns the number of micro-batches of the repetition. Rethrows e if memory did not run out.
  int64_t repeat_after(const std::exception& e, int64_t now, ImageSize size);
};

// Returns the largest number of images, at most `limit`, that fits; 0 if not even one does. fits(images)
// tries a step. The result is exact below 64 images and at most 3 % too small above.
int64_t largest_batch(int64_t limit, const std::function<bool(int64_t)>& fits);

// Tries steps of the largest size, on each rank separately and without all-reduce. The memory does not
// include the buffers of the all-reduce, which are small.
struct TrialStep {
  Training& t;
  std::function<Losses(Training&, const Input&, int64_t parts, bool use_l1, Ranks&)> forward_backward;
  ImageSize base, largest;  // at which the loader makes images; of multi-scale training
  Dtr& dtr;

  // Returns the peak memory of a step in bytes, or infinity if memory runs out. Afterwards dtr.step() has the
  // statistics of this step, batch norm statistics are as before, and there are no gradients.
  double operator()(int64_t images, int64_t accum) const;
};

// Chooses config.bs and config.accum so that a step fits into memory, and logs them. --bs auto: the largest
// batch size that fits, at most a tenth of the `images` over all ranks. With several ranks on GPUs, where a
// step cannot be repeated, increases config.accum until the largest step fits on every rank. Throws if one
// image at a time does not fit. All ranks must call it together.
void choose_batch(Config& config, const TrialStep& trial, int64_t images, const std::string& run,
                  Ranks& ranks, Log& log);

// --threads on the CPU: sets the number of threads, for `share` images per rank. Returns a line for the log,
// or "". All ranks must call it together.
std::string set_threads(Config& config, Training& t, ImageSize base, int64_t share, Ranks& ranks);

// --dtr: tries the largest step, with `share` images per rank. Returns a line for the log with its memory and
// its cost. All ranks must call it together.
std::string try_dtr_step(const Config& config, const TrialStep& trial, int64_t share, Ranks& ranks);

}  // namespace yolox
