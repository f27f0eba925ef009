// SPDX-License-Identifier: Apache-2.0
// Trains YOLOX, on one rank or several. From top to bottom: forward, loss and backward of a batch, the step,
// the end of an epoch, and train(): settings, ranks, data, model, run folder, plan, and the loop.
//   ./train                                                          # yolox-s on built-in scenes
//   ./train --data DIR --model yolox-s --weights yolox-s --bs 16 --epochs 30
//   ./train --data DIR --weights yolox-s --bs 64 --epochs 30 --gpus 4
//   ./train --resume runs/NAME
#include "base/program.hpp"      // signals, exit codes
#include "base/timeout.hpp"      // WaitsFor: --timeout
#include "config.hpp"            // Config, Plan: settings and derived settings
#include "data.hpp"              // Batches: prefetched batches
#include "ddp.hpp"               // Ranks, GradientReducer
#include "ddp/launch.hpp"        // launch(): --gpus, --procs
#include "dtr/dtr.hpp"           // Dtr: --dtr
#include "loss.hpp"              // yolox_loss()
#include "run/run.hpp"           // data, model and weights, run folder, log, evaluations
#include "run/saving.hpp"        // Training: model, optimizer, EMA; Saver: checkpoints
#include "run/step_graphs.hpp"   // StepInput; StepGraphs: --graph
#include "run/step_memory.hpp"   // MicroBatches, trial steps
#include "run/step_metrics.hpp"  // UnreadSteps: losses on their way to the host

using namespace yolox;

// Computes the gradients of a batch, in `parts` micro-batches (--accum), into `param.grad()`, times the loss
// scale of fp16. Returns the losses, detached. Both are means over the whole batch of all ranks. Batch norms
// see one micro-batch at a time, and with --no-sync-bn the images of one rank.
static Losses forward_backward(Training& t, const Input& input, int64_t parts, bool use_l1, Ranks& ranks) {
  t.optimizer.zero_grad();
  const int64_t n = input.images.size(0), height = input.images.size(2), width = input.images.size(3);
  const double world = ranks.info.world, mean_n = ranks.alone() ? double(n) : t.images_per_rank;
  // Each micro-batch divides its terms by its own positives. Multiplied by them, the gradients of all
  // micro-batches and ranks can be added, and are divided by the positives of the whole batch at the end
  // (times `world`, because ranks average). `expected_positives` keeps these factors near 1, because fp16
  // gradients overflow otherwise. Terms per image have a divisor that is known before: loss_of_rank().
  const double expected_positives = 16.0 * mean_n;
  std::vector<Losses> all;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = n * part / parts, to = n * (part + 1) / parts;
    Predictions predictions;
    {
      RECORD_USER_SCOPE("forward");
      const AutocastGuard autocast(input.images.device().type(), t.amp);
      const CastWeights::Guard cast(t.cast_weights.get());
      predictions = t.model(input.images.slice(0, from, to));
    }
    all.push_back(
        yolox_loss(predictions, height, width, input.targets.slice(from, to), use_l1, t.class_weights));
    Losses& losses = all.back();
    check_micro_batches(losses, parts);
    Tensor loss = losses.total;
    if (!ranks.alone() && !losses.term_per_image().empty())
      loss = loss_of_rank(losses, ranks, double(n) / mean_n);
    else if (double(parts) * world > 1)
      loss = losses.total * losses.weight() / expected_positives;
    const bool reduces = t.reducer && part == parts - 1;
    if (reduces) t.reducer->before_backward({loss});  // all-reduces during backward
    RECORD_USER_SCOPE("backward");
    const WaitsFor waits(reduces ? "other ranks" : nullptr);
    t.scaler.scaled(loss).backward();
    losses.detach();
  }
  Losses losses = join(all);
  if (!ranks.alone()) all_reduce(losses, ranks);
  const std::vector<Tensor> grads = gradients(t.optimizer.groups);
  if (!t.reducer) ranks.average(grads);
  if (double(parts) * world > 1 && losses.term_per_image().empty())
    scale_gradients(grads, losses.weight().to(torch::kDouble).reciprocal() * (expected_positives * world));
  if (!t.sync_bn) ranks.average(t.model->buffers());
  return losses;
}

// A training step, from a batch to its losses. Tests and benchmarks use it, too.
struct TrainStep {
  Training& t;
  MicroBatches& micro_batches;
  Dtr& dtr;
  Ranks& ranks;
  double clip;  // --clip
  StepGuard guard = {};

  // Updates weights and EMA. With --graph, the second step of each kind is recorded, and later ones replay
  // it.
  Losses operator()(const StepInput& in) {
    Losses losses = micro_batches.fit(in.size, [&](int64_t parts) {  // more parts if memory runs out
      const Input input = make_network_input(in.batch, in.size, t.legacy_preproc, t.type);
      return dtr.run([&] { return forward_backward(t, input, parts, in.use_l1, ranks); });
    });
    const std::vector<Tensor> grads = gradients(t.optimizer.groups);
    t.scaler.unscale(grads);
    const Tensor norm = ranks.agreed(gradient_norm(grads));
    clip_gradients(grads, norm, clip);
    losses.log("grad_norm", norm);
    const Tensor skip = guard.skip(losses.total, norm);  // 1: weights and EMA stay as they are
    t.optimizer.step(in.lr, skip);
    ema_update(t.averaged, in.ema_decay, skip);
    t.scaler.update();
    return losses;
  }
};

// Ends an epoch or the run: evaluates, and writes best.pth and last.pth.
static void end_of_epoch(Training& t, const Plan& plan, const Splits& data, EvalSettings& settings,
                         Ranks& ranks, Saver& saver, Progress& progress, Log& log) {
  progress.log_ranks(ranks);
  if (plan.evaluates_after(t.iteration)) {
    if (saver.last_step != t.iteration) saver.save(t, "last.pth", log);  // a signal may end the evaluation
    const Evaluation e = evaluate(t, data.val, settings, ranks, log);
    if (!e.complete) return;
    const double score = ranks.broadcast(score_of(e).value);
    const Best before = t.best;
    const bool gain = score > before.score, none = score < 0;  // none: no image has an object to find
    t.score = score;
    t.best = {std::max(score, before.score), gain || none ? 0 : before.evals_without_gain + 1};
    progress.log_evaluation(t.iteration, e, plan, gain);
    const bool saved =
        (gain || (none && before.score < 0)) && ranks.broadcast(saver.save(t, "best.pth", log)) > 0;
    if (saved && ranks.first()) save_evaluation(saver.run, t, e, data.val, log);
    if (!saved) t.best.score = before.score;
    // An evaluation within an epoch, at the end of --max-iters, does not count as the best in last.pth, so
    // that a resumed run equals a run without interruption.
    if (t.iteration % plan.per_epoch != 0) t.best = before;
  }
  t.epochs = t.iteration / plan.per_epoch;
  saver.save(t, "last.pth", log, /*must=*/is_complete(t, plan));
  progress.end_epoch(t, plan, data, ranks);
}

// Trains and returns the exit code. With --gpus or --procs, starts the ranks instead.
[[maybe_unused]] static int train(int argc, char** argv) {
  report_signals();

  // ---- settings: from the flags, or from the resumed run
  Config config;
  config.parse(argc, argv, "trains YOLOX", "--data DIR --weights yolox-s --bs 16 --epochs 30");
  SavedRun saved = find_run(config);
  fill_in(config, bool(saved));
  check_config(config);
  const RankInfo rank_info = rank_info_from_environment();
  const auto launched = ranks_to_launch(config, rank_info, saved.run);
  if (launched && !config.dry_run) {
    saved.file = {};  // frees the checkpoint; each rank reads it again
    return launch(*launched, argc, argv);
  }
  const torch::Device device = prepare_process(config, rank_info);

  // ---- ranks. The object is not destroyed after an error, because its destructor would wait for dead ranks.
  Ranks& ranks = *new Ranks(rank_info, device, config.timeout, config.graph);

  // ---- data
  if (saved && ranks.first()) lock_run_folder(saved.run);
  Splits data = load_data(config, config.data, saved, device, ranks);
  const int64_t images = data.train.records.size();

  // ---- model, weights, optimizer, EMA
  saved.notes.push_back(turn_on_fused_norm(device, ranks));
  Dtr dtr(dtr_settings(dtr_bytes(config), device, rank_info.local_world));  // counts allocations from here on
  WeightsInfo info;
  YOLOX model = new_model(config, saved, data.train, device, info, saved.notes);
  const ImageSize base{int(info.height), int(info.width)};
  if (config.dry_run) return dry_run(config, data, model, device, saved.notes, ranks);
  YOLOX ema = config.ema == 0 ? YOLOX(nullptr) : copy_of(model, device);
  Training t = new_training(config, model, ema, info, data.train, device, /*casts_together=*/!dtr.on());

  // ---- run folder, log, batch size, plan, checkpoint, start of the run
  const bool begins = ranks.first() && !saved;
  const std::string run = ranks.broadcast(begins ? create_run_folder(config) : saved.run);
  Log log = open_log(run, config, saved, device, ranks);
  cache_images(data.train, config, base, ranks, log);
  const TrialStep trial{t, forward_backward, base, multi_scale(config, base, rank_info.world).largest(), dtr};
  choose_batch(config, trial, images, run, ranks, log);
  Plan plan = plan_of(config, images, rank_info.world, base);
  t.images_per_rank = double(plan.batch) / double(plan.ranks);
  set_norm_momentum(*model, plan.norm_momentum);
  use_cudnn_benchmark(cudnn_benchmark_pays(config, plan));
  log.line(set_threads(config, t, base, plan.batch_per_rank(), ranks));
  if (dtr.on()) log.line(try_dtr_step(config, trial, plan.batch_per_rank(), ranks));
  const bool writes = ranks.first() && !config.profile;
  Saver saver{
      run, info, config.settings(), plan.per_epoch, fingerprint(data.train), writes, config.save_minutes};
  if (saved && !resume_run(saved, t, plan, config.resume, saver, log)) {  // the run is complete
    ranks.shutdown();
    return 0;
  }
  if (config.profile) plan = profiled(plan, t.iteration);
  Progress progress(run, log, device, t.iteration, rank_info.rank, dtr.on(), config.profile);
  start_run(run, config, saved, data, t, plan, device, ranks, saver, progress, log);
  EvalSettings evaluation = eval_settings(run, config, info, plan, device, ranks);

  // ---- several ranks: equal weights, all-reduce of the gradients, SyncBN
  ranks.broadcast(tensors_of(t));
  if (!ranks.alone() && !config.graph)  // a graph cannot record it
    t.reducer = std::make_shared<GradientReducer>(ranks, trainable_parameters(*model));
  if (!ranks.alone() && config.sync_bn) use_sync_bn(*model, ranks.sync_bn_collectives());
  // Not destroyed after an error either: it would wait for a GPU that waits for dead ranks.
  StepGraphs& graphs = *new StepGraphs(config.graph, *model, device, ranks, log);

  // ---- training loop
  const BatchSettings of_batches = batch_settings(config, plan);
  Batches batches(data.train, of_batches, rank_info.rank, base, device, t.iteration);
  MicroBatches micro_batches{t, config.accum, config.bs / rank_info.world, ranks, run, graphs, log};
  UnreadSteps unread(device, ranks.alone());
  TrainStep step{t, micro_batches, dtr, ranks, config.clip};
  if (evaluation_due(t, plan)) end_of_epoch(t, plan, data, evaluation, ranks, saver, progress, log);
  Agreement agreed = agree(ranks, saver, unread);
  try {
    while (!agreed.signal && !is_complete(t, plan)) {
      const StepInput next{.batch = batches.next(),
                           .size = plan.sizes.size_at(t.iteration),
                           .use_l1 = t.iteration >= plan.first_no_aug_iteration,
                           .lr = learning_rate(plan.schedule, t.iteration),
                           .ema_decay = ema_decay(plan.ema, t.ema_updates + 1)};
      progress.start_step(plan, t.iteration, next.batch, batches.reset_waiting_time());
      const Losses losses = graphs.run(next, std::ref(step));  // step(next); with --graph, its replay
      unread.add(t.iteration, next.lr.value, dtr.step(), losses);
      t.count_step(next.lr.value);
      if (!plan.ends_epoch(t.iteration) && !unread.due(agreed.step_seconds)) continue;
      const std::vector<StepRow> rows = unread.read();  // waits for the GPU; one step, on a GPU up to ten
      t.skipped += progress.log_steps(rows, plan);
      if (plan.ends_epoch(t.iteration))
        end_of_epoch(t, plan, data, evaluation, ranks, saver, progress, log);
      else if (agreed.save_due)
        saver.save(t, "last.pth", log);
      agreed = agree(ranks, saver, unread);
    }
  } catch (const StepFailed& failed) {
    Batches again(data.train, of_batches, rank_info.rank, base, device, failed.row.step);
    report_failed_step(run, t, plan, failed, again.next(), rank_info.rank);
  }
  if (!is_complete(t, plan) && saver.last_step != t.iteration) saver.save(t, "last.pth", log, /*must=*/true);
  progress.log_end(t, plan, agreed.signal);
  graphs.free_graphs();  // NCCL waits for graphs that contain its collectives
  ranks.shutdown();
  if (rank_info.rank == 0 && !config.profile) log.line(write_report(run, agreed.signal));
  return 0;
}

#ifndef YOLOX_WITHOUT_MAIN  // tests and benchmarks include this file for its step
int main(int argc, char** argv) {
  end_program(run_rank([&] { return train(argc, argv); }, [] { write_crash(); }));
}
#endif
