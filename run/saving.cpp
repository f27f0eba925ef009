// SPDX-License-Identifier: Apache-2.0
#include "run/saving.hpp"

#include <filesystem>
#include <iomanip>
#include <map>
#include <system_error>

#include "base/printable.hpp"
#include "checkpoint/load.hpp"

namespace yolox {

bool is_finite(const GenericDict& weights) {
  for (const auto& e : weights)
    if (e.value().isTensor() && !torch::isfinite(e.value().toTensor()).all().item<bool>()) return false;
  return true;
}

SavedRun newest_checkpoint(const std::string& run, int64_t below) {
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
      const int64_t step = state.at("iteration").toInt();
      if (step < below) return {run, path, file, step, state.at("images").toInt(), notes};
      wrong = concat(path, " is the checkpoint of step ", step, "; an older one is needed");
    } catch (const std::exception& e) {
      wrong = e.what();
      if (path != paths.back())
        notes.push_back(concat("warning: ", wrong, "; using the previous checkpoint"));
    }
  }
  fail(wrong);
}

void write_and_make_room(const std::string& run, const std::string& path, const GenericDict& file) {
  for (;;) {
    try {
      return write_pth(path, file);
    } catch (const NewFile::Error& e) {
      const auto saved = list_checkpoints(run);
      const bool has_older = !saved.empty() && std::filesystem::path(saved.back()).filename() != "last.pth";
      std::error_code error;
      if (!e.disk_full || !has_older || !std::filesystem::remove(saved.back(), error)) throw;
    }
  }
}

void save_last(const std::string& run, const GenericDict& file, int64_t step, int64_t before, int64_t keep) {
  namespace fs = std::filesystem;
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
  for (const auto& [name, value] : settings) {
    const bool given = flags.was_given(name), same = given && same_command;
    // With the same command, what the run chose for a flag that said auto stays.
    const bool chosen = same && (now.at(name) == "auto" || (name == "accum" && now.at("bs") == "auto"));
    const bool increased = same && name == "accum" && std::stoi(value) > std::stoi(now.at(name));
    if (!given || chosen || increased) flags.set(name, value);
    if (increased)
      saved.notes.push_back(
          concat("--accum ", value, " instead of ", now.at(name), ", because memory ran out"));
    else if (given && !chosen && now.at(name) != value)
      saved.notes.push_back(concat("--", name, " ", now.at(name), " instead of the run's ", value));
  }
  const std::map<std::string, std::string> of_run(settings.begin(), settings.end());
  if (!of_run.count("recipe")) {  // a run of an older version, whose learning rate is that of one image
    flags.set("recipe", "official");
    if (!flags.was_given("lr"))
      flags.set("lr", concat(std::setprecision(17), std::stod(of_run.at("lr")) * std::stod(of_run.at("bs"))));
  }
  if (flags.was_given("gpus") != flags.was_given("procs"))  // the given flag replaces the other one
    flags.set(flags.was_given("gpus") ? "procs" : "gpus", "0");
  return saved;
}

bool Saver::save(Training& t, const std::string& name, Log& log, bool must) {
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

void Saver::load(Training& t, const SavedRun& saved) {
  load_checkpoint(t, saved.file, per_epoch, saved.path);
  last_step = std::filesystem::path(saved.path).filename() == "last.pth" ? t.iteration : -1;
}

void Saver::roll_back(Training& t, Log& log, const std::function<void()>& ready) {
  const double factor = t.lr_factor / 2;
  const int64_t returns = t.rollbacks + 1;
  SavedRun good = newest_checkpoint(run);
  load(t, good);
  if (t.iteration == rolled_back_to) {
    try {
      const SavedRun older = newest_checkpoint(run, rolled_back_to);
      load(t, older);
      good.notes.insert(good.notes.end(), older.notes.begin(), older.notes.end());
    } catch (const std::exception&) {  // there is no older checkpoint
    }
  }
  for (const auto& note : good.notes) log.line(note);
  ready();
  rolled_back_to = t.iteration;
  t.lr_factor = factor;
  t.rollbacks = returns;
  save(t, "last.pth", log);  // includes lr_factor, so that --resume uses it
}

std::string run_to_resume(const std::string& resume, const std::string& out) {
  if (resume.empty()) return "";
  if (resume == "auto") {
    combination_check(!out.empty(), "--resume auto needs --out DIR, the folder of the run");
    return list_checkpoints(out).empty() ? "" : out;
  }
  const std::string run = run_folder_of(resume);
  usage_check(
      !run.empty(),
      "--resume: no run in runs/ or in this folder has a checkpoint; give the folder of a run, as in its "
      "--out");
  return run;
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
  SavedRun saved = resume_settings(config, run, /*same_command=*/config.resume == "auto");
  for (const auto& [flag, now] :
       {std::pair("freeze", config.freeze), {"optimizer", config.optimizer}, {"recipe", config.recipe}})
    for (const auto& [name, value] : saved_settings(saved.file, saved.path))
      usage_check(
          name != flag || value == now, "--", flag, " ", now, " differs from the run's '", value,
          "', so its optimizer state does not match; start a new run from its weights: ./train --weights ",
          shell_word(saved.run + "/last.pth"));
  return saved;
}

}  // namespace yolox
