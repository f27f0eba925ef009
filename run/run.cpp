#include "run/run.hpp"

#include <cstring>
#include <filesystem>
#include <utility>

#include "base/new_file.hpp"
#include "base/program.hpp"
#include "data.hpp"
#include "data/cache.hpp"
#include "data/pictures.hpp"
#include "dtr/trace.hpp"
#include "run/crash.hpp"
#include "run/folder.hpp"
#include "run/profile.hpp"
#include "run/report.hpp"
#include "run/setup.hpp"

namespace yolox {

struct Run::Profiling {
  Profile profile;
};

std::string open_run_folder(const SavedRun& saved, const std::string& wanted, const std::string& name,
                            Ranks& ranks) {
  std::string folder;
  if (ranks.first()) {
    if (saved) take_run_folder(saved.run);
    folder = saved ? saved.run : make_run_folder(wanted, name);
  }
  return ranks.broadcast(folder);
}

std::string rank_suffix(const Ranks& ranks) { return ranks.first() ? "" : concat("_rank", ranks.place.rank); }

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
  log.line(saved ? concat("resuming ", folder, " at step ", saved.step) : "run " + folder);
  crash_context(folder, config_json(config, device), concat("crash", rank_suffix(ranks), ".txt"));
}

Run::~Run() = default;

void Run::note(const std::string& text) { notes.push_back(text); }

// ---- before the first step

void Run::cache_images(Dataset& train) {
  if (config.cache == "none") return;
  log.line(concat("cache   ", config.cache, ": decoding the images"));
  const auto progress = [&](size_t done, size_t of) { log.progress(concat(done, "/", of), done == of); };
  const auto place = config.cache == "ram" ? ram_place() : disk_place();
  const cv::Size size(int(info.width), int(info.height));
  log.line("cache   " +
           use_cache(train, place, size, config.augment.official_quirks, config.workers, progress));
}

void Run::resume(Training& t, SavedRun& saved, const Plan& its_plan) {
  plan = its_plan;
  const int64_t images = data.train.records.size();
  saver = {folder, info, settings_of(config), plan.per_epoch, images, config.keep, ranks.first()};
  if (!saved) return;
  saver.load(t, saved);
  if (saved.images != images)
    note(concat("warning: the data set has ", images, " images, but ", saved.images,
                " in the checkpoint; their order changes from here on"));
  saved.file = {};
  if (ranks.first()) remove_torn_files(folder);
  usage_check(t.iteration < plan.iters || evaluation_due(t), folder, " is complete: ", t.iteration, " of ",
              plan.iters, " steps are done; increase --epochs or --max-iters to continue");
  usage_check(config.patience == 0 || t.stale < config.patience, folder, " was stopped early after ", t.stale,
              " evaluations without a better AP; increase --patience to continue (0 = off)");
}

void Run::start(Training& t, Plan& its_plan, bool with_dtr, const std::vector<std::string>& facts) {
  first = t.iteration;
  best_ap = t.best_ap;
  if (profiling()) its_plan.iters = first + Profile(device).steps();
  plan = its_plan;
  const bool from_scratch = first == 0 && config.weights.empty();
  progress.emplace(folder, log, first, from_scratch, ranks.place.rank, with_dtr);
  eval_fit = PartsThatFit{1, plan.share};
  const std::string settings = config_json(config, device);
  crash_context(folder, settings, concat("crash", rank_suffix(ranks), ".txt"));
  if (const std::string before = resumed ? revision_of(folder) : "";
      !before.empty() && before != git_revision())
    log.line(
        concat("note: this program is of revision ", git_revision(), "; ", before, " wrote this run so far"));
  if (ranks.first() && !replace_text(folder + "/config.json", settings))
    log.line(concat("WARNING: cannot write ", folder, "/config.json"));
  log_plan(*progress, log, config, data, t.model, {int(info.height), int(info.width)}, device, plan,
           plan.schedule.lr * t.lr_factor, ranks);
  for (const auto& fact : facts)
    if (!fact.empty()) log.fact(fact);
  for (const auto& text : notes) log.line(text);
  progress->problems(data);
  if (first == 0 && ranks.first()) save_picture(folder + "/labels.jpg", draw_labels(data.train));
  if (!resumed && !profiling()) save(t, "last.pth");  // so that the run can be resumed from the start
  ranks.meet();                                       // last.pth exists now
  ranks.report(folder);
  catch_signals();
  if (profiling() && ranks.first()) {
    profile.reset(new Profiling{Profile(device)});
    profile->profile.start();
  }
}

// ---- each step

bool Run::evaluation_due(const Training& t) const {
  if (profiling()) return false;
  return t.epochs < t.iteration / plan.per_epoch ||
         (t.iteration == plan.iters && config.eval_interval > 0 && !t.ap);
}

bool Run::stop_requested() {
  if (!stop) stop = int(ranks.max(stop_signal));
  return stop != 0;
}

void Run::start_step(int64_t step, const Batch& batch, double waited) {
  progress->waited_for(waited);
  ranks.at(concat("step ", step));
  crash_step(
      concat("step ", step, " of epoch ", plan.epoch_of(step), "; images: ", names_in(batch, data.train)));
  if (step < 3 && ranks.first())
    save_picture(concat(folder, "/train_batch", step, ".jpg"),
                 draw_batch(batch.images, drawn(batch.targets, data.train.classes)));
}

void Run::end_step(Training& t, const StepNumbers& numbers, double lr, const DtrStep& dtr) {
  const int64_t step = t.iteration - 1;
  if (!dtr.samples.empty()) {
    save_picture(folder + "/dtr_trace.png", draw_memory(dtr.samples, dtr.budget, dtr.backward));
    log.line(concat("memory over step ", step, ", with --dtr and without: ", folder, "/dtr_trace.png"));
  }
  RECORD_USER_SCOPE("logging");
  progress->step(step, numbers, lr, plan, device, dtr);
  if (!profiling() && plan.ends_epoch(t.iteration)) progress->ranks(ranks, device);
}

bool Run::profile_step(Training& t) {
  if (!profile) return true;
  if (t.iteration == first + 11) saver.try_out(t, log);
  return !profile->profile.step();
}

void Run::save_if_due(Training& t) {
  if (config.save_minutes <= 0 || now() - saver.at <= 60 * config.save_minutes) return;
  save(t, "last.pth");
  progress->go_on();
}

bool Run::save(Training& t, const std::string& name, bool required) {
  return saver.save(t, name, log, required);
}

void Run::go_back(Training& t) {
  saver.go_back(t, log, [&] { ranks.meet(); });
  progress->go_back(t.iteration);
}

// ---- the end of an epoch

Evaluation Run::evaluate(Training& t) {
  crash_step(concat("evaluation after step ", t.iteration));
  ranks.at(concat("the evaluation after step ", t.iteration));
  ranks.must_equal(tensors_of(t.judged()), concat("at step ", t.iteration));
  EvalSettings settings = evaluation_settings(config, info, plan.share, device, ranks);
  if (ranks.first()) settings.pictures = folder + "/val_batch";
  Evaluation e = (*eval_fit)(
      [&](int64_t parts) {
        settings.batch = int(std::max<int64_t>(1, plan.share / parts));
        return yolox::evaluate(t.judged(), data.val, settings, [&](int64_t) { ranks.still_at_work(); });
      },
      [&](int64_t parts) {
        empty_cache(device);
        log.line(concat("note: out of memory; the evaluation is repeated with batches of ",
                        plan.share / parts, " images"));
      });
  if (e.complete) progress->evaluated(t.iteration, e, plan);
  ranks.still_at_work();
  return e;
}

bool Run::end_of_epoch(Training& t, const Evaluation* e, bool stop_early) {
  complete = stop_early || t.iteration == plan.iters;
  ranks.still_at_work();
  const auto still_at_work = [&] { ranks.still_at_work(); };
  if (ranks.first() && e && report(folder, log, t.iteration, e, &data.val, still_at_work))
    reported = t.iteration;
  ranks.still_at_work();
  if (t.skipped) log.line(concat("  ", t.skipped, " steps skipped: their gradients overflowed"));
  progress->problems(data);
  if (stop_early) log.line(concat("stopping: ", t.stale, " evaluations without a better AP (--patience)"));
  const bool stops = ranks.of_first(stop_early);
  ranks.waited();  // resets the waiting time, because evaluation and saving must not count
  progress->go_on();
  return stops;
}

// ---- the end of the run

void Run::finish(Training& t) {
  stop_requested();
  if (profiling()) {
    if (!profile || stop) return;
    log.line(profile->profile.table(config.bs));
    profile->profile.stop_and_write(folder + "/trace.json");
    log.line(concat("trace of the last steps: ", folder, "/trace.json, for https://ui.perfetto.dev"));
    return;
  }
  if (stop && !complete) {
    if (!saved_at(t.iteration)) save(t, "last.pth", /*required=*/true);
    log.line(concat("stopped by ", strsignal(stop), " at step ", t.iteration,
                    "; resume with: ./train --resume ", folder));
  } else {
    const std::string best = best_ap >= 0 ? concat(", best AP ", best_ap, " in ", folder, "/best.pth") : "";
    log.line(concat("done: ", folder, "/last.pth", best));
  }
  if (ranks.first() && reported != t.iteration) report(folder, log);
}

}  // namespace yolox
