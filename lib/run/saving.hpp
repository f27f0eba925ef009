// SPDX-License-Identifier: Apache-2.0
// The state of a training, the run folder (creating, locking and finding it), and the checkpoints in it:
// last.pth, last.bak.pth (the one before it) and best.pth.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/flags.hpp"
#include "base/torch.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "layers/cast_weights.hpp"
#include "optim.hpp"
#include "run/log.hpp"
#include "yolox.hpp"

namespace yolox {

class GradientReducer;

// ---- state

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
  double images_per_rank = 0;                                // mean over the ranks
  std::shared_ptr<GradientReducer> reducer = {};  // null: the gradients are averaged after backward
  EmaTensors averaged = {};                       // by the EMA; empty without an EMA

  int64_t iteration = 0;             // number of steps done
  int64_t ema_updates = 0;           // number of steps done with an EMA, also of skipped ones
  int64_t skipped = 0;               // number of skipped steps, whose gradients overflowed
  int64_t epochs = 0;                // number of epochs that have ended, evaluation included
  std::optional<double> score = {};  // score_of() after the latest step; empty if it was not evaluated
  Best best = {};

  // Counts a step with this learning rate, whose model has not been evaluated. A replay of a CUDA graph sets
  // no number of the host.
  void count_step(double lr) {
    optimizer.lr = lr;
    if (!ema.is_empty()) ++ema_updates;
    ++iteration;
    score.reset();
  }
  torch::Device device() const { return scaler.scale.device(); }
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

// ---- the run folder

// Returns the paths of the checkpoints from which a run can be resumed, newest first: last.pth and
// last.bak.pth, if they exist.
std::vector<std::string> list_checkpoints(const std::string& run);

// Returns the run with the newest checkpoint, or "" if no run has one. Looks at the folders of runs in runs/
// and in the working folder (--out NAME).
std::string newest_run();

// Locks a run folder (flock) until this process ends, because only one training may use a folder. Throws if
// another process holds the lock, or if the folder cannot be written. Locks nothing on a file system without
// locks.
void lock_run_folder(const std::string& run);

// Creates and locks the folder of a new run: --out, or without it runs/MODEL-DATA, runs/MODEL-DATA-2, ...
// Throws if the folder cannot be written or already holds a run with a step. Returns the path.
std::string create_run_folder(const Config& config);

// ---- checkpoints

// A run that is resumed, with its checkpoint.
struct SavedRun {
  std::string run, path;  // run folder and checkpoint file; empty: no run is resumed
  c10::IValue file;
  RunSettings settings;
  int64_t step = 0;                // steps done
  std::string data;                // fingerprint() of its training set
  std::vector<std::string> notes;  // for the log

  explicit operator bool() const { return !path.empty(); }
};

// Returns last.pth, or last.bak.pth if last.pth is damaged, is no checkpoint of a run, or has weights that
// are not finite. A note says why. Throws if neither can be used.
SavedRun newest_checkpoint(const std::string& run);

// Writes last.pth. back_up: the present last.pth stays as last.bak.pth. frees_backup: on a full disk,
// last.bak.pth makes room. Throws if the file cannot be written; last.pth is unchanged then.
void save_last(const std::string& run, const GenericDict& file, bool back_up, bool frees_backup = false);

// Sets all flags that are not on the command line to the values of the run. Returns its newest undamaged
// checkpoint. same_command: the command line is the one that began the run (--resume auto), so that what auto
// has chosen then stays.
SavedRun resume_settings(Config& config, const std::string& run, bool same_command = false);

// Writes the checkpoints of a run, and loads the one to resume.
struct Saver {
  std::string run;  // run folder
  WeightsInfo info;
  RunSettings settings;
  int64_t per_epoch;              // steps per epoch
  std::string data;               // fingerprint() of the training set
  bool is_writer;                 // true on rank 0, which writes the files
  double save_minutes = 0;        // --save-minutes
  int64_t last_step = -1;         // step of last.pth; -1: there is none, or it is damaged
  double last_save_time = now();  // time of the last save

  // Returns a checkpoint. The keys model, optimizer, start_epoch, best_ap and curr_ap are those of official
  // YOLOX. "yolox" describes the weights. "train" has the data that only resuming needs.
  GenericDict checkpoint(Training& t) const;

  // Saves a checkpoint under `name`. If it cannot be written, for example on a full disk, logs a warning and
  // returns false, because this must not end a run. must: for the last save of a run; throws then.
  bool save(Training& t, const std::string& name, Log& log, bool must = false);

  // Returns true if last.pth is due.
  bool due() const { return is_writer && save_minutes > 0 && now() - last_save_time > 60 * save_minutes; }

  // Loads a checkpoint. Throws if it has another model or another number of steps per epoch. Adds a note for
  // the log if the training set is another one, or the name of score_of(); the run has no best score yet
  // then. Deletes the temporary files (*.tmp.*) of a process that was killed while it wrote.
  void load(Training& t, SavedRun& saved);
};

// With --resume, finds the run and sets `config` to its settings. Without --resume, returns a SavedRun that
// is empty but for notes; if --weights is given without --model, sets config.model to the model of the
// weights. Sets config.start.
SavedRun find_run(Config& config);

}  // namespace yolox
