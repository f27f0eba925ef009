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

#include "checkpoint/checkpoint.hpp"
#include "data.hpp"
#include "base/flags.hpp"
#include "data/pictures.hpp"
#include "run/log.hpp"
#include "run/state.hpp"
#include "run/remarks.hpp"

namespace yolox {

// Its checkpoints, newest first: last.pth, then those before it, step_N.pth.
inline std::vector<std::string> checkpoints_of(const std::string& run) {
  namespace fs = std::filesystem;
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    int end = 0;
    if (name == "last.pth")
      found.emplace_back(std::numeric_limits<int64_t>::max(), entry.path().string());
    else if (std::sscanf(name.c_str(), "step_%ld.pth%n", &step, &end) == 1 && size_t(end) == name.size())
      found.emplace_back(step, entry.path().string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  for (const auto& [_, path] : found) paths.push_back(path);
  return paths;
}

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

// The newest run below runs/ that has a checkpoint; empty if there is none.
inline std::string newest_run() {
  namespace fs = std::filesystem;
  std::string newest;
  fs::file_time_type latest{};
  std::error_code ignored;
  for (const auto& run : fs::directory_iterator("runs", ignored)) {
    for (const auto& path : checkpoints_of(run.path().string())) {
      const auto written = fs::last_write_time(path, ignored);
      if (newest.empty() || written > latest) newest = run.path().string(), latest = written;
    }
  }
  return newest;
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

// A run that has not done a step makes room for another one in its folder.
inline void forget_unstarted(const std::string& run) {
  const std::filesystem::path last = std::filesystem::path(run) / "last.pth";
  std::error_code ignored;
  if (!std::filesystem::exists(last, ignored)) return;
  try {
    const auto file = read_pth(last.string());
    saved_settings(file, last.string());
    if (file.toGenericDict().at("train").toGenericDict().at("iteration").toInt() == 0)
      std::filesystem::remove(last, ignored);
  } catch (const std::exception&) {  // not of this program: the folder is not touched
  }
}

// What writing was killed amid leaves behind.
inline void remove_torn_files(const std::string& run) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(run, ignored))
    if (entry.path().filename().string().find(".tmp.") != std::string::npos)
      std::filesystem::remove(entry.path(), ignored);
}

// One training at a time works in a folder: until this process ends, however it ends. Throws where another
// one does. Where a file system knows no locks, nothing is checked.
inline void take_run_folder(const std::string& run) {
  const int fd = open((run + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);  // never closed
  check(fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "another training works in ",
        run, "; wait for its end, or give another --out");
}

// Makes the folder of a new run and takes it: `wanted`, or runs/<name>, runs/<name>-2, ... when that is
// empty.
inline std::string make_run_folder(const std::string& wanted, const std::string& name) {
  namespace fs = std::filesystem;
  std::string folder = wanted;
  std::error_code error;
  if (wanted.empty()) {
    fs::create_directories("runs", error);
    folder = "runs/" + name;
    for (int i = 2; !fs::create_directory(folder, error) && !error; ++i)
      folder = concat("runs/", name, "-", i);
  } else {
    fs::create_directories(wanted, error);
  }
  check(!error && access(folder.c_str(), W_OK) == 0, "cannot write to ", folder,
        error ? ": " + error.message() : "", "; give another --out");
  take_run_folder(folder);
  forget_unstarted(folder);
  check(checkpoints_of(folder).empty(), folder, " already holds a run; go on with --resume ", folder,
        ", or give another --out");
  return folder;
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

// A step that went wrong, to look at: nonfinite.pth with the batch as it was loaded, the size it was then
// brought to, the weights and what was computed; and nonfinite.jpg. Gives where they are, or why they are
// not.
inline std::string save_bad_step(const std::string& run, Training& t, const Batch& batch, const Dataset& data,
                                 const StepNumbers& n, double lr, ImageSize size, bool use_l1, int rank = 0) {
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  auto file = empty_dict(), losses = empty_dict();
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  losses.insert("total", n.total), losses.insert("iou", n.iou), losses.insert("obj", n.obj);
  losses.insert("cls", n.cls), losses.insert("l1", n.l1), losses.insert("gradient_norm", n.norm);
  file.insert("iteration", t.iteration), file.insert("lr", lr), file.insert("losses", losses);
  file.insert("height", int64_t{size.height}), file.insert("width", int64_t{size.width});
  file.insert("use_l1", use_l1), file.insert("scale", t.scaler.scale.item<double>());
  file.insert("images", batch.images.cpu()), file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu()), file.insert("classes", batch.targets.classes.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_picture(name + ".jpg", draw_batch(batch.images, drawn(batch.targets, data.classes)));
  try {
    write_pth(name + ".pth", file);
  } catch (const std::exception& e) {
    return concat("the batch and the weights could not be saved: ", e.what());
  }
  return concat("the batch and the weights are in ", name, ".pth and .jpg");
}

}  // namespace yolox
