// The files of a run: its checkpoints, how they are found again, and what is left of a step that went wrong.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <torch/torch.h>
#include <unistd.h>

#include <ATen/record_function.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "run/folder.hpp"
#include "run/log.hpp"
#include "run/remarks.hpp"
#include "run/state.hpp"

namespace yolox {

// A run to be resumed, and its checkpoint.
struct SavedRun {
  std::string run, path;  // folder and file; empty: no run is resumed
  c10::IValue file;
  int64_t step = 0, images = 0;    // steps done; images in its data set
  std::vector<std::string> notes;  // for the log

  explicit operator bool() const { return !path.empty(); }
};

bool is_finite(const GenericDict& weights);

// Returns the newest undamaged checkpoint of a run from before step `below`. Its notes say what is wrong with
// newer ones. Throws if there is none.
SavedRun newest_checkpoint(const std::string& run, int64_t below = std::numeric_limits<int64_t>::max());

// Writes last.pth. The one that was there stays as step_N.pth, and the `keep` newest of those do; it holds
// step `before`, -1: there is none worth keeping.
void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before, int64_t keep);

// Sets the flags that were not given to the values that the run had. Returns the newest undamaged checkpoint.
SavedRun resume_settings(Flags& flags, const std::string& run);

// Does write(), which saves something. A full disk does not end a run: false, with a warning, and the next
// save tries again. Only what the end of a run leaves `must` be saved: tries for some seconds, then throws.
template <class Write>
bool try_to_save(const Write& write, Log& log, bool must) {
  for (int tries = 1;; ++tries) {
    try {
      write();
      return true;
    } catch (const std::exception& e) {
      if (must && tries == 4) throw;
      if (!must) {
        log.line(concat("WARNING: ", e.what(), "; training goes on, and the next save tries again"));
        return false;
      }
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
}

// Writes the checkpoints of a run, and goes back to them.
struct Saver {
  std::string run;  // its folder
  WeightsInfo info;
  Settings settings;
  int64_t per_epoch;      // steps in an epoch
  int64_t images;         // in the data set
  int64_t keep;           // older checkpoints kept beside last.pth
  bool writes;            // of several ranks only the first one does
  int64_t in_last = -1;   // the step that last.pth holds; -1: nothing worth keeping
  int64_t returned = -1;  // the step that the run went back to; -1: it never did
  double at = now();      // when it was saved

  // last.pth, or another name, as try_to_save() does it.
  bool save(Training& t, const std::string& name, Log& log, bool must = false);

  // What a save costs, for --profile: nothing stays.
  void try_out(Training& t, Log& log);

  void load(Training& t, const SavedRun& saved);

  // --keep-going: back to the newest good checkpoint, and on at half the learning rate. If the run has saved
  // nothing since it last went back, that checkpoint was not good, and the one before it is taken. ready():
  // all ranks have read it.
  void go_back(Training& t, Log& log, const std::function<void()>& ready);
};

// With --resume, finds the run and sets `config` to its settings. Without, the result is false.
SavedRun find_run(Config& config);

}  // namespace yolox
