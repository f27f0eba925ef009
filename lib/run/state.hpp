// SPDX-License-Identifier: Apache-2.0
// The state of a training, and its checkpoint format.
#pragma once
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "layers/cast_weights.hpp"
#include "optim.hpp"
#include "yolox.hpp"

namespace yolox {

// The best evaluations of a run so far.
struct Best {
  double score = -1;               // -1: no evaluation yet
  int64_t evals_without_gain = 0;  // number of evaluations since the best one, for --patience
};

// Everything that training changes, and how its steps compute, see new_training().
struct Training {
  YOLOX model, ema{nullptr};  // ema: empty if --ema is 0
  Optimizer optimizer;
  GradScaler scaler;

  at::ScalarType type = torch::kFloat, amp = torch::kFloat;  // of the weights; of autocast, float32: none
  bool legacy_preproc = false;                               // see preprocess()
  bool sync_bn = true;                                       // false: ranks average batch norm statistics
  Tensor class_weights = {};                                 // [classes], --class-weights; undefined: 1
  std::shared_ptr<CastWeights> cast_weights = {};            // null: autocast casts each weight by itself
  EmaTensors averaged = {};                                  // by the EMA; empty without an EMA

  int64_t iteration = 0;             // number of steps done
  int64_t ema_updates = 0;           // number of steps done with an EMA, also of skipped ones
  int64_t skipped = 0;               // number of skipped steps, whose gradients overflowed
  int64_t epochs = 0;                // number of epochs that have ended, evaluation included
  std::optional<double> score = {};  // score_of() after the latest step; empty if it was not evaluated
  Best best = {};

  // Counts a step with this learning rate, whose model has not been evaluated.
  void count_step(double lr) {
    optimizer.lr = lr;
    if (!ema.is_empty()) ++ema_updates;
    ++iteration;
    score.reset();
  }
  // Returns the model that is evaluated and saved as the result: the EMA model, or the model without EMA.
  YOLOX& eval_model() { return ema.is_empty() ? model : ema; }
};

// Returns parameters and buffers of a model.
std::vector<Tensor> tensors_of(YOLOX& model);

// Returns all tensors that must be equal on all ranks: model, EMA, optimizer and gradient scaler.
std::vector<Tensor> tensors_of(Training& t);

// Moves a model to a device and converts floating-point tensors to `type`. Integer tensors keep their type.
// num_batches_tracked of batch norms stays on the CPU, where counting needs no kernel.
void move(YOLOX& model, torch::Device device, at::ScalarType type);

// Returns a deep copy of a model in evaluation mode.
YOLOX copy_of(const YOLOX& model, torch::Device device);

// Returns a checkpoint. The keys model, optimizer, start_epoch, best_ap and curr_ap are those of official
// YOLOX. "yolox" describes the weights. "train" has the data that only resuming needs. per_epoch: steps per
// epoch. images: size of the training set.
GenericDict checkpoint(Training& t, const WeightsInfo& info, const RunSettings& settings, int64_t per_epoch,
                       int64_t images);

// Returns the settings in a checkpoint. Throws if the file is not a checkpoint of a training run.
RunSettings saved_settings(const c10::IValue& file, const std::string& path);

// Loads a checkpoint. Throws if it has another model or another number of steps per epoch. If the name of
// score_of() has changed, the run has no best score yet. Returns a note about that for the log, or "".
std::string load_checkpoint(Training& t, const c10::IValue& file, int64_t per_epoch, const std::string& path);

}  // namespace yolox
