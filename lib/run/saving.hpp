// SPDX-License-Identifier: Apache-2.0
// The run folder (creating, locking and finding it), and the checkpoints in it: last.pth, last.bak.pth (the
// one before it) and best.pth.
#pragma once
#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "run/log.hpp"
#include "run/state.hpp"

namespace yolox {

// ---- the run folder

// Returns the paths of the checkpoints from which a run can be resumed, newest first: last.pth and
// last.bak.pth, if they exist.
std::vector<std::string> list_checkpoints(const std::string& run);

// Returns the run with the newest checkpoint, or "" if no run has one. Looks at the folders in runs/, and at
// the folders in the working folder that have been used by a run (--out NAME).
std::string newest_run();

// Locks a run folder (flock) until this process ends, because only one training may use a folder. Throws if
// another process holds the lock, or if a folder or a pipe has the name of a checkpoint. Locks nothing on a
// file system without locks.
void lock_run_folder(const std::string& run);

// Creates and locks the folder of a new run: `wanted`, or if that is empty runs/<name>, runs/<name>-2, ...
// Throws if the folder cannot be written or already holds a run with a step. Returns the path.
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

// Returns last.pth, or last.bak.pth if last.pth is damaged or has weights that are not finite. A note says
// why. Throws if neither can be used.
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
  int64_t images;                 // images in the training set
  bool is_writer;                 // true on rank 0, which writes the files
  double save_minutes = 0;        // --save-minutes
  int64_t last_step = -1;         // step of last.pth; -1: there is none, or it is damaged
  double last_save_time = now();  // time of the last save

  // Saves a checkpoint under `name`. If it cannot be written, for example on a full disk, logs a warning and
  // returns false, because this must not end a run. must: for the last save of a run; throws then.
  bool save(Training& t, const std::string& name, Log& log, bool must = false);

  // Returns true if last.pth is due.
  bool due() const { return is_writer && save_minutes > 0 && now() - last_save_time > 60 * save_minutes; }

  // Loads the checkpoint of a resumed run. Deletes the temporary files (*.tmp.*) of a process that was killed
  // while it wrote. Returns a note for the log, or "".
  std::string load(Training& t, const SavedRun& saved);
};

// With --resume, finds the run and sets `config` to its settings. Without --resume, returns a SavedRun that
// is empty but for notes; if --weights is given without --model, sets config.model to the model of the
// weights. Sets config.start.
SavedRun find_run(Config& config);

}  // namespace yolox
