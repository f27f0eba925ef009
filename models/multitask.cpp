// SPDX-License-Identifier: Apache-2.0
// A model (yolox_multitask.hpp) and a training loop (this file) to copy and edit.
// ./multitask trains several detection heads on one backbone and neck. Each head has its own data set. Each
// iteration trains one head, in turn.
//   ./multitask --data helmets --data faces=/data/wider --model yolox-s --weights yolox-s --epochs 30
//   ./eval --data helmets --weights runs/multitask-helmets-faces/head_helmets.pth
// Hyper-parameters without a flag here have the defaults of ./train (config.hpp). To stay short, this example
// leaves out --accum, --amp fp16, --graph, --dtr, --bs auto, --cache, --class-weights,
// best.pth, the repetition of a step after out of memory, and most log lines. Copy them from train.cpp if you
// need them.
#include <cstring>
#include <deque>
#include <optional>
#include <set>

#include "base/device.hpp"
#include "base/limit_spinning.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"
#include "checkpoint/load.hpp"
#include "config.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "ddp.hpp"
#include "ddp/launch.hpp"
#include "evaluate.hpp"
#include "loss.hpp"
#include "models/yolox_multitask.hpp"
#include "run/log.hpp"
#include "run/run.hpp"
#include "run/saving.hpp"
#include "run/setup.hpp"
#include "run/step_metrics.hpp"

using namespace yolox;

struct MultiTaskConfig : Flags {
  std::vector<std::string> data =
      flag_list(data, "Data", "data", "[NAME=]DIR", "data set of a head; give the flag once for each head");
  int workers = flag_auto(workers, "Data", "workers", 0, "N|auto",
                          "threads that load images, per rank and data set; auto = cores / ranks");
  std::string model = flag(model, "Model", "model", "yolox-s", "NAME", model_names());
  std::string weights = flag(weights, "Model", "weights", "", "FILE",
                             "pretrained weights: checkpoint (ours or official), or name of a "
                             "model that weights/get has downloaded");
  std::string resume =
      flag(resume, "Model", "resume", "", "RUN",
           "resume the run in this folder; auto = resume, or begin, the run in --out", marked(kOfCall));
  std::string size =
      flag(size, "Training", "size", "", "N|HxW", "input size in pixels [416 or 640, by model]");
  int bs = flag(bs, "Training", "bs", 16, "N", "total batch size over all ranks");
  int epochs = flag(epochs, "Training", "epochs", 300, "N", "epochs of the largest data set");
  int64_t max_iters =
      flag(max_iters, "Training", "max-iters", int64_t{0}, "N", "stop after N steps; 0 = off");
  std::string recipe = flag(recipe, "Training", "recipe", "auto", "auto|finetune|official",
                            "defaults of other flags; auto = finetune with --weights, else official");
  std::string freeze = flag(freeze, "Training", "freeze", "recipe", "none|PART,...",
                            "parts to freeze: stem, backbone, neck, or prefixes of parameter names");
  double lr = flag_recipe(lr, "Training", "lr", "X", "learning rate; default follows --bs");
  std::string amp = flag(amp, "Training", "amp", "auto", "auto|off|tf32|bf16|fp64",
                         "off = float32; auto = bf16 on a GPU, off on the CPU");
  int64_t seed =
      flag(seed, "Training", "seed", int64_t{0}, "N", "random seed of weights, data order and augmentation");
  std::string device = flag(device, "Training", "device", "auto", "auto|cpu|cuda[:N]", "device to train on");
  int gpus = flag(gpus, "Ranks", "gpus", 0, "N", "train on N GPUs of this machine, one rank per GPU");
  int procs = flag(procs, "Ranks", "procs", 0, "N", "train on the CPU with N ranks");
  std::string out = flag(out, "Output", "out", "", "DIR", "run folder [runs/multitask-NAMES]");
  int eval_interval =
      flag(eval_interval, "Output", "eval-interval", 10, "N", "evaluate every N epochs; 0 = off");
  double conf = flag(conf, "Output", "conf", 0.01, "P", "minimum score of a detection in evaluation");
};

// Data and loss averages of one head.
struct HeadData {
  std::string name, data;  // NAME and DIR of --data
  Splits splits;
  std::optional<Batches> batches;
  Means means;  // over the iterations of this head in this epoch
};

// Parses the values of --data: "faces=/data/wider", or "/data/faces" for the same name. Throws UsageError if
// a name is invalid or repeated.
static std::deque<HeadData> parse_data_flags(const std::vector<std::string>& data) {
  std::deque<HeadData> streams;
  std::set<std::string> names;
  for (const std::string& text : data) {
    const size_t equals = text.find('=');
    HeadData& s = streams.emplace_back();
    s.data = equals == std::string::npos ? text : text.substr(equals + 1);
    s.name = equals == std::string::npos ? data_name(text) : text.substr(0, equals);
    usage_check(!s.data.empty() && !s.name.empty() && s.name.find_first_of("./,") == std::string::npos,
                "--data ", text, ": the head needs a name without dots, slashes and commas; give NAME=DIR");
    usage_check(names.insert(s.name).second, "--data ", text, ": another head has the name ", s.name,
                "; give NAME=DIR");
  }
  return streams;
}

// Returns the terms of the loss as text: "iou 2.1 obj 1.3 cls 0.9 l1 0".
static std::string rounded_terms(const StepMetrics& n) {
  std::string text;
  for (const auto& [name, value] : n.all(Losses::Kind::kTerm))
    text += concat(text.empty() ? "" : " ", name, " ", rounded(value));
  return text;
}

// Parses the command line into `flags`, with the settings of the resumed run if --resume is given. Sets `c`,
// the settings of ./train, from `flags`. Returns the resumed run, or an empty SavedRun. Throws UsageError.
static SavedRun read_settings(MultiTaskConfig& flags, Config& c, int argc, char** argv) {
  flags.parse(argc, argv, "trains several detection heads on one backbone",
              "--data faces=DIR --data signs=DIR --weights yolox-s");
  SavedRun saved;
  flags.model = model_size(flags.model).name;
  if (const std::string run = run_to_resume(flags.resume, flags.out); !run.empty())
    saved = resume_settings(flags, run, /*same_command=*/flags.resume == "auto");
  combination_check(!flags.data.empty(), "--data is needed; give it once for each head");
  for (const auto& [name, value] : flags.values()) c.set(name, value);
  c.resume = "";
  fill_in(c);
  flags.recipe = c.recipe;
  check_config(c);
  usage_check(c.bs > 0, "--bs must be a number");
  return saved;
}

// Loads --weights into each head of a new run, freezes the parts of --freeze, moves model and EMA to the
// device, and creates the optimizer. Appends remarks for the log to `notes`.
static void load_weights(MultiTaskTraining& t, MultiTaskConfig& flags, const Config& c, torch::Device device,
                         bool resumed, WeightsInfo& info, std::vector<std::string>& notes) {
  const bool pretrained = !c.weights.empty() && !resumed;
  std::string freeze_by_default = "none";
  for (int64_t k = 0; k < t.heads(); ++k) {
    YOLOX& detector = t.model->detectors[k];
    if (pretrained) {
      WeightsInfo wanted = info;
      wanted.classes = t.model->tasks[k].classes;
      const Pretrained from = load_pretrained(detector, c.weights, wanted, notes);
      info.legacy_preproc = from.info.legacy_preproc;
      if (from.has_stem) freeze_by_default = training_recipe(c).freeze;
    }
    freeze_parts(*detector, flags.freeze, freeze_by_default);
  }
  if (pretrained && c.optimizer != "sgd") scale_filters(*t.model);
  const auto type = c.amp == "fp64" ? torch::kDouble : torch::kFloat;
  for (auto* m : {&t.model, &t.ema}) {
    for (YOLOX& detector : (*m)->detectors) {
      move(detector, device, type);
      to_channels_last(*detector);
    }
  }
  load_state_dict(*t.ema, to_dict(state_dict(*t.model)), "the model");
  set_training_mode(*t.model);
  t.ema->eval();
  t.optimizer = Optimizer(c.optimizer, parameter_groups(*t.model, c.weight_decay), /*fp16=*/false);
}

// A run: folder, log, metrics and checkpoints.
struct MultiTaskRun {
  const MultiTaskConfig& flags;
  const Config& config;
  MultiTaskTraining& t;
  std::deque<HeadData>& streams;
  const WeightsInfo& info;
  const Plan& plan;
  Ranks& ranks;
  const std::string folder;
  Log log;
  EvalSettings eval;
  int64_t images;          // total over all data sets
  int64_t last_step = -1;  // iteration of last.pth; -1: no such file
  std::optional<Metrics> metrics = {};

  // Returns true if an epoch or the run has ended, and end_of_epoch() is not done yet.
  bool evaluation_due() const { return t.evaluated_at != t.iteration && plan.ends_epoch(t.iteration); }

  // Returns true if no step is left. Throws UsageError then, unless with --resume auto.
  bool complete() {
    if (t.iteration < plan.iters || evaluation_due()) return false;
    const std::string text = concat(folder, " is complete: ", t.iteration, " of ", plan.iters,
                                    " steps are done; increase --epochs or --max-iters to continue");
    usage_check(flags.resume == "auto", text);
    log.line(text);
    return true;
  }

  // Writes head_NAME.pth of each head and last.pth, on rank 0 only. A failed write is a warning, or an
  // exception if `required`.
  void save(bool required = false) {
    if (!ranks.first()) return;
    const auto write = [&] {
      for (int64_t k = 0; k < t.heads(); ++k)
        write_pth(concat(folder, "/head_", streams[k].name, ".pth"), head_checkpoint(t.ema, k, info));
      save_last(folder, checkpoint(t, info, flags.values(/*without=*/kOfCall), images, plan.per_epoch),
                t.iteration, last_step, config.keep);
      last_step = t.iteration;
    };
    try_to_save(write, log, required);
  }

  // Evaluates and logs each head, then saves. The resumed run repeats an evaluation that a signal has
  // interrupted.
  void end_of_epoch() {
    const int64_t epoch = plan.epoch_of(t.iteration - 1);
    const bool evaluates =
        config.eval_interval > 0 && (epoch % config.eval_interval == 0 || t.iteration == plan.iters);
    Metrics::Row row{{"epoch", double(epoch)}, {"iteration", double(t.iteration)}};
    if (evaluates) save();  // because a signal can interrupt the evaluation
    for (int64_t k = 0; k < t.heads(); ++k) {
      HeadData& s = streams[k];
      const bool trained = s.means.steps > 0;  // false if its iterations ran before a resume
      const StepMetrics m = s.means.take();
      std::optional<Evaluation> e;
      if (evaluates) {
        ranks.reached(concat("the evaluation of ", s.name, " after step ", t.iteration));
        if (ranks.first()) eval.pictures = concat(folder, "/", s.name, "_val_batch");
        e = evaluate(t.ema->detectors[k], s.splits.val, eval,
                     [&](int64_t, int64_t) { ranks.restart_timeout(); });
        if (!e->complete) return;
      }
      std::string line = concat("epoch ", epoch, "/", config.epochs, "  ", s.name, ":");
      if (trained)
        line += concat(" loss ", rounded(m.total), " (", rounded_terms(m), "), ", rounded(m.per_object()),
                       " positives per object");
      if (e) line += concat(trained ? "," : "", " AP ", e->result.AP);
      log.line(line);
      for (const auto* data : {&s.splits.train, &s.splits.val})
        data->problems->write(concat(folder, "/problems_", s.name, data == &s.splits.val ? "_val" : "",
                                     rank_suffix(ranks), ".txt"));
      row.insert(row.end(), {{s.name + "_loss", m.total}, {s.name + "_AP", e ? e->result.AP : std::nan("")}});
    }
    if (metrics) metrics->row(row);
    t.evaluated_at = t.iteration;
    save(/*required=*/t.iteration == plan.iters);
  }
};

// Returns the values that must be equal on all ranks.
static Settings common_settings(const Config& c, int64_t images, const std::string& names, int64_t steps) {
  Settings common{{"images", concat(images)}, {"heads", names}, {"steps done", concat(steps)}};
  for (const auto& [name, value] : c.values()) common.emplace_back("--" + name, value);
  return common;
}

// Computes the gradients of a batch for one head, and clips them: compute_gradients() of train.cpp, without
// micro-batches and fp16. Returns the losses, with the gradient norm as "grad_norm".
static Losses compute_gradients(MultiTaskTraining& t, int64_t head, const Batch& batch, ImageSize size,
                                bool use_l1, const Config& c, bool legacy_preproc, Ranks& ranks,
                                GradientReducer& reducer) {
  t.optimizer.zero_grad();
  YOLOX& model = t.model->detectors[head];
  const auto type = c.amp == "fp64" ? torch::kDouble : torch::kFloat;
  const Input input = make_network_input(batch, size, legacy_preproc, type);
  Predictions predictions;
  {
    const AutocastGuard autocast(input.images.device().type(), dtype_of(c.amp));
    predictions = model(input.images);
  }
  Losses losses = yolox_loss(predictions, size.height, size.width, input.targets, use_l1);
  const double expected_positives = 16.0 * double(c.bs) / double(ranks.info.world);
  const double share = double(batch.images.size(0)) * double(ranks.info.world) / double(c.bs);
  const bool per_image = !losses.term_per_image().empty();
  const Tensor loss = ranks.alone() ? losses.total
                      : per_image   ? loss_of_rank(losses, ranks, share)
                                    : losses.total * losses.weight() / expected_positives;
  reducer.before_backward({loss});
  loss.backward();
  losses.detach();
  if (!ranks.alone()) {
    all_reduce(losses, ranks);
    if (!per_image)
      scale_gradients(gradients(t.optimizer.groups), losses.weight().to(torch::kDouble).reciprocal() *
                                                         (expected_positives * double(ranks.info.world)));
  }
  const std::vector<Tensor> grads = gradients(t.optimizer.groups);
  const Tensor norm = gradient_norm(grads);
  ranks.agree(norm);
  clip_gradients(grads, norm, c.clip);
  losses.log("grad_norm", norm);
  return losses;
}

// Trains one rank, or launches the ranks of this machine. Returns the exit code. One long function, so that a
// training with several heads can be read from top to bottom, like that of train.cpp.
static int train(int argc, char** argv) {
  ignore_hangup();
  report_signals();
  MultiTaskConfig flags;
  Config c;  // settings of ./train
  SavedRun saved = read_settings(flags, c, argc, argv);
  std::deque<HeadData> streams = parse_data_flags(flags.data);
  const RankInfo rank_info = rank_info_from_environment();
  if (const auto ranks = ranks_to_launch(c, flags, rank_info, bool(saved))) {
    saved.file = {};
    return launch(*ranks, argc, argv);
  }
  const torch::Device device = prepare_process(c, rank_info);
  usage_check(c.amp != "fp16", "--amp ", flags.amp == "auto" ? "auto: this GPU has no bf16; give off" : c.amp,
              flags.amp == "auto" ? "" : " is not possible here; give off, tf32, bf16 or fp64");
  flags.amp = c.amp;
  c.loader_threads = loader_threads(c.workers, rank_info.local_world * int(streams.size()), device.is_cuda());

  // ---- rendezvous, data, model
  // `ranks` is never destroyed, because after an error its destructor would wait for the other ranks.
  Ranks& ranks = *new Ranks(rank_info, device, c.timeout);
  lock_resumed_run(saved, ranks);
  std::vector<Task> tasks;
  std::string names;
  int64_t images = 0, largest = 0;
  for (HeadData& s : streams) {
    s.splits = load_data(c, s.data, saved.run, ranks);
    tasks.push_back({s.name, s.splits.train.classes});
    const int64_t n = s.splits.train.records.size();
    images += n;
    largest = std::max(largest, n);
    names += "-" + s.name;
  }
  saved.notes.push_back(turn_on_fused_norm(device, ranks));
  const ImageSize base = base_size(c);
  WeightsInfo info;
  info.model = c.model;
  info.height = base.height;
  info.width = base.width;
  torch::manual_seed(c.seed);
  MultiTaskTraining t{MultiTask(c.model, tasks), MultiTask(c.model, tasks), Optimizer("sgd", {}, false)};
  load_weights(t, flags, c, device, bool(saved), info, saved.notes);
  if (saved) {
    load_checkpoint(t, saved.file, saved.path);
    info.legacy_preproc = weights_info(saved.file, saved.path).legacy_preproc;
  }

  // ---- iterations
  // An epoch is one pass over the largest data set. The heads are trained in turn, one head per iteration.
  const Plan plan = plan_of(c, largest, rank_info.world, base, t.heads());
  if (saved)
    check_steps_per_epoch(saved.file, plan.per_epoch, saved.path, "./multitask --weights head_NAME.pth");
  saved.file = {};
  set_norm_momentum(*t.model, plan.norm_momentum);
  use_cudnn_benchmark(cudnn_benchmark_pays(c, plan));

  // ---- run folder and log
  const std::string folder = open_run_folder(saved, c.out, "multitask" + names, ranks);
  if (saved && ranks.first()) remove_temporary_files(folder);
  MultiTaskRun run{flags,
                   c,
                   t,
                   streams,
                   info,
                   plan,
                   ranks,
                   folder,
                   Log(concat(folder, "/log", rank_suffix(ranks), ".txt"), !ranks.first()),
                   evaluation_settings(c, info, plan.batch_per_rank(), device, ranks),
                   images,
                   fs::path(saved.path).filename() == "last.pth" ? t.iteration : -1};
  if (run.complete()) {
    ranks.shutdown();
    return 0;
  }
  run.log.line(concat("run ", folder, ": ", c.model, " with ", t.heads(), " heads, ", plan.iters,
                      " steps with a batch of ", c.bs, " images, ", plan.per_epoch, " per epoch, on ",
                      rank_info.world, " x ", device.str(), "; recipe ", c.recipe, ": ", c.optimizer, ", lr ",
                      c.lr, flags.freeze == "none" ? "" : ", frozen " + flags.freeze));
  for (int64_t k = 0; k < t.heads(); ++k) {
    HeadData& s = streams[k];
    s.batches.emplace(s.splits.train, batch_settings(c, plan), rank_info.rank, base, device, t.steps_of(k), k,
                      t.heads());
    run.log.line(concat("head ", s.name, ": ", s.splits.train.records.size(), " images for training (",
                        s.splits.train.name, "), ", s.splits.val.records.size(), " for evaluation, classes ",
                        listed(s.splits.train.classes)));
  }
  for (const auto& note : saved.notes) run.log.line(note);
  if (ranks.first()) {
    run.metrics.emplace(folder + "/metrics.csv");
    run.metrics->truncate_after(t.iteration);
  }
  if (!saved) run.save();  // so that the run can be resumed before its first checkpoint

  // ---- several ranks: broadcast of the weights, all-reduce of the gradients, SyncBN
  ranks.check_same_settings(common_settings(c, images, names, t.iteration));
  ranks.broadcast(t.tensors());
  GradientReducer reducer(ranks, trainable_parameters(*t.model));
  if (!ranks.alone()) use_sync_bn(*t.model, ranks.sync_bn_collectives());

  // ---- training loop
  catch_signals();
  int stop = 0;  // signal of any rank; all ranks stop after the same iteration
  UnreadSteps unread(ranks, c.timeout);
  const auto read_metrics = [&](bool all) {
    for (auto read = unread.next(all); read; read = unread.next(all)) {
      HeadData& s = streams[read->step % t.heads()];
      const StepMetrics& numbers = read->numbers;
      check(numbers.finite(), "the loss or the gradient of head ", s.name, " is not finite at step ",
            read->step, " (", to_string(numbers), ", lr ", read->lr, "; images ",
            image_names(read->batch, s.splits.train),
            "); continue from the last checkpoint with ./multitask --resume ", shell_word(folder),
            " and --lr below ", c.lr);
      s.means.add(numbers);
      run.log.progress(
          concat(read->step + 1, "/", plan.iters, "  ", s.name, ": loss ", rounded(numbers.total)), false);
    }
  };
  if (run.evaluation_due()) run.end_of_epoch();
  while (t.iteration < plan.iters && !(stop = int(ranks.max(stop_signal)))) {
    const int64_t i = t.iteration, head = t.next_head();
    HeadData& s = streams[head];
    const double lr = learning_rate(plan.schedule, i);
    const Batch batch = s.batches->next();
    ranks.reached(concat("step ", i));
    if (i < t.heads() && ranks.first())
      save_image(concat(folder, "/", s.name, "_train_batch.jpg"),
                 draw_batch(batch.images, labelled_boxes(batch.targets, tasks[head].classes)));
    const ImageSize size = plan.sizes.size_at(i / t.heads());
    const bool use_l1 = i >= plan.first_no_aug_iteration;
    const Losses losses =
        compute_gradients(t, head, batch, size, use_l1, c, info.legacy_preproc, ranks, reducer);
    t.step(lr, plan.ema);
    unread.add({i, batch, lr, size, use_l1, {}, {}}, losses);
    read_metrics(/*all=*/run.evaluation_due());
    if (run.evaluation_due()) run.end_of_epoch();
  }
  read_metrics(/*all=*/true);
  if (!stop) stop = int(ranks.max(stop_signal));
  if (stop && t.evaluated_at != plan.iters) {
    run.save(/*required=*/true);
    run.log.line(concat("stopped by ", strsignal(stop), " at step ", t.iteration,
                        "; resume with: ./multitask --resume ", shell_word(folder)));
  } else {
    run.log.line(concat("done: ", folder, "/head_NAME.pth"));
  }
  ranks.shutdown();
  return 0;
}

int main(int argc, char** argv) {
  end_program(run_rank([&] { return train(argc, argv); }));
}
