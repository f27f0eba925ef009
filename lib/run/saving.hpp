// SPDX-License-Identifier: Apache-2.0
// The run folder (creating, locking and finding it), and the checkpoints in it: last.pth, step_N.pth,
// best.pth.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "run/log.hpp"
#include "run/state.hpp"

namespace yolox {

// ---- the run folder

// Returns the paths of the checkpoints of a run, newest first: last.pth, then step_N.pth by falling N.
std::vector<std::string> list_checkpoints(const std::string& run);

// Returns the run with the newest checkpoint, or "" if no run has one. Looks at the folders in runs/, and at
// the folders in the working folder that have been used by a run (--out NAME).
std::string newest_run();

// Deletes last.pth if it was saved before the first step, so that a new run can use the folder.
void remove_unstarted_checkpoint(const std::string& run);

// Deletes the temporary files (*.tmp.*) of a process that was killed while it wrote.
void remove_temporary_files(const std::string& run);

// Locks a run folder (flock) until this process ends, because only one training may use a folder. Throws if
// another process holds the lock, or if a folder or a pipe has the name of a checkpoint. Locks nothing on a
// file system without locks.
void lock_run_folder(const std::string& run);

// Creates and locks the folder of a new run: `wanted`, or if that is empty runs/<name>, runs/<name>-2, ...
// Throws if the folder cannot be written or already holds a run. Returns the path.
std::string create_run_folder(const std::string& wanted, const std::string& name);

// ---- checkpoints

// A run that is resumed, with its checkpoint.
struct SavedRun {
  std::string run, path;  // run folder and checkpoint file; empty: no run is resumed
  c10::IValue file;
  int64_t step = 0, images = 0;    // steps done; images in its data set
  std::vector<std::string> notes;  // for the log

  explicit operator bool() const { return !path.empty(); }
};

// Returns true if all tensors are finite.
bool is_finite(const GenericDict& weights);

// Returns the newest undamaged checkpoint of a run. Its notes have the errors of the newer checkpoints.
// Throws if no checkpoint is usable.
SavedRun newest_checkpoint(const std::string& run);

// Writes last.pth. Keeps the old last.pth as step_N.pth, and deletes all step_N.pth but the `keep` newest,
// and more of them if the disk is full. step: of the new file. before: step of the old last.pth; -1: do not
// keep it.
void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before, int64_t keep);

// Sets all flags that are not on the command line to the values of the run. Returns its newest undamaged
// checkpoint. same_command: the command line is the one that began the run (--resume auto), so that a value
// of auto stays what it was then.
SavedRun resume_settings(Flags& flags, const std::string& run, bool same_command = false);

// Writes the checkpoints of a run, and loads the one to resume.
struct Saver {
  std::string run;  // run folder
  WeightsInfo info;
  Settings settings;
  int64_t per_epoch;              // steps per epoch
  int64_t images;                 // images in the training set
  int64_t keep;                   // number of step_N.pth to keep (--keep)
  bool is_writer;                 // true on rank 0, which writes the files
  double save_minutes = 0;        // --save-minutes
  int64_t last_step = -1;         // step of last.pth; -1: no last.pth worth keeping
  double last_save_time = now();  // time of the last save

  // Saves a checkpoint under `name`, with try_to_save().
  bool save(Training& t, const std::string& name, Log& log, bool must = false);

  // Returns true if last.pth is due.
  bool due() const { return is_writer && save_minutes > 0 && now() - last_save_time > 60 * save_minutes; }

  // Returns a note for the log, or "".
  std::string load(Training& t, const SavedRun& saved);
};

// With --resume, finds the run and sets `config` to its settings. Without --resume, returns a SavedRun that
// is empty but for notes; if --weights is given without --model, sets config.model to the model of the
// weights.
SavedRun find_run(Config& config);

}  // namespace yolox
