// SPDX-License-Identifier: Apache-2.0
// Evaluates a checkpoint on a data set, or detections of any program against a ground truth.
#include <unistd.h>

#include <iomanip>
#include <iostream>
#include <map>
#include <optional>
#include <set>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/limit_spinning.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "evaluate.hpp"
#include "formats.hpp"
#include "metrics/errors.hpp"
#include "metrics/html.hpp"
#include "run/report.hpp"

using namespace yolox;

struct Config : Flags {
  std::string data = flag(data, "Model and data", "data", "", "DIR|FILE|shapes",
                          "COCO, VOC or YOLO folder; JSON, YAML or .lmdb file; shapes = drawn");
  std::string split = flag(split, "Model and data", "split", "", "NAME", "split to evaluate on [val]");
  std::string images = flag(images, "Model and data", "images", "", "DIR",
                            "folder of the images of a COCO JSON file [the usual folders]");
  double val_fraction =
      flag(val_fraction, "Model and data", "val-fraction", 0.0, "X",
           "evaluate the images that ./train --val-fraction X has held out; 0 = off", between(0, 0.9));
  std::string weights =
      flag(weights, "Model and data", "weights", "", "FILE",
           "checkpoint (ours or official), or name of a model that weights/get has downloaded");
  std::string gt = flag(gt, "Detection file", "gt", "", "GT.json", "ground truth in COCO format");
  std::string dt = flag(dt, "Detection file", "dt", "", "DT.json", "detections in COCO format");
  std::string model =
      flag(model, "Evaluation", "model", "", "NAME", model_names() + " [from the checkpoint]");
  std::string size = flag(size, "Evaluation", "size", "", "N|HxW",
                          "input size in pixels [from the checkpoint or the model]");
  double conf = flag(conf, "Evaluation", "conf", 0.01, "P", "minimum score of a detection", between(0, 1));
  double nms = flag(nms, "Evaluation", "nms", 0.65, "IOU", "NMS IoU threshold", between(1e-6, 1));
  int bs = flag(bs, "Evaluation", "bs", 16, "N", "batch size", at_least(1));
  int workers = flag_auto(workers, "Evaluation", "workers", 0, "N|auto",
                          "threads that load images; auto = one per core", between(0, 256));
  std::string preproc = flag(preproc, "Evaluation", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");
  std::string device = flag(device, "Evaluation", "device", "auto", "auto|cpu|cuda[:N]", "device to run on");
  bool ema = flag(ema, "Evaluation", "ema", true, "", "the EMA of the weights");
  bool fuse = flag(fuse, "Evaluation", "fuse", false, "", "fold batch norms into the convolutions");
  int64_t seed = flag(seed, "Evaluation", "seed", int64_t{0}, "N", "random seed of --data shapes");
  bool voc = flag(voc, "Output", "voc", false, "", "also compute Pascal VOC AP: all points and 11 points");
  bool speed = flag(speed, "Output", "speed", false, "", "print the time per image of each stage");
  std::string report = flag(report, "Output", "report", "runs/eval/report.html", "FILE.html",
                            "write a page with curves, errors and the worst images");
  std::string json = flag(json, "Output", "json", "", "FILE", "write all metrics, also per class");
  std::string save_dt = flag(save_dt, "Output", "save-dt", "", "FILE", "write the detections in COCO format");
  std::string hard_negatives =
      flag(hard_negatives, "Output", "hard-negatives", "", "FILE.json",
           "write a COCO file of the images without objects in which the model detects one");
};

// Prints the metrics and writes --json and --report. data: the data set with its images; null for the
// detections of another program. title, heading: of the page.
static void report(const EvalResult& result, const CocoDataset& truth,
                   const std::vector<Detection>& detections, const Dataset* data, const std::string& title,
                   const std::string& heading, const Config& config) {
  print_per_class(std::cout, result);
  std::cout << "\n";
  print_summary(std::cout, result);
  const ErrorAnalysis analysis = analyse_errors(truth, detections);
  print_error_analysis(std::cout, analysis);
  std::optional<VocResult> voc;
  if (config.voc) print_voc(std::cout, voc.emplace(voc_ap(truth, detections)));
  if (!config.json.empty())
    write_eval_json(config.json, result, [&](JsonWriter& writer) {
      write_error_analysis(writer, analysis);
      if (voc) write_voc(writer, *voc);
    });
  if (config.report.empty()) return;
  std::error_code no_folder;  // not read: writing the report fails, too
  if (const fs::path folder = fs::path(config.report).parent_path(); !folder.empty())
    fs::create_directories(folder, no_folder);
  const std::string page = page_html(
      title,
      concat("torch ", TORCH_VERSION, ", revision ", git_revision(), "\n", date_text(std::time(nullptr)),
             ", ", machine_text()),
      evaluation_html(heading, result, truth, analysis, data, voc) + settings_section(config.values()));
  const bool written = replace_file(config.report, page);
  check(written || !config.was_given("report"), "cannot write --report ", config.report,
        "; check folder, permissions and disk space");
  std::cout << (written ? "\nreport: " : "\nwarning: cannot write ") << printable(config.report) << std::endl;
}

// Prints the times of --speed. images: number of evaluated images.
static void print_speed(const EvalTimes& times, int64_t images) {
  std::cout << "milliseconds per image:\n" << std::fixed << std::setprecision(3);
  for (const auto& [name, seconds] : {std::pair("preprocess", times.preprocess),
                                      {"forward", times.forward},
                                      {"decode", times.decode},
                                      {"NMS", times.nms}})
    std::cout << "  " << std::left << std::setw(12) << name << std::right << std::setw(8)
              << 1000 * seconds / double(images) << "\n";
  std::cout << "\n" << std::defaultfloat;
}

// Throws UsageError if a flag is invalid.
static void check_flags(const Config& config) {
  combination_check(config.gt.empty() == config.dt.empty(), "--gt and --dt need each other");
  std::vector<std::string> inputs = split_list(config.data);
  inputs.insert(inputs.end(), {config.gt, config.dt, config.data, config.weights});
  protect_inputs("--json", config.json, inputs);
  protect_inputs("--report", config.report, inputs);
  protect_inputs("--save-dt", config.save_dt, inputs);
  protect_inputs("--hard-negatives", config.hard_negatives, inputs);
  for (const auto& [flag, path] : {std::pair("--json", config.json),
                                   {"--save-dt", config.save_dt},
                                   {"--hard-negatives", config.hard_negatives}})
    check(path.empty() || is_irregular_file(path) ||
              ::access(fs::weakly_canonical(fs::absolute(path)).parent_path().c_str(), W_OK) == 0,
          flag, " ", path, ": cannot write to the folder of this file; create it, or choose another");
  if (!config.gt.empty()) {
    usage_check(config.data.empty() && config.weights.empty(),
                "--gt and --dt cannot be combined with --data and --weights");
    for (const char* name :
         {"split", "images", "val-fraction", "model", "size", "conf", "nms", "hard-negatives", "bs",
          "workers", "preproc", "device", "fuse", "speed", "seed", "save-dt"})
      usage_check(!config.was_given(name), "--", name, " is for --data and --weights");
    return;
  }
  combination_check(!config.data.empty(), "--data is needed, or --gt and --dt");
  config.check_values();
  usage_check(config.hard_negatives.empty() || (config.data != "shapes" && !is_packed(config.data)),
              "--hard-negatives is for image files, not for --data ", config.data);
  if (!config.size.empty() || config.was_given("size")) parse_size(config.size);
}

// Evaluates a detections file (--gt and --dt).
static void evaluate_file(const Config& config) {
  CocoDataset truth = read_coco(config.gt);
  if (!truth.problems.empty())
    std::cout << "warning: " << printable(config.gt) << ": " << truth.problems.size()
              << " entries cannot be read and are left out; the first: "
              << printable(truth.problems[0].second) << "\n";
  if (truth.repeated_ids > 0)
    std::cout << "note: " << printable(config.gt) << ": " << truth.repeated_ids
              << " annotations have the id of another one\n";
  if (truth.zero_ids > 0)
    std::cout << "note: " << printable(config.gt) << ": " << truth.zero_ids
              << " annotations have the id 0; pycocotools never finds them, so that its AP is lower\n";
  std::set<std::string> names;
  for (auto& category : truth.categories) {
    category.name = printable(category.name);
    if (!names.insert(category.name).second)
      std::cout << "note: " << printable(config.gt) << ": several classes have the name " << category.name
                << "\n";
  }
  const auto detections = read_detections(config.dt);
  report(coco_eval(truth, detections), truth, detections, nullptr, fs::path(config.dt).filename().string(),
         concat(config.dt, " against ", config.gt), config);
}

// Writes --save-dt, with the category ids of the files of the data set, and without the classes that these do
// not have.
static void save_detections(const std::string& path, const std::vector<Detection>& found,
                            const Dataset& data) {
  std::map<int64_t, int64_t> in_file;  // category id in the files by that of `truth`
  for (size_t c = 0; c < data.classes.size(); ++c)
    if (data.category_ids[c] != kNoCategory) in_file[data.truth.categories[c].id] = data.category_ids[c];
  std::map<int64_t, std::string> names;
  for (const CocoImage& image : data.truth.images) names[image.id] = image.file_name;
  std::vector<Detection> detections;
  for (Detection d : found)
    if (const auto id = in_file.find(d.category_id); id != in_file.end()) {
      d.category_id = id->second;
      detections.push_back(d);
    }
  write_detections(path, detections, names);
}

// Writes --hard-negatives: the images without objects in which the model detects one, the worst first, as a
// COCO file for training. labelled: the ids of the images with objects. classes: of the data set.
static void write_hard_negatives(const std::string& path, const Evaluation& e, const Dataset& data,
                                 const std::set<int64_t>& labelled, const std::vector<std::string>& classes) {
  constexpr double kWrong = 0.3;  // score from which ./demo shows a detection
  std::map<int64_t, double> score;
  for (const Detection& d : e.detections)
    if (!labelled.count(d.image_id)) score[d.image_id] = std::max(score[d.image_id], d.score);
  std::vector<std::pair<double, size_t>> worst;
  for (size_t i = 0; i < data.records.size(); ++i)
    if (const double s = score[data.records[i].image_id]; s >= kWrong) worst.emplace_back(-s, i);
  std::sort(worst.begin(), worst.end());
  CocoDataset negatives;
  for (const std::string& name : classes)
    negatives.categories.push_back({int64_t(negatives.categories.size()) + 1, name});
  for (const auto& [_, i] : worst) {
    const Record& r = data.records[i];
    negatives.images.push_back({r.image_id, fs::absolute(r.file).string(), r.width, r.height});
  }
  std::cout << worst.size() << " images without objects have a detection of score " << kWrong << " or more";
  if (worst.empty()) {
    fs::remove(path);  // of an earlier evaluation
  } else {
    write_coco(path, negatives);
    std::cout << ": " << printable(path) << "\nTrain with them, unless AP is measured on them: --data DIR,"
              << printable(path) << ", or TRAIN.json,VAL.json," << printable(path);
  }
  std::cout << "\n\n";
}

// Warns if the model detects nothing right.
static void warn_near_zero(const EvalResult& result, bool legacy) {
  if (result.AP < 0 || result.AP >= 0.01) return;
  const char* pixels = legacy ? "RGB, mean/std of ImageNet (as in YOLOX 0.1.0); try --preproc bgr"
                              : "BGR 0..255; try --preproc imagenet for weights of YOLOX 0.1.0";
  std::cout << "\nwarning: AP is near zero. If the model is trained, the pixel format may be wrong: it is "
            << pixels << ". Or the class order of the model differs from that of the data set." << std::endl;
}

// Evaluates a model (--data and --weights).
static void evaluate_model(const Config& config) {
  keep_freed_memory();

  EvalSettings settings;
  settings.device = parse_device(config.device);
  auto loaded = load_model(config.weights, config.model, config.preproc, settings.device, config.ema);
  if (!loaded.report.empty()) std::cout << printable(loaded.report, /*keep_newlines=*/true) << "\n";
  if (config.fuse) fuse_batch_norms(*loaded.model);
  const DataOptions options{config.data,   config.split,          config.val_fraction,
                            config.images, uint64_t(config.seed), "runs/.checks"};
  Dataset data = load_splits(options, /*with_train=*/false, loaded.info.classes.size()).val;
  std::set<int64_t> labelled;  // also with classes that the model does not know
  for (const CocoAnnotation& a : data.truth.annotations) labelled.insert(a.image_id);
  const std::vector<std::string> own_classes = data.classes;
  const auto classes = class_names(loaded.info, loaded.model->num_classes);
  // Official weights may be evaluated on classes of other names, but not of the same names in another order.
  const bool named = !loaded.info.classes.empty() || data.classes.size() != classes.size() ||
                     std::is_permutation(data.classes.begin(), data.classes.end(), classes.begin());
  if (named && !classes.empty()) use_classes(data, classes);
  settings.size = input_size(loaded.info, config.size);
  settings.conf = config.conf;
  settings.nms = config.nms;
  settings.batch = config.bs;
  settings.workers = loader_threads(config.workers, 1, settings.device.is_cuda());
  settings.legacy = loaded.info.legacy_preproc;
  settings.measure_times = config.speed;
  std::cout << printable(loaded.info.model) << ", " << data.classes.size() << " classes, "
            << data.records.size() << " images of " << printable(data.name) << ", " << settings.size.height
            << "x" << settings.size.width << ", pixels "
            << (settings.legacy ? "RGB, mean/std of ImageNet" : "BGR 0..255") << std::endl;
  const auto list_images = [&] {  // unreadable images are excluded from AP
    size_t listed = 0;
    for (const auto& line : data.problems->lines())
      if (line.rfind("image", 0) == 0 && ++listed <= 20) std::cout << "  " << printable(line) << "\n";
    if (listed > 20) std::cout << "  and " << listed - 20 << " more\n";
  };
  for (const auto& note : data.notes) std::cout << printable(note) << "\n";
  for (const auto& [kind, count] : data.problems->summary())
    std::cout << "note: " << printable(kind) << ": " << count << "\n";
  list_images();

  const bool tty = isatty(1);
  auto e = evaluate(loaded.model, data, settings, [&](int64_t done, int64_t images) {
    if (tty) std::cout << "\r" << done << "/" << images << std::flush;
  });
  if (tty) std::cout << "\r";
  std::cout << e.images << " images in " << std::fixed << std::setprecision(1) << e.seconds << " s ("
            << e.images / e.seconds << " img/s), " << e.detections.size() << " detections\n\n"
            << std::defaultfloat;
  if (e.unreadable) {
    std::cout << "warning: " << e.unreadable << " images are unreadable and excluded:\n";
    list_images();
    std::cout << "\n";
  }
  const fs::path folder = fs::path(config.data).lexically_normal();
  const std::string name = (folder.has_filename() ? folder : folder.parent_path()).filename().string();
  if (config.speed) print_speed(e.times, int64_t(data.records.size()));
  report(
      e.result, e.truth, e.detections, &data, concat(loaded.info.model, " on ", name),
      concat(config.weights, " on ", e.images, " images, ", settings.size.height, "x", settings.size.width),
      config);
  if (!config.hard_negatives.empty())
    write_hard_negatives(config.hard_negatives, e, data, labelled, own_classes);
  if (!config.save_dt.empty()) save_detections(config.save_dt, e.detections, data);
  warn_near_zero(e.result, settings.legacy);
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
