// Trains YOLOX on one process: settings, set-up, then the loop, top to bottom.
//   ./train --data shapes --model yolox-nano --size 192 --epochs 10
//   ./train --data DIR --model yolox-s --weights yolox_s.pth --bs 16
#include <iomanip>
#include <iostream>
#include <map>
#include <numeric>

#include "evaluate.hpp"
#include "flags.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "pictures.hpp"
#include "run.hpp"
#include "training.hpp"

using namespace yolox;

// Every hyper-parameter: its default, and one line about it. Recipe -1: what the official recipe has for the
// model.
struct Config : Flags {
  std::string data = flag(data, "Data", "data", "", "DIR|FILE|shapes",
                          "COCO, VOC or YOLO folder, a JSON or YAML file, or shapes (drawn)");
  std::string split =
      flag(split, "Data", "split", "", "NAME", "split to evaluate on, such as test; val when left out");
  int workers = flag(workers, "Data", "workers", 2, "N", "threads that read and augment images");
  std::string cache = flag(cache, "Data", "cache", "none", "none|ram|disk",
                           "keep decoded images at the input size in memory or on disk");
  bool strict = flag(strict, "Data", "strict", false, "",
                     "stop when an image or label is bad, instead of leaving it out");

  std::string model = flag(model, "Model", "model", "", "NAME", "yolox-{nano,tiny,s,m,l,x}");
  std::string weights =
      flag(weights, "Model", "weights", "", "FILE.pth", "start from these weights, ours or official");
  std::string resume = flag_alone(resume, "Model", "resume", "newest", "RUN",
                                  "go on with a run: its folder; the newest one when left out");
  std::string preproc = flag(preproc, "Model", "preproc", "auto", "auto|bgr|legacy",
                             "pixels: as --weights says, BGR 0..255, or YOLOX 0.1.0's RGB mean/std");

  std::string size = flag(size, "Training", "size", "", "N|HxW",
                          "input size in pixels; the model's (416 or 640) when left out");
  int bs = flag(bs, "Training", "bs", 16, "N", "images in a step");
  int epochs = flag(epochs, "Training", "epochs", 300, "N", "passes over the data");
  int64_t max_iters =
      flag(max_iters, "Training", "max-iters", int64_t{0}, "N", "stop after so many steps; 0: never");
  std::string optimizer = flag(optimizer, "Training", "optimizer", "sgd", "NAME", "sgd, adam or adamw");
  double lr = flag(lr, "Training", "lr", 0.01 / 64, "X", "learning rate per image; times --bs");
  double min_lr_ratio = flag(min_lr_ratio, "Training", "min-lr-ratio", 0.05, "X",
                             "floor of the learning rate, in parts of the highest");
  int warmup_epochs = flag(warmup_epochs, "Training", "warmup-epochs", 5, "N",
                           "the learning rate rises for so long; fewer in runs of less than 100");
  int no_aug_epochs =
      flag(no_aug_epochs, "Training", "no-aug-epochs", 15, "N",
           "last epochs: no mosaic or mixup, L1 loss, lowest lr; fewer in runs of less than 150");
  double weight_decay = flag(weight_decay, "Training", "weight-decay", 5e-4, "X", "of convolution weights");
  int accum = flag(accum, "Training", "accum", 1, "N", "parts that a step is computed in, to save memory");
  std::string freeze = flag(freeze, "Training", "freeze", "", "PART,...",
                            "what is not trained: backbone, neck, or how its names begin");
  double clip = flag(clip, "Training", "clip", 10.0, "X", "largest norm of the gradient; 0: no limit");
  double ema =
      flag(ema, "Training", "ema", 0.9998, "X", "decay of the moving average of the weights; 0: none");
  std::string amp = flag(amp, "Training", "amp", "off", "off|fp16|bf16", "mixed precision");
  bool multiscale = flag(multiscale, "Training", "multiscale", true, "", "another input size every 10 steps");
  int64_t seed =
      flag(seed, "Training", "seed", int64_t{0}, "N", "of initial weights, order and augmentation");
  bool deterministic =
      flag(deterministic, "Training", "deterministic", false, "", "the same bytes each time, more slowly");
  std::string device = flag(device, "Training", "device", "auto", "cpu|cuda", "where to run");

  std::string aug = flag(aug, "Augmentation", "aug", "default", "default|none", "none: letterbox alone");
  double mosaic_prob =
      flag(mosaic_prob, "Augmentation", "mosaic-prob", -1.0, "P", "four images in one (recipe: 1; nano 0.5)");
  double mosaic_scale_lo = flag(mosaic_scale_lo, "Augmentation", "mosaic-scale-lo", -1.0, "X",
                                "smallest zoom of a mosaic (recipe: 0.1; nano, tiny 0.5)");
  double mosaic_scale_hi = flag(mosaic_scale_hi, "Augmentation", "mosaic-scale-hi", -1.0, "X",
                                "largest zoom of a mosaic (recipe: 2; nano, tiny 1.5)");
  double degrees = flag(degrees, "Augmentation", "degrees", 10.0, "X", "rotation of a mosaic, +-");
  double translate = flag(translate, "Augmentation", "translate", 0.1, "X",
                          "shift of a mosaic in parts of the input size, +-");
  double shear = flag(shear, "Augmentation", "shear", 2.0, "X", "shear of a mosaic in degrees, +-");
  double mixup_prob = flag(mixup_prob, "Augmentation", "mixup-prob", -1.0, "P",
                           "another image mixed into a mosaic (recipe: 1; nano, tiny 0)");
  double mixup_scale_lo =
      flag(mixup_scale_lo, "Augmentation", "mixup-scale-lo", 0.5, "X", "smallest zoom of the mixed-in image");
  double mixup_scale_hi =
      flag(mixup_scale_hi, "Augmentation", "mixup-scale-hi", 1.5, "X", "largest zoom of the mixed-in image");
  double hsv_prob = flag(hsv_prob, "Augmentation", "hsv-prob", 1.0, "P", "colour jitter");
  double hsv_h = flag(hsv_h, "Augmentation", "hsv-h", 5.0, "X", "hue, +- units of 2 degrees");
  double hsv_s = flag(hsv_s, "Augmentation", "hsv-s", 30.0, "X", "saturation, +- levels of 256");
  double hsv_v = flag(hsv_v, "Augmentation", "hsv-v", 30.0, "X", "brightness, +- levels of 256");
  double flip_prob = flag(flip_prob, "Augmentation", "flip-prob", 0.5, "P", "mirrored left to right");
  bool official_quirks = flag(official_quirks, "Augmentation", "official-quirks", false, "",
                              "augment as official YOLOX does, its oddities included (augment.hpp)");

  std::string out = flag(out, "Output", "out", "", "DIR", "run folder; runs/MODEL-DATA when left out");
  int eval_interval = flag(eval_interval, "Output", "eval-interval", 10, "N",
                           "evaluate every N epochs, and every one of the last; 0: never");
  int patience =
      flag(patience, "Output", "patience", 0, "N", "stop after N evaluations without a better AP; 0: never");
  double conf = flag(conf, "Output", "conf", 0.01, "P", "evaluation: lowest score");
  double nms = flag(nms, "Output", "nms", 0.65, "IOU",
                    "evaluation: overlap above which the weaker box of a class goes");
};

static void check_config(const Config& c) {
  const auto at_least = [](const char* name, double value, double least) {
    usage_check(value >= least, "--", name, " must be at least ", least, ", got ", value);
  };
  const auto in = [](const char* name, double value, double lo, double hi) {
    usage_check(value >= lo && value <= hi, "--", name, " must be in ", lo, "..", hi, ", got ", value);
  };
  usage_check(!c.data.empty(), "--data is needed: a folder, a COCO JSON or YOLO data.yaml file, or shapes");
  usage_check(!c.model.empty(),
              "--model is needed: yolox-nano, yolox-tiny, yolox-s, yolox-m, yolox-l or yolox-x");
  model_size(c.model);
  if (!c.size.empty()) parse_size(c.size);
  at_least("bs", c.bs, 1), at_least("epochs", c.epochs, 1), in("workers", c.workers, 1, 256),
      at_least("max-iters", c.max_iters, 0);
  usage_check(c.accum >= 1 && c.accum <= c.bs, "--accum must be in 1..", c.bs,
              ", the images of a step (--bs), got ", c.accum);
  at_least("patience", c.patience, 0);
  at_least("lr", c.lr, 0), at_least("warmup-epochs", c.warmup_epochs, 0),
      at_least("no-aug-epochs", c.no_aug_epochs, 0);
  at_least("weight-decay", c.weight_decay, 0), at_least("clip", c.clip, 0),
      at_least("eval-interval", c.eval_interval, 0), at_least("seed", c.seed, 0);
  usage_check(c.warmup_epochs + c.no_aug_epochs <= c.epochs, "--warmup-epochs ", c.warmup_epochs,
              " and --no-aug-epochs ", c.no_aug_epochs, " do not fit into --epochs ", c.epochs);
  in("min-lr-ratio", c.min_lr_ratio, 0, 1), in("ema", c.ema, 0, 0.999999), in("conf", c.conf, 0, 1),
      in("nms", c.nms, 1e-6, 1);
  usage_check(c.amp == "off" || c.amp == "fp16" || c.amp == "bf16", "--amp takes off, fp16 or bf16, got '",
              c.amp, "'");
  usage_check(c.cache == "none" || c.cache == "ram" || c.cache == "disk",
              "--cache takes none, ram or disk, got '", c.cache, "'");
  usage_check(c.aug == "default" || c.aug == "none", "--aug takes default or none, got '", c.aug, "'");
  usage_check(c.optimizer == "sgd" || c.optimizer == "adam" || c.optimizer == "adamw",
              "--optimizer takes sgd, adam or adamw, got '", c.optimizer, "'");
  usage_check(c.preproc == "auto" || c.preproc == "bgr" || c.preproc == "legacy",
              "--preproc takes auto, bgr or legacy, got '", c.preproc, "'");
}

// The official 5 epochs of warm-up and 15 without augmentation are for 300; a short run gets its share of
// them.
static void set_phases(Config& c) {
  if (!c.resume.empty()) return;
  if (!c.was_given("warmup-epochs"))
    c.warmup_epochs = std::min(c.warmup_epochs, std::max(c.epochs / 20, c.epochs < 3 ? 0 : 1));
  if (!c.was_given("no-aug-epochs")) c.no_aug_epochs = std::min(c.no_aug_epochs, c.epochs / 10);
}

static AugmentConfig augment_config(const Config& c) {
  const bool nano = c.model == "yolox-nano", small = nano || c.model == "yolox-tiny";
  const auto recipe = [](double given, double official) { return given == -1 ? official : given; };
  AugmentConfig a;
  a.mosaic_prob = recipe(c.mosaic_prob, nano ? 0.5 : 1);
  a.mosaic_scale_lo = recipe(c.mosaic_scale_lo, small ? 0.5 : 0.1),
  a.mosaic_scale_hi = recipe(c.mosaic_scale_hi, small ? 1.5 : 2);
  a.mixup_prob = recipe(c.mixup_prob, small ? 0 : 1);
  a.degrees = c.degrees, a.translate = c.translate, a.shear = c.shear;
  a.mixup_scale_lo = c.mixup_scale_lo, a.mixup_scale_hi = c.mixup_scale_hi;
  a.hsv_prob = c.hsv_prob, a.hsv_h = c.hsv_h, a.hsv_s = c.hsv_s, a.hsv_v = c.hsv_v, a.flip_prob = c.flip_prob;
  a.official_quirks = c.official_quirks;
  try {
    check_augment_config(a);
  } catch (const std::exception& e) {
    throw UsageError(e.what());
  }
  return a;
}

// Input size of step i: the same for ten steps, drawn from (seed, i / 10); five steps of 32 pixels up and
// down, for nano and tiny three down and seven up. The first ten steps have the size asked for.
static ImageSize multiscale_size(const Config& c, ImageSize base, int64_t i) {
  if (!c.multiscale || i < 10) return base;
  const bool small = c.model == "yolox-nano" || c.model == "yolox-tiny";
  Rng rng(c.seed, ~uint64_t{0}, i / 10);
  // A batch norm needs more than one value a channel: no 32-pixel image on its own.
  const int k = int(rng.randint(std::max(c.bs == 1 ? 2 : 1, base.height / 32 - (small ? 3 : 5)),
                                base.height / 32 + (small ? 7 : 5)));
  return {32 * k, 32 * std::max(1, int(double(k) * base.width / base.height))};
}

// Images and boxes of a batch to another input size.
static void resize_batch(Tensor& images, Targets& targets, ImageSize size) {
  const int64_t h = images.size(2), w = images.size(3);
  if (h == size.height && w == size.width) return;
  images = torch::upsample_bilinear2d(images, std::vector<int64_t>{size.height, size.width},
                                      /*align_corners=*/false);
  const double sx = double(size.width) / w, sy = double(size.height) / h;
  const Tensor& b = targets.boxes;
  targets.boxes =
      torch::stack({b.select(2, 0) * sx, b.select(2, 1) * sy, b.select(2, 2) * sx, b.select(2, 3) * sy}, 2);
}

// "runs/x/" -> "/home/me/runs/x"
static fs::path without_slash(const std::string& text) {
  const fs::path path = fs::absolute(text).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

// What a run is named after: the last part of --data.
static std::string data_name(const std::string& data) {
  return without_slash(data.substr(0, data.find(','))).stem().string();
}

// The same bytes each time. On a GPU a few operations have no such version; torch warns of them.
static void make_deterministic() {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicCuDNN(true);
}

// The settings of the run that config.resume names, unless given again; gives its checkpoint.
static c10::IValue restore_settings(Config& config, std::string& run, std::vector<std::string>& notes) {
  usage_check(!config.was_given("weights"),
              "--weights and --resume exclude each other: a resumed run has its weights");
  usage_check(!config.was_given("out"),
              "--out and --resume exclude each other: a resumed run stays in its folder");
  run = config.resume == "newest" ? newest_run() : config.resume;
  usage_check(!run.empty(), "--resume: there is no run with a last.pth below runs/; give its folder");
  const auto saved = read_pth(run + "/last.pth");
  const auto values = config.values();
  const std::map<std::string, std::string> now(values.begin(), values.end());
  for (const auto& [name, value] : saved_settings(saved, run + "/last.pth")) {
    if (name == "resume" || name == "out" || name == "weights") continue;
    if (!config.was_given(name))
      config.set(name, value);
    else if (now.at(name) != value)
      notes.push_back(concat("--", name, " ", now.at(name), " instead of the run's ", value));
  }
  return saved;
}

// Weights of a file into a new model. Gives what the file says of them.
static WeightsInfo start_from(YOLOX& model, const std::string& path, const Config& config,
                              const Dataset& data, std::vector<std::string>& notes) {
  const auto file = read_pth(path);
  const auto weights = find_weights(file, path);
  const std::string found = model_of_weights(weights);
  check(found.empty() || found == config.model, path, " holds weights of ", found, "; use --model ", found,
        " or other weights");
  notes.push_back(to_string(load_state_dict(*model, weights, path)));
  const auto info = weights_info(file, path);
  if (info.classes != data.classes && info.classes.size() == data.classes.size())
    notes.push_back(
        "the weights were trained on as many classes of other names: their class head is kept as a start");
  return info;
}

// Boxes of each class, the ten most frequent by name, and what is missing.
static void tell_classes(Log& log, const Splits& splits) {
  const Dataset &train = splits.train, &val = splits.val;
  const auto counts = class_counts(train), in_val = class_counts(val);
  std::vector<std::string> frequent;
  for (const size_t c : by_count(counts)) frequent.push_back(concat(train.classes[c], " ", counts[c]));
  log.line(concat("boxes   ", std::accumulate(counts.begin(), counts.end(), int64_t(0)),
                  " to train: ", listed(frequent, 10)));
  const auto absent = [&](const std::vector<int64_t>& of, const char* split) {
    std::vector<std::string> names;
    for (size_t c = 0; c < of.size(); ++c)
      if (of[c] == 0) names.push_back(train.classes[c]);
    if (!names.empty())
      log.line(concat("note: ", names.size(), names.size() == 1 ? " class has" : " classes have",
                      " no box to ", split, ": ", listed(names, 10)));
  };
  absent(counts, "train on");
  if (!splits.same) absent(in_val, "evaluate on");
}

// Means over the steps since the last look and over those of an epoch. Adding does not wait for the device,
// looking does.
struct Meter {
  enum { kTotal, kIou, kObj, kCls, kL1, kPositives, kNorm, kObjects, kCount };
  Tensor recent, epoch = torch::zeros({kCount});
  int64_t recent_steps = 0, epoch_steps = 0;

  explicit Meter(torch::Device device) : recent(torch::zeros({kCount}, device)) {}
  void add(const Losses& l, const Tensor& norm, int64_t objects) {
    recent += torch::stack({l.total.detach(), l.iou.detach(), l.obj.detach(), l.cls.detach(), l.l1.detach(),
                            l.num_fg.to(torch::kFloat), norm.to(torch::kFloat),
                            torch::full({}, double(objects), recent.options())});
    ++recent_steps;
  }
  std::vector<double> look() {
    const Tensor taken = recent.cpu();
    const auto means = mean(taken, recent_steps);
    epoch += taken, epoch_steps += recent_steps;
    recent.zero_(), recent_steps = 0;
    return means;
  }
  std::vector<double> end_epoch() {
    const auto means = mean(epoch, epoch_steps);
    epoch.zero_(), epoch_steps = 0;
    return means;
  }

 private:
  static std::vector<double> mean(const Tensor& sums, int64_t steps) {
    std::vector<double> m;
    for (int k = 0; k < kCount; ++k) m.push_back(sums[k].item<double>() / steps);
    m[kPositives] /= std::max(m[kObjects], 1e-9);  // positives per object
    return m;
  }
};

static void train(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "trains YOLOX");
  opencv_single_thread();
  BlobCache::sweep(ram_place());
  std::string run;                 // its folder
  std::vector<std::string> notes;  // for the log
  c10::IValue saved;               // the checkpoint to go on from
  if (!config.resume.empty()) saved = restore_settings(config, run, notes);
  set_phases(config);
  check_config(config);
  const torch::Device device = parse_device(config.device);
  if (config.deterministic) make_deterministic();
  WeightsInfo info, known;  // of this run; of the file that it starts from
  info.model = config.model;
  const ImageSize base = input_size(info, config.size);
  const cv::Size input(base.width, base.height);
  const double ahead = 3.0 * config.bs * base.height * base.width * 3,
               memory = double(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  check(ahead < memory / 2, "--bs ", config.bs, " is too large: the images of three batches alone take ",
        short_bytes(ahead), " of the machine's ", short_bytes(memory));
  const AugmentConfig augment = augment_config(config);

  // ---- data
  const std::string kept = without_slash(!run.empty()         ? run
                                         : config.out.empty() ? "runs/x"
                                                              : config.out)
                               .parent_path() /
                           ".checks";  // what is known of the images: beside the runs
  Splits splits = load_splits(config.data, config.split, config.seed, config.official_quirks, kept);
  splits.train.strict = config.strict;
  const Dataset &data = splits.train, &val = splits.val;
  const int64_t n = data.records.size(), per_epoch = (n + config.bs - 1) / config.bs;
  const int64_t iters =
      config.max_iters ? std::min(config.max_iters, per_epoch * config.epochs) : per_epoch * config.epochs;
  for (const Dataset* d : {&data, &val}) {
    const auto problems = d->problems->lines();
    if (config.strict && !problems.empty()) {
      std::string first;
      for (size_t i = 0; i < std::min<size_t>(problems.size(), 20); ++i) first += "\n  " + problems[i];
      fail(d->name, " has ", problems.size(), problems.size() == 1 ? " problem" : " problems",
           "; mend the data or leave out --strict:", first, problems.size() > 20 ? "\n  ..." : "");
    }
  }

  // ---- model, weights, optimizer
  torch::manual_seed(config.seed);
  YOLOX model(config.model, int(data.classes.size()));
  info.classes = data.classes, info.height = base.height, info.width = base.width;
  info.legacy_preproc = config.preproc == "legacy";
  if (run.empty() && !config.weights.empty()) known = start_from(model, config.weights, config, data, notes);
  if (!run.empty()) {
    known = weights_info(saved, run + "/last.pth");
    check(known.model == config.model, run, " is a run of ", known.model, "; --model ", config.model,
          " cannot go on with it: start from its last.pth with --weights instead");
    check(known.classes == data.classes, run, " was trained on other classes than ", data.name,
          " has; start from its last.pth with --weights instead");
  }
  if (config.preproc == "auto") info.legacy_preproc = known.legacy_preproc;
  model->to(device);
  channels_last(*model);
  const std::string unknown = freeze(*model, split_list(config.freeze));
  usage_check(unknown.empty(), "--freeze ", unknown,
              ": nothing in the model is named so; backbone, neck, or such as head.stems");
  const bool fp16 = config.amp == "fp16";
  const auto amp = fp16 ? torch::kHalf : config.amp == "bf16" ? torch::kBFloat16 : torch::kFloat;
  Training t{model, config.ema > 0 ? copy_of(model, config.model, device) : YOLOX(nullptr),
             Optimizer(config.optimizer, parameter_groups(*model, config.weight_decay), fp16),
             GradScaler(fp16, device)};
  int64_t trained = 0;
  for (const auto& group : t.optimizer.groups) trained += group.params.size();
  usage_check(trained > 0, "--freeze ", config.freeze, " leaves nothing to train");
  if (!run.empty()) {
    load_checkpoint(t, saved, per_epoch, run + "/last.pth");
    check(t.iteration < iters, run, " is complete: it has done ", t.iteration, " of ", iters,
          " steps; more --epochs or --max-iters would go on");
  }
  const int64_t first = t.iteration;
  const Schedule schedule{config.lr * config.bs, per_epoch, config.epochs,      config.warmup_epochs,
                          config.no_aug_epochs,  0,         config.min_lr_ratio};

  // ---- run folder
  if (run.empty()) run = make_run_folder(config.out, config.model + "-" + data_name(config.data));
  Log log(run + "/log.txt");
  Metrics metrics(run + "/metrics.csv",
                  {"epoch", "iteration", "loss", "iou", "obj", "cls", "l1", "positives_per_object", "lr",
                   "images_per_second", "waiting_share", "grad_norm", "AP", "AP50"});
  write_json(run + "/config.json", [&](JsonWriter& w) {
    w.StartObject();
    for (const auto& [name, value] : config.values()) w.Key(name.c_str()), w.String(value.c_str());
    w.Key("torch"), w.String(TORCH_VERSION), w.Key("device"), w.String(device.str().c_str());
    w.EndObject();
  });
  log.line(concat(first ? "resuming " : "run ", run, first ? concat(" at step ", first) : ""));
  log.line(concat("data    ", n, " images to train (", data.name, "), ", val.records.size(), " to evaluate (",
                  splits.same ? "the same: there is one split only" : val.name, "), ", data.classes.size(),
                  " classes"));
  log.line(concat("model   ", config.model, " ", base.height, "x", base.width,
                  config.multiscale ? " multi-scale" : "", " on ", device.str(), ", ",
                  config.amp == "off" ? "float32" : config.amp));
  log.line(concat("steps   ", iters, " of ", config.bs, " images, ", per_epoch, " an epoch; warm-up ",
                  config.warmup_epochs, " epochs, plain last ", config.no_aug_epochs, "; ", config.optimizer,
                  " lr ", schedule.lr, " (", config.lr, " per image)"));
  for (const auto& note : notes) log.line(note);
  auto tell_problems = [&, told = std::map<std::string, int64_t>()]() mutable {
    for (const Dataset* d : {&data, &val}) {
      for (const auto& [kind, count] : d->problems->summary())
        if (std::exchange(told[d->name + kind], count) != count)
          log.line(concat("note: ", d->name, ": ", kind, ": ", count, " (listed in ", run,
                          d == &data ? "/problems.txt)" : "/problems_val.txt)"));
      d->problems->write(run + (d == &data ? "/problems.txt" : "/problems_val.txt"));
      if (splits.same) break;
    }
  };
  tell_problems();
  tell_classes(log, splits);
  if (!first) save_picture(run + "/labels.jpg", draw_labels(data));
  // A full disk does not end a run: it goes on and tries again, and fails only if its very end cannot be
  // saved.
  const auto save = [&](const std::string& file, double ap) {
    try {
      write_pth(run + "/" + file, checkpoint(t, info, config.values(), per_epoch, ap));
      return true;
    } catch (const std::exception& e) {
      if (t.iteration == iters && file == "last.pth") throw;
      log.line(concat("warning: ", e.what(), "; the next epoch tries again"));
      return false;
    }
  };

  // ---- the loop. Epochs are counted in steps; the stream of images is endless and runs through them.
  const int64_t plain_from = per_epoch * std::max<int64_t>(0, config.epochs - config.no_aug_epochs -
                                                                  (config.official_quirks ? 1 : 0));
  const auto mosaic_at = [&](int64_t position) { return position / config.bs < plain_from; };
  if (config.cache != "none") {
    log.line(concat("cache   ", config.cache, ": decoding the images"));
    const auto cached = use_cache(
        splits.train, config.cache == "ram" ? ram_place() : disk_place(), input, config.official_quirks,
        config.workers, [&](size_t done, size_t of) { log.progress(concat(done, "/", of), done == of); });
    log.line("cache   " + cached);
  }
  Loader loader(training_items(data, config.seed, augment, config.aug == "default", mosaic_at),
                first * config.bs, iters * config.bs, config.bs, input, config.workers, device.is_cuda());
  DeviceLoader batches(loader, device);
  const EvalSettings eval_settings{base,           config.conf,         config.nms, config.bs,
                                   config.workers, info.legacy_preproc, device};
  training_mode(*model);
  log.line("  epoch      iter  total   iou   obj   cls   l1 pos      lr  img/s wait  mem   left");
  const double nan = std::nan("");
  double best = t.best_ap;
  Meter meter(device);
  double waited = 0, looked_at = now(), rate = 0;
  while (t.iteration < iters) {
    const int64_t i = t.iteration, epoch = i / per_epoch;
    const double lr = learning_rate(schedule, i), asked = now();
    const Batch batch = batches.next();
    waited += now() - asked;
    if (i < 3) save_picture(concat(run, "/train_batch", i, ".jpg"), draw_batch(batch, data.classes));
    Tensor images = preprocess(batch.images, info.legacy_preproc);
    Targets targets = batch.targets;
    resize_batch(images, targets, multiscale_size(config, base, i));

    // Each part is divided by its own positives: weighted by them, the parts add up to the gradient of the
    // batch.
    t.optimizer.zero_grad();
    std::vector<Losses> parts;
    const double guess = double(std::max<int64_t>(1, targets.total()));  // keeps the weights near 1, for fp16
    for (int64_t part = 0; part < config.accum; ++part) {
      const int64_t from = config.bs * part / config.accum, to = config.bs * (part + 1) / config.accum;
      Predictions predictions;
      {
        const AutocastGuard autocast(device.type(), amp);
        predictions = model(images.slice(0, from, to));
      }
      Losses losses = yolox_loss(predictions, images.size(2), images.size(3), targets.slice(from, to),
                                 /*use_l1=*/i >= plain_from);
      const Tensor loss =
          config.accum == 1 ? losses.total : losses.total * losses.num_fg.clamp_min(1) / guess;
      t.scaler.scaled(loss).backward();
      for (Tensor* l : {&losses.total, &losses.iou, &losses.obj, &losses.cls, &losses.l1}) *l = l->detach();
      parts.push_back(losses);
    }
    const Losses losses = join(parts);
    const auto grads = gradients(t.optimizer.groups);
    const bool finite = t.scaler.unscale(grads);
    if (config.accum > 1)
      scale_gradients(grads, losses.num_fg.clamp_min(1).to(torch::kFloat).reciprocal() * guess);
    const Tensor norm = clip_gradients(grads, config.clip);
    if (finite) {
      t.optimizer.step(lr);
      if (config.ema > 0) ema_update(*t.ema, *model, ema_decay(config.ema, ++t.ema_updates));
    } else {
      ++t.skipped;
    }
    t.scaler.update();
    ++t.iteration;
    meter.add(losses, finite ? norm : torch::zeros_like(norm), targets.total());

    // ---- telling: reads the losses back, so not at every step of a fast GPU
    const bool epoch_ends = t.iteration % per_epoch == 0, last = t.iteration == iters;
    if (i == first || epoch_ends || last || now() - looked_at > 1) {
      const double steps = double(meter.recent_steps), seconds = now() - looked_at;
      auto m = meter.look();
      check(std::isfinite(m[0]) && std::isfinite(m[6]), std::isfinite(m[0]) ? "the gradient" : "the loss",
            " is not finite at step ", i, " (iou ", m[1], ", obj ", m[2], ", cls ", m[3], ", l1 ", m[4],
            ") with lr ", lr,
            fs::exists(run + "/last.pth")
                ? concat("; ./train --resume ", run, " --lr with a lower value goes on")
                : "; start again with a lower --lr");
      const double speed = steps * config.bs / seconds;
      rate = rate == 0 || i < first + 20 ? speed : 0.9 * rate + 0.1 * speed;
      metrics.row({double(epoch + 1), double(i + 1), m[0], m[1], m[2], m[3], m[4], m[5], lr, speed,
                   waited / seconds, m[6], nan, nan});
      if (epoch_ends || last) m = meter.end_epoch();  // the line that stays: the whole epoch
      char text[160];
      std::snprintf(
          text, sizeof text, "%7s %9s %6.2f %5.2f %5.2f %5.2f %4.2f %3.1f %7.1e %6.1f %3.0f%% %5s %6s",
          concat(epoch + 1, "/", config.epochs).c_str(), concat(i % per_epoch + 1, "/", per_epoch).c_str(),
          m[0], m[1], m[2], m[3], m[4], m[5], lr, rate, 100 * waited / seconds,
          short_bytes(resident_bytes()).c_str(), short_time((iters - i - 1) * config.bs / rate).c_str());
      log.progress(text, epoch_ends || last);
      waited = 0, looked_at = now();
    }
    if (!epoch_ends && !last) continue;

    // ---- end of an epoch
    const bool due =
        config.eval_interval > 0 && (last || (epoch + 1) % config.eval_interval == 0 || i >= plain_from);
    double ap = nan;
    if (due) {
      const auto e = evaluate(t.judged(), val, eval_settings);
      ap = e.result.AP;
      check(!config.strict || !e.unreadable, val.name, " has ", e.unreadable,
            " images that cannot be used; mend the data or leave out --strict");
      log.line(concat("  AP ", std::fixed, std::setprecision(4), e.result.AP, "  AP50 ", e.result.AP50,
                      "  AP75 ", e.result.AP75, "  small ", e.result.APs, " medium ", e.result.APm, " large ",
                      e.result.APl, std::setprecision(1), "  (", e.images, " images, ", e.seconds, " s)"));
      metrics.row({double(epoch + 1), double(i + 1), nan, nan, nan, nan, nan, nan, nan, nan, nan, nan,
                   e.result.AP, e.result.AP50});
      const auto before = std::pair(t.best_ap, t.stale++);
      if (ap > t.best_ap) {
        t.best_ap = ap, t.stale = 0;
        if (!save("best.pth", ap)) t.best_ap = before.first;
      }
      best = t.best_ap;
      // An evaluation that only --max-iters brought about does not count: resumed, the run equals one that
      // was not stopped.
      if (!epoch_ends) std::tie(t.best_ap, t.stale) = before;
      looked_at = now();
    }
    save("last.pth", ap);
    if (t.skipped) log.line(concat("  ", t.skipped, " steps skipped: their gradients overflowed"));
    tell_problems();
    if (config.patience > 0 && t.stale >= config.patience && !last) {
      log.line(concat("stopping: ", t.stale, " evaluations without a better AP (--patience)"));
      break;
    }
  }
  log.line(concat("done: ", run, "/last.pth",
                  best >= 0 ? concat(", best AP ", best, " in ", run, "/best.pth") : ""));
}

int main(int argc, char** argv) {
  return run_program([&] { train(argc, argv); });
}
