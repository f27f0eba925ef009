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

struct SavedRun {
  std::string path;
  c10::IValue file;
  int64_t step, images;  // steps done; images in its data set
};

inline bool is_finite(const GenericDict& weights) {
  for (const auto& e : weights)
    if (e.value().isTensor() && !torch::isfinite(e.value().toTensor()).all().item<bool>()) return false;
  return true;
}

// The newest checkpoint of a run that can be gone on from, and is of a step before `below`; what is wrong
// with newer ones goes to `notes`.
inline SavedRun newest_checkpoint(const std::string& run, std::vector<std::string>& notes,
                                  int64_t below = std::numeric_limits<int64_t>::max()) {
  const auto paths = checkpoints_of(run);
  check(!paths.empty(), run, " has no checkpoint, last.pth or step_N.pth; give the folder of a run");
  std::string wrong;
  for (const auto& path : paths) {
    try {
      const auto file = read_pth(path);
      saved_settings(file, path);
      const auto state = file.toGenericDict().at("train").toGenericDict();
      check(is_finite(state.at("model").toGenericDict()), path, " has weights that are not finite");
      const int64_t step = state.at("iteration").toInt();
      if (step < below) return {path, file, step, state.at("images").toInt()};
      wrong = concat(path, " is of step ", step);
    } catch (const std::exception& e) {
      wrong = e.what();
      if (path != paths.back())
        notes.push_back(concat("warning: ", wrong, "; the checkpoint before it is taken"));
    }
  }
  fail(wrong);
}

// Writes last.pth. The one that was there stays as step_N.pth, and the `keep` newest of those do; it holds
// step `before`, -1: there is none worth keeping.
inline void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before,
                      int64_t keep) {
  namespace fs = std::filesystem;
  const fs::path last = fs::path(run) / "last.pth";
  std::error_code error;
  if (keep > 0 && before >= 0 && before != step) {
    const fs::path older = fs::path(run) / concat("step_", before, ".pth");
    fs::remove(older, error);
    fs::create_hard_link(last, older, error);
    if (error) fs::copy_file(last, older, error);  // where the file system has no links
  }
  write_pth(last.string(), file);
  int64_t kept = 0;
  for (const auto& path : checkpoints_of(run))
    if (path != last.string() && ++kept > keep) fs::remove(path, error);
}

// Sets the flags of a run that is resumed to what they were, those apart that were given again. Gives its
// newest checkpoint that is whole.
inline SavedRun resume_settings(Flags& flags, const std::string& run, std::vector<std::string>& notes) {
  usage_check(!flags.was_given("weights"),
              "--weights and --resume exclude each other: a resumed run has its weights");
  usage_check(!flags.was_given("out"),
              "--out and --resume exclude each other: a resumed run stays in its folder");
  const SavedRun saved = newest_checkpoint(run, notes);
  const auto values = flags.values();
  const std::map<std::string, std::string> now(values.begin(), values.end());
  for (const auto& [name, value] : saved_settings(saved.file, saved.path)) {
    if (!flags.was_given(name))
      flags.set(name, value);
    else if (now.at(name) != value)
      notes.push_back(concat("--", name, " ", now.at(name), " instead of the run's ", value));
  }
  if (flags.was_given("gpus") != flags.was_given("procs"))  // which takes the place of the other
    flags.set(flags.was_given("gpus") ? "procs" : "gpus", "0");
  return saved;
}

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
  bool save(Training& t, const std::string& name, Log& log, bool must = false) {
    RECORD_USER_SCOPE("saving");
    if (!writes) {
      at = now();
      if (name == "last.pth") in_last = t.iteration;
      return true;
    }
    const auto file = checkpoint(t, info, settings, per_epoch, images);
    at = now();
    const auto write = [&] {
      if (name != "last.pth") return write_pth(run + "/" + name, file);
      save_last(run, file, t.iteration, in_last, keep);
      in_last = t.iteration;
    };
    return try_to_save(write, log, must);
  }

  // What a save costs, for --profile: nothing stays.
  void try_out(Training& t, Log& log) {
    if (!writes) return;
    save(t, "profile.pth", log);
    std::filesystem::remove(run + "/profile.pth");
  }

  void load(Training& t, const SavedRun& saved) {
    load_checkpoint(t, saved.file, per_epoch, saved.path);
    in_last = std::filesystem::path(saved.path).filename() == "last.pth" ? t.iteration : -1;
  }

  // --keep-going: back to the newest good checkpoint, and on at half the learning rate. If the run has saved
  // nothing since it last went back, that checkpoint was not good, and the one before it is taken. ready():
  // all ranks have read it.
  template <class Ready>
  void go_back(Training& t, Log& log, const Ready& ready) {
    const double factor = t.lr_factor / 2;
    const int64_t returns = t.returns + 1;
    std::vector<std::string> notes;
    SavedRun good = newest_checkpoint(run, notes);
    load(t, good);
    if (t.iteration == returned) {
      try {
        load(t, good = newest_checkpoint(run, notes, returned));
      } catch (const std::exception&) {  // there is none before
      }
    }
    for (const auto& note : notes) log.line(note);
    ready();
    returned = t.iteration;
    t.lr_factor = factor, t.returns = returns;
    save(t, "last.pth", log);  // with the factor: a run that is resumed now goes on with it
  }
};

// The checkpoint that --resume goes on from; the settings of its run into `config`.
inline SavedRun find_run(Config& config, std::string& run, std::vector<std::string>& notes) {
  run = config.resume == "newest" ? newest_run() : config.resume;
  usage_check(!run.empty(), "--resume: there is no run with a checkpoint below runs/; give its folder");
  const SavedRun saved = resume_settings(config, run, notes);
  for (const auto& [name, value] : saved_settings(saved.file, saved.path))
    usage_check(name != "freeze" || value == config.freeze, "--freeze ", config.freeze,
                " differs from the run's '", value,
                "', and its optimizer knows other weights; start from its last.pth with --weights");
  return saved;
}

}  // namespace yolox
