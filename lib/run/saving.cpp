// SPDX-License-Identifier: Apache-2.0
#include "run/saving.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/timeout.hpp"
#include "checkpoint/load.hpp"
#include "ddp/launch.hpp"
#include "evaluate.hpp"
#include "models.hpp"

namespace yolox {

namespace fs = std::filesystem;

// ---- state

std::vector<Tensor> tensors_of(YOLOX& model) {
  std::vector<Tensor> all = model->parameters();
  for (const Tensor& b : model->buffers()) all.push_back(b);
  return all;
}

std::vector<Tensor> tensors_of(Training& t) {
  std::vector<Tensor> all = tensors_of(t.model);
  if (!t.ema.is_empty())
    for (const Tensor& x : tensors_of(t.ema)) all.push_back(x);
  for (const Tensor& x : t.optimizer.state()) all.push_back(x);
  if (t.scaler.enabled) {
    all.push_back(t.scaler.scale);
    all.push_back(t.scaler.growth_tracker);
  }
  return all;
}

void move(YOLOX& model, torch::Device device, at::ScalarType type) {
  model->to(device);
  for (const Tensor& t : tensors_of(model))
    if (t.is_floating_point()) t.set_data(t.to(type));
  for (const auto& module : model->modules())
    if (auto* norm = module->as<torch::nn::BatchNorm2d>())
      norm->num_batches_tracked.set_data(norm->num_batches_tracked.cpu());
}

YOLOX copy_of(const YOLOX& model, torch::Device device) {
  YOLOX copy = make_model(model->name, model->num_classes);
  move(copy, device, model->parameters()[0].scalar_type());
  to_channels_last(*copy);
  load_state_dict(*copy, to_dict(state_dict(*model)), "the model");
  copy->eval();
  return copy;
}

// Returns torch's random number generators, of the CPU and of the device. This training does not use them,
// because order and augmentation of images depend only on seed and step. A model with dropout would.
static std::vector<at::Generator> random_generators(torch::Device device) {
  std::vector<at::Generator> all{at::globalContext().defaultGenerator(torch::kCPU)};
  if (device.is_cuda()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

static GenericDict to_dict(const Settings& settings) {
  auto dict = empty_dict();
  for (const auto& [name, value] : settings) dict.insert_or_assign(name, value);
  return dict;
}

// Returns the settings in a checkpoint. Throws if the file is not a checkpoint of a training run, or one of
// version 0.1.0.
static RunSettings saved_settings(const c10::IValue& file, const std::string& path) {
  const bool of_run = file.isGenericDict() && file.toGenericDict().contains("train");
  const auto state = of_run ? file.toGenericDict().at("train").toGenericDict() : empty_dict();
  check(state.contains("flags"), path, " is no checkpoint of a run", of_run ? " of this version" : "",
        "; start a new run from its weights: ./train --weights ", shell_word(path));
  const auto read = [&](const char* key) {
    Settings all;
    for (const auto& e : state.at(key).toGenericDict())
      all.emplace_back(e.key().toStringRef(), e.value().toStringRef());
    return all;
  };
  return {read("flags"), read("chosen")};
}

// ---- the run folder

std::vector<std::string> list_checkpoints(const std::string& run) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const char* name : {"/last.pth", "/last.bak.pth"})
    if (fs::is_regular_file(run + name, ignored)) paths.push_back(run + name);
  return paths;
}

std::string newest_run() {
  std::pair newest{fs::file_time_type::min(), std::string()};
  std::error_code ignored;
  for (const char* place : {"runs", "."})
    for (const auto& folder : fs::directory_iterator(place, ignored)) {
      const std::string run = folder.path().lexically_normal().string();
      if (!fs::exists(run + "/.lock", ignored)) continue;  // a folder of other files
      for (const auto& path : list_checkpoints(run))
        newest = std::max(newest, {fs::last_write_time(path, ignored), run});
    }
  return newest.second;
}

void lock_run_folder(const std::string& run) {
  // Stays open, and so locked, until this process ends. For writing, as NFS needs for an exclusive lock.
  const int fd = open((run + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  check(access(run.c_str(), W_OK) == 0, "cannot write to ", run, ": ", std::strerror(errno),
        "; check its permissions, or give another --out");
  check(fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, "another training uses ", run,
        "; wait until it ends, or give another --out");
}

std::string create_run_folder(const Config& config) {
  std::string folder = config.out.empty() ? "runs" : config.out;
  std::error_code error;
  fs::create_directories(folder, error);
  while (config.out.empty() && !error) {  // another training may take the name at the same moment
    folder = unused_run_folder(config.model + "-" + data_name(config.data));
    if (fs::create_directory(folder, error)) break;
  }
  check(!error, "cannot write to ", folder, ": ", error.message(), "; give another --out");
  lock_run_folder(folder);
  try {  // a new run can use the folder of a run without a step
    if (newest_checkpoint(folder).step == 0)
      for (const auto& path : list_checkpoints(folder)) fs::remove(path);
  } catch (const std::exception&) {  // no last.pth, or one of another program, which stays
  }
  fs::remove(folder + "/parts", error);  // of a run that never started
  check(list_checkpoints(folder).empty(), folder, " already holds a run; resume it with --resume ",
        shell_word(folder), ", or give another --out");
  return folder;
}

// ---- checkpoints

SavedRun newest_checkpoint(const std::string& run) {
  std::vector<std::string> problems;
  for (const auto& path : list_checkpoints(run)) {
    try {
      const auto file = read_pth(path);
      const RunSettings settings = saved_settings(file, path);
      const auto state = file.toGenericDict().at("train").toGenericDict();
      for (const auto& e : state.at("model").toGenericDict())
        check(!e.value().isTensor() || torch::isfinite(e.value().toTensor()).all().item<bool>(), path,
              " has weights that are not finite");
      for (auto& problem : problems) problem = concat("warning: ", problem, "; using ", path);
      const std::string data = state.contains("data") ? state.at("data").toStringRef() : "";
      return {run, path, file, settings, state.at("iteration").toInt(), data, problems};
    } catch (const std::exception& e) {
      problems.emplace_back(e.what());
    }
  }
  if (problems.empty())
    problems.push_back(run +
                       " has no checkpoint (last.pth); give --resume the folder of a run. To start a new "
                       "run from another file, give it to --weights");
  fail(problems[0], problems.size() > 1 ? "; " + problems[1] : "");
}

void save_last(const std::string& run, const GenericDict& file, bool back_up, bool frees_backup) {
  const std::string last = run + "/last.pth", backup = run + "/last.bak.pth",
                    part = concat(backup, ".tmp.", getpid());
  std::error_code error;
  if (back_up) {
    fs::create_hard_link(fs::canonical(last, error), part, error);
    if (error) fs::copy_file(last, part, error);  // the file system has no hard links
    if (!error) fs::rename(part, backup, error);
    fs::remove(part, error);  // rename() leaves it if both already are names of the same file
  }
  try {
    write_pth(last, file);
  } catch (const NewFile::Error&) {
    if (!frees_backup || !fs::remove(backup, error)) throw;
    write_pth(last, file);
  }
}

SavedRun resume_settings(Config& config, const std::string& run, bool same_command) {
  // What a resumed run keeps. With --resume auto, --out names its folder, perhaps in another way.
  std::set<std::string> fixed{"model", "weights", "recipe", "optimizer", "freeze"};
  if (!same_command) fixed.insert("out");
  SavedRun saved = newest_checkpoint(run);
  const auto typed = config.values();
  const std::map<std::string, std::string> command(typed.begin(), typed.end());
  const RunSettings& before = saved.settings;
  std::map<std::string, std::string> of_run(before.chosen.begin(), before.chosen.end());
  for (const char* launches : {"gpus", "procs"}) of_run.erase(launches);  // 0 under torchrun and srun
  of_run.insert(before.flags.begin(), before.flags.end());                // does not replace what was chosen
  for (const auto& [name, value] : before.flags) {
    if (const std::string gone = gone_flag(name, value); !gone.empty())
      saved.notes.push_back(concat("warning: the run has ", value, " for it, but ", gone));
    if (!config.was_given(name)) {
      config.set(name, value);
      continue;
    }
    const std::string& now = command.at(name);
    std::string& current = of_run.at(name);
    // With the same command, auto means what it has become. A switch has no auto.
    const bool is_switch = now == "true" || now == "false";
    if (now == current || (same_command && now == value && !is_switch)) continue;
    usage_check(!fixed.contains(name), "--", name, " ", now, " differs from the run's '", current,
                "', which a resumed run keeps; leave --", name,
                " out, or start a new run from its weights: ./train --weights ", shell_word(run));
    saved.notes.push_back(concat("--", name, " ", now, " instead of the run's ", current));
    current = now;
  }
  if (config.was_given("gpus") != config.was_given("procs")) {  // the given flag replaces the other one
    const char* other = config.was_given("gpus") ? "procs" : "gpus";
    config.set(other, of_run[other] = "0");
  }
  config.start = config.values(/*without=*/kOfCall);
  for (const auto& [name, value] : of_run) config.set(name, value);
  return saved;
}

GenericDict Saver::checkpoint(Training& t) const {
  auto state = empty_dict(), top = empty_dict();
  auto random = empty_list();
  for (const at::Generator& g : random_generators(t.device())) random.push_back(g.get_state());
  state.insert("model",
               to_dict(state_dict(*t.model)));  // the trained weights; top-level "model" has the EMA
  state.insert("iteration", t.iteration);
  state.insert("ema_updates", t.ema_updates);
  state.insert("skipped", t.skipped);
  state.insert("score", score_of({}).name);  // what best_ap and curr_ap are
  state.insert("evals_without_gain", t.best.evals_without_gain);
  state.insert("epochs", t.epochs);
  state.insert("random", random);
  if (t.scaler.enabled) {
    state.insert("scale", t.scaler.scale.item<double>());
    state.insert("growth_tracker", t.scaler.growth_tracker.item<int64_t>());
  }
  state.insert("per_epoch", per_epoch);
  state.insert("data", data);
  state.insert("flags", to_dict(settings.flags));
  state.insert("chosen", to_dict(settings.chosen));
  top.insert("start_epoch", t.iteration / per_epoch);
  top.insert("model", to_dict(state_dict(*t.eval_model())));
  top.insert("optimizer", state_dict(t.optimizer));
  top.insert("best_ap", t.best.score);
  top.insert("curr_ap", t.score.value_or(std::nan("")));
  top.insert("yolox", to_dict(info));
  top.insert("train", state);
  return top;
}

bool Saver::save(Training& t, const std::string& name, Log& log, bool must) {
  made_progress("saving " + name);
  const bool is_last = name == "last.pth";
  last_save_time = now();  // also if it fails, so that the next try is not at the next step
  if (is_writer) {
    const auto file = checkpoint(t);
    std::error_code ignored;
    fs::create_directories(run, ignored);  // if it was deleted
    try {
      if (is_last)
        save_last(run, file, /*back_up=*/last_step >= 0 && last_step != t.iteration, must && last_step >= 0);
      else
        write_pth(run + "/" + name, file);
    } catch (const std::exception& e) {
      if (must) throw;
      log.line(concat("warning: ", e.what(), "; training continues, and the next save tries again"));
      return false;
    }
  }
  if (is_last) last_step = t.iteration;
  return true;
}

void Saver::load(Training& t, SavedRun& saved) {
  const std::string& path = saved.path;
  const auto top = saved.file.toGenericDict();
  const auto state = top.at("train").toGenericDict();
  const auto load_all = [&](YOLOX& into, const c10::IValue& weights) {
    const auto report = load_state_dict(*into, weights.toGenericDict(), path);
    check(report.complete(), path, " does not match this model: ", to_string(report));
  };
  load_all(t.model, state.at("model"));
  if (!t.ema.is_empty()) load_all(t.ema, top.at("model"));
  load_state_dict(t.optimizer, top.at("optimizer").toGenericDict(), path);
  if (t.scaler.enabled && state.contains("scale")) {  // missing if the run had no --amp fp16 so far
    t.scaler.scale.fill_(state.at("scale").toDouble());
    t.scaler.growth_tracker.fill_(state.at("growth_tracker").toInt());
  }
  t.iteration = state.at("iteration").toInt();
  t.ema_updates = state.at("ema_updates").toInt();
  t.skipped = state.at("skipped").toInt();
  t.best = {top.at("best_ap").toDouble(), state.at("evals_without_gain").toInt()};
  const double ap = top.at("curr_ap").toDouble();  // official files have a number or NaN
  t.score = std::isnan(ap) ? std::nullopt : std::optional(ap);
  t.epochs = state.at("epochs").toInt();
  const c10::IValue random = state.at("random");
  std::vector<at::Generator> generators = random_generators(t.device());
  for (size_t i = 0; i < std::min(generators.size(), random.toListRef().size()); ++i)
    generators[i].set_state(random.toListRef()[i].toTensor());
  const int64_t of_run = state.at("per_epoch").toInt();
  usage_check(
      of_run == per_epoch, path, " has ", of_run, " steps per epoch, but this --bs and data have ", per_epoch,
      ", so the run cannot be resumed with them; leave --bs, --data and --val-fraction out, or start a "
      "new run from its weights: ./train --data ... --weights ",
      shell_word(path));
  const std::string now = score_of({}).name, before = state.at("score").toStringRef();
  if (now != before) {
    t.best.score = -1;
    saved.notes.push_back(concat("note: the score of an evaluation is ", now, ", and was ", before,
                                 " before; the next evaluation replaces best.pth"));
  }
  if (saved.data != data && !saved.data.empty())
    saved.notes.push_back(concat("warning: the training set is another one: it has ", data, ", and had ",
                                 saved.data, "; are --data and the working folder right?"));
  last_step = fs::path(path).filename() == "last.pth" ? t.iteration : -1;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored))
    if (is_writer && entry.path().filename().string().find(".tmp.") != std::string::npos)
      fs::remove(entry.path(), ignored);
}

// Returns the folder of the run that --resume means: a folder, its last.pth, "newest" or "last" for
// newest_run(), or "auto" for `out` (--out); "" if a new run begins. Throws UsageError if there is none.
static std::string run_to_resume(const std::string& resume, const std::string& out) {
  if (resume == "auto") {
    combination_check(!out.empty(), "--resume auto needs --out DIR, the folder of the run");
    return list_checkpoints(out).empty() ? "" : out;
  }
  if (resume == "newest" || resume == "last") {
    const std::string run = newest_run();
    usage_check(!run.empty(),
                "--resume: no run in runs/ or in this folder has a checkpoint; give the folder of a run, as "
                "in its --out");
    return run;
  }
  const fs::path path = resume;
  if (path.filename() != "last.pth") return resume;
  return path.has_parent_path() ? path.parent_path().string() : ".";
}

SavedRun find_run(Config& config) {
  config.model = model_size(config.model).name;
  const std::string run = run_to_resume(config.resume, config.out);
  if (!run.empty()) return resume_settings(config, run, /*same_command=*/config.resume == "auto");
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
  config.start = config.values(/*without=*/kOfCall);
  return none;
}

}  // namespace yolox
