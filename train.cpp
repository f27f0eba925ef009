// SPDX-License-Identifier: Apache-2.0
// Trains YOLOX, on one rank or several: settings, ranks, data, model, run, plan, loop.
//   ./train                                                          # yolox-s on built-in scenes
//   ./train --data DIR --model yolox-s --weights yolox-s --bs 16 --epochs 100
//   ./train --data DIR --gpus 4
//   ./train --resume runs/NAME
#include "base/program.hpp"     // signals, threads, exit codes
#include "config.hpp"           // Config, Plan: settings and derived settings
#include "data/batches.hpp"     // Batches: prefetched batches
#include "ddp.hpp"              // Ranks, GradientReducer
#include "ddp/launch.hpp"       // launch(): --gpus, --procs
#include "dtr/budget.hpp"       // Dtr: --dtr
#include "run/crash.hpp"        // crash.txt
#include "run/fast_paths.hpp"   // use_fast_paths(): --fast
#include "run/fit.hpp"          // MicroBatches, find_batch(), try_dtr_step()
#include "run/recovery.hpp"     // Recovery: rollback after a non-finite loss
#include "run/run.hpp"          // Run: run folder, log, checkpoints and reports
#include "run/setup.hpp"        // data, model and weights
#include "run/step_graphs.hpp"  // StepGraphs: --fast graph
#include "step.hpp"             // compute_gradients(), UnreadSteps

using namespace yolox;

// Ends an epoch or the run: evaluates, and writes best.pth, last.pth and report.html. Returns false if
// training is over.
static bool end_of_epoch(Training& t, const Plan& plan, Run& run) {
  const bool last = t.iteration == plan.iters;
  std::optional<Evaluation> evaluation;
  if (plan.evaluates_after(t.iteration)) {
    if (!run.saved_at(t.iteration)) run.save(t, "last.pth");  // a signal may interrupt the evaluation
    evaluation = run.evaluate(t, validation_loss);
    if (!evaluation->complete) return false;
    t.score = score_of(*evaluation).value;
    const Best before = t.best;
    const bool better = *t.score > before.score, lower_loss = evaluation->loss < before.loss;
    ++t.best.evals_without_gain;
    if (run.config.patience_on == "loss" ? lower_loss : better) t.best.evals_without_gain = 0;
    if (lower_loss) t.best.loss = evaluation->loss;
    if (better) {
      t.best.score = *t.score;
      if (!run.save(t, "best.pth")) t.best.score = before.score;
    }
    run.best_score = t.best.score;
    // If --max-iters ended the run within an epoch, restores the values of the last whole epoch, so that a
    // resumed run equals a run without interruption.
    if (t.iteration % plan.per_epoch != 0) t.best = before;
  }
  t.epochs = t.iteration / plan.per_epoch;
  const bool stop = run.config.patience > 0 && t.best.evals_without_gain >= run.config.patience && !last;
  run.save(t, "last.pth", /*required=*/last || stop);
  return !run.end_of_epoch(t, evaluation ? &*evaluation : nullptr, stop);
}

// Reads and logs the numbers of the steps that the host waits for. After a non-finite loss, goes back to the
// last checkpoint and returns false, or throws.
static bool read_numbers(Training& t, UnreadSteps& unread, Run& run, Recovery& recovery,
                         MicroBatches& micro_batches, Batches& batches) {
  const bool all = run.must_read_all(t);
  for (auto read = unread.next(all); read; read = unread.next(all)) {
    if (const std::string why = recovery.failure_reason(*read); !why.empty()) {
      micro_batches.restore_statistics(/*second_latest=*/t.iteration > read->step + 1);
      recovery.roll_back(t, why, *read);
      unread.reset();
      batches.start(t.iteration);
      return false;
    }
    run.end_step(t, *read);
  }
  return true;
}

// Trains and returns the exit code. With --gpus or --procs, starts the ranks instead. One long function, so
// that the whole training can be read from top to bottom.
static int train(int argc, char** argv) {
  ignore_hangup();
  report_signals();

  // ---- settings: from the flags, or from the resumed run
  Config config;
  config.parse(argc, argv, "trains YOLOX", "--data DIR --weights yolox-s --bs 16 --epochs 100");
  SavedRun saved = find_run(config);
  fill_in(config);
  check_config(config);
  const RankInfo rank_info = rank_info_from_environment();
  if (const auto ranks = ranks_to_launch(config, config, rank_info)) return launch(*ranks, argc, argv);
  const torch::Device device = prepare_process(config, rank_info);
  check_memory_for_batches(config);

  // ---- ranks. The object is not destroyed after an error, because its destructor would wait for dead ranks.
  Ranks& ranks = *new Ranks(rank_info, device, config.timeout);

  // ---- data
  lock_resumed_run(saved, ranks);
  Splits data = load_data(config, config.data, saved.run, ranks);
  check_ranks(ranks, config, data, saved, device);

  // ---- model, weights, optimizer, EMA
  const std::string fast_fact = use_fast_paths(config, device, ranks, /*graphs=*/true);
  Dtr dtr(dtr_settings(dtr_bytes(config), device, rank_info.local_world));  // counts allocations from here on
  WeightsInfo info;
  YOLOX model = new_model(config, saved, data.train, device, info, saved.notes);
  Training t = new_training(config, model, device);
  StepSettings step{device.type(), dtype_of(config.amp)};

  // ---- run folder, log, checkpoints
  Run run(config, info, saved, data, ranks, device);
  run.cache_images(data.train);

  // ---- batch size, plan, resume
  const ImageSize base{int(info.height), int(info.width)};
  const auto forward = network_of(model);
  const auto compute = [&](const Tensor& images, const Targets& targets, int64_t parts) {
    return compute_gradients(forward, images, targets, parts, t.optimizer, t.scaler, step);
  };
  const auto type = model->parameters()[0].scalar_type();
  const TrialStep trial{t, compute, base, multi_scale(config, base, rank_info.world).largest(), device, dtr};
  if (config.bs == 0) run.note(find_batch(config, trial, data.train.records.size(), ranks, run.log));
  Plan plan = plan_of(config, data.train.records.size(), rank_info.world, base);
  set_norm_momentum(*model, config.bn_momentum);
  const std::string dtr_fact = dtr.on() ? try_dtr_step(config, trial, plan.batch_per_rank, ranks) : "";
  run.resume(t, saved, plan);
  run.start(t, plan, dtr.on(), {fast_fact, dtr_fact});

  // ---- several ranks: equal weights, all-reduce of the gradients, SyncBN
  synchronize(ranks, t);
  GradientReducer reducer(ranks, trainable_parameters(*model), dtype_of(config.compress));
  set_up_ddp(ranks, reducer, step, *model, config.sync_bn);
  if (!dtr.on()) step.cast_weights = cast_weights(*model, step.amp);
  StepGraphs graphs(uses_fast_path(config, "graph"), *model, device, [&](const std::string& why) {
    run.log.line(concat("warning: training goes on without the CUDA graphs (--fast graph), because ", why));
  });

  // ---- training loop
  Batches batches(data.train, batch_settings(config, plan), rank_info.rank, base, device);
  batches.start(t.iteration);
  MicroBatches micro_batches(t, config.accum, plan.batch_per_rank, ranks, graphs, run.log);
  Recovery recovery(run, ranks);
  const EmaTensors averaged = t.ema.is_empty() ? EmaTensors() : ema_tensors(*t.ema, *model);
  UnreadSteps unread;
  const int64_t traced = config.dtr_trace && ranks.first() ? t.iteration + 2 : -1;  // --dtr-trace
  bool go_on = !run.evaluation_due(t) || end_of_epoch(t, plan, run);
  run.check_signals();
  while (go_on && t.iteration < plan.iters && !run.stopped()) {
    const int64_t i = t.iteration;
    const double lr = learning_rate(plan.schedule, i) * t.lr_factor;
    const ImageSize size = plan.sizes.size_at(i);
    const Batch batch = batches.next();
    run.start_step(i, batch, batches.reset_waiting_time());

    step.use_l1 = i >= plan.first_no_aug_iteration;
    dtr.record_samples = i == traced;
    micro_batches.save_statistics();
    const StepInput next{batch, lr, ema_decay(plan.ema, t.ema_updates + 1)};

    // The work of the device. With --fast graph, it is recorded once and then replayed.
    const auto [losses, norm] = graphs.run(next, size, step.use_l1, [&](const StepInput& in) {
      // Gradients of the whole batch, at once or accumulated over micro-batches.
      const Losses losses = micro_batches.run(i, size, [&](int64_t parts) {
        const Input input = make_network_input(in.batch, size, info.legacy_preproc, type);
        return dtr.run([&] { return compute(input.images, input.targets, parts); });
      });
      const std::vector<Tensor> grads = gradients(t.optimizer.groups);
      t.scaler.unscale(grads);
      const Tensor norm = clip_on_all_ranks(grads, config.clip, ranks);
      if (!config.sync_bn) ranks.average(model->buffers());

      // Updates weights, EMA and loss scale. After an fp16 overflow, only the loss scale.
      const Tensor skip = unread.guard.skip(losses.total, norm, !losses.anomaly.empty());
      t.optimizer.step(in.lr, skip);
      if (!t.ema.is_empty()) ema_update(averaged, in.ema_decay, skip);
      t.scaler.update();
      return std::pair(losses, norm);
    });
    t.count_step(lr);

    // Logs the step. On a GPU, the step before, so that the GPU does not wait for the host.
    const double objects = ranks.sum({double(batch.targets.total())})[0];
    unread.add({i, batch, lr, size, step.use_l1, losses.anomaly, dtr.step(), {}}, {losses, norm, objects});
    run.check_signals();
    if (!read_numbers(t, unread, run, recovery, micro_batches, batches)) continue;
    if (run.profiling())
      go_on = run.profile_step(t);
    else if (plan.ends_epoch(t.iteration))
      go_on = end_of_epoch(t, plan, run);
    else
      run.save_if_due(t);
  }
  run.finish(t);
  ranks.shutdown();
  return 0;
}

int main(int argc, char** argv) {
  limit_spinning(argv);
  return run_rank([&] { return train(argc, argv); }, [] { write_crash(memory_report()); });
}
