// SPDX-License-Identifier: Apache-2.0
// Trains YOLOX, on one rank or several. From top to bottom: the gradients of a batch, a step, the end of an
// epoch, and train(): settings, ranks, data, model, run, plan, loop.
//   ./train                                                          # yolox-s on built-in scenes
//   ./train --data DIR --model yolox-s --weights yolox-s --bs 16 --epochs 30
//   ./train --data DIR --weights yolox-s --bs 64 --epochs 30 --gpus 4
//   ./train --resume runs/NAME
#include "base/limit_spinning.hpp"  // OpenMP threads that wait
#include "base/program.hpp"         // signals, threads, exit codes
#include "config.hpp"               // Config, Plan: settings and derived settings
#include "data.hpp"                 // Batches: prefetched batches
#include "ddp.hpp"                  // Ranks, GradientReducer
#include "ddp/launch.hpp"           // launch(): --gpus, --procs
#include "dtr/budget.hpp"           // Dtr: --dtr
#include "layers/cast_weights.hpp"  // cast_weights(): the weights of a step in 16 bits
#include "loss.hpp"                 // yolox_loss()
#include "run/crash.hpp"            // crash.txt
#include "run/run.hpp"              // Run: run folder, log, checkpoints and reports
#include "run/setup.hpp"            // data, model and weights
#include "run/step_graphs.hpp"      // StepInput, StepGraphs: --graph
#include "run/step_memory.hpp"      // MicroBatches, choose_batch(), try_dtr_step()
#include "run/step_metrics.hpp"     // UnreadSteps: losses on their way to the host

using namespace yolox;

// What all steps of a training have in common. A number that changes from step to step belongs in StepInput
// as a StepScalar, because a CUDA graph replays the numbers of its recording.
struct StepSettings {
  at::ScalarType amp = torch::kFloat;              // dtype of autocast; float32: no autocast
  bool use_l1 = false;                             // changes once; each value has CUDA graphs of its own
  Tensor class_weights = {};                       // [classes], --class-weights; undefined: 1
  double clip = 0;                                 // --clip
  at::ScalarType type = torch::kFloat;             // of the weights
  bool legacy_preproc = false;                     // see preprocess()
  std::shared_ptr<CastWeights> cast_weights = {};  // null: autocast casts each weight by itself
  EmaTensors averaged = {};                        // by the EMA; empty without an EMA
  Ranks* ranks = nullptr;                          // null: one rank
  double images_per_rank = 0;                      // mean over the ranks; not used with one rank
  GradientReducer* reducer = nullptr;              // averages gradients during backward; null: afterwards
  bool sync_bn = true;
};

// Returns the settings of the steps on one rank.
static StepSettings step_settings(const Config& config, const WeightsInfo& info, const Dataset& data,
                                  const Training& t, torch::Device device) {
  StepSettings step;
  step.amp = dtype_of(config.amp);
  if (config.class_weights != 0)
    step.class_weights =
        torch::tensor(class_weights(class_counts(data), config.class_weights), torch::kFloat).to(device);
  step.clip = config.clip;
  step.type = t.model->parameters()[0].scalar_type();
  step.legacy_preproc = info.legacy_preproc;
  if (!t.ema.is_empty()) step.averaged = ema_tensors(*t.ema, *t.model);
  return step;
}

// Computes the gradients of a batch, in `parts` micro-batches (--accum), into `param.grad()`. Returns the
// losses, detached. model(images [b, 3, H, W]) returns Predictions. Gradients and losses are those of the
// whole batch over all ranks. Only batch norm statistics differ, because they are computed per micro-batch.
template <class Model>
static Losses compute_gradients(Model model, const Input& input, int64_t parts, Optimizer& optimizer,
                                const GradScaler& scaler, const StepSettings& s) {
  optimizer.zero_grad();
  const int64_t n = input.images.size(0), height = input.images.size(2), width = input.images.size(3);
  const int64_t ranks = s.ranks ? s.ranks->info.world : 1;
  // Each micro-batch divides its terms by its own positives. Multiplied by them, the gradients of all
  // micro-batches and ranks can be added, and are divided by the positives of the whole batch at the end.
  // `expected_positives` keeps these factors near 1, because fp16 gradients overflow otherwise.
  const double expected_positives = 16.0 * (s.ranks ? s.images_per_rank : double(n));
  std::vector<Losses> all;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = n * part / parts, to = n * (part + 1) / parts;
    Predictions predictions;
    {
      RECORD_USER_SCOPE("forward");
      const AutocastGuard autocast(input.images.device().type(), s.amp);
      const CastWeights::Guard cast(s.cast_weights.get());
      predictions = model(input.images.slice(0, from, to));
    }
    Losses losses =
        yolox_loss(predictions, height, width, input.targets.slice(from, to), s.use_l1, s.class_weights);
    Tensor loss = losses.total;
    check_micro_batches(losses, parts);
    if (s.ranks && !losses.term_per_image().empty())
      loss = loss_of_rank(losses, *s.ranks, double(n) / s.images_per_rank);
    else if (parts * ranks > 1)
      loss = losses.total * losses.weight() / expected_positives;
    if (s.reducer && part == parts - 1) s.reducer->before_backward({loss});  // all-reduces during backward
    {
      RECORD_USER_SCOPE("backward");
      scaler.scaled(loss).backward();
    }
    losses.detach();
    all.push_back(losses);
  }
  Losses losses = join(all);
  if (s.ranks) all_reduce(losses, *s.ranks);
  if (s.ranks && !s.reducer) s.ranks->average(gradients(optimizer.groups));
  if (parts * ranks > 1 && losses.term_per_image().empty())
    scale_gradients(gradients(optimizer.groups),
                    losses.weight().to(torch::kDouble).reciprocal() * (expected_positives * double(ranks)));
  return losses;
}

// A training step: gradients, clipping, weights, EMA and loss scale. Repeats the gradients in more
// micro-batches if memory runs out; nothing is updated before. With several ranks, throws NeedsRestart then.
// Launches the work of the device and does not wait for it, so that a CUDA graph can record the step
// (--graph). Returns the losses, with the gradient norm before clipping as "grad_norm".
static Losses train_step(Training& t, const StepInput& in, ImageSize size, const StepSettings& s, Dtr& dtr,
                         MicroBatches& micro_batches, StepGuard& guard) {
  Losses losses;
  for (int64_t parts = micro_batches.begin();;) {
    try {
      const Input input = make_network_input(in.batch, size, s.legacy_preproc, s.type);
      Dtr::Scope budget(dtr);
      losses = compute_gradients(t.model, input, parts, t.optimizer, t.scaler, s);
      budget.finish();
      micro_batches.succeeded(parts);
      break;
    } catch (const std::exception& e) {
      parts = micro_batches.retry(e, parts, size);
    }
  }
  const std::vector<Tensor> grads = gradients(t.optimizer.groups);
  t.scaler.unscale(grads);
  const Tensor norm = gradient_norm(grads);
  if (s.ranks) s.ranks->agree(norm);
  clip_gradients(grads, norm, s.clip);
  losses.log("grad_norm", norm);
  if (s.ranks && !s.sync_bn) s.ranks->average(t.model->buffers());

  // After an fp16 overflow, only the loss scale changes.
  const Tensor skip = guard.skip(losses.total, norm);
  t.optimizer.step(in.lr, skip);
  ema_update(s.averaged, in.ema_decay, skip);
  t.scaler.update();
  return losses;
}

// Ends an epoch or the run: evaluates, and writes best.pth and last.pth. Returns false if
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
    const bool no_score = *t.score < 0;  // there is no object to find; best.pth gets the latest weights
    const bool better = no_score ? before.score < 0 : *t.score > before.score;
    ++t.best.evals_without_gain;
    if (no_score || better) t.best.evals_without_gain = 0;
    if (better) {
      t.best.score = *t.score;
      if (!run.save(t, "best.pth")) t.best.score = before.score;
      run.save_evaluation(t, *evaluation);
    }
    run.best_score = t.best.score;
    // If --max-iters ended the run within an epoch, restores the values of the last whole epoch, so that a
    // resumed run equals a run without interruption.
    if (t.iteration % plan.per_epoch != 0) t.best = before;
  }
  t.epochs = t.iteration / plan.per_epoch;
  const bool stop = run.config.patience > 0 && t.best.evals_without_gain >= run.config.patience && !last;
  run.save(t, "last.pth", /*required=*/last || stop);
  return !run.end_of_epoch(t, stop);
}

// Trains and returns the exit code. With --gpus or --procs, starts the ranks instead. One long function, so
// that the whole training can be read from top to bottom.
[[maybe_unused]] static int train(int argc, char** argv) {
  ignore_hangup();
  report_signals();

  // ---- settings: from the flags, or from the resumed run
  Config config;
  config.parse(argc, argv, "trains YOLOX", "--data DIR --weights yolox-s --bs 16 --epochs 30");
  SavedRun saved = find_run(config);
  fill_in(config, bool(saved));
  check_config(config);
  const RankInfo rank_info = rank_info_from_environment();
  const auto launched = ranks_to_launch(config, rank_info, bool(saved));
  if (launched && !config.dry_run) {
    saved.file = {};  // frees the checkpoint; each rank reads it again
    return launch(*launched, argc, argv);
  }
  const torch::Device device = prepare_process(config, rank_info);
  check_memory_for_batches(config);

  // ---- ranks. The object is not destroyed after an error, because its destructor would wait for dead ranks.
  Ranks& ranks = *new Ranks(rank_info, device, config.timeout);

  // ---- data
  lock_resumed_run(saved, ranks);
  Splits data = load_data(config, config.data, saved.run, ranks);
  check_ranks(ranks, config, data, saved, device);

  // ---- model, weights, optimizer, EMA
  saved.notes.push_back(turn_on_fused_norm(device, ranks));
  Dtr dtr(dtr_settings(dtr_bytes(config), device, rank_info.local_world));  // counts allocations from here on
  WeightsInfo info;
  YOLOX model = new_model(config, saved, data.train, device, info, saved.notes);
  const ImageSize base{int(info.height), int(info.width)};
  if (config.dry_run) return dry_run(config, data, model, base, device, saved.notes, ranks);
  Training t = new_training(config, model, device);
  StepSettings step = step_settings(config, info, data.train, t, device);

  // ---- run folder, log, checkpoints
  Run run(config, info, saved, data, ranks, device);
  run.cache_images(data.train);

  // ---- batch size, plan, resume
  const auto compute = [&](const Input& input, int64_t parts) {
    compute_gradients(model, input, parts, t.optimizer, t.scaler, step);
  };
  const TrialStep trial{t, compute, base, multi_scale(config, base, rank_info.world).largest(), device, dtr};
  run.note(choose_batch(config, trial, data.train.records.size(), ranks, run.log));
  Plan plan = plan_of(config, data.train.records.size(), rank_info.world, base);
  set_norm_momentum(*model, plan.norm_momentum);
  use_cudnn_benchmark(cudnn_benchmark_pays(config, plan));
  if (dtr.on()) run.note(try_dtr_step(config, trial, plan.batch_per_rank(), ranks));
  if (!run.resume(t, saved, plan)) {  // complete
    ranks.shutdown();
    return 0;
  }
  run.start(t, plan, dtr.on());

  // ---- several ranks: equal weights, all-reduce of the gradients, SyncBN
  ranks.reached("the start");
  ranks.broadcast(tensors_of(t));
  std::optional<GradientReducer> reducer;  // unused with --graph: a graph cannot record it
  if (!ranks.alone()) {
    step.ranks = &ranks;
    step.images_per_rank = double(config.bs) / rank_info.world;
    if (!config.graph) step.reducer = &reducer.emplace(ranks, trainable_parameters(*model));
    step.sync_bn = config.sync_bn;
    if (step.sync_bn) use_sync_bn(*model, ranks.sync_bn_collectives());
  }
  if (!dtr.on()) step.cast_weights = cast_weights(*model, step.amp);
  // Not destroyed after an error either: it would wait for a GPU that waits for dead ranks.
  StepGraphs& graphs = *new StepGraphs(config.graph, *model, device, ranks, [&](const std::string& why) {
    run.log.line(concat("warning: training goes on without the CUDA graphs (--graph), because ", why));
  });

  // ---- training loop
  Batches batches(data.train, batch_settings(config, plan), rank_info.rank, base, device, t.iteration);
  MicroBatches micro_batches(t, config.accum, config.bs / rank_info.world, ranks, graphs, run.log);
  UnreadSteps unread(ranks, config.timeout);
  bool go_on = !run.evaluation_due(t) || end_of_epoch(t, plan, run);
  run.check_signals();
  while (go_on && t.iteration < plan.iters && !run.stopped()) {
    const int64_t i = t.iteration;
    const double lr = learning_rate(plan.schedule, i);
    const ImageSize size = plan.sizes.size_at(i);
    const Batch batch = batches.next();
    run.start_step(i, batch, batches.reset_waiting_time());

    step.use_l1 = i >= plan.first_no_aug_iteration;
    micro_batches.save_statistics();
    const StepInput next{batch, lr, ema_decay(plan.ema, t.ema_updates + 1)};

    // With --graph, the step is recorded once and then replayed.
    Losses losses;
    try {
      losses = graphs.run(next, size, step.use_l1, [&](const StepInput& in) {
        return train_step(t, in, size, step, dtr, micro_batches, unread.guard);
      });
    } catch (const NeedsRestart& e) {
      run.save_for_restart(t, e.accum);
      throw;
    } catch (const std::exception& e) {
      const std::string what = e.what();  // of torch's anomaly mode (--debug)
      if (what.find("returned nan values") == std::string::npos) throw;
      run.fail_step(t, what.substr(0, what.find('.')), {i, batch, lr, size, step.use_l1, dtr.step(), {}});
    }
    t.count_step(lr);

    // Logs the step. On a GPU, the step before, so that the GPU does not wait for the host.
    unread.add({i, batch, lr, size, step.use_l1, dtr.step(), {}}, losses);
    run.check_signals();
    const bool all = run.must_read_all(t);
    for (auto read = unread.next(all); read; read = unread.next(all)) run.end_step(t, *read);
    if (run.profiling())
      go_on = run.profile_step();
    else if (plan.ends_epoch(t.iteration))
      go_on = end_of_epoch(t, plan, run);
    else
      run.save_if_due(t);
  }
  run.finish(t);
  graphs.free_graphs();  // NCCL waits for graphs that contain its collectives
  ranks.shutdown();
  if (rank_info.rank == 0) run.write_report();
  return 0;
}

#ifndef YOLOX_WITHOUT_MAIN  // tests and benchmarks include this file for its step
int main(int argc, char** argv) {
  end_program(run_rank([&] { return train(argc, argv); }, [] { write_crash(memory_report()); }));
}
#endif
