// The files of a run: its checkpoints, how they are found again, and what is left of a step that went wrong.
#pragma once
#include <torch/torch.h>

#include <ATen/record_function.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint.hpp"
#include "data.hpp"
#include "flags.hpp"
#include "pictures.hpp"
#include "run.hpp"
#include "training.hpp"
#include "watch.hpp"

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
};

// The newest checkpoint of a run that is whole; what is wrong with newer ones goes to `notes`.
inline SavedRun newest_checkpoint(const std::string& run, std::vector<std::string>& notes) {
  const auto paths = checkpoints_of(run);
  check(!paths.empty(), run, " has no checkpoint, last.pth or step_N.pth; give the folder of a run");
  for (const auto& path : paths) {
    try {
      const auto file = read_pth(path);
      saved_settings(file, path);
      return {path, file};
    } catch (const std::exception& e) {
      if (path == paths.back()) throw;
      notes.push_back(concat("warning: ", e.what(), "; the checkpoint before it is taken"));
    }
  }
  return {};
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
    if (entry.path().filename().string().find(".pth.tmp.") != std::string::npos)
      std::filesystem::remove(entry.path(), ignored);
}

// Sets the flags of a run that is resumed to what they were, those apart that were given again. Gives its
// newest checkpoint that is whole.
inline SavedRun resume_settings(Flags& flags, const std::string& run, std::vector<std::string>& notes) {
  const SavedRun saved = newest_checkpoint(run, notes);
  const auto values = flags.values();
  const std::map<std::string, std::string> now(values.begin(), values.end());
  for (const auto& [name, value] : saved_settings(saved.file, saved.path)) {
    if (!flags.was_given(name))
      flags.set(name, value);
    else if (now.at(name) != value)
      notes.push_back(concat("--", name, " ", now.at(name), " instead of the run's ", value));
  }
  return saved;
}

// Writes the checkpoints of a run.
struct Saver {
  std::string run;  // its folder
  WeightsInfo info;
  Settings settings;
  int64_t per_epoch;     // steps in an epoch
  int64_t keep;          // older checkpoints kept beside last.pth
  int64_t in_last = -1;  // the step that last.pth holds; -1: nothing worth keeping
  double at = now();     // when it was written

  // last.pth, or another name. A full disk does not end a run: false, with a warning, and the next one tries
  // again. Only the very end of a run `must` be saved, and throws.
  bool save(Training& t, const std::string& name, double ap, Log& log, bool must = false) {
    RECORD_USER_SCOPE("saving");
    const auto file = checkpoint(t, info, settings, per_epoch, ap);
    at = now();
    try {
      if (name == "last.pth") {
        save_last(run, file, t.iteration, in_last, keep);
        in_last = t.iteration;
      } else {
        write_pth(run + "/" + name, file);
      }
      return true;
    } catch (const std::exception& e) {
      if (must) throw;
      log.line(concat("WARNING: ", e.what(), "; tried again at the next save"));
      return false;
    }
  }

  // What a save costs, for --profile: nothing stays.
  void try_out(Training& t, Log& log) {
    save(t, "profile.pth", std::nan(""), log);
    std::filesystem::remove(run + "/profile.pth");
  }

  void load(Training& t, const SavedRun& saved) {
    load_checkpoint(t, saved.file, per_epoch, saved.path);
    in_last = std::filesystem::path(saved.path).filename() == "last.pth" ? t.iteration : -1;
  }

  // --keep-going: back to the newest checkpoint that is whole, and on at half the learning rate.
  void go_back(Training& t, std::vector<std::string>& notes) {
    const double factor = t.lr_factor / 2;
    const int64_t returns = t.returns + 1;
    load(t, newest_checkpoint(run, notes));
    t.lr_factor = factor, t.returns = returns;
  }
};

// A step that went wrong, to look at: nonfinite.pth with the batch as the network saw it, the weights and
// what was computed, and nonfinite.jpg. Gives where they are, or why they are not.
inline std::string save_bad_step(const std::string& run, Training& t, const Batch& batch, const Dataset& data,
                                 const StepNumbers& n, double lr) {
  auto file = empty_dict(), losses = empty_dict();
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  losses.insert("total", n.total), losses.insert("iou", n.iou), losses.insert("obj", n.obj);
  losses.insert("cls", n.cls), losses.insert("l1", n.l1), losses.insert("gradient_norm", n.norm);
  file.insert("iteration", t.iteration), file.insert("lr", lr), file.insert("losses", losses);
  file.insert("images", batch.images.cpu()), file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu()), file.insert("classes", batch.targets.classes.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_picture(run + "/nonfinite.jpg", draw_batch(batch.images, drawn(batch.targets, data.classes)));
  try {
    write_pth(run + "/nonfinite.pth", file);
  } catch (const std::exception& e) {
    return concat("the batch and the weights could not be saved: ", e.what());
  }
  return concat("the batch and the weights are in ", run, "/nonfinite.pth and .jpg");
}

}  // namespace yolox
