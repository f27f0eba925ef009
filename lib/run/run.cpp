// SPDX-License-Identifier: Apache-2.0
#include "run/run.hpp"

#include <cstring>
#include <fstream>
#include <iomanip>

#include "base/device.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "checkpoint/pth.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "run/crash.hpp"
#include "run/report.hpp"
#include "run/setup.hpp"

namespace yolox {

// Creates and locks the folder of a new run. Returns its path, or that of the resumed run, on all ranks.
// wanted: --out. name: name of the folder below runs/ if --out is empty.
static std::string open_run_folder(const SavedRun& saved, const std::string& wanted, const std::string& name,
                                   Ranks& ranks) {
  std::string folder;
  if (ranks.first()) folder = saved ? saved.run : create_run_folder(wanted, name);
  return ranks.broadcast(folder);
}

// Returns the suffix of this rank's files (log, problems, crash report): "" for rank 0, "_rank3" for rank 3.
static std::string rank_suffix(const Ranks& ranks) {
  return ranks.first() ? "" : concat("_rank", ranks.info.rank);
}

// Logs what makes a rank slow, or lets its memory run out: memory of its GPU that other processes hold, and
// hardware that the other ranks do not have.
static void log_hardware(Ranks& ranks, torch::Device device, Log& log) {
  const auto hardware = ranks.gather_texts(hardware_name(device)),
             held = ranks.gather_texts(memory_of_others(device));
  std::vector<std::string> others;
  for (size_t r = 0; r < held.size(); ++r) {
    if (!held[r].empty())
      log.line(concat("warning: ", ranks.alone() ? "" : concat("rank ", r, ": "), held[r]));
    if (hardware[r] != hardware[0]) others.push_back(concat("rank ", r, " ", hardware[r]));
  }
  if (!others.empty())
    log.line(concat("note: rank 0 has ", hardware[0], ", but ", listed(others, 8),
                    "; the slowest rank decides the speed"));
}

// Returns the git revision of the program that wrote config.json last.
static std::string revision_of(const std::string& run) {
  std::ifstream file(run + "/config.json");
  const std::string json{std::istreambuf_iterator<char>(file), {}}, key = "\"revision\":\"";
  const size_t at = json.find(key);
  if (at == std::string::npos) return git_revision();
  return json.substr(at + key.size(), json.find('"', at + key.size()) - at - key.size());
}

Run::Run(const Config& config, const WeightsInfo& info, const SavedRun& saved, const Splits& data,
         Ranks& ranks, torch::Device device)
    : folder(open_run_folder(saved, config.out, config.model + "-" + data_name(config.data), ranks)),
      log(concat(folder, "/log", rank_suffix(ranks), ".txt"), /*quiet=*/!ranks.first()),
      config(config),
      data(data),
      info(info),
      ranks(ranks),
      device(device),
      resumed(bool(saved)),
      notes(saved.notes) {
  const std::string revision = resumed ? revision_of(folder) : git_revision();
  if (revision != git_revision())
    note(concat("note: this program is of revision ", git_revision(), "; ", revision,
                " wrote this run so far"));
  log.line(saved ? concat("resuming ", folder, " at step ", saved.step) : "run " + folder);
  crash_context(folder, config_json(config, device, ranks.info.world),
                concat("crash", rank_suffix(ranks), ".txt"));
  log_hardware(ranks, device, log);
}

// ---- before the first step

void Run::cache_images(Dataset& train) {
  if (config.cache == "none") return;
  log.line(concat("cache   ", config.cache, ": decoding the images"));
  const auto progress = [&](size_t done, size_t of) { log.progress(concat(done, "/", of), done == of); };
  const cv::Size size(int(info.width), int(info.height));
  log.line("cache   " +
           yolox::cache_images(train, config.cache, size, config.loader_threads, ranks, progress));
}

bool Run::resume(Training& t, SavedRun& saved, const Plan& its_plan) {
  plan = its_plan;
  const int64_t images = data.train.records.size();
  saver = {folder,      info,         config.values(/*without=*/kOfCall), plan.per_epoch, images,
           config.keep, ranks.first()};
  if (!saved) return true;
  note(saver.load(t, saved));
  if (saved.images != images)
    note(concat("warning: the data set has ", images, " images, but ", saved.images,
                " in the checkpoint; their order changes from here on"));
  saved.file = {};
  if (ranks.first()) remove_temporary_files(folder);
  std::string over;
  if (t.iteration >= plan.iters && !evaluation_due(t))
    over = concat(" is complete: ", t.iteration, " of ", plan.iters,
                  " steps are done; increase --epochs or --max-iters to continue");
  else if (config.patience > 0 && t.best.evals_without_gain >= config.patience)
    over = concat(" was stopped early after ", t.best.evals_without_gain, " evaluations without a better ",
                  score_of({}).name, "; increase --patience to continue (0 = off)");
  usage_check(over.empty() || config.resume == "auto", folder, over);
  if (!over.empty()) log.line(folder + over);
  return over.empty();
}

void Run::start(Training& t, Plan& its_plan, bool with_dtr) {
  first = t.iteration;
  best_score = t.best.score;
  if (profiling()) its_plan.iters = first + Profile(device).steps();
  plan = its_plan;
  progress.emplace(folder, log, first, ranks.info.rank, with_dtr, evaluation_due(t));
  eval_parts = RetryInParts{1, plan.batch_per_rank()};
  const ImageSize base{int(info.height), int(info.width)};
  set_compute_threads(parameter_count(*t.model), base, device, ranks.info.world);
  const std::string settings = config_json(config, device, ranks.info.world);
  crash_context(folder, settings, concat("crash", rank_suffix(ranks), ".txt"));
  if (ranks.first() && !replace_file(folder + "/config.json", settings))
    log.line(concat("warning: cannot write ", folder, "/config.json"));
  log_plan(log, config, data, t.model, base, device, plan, ranks);
  for (const auto& text : notes) log.line(text);
  log.line(font_note(data.train.classes));
  progress->log_problems(data);
  if (first == 0 && ranks.first()) save_image(folder + "/labels.jpg", draw_label_statistics(data.train));
  if (!resumed && !profiling()) save(t, "last.pth");  // so that the run can be resumed from the start
  ranks.barrier();                                    // last.pth exists now
  ranks.report_run_folder(folder);
  catch_signals();
  if (profiling() && ranks.first()) profile.emplace(device);
}

// ---- each step

bool Run::evaluation_due(const Training& t) const {
  if (profiling()) return false;
  return t.epochs < t.iteration / plan.per_epoch ||
         (t.iteration == plan.iters && config.eval_interval > 0 && !t.score);
}

void Run::check_signals() {
  if (stop) return;
  // Rank 0 writes the checkpoints, so its clock counts.
  const bool due = ranks.first() && config.save_minutes > 0 && !profiling() &&
                   now() - saver.last_save_time > 60 * config.save_minutes;
  // Not part of the step's collectives, because on a GPU the host reads their results one step later.
  const int agreed = int(ranks.max(2 * int(stop_signal) + int(due)));
  stop = agreed / 2;
  save_due = agreed % 2 == 1;
}

bool Run::must_read_all(const Training& t) const {
  return stop || save_due || profiling() || plan.ends_epoch(t.iteration) || t.iteration == plan.iters;
}

void Run::start_step(int64_t step, const Batch& batch, double waited) {
  progress->add_wait(waited);
  ranks.reached(concat("step ", step));
  crash_step(concat("step ", step, " of epoch ", plan.epoch_of(step), "; images: ", image_names(batch)));
  if (step < 3 && ranks.first())
    save_image(concat(folder, "/train_batch", step, ".jpg"),
               draw_batch(batch.images, labelled_boxes(batch.targets, batch.data->classes),
                          short_names(batch.indices, *batch.data)));
}

void Run::end_step(Training& t, const StepRecord& record) {
  const auto& [step, batch, lr, size, use_l1, dtr, numbers] = record;
  if (const std::string why = stop_reason(numbers, skipped); !why.empty()) fail_step(t, why, record);
  if (!numbers.finite()) ++t.skipped;
  RECORD_USER_SCOPE("logging");
  progress->step(step, numbers, lr, plan, device, dtr);
  if (!profiling() && plan.ends_epoch(step + 1)) progress->log_ranks(ranks, device);
}

bool Run::profile_step() { return !profile || !profile->step(); }

void Run::save_if_due(Training& t) {
  if (!save_due) return;
  save_due = false;
  save(t, "last.pth");
}

bool Run::save(Training& t, const std::string& name, bool required) {
  return saver.save(t, name, log, required);
}

void Run::save_for_restart(Training& t, int64_t accum) {
  check(!profiling(), "out of memory; give --accum ", accum, " or a smaller --bs");
  check(is_finite(to_dict(state_dict(*t.model))), "out of memory, and the weights are not finite");
  for (auto& [name, value] : saver.settings)
    if (name == "accum") value = concat(accum);
  saver.is_writer = true;
  saver.last_step = -1;  // another rank may save the same step, so that last.pth must not become step_N.pth
  save(t, "last.pth", /*required=*/true);
}

std::string save_failed_step(const std::string& run, Training& t, const StepRecord& step, int rank) {
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  const auto& [index, batch, lr, size, use_l1, dtr, numbers] = step;
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(batch.data->name_of(i));
  auto losses = empty_dict();
  if (!numbers.values.empty()) losses.insert("total", numbers.total);
  for (const auto& v : numbers.values) losses.insert(v.name, v.value);
  auto file = empty_dict();
  file.insert("iteration", index);
  file.insert("lr", lr);
  file.insert("losses", losses);
  file.insert("height", int64_t{size.height});
  file.insert("width", int64_t{size.width});
  file.insert("use_l1", use_l1);
  file.insert("scale", t.scaler.scale.item<double>());
  file.insert("images", batch.images.cpu());
  file.insert("names", names);
  file.insert("boxes", batch.targets.boxes.cpu());
  file.insert("classes", batch.targets.classes.cpu());
  if (batch.targets.ignored.defined()) file.insert("ignored", batch.targets.ignored.cpu());
  file.insert("model", to_dict(state_dict(*t.model)));
  save_image(name + ".jpg", draw_batch(batch.images, labelled_boxes(batch.targets, batch.data->classes),
                                       short_names(batch.indices, *batch.data)));
  try {
    write_pth(name + ".pth", file);
  } catch (const std::exception& e) {
    return concat("the batch and the weights could not be saved: ", e.what());
  }
  return concat("the batch and the weights are in ", name, ".pth and .jpg");
}

void Run::fail_step(Training& t, const std::string& why, const StepRecord& record) {
  const std::string terms = to_string(record.numbers);
  fail(why, " at step ", record.step, " (", terms, terms.empty() ? "lr " : ", lr ", record.lr, "; images ",
       image_names(record.batch), "); ", save_failed_step(folder, t, record, ranks.info.rank),
       "; continue from the last checkpoint with a lower lr: ./train --resume ", shell_word(folder), " --lr ",
       config.lr / 2);
}

// ---- the end of an epoch

Evaluation Run::evaluate(Training& t, BatchLoss* loss) {
  crash_step(concat("evaluation after step ", t.iteration));
  ranks.reached(concat("the evaluation after step ", t.iteration));
  ranks.check_equal(tensors_of(t.eval_model()), concat("at step ", t.iteration));
  EvalSettings settings = evaluation_settings(config, info, plan.batch_per_rank(), device, ranks);
  settings.loss = loss;
  if (ranks.first()) settings.pictures = folder + "/val_batch";
  Evaluation e;
  for (int64_t parts = eval_parts->parts;;) {
    settings.batch = int(std::max<int64_t>(1, plan.batch_per_rank() / parts));
    try {
      e = yolox::evaluate(t.eval_model(), data.val, settings, [&](int64_t done, int64_t images) {
        ranks.restart_timeout();
        progress->evaluated(done, images);
      });
      eval_parts->succeeded(parts);
      break;
    } catch (const std::exception& failure) {
      parts = eval_parts->more_parts(failure, parts);
    }
    empty_cache(device);
    log.line(concat("note: out of memory; the evaluation is repeated with batches of ",
                    plan.batch_per_rank() / parts, " images"));
  }
  if (e.complete) progress->log_evaluation(t.iteration, e, plan, score_of(e).value > t.best.score);
  ranks.restart_timeout();
  return e;
}

void Run::save_evaluation(const Training& t, const Evaluation& e) {
  if (!ranks.first()) return;
  try {
    const std::string heading = concat("After step ", t.iteration, ", the best evaluation of the run, on ",
                                       e.images, " images of ", data.val.name);
    write_evaluation(folder, heading, e, data.val);
  } catch (const std::exception& error) {
    log.line(concat("warning: report.html will lack this evaluation: ", error.what()));
  }
}

bool Run::end_of_epoch(Training& t, bool stop_early) {
  complete = stop_early || t.iteration == plan.iters;
  ranks.restart_timeout();
  if (t.skipped) log.line(concat("  ", t.skipped, " steps skipped: their gradients overflowed"));
  progress->log_problems(data);
  if (stop_early)
    log.line(concat("stopping: ", t.best.evals_without_gain, " evaluations without a better ",
                    score_of({}).name, " (--patience)"));
  const bool stops = ranks.broadcast_flag(stop_early);
  ranks.collective_seconds();  // resets the waiting time, because evaluation and saving must not count
  progress->restart_clock();
  return stops;
}

// ---- the end of the run

void Run::finish(Training& t) {
  check_signals();
  if (profiling()) {
    if (!profile || stop) return;
    log.line(profile_table(profile->stop(folder + "/trace.json")));
    log.line(concat("trace of these steps: ", folder, "/trace.json, for https://ui.perfetto.dev"));
    return;
  }
  if (stop && !complete) {
    if (!saved_at(t.iteration)) save(t, "last.pth", /*required=*/true);
    log.line(concat("stopped by ", strsignal(stop), " at step ", t.iteration,
                    "; resume with: ./train --resume ", shell_word(folder)));
  } else {
    const std::string best = best_score >= 0
                                 ? concat(", best ", score_of({}).name, " ", std::fixed, std::setprecision(4),
                                          best_score, " in ", folder, "/best.pth")
                                 : "";
    log.line(concat("done: ", folder, "/last.pth", best));
  }
}

void Run::write_report() {
  // A machine that stops this process may soon be gone.
  if (!profiling() && (stop == 0 || stop == SIGINT)) log.line(yolox::write_report(folder));
}

}  // namespace yolox
