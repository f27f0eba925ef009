// SPDX-License-Identifier: Apache-2.0
// The flags of ./train with their defaults, checks, and derived settings. Hyper-parameters without a flag are
// in augment.hpp, models.hpp, optim.hpp, loss.hpp and simota.hpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>

#include "augment.hpp"
#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/program.hpp"
#include "coco_eval.hpp"
#include "data.hpp"
#include "ddp/launch.hpp"
#include "models.hpp"
#include "optim.hpp"

namespace yolox {

// A training recipe (--recipe): defaults of ./train that do not depend on the size of the model. Most
// values are also flags. Learning rate and weight decay belong to the optimizer, see optim.hpp.
struct TrainingRecipe {
  const char* optimizer;
  const char* schedule;
  double warmup_epochs, warmup_steps;  // maximum length of the warm-up, see fill_in_steps()
  double no_aug_epochs, no_aug_share;  // maximum length of the final phase: epochs, share of the run
  bool follows_run_length;  // EMA and momentum of batch norms follow the length of the run, see ema_of_run()
  bool multiscale;
  const char* freeze;  // of the parts that pretrained weights have
};

constexpr double kAnyLength = 1e9;
// The recipe of official YOLOX, which trains from scratch for 300 epochs. Shorter runs have shorter phases.
constexpr TrainingRecipe kOfficialRecipe = {"sgd", "cosine", 5, kAnyLength, 15, 0.1, false, true, "none"};
// For pretrained weights and a few hundred images. bench/RESULTS.md says which values were compared.
constexpr TrainingRecipe kFineTuneRecipe = {"adamw", "flat-cosine", 1, 100, 5, 0.35, true, false, "stem"};

// The flags of ./train. Each hyper-parameter is one declaration: member, flag, default and help text.
struct Config : Flags {
  std::string data =
      flag(data, "Data", "data", "shapes", "DIR|FILE|shapes",
           "COCO, VOC or YOLO folder; JSON, YAML or .lmdb file; shapes = drawn", marked(kOfMachine));
  std::string split = flag(split, "Data", "split", "", "NAME", "split to evaluate on [val]");
  std::string images =
      flag(images, "Data", "images", "", "DIR",
           "folder of the images of a COCO JSON file [the usual folders]", marked(kOfMachine));
  double val_fraction =
      flag(val_fraction, "Data", "val-fraction", 0.0, "X",
           "hold out this fraction of the images for evaluation, if the data has one split; 0 = off",
           between(0, 0.9));
  int workers = flag(workers, "Data", "workers", 0, "N|auto",
                     "threads that load and augment images, per rank; auto = cores / ranks",
                     between(0, 256) | kOfMachine);
  std::string cache = flag(cache, "Data", "cache", "none", "none|ram|disk",
                           "cache decoded images at the input size", marked(kOfMachine));
  bool strict =
      flag(strict, "Data", "strict", false, "", "stop at a bad image or label instead of skipping it");
  double class_weights =
      flag(class_weights, "Data", "class-weights", 0.0, "X",
           "weight of each class in the class loss: (1 / number of boxes)^X, at most 10 times "
           "that of the most frequent class; 0 = off",
           between(0, 1));

  std::string model = flag(model, "Model", "model", "yolox-s", "NAME", model_names());
  std::string weights = flag(weights, "Model", "weights", "", "FILE",
                             "pretrained weights: checkpoint (ours or official), or name of a "
                             "model that weights/get has downloaded",
                             marked(kOfMachine));
  std::string resume =
      flag(resume, "Model", "resume", "", "[RUN]",
           "resume this run [the newest in runs/ and ./]; auto = resume, or begin, the run in --out",
           FlagFacts{.marks = kOfCall, .implicit = "newest"});
  std::string preproc = flag(preproc, "Model", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");

  std::string size =
      flag(size, "Training", "size", "", "N|HxW", "input size in pixels [416 or 640, by model]");
  int bs = flag(bs, "Training", "bs", 16, "N|auto",
                "total batch size over all ranks; auto = the largest that fits", at_least(0));
  int epochs = flag(epochs, "Training", "epochs", 300, "N", "number of epochs", at_least(1));
  std::string recipe = flag(recipe, "Training", "recipe", "auto", "auto|finetune|official",
                            "defaults of other flags; auto = finetune with --weights, else official");
  double lr =
      flag(lr, "Training", "lr", -1, "X", "learning rate; default follows --bs", at_least(0) | kRecipe);
  std::string amp = flag(amp, "Training", "amp", "auto", "auto|off|tf32|bf16|fp16|fp64",
                         "off = float32; auto = bf16 on a GPU (fp16 on old ones), off on the CPU");
  int64_t max_iters =
      flag(max_iters, "Training", "max-iters", int64_t{0}, "N", "stop after N steps; 0 = off", at_least(0));
  std::string optimizer = flag(optimizer, "Training", "optimizer", "recipe", "sgd|adam|adamw", "optimizer");
  std::string schedule = flag(
      schedule, "Training", "schedule", "recipe", "cosine|flat-cosine",
      "cosine = of YOLOX, constant in the last epochs without mosaic; flat-cosine = constant in the first "
      "half of the run, then a cosine to its end");
  double warmup_epochs = flag(warmup_epochs, "Training", "warmup-epochs", -1, "X",
                              "epochs of learning rate warm-up; may be a fraction", at_least(0) | kRecipe);
  double no_aug_epochs = flag(no_aug_epochs, "Training", "no-aug-epochs", -1, "X",
                              "last epochs without mosaic and MixUp, with L1 loss", at_least(0) | kRecipe);
  double weight_decay =
      flag(weight_decay, "Training", "weight-decay", -1, "X",
           "weight decay of convolution weights (not of biases and norms)", at_least(0) | kRecipe);
  std::string freeze = flag(freeze, "Training", "freeze", "recipe", "none|PART,...",
                            "parts to freeze: stem, backbone, neck, or prefixes of parameter names");
  double clip =
      flag(clip, "Training", "clip", 10.0, "X", "clip the gradient norm to X; 0 = off", between(0, 1e38));
  double ema = flag(ema, "Training", "ema", -1, "X", "EMA decay; 0 = off", between(0, 0.999999) | kRecipe);
  bool multiscale = flag(multiscale, "Training", "multiscale", true, "",
                         "multi-scale training, a new input size every 10 steps (finetune has one size)");
  int64_t seed = flag(seed, "Training", "seed", int64_t{0}, "N",
                      "random seed of weights, data order, augmentation and drawn scenes", at_least(0));
  bool graph = flag(graph, "Training", "graph", false, "",
                    "replay steps as CUDA graphs; faster with small batches on a fast GPU");
  bool deterministic = flag(deterministic, "Training", "deterministic", false, "",
                            "bit-for-bit reproducible; slower on a GPU");
  int threads =
      flag(threads, "Training", "threads", 0, "N|auto",
           "threads that compute a step on the CPU, per rank; auto = the fastest number", between(0, 1024));
  std::string device = flag(device, "Training", "device", "auto", "auto|cpu|cuda[:N]", "device to train on",
                            marked(kOfMachine));

  int accum = flag(accum, "Memory", "accum", 1, "N", "gradient accumulation: split each batch into N parts",
                   at_least(1));
  std::string dtr = flag(dtr, "Memory", "dtr", "off", "off|GB|auto",
                         "DTR: evict and rematerialise activations to stay within GB; auto = free memory");

  int gpus = flag(gpus, "Ranks", "gpus", 0, "N", "train on N GPUs of this machine, one rank per GPU",
                  between(0, 1024));
  int procs = flag(procs, "Ranks", "procs", 0, "N", "train on the CPU with N ranks", between(0, 1024));
  bool sync_bn =
      flag(sync_bn, "Ranks", "sync-bn", true, "", "SyncBN, batch norms over the images of all ranks");
  double timeout =
      flag(timeout, "Ranks", "timeout", 600.0, "X",
           "end the run after X seconds without a step, evaluated batch or save", between(1, 1000000));

  int loader_threads = 1;  // derived from --workers by prepare_process(); not a flag

  std::string out = flag(out, "Output", "out", "", "DIR", "run folder [runs/MODEL-DATA]", marked(kOfMachine));
  int eval_interval = flag(eval_interval, "Output", "eval-interval", 10, "N",
                           "evaluate every N epochs, and every epoch without mosaic; 0 = off", at_least(0));
  double save_minutes = flag(save_minutes, "Output", "save-minutes", 10.0, "X",
                             "save last.pth every X minutes, also within an epoch; 0 = off", at_least(0));
  int patience = flag(patience, "Output", "patience", 0, "N",
                      "early stopping after N evaluations without a better score; 0 = off", at_least(0));
  double conf =
      flag(conf, "Output", "conf", 0.01, "P", "minimum score of a detection in evaluation", between(0, 1));
  double nms = flag(nms, "Output", "nms", 0.65, "IOU", "NMS IoU threshold in evaluation", between(1e-6, 1));
  int max_dets = flag(max_dets, "Output", "max-dets", coco_max_detections, "N",
                      "detections of a class per image that count in evaluation", at_least(1));
  bool dry_run = flag(dry_run, "Output", "dry-run", false, "",
                      "check the data, print data, plan and problems, and stop", marked(kOfCall));
  bool profile = flag(profile, "Output", "profile", false, "",
                      "profile 10 steps of one size, write trace.json, and stop", marked(kOfCall));
  bool debug = flag(debug, "Output", "debug", false, "",
                    "check all boxes, and report the operation that produces a NaN; slow", marked(kOfCall));

  std::string aug =
      flag(aug, "Augmentation", "aug", "default", "default|none", "augmentation; none = letterbox only");
  AugmentConfig augment;  // augment.hpp and models.hpp have the settings without a flag

  Config() {
    AugmentConfig& a = augment;
    a.mosaic_prob = flag(a.mosaic_prob, "Augmentation", "mosaic-prob", -1, "P", "probability of mosaic",
                         between(0, 1) | kRecipe);
    a.mixup_prob = flag(a.mixup_prob, "Augmentation", "mixup-prob", -1, "P",
                        "probability of MixUp in a mosaic", between(0, 1) | kRecipe);
    flag(a.degrees, "Augmentation", "degrees", a.degrees, "X",
         "mosaic: maximum rotation in degrees, either direction", between(0, 180));
    flag(a.hsv_prob, "Augmentation", "hsv-prob", a.hsv_prob, "P", "probability of HSV jitter", between(0, 1));
    flag(a.flip_prob, "Augmentation", "flip-prob", a.flip_prob, "P", "probability of a horizontal flip",
         between(0, 1));
    flag(a.vflip_prob, "Augmentation", "vflip-prob", a.vflip_prob, "P", "probability of a vertical flip",
         between(0, 1));
    flag(a.turn_prob, "Augmentation", "turn-prob", a.turn_prob, "P",
         "probability of a rotation by 90, 180 or 270 degrees", between(0, 1));
    flag(a.blur_prob, "Augmentation", "blur-prob", a.blur_prob, "P",
         "probability of a Gaussian blur, sigma 0.5 to 2 pixels", between(0, 1));
    flag(a.grey_prob, "Augmentation", "grey-prob", a.grey_prob, "P", "probability of a grey image",
         between(0, 1));
    flag(a.cutout_prob, "Augmentation", "cutout-prob", a.cutout_prob, "P",
         "probability of a grey rectangle of 10 to 40 % of width and height", between(0, 1));
  }
};

// Returns the DTR budget in bytes: infinity for auto, 0 for off. Throws UsageError if --dtr is invalid.
inline double dtr_bytes(const Config& c) {
  if (c.dtr == "off") return 0;
  if (c.dtr == "auto") return std::numeric_limits<double>::infinity();
  char* end;
  const double gb = std::strtod(c.dtr.c_str(), &end);
  usage_check(end != c.dtr.c_str() && *end == 0 && gb > 0 && gb < 1e6, "--dtr must be off, auto or GB, got '",
              c.dtr, "'");
  return 1e9 * gb;
}

// Throws UsageError if a setting is out of range. Call fill_in() first.
inline void check_config(const Config& c) {
  c.check_values();
  if (!c.size.empty() || c.was_given("size")) parse_size(c.size);
  usage_check(c.bs == 0 || c.accum <= c.bs, "--accum must be at most the batch size (--bs ", c.bs, "), got ",
              c.accum);
  combination_check(c.bs > 0 || !c.dry_run, "--dry-run needs a number for --bs, because auto tries steps");
  for (const auto& [other, given] : {std::pair("--dtr", dtr_bytes(c) > 0),
                                     {"--debug", c.debug},
                                     {"--profile, which times the parts of a step", c.profile},
                                     {"--bs auto, because a graph needs memory of its own", c.bs == 0}})
    usage_check(!c.graph || !given, "--graph cannot be used with ", other, "; give --no-graph");
  usage_check(std::max(0.0, c.warmup_epochs) + std::max(0.0, c.no_aug_epochs) <= c.epochs * (1 + 1e-9),
              "--warmup-epochs ", std::max(0.0, c.warmup_epochs), " plus --no-aug-epochs ",
              std::max(0.0, c.no_aug_epochs), " exceeds --epochs ", c.epochs, "; give smaller ones");
  combination_check(c.gpus == 0 || c.procs == 0, "--gpus and --procs cannot be used together");
  combination_check(c.patience == 0 || c.eval_interval > 0,
                    "--patience needs evaluations; leave --eval-interval 0 out");
}

// Returns the row of --recipe, after fill_in().
inline const TrainingRecipe& training_recipe(const Config& c) {
  return c.recipe == "finetune" ? kFineTuneRecipe : kOfficialRecipe;
}

// Sets a value that is not set by a flag.
inline void fill(double& value, double of_recipe) {
  if (value == -1) value = of_recipe;
}

// Fills in the settings of the recipes that depend on flags only; --freeze also depends on the weights.
// resumed: c has the settings of a run, and --multiscale, a switch without a value for "not set", stays.
inline void fill_in(Config& c, bool resumed = false) {
  if (c.recipe == "auto") c.recipe = c.weights.empty() ? "official" : "finetune";
  const SizeDefaults of_size = model_size(c.model).defaults;
  fill(c.augment.mosaic_prob, of_size.mosaic_prob);
  c.augment.mosaic_scale_lo = of_size.mosaic_scale_lo;
  c.augment.mosaic_scale_hi = of_size.mosaic_scale_hi;
  fill(c.augment.mixup_prob, of_size.mixup_prob);
  const TrainingRecipe& recipe = training_recipe(c);
  if (c.optimizer == "recipe") c.optimizer = recipe.optimizer;
  if (c.schedule == "recipe") c.schedule = recipe.schedule;
  fill(c.weight_decay, default_weight_decay(c.optimizer));
  if (!resumed && !c.was_given("multiscale")) c.multiscale = recipe.multiscale;
}

// Fills in the settings of the recipe that depend on the batch size and the length of the run. images: number
// of training images.
inline void fill_in_steps(Config& c, int64_t images) {
  const TrainingRecipe& recipe = training_recipe(c);
  const double epochs = c.epochs, per_epoch = double((images + c.bs - 1) / c.bs);
  fill(c.lr, default_lr(c.optimizer, c.bs));
  // An epoch of fewer than 150 images has few steps. In a run of 200 steps or more, the warm-up has those of
  // 150 images. Warm-up and final phase must not exceed the epochs, see check_config().
  const bool few = recipe.follows_run_length && images < 150 && per_epoch * epochs >= 200;
  const double longer = few ? 150.0 / double(images) : 1;
  fill(c.warmup_epochs,
       std::min({recipe.warmup_epochs * longer, recipe.warmup_steps / per_epoch,
                 0.05 * std::min(longer, 2.0) * epochs, epochs - std::max(0.0, c.no_aug_epochs)}));
  fill(c.no_aug_epochs,
       std::min({recipe.no_aug_epochs, recipe.no_aug_share * epochs, epochs - c.warmup_epochs}));
  fill(c.ema, recipe.follows_run_length ? ema_of_run(per_epoch * epochs).decay : EmaSchedule().decay);
}

// Returns the device of this rank. A single process uses --device. Each of several ranks uses the GPU with
// the index local_rank, or the only visible GPU. --procs and --device cpu select the CPU.
inline torch::Device device_of(const Config& c, const RankInfo& rank_info) {
  const bool several = rank_info.world > 1 || c.gpus > 0;
  if (c.procs > 0 || !several || c.device == "cpu") return parse_device(c.procs > 0 ? "cpu" : c.device);
  if (c.device == "auto" && c.gpus == 0 && !has_gpu()) return parse_device("cpu");
  return parse_device(concat("cuda:", torch::cuda::device_count() == 1 ? 0 : rank_info.local_rank));
}

// Returns the absolute path without a final slash: "runs/x/" -> "/home/me/runs/x".
inline fs::path absolute_folder(const std::string& text) {
  const fs::path path = fs::absolute(text).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

// Returns the name of the data set in run folder names: the last part of --data without extension.
inline std::string data_name(const std::string& data) {
  return absolute_folder(data.substr(0, data.find(','))).stem().string();
}

// Throws UsageError if the batch size is not divisible by the number of ranks, or --accum exceeds the images
// per rank. A resumed run, which may have other ranks now, keeps both: then the shares of the ranks differ by
// one image, and a rank splits its share in at most as many parts as it has images.
inline void check_divisible_by_ranks(const Config& c, int ranks, bool resumed) {
  usage_check(!resumed || c.bs == 0 || c.bs >= ranks, "the run has --bs ", c.bs, "; give at most ", c.bs,
              " ranks");
  usage_check(c.bs % ranks == 0 || resumed, "--bs ", c.bs, " is not divisible by the ", ranks,
              " ranks; give ", c.bs < ranks ? "" : concat(c.bs / ranks * ranks, " or "),
              (c.bs / ranks + 1) * ranks);
  usage_check(c.bs == 0 || c.accum <= c.bs / ranks || resumed, "--accum ", c.accum,
              " is too large: each rank has only ", c.bs / ranks, " images per step");
}

// Returns the ranks that this process must start; empty if this process trains, alone or as a rank.
// resumed: folder of the resumed run; "": the run is new. Throws UsageError if a flag of the launcher is
// invalid here.
inline std::optional<Launch> ranks_to_launch(Config& config, const RankInfo& rank_info,
                                             const std::string& resumed) {
  if (rank_info.started_by_others()) {
    for (const char* name : {"gpus", "procs"})
      usage_check(
          !config.was_given(name), "--", name, " starts ranks, but this process already is one of ",
          rank_info.world,
          " ranks of torchrun or srun; leave the flag out, or start one process per node; in a shell of "
          "`srun --pty`, set ",
          rank_info.variable, "=1");
    config.gpus = config.procs = 0;
  }
  const int here = std::max({1, config.gpus, config.procs});
  const bool is_rank = rank_info.launched || rank_info.started_by_others();
  combination_check(
      !config.was_given("device") || config.device == "auto" ||
          (config.gpus > 0 ? config.device == "cuda" : config.procs == 0 || config.device == "cpu"),
      "--device ", config.device, " cannot be used with ",
      config.gpus > 0 ? "--gpus, which takes the first GPUs of CUDA_VISIBLE_DEVICES; --gpus 0 turns it off"
                      : "--procs, which starts ranks on the CPU; --procs 0 turns it off");
  if (!is_rank && config.gpus > 0) {
    const auto gpus = torch::cuda::device_count();
    usage_check(config.gpus <= gpus, "--gpus ", config.gpus, ": there are ", int(gpus),
                " GPUs here that this build can use; check nvidia-smi, or train on the CPU with --procs ",
                config.gpus);
  }
  check_divisible_by_ranks(config, is_rank ? rank_info.world : here, !resumed.empty());
  if (is_rank || here == 1) return {};
  if (!resumed.empty()) return Launch{here, resumed};
  const std::string name = config.model + "-" + data_name(config.data);
  return Launch{here, config.out.empty() ? unused_run_folder(name) : config.out, /*is_new=*/true};
}

// Returns the input size: --size, or the default of the model.
inline ImageSize base_size(const Config& c) {
  if (!c.size.empty()) return parse_size(c.size);
  const int side = model_size(c.model).input;
  return {side, side};
}

// Returns the settings of multi-scale training. ranks: world size.
inline MultiScale multi_scale(const Config& c, ImageSize base, int ranks) {
  const SizeDefaults of_size = model_size(c.model).defaults;
  MultiScale sizes{base, of_size.smaller, of_size.larger, c.seed};
  if (!c.multiscale || c.profile) sizes.max_decrease = sizes.max_increase = 0;
  // A batch norm needs more than one value per channel. A batch of one image therefore needs a height of at
  // least 64 pixels.
  if (c.bs / (c.accum * (c.sync_bn ? 1 : ranks)) < 2) {
    usage_check(c.bs == 0 || base.height * base.width > 32 * 32, "--size ", base.height,
                " with one image at a time gives each batch norm a single value per channel; give --size 64, "
                "or more images");
    sizes.smallest = 2;
  }
  return sizes;
}

// Returns the dtype of autocast for a value of --amp; float32 for off, tf32 and fp64.
inline at::ScalarType dtype_of(const std::string& name) {
  return name == "fp16" ? torch::kHalf : name == "bf16" ? torch::kBFloat16 : torch::kFloat;
}

// The course of a run, derived from settings and data set. Iterations count from 0.
struct Plan {
  int64_t batch;                       // total batch size over all ranks
  int64_t per_epoch;                   // iterations per epoch
  int64_t epochs, iters;               // epochs and iterations of the run
  int64_t ranks = 1;                   // world size
  int64_t first_no_aug_iteration = 0;  // first iteration without mosaic and MixUp, with L1 loss
  int64_t eval_interval = 0;           // epochs; 0: no evaluation
  int64_t patience = 0;                // --patience; 0: off
  Schedule schedule = {};              // learning rate
  EmaSchedule ema = {};                // EMA; a decay of 0: none
  double norm_momentum = 0.03;         // of the running statistics of batch norms
  MultiScale sizes = {};               // input size of each iteration

  int64_t batch_per_rank() const { return (batch + ranks - 1) / ranks; }  // the largest share
  int64_t epoch_of(int64_t step) const { return step / per_epoch + 1; }   // from 1
  // Returns true if an epoch, or the run, ends after this number of iterations.
  bool ends_epoch(int64_t steps) const { return steps % per_epoch == 0 || steps == iters; }
  // Returns true if the model is evaluated after this number of iterations. Call it at the end of an epoch.
  bool evaluates_after(int64_t steps) const {
    return eval_interval > 0 &&
           (steps == iters || epoch_of(steps - 1) % eval_interval == 0 || steps > first_no_aug_iteration);
  }
};

// Returns the settings of the training batches.
inline BatchSettings batch_settings(const Config& c, const Plan& p) {
  return {.augment = c.augment,
          .augmented = c.aug == "default",
          .check_boxes = c.debug,
          .seed = c.seed,
          .workers = c.loader_threads,
          .batch = p.batch,
          .ranks = p.ranks,
          .iters = p.iters,
          .mosaic_iters = p.first_no_aug_iteration};
}

// Returns the plan of a run, and fills in the settings that depend on its length. images: number of training
// images. ranks: world size. base: input size.
inline Plan plan_of(Config& c, int64_t images, int ranks, ImageSize base) {
  fill_in_steps(c, images);
  Plan plan{c.bs, (images + c.bs - 1) / c.bs, c.epochs, 0};
  plan.iters = plan.per_epoch * plan.epochs;
  if (c.max_iters) plan.iters = std::min(c.max_iters, plan.iters);
  plan.ranks = ranks;
  const double total = double(plan.per_epoch) * c.epochs, no_aug = c.no_aug_epochs * double(plan.per_epoch);
  plan.first_no_aug_iteration = std::max<int64_t>(0, std::llround(total - no_aug));
  plan.eval_interval = c.eval_interval;
  plan.patience = c.patience;
  const bool flat = c.schedule == "flat-cosine";
  plan.schedule = {c.lr, total, c.warmup_epochs * double(plan.per_epoch), flat ? 0 : no_aug};
  plan.schedule.flat_until = flat ? total / 2 : 0;
  if (training_recipe(c).follows_run_length) {
    plan.ema = ema_of_run(total);
    plan.norm_momentum = norm_momentum_of_run(total);
  }
  plan.ema.decay = c.ema;
  plan.sizes = multi_scale(c, base, ranks);
  return plan;
}

// Returns the settings and versions that must be equal on all ranks, because numbers depend on them. Paths,
// --workers, --cache and --device may differ between machines.
inline Settings common_settings(const Config& config, const Dataset& data, size_t evaluated, int64_t step,
                                torch::Device device) {
  Settings common{{"images", concat(data.records.size())},
                  {"images to evaluate", concat(evaluated)},
                  {"--profile", config.profile ? "true" : "false"},
                  {"device", device.is_cpu() ? "cpu" : "cuda"},
                  {"classes", listed(data.classes, 1 << 30)},
                  {"steps done", concat(step)},
                  {"revision", git_revision()},
                  {"LibTorch", TORCH_VERSION},
                  {"OpenCV", CV_VERSION}};
  for (const auto& [name, value] : config.values(/*without=*/kOfCall | kOfMachine))
    common.emplace_back("--" + name, value);
  return common;
}

}  // namespace yolox
