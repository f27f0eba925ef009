// The flags of ./train: every hyper-parameter with its default, what they may be, and what follows from them.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>
#include <set>
#include <string>

#include "augment.hpp"
#include "base/device.hpp"
#include "base/flags.hpp"
#include "data/dataset.hpp"
#include "ddp/launch.hpp"
#include "run/state.hpp"
#include "step.hpp"
#include "yolox.hpp"

namespace yolox {

// Every hyper-parameter: its default, and one line about it. Recipe -1: what the official recipe has for the
// model.
struct Config : Flags {
  std::string data = flag(data, "Data", "data", "", "DIR|FILE|shapes",
                          "COCO, VOC or YOLO folder, a JSON, YAML or packed (.lmdb) file, or shapes (drawn)");
  std::string split =
      flag(split, "Data", "split", "", "NAME", "split to evaluate on, such as test; val when left out");
  int workers = flag(workers, "Data", "workers", 2, "N", "threads that read and augment images");
  std::string cache = flag(cache, "Data", "cache", "none", "none|ram|disk",
                           "keep decoded images at the input size in memory or on disk");
  bool strict = flag(strict, "Data", "strict", false, "",
                     "stop when an image or label is bad, instead of leaving it out");

  std::string model = flag(model, "Model", "model", "", "NAME", model_names());
  std::string weights = flag(weights, "Model", "weights", "", "FILE",
                             "start from these weights, ours or official, .pth or .onnx");
  std::string resume = flag_alone(resume, "Model", "resume", "newest", "RUN",
                                  "go on with a run: its folder; the newest one when left out");
  std::string preproc = flag(preproc, "Model", "preproc", "auto", "auto|bgr|legacy",
                             "pixels: as --weights says, BGR 0..255, or YOLOX 0.1.0's RGB mean/std");

  std::string size = flag(size, "Training", "size", "", "N|HxW",
                          "input size in pixels; the model's (416 or 640) when left out");
  int bs = flag_auto(bs, "Training", "bs", 16, "N|auto",
                     "images in a step, of all ranks; auto: the most that fit");
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
  std::string freeze = flag(freeze, "Training", "freeze", "", "PART,...",
                            "what is not trained: backbone, neck, or how its names begin");
  double clip = flag(clip, "Training", "clip", 10.0, "X", "largest norm of the gradient; 0: no limit");
  double ema =
      flag(ema, "Training", "ema", 0.9998, "X", "decay of the moving average of the weights; 0: none");
  std::string amp = flag(amp, "Training", "amp", "off", "off|fp16|bf16|fp64",
                         "mixed precision; fp64: all in 64 bits, to compare runs");
  bool multiscale = flag(multiscale, "Training", "multiscale", true, "", "another input size every 10 steps");
  int64_t seed =
      flag(seed, "Training", "seed", int64_t{0}, "N", "of initial weights, order and augmentation");
  bool deterministic =
      flag(deterministic, "Training", "deterministic", false, "", "the same bytes each time, more slowly");
  bool keep_going =
      flag(keep_going, "Training", "keep-going", false, "",
           "after a loss that is not finite, back to the last checkpoint at half the lr, 3 times at most");
  std::string device = flag(device, "Training", "device", "auto", "cpu|cuda", "where to run");

  int accum = flag(accum, "Memory", "accum", 1, "N", "parts that a step is computed in");
  std::string dtr = flag(dtr, "Memory", "dtr", "off", "off|GB|auto",
                         "memory to train within: what is too much is dropped and computed again; auto: what "
                         "is free (dtr.hpp)");
  double dtr_slowdown = flag(dtr_slowdown, "Memory", "dtr-slowdown", 1.3, "X",
                             "how many times longer a step may take for what --bs auto finds with --dtr");
  bool dtr_trace = flag(dtr_trace, "Memory", "dtr-trace", false, "",
                        "one step with --dtr, then a picture of its memory: dtr_trace.png");

  int gpus = flag(gpus, "Ranks", "gpus", 0, "N", "train on N GPUs of this machine, one rank each");
  int procs = flag(procs, "Ranks", "procs", 0, "N", "train on N ranks on the CPU");
  int nodes = flag(nodes, "Ranks", "nodes", 1, "N", "machines, each with as many ranks");
  int node = flag(node, "Ranks", "node", 0, "I", "which of them this is, from 0");
  std::string master =
      flag(master, "Ranks", "master", "", "HOST:PORT", "where all find machine 0, with a port that is free");
  bool sync_bn = flag(sync_bn, "Ranks", "sync-bn", true, "", "batch norms over the images of all ranks");
  std::string compress =
      flag(compress, "Ranks", "compress", "off", "off|fp16|bf16", "gradients between ranks in 16 bits");
  double timeout =
      flag(timeout, "Ranks", "timeout", 600.0, "X", "seconds that ranks wait for one that does not come");
  int restarts =
      flag(restarts, "Ranks", "restarts", 0, "N", "resume by itself, so often, after a rank has failed");

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
                              "augment as official YOLOX does, its oddities included (augment_official.hpp)");

  std::string out = flag(out, "Output", "out", "", "DIR", "run folder; runs/MODEL-DATA when left out");
  int eval_interval = flag(eval_interval, "Output", "eval-interval", 10, "N",
                           "evaluate every N epochs, and every one of the last; 0: never");
  double save_minutes = flag(save_minutes, "Output", "save-minutes", 10.0, "X",
                             "save last.pth within an epoch too, so often; 0: never");
  int keep = flag(keep, "Output", "keep", 1, "N", "older checkpoints kept beside last.pth");
  int patience =
      flag(patience, "Output", "patience", 0, "N", "stop after N evaluations without a better AP; 0: never");
  double conf = flag(conf, "Output", "conf", 0.01, "P", "evaluation: lowest score");
  double nms = flag(nms, "Output", "nms", 0.65, "IOU",
                    "evaluation: overlap above which the weaker box of a class goes");
  bool profile = flag(profile, "Output", "profile", false, "",
                      "20 steps, then a table of where the time goes, and trace.json");
  bool debug = flag(debug, "Output", "debug", false, "",
                    "check every box, and find the operation that makes a NaN; slow");
};

// Bytes of --dtr GB; infinity: auto, 0: off.
inline double dtr_bytes(const Config& c) {
  if (c.dtr == "off") return 0;
  if (c.dtr == "auto") return std::numeric_limits<double>::infinity();
  char* end;
  const double gb = std::strtod(c.dtr.c_str(), &end);
  usage_check(end != c.dtr.c_str() && *end == 0 && gb > 0 && gb < 1e6, "--dtr takes off, auto or GB, got '",
              c.dtr, "'");
  return 1e9 * gb;
}

inline void check_dtr(const Config& c) {
  const bool on = dtr_bytes(c) > 0;
  usage_check(c.dtr_slowdown >= 1 && c.dtr_slowdown <= 100, "--dtr-slowdown must be in 1..100, got ",
              c.dtr_slowdown);
  usage_check(on || !c.was_given("dtr-slowdown"), "--dtr-slowdown needs --dtr");
  usage_check(on || !c.dtr_trace, "--dtr-trace needs --dtr: GB, or auto");
}

inline void check_config(const Config& c) {
  const auto at_least = [](const char* name, double value, double least) {
    usage_check(value >= least, "--", name, " must be at least ", least, ", got ", value);
  };
  const auto in = [](const char* name, double value, double lo, double hi) {
    usage_check(value >= lo && value <= hi, "--", name, " must be in ", lo, "..", hi, ", got ", value);
  };
  usage_check(!c.data.empty(),
              "--data is needed: a folder, a COCO JSON, YOLO data.yaml or packed (.lmdb) file, or shapes");
  usage_check(!c.model.empty(), "--model is needed: ", model_names());
  model_size(c.model);
  if (!c.size.empty()) parse_size(c.size);
  at_least("bs", c.bs, 0), at_least("epochs", c.epochs, 1), in("workers", c.workers, 1, 256),
      at_least("max-iters", c.max_iters, 0);
  usage_check(c.accum >= 1 && (c.bs == 0 || c.accum <= c.bs), "--accum must be in 1..", c.bs,
              ", the images of a step (--bs), got ", c.accum);
  at_least("save-minutes", c.save_minutes, 0), at_least("keep", c.keep, 0);
  at_least("patience", c.patience, 0);
  check_dtr(c);
  at_least("lr", c.lr, 0), at_least("warmup-epochs", c.warmup_epochs, 0),
      at_least("no-aug-epochs", c.no_aug_epochs, 0);
  at_least("weight-decay", c.weight_decay, 0), at_least("clip", c.clip, 0),
      at_least("eval-interval", c.eval_interval, 0), at_least("seed", c.seed, 0);
  usage_check(c.warmup_epochs + c.no_aug_epochs <= c.epochs, "--warmup-epochs ", c.warmup_epochs,
              " and --no-aug-epochs ", c.no_aug_epochs, " do not fit into --epochs ", c.epochs);
  in("gpus", c.gpus, 0, 1024), in("procs", c.procs, 0, 1024), in("nodes", c.nodes, 1, 65536);
  in("node", c.node, 0, c.nodes - 1), at_least("restarts", c.restarts, 0), in("timeout", c.timeout, 1, 1e6);
  usage_check(c.gpus == 0 || c.procs == 0, "--gpus and --procs exclude each other");
  const size_t colon = c.master.rfind(':');
  const int port = colon == std::string::npos ? 0 : std::atoi(c.master.c_str() + colon + 1);
  usage_check(c.nodes == 1 || !c.master.empty(),
              "--nodes needs --master HOST:PORT, the same on all machines");
  usage_check(c.master.empty() || (colon > 0 && port > 0 && port < 65536),
              "--master takes HOST:PORT, such as node0:29500, got '", c.master, "'");
  usage_check(c.compress == "off" || c.compress == "fp16" || c.compress == "bf16",
              "--compress takes off, fp16 or bf16, got '", c.compress, "'");
  in("min-lr-ratio", c.min_lr_ratio, 0, 1), in("ema", c.ema, 0, 0.999999), in("conf", c.conf, 0, 1),
      in("nms", c.nms, 1e-6, 1);
  usage_check(c.amp == "off" || c.amp == "fp16" || c.amp == "bf16" || c.amp == "fp64",
              "--amp takes off, fp16, bf16 or fp64, got '", c.amp, "'");
  usage_check(c.cache == "none" || c.cache == "ram" || c.cache == "disk",
              "--cache takes none, ram or disk, got '", c.cache, "'");
  usage_check(c.aug == "default" || c.aug == "none", "--aug takes default or none, got '", c.aug, "'");
  usage_check(c.optimizer == "sgd" || c.optimizer == "adam" || c.optimizer == "adamw",
              "--optimizer takes sgd, adam or adamw, got '", c.optimizer, "'");
  usage_check(c.preproc == "auto" || c.preproc == "bgr" || c.preproc == "legacy",
              "--preproc takes auto, bgr or legacy, got '", c.preproc, "'");
}

// What is left out of the command line and follows from the rest of it.
inline void fill_in(Config& c) {
  const bool nano = c.model == "yolox-nano", small = nano || c.model == "yolox-tiny";
  const auto recipe = [](double& value, double official) {
    if (value == -1) value = official;
  };
  recipe(c.mosaic_prob, nano ? 0.5 : 1);
  recipe(c.mosaic_scale_lo, small ? 0.5 : 0.1), recipe(c.mosaic_scale_hi, small ? 1.5 : 2);
  recipe(c.mixup_prob, small ? 0 : 1);
  if (!c.resume.empty()) return;
  // The official 5 epochs of warm-up and 15 without augmentation are for 300; a short run gets its share.
  if (!c.was_given("warmup-epochs"))
    c.warmup_epochs = std::min(c.warmup_epochs, std::max(c.epochs / 20, c.epochs < 3 ? 0 : 1));
  if (!c.was_given("no-aug-epochs")) c.no_aug_epochs = std::min(c.no_aug_epochs, c.epochs / 10);
}

// The GPU that has the number of the rank on its machine, or the only one that it was given, or the CPU.
inline torch::Device device_of(const Config& c, const Place& place) {
  const bool several = place.world > 1 || c.gpus > 0;
  if (c.procs > 0 || !several || c.device == "cpu") return parse_device(c.procs > 0 ? "cpu" : c.device);
  if (c.device == "auto" && c.gpus == 0 && !torch::cuda::is_available()) return parse_device("cpu");
  return parse_device(concat("cuda:", torch::cuda::device_count() == 1 ? 0 : place.local_rank));
}

// "runs/x/" -> "/home/me/runs/x"
inline fs::path without_slash(const std::string& text) {
  const fs::path path = fs::absolute(text).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

// What a run is named after: the last part of --data.
inline std::string data_name(const std::string& data) {
  return without_slash(data.substr(0, data.find(','))).stem().string();
}

// Each rank has the same share of a batch.
inline void check_shares(const Config& c, int ranks) {
  usage_check(c.bs % ranks == 0, "--bs ", c.bs, " is shared by all ", ranks,
              " ranks and does not divide by them; give ", std::max(1, c.bs / ranks) * ranks, " or ",
              (c.bs / ranks + 1) * ranks);
  usage_check(c.bs == 0 || c.accum <= c.bs / ranks, "--accum ", c.accum, ": a rank has ", c.bs / ranks,
              " images of a step, which cannot be done in more parts");
}

// The ranks that this process has to start. None: it trains itself, alone or as one of them. given: the flags
// of the command line.
inline std::optional<Launch> to_launch(Config& config, const Flags& given, const Place& place) {
  if (place.given()) {
    for (const char* name : {"gpus", "procs", "nodes", "node", "master", "restarts"})
      usage_check(!given.was_given(name), "--", name, " starts ranks, but this process already is one of ",
                  place.world, ", by torchrun or srun; leave it out, or start one process a machine");
    config.gpus = config.procs = 0;
  }
  const Launch here{std::max({1, config.gpus, config.procs}), config.nodes, config.node, config.master,
                    config.restarts};
  const bool is_rank = place.launched || place.given();
  check_shares(config, is_rank ? place.world : here.ranks * here.nodes);
  if (is_rank || (here.ranks * here.nodes == 1 && here.restarts == 0)) return {};
  usage_check(config.gpus <= int(torch::cuda::device_count()), "--gpus ", config.gpus, ": there are ",
              int(torch::cuda::device_count()),
              " GPUs here that this build can use; see nvidia-smi, or give --procs for ranks on the CPU");
  return here;
}

// Images wait in memory as three batches.
inline void check_room_for_batches(int bs, ImageSize size) {
  const double bytes = 3.0 * bs * size.height * size.width * 3,
               memory = double(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  check(bytes < memory / 2, "--bs ", bs, " is too large: the images of three batches alone take ",
        short_bytes(bytes), " of the machine's ", short_bytes(memory));
}

inline AugmentConfig augment_config(const Config& c) {
  AugmentConfig a;
  a.mosaic_prob = c.mosaic_prob, a.mixup_prob = c.mixup_prob;
  a.mosaic_scale_lo = c.mosaic_scale_lo, a.mosaic_scale_hi = c.mosaic_scale_hi;
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

inline MultiScale multi_scale(const Config& c, ImageSize base, int ranks) {
  const bool small = c.model == "yolox-nano" || c.model == "yolox-tiny";
  MultiScale sizes{base, small ? 3 : 5, small ? 7 : 5, c.seed};
  if (!c.multiscale) sizes.less = sizes.more = 0;
  // A batch norm needs more than one value a channel.
  if (c.bs / (c.accum * (c.sync_bn ? 1 : ranks)) < 2) sizes.smallest = 2;
  return sizes;
}

// What a checkpoint keeps of the settings: all that a run is made of, not how it was called this time.
inline Settings settings_of(const Flags& flags) {
  Settings kept;
  const std::set<std::string> of_the_call{"resume", "profile", "dtr-trace", "debug",
                                          "nodes",  "node",    "master",    "restarts"};
  for (const auto& [name, value] : flags.values())
    if (!of_the_call.count(name)) kept.emplace_back(name, value);
  return kept;
}

// Of --amp and --compress.
inline at::ScalarType type_of(const std::string& name) {
  return name == "fp16" ? torch::kHalf : name == "bf16" ? torch::kBFloat16 : torch::kFloat;
}

// The length of a run.
struct Plan {
  int64_t batch, per_epoch, epochs, iters;  // images in a step, steps in an epoch, epochs, steps in all
};

// What all ranks have to have been told; where data lies and how it is read may differ by machine.
inline Settings common_settings(const Config& config, const Dataset& data, size_t evaluated, int64_t step,
                                torch::Device device) {
  const std::set<std::string> of_machine{"data", "weights", "out", "workers", "cache", "device"};
  Settings common{
      {"images", concat(data.records.size())},          {"images to evaluate", concat(evaluated)},
      {"--profile", config.profile ? "true" : "false"}, {"device", device.is_cpu() ? "cpu" : "cuda"},
      {"classes", listed(data.classes, 1 << 30)},       {"steps done", concat(step)}};
  for (const auto& [name, value] : settings_of(config))
    if (!of_machine.count(name)) common.emplace_back("--" + name, value);
  return common;
}

}  // namespace yolox
