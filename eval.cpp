// SPDX-License-Identifier: Apache-2.0
// Evaluates a checkpoint on a data set, or detections of any program against a ground truth.
#include <iostream>
#include <map>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "checkpoint/load.hpp"
#include "evaluate.hpp"
#include "formats.hpp"
#include "run/log.hpp"
#include "run/report.hpp"

using namespace yolox;

struct Config : ModelFlags {
  std::string data = flag(data, "Data", "data", "", "DIR|FILE|shapes",
                          "COCO, VOC or YOLO folder; JSON, YAML or .lmdb file; shapes = drawn");
  std::string split = flag(split, "Data", "split", "", "NAME", "split to evaluate on [val]");
  std::string images = flag(images, "Data", "images", "", "DIR",
                            "folder of the images of a COCO JSON file [the usual folders]");
  double val_fraction =
      flag(val_fraction, "Data", "val-fraction", 0.0, "X",
           "evaluate the images that ./train --val-fraction X has held out; 0 = off", between(0, 0.9));
  std::string gt = flag(gt, "Detection file", "gt", "", "GT.json", "ground truth in COCO format");
  std::string dt = flag(dt, "Detection file", "dt", "", "DT.json", "detections in COCO format");
  double conf = flag(conf, "Evaluation", "conf", 0.01, "P", "minimum score of a detection", between(0, 1));
  double nms = flag(nms, "Evaluation", "nms", 0.65, "IOU", "NMS IoU threshold", between(1e-6, 1));
  int max_dets = flag(max_dets, "Evaluation", "max-dets", coco_max_detections, "N",
                      "detections of a class per image that count for AP and AR", at_least(1));
  int bs = flag(bs, "Evaluation", "bs", 16, "N", "batch size", at_least(1));
  int workers = flag(workers, "Evaluation", "workers", 0, "N|auto",
                     "threads that load images; auto = one per core", between(0, 256));
  std::string device = flag(device, "Evaluation", "device", "auto", "auto|cpu|cuda[:N]", "device to run on");
  bool ema = flag(ema, "Evaluation", "ema", true, "", "the EMA of the weights");
  bool fuse = flag(fuse, "Evaluation", "fuse", false, "", "fold batch norms into the convolutions");
  int64_t seed = flag(seed, "Evaluation", "seed", int64_t{0}, "N", "random seed of --data shapes");
  bool speed = flag(speed, "Output", "speed", false, "", "print the time per image of each stage");
  std::string json = flag(json, "Output", "json", "", "FILE", "write all metrics, also per class");
  std::string save_dt = flag(save_dt, "Output", "save-dt", "", "FILE|DIR",
                             "write the detections in COCO format; DIR: with the truth, for tools/report.py");
};

// Prints the metrics of `truth` and writes --json.
static void report(const CocoDataset& truth, const EvalResult& result, const Config& config) {
  print_per_class(std::cout, result);
  const std::string note = crowded_images_note(truth, config.max_dets);
  std::cout << "\n" << note << (note.empty() ? "" : "\n\n");
  print_summary(std::cout, result);
  if (!config.json.empty()) write_eval_json(config.json, result);
}

// Throws UsageError if a flag is invalid.
static void check_flags(const Config& config) {
  combination_check(config.gt.empty() == config.dt.empty(), "--gt and --dt need each other");
  config.check_values();
  const bool of_files = !config.gt.empty();
  for (const char* name : {"data", "weights", "save-dt"})
    usage_check(!of_files || !config.was_given(name), "--", name, " cannot be combined with --gt and --dt");
  combination_check(of_files || !config.data.empty(), "--data is needed, or --gt and --dt");
  std::vector<std::string> inputs = split_list(config.data);
  inputs.insert(inputs.end(), {config.gt, config.dt, config.data});
  if (!of_files) inputs.push_back(find_weights_file(config.weights));
  protect_inputs("--json", config.json, inputs);
  protect_inputs("--save-dt", config.save_dt, inputs);
}

// Evaluates a detections file (--gt and --dt).
static void evaluate_file(const Config& config) {
  Log log("");  // to the terminal only
  CocoDataset truth = read_coco(config.gt);
  normalize_names(truth, config.gt);
  std::vector<std::string> problems;
  for (const auto& [kind, text] : truth.problems) problems.push_back(kind + ": " + text);
  if (!problems.empty())
    log.line(concat("warning: the ground truth has ", problems.size(), " problems: ", listed(problems, 20)));
  const std::vector<Detection> found = read_detections(config.dt);
  std::map<int64_t, cv::Size> size_of;
  for (const CocoImage& image : truth.images) size_of[image.id] = {image.width, image.height};
  const auto check_boxes_of = [&](const std::string& file, const auto& entries) {
    std::vector<PlacedBox> boxes;
    for (const auto& e : entries) {
      cv::Size size = size_of[e.image_id];
      if (e.w > size.width || e.h > size.height) size = {};  // an untrained model predicts larger boxes
      boxes.push_back({e.x, e.y, e.w, e.h, size.width, size.height, boxes.size()});
    }
    check_units(file, boxes, false, [](size_t i) { return concat("box ", i); });
  };
  check_boxes_of(config.gt, truth.annotations);
  check_boxes_of(config.dt, found);
  report(truth, coco_eval(truth, found, 0, config.max_dets), config);
}

// Writes --save-dt, with the category ids of the files of the data set, and without the classes that these do
// not have.
static void save_detections(const std::string& path, std::vector<Detection> found, const Dataset& data) {
  std::map<int64_t, int64_t> in_file;  // category id in the files by that of `truth`
  for (size_t c = 0; c < data.classes.size(); ++c)
    in_file[data.truth.categories[c].id] = data.category_ids[c];
  std::map<int64_t, std::string> names;
  for (const CocoImage& image : data.truth.images) names[image.id] = image.file_name;
  for (Detection& d : found) d.category_id = in_file.at(d.category_id);
  std::erase_if(found, [](const Detection& d) { return d.category_id == kNoCategory; });
  write_detections(path, found, names);
}

// Evaluates a model (--data and --weights).
static void evaluate_model(const Config& config) {
  keep_freed_memory();
  Log log("");  // to the terminal only
  EvalSettings settings;
  settings.device = parse_device(config.device);
  auto loaded = load_model(config.weights, config.model, config.preproc, settings.device, config.ema);
  log.line(loaded.report);
  settings.size = input_size(loaded.info, config.size);
  choose_threads(loaded.model, settings.size, settings.device);
  if (config.fuse) fuse_batch_norms(*loaded.model);
  const DataOptions options{config.data,   config.split,          config.val_fraction,
                            config.images, uint64_t(config.seed), "runs/.checks"};
  Dataset data = load_splits(options, /*with_train=*/false, size_t(loaded.model->num_classes)).val;
  const auto classes = class_names(loaded.info, loaded.model->num_classes);
  // Official weights may be evaluated on classes of other names, but not of the same names in another order.
  bool named = !loaded.info.classes.empty() || data.classes.size() != classes.size();
  for (size_t c = 0; !named && c < classes.size(); ++c)
    named = data.classes[c] != classes[c] && std::ranges::count(classes, data.classes[c]) > 0;
  if (named && !classes.empty()) use_classes(data, classes);
  settings.conf = config.conf;
  settings.nms = config.nms;
  settings.max_detections = config.max_dets;
  settings.batch = config.bs;
  settings.workers = loader_threads(config.workers, 1, settings.device.is_cuda());
  settings.legacy = loaded.info.legacy_preproc;
  settings.measure_times = config.speed;
  log.line(concat(loaded.info.model, ", ", data.classes.size(), " classes, ", data.records.size(),
                  " images of ", data.name, ", ", settings.size.height, "x", settings.size.width, ", pixels ",
                  settings.legacy ? "RGB, mean/std of ImageNet" : "BGR 0..255"));
  for (const auto& note : data.notes) log.line(note);
  for (const auto& [kind, count] : data.problems->summary()) log.line(concat("note: ", kind, ": ", count));
  const auto e = evaluate(loaded.model, data, settings, [&](int64_t done, int64_t images) {
    log.progress(concat(done, "/", images), /*keep=*/false);
  });
  log.line(concat(e.images, " images in ",
                  formatted("%.1f s (%.1f img/s), ", e.seconds, double(e.images) / e.seconds),
                  e.detections.size(), " detections\n"));
  std::vector<std::string> lines = data.problems->lines();
  std::erase_if(lines, [](const std::string& line) { return !line.starts_with("image"); });
  if (!lines.empty())
    log.line(concat("warning: ", lines.size(), " images cannot be read and are excluded: ", listed(lines, 20),
                    "\n"));
  if (config.speed) {
    std::cout << "milliseconds per image:\n";
    for (size_t i = 0; i < eval_stages.size(); ++i)
      std::cout << formatted("  %-12s%8.3f\n", eval_stages[i],
                             1000 * e.times[i] / double(data.records.size()));
    std::cout << "\n";
  }
  report(e.truth, e.result, config);
  if (fs::is_directory(config.save_dt))
    write_evaluation(config.save_dt, concat(config.weights, " on ", e.images, " images of ", data.name), e,
                     data);
  else if (!config.save_dt.empty())
    save_detections(config.save_dt, e.detections, data);
  if (e.result.AP >= 0 && e.result.AP < 0.01)
    log.line(
        concat("\nwarning: AP is near zero. If the model is trained, the pixel format may be wrong: it is ",
               settings.legacy ? "RGB, mean/std of ImageNet (as in YOLOX 0.1.0); try --preproc bgr"
                               : "BGR 0..255; try --preproc imagenet for weights of YOLOX 0.1.0",
               ". Or the class order of the model differs from that of the data set."));
}

int main(int argc, char** argv) {
  end_program(run_program([&] {
    Config config;
    config.parse(argc, argv, "evaluates a checkpoint on a data set, or a file of detections",
                 "--data DIR --weights runs/NAME/best.pth");
    check_flags(config);
    if (config.gt.empty())
      evaluate_model(config);
    else
      evaluate_file(config);
    check_stdout();
  }));
}
