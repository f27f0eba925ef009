// Trains YOLOX, on one rank or several: settings, set-up, then the loop, top to bottom.
//   ./train --data shapes --model yolox-nano --size 192 --epochs 10
//   ./train --data DIR --model yolox-s --weights yolox_s.pth --bs 16
#include <cstring>
#include <functional>
#include <optional>
#include <set>

#include "base/device.hpp"
#include "base/threads.hpp"
#include "config.hpp"
#include "data/cache.hpp"
#include "data/pictures.hpp"
#include "ddp.hpp"
#include "dtr/budget.hpp"
#include "dtr/dtr.hpp"
#include "dtr/trace.hpp"
#include "evaluate.hpp"
#include "formats.hpp"
#include "metrics/report.hpp"
#include "optim.hpp"
#include "run/crash.hpp"
#include "run/fit.hpp"
#include "run/log.hpp"
#include "run/profile.hpp"
#include "run/progress.hpp"
#include "run/recovery.hpp"
#include "run/report.hpp"
#include "run/saving.hpp"
#include "run/state.hpp"
#include "step.hpp"

using namespace yolox;

// Gives the exit code.
static int train(int argc, char** argv) {
  ignore_hangup(), tell_signals();
  Config config;
  config.parse(argc, argv, "trains YOLOX",
               {"data", "workers", "cache", "model", "weights", "resume", "size", "bs", "epochs", "lr", "amp",
                "dtr", "gpus", "out"});
  opencv_single_thread();
  BlobCache::sweep(ram_place());
  std::string run;                 // its folder
  std::vector<std::string> notes;  // for the log
  SavedRun saved;                  // the checkpoint to go on from
  if (!config.resume.empty()) saved = find_run(config, run, notes);
  const bool resumed = !run.empty();
  fill_in(config);
  check_config(config);
  const AugmentConfig augment = augment_config(config);
  const Place place = place_of_this_process();
  if (const auto ranks = to_launch(config, config, place)) return launch(*ranks, argc, argv);
  if (dtr_bytes(config) > 0) prepare_for_dtr();
  const torch::Device device = device_of(config, place);
  set_determinism(config.deterministic, dtr_bytes(config) > 0);
  // Under fp16 gradients overflow now and then, which is no anomaly.
  if (config.debug) torch::autograd::AnomalyMode::set_enabled(true, /*check_nan=*/config.amp != "fp16");
  WeightsInfo info, known;  // of this run; of the file that it starts from
  info.model = config.model;
  const ImageSize base = input_size(info, config.size);
  const cv::Size input(base.width, base.height);
  check_room_for_batches(config.bs, base);

  // ---- the other ranks. Never ended where something fails: that would wait for those that are gone.
  Ranks& ranks = *new Ranks(place, device, config.timeout);
  const int world = place.world;

  // ---- data
  const fs::path beside = without_slash(resumed ? run : config.out.empty() ? "runs/x" : config.out);
  Splits splits = ranks.first_here_then_others([&] {
    return load_splits(config.data, config.split, config.seed, config.official_quirks,
                       beside.parent_path() / ".checks");  // what is known of the images
  });
  const Dataset &data = splits.train, &val = splits.val;
  for (Dataset* d : {&splits.train, &splits.val}) d->strict = config.strict, refuse_problems(*d);
  const int64_t n = data.records.size();
  check(world <= n, "there are ", world, " ranks and only ", n, " images; give fewer ranks");
  ranks.must_agree(common_settings(config, data, val.records.size(), resumed ? saved.step : 0, device));

  // ---- model, weights, optimizer
  Dtr dtr(dtr_settings(dtr_bytes(config), device, place.local_world));  // counts what comes after it
  torch::manual_seed(config.seed);
  YOLOX model(config.model, int(data.classes.size()));
  info.classes = data.classes, info.height = base.height, info.width = base.width;
  if (resumed) {
    known = weights_info(saved.file, saved.path);
    check(known.model == config.model, run, " is a run of ", known.model, "; --model ", config.model,
          " cannot go on with it: start from its last.pth with --weights instead");
    check(known.classes == data.classes, run, " was trained on other classes than ", data.name,
          " has; start from its last.pth with --weights instead");
  } else if (!config.weights.empty()) {
    known = start_from(model, config.weights, info, notes);
  }
  info.legacy_preproc = config.preproc == "auto" ? known.legacy_preproc : config.preproc == "legacy";
  const auto type = config.amp == "fp64" ? torch::kDouble : torch::kFloat;
  move(model, device, type);
  channels_last(*model);
  if (!config.weights.empty() && !resumed)
    if (const int64_t looked = unfold_norms(model, data, base, info.legacy_preproc, config.workers))
      notes.push_back(
          concat("the file's batch norms are folded; they got the statistics of ", looked, " images"));
  const std::string unknown = freeze(*model, split_list(config.freeze));
  usage_check(unknown.empty(), "--freeze ", unknown,
              ": nothing in the model is named so; backbone, neck, or such as head.stems");
  const bool fp16 = config.amp == "fp16";
  StepSettings step{device.type(), type_of(config.amp)};
  Training t{model, config.ema > 0 ? copy_of(model, config.model, device) : YOLOX(nullptr),
             Optimizer(config.optimizer, parameter_groups(*model, config.weight_decay), fp16),
             GradScaler(fp16, device)};
  std::vector<Tensor> learning;
  for (const Tensor& p : model->parameters())
    if (p.requires_grad()) learning.push_back(p);
  usage_check(!learning.empty(), "--freeze ", config.freeze, " leaves nothing to train");
  training_mode(*model);

  // ---- run folder, image cache
  if (ranks.first() && resumed) take_run_folder(run);
  if (ranks.first() && !resumed)
    run = make_run_folder(config.out, config.model + "-" + data_name(config.data));
  run = ranks.broadcast(run);
  const std::string of_rank = ranks.first() ? "" : concat("_rank", place.rank);  // files of its own
  Log log(concat(run, "/log", of_rank, ".txt"), /*quiet=*/!ranks.first());
  log.line(resumed ? concat("resuming ", run, " at step ", saved.step) : "run " + run);
  const std::string crash_file = concat("crash", of_rank, ".txt");
  crash_context(run, config_json(config, device), crash_file);
  if (config.cache != "none") {
    log.line(concat("cache   ", config.cache, ": decoding the images"));
    const auto cached = use_cache(
        splits.train, config.cache == "ram" ? ram_place() : disk_place(), input, config.official_quirks,
        config.workers, [&](size_t done, size_t of) { log.progress(concat(done, "/", of), done == of); });
    log.line("cache   " + cached);
  }

  // ---- how many images a step, how many steps
  const Trial trial{t, step, base, multi_scale(config, base, world).largest(), device, dtr};
  if (config.bs == 0) notes.push_back(find_batch(config, trial, n, ranks, log));
  const MultiScale sizes = multi_scale(config, base, world);
  const int share = config.bs / world;  // images of a step that are this rank's
  const std::string of_dtr = dtr.on() ? try_dtr(config, trial, share, ranks) : "";
  const int64_t per_epoch = (n + config.bs - 1) / config.bs;
  int64_t iters = per_epoch * config.epochs;
  if (config.max_iters) iters = std::min(config.max_iters, iters);
  Saver saver{run, info, settings_of(config), per_epoch, n, config.keep, ranks.first()};
  // An epoch has ended, or the run, and its evaluation has yet to come.
  const auto due = [&] {
    return t.epochs < t.iteration / per_epoch ||
           (t.iteration == iters && config.eval_interval > 0 && std::isnan(t.ap));
  };
  if (resumed) {
    saver.load(t, saved);
    if (saved.images != n)
      notes.push_back(concat("warning: the data has ", n, " images, where the run has learnt from ",
                             saved.images, ": their order from here on is another"));
    saved = {};
    if (ranks.first()) remove_torn_files(run);
    usage_check(t.iteration < iters || due(), run, " is complete: it has done ", t.iteration, " of ", iters,
                " steps; more --epochs or --max-iters would go on");
    usage_check(config.patience == 0 || t.stale < config.patience, run, " has stopped after ", t.stale,
                " evaluations without a better AP; a larger --patience, or 0, goes on");
  }
  const int64_t first = t.iteration;
  if (config.profile) iters = first + Profile(device).steps();
  const Schedule schedule{config.lr * config.bs, per_epoch, config.epochs,      config.warmup_epochs,
                          config.no_aug_epochs,  0,         config.min_lr_ratio};
  const Plan plan{config.bs, per_epoch, config.epochs, iters};

  // ---- what it is going to do
  Telling tell(run, log, first, /*from_scratch=*/!first && config.weights.empty(), place.rank, dtr.on());
  crash_context(run, config_json(config, device), crash_file);
  if (ranks.first() && !replace_text(run + "/config.json", config_json(config, device)))
    log.line(concat("WARNING: cannot write ", run, "/config.json"));
  tell_plan(tell, log, config, splits, model, base, device, plan, schedule.lr * t.lr_factor, ranks);
  if (dtr.on()) log.fact(of_dtr);
  for (const auto& note : notes) log.line(note);
  tell.problems(splits);
  if (!first && ranks.first()) save_picture(run + "/labels.jpg", draw_labels(data));
  if (!resumed && !config.profile)
    saver.save(t, "last.pth", log);  // so that there is something to go on from, whatever happens
  ranks.meet();                      // it is there
  ranks.report(run);

  // ---- images. The stream is endless and runs through the epochs, which are counted in steps.
  const int64_t plain_from = per_epoch * std::max<int64_t>(0, config.epochs - config.no_aug_epochs -
                                                                  (config.official_quirks ? 1 : 0));
  auto items = training_items(data, config.seed, augment, config.aug == "default",
                              [&](int64_t position) { return position / config.bs < plain_from; });
  if (config.debug) items = checked_items(items, data, config.official_quirks);
  std::optional<Loader> loader;
  std::optional<DeviceLoader> batches;
  const auto start_loading = [&] {
    batches.reset(), loader.reset();
    loader.emplace(items, t.iteration * config.bs + place.rank * share, iters * config.bs, share, input,
                   config.workers, device.is_cuda(), /*stride=*/config.bs);
    batches.emplace(*loader, device);
  };
  start_loading();

  // ---- the end of an epoch, or of the run: evaluation, best.pth, last.pth. False: training is over.
  EvalSettings eval_settings{base,           config.conf,         config.nms, share,
                             config.workers, info.legacy_preproc, device,     concat(run, "/val_batch")};
  if (!ranks.first()) eval_settings.pictures = "";
  if (!ranks.alone()) {
    eval_settings.rank = place.rank, eval_settings.ranks = world;
    eval_settings.gather = [&](const std::vector<double>& mine) { return ranks.gather(mine); };
  }
  PartsThatFit eval_fit{1, share};
  double best = t.best_ap;
  bool complete = false;
  int64_t reported = -1;  // the step after which report.html was written
  const auto end_of_epoch = [&] {
    tell.ranks(ranks, device);
    const int64_t epoch = (t.iteration - 1) / per_epoch;
    const bool whole = t.iteration % per_epoch == 0, last = t.iteration == iters;
    std::optional<Evaluation> e;
    if (config.eval_interval > 0 &&
        (last || (epoch + 1) % config.eval_interval == 0 || t.iteration > plain_from)) {
      if (saver.in_last != t.iteration) saver.save(t, "last.pth", log);  // evaluating may be cut off
      crash_step(concat("evaluation after step ", t.iteration));
      ranks.at(concat("the evaluation after step ", t.iteration));
      ranks.must_equal(tensors_of(t.judged()), concat("at step ", t.iteration));
      e = eval_fit(
          [&](int64_t parts) {
            eval_settings.batch = int(std::max<int64_t>(1, share / parts));
            return evaluate(t.judged(), val, eval_settings, [&](int64_t) { ranks.still_at_work(); });
          },
          [&](int64_t parts) {
            empty_cache(device);
            log.line(concat("note: out of memory; evaluated again, ", share / parts, " images at a time"));
          });
      if (!e->complete) return false;
      t.ap = e->result.AP;
      tell.evaluated(t.iteration, *e, plan);
      ranks.still_at_work();
      const auto before = std::pair(t.best_ap, t.stale++);
      if (t.ap > t.best_ap) {
        t.best_ap = t.ap, t.stale = 0;
        if (!saver.save(t, "best.pth", log)) t.best_ap = before.first;
      }
      best = t.best_ap;
      // An evaluation that only --max-iters brought about does not count: resumed, the run equals one that
      // was not stopped.
      if (!whole) std::tie(t.best_ap, t.stale) = before;
    }
    t.epochs = t.iteration / per_epoch;
    const bool enough = config.patience > 0 && t.stale >= config.patience && !last;
    saver.save(t, "last.pth", log, /*must=*/last || enough);
    complete = last || enough;
    ranks.still_at_work();
    if (ranks.first() && e && report(run, log, t.iteration, &*e, &val, [&] { ranks.still_at_work(); }))
      reported = t.iteration;
    ranks.still_at_work();
    if (t.skipped) log.line(concat("  ", t.skipped, " steps skipped: their gradients overflowed"));
    tell.problems(splits);
    if (enough) log.line(concat("stopping: ", t.stale, " evaluations without a better AP (--patience)"));
    const bool go_on = !ranks.of_first(enough);
    ranks.waited();  // for evaluation and saving, which is not counted
    return go_on;
  };

  // ---- the loop
  catch_signals();
  const double nan = std::nan("");
  SavedBuffers statistics(*model);
  ranks.at("the start");
  ranks.broadcast(tensors_of(t));
  ranks.must_equal(tensors_of(t), "at the start");
  Reduction reduction(ranks, learning, type_of(config.compress));
  if (!ranks.alone()) {
    step.ranks = world;
    step.sum = [&](Tensor& x) { ranks.sum(x); };
    step.before_backward = [&](const std::vector<Tensor>& outputs) { reduction.before_backward(outputs); };
    if (config.sync_bn) use_sync_bn(*model, step.sum);
  }
  tell.go_on();
  PartsThatFit fit{config.accum, ranks.alone() ? share : config.accum};  // ranks have to do as many
  if (!ranks.alone())
    fit.remedy = "several ranks cannot change how they do it on their own: give --accum, or fewer --bs";
  int64_t overflows = 0;  // steps in a row whose gradients were not finite
  std::optional<Profile> profile;
  if (config.profile && ranks.first()) profile.emplace(device), profile->start();
  int stop = 0;    // the signal that ends all ranks at the same step
  ranks.waited();  // for the set-up, which is not counted
  bool go_on = config.profile || !due() || end_of_epoch();
  while (go_on && t.iteration < iters && !(stop = int(ranks.max(stop_signal)))) {
    const int64_t i = t.iteration;
    const ImageSize size = sizes.at(i);
    const double lr = learning_rate(schedule, i) * t.lr_factor, asked = now();
    const Batch batch = marked("data", [&] { return batches->next(); });
    tell.waited_for(now() - asked);
    ranks.at(concat("step ", i));
    crash_step(concat("step ", i, " of epoch ", i / per_epoch + 1, "; images: ", names_in(batch, data)));
    if (i < 3 && ranks.first())
      save_picture(concat(run, "/train_batch", i, ".jpg"),
                   draw_batch(batch.images, drawn(batch.targets, data.classes)));
    step.use_l1 = i >= plain_from;
    dtr.takes_samples = config.dtr_trace && i == first + 2 && ranks.first();
    const Losses losses = fit(
        [&](int64_t parts) {
          Tensor images;
          Targets targets = batch.targets;
          marked("copy", [&] {
            statistics.save();
            images = preprocess(batch.images, info.legacy_preproc).to(type);
            resize_batch(images, targets, size);
          });
          return dtr.run([&] {
            return compute_gradients([&](const Tensor& x) { return t.model(x); }, images, targets, parts,
                                     t.optimizer, t.scaler, step);
          });
        },
        [&](int64_t parts) {
          t.optimizer.zero_grad();
          statistics.restore();
          empty_cache(device);
          log.line(concat("note: out of memory at step ", i, " with ", size.height, "x", size.width,
                          " pixels; it is done again in ", parts, " parts"));
        });
    const StepNumbers numbers = marked("optimizer", [&] {
      const auto grads = gradients(t.optimizer.groups);
      t.scaler.unscale(grads);
      // Unlike machines may round the norm of the same gradients unlike.
      const Tensor norm = clip_gradients(grads, config.clip, [&](const Tensor& n) {
        if (!ranks.same_machine()) ranks.broadcast({n});
      });
      const StepNumbers read = numbers_of(losses, norm, ranks.sum({double(batch.targets.total())})[0]);
      if (!config.sync_bn) ranks.average(model->buffers());
      if (read.finite()) t.optimizer.step(lr);
      return read;
    });
    std::string why = why_to_stop(numbers, overflows);
    if (!losses.anomaly.empty()) why = losses.anomaly;
    if (!why.empty()) {
      const std::string what = concat(why, " at step ", i, " (", to_string(numbers), ", lr ", lr, "; images ",
                                      names_in(batch, data), ")");
      statistics.restore();
      const std::string left = save_bad_step(run, t, batch, data, numbers, lr, size, step.use_l1, place.rank);
      check(config.keep_going && t.returns < 3, what, "; ", left, "; ./train --resume ", run,
            " --lr with less than ", config.lr, ", or with --keep-going, goes on from the last checkpoint");
      log.line(concat("WARNING: ", what, "; ", left));
      saver.go_back(t, log, [&] { ranks.meet(); });
      ranks.must_agree({{"step", concat(t.iteration)}, {"factor of the lr", concat(t.lr_factor)}});
      ranks.broadcast(tensors_of(t));
      log.line(concat("WARNING: back to step ", t.iteration, " with ", t.lr_factor, " of the lr"));
      overflows = 0, tell.go_back(t.iteration);
      start_loading();
      continue;
    }
    if (dtr.takes_samples) tell_memory(dtr.step(), i, run, log);
    if (!numbers.finite())
      ++t.skipped;
    else if (config.ema > 0)
      marked("EMA", [&] { ema_update(*t.ema, *model, ema_decay(config.ema, ++t.ema_updates)); });
    t.scaler.update();
    ++t.iteration, t.ap = nan;
    marked("telling", [&] { tell.step(i, numbers, lr, plan, device, dtr.step()); });

    if (profile) {
      if (i == first + 10) saver.try_out(t, log);
      if (profile->step()) break;
    } else if (config.profile) {
      continue;
    } else if (stop_signal && ranks.alone()) {
      break;
    } else if (t.iteration % per_epoch == 0 || t.iteration == iters) {
      go_on = end_of_epoch(), tell.go_on();
    } else if (config.save_minutes > 0 && now() - saver.at > 60 * config.save_minutes) {
      saver.save(t, "last.pth", log), tell.go_on();
    }
  }
  if (!stop) stop = int(ranks.max(stop_signal));
  if (profile && !stop) {
    log.line(profile->table(config.bs));
    profile->stop_and_write(run + "/trace.json");
    log.line(concat("operators of the last steps: ", run, "/trace.json, for https://ui.perfetto.dev"));
  } else if (!config.profile && stop && !complete) {
    if (saver.in_last != t.iteration) saver.save(t, "last.pth", log, /*must=*/true);
    log.line(concat("stopped by ", strsignal(stop), " at step ", t.iteration,
                    "; go on with: ./train --resume ", run));
  } else if (!config.profile) {
    log.line(concat("done: ", run, "/last.pth",
                    best >= 0 ? concat(", best AP ", best, " in ", run, "/best.pth") : ""));
  }
  if (ranks.first() && !config.profile && reported != t.iteration) report(run, log);
  ranks.leave();
  return 0;
}

int main(int argc, char** argv) {
  share_cores(argv);
  return run_rank([&] { return train(argc, argv); }, [] { write_crash(memory_report().c_str()); });
}
