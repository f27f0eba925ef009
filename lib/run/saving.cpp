// SPDX-License-Identifier: Apache-2.0
#include "run/saving.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <map>
#include <system_error>
#include <thread>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/timeout.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/pth.hpp"

namespace yolox {

namespace fs = std::filesystem;

// ---- the run folder

std::vector<std::string> list_checkpoints(const std::string& run) {
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

std::string newest_run() {
  std::string newest;
  fs::file_time_type latest{};
  std::error_code ignored;
  const auto look_at = [&](const std::string& run) {
    for (const auto& path : list_checkpoints(run)) {
      const auto written = fs::last_write_time(path, ignored);
      if (newest.empty() || written > latest) {
        newest = run;
        latest = written;
      }
    }
  };
  for (const auto& run : fs::directory_iterator("runs", ignored)) look_at(run.path().string());
  for (const auto& folder : fs::directory_iterator(".", ignored))
    if (fs::exists(folder.path() / ".lock", ignored)) look_at(folder.path().filename().string());
  return newest;
}

void remove_unstarted_checkpoint(const std::string& run) {
  try {
    const SavedRun newest = newest_checkpoint(run);
    if (newest.step == 0 && fs::path(newest.path).filename() == "last.pth") fs::remove(newest.path);
  } catch (const std::exception&) {  // no last.pth, or one of another program, which stays
  }
}

void remove_temporary_files(const std::string& run) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored))
    if (entry.path().filename().string().find(".tmp.") != std::string::npos)
      fs::remove(entry.path(), ignored);
}

void lock_run_folder(const std::string& run) {
  for (const char* name : {"last.pth", "best.pth"}) {
    const std::string path = run + "/" + name;
    check(!is_irregular_file(path), path,
          " is not a regular file, so no checkpoint can be saved there; remove it, or give another --out");
  }
  // Stays open, and so locked, until this process ends.
  const int fd = open((run + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  check(fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "another training uses ", run,
        "; wait until it ends, or give another --out");
}

std::string create_run_folder(const std::string& wanted, const std::string& name) {
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
  lock_run_folder(folder);
  remove_unstarted_checkpoint(folder);
  check(list_checkpoints(folder).empty(), folder, " already holds a run; resume it with --resume ",
        shell_word(folder), ", or give another --out");
  return folder;
}

// ---- checkpoints

bool is_finite(const GenericDict& weights) {
  for (const auto& e : weights)
    if (e.value().isTensor() && !torch::isfinite(e.value().toTensor()).all().item<bool>()) return false;
  return true;
}

SavedRun newest_checkpoint(const std::string& run) {
  const auto paths = list_checkpoints(run);
  check(!paths.empty(), run, " has no checkpoint (last.pth or step_N.pth); give the folder of a run");
  std::vector<std::string> notes;
  std::string wrong;
  for (const auto& path : paths) {
    try {
      const auto file = read_pth(path);
      saved_settings(file, path);
      const auto state = file.toGenericDict().at("train").toGenericDict();
      check(is_finite(state.at("model").toGenericDict()), path, " has weights that are not finite");
      return {run, path, file, state.at("iteration").toInt(), state.at("images").toInt(), notes};
    } catch (const std::exception& e) {
      wrong = e.what();
      if (path != paths.back())
        notes.push_back(concat("warning: ", wrong, "; using the previous checkpoint"));
    }
  }
  fail(wrong);
}

// Writes a checkpoint of a run. While the disk is full, deletes the oldest step_N.pth of the run and tries
// again, because a new checkpoint is worth more than an old one. Throws if the disk is full and no step_N.pth
// is left.
static void write_and_make_room(const std::string& run, const std::string& path, const GenericDict& file) {
  for (;;) {
    try {
      return write_pth(path, file);
    } catch (const NewFile::Error& e) {
      const auto saved = list_checkpoints(run);
      const bool has_older = !saved.empty() && fs::path(saved.back()).filename() != "last.pth";
      std::error_code error;
      if (!e.disk_full || !has_older || !fs::remove(saved.back(), error)) throw;
    }
  }
}

void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before, int64_t keep) {
  const fs::path last = fs::path(run) / "last.pth";
  std::error_code error;
  if (keep > 0 && before >= 0 && before != step) {
    const fs::path older = fs::path(run) / concat("step_", before, ".pth");
    fs::remove(older, error);
    fs::create_hard_link(last, older, error);
    if (error && !fs::copy_file(last, older, error))  // the file system has no hard links
      fs::remove(older, error);
  }
  write_and_make_room(run, last.string(), file);
  int64_t kept = 0;
  for (const auto& path : list_checkpoints(run))
    if (path != last.string() && ++kept > keep) fs::remove(path, error);
}

SavedRun resume_settings(Flags& flags, const std::string& run, bool same_command) {
  combination_check(same_command || !flags.was_given("weights"),
                    "--weights and --resume cannot be used together: a resumed run has its own weights");
  combination_check(same_command || !flags.was_given("out"),
                    "--out and --resume cannot be used together: a resumed run stays in its folder; "
                    "--resume auto --out DIR resumes the run in DIR, or begins it");
  SavedRun saved = newest_checkpoint(run);
  const auto values = flags.values();
  const std::map<std::string, std::string> now(values.begin(), values.end());
  const Settings settings = saved_settings(saved.file, saved.path);
  const std::map<std::string, std::string> of_run(settings.begin(), settings.end());
  const SizeDefaults recipe = model_size(of_run.count("model") ? of_run.at("model") : "yolox-s").defaults;
  for (const auto& [name, value] : settings) {
    const bool is_lo = name == "mosaic-scale-lo", is_hi = name == "mosaic-scale-hi";
    if ((is_lo || is_hi) && std::stod(value) == (is_lo ? recipe.mosaic_scale_lo : recipe.mosaic_scale_hi))
      continue;  // flags of older versions, whose value is that of the model
    const bool given = flags.was_given(name), same = given && same_command;
    // With the same command, what the run chose for a flag that said auto stays.
    const bool chosen = same && (now.at(name) == "auto" || now.at(name) == "recipe" ||
                                 (name == "accum" && now.at("bs") == "auto"));
    const bool of_optimizer = name == "freeze" || name == "optimizer" || name == "recipe";
    if (given && !chosen && of_optimizer)
      usage_check(now.at(name) == value, "--", name, " ", now.at(name), " differs from the run's '", value,
                  "', so its optimizer state does not match; leave --", name,
                  " out, or start a new run from its weights");
    if (const std::string gone = gone_flag(name, value); !gone.empty())
      saved.notes.push_back(concat("warning: the run has ", value, " for it, but ", gone));
    if (!given || chosen) flags.set(name, value);
    if (given && !chosen && now.at(name) != value)
      saved.notes.push_back(concat("--", name, " ", now.at(name), " instead of the run's ", value));
  }
  double lr_factor = 1;           // of a run of an older version
  if (!of_run.count("recipe")) {  // its learning rate is that of one image
    flags.set("recipe", "official");
    lr_factor = std::stod(of_run.at("bs"));
  }
  const auto state = saved.file.toGenericDict().at("train").toGenericDict();
  if (state.contains("lr_factor")) lr_factor *= state.at("lr_factor").toDouble();  // lowered by --keep-going
  if (lr_factor != 1 && !flags.was_given("lr"))
    flags.set("lr", concat(std::setprecision(17), std::stod(of_run.at("lr")) * lr_factor));
  if (flags.was_given("gpus") != flags.was_given("procs"))  // the given flag replaces the other one
    flags.set(flags.was_given("gpus") ? "procs" : "gpus", "0");
  return saved;
}

// Calls write(), which saves a file. Returns false and logs a warning if write() throws, because a full disk
// must not end a run. must: for the last save of a run; tries 4 times, one second apart, and then throws.
static bool try_to_save(const std::function<void()>& write, Log& log, bool must) {
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

bool Saver::save(Training& t, const std::string& name, Log& log, bool must) {
  made_progress("saving " + name);
  if (!is_writer) {
    last_save_time = now();
    if (name == "last.pth") last_step = t.iteration;
    return true;
  }
  const auto file = checkpoint(t, info, settings, per_epoch, images);
  last_save_time = now();
  const auto write = [&] {
    if (name != "last.pth") return write_and_make_room(run, run + "/" + name, file);
    save_last(run, file, t.iteration, last_step, keep);
    last_step = t.iteration;
  };
  return try_to_save(write, log, must);
}

std::string Saver::load(Training& t, const SavedRun& saved) {
  const std::string note = load_checkpoint(t, saved.file, per_epoch, saved.path);
  last_step = fs::path(saved.path).filename() == "last.pth" ? t.iteration : -1;
  return note;
}

// Returns the folder of the run that --resume means: a folder, its last.pth, "newest" or "last" for
// newest_run(), or "auto" for `out` (--out); "" if a new run begins. Throws UsageError if there is no such
// run.
static std::string run_to_resume(const std::string& resume, const std::string& out) {
  if (resume.empty()) return "";
  if (resume == "auto") {
    combination_check(!out.empty(), "--resume auto needs --out DIR, the folder of the run");
    return list_checkpoints(out).empty() ? "" : out;
  }
  std::error_code ignored;
  if (fs::is_directory(resume, ignored)) return resume;
  if (resume == "newest" || resume == "last") {
    const std::string run = newest_run();
    usage_check(!run.empty(),
                "--resume: no run in runs/ or in this folder has a checkpoint; give the folder of a run, as "
                "in its --out");
    return run;
  }
  const fs::path path = resume;
  const bool is_last = path.filename() == "last.pth";
  usage_check(is_last || !fs::is_regular_file(path, ignored),
              "--resume continues the newest checkpoint of a run; give its folder or last.pth. To start a "
              "new run from ",
              resume, ", give it to --weights");
  if (!is_last) return resume;
  return path.has_parent_path() ? path.parent_path().string() : ".";
}

SavedRun find_run(Config& config) {
  config.model = model_size(config.model).name;
  const std::string run = run_to_resume(config.resume, config.out);
  if (run.empty()) {
    SavedRun none;
    if (!config.weights.empty() && !config.was_given("model")) {
      const auto file = read_weights(config.weights);
      const std::string found =
          detect_model(find_weights(file, config.weights), weights_info(file, config.weights).model);
      if (!found.empty()) {
        config.model = found;
        none.notes.push_back(concat("model ", config.model, ", as in ", config.weights));
      }
    }
    return none;
  }
  return resume_settings(config, run, /*same_command=*/config.resume == "auto");
}

}  // namespace yolox
