// SPDX-License-Identifier: Apache-2.0
#include "run/progress.hpp"

#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/device.hpp"
#include "base/printable.hpp"
#include "base/timeout.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "data/store.hpp"
#include "run/profile.hpp"
#include "run/run.hpp"

namespace yolox {

std::string launch_note(int64_t idle, int64_t steps, double loader_share) {
  if (idle < 0.6 * double(steps) || loader_share > 0.2) return "";
  return concat("note: in ", idle, " of ", steps,
                " steps the GPU has waited for its kernels to be launched; a larger --bs helps, and --graph");
}

std::string learning_rate_note(const std::string& optimizer, double lr, int64_t batch, bool fine_tuned) {
  const double usual = default_lr(optimizer, batch);
  if (lr <= 8 * usual && (fine_tuned || lr >= usual / 64)) return "";
  return concat("note: --lr ", lr, " is unusual; usual for ", optimizer, " and a batch of ", batch, " is ",
                usual);
}

std::string config_json(const Flags& flags, torch::Device device, int ranks) {
  rapidjson::StringBuffer text;
  rapidjson::Writer<rapidjson::StringBuffer> w(text);
  const auto write = [&](const Settings& entries) {
    for (const auto& [name, value] : entries) {
      w.Key(name.c_str());
      if (flags.is_literal(name, value) && value != "inf" && value != "nan")
        w.RawValue(value.c_str(), value.size(), rapidjson::kNumberType);
      else
        w.String(value.c_str());
    }
  };
  const RunSettings settings = flags.settings();
  w.StartObject();
  for (const auto& [key, entries] : {std::pair("chosen", settings.chosen), {"flags", settings.flags}}) {
    w.Key(key);
    w.StartObject();
    write(entries);
    w.EndObject();
  }
  write({{"device_name", device_name(device)},
         {"torch", TORCH_VERSION},
         {"OpenCV", CV_VERSION},
         {"compiler", __VERSION__},
         {"revision", git_revision()},
         {"ranks", concat(ranks)},
         {"threads", concat(at::get_num_threads())}});
  w.EndObject();
  return text.GetString();
}

bool evaluation_due(const Training& t, const Plan& plan) {
  return t.epochs < t.iteration / plan.per_epoch ||
         (t.iteration == plan.iters && plan.eval_interval > 0 && !t.score);
}

bool is_complete(const Training& t, const Plan& plan) {
  return (t.iteration >= plan.iters && !evaluation_due(t, plan)) ||
         (plan.patience > 0 && t.best.evals_without_gain >= plan.patience);
}

Plan profiled(Plan plan, int64_t first) {
  plan.iters = first + Profile::kWarmUp + Profile::kTraced;
  plan.eval_interval = plan.patience = 0;
  return plan;
}

Progress::Progress(const std::string& run, Log& log, torch::Device device, int64_t first, int rank, bool dtr,
                   bool profile)
    : log(log), run(run), device(device), rank(rank), first(first), dtr(dtr) {
  if (rank > 0) return;
  if (profile)
    this->profile = std::make_shared<Profile>(device);
  else
    metrics.emplace(run, first);
}

void Progress::start_step(const Plan& plan, int64_t step, const Batch& batch, double seconds) {
  waited += seconds;
  made_progress(concat("step ", step));
  if (profile && step > first) profile->step();
  crash_step(
      concat("step ", step, " of epoch ", plan.epoch_of(step), "; images: ", listed(image_names(batch), 64)));
  if (step < 3 && rank == 0) save_image(concat(run, "/train_batch", step, ".jpg"), draw_truth(batch));
}

int64_t Progress::log_steps(const std::vector<StepRow>& steps, const Plan& plan) {
  RECORD_USER_SCOPE("logging");
  int64_t not_finite = 0;
  for (const StepRow& row : steps) {
    if (const std::string why = stop_reason(row.numbers, skipped); !why.empty()) throw StepFailed(why, row);
    if (row.dtr.limit > Dtr::kSlack * row.dtr.budget && row.dtr.limit > exceeded) {
      exceeded = 1.05 * row.dtr.limit;
      log.line(concat("warning: step ", row.step, " needed at least ", short_bytes(row.dtr.limit),
                      " of memory, more than the ", short_bytes(row.dtr.budget), " of --dtr"));
    }
    if (row.step % plan.per_epoch == 0) of_epoch = {};
    StepMetrics numbers = row.numbers;
    if (dtr)
      for (const auto& [name, value] :
           {std::pair("dtr_peak_bytes", row.dtr.peak),
            {"dtr_evictions", double(row.dtr.evictions)},
            {"dtr_rematerialisations", double(row.dtr.rematerialisations)},
            {"dtr_share", row.dtr.remat_cost / std::max(row.dtr.cost + row.dtr.remat_cost, 1e-30)}})
        numbers.values.push_back({name, StepMetrics::Kind::kLogged, value});
    if (numbers.finite()) {
      recent.add(numbers);
      of_epoch.add(numbers);
    } else {
      ++not_finite;
    }
    idle_steps += row.gpu_waited && row.step >= first + 5;  // the first steps choose algorithms
    if (row.step == first + 24 && device.is_cuda() && !dtr)
      log.line(launch_note(idle_steps, 20, waited / (now() - last_time)));
  }
  print(steps.back().step, steps.back().lr, plan);
  return not_finite;
}

// Returns the cells of an evaluation in its row of metrics.csv.
static Metrics::Row evaluation_cells(const Evaluation& e) {
  Metrics::Row cells{{"AP", e.result.AP, "val/AP"},
                     {"AP50", e.result.AP50, "val/AP50"},
                     {"AP75", e.result.AP75, "val/AP75"},
                     {"val_loss", e.loss, "val/loss"},
                     {"eval_seconds", e.seconds}};
  const Score score = score_of(e);
  if (!std::ranges::count(cells, score.name, &Metrics::Cell::column))
    cells.push_back({score.name, score.value});
  return cells;
}

void Progress::print(int64_t i, double lr, const Plan& plan) {
  const bool keep = plan.ends_epoch(i + 1);
  if (recent.steps == 0 || !(i == first || keep || now() - last_time > 1)) return;
  const double seconds = now() - last_time, share = waited / seconds;
  const double speed = double(recent.steps * plan.batch) / seconds;
  rate = rate == 0 || i < first + 20 ? speed : 0.9 * rate + 0.1 * speed;
  StepMetrics m = recent.take();
  if (metrics) {
    Metrics::Row row{
        {"epoch", double(plan.epoch_of(i))}, {"iteration", double(i + 1)}, {"loss", m.total, "train/loss"}};
    const auto add_values = [&](StepMetrics::Kind kind) {
      for (const auto& v : m.values)
        if (v.kind == kind) row.push_back({v.name, v.value, "train/" + v.name});
    };
    add_values(StepMetrics::Kind::kTerm);
    row.insert(row.end(), {{"positives_per_object", m.per_object(), "train/positives_per_object"},
                           {"lr", lr, "train/lr"},
                           {"images_per_second", speed, "speed/images_per_second"},
                           {"waiting_share", share, "speed/waiting_share"}});
    add_values(StepMetrics::Kind::kLogged);
    for (const auto& cell : evaluation_cells({})) row.push_back({cell.column, std::nan("")});
    metrics->row(row);
  }
  total_waited += waited;
  total_seconds += seconds;
  if (keep) m = of_epoch.take();  // the last line of an epoch shows the means over the epoch

  // Aligns to the right, with a blank before each column. With usual values and four loss terms, the line has
  // 78 characters.
  std::string titles, line;
  const auto add = [&](size_t width, const std::string& title, const std::string& text) {
    titles += formatted("%*s", int(std::max(width, title.size() + 1)), title.c_str());
    line += formatted("%*s", int(std::max(width, text.size() + 1)), text.c_str());
  };
  add(7, "epoch", concat(plan.epoch_of(i), "/", plan.epochs));
  add(10, "iter", concat(i % plan.per_epoch + 1, "/", plan.per_epoch));
  add(6, "total", formatted("%.2f", m.total));
  for (const auto& v : m.values)
    if (v.kind == StepMetrics::Kind::kTerm && !(dtr && v.name == "l1"))  // with DTR, there is no room for it
      add(std::max<size_t>(5, v.name.size() + 1), v.name, formatted("%.2f", v.value));
  if (dtr) add(5, "dtr", formatted("%.0f%%", 100 * m["dtr_share"]));
  add(4, "pos", formatted("%.1f", m.per_object()));
  add(8, "lr", formatted("%.1e", lr));
  add(6, "img/s", formatted(rate < 999.95 ? "%.1f" : "%.0f", rate));
  add(5, "wait", formatted("%.0f%%", 100 * share));
  add(6, dtr ? "peak" : "mem", short_bytes(dtr ? m["dtr_peak_bytes"] : memory_used(device)));
  add(7, "left", short_time(double((plan.iters - i - 1) * plan.batch) / rate));
  if (!std::exchange(has_heading, true)) log.line(titles);
  log.progress(line, keep);
  restart_clock();
}

void Progress::log_evaluation(int64_t steps, const Evaluation& e, const Plan& plan, bool best) {
  const EvalResult& r = e.result;
  std::string values;
  for (const auto& [name, value] :
       {std::pair("AP", r.AP), {"AP50", r.AP50}, {"AP75", r.AP75}, {"S", r.APs}, {"M", r.APm}, {"L", r.APl}})
    values += concat(" ", name, " ", value < 0 ? "-" : formatted("%.4f", value));
  log.line(concat(" ", values, "  ", e.images, " images ", short_time(e.seconds)));
  std::multimap<double, std::string> classes;
  for (const ClassResult& c : r.per_class)
    if (c.ground_truths > 0) classes.emplace(c.AP, printable(c.name) + formatted(" %.2f", c.AP));
  std::vector<std::string> names;
  for (const auto& [ap, name] : classes) names.push_back(name);
  const std::string line =
      concat(std::isnan(e.loss) ? "" : "; validation loss " + formatted("%.3f", e.loss),
             best ? "; best so far" : "", names.size() > 1 ? "; lowest AP: " + listed(names, 3) : "");
  if (!line.empty()) log.line(" " + line.substr(1));
  if (!metrics) return;
  Metrics::Row row{{"epoch", double(plan.epoch_of(steps - 1))}, {"iteration", double(steps)}};
  for (const auto& cell : evaluation_cells(e)) row.push_back(cell);
  metrics->row(row);
}

void Progress::log_problems(const Splits& splits) {
  for (const Dataset* data : {&splits.train, &splits.val}) {
    if (splits.same && data == &splits.val) break;
    const std::string list = concat(run, data == &splits.val ? "/problems_val" : "/problems",
                                    rank > 0 ? concat("_rank", rank) : "", ".txt");
    for (const auto& [kind, count] : data->problems->summary())
      if (std::exchange(logged_problems[data->name + kind], count) != count)
        log.line(concat("note: ", data->name, ": ", kind, ": ", count, " (listed in ", list, ")"));
    data->problems->write(list);
  }
}

void Progress::log_ranks(Ranks& ranks) {
  if (ranks.alone()) return;
  const double share = total_waited / std::max(1e-9, total_seconds);
  const auto all = ranks.gather({ranks.collective_seconds(), memory_used(device), share});
  std::string memory, waits;
  for (const auto& of_rank : all) {
    memory += " " + short_bytes(of_rank[1]);
    waits += formatted(" %.0f%%", 100 * of_rank[2]);
  }
  const auto [slowest, fastest] = std::ranges::minmax_element(all);  // by the seconds for other ranks
  log.line(concat("ranks   memory", memory, "; waiting for the data loader", waits, "; slowest: rank ",
                  slowest - all.begin(), " (", ranks.location(int(slowest - all.begin())), "); rank ",
                  fastest - all.begin(), " has waited ", short_time((*fastest)[0] - (*slowest)[0]),
                  " longer for other ranks"));
}

void Progress::end_epoch(const Training& t, const Plan& plan, const Splits& data, Ranks& ranks) {
  if (t.skipped) log.line(concat("  ", t.skipped, " steps skipped: their gradients overflowed"));
  log_problems(data);
  if (t.iteration < plan.iters && is_complete(t, plan))
    log.line(concat("stopping: ", t.best.evals_without_gain, " evaluations without a better ",
                    score_of({}).name, " (--patience)"));
  ranks.collective_seconds();
  restart_clock();
}

void Progress::log_end(const Training& t, const Plan& plan, int signal) {
  if (profile && !signal) {
    profile->step();
    return log.line(profile->stop(run + "/trace.json"));
  }
  if (signal && !is_complete(t, plan))
    return log.line(concat("stopped by ", strsignal(signal), " at step ", t.iteration,
                           "; resume with: ./train --resume ", shell_word(run)));
  const double best = std::max(t.best.score, t.score.value_or(-1));
  const std::string found =
      concat(", best ", score_of({}).name, " ", formatted("%.4f", best), " in ", run, "/best.pth");
  log.line(concat("done: ", run, "/last.pth", best < 0 ? "" : found));
}

void log_classes(Log& log, const Splits& splits) {
  const Dataset &train = splits.train, &val = splits.val;
  const auto counts = class_counts(train), in_val = class_counts(val);
  std::vector<std::string> frequent;
  for (const size_t c : classes_by_count(counts))
    frequent.push_back(concat(train.classes[c], " ", counts[c]));
  const auto empty = std::ranges::count_if(train.records, [](const Record& r) { return r.boxes.empty(); });
  size_t regions = 0;
  for (const Record& r : train.records) regions += r.ignored.size();
  log.line(concat("images  ", train.records.size(), " for training, ", empty, " without boxes"));
  log.line(concat("boxes   ", std::accumulate(counts.begin(), counts.end(), int64_t(0)),
                  " for training: ", listed(frequent, 10),
                  regions ? concat("; and ", regions, " ignored regions (crowds, difficult objects)") : ""));
  const auto log_split = [&](const Dataset& data, const std::vector<int64_t>& of, const char* purpose) {
    for (const auto& note : data.notes) log.line(note);
    std::vector<std::string> names;
    for (size_t c = 0; c < of.size(); ++c)
      if (of[c] == 0) names.push_back(train.classes[c]);
    if (!names.empty())
      log.line(concat("note: classes without a box for ", purpose, ": ", listed(names, 10)));
  };
  log_split(train, counts, "training");
  if (!splits.same) log_split(val, in_val, "evaluation");
  if (std::ranges::count(in_val, 0) == std::ssize(in_val))
    log.line(
        "warning: no image for evaluation has an object to find, so that there is no AP; best.pth gets the "
        "latest weights, and --patience does not end the run");
}

void log_plan(Log& log, const Config& config, const Splits& splits, YOLOX& model, torch::Device device,
              const Plan& plan, const Ranks& ranks, const std::vector<std::string>& notes) {
  const Dataset &data = splits.train, &val = splits.val;
  std::string flags;
  for (const auto& [name, value] : config.values())
    if (config.was_given(name))
      flags += value == "true"    ? " --" + name
               : value == "false" ? " --no-" + name
                                  : concat(" --", name, " ", shell_word(value));
  if (!flags.empty()) log.line("flags  " + flags);
  log.line(concat("data    ", data.records.size(), " images for training (", data.name, "), ",
                  val.records.size(), " for evaluation (", splits.same ? "the same images" : val.name, "), ",
                  data.classes.size(), " classes, loader threads ", config.loader_threads));
  if (splits.same)
    log.line(concat(
        "warning: AP is measured on the training images, because the data set has one split only, and is ",
        "too high for other images; ", is_packed(config.data) ? "./pack " : "",
        "--val-fraction 0.1 holds out a tenth of the images for evaluation"));
  if (config.data == "shapes")
    log.line("note: these are scenes that the program draws; to train on your own images, give --data DIR");
  log_classes(log, splits);
  double parameters = 0;
  for (const Tensor& p : model->parameters()) parameters += double(p.numel());
  const ImageSize base = base_size(config);
  log.line(concat("model   ", config.model, " ", base.height, "x", base.width,
                  plan.sizes.max_decrease + plan.sizes.max_increase > 0 ? " multi-scale" : "", ", ",
                  rounded(parameters / 1e6), "M parameters, on ", device.str(), ", --amp ", config.amp));
  std::vector<std::string> locations;
  for (int r = 0; r < plan.ranks && plan.ranks > 1; ++r)
    locations.push_back(concat(r, " on ", ranks.location(r)));
  if (!locations.empty()) log.line(concat("ranks   ", listed(locations, 16)));
  log.line(concat("steps   ", plan.iters, "; epochs ", config.epochs, " of ", plan.per_epoch,
                  " steps; batch size ", plan.batch, " (", plan.batch_per_rank(),
                  plan.batch % plan.ranks ? " or one less" : "", " per rank); warm-up ",
                  std::llround(plan.schedule.warmup), " steps; no mosaic and MixUp in the last ",
                  plan.per_epoch * plan.epochs - plan.first_no_aug_iteration, " steps"));
  const bool fine_tunes = config.recipe == "finetune";
  log.line(concat(
      "recipe  ", config.recipe, ", ",
      fine_tunes == config.weights.empty() ? "as --recipe says"
      : fine_tunes                         ? "because of --weights"
                                           : "because training starts from scratch",
      ": ", config.optimizer, ", lr ", plan.schedule.lr, " for a batch of ", plan.batch, ", weight decay ",
      config.weight_decay, config.freeze == "none" ? "" : ", frozen " + config.freeze,
      config.ema == 0 ? ", no EMA" : concat(", EMA over ", std::llround(1 / (1 - config.ema)), " steps")));
  log.line(learning_rate_note(config.optimizer, config.lr, plan.batch, fine_tunes));
  for (const std::string& note : notes) log.line(note);
  log.line(font_note(data.classes));
  log.line(crowded_images_note(val.truth, config.max_dets));
}

int dry_run(Config& config, const Splits& splits, YOLOX& model, torch::Device device,
            const std::vector<std::string>& notes, Ranks& ranks) {
  Log log("", /*quiet=*/!ranks.first());
  const Plan plan =
      plan_of(config, int64_t(splits.train.records.size()), ranks.info.world, base_size(config));
  log_plan(log, config, splits, model, device, plan, ranks, notes);
  auto problems = splits.train.problems->lines();
  if (!splits.same)
    for (const std::string& line : splits.val.problems->lines()) problems.push_back(line);
  for (const std::string& line : problems) log.line(line);
  log.line(problems.empty() ? "the data has no problems"
                            : "the data has problems, which training leaves out");
  ranks.shutdown();
  return !problems.empty();
}

}  // namespace yolox
