// Trains several detection heads on one backbone and neck, each on a data set of its own, one head a step in
// turn: what becomes of train.cpp when a researcher needs another model and another loop.
//   ./multitask --data helmets --data faces=/data/wider --model yolox-s --weights yolox_s.pth --epochs 100
//   ./eval --data helmets --weights runs/multitask-helmets-faces/head_helmets.pth
// Hyper-parameters without a flag here are those of ./train (config.hpp). Left out, to stay short: --accum,
// --amp fp16, --dtr, --bs auto, --cache, --freeze, best.pth, steps done again when memory runs out, and much
// of what a run says. They are in train.cpp, to be copied from there.
#include <cstring>
#include <deque>
#include <optional>
#include <set>

#include "base/threads.hpp"
#include "config.hpp"
#include "data/pictures.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "examples/yolox_multitask.hpp"
#include "formats.hpp"
#include "run/log.hpp"
#include "run/saving.hpp"
#include "step.hpp"

using namespace yolox;

struct MultiTaskConfig : Flags {
  std::vector<std::string> data = flag_list(
      data, "Data", "data", "[NAME=]DIR", "data set of a head, in any format of ./train; once for each head");
  int workers = flag(workers, "Data", "workers", 2, "N", "threads that read images, of each data set");
  std::string model = flag(model, "Model", "model", "", "NAME", model_names());
  std::string weights =
      flag(weights, "Model", "weights", "", "FILE", "start from these weights, .pth or .onnx");
  std::string resume = flag(resume, "Model", "resume", "", "RUN", "go on with a run: its folder");
  std::string size = flag(size, "Training", "size", "", "N|HxW", "input size; the model's when left out");
  int bs = flag(bs, "Training", "bs", 16, "N", "images in a step, of all ranks");
  int epochs = flag(epochs, "Training", "epochs", 300, "N", "passes over the largest of the data sets");
  int64_t max_iters =
      flag(max_iters, "Training", "max-iters", int64_t{0}, "N", "stop after so many steps; 0: never");
  double lr = flag(lr, "Training", "lr", 0.01 / 64, "X", "learning rate per image; times --bs");
  std::string amp = flag(amp, "Training", "amp", "off", "off|bf16|fp64", "mixed precision");
  int64_t seed = flag(seed, "Training", "seed", int64_t{0}, "N", "of weights, order and augmentation");
  std::string device = flag(device, "Training", "device", "auto", "cpu|cuda", "where to run");
  int gpus = flag(gpus, "Ranks", "gpus", 0, "N", "train on N GPUs of this machine, one rank each");
  int procs = flag(procs, "Ranks", "procs", 0, "N", "train on N ranks on the CPU");
  std::string out = flag(out, "Output", "out", "", "DIR", "run folder; runs/multitask-NAMES when left out");
  int eval_interval =
      flag(eval_interval, "Output", "eval-interval", 10, "N", "evaluate every N epochs; 0: never");
  double conf = flag(conf, "Output", "conf", 0.01, "P", "evaluation: lowest score");
};

// What belongs to a head beside its weights.
struct Stream {
  std::string name, data;  // as --data has them
  Splits splits;
  std::optional<Loader> loader;
  std::optional<DeviceLoader> batches;
  Means means;  // of its steps in this epoch
};

// --data "faces=/data/wider", or "/data/faces" for the same name
static std::deque<Stream> streams_of(const std::vector<std::string>& data) {
  std::deque<Stream> streams;
  std::set<std::string> names;
  for (const std::string& text : data) {
    const size_t equals = text.find('=');
    Stream& s = streams.emplace_back();
    s.data = equals == std::string::npos ? text : text.substr(equals + 1);
    s.name = equals == std::string::npos ? data_name(text) : text.substr(0, equals);
    usage_check(!s.data.empty() && !s.name.empty() && s.name.find_first_of("./,") == std::string::npos,
                "--data ", text, ": the head needs a name without dots, slashes and commas; give NAME=DIR");
    usage_check(names.insert(s.name).second, "--data ", text, ": another head is called ", s.name,
                " already; give NAME=DIR");
  }
  return streams;
}

// "iou 2.1 obj 1.3 cls 0.9 l1 0"
static std::string rounded_terms(const StepNumbers& n) {
  std::string text;
  for (const auto& [name, value] : n.terms)
    text += concat(text.empty() ? "" : " ", name, " ", rounded(value));
  return text;
}

// Gives the exit code.
static int train(int argc, char** argv) {
  ignore_hangup(), tell_signals();
  MultiTaskConfig flags;
  flags.parse(argc, argv, "trains several detection heads on one backbone");
  opencv_single_thread();
  std::vector<std::string> notes;
  std::string run = flags.resume;
  SavedRun saved;
  if (!run.empty()) saved = resume_settings(flags, run, notes);
  std::deque<Stream> streams = streams_of(flags.data);
  Config c;  // of ./train, with what the flags here say
  for (const auto& [name, value] : flags.values()) c.set(name, value);
  c.resume = "";
  fill_in(c), check_config(c);
  usage_check(c.bs > 0 && c.amp != "fp16",
              c.bs > 0 ? "--amp takes off, bf16 or fp64" : "--bs takes a number");
  const Place place = place_of_this_process();
  if (const auto ranks = to_launch(c, flags, place)) return launch(*ranks, argc, argv);
  const int world = place.world;
  const torch::Device device = device_of(c, place);
  WeightsInfo info;
  info.model = c.model;
  const ImageSize base = input_size(info, c.size);
  info.height = base.height, info.width = base.width;

  // ---- ranks, data, model. Ranks are not ended where something fails: that would wait for those that are
  // gone.
  Ranks& ranks = *new Ranks(place, device, c.timeout);
  std::vector<Task> tasks;
  std::string names;
  int64_t images = 0, largest = 0;
  for (Stream& s : streams) {
    s.splits = ranks.first_here_then_others(
        [&] { return load_splits(s.data, c.split, c.seed, c.official_quirks, "runs/.checks"); });
    tasks.push_back({s.name, s.splits.train.classes});
    const int64_t n = s.splits.train.records.size();
    images += n, largest = std::max(largest, n), names += "-" + s.name;
  }
  const auto heads = int64_t(streams.size());
  torch::manual_seed(c.seed);
  MultiTaskTraining t{MultiTask(c.model, tasks), MultiTask(c.model, tasks), Optimizer("sgd", {}, false)};
  for (YOLOX& detector : t.model->detectors)
    if (!c.weights.empty() && saved.path.empty())
      info.legacy_preproc = start_from(detector, c.weights, info, notes).legacy_preproc;
  const auto type = c.amp == "fp64" ? torch::kDouble : torch::kFloat;
  for (auto* m : {&t.model, &t.ema})
    for (YOLOX& detector : (*m)->detectors) move(detector, device, type), channels_last(*detector);
  for (int64_t k = 0; k < heads && !c.weights.empty() && saved.path.empty(); ++k)
    if (const int64_t looked = unfold_norms(t.model->detectors[k], streams[k].splits.train, base,
                                            info.legacy_preproc, c.workers))
      notes.push_back(concat("head ", streams[k].name, ": the file's batch norms are folded; they got the ",
                             "statistics of ", looked, " images"));
  load_state_dict(*t.ema, to_dict(state_dict(*t.model)), "the model");
  t.model->train(), t.ema->eval();
  t.optimizer = Optimizer(c.optimizer, parameter_groups(*t.model, c.weight_decay), /*fp16=*/false);
  const GradScaler scaler(false, device);

  // ---- run folder, steps
  if (ranks.first() && !saved.path.empty()) take_run_folder(run);
  if (ranks.first() && saved.path.empty()) run = make_run_folder(c.out, "multitask" + names);
  run = ranks.broadcast(run);
  Log log(concat(run, ranks.first() ? "/log" : concat("/log_rank", place.rank), ".txt"), !ranks.first());
  if (!saved.path.empty()) {
    load_checkpoint(t, saved.file, saved.path);
    if (ranks.first()) remove_torn_files(run);
    info.legacy_preproc = weights_info(saved.file, saved.path).legacy_preproc;
  }
  const int share = c.bs / world;
  const int64_t per_epoch = heads * ((largest + c.bs - 1) / c.bs), all = per_epoch * c.epochs,
                iters = c.max_iters ? std::min(c.max_iters, all) : all,
                plain_from = per_epoch * (c.epochs - c.no_aug_epochs);
  // An epoch has ended, or the run, and its evaluation has yet to come.
  const auto due = [&] {
    return t.ended != t.iteration && (t.iteration % per_epoch == 0 || t.iteration == iters);
  };
  usage_check(t.iteration < iters || due(), run, " is complete: it has done ", t.iteration, " of ", iters,
              " steps; more --epochs or --max-iters would go on");
  const Schedule schedule{c.lr * c.bs,     per_epoch, c.epochs,      c.warmup_epochs,
                          c.no_aug_epochs, 0,         c.min_lr_ratio};
  const MultiScale sizes = multi_scale(c, base, world);
  const AugmentConfig augment = augment_config(c);
  log.line(concat("run ", run, ": ", c.model, " with ", heads, " heads, ", iters, " steps of ", c.bs,
                  " images, ", per_epoch, " an epoch, on ", world, " x ", device.str()));
  for (int64_t k = 0; k < heads; ++k) {
    Stream& s = streams[k];
    const Dataset& data = s.splits.train;
    // A step in `heads` is this head's: its images begin where its own steps are.
    const auto mosaic_at = [=, bs = c.bs](int64_t position) {
      return position / bs * heads + k < plain_from;
    };
    s.loader.emplace(training_items(data, c.seed + k, augment, /*augmented=*/true, mosaic_at),
                     t.steps_of(k) * c.bs + place.rank * share, iters * c.bs, share,
                     cv::Size(base.width, base.height), c.workers, device.is_cuda(), /*stride=*/c.bs);
    s.batches.emplace(*s.loader, device);
    log.line(concat("head ", s.name, ": ", data.records.size(), " images to train (", data.name, "), ",
                    s.splits.val.records.size(), " to evaluate, classes ", listed(data.classes)));
  }
  for (const auto& note : notes) log.line(note);
  std::optional<Metrics> metrics;
  if (ranks.first()) {
    metrics.emplace(run + "/metrics.csv");
    metrics->cut(t.iteration);
  }
  int64_t in_last = saved.path.empty() ? -1 : t.iteration;
  const auto save = [&](bool must = false) {
    const auto write = [&] {
      for (int64_t k = 0; k < heads; ++k)
        write_pth(concat(run, "/head_", streams[k].name, ".pth"), head_checkpoint(t.ema, k, info));
      save_last(run, checkpoint(t, info, settings_of(flags), images), t.iteration, in_last, c.keep);
      in_last = t.iteration;
    };
    if (ranks.first()) try_to_save(write, log, must);
  };
  if (saved.path.empty()) save();  // so that there is something to go on from

  // ---- several ranks: the gradients of all, the statistics of the whole batch
  Settings common{{"images", concat(images)}, {"heads", names}, {"steps done", concat(t.iteration)}};
  for (const auto& [name, value] : c.values()) common.emplace_back("--" + name, value);
  ranks.must_agree(common);
  ranks.broadcast(t.tensors());
  Reduction reduction(ranks, t.model->parameters(), torch::kFloat);
  StepSettings step{device.type(), type_of(c.amp)};
  EvalSettings eval{base,   c.conf, c.nms,      share, c.workers, info.legacy_preproc,
                    device, "",     place.rank, world};
  if (!ranks.alone()) {
    step.ranks = world;
    step.sum = [&](Tensor& x) { ranks.sum(x); };
    step.before_backward = [&](const std::vector<Tensor>& outputs) { reduction.before_backward(outputs); };
    use_sync_bn(*t.model, step.sum);
    eval.gather = [&](const std::vector<double>& mine) { return ranks.gather(mine); };
  }

  // ---- the end of an epoch, or of the run: a line for each head, evaluation, files. Cut off by a signal, it
  // leaves `ended` behind, and is done again when the run goes on.
  const auto end_of_epoch = [&] {
    const int64_t epoch = (t.iteration - 1) / per_epoch + 1;
    const bool evaluated = c.eval_interval > 0 && (epoch % c.eval_interval == 0 || t.iteration == iters);
    Metrics::Row row{{"epoch", double(epoch)}, {"iteration", double(t.iteration)}};
    if (evaluated) save();  // that may be cut off
    for (int64_t k = 0; k < heads; ++k) {
      Stream& s = streams[k];
      const bool trained = s.means.steps > 0;  // since the last time, or since the run goes on
      const StepNumbers m = s.means.take();
      double ap = std::nan("");
      if (evaluated) {
        ranks.at(concat("the evaluation of ", s.name, " after step ", t.iteration));
        if (ranks.first()) eval.pictures = concat(run, "/", s.name, "_val_batch");
        const auto e =
            evaluate(t.ema->detectors[k], s.splits.val, eval, [&](int64_t) { ranks.still_at_work(); });
        if (!e.complete) return;
        ap = e.result.AP;
      }
      std::string line = concat("epoch ", epoch, "/", c.epochs, "  ", s.name, ":");
      if (trained)
        line += concat(" loss ", rounded(m.total), " (", rounded_terms(m), "), ", rounded(m.per_object()),
                       " positives per object");
      if (evaluated) line += concat(trained ? "," : "", " AP ", ap);
      log.line(line);
      for (const auto* data : {&s.splits.train, &s.splits.val})
        data->problems->write(concat(run, "/problems_", s.name, data == &s.splits.val ? "_val" : "",
                                     ranks.first() ? "" : concat("_rank", place.rank), ".txt"));
      row.insert(row.end(), {{s.name + "_loss", m.total}, {s.name + "_AP", ap}});
    }
    if (metrics) metrics->row(row);
    t.ended = t.iteration;
    save(/*must=*/t.iteration == iters);
  };

  // ---- the loop
  catch_signals();
  int stop = 0;  // the signal that ends all ranks at the same step
  if (due()) end_of_epoch();
  while (t.iteration < iters && !(stop = int(ranks.max(stop_signal)))) {
    const int64_t i = t.iteration, head = t.next_head();
    Stream& s = streams[head];
    const double lr = learning_rate(schedule, i);
    const Batch batch = s.batches->next();
    ranks.at(concat("step ", i));
    if (i < heads && ranks.first())
      save_picture(concat(run, "/", s.name, "_train_batch.jpg"),
                   draw_batch(batch.images, drawn(batch.targets, tasks[head].classes)));
    Tensor input = preprocess(batch.images, info.legacy_preproc).to(type);
    Targets targets = batch.targets;
    resize_batch(input, targets, sizes.at(i / heads));
    step.use_l1 = i >= plain_from;
    const Losses losses = compute_gradients([&](const Tensor& x) { return t.model->detectors[head](x); },
                                            input, targets, /*parts=*/1, t.optimizer, scaler, step);
    const Tensor norm = clip_gradients(gradients(t.optimizer.groups), c.clip, [&](const Tensor& n) {
      if (!ranks.same_machine()) ranks.broadcast({n});
    });
    const StepNumbers numbers = numbers_of(losses, norm, ranks.sum({double(targets.total())})[0]);
    check(numbers.finite(), "the loss of ", s.name, " or its gradient is not finite at step ", i, " (",
          to_string(numbers), ", lr ", lr, "; images ", names_in(batch, s.splits.train), "); --resume ", run,
          " with less --lr");
    t.step(lr, c.ema);
    s.means.add(numbers);
    log.progress(concat(t.iteration, "/", iters, "  ", s.name, ": loss ", rounded(numbers.total)), false);
    if (due()) end_of_epoch();
  }
  if (!stop) stop = int(ranks.max(stop_signal));
  if (stop && t.ended != iters)
    save(/*must=*/true),
        log.line(concat("stopped by ", strsignal(stop), "; go on with: ./multitask --resume ", run));
  else
    log.line(concat("done: ", run, "/head_NAME.pth"));
  ranks.leave();
  return 0;
}

int main(int argc, char** argv) {
  share_cores(argv);
  return run_rank([&] { return train(argc, argv); });
}
