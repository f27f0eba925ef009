// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/load.hpp"

#include <algorithm>
#include <filesystem>

#include "base/flags.hpp"
#include "checkpoint/onnx_weights.hpp"
#include "data/coco.hpp"

namespace yolox {

EvalGuard::EvalGuard(torch::nn::Module& module) {
  for (const auto& m : module.modules()) modes.emplace_back(m, m->is_training());
  module.eval();
}

EvalGuard::~EvalGuard() {
  for (const auto& [module, training] : modes)
    module->train(training);  // parents come first, because train() also sets the children
}

std::string detect_model(const GenericDict& weights, const std::string& likely) {
  std::string first;
  for (const ModelSize& size : model_sizes())
    if (size.name == likely && size.make != make_yolox) return likely;
  for (const auto& e : weights) {
    if (!e.key().isString()) continue;
    std::string key = e.key().toStringRef();
    if (key.rfind("module.", 0) == 0) key = key.substr(7);
    if (key != "backbone.backbone.stem.conv.conv.weight" || !e.value().isTensor() ||
        e.value().toTensor().dim() != 4)
      continue;
    for (const ModelSize& size : model_sizes()) {
      if (size.make != make_yolox || e.value().toTensor().size(0) != int64_t(size.width * 64)) continue;
      if (first.empty() || size.name == likely) first = size.name;
    }
  }
  return first;
}

int64_t num_classes_of(const GenericDict& weights) {
  for (const auto& e : weights) {
    if (!e.key().isString()) continue;
    const std::string key = e.key().toStringRef(), end = "head.cls_preds.0.weight";
    if (key.size() >= end.size() && key.compare(key.size() - end.size(), end.size(), end) == 0 &&
        e.value().isTensor() && e.value().toTensor().dim() == 4 && e.value().toTensor().numel() > 0)
      return e.value().toTensor().size(0);
  }
  return 0;
}

std::vector<std::string> class_names(const WeightsInfo& info, int64_t classes) {
  if (!info.classes.empty()) return info.classes;
  return classes == int64_t(coco_classes().size()) ? coco_classes() : std::vector<std::string>();
}

// Returns "" or, if `given` is a run folder, a line that names the file of the run that is used.
static std::string file_of_run(const std::string& given, const std::string& path) {
  if (given == path || !std::filesystem::is_directory(given)) return "";
  const bool best = std::filesystem::path(path).filename() == "best.pth";
  return concat("weights ", path, best ? "" : ", because the run has no best.pth");
}

LoadedModel load_model(const std::string& given, const std::string& model, const std::string& preproc,
                       torch::Device device) {
  combination_check(!given.empty(), "--weights FILE is needed");
  const std::string path = find_weights_file(given);
  usage_check(preproc == "auto" || preproc == "bgr" || preproc == "legacy",
              "--preproc must be auto, bgr or legacy, got '", preproc, "'");
  const auto file = read_weights(path);
  const auto weights = find_weights(file, path);
  LoadedModel loaded;
  loaded.info = weights_info(file, path);
  if (preproc != "auto") loaded.info.legacy_preproc = preproc == "legacy";
  const std::string wanted = model.empty() ? "" : model_size(model).name;
  const std::string found = detect_model(weights, model.empty() ? loaded.info.model : wanted);
  int64_t classes = num_classes_of(weights);
  if (!classes) classes = int64_t(loaded.info.classes.size());  // a head of another form
  check(!found.empty() && classes > 0, path, " contains no YOLOX weights of a known size");
  check(wanted.empty() || wanted == found, path, " contains weights of ", found, "; --model ", model,
        " does not fit; leave --model out");
  loaded.info.model = found;
  loaded.model = make_model(found, int(classes));
  const auto report = load_state_dict(*loaded.model, weights, path);
  check(report.missing.empty() && report.mismatched.empty(), path, " does not contain all weights of ", found,
        ": ", to_string(report));
  check_finite(*loaded.model, path);
  loaded.report = file_of_run(given, path);
  if (!report.unexpected.empty()) loaded.report += (loaded.report.empty() ? "" : "\n") + to_string(report);
  if (int64_t(loaded.info.classes.size()) != classes) loaded.info.classes.clear();
  loaded.model->to(device);
  to_channels_last(*loaded.model);
  loaded.model->eval();
  return loaded;
}

ImageSize input_size(const WeightsInfo& info, const std::string& flag) {
  if (!flag.empty()) return parse_size(flag);
  if (info.height) return {int(info.height), int(info.width)};
  const int side = model_size(info.model).input;
  return {side, side};
}

WeightsInfo load_pretrained(YOLOX& model, const std::string& given, const WeightsInfo& wanted,
                            std::vector<std::string>& notes) {
  const std::string path = find_weights_file(given);
  if (const std::string note = file_of_run(given, path); !note.empty()) notes.push_back(note);
  const auto file = read_weights(path);
  const auto weights = find_weights(file, path);
  const std::string found = detect_model(weights, wanted.model);
  check(found.empty() || found == wanted.model, path, " contains weights of ", found, "; use --model ", found,
        " or other weights");
  const LoadReport report = load_state_dict(*model, weights, path);
  const bool class_layers_only =
      report.missing.empty() && report.unexpected.empty() && !report.mismatched.empty() &&
      std::all_of(report.mismatched.begin(), report.mismatched.end(),
                  [](const auto& m) { return m.key.find("head.cls_preds.") != std::string::npos; });
  if (class_layers_only)
    notes.push_back(concat("weights ", report.loaded.size(), " of ",
                           report.loaded.size() + report.mismatched.size(), " tensors of ", path,
                           "; the class layers start fresh (", num_classes_of(weights), " -> ",
                           model->num_classes, " classes)"));
  else
    notes.push_back("weights " + to_string(report));
  check_finite(*model, path);
  const auto info = weights_info(file, path);
  if (info.classes != wanted.classes && info.classes.size() == wanted.classes.size())
    notes.push_back(
        "the weights have the same number of classes with other names; training starts from their class "
        "head");
  return info;
}

}  // namespace yolox
