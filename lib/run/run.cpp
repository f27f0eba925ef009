// SPDX-License-Identifier: Apache-2.0
#include "run/run.hpp"

#include <fstream>

#include "base/device.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "base/timeout.hpp"
#include "checkpoint/checkpoint.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "run/report.hpp"

namespace yolox {

std::string open_run_folder(const Config& config, const SavedRun& saved, Ranks& ranks) {
  std::string folder;
  if (ranks.first())
    folder = saved ? saved.run : create_run_folder(config.out, config.model + "-" + data_name(config.data));
  return ranks.broadcast(folder);
}

// Returns the suffix of this rank's files (log, problems, crash report): "" for rank 0, "_rank3" for rank 3.
static std::string rank_suffix(const Ranks& ranks) {
  return ranks.first() ? "" : concat("_rank", ranks.info.rank);
}

// Returns the git revision of the program that wrote config.json last.
static std::string revision_of(const std::string& run) {
  std::ifstream file(run + "/config.json");
  const std::string json{std::istreambuf_iterator<char>(file), {}}, key = "\"revision\":\"";
  const size_t at = json.find(key);
  if (at == std::string::npos) return git_revision();
  return json.substr(at + key.size(), json.find('"', at + key.size()) - at - key.size());
}

Log open_log(const std::string& run, const Config& config, const SavedRun& saved, torch::Device device,
             Ranks& ranks) {
  Log log(concat(run, "/log", rank_suffix(ranks), ".txt"), /*quiet=*/!ranks.first());
  const std::string revision = saved ? revision_of(run) : git_revision();
  log.line(saved ? concat("resuming ", run, " at step ", saved.step) : "run " + run);
  if (revision != git_revision())
    log.line(concat("note: this program is of revision ", git_revision(), "; ", revision,
                    " wrote this run so far"));
  crash_context(run, config_json(config, device, ranks.info.world),
                concat("crash", rank_suffix(ranks), ".txt"));
  return log;
}

Saver new_saver(const std::string& run, const Config& config, const WeightsInfo& info, const Plan& plan,
                int64_t images, const Ranks& ranks) {
  const bool writes = ranks.first() && !config.profile;
  return {run, info, config.settings(), plan.per_epoch, images, writes, config.save_minutes};
}

bool resume_run(SavedRun& saved, Training& t, const Plan& plan, const std::string& resume, Saver& saver,
                Log& log) {
  saved.notes.push_back(saver.load(t, saved));
  if (saved.images != saver.images)
    saved.notes.push_back(concat("warning: the data set has ", saver.images, " images, but ", saved.images,
                                 " in the checkpoint; their order changes from here on"));
  saved.file = {};
  if (!is_complete(t, plan)) return true;
  const std::string over =
      t.iteration >= plan.iters
          ? concat(" is complete: ", t.iteration, " of ", plan.iters,
                   " steps are done; increase --epochs or --max-iters to continue")
          : concat(" was stopped early after ", t.best.evals_without_gain, " evaluations without a better ",
                   score_of({}).name, "; increase --patience to continue (0 = off)");
  usage_check(resume == "auto", saved.run, over);
  log.line(saved.run + over);
  return false;
}

void start_run(const std::string& run, const Config& config, const SavedRun& saved, const Splits& data,
               Training& t, const Plan& plan, torch::Device device, Ranks& ranks, Saver& saver,
               Progress& progress, Log& log) {
  const ImageSize base = base_size(config);
  const std::string settings = config_json(config, device, ranks.info.world);
  crash_context(run, settings, concat("crash", rank_suffix(ranks), ".txt"));
  if (ranks.first() && !replace_file(run + "/config.json", settings))
    log.line(concat("warning: cannot write ", run, "/config.json"));
  log_plan(log, config, data, t.model, base, device, plan, ranks);
  for (const auto& text : saved.notes) log.line(text);
  log.line(font_note(data.train.classes));
  log.line(crowded_images_note(data.val.truth, config.max_dets));
  progress.log_problems(data);
  if (t.iteration == 0 && ranks.first()) save_image(run + "/labels.jpg", draw_label_statistics(data.train));
  if (!saved) saver.save(t, "last.pth", log);  // so that the run can be resumed from the start
  ranks.barrier();                             // last.pth exists now
  catch_signals();
  start_timeout(config.timeout, ranks.name(), ranks.alone());
  made_progress("the start");
}

Agreement agree(Ranks& ranks, const Saver& saver, const UnreadSteps& unread) {
  const auto most = ranks.max({double(stop_signal), double(saver.due()), unread.step_seconds});
  return {int(most[0]), most[1] > 0, most[2]};
}

// ---- evaluation

Evaluator::Evaluator(const std::string& run, const Dataset& data, EvalSettings s, Ranks& ranks)
    : run(run), data(data), settings(std::move(s)), ranks(ranks), in_parts{1, settings.batch} {
  settings.loss = validation_loss;
  if (ranks.first()) settings.pictures = run + "/val_batch";
}

Evaluation Evaluator::evaluate(Training& t, Log& log) {
  crash_step(concat("evaluation after step ", t.iteration));
  made_progress(concat("the evaluation after step ", t.iteration));
  ranks.check_equal(tensors_of(t.eval_model()), concat("at step ", t.iteration));
  for (int64_t parts = in_parts.parts;;) {
    settings.batch = int(std::max<int64_t>(1, in_parts.max_parts / parts));
    try {
      Evaluation e = yolox::evaluate(t.eval_model(), data, settings, [&](int64_t done, int64_t images) {
        made_progress(concat("the evaluation after step ", t.iteration));
        log.progress(concat("  evaluated ", done, " of ", images, " images"), /*keep=*/false);
      });
      in_parts.succeeded(parts);
      return e;
    } catch (const std::exception& failure) {
      parts = in_parts.more_parts(failure, parts);
    }
    empty_cache(settings.device);
    log.line(concat("note: out of memory; the evaluation is repeated with batches of ",
                    in_parts.max_parts / parts, " images"));
  }
}

void Evaluator::save(const Training& t, const Evaluation& e, Log& log) const {
  if (!ranks.first()) return;
  try {
    const std::string heading = concat("After step ", t.iteration, ", the best evaluation of the run, on ",
                                       e.images, " images of ", data.name);
    write_evaluation(run, heading, e, data);
  } catch (const std::exception& error) {
    log.line(concat("warning: report.html will lack this evaluation: ", error.what()));
  }
}

// ---- the end of a run

std::string save_failed_step(const std::string& run, Training& t, const Plan& plan, const StepRow& row,
                             const Batch& batch, int rank) {
  const std::string name = rank > 0 ? concat(run, "/nonfinite_rank", rank) : run + "/nonfinite";
  const ImageSize size = plan.sizes.size_at(row.step);
  auto names = empty_list();
  for (const int64_t i : batch.indices) names.push_back(batch.data->name_of(i));
  auto losses = empty_dict();
  if (!row.numbers.values.empty()) losses.insert("total", row.numbers.total);
  for (const auto& v : row.numbers.values) losses.insert(v.name, v.value);
  auto file = empty_dict();
  file.insert("iteration", row.step);
  file.insert("lr", row.lr);
  file.insert("losses", losses);
  file.insert("height", int64_t{size.height});
  file.insert("width", int64_t{size.width});
  file.insert("use_l1", row.step >= plan.first_no_aug_iteration);
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

void report_failed_step(const std::string& run, Training& t, const Plan& plan, const StepFailed& failed,
                        const Batch& batch, int rank) {
  const std::string terms = to_string(failed.row.numbers);
  fail(failed.what(), " at step ", failed.row.step, " (", terms, terms.empty() ? "lr " : ", lr ",
       failed.row.lr, "; images ", image_names(batch), "); ",
       save_failed_step(run, t, plan, failed.row, batch, rank),
       "; continue from the last checkpoint with a lower lr: ./train --resume ", shell_word(run), " --lr ",
       plan.schedule.lr / 2);
}

}  // namespace yolox
