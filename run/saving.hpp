// SPDX-License-Identifier: Apache-2.0
// Saving and loading the checkpoints of a run: last.pth, step_N.pth, best.pth.
#pragma once
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "run/log.hpp"
#include "run/state.hpp"

namespace yolox {

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

// Returns the newest undamaged checkpoint of a run from before step `below`. Its notes have the errors of the
// newer checkpoints. Throws if no checkpoint is usable.
SavedRun newest_checkpoint(const std::string& run, int64_t below = std::numeric_limits<int64_t>::max());

// Writes a checkpoint of a run. While the disk is full, deletes the oldest step_N.pth of the run and tries
// again, because a new checkpoint is worth more than an old one. Throws if the disk is full and no step_N.pth
// is left.
void write_and_make_room(const std::string& run, const std::string& path, const GenericDict& file);

// Writes last.pth. Keeps the old last.pth as step_N.pth, and deletes all step_N.pth but the `keep` newest,
// and more of them if the disk is full. step: of the new file. before: step of the old last.pth; -1: do not
// keep it.
void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before, int64_t keep);

// Sets all flags that are not on the command line to the values of the run. Returns its newest undamaged
// checkpoint. same_command: the command line is the one that began the run (--resume auto), so that a value
// of auto stays what it was then.
SavedRun resume_settings(Flags& flags, const std::string& run, bool same_command = false);

// Calls write(), which saves a file. Returns false and logs a warning if write() throws, because a full disk
// must not end a run. must: for the last save of a run; tries 4 times, one second apart, and then throws.
template <class Write>
bool try_to_save(const Write& write, Log& log, bool must) {
  for (int tries = 1;; ++tries) {
    try {
      write();
      return true;
    } catch (const std::exception& e) {
      if (must && tries == 4) throw;
      if (!must) {
        log.line(concat("warning: ", e.what(), "; training continues, and the next save tries again"));
        return false;
      }
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
}

// Writes the checkpoints of a run, and loads them to resume or to go back.
struct Saver {
  std::string run;  // run folder
  WeightsInfo info;
  Settings settings;
  int64_t per_epoch;              // steps per epoch
  int64_t images;                 // images in the training set
  int64_t keep;                   // number of step_N.pth to keep (--keep)
  bool is_writer;                 // true on rank 0, which writes the files
  int64_t last_step = -1;         // step of last.pth; -1: no last.pth worth keeping
  int64_t rolled_back_to = -1;    // step to which the run last went back; -1: never
  double last_save_time = now();  // time of the last save

  // Saves a checkpoint under `name`, with try_to_save().
  bool save(Training& t, const std::string& name, Log& log, bool must = false);

  void load(Training& t, const SavedRun& saved);

  // --keep-going: loads the newest good checkpoint and halves the learning rate. If the run went back to this
  // checkpoint the last time too, uses the one before it. ready() must wait until all ranks have read the
  // file, because rank 0 then writes last.pth.
  void roll_back(Training& t, Log& log, const std::function<void()>& ready);
};

// Returns the folder of the run that --resume means, "" if a new run begins. out: --out. Throws UsageError if
// there is no such run.
std::string run_to_resume(const std::string& resume, const std::string& out);

// With --resume, finds the run and sets `config` to its settings. Without --resume, returns a SavedRun that
// is empty but for notes; if --weights is given without --model, sets config.model to the model of the
// weights.
SavedRun find_run(Config& config);

}  // namespace yolox
