// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/load.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/flags.hpp"
#include "checkpoint/pth.hpp"
#include "data/source.hpp"

namespace yolox {

EvalGuard::EvalGuard(torch::nn::Module& module) {
  for (const auto& m : module.modules()) modes.emplace_back(m, m->is_training());
  module.eval();
}

EvalGuard::~EvalGuard() {
  for (const auto& [module, training] : modes)
    module->train(training);  // parents come first, because train() also sets the children
}

// Returns the path of a weights file. given: as for read_weights().
static std::string find_weights_file(const std::string& given) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(given, error)) {
    for (const char* name : {"best.pth", "last.pth"})
      if (fs::exists(fs::path(given) / name, error)) return fs::path(given) / name;
    fail(given, " is a folder without best.pth and last.pth; give a weights file or the folder of a run");
  }
  if (fs::exists(given, error)) return given;
  const char* folder_of_archive = std::getenv("YOLOX_WEIGHTS_DIR");  // tools/release.sh
  const std::string folder = concat(folder_of_archive ? folder_of_archive : YOLOX_SOURCE_DIR "/weights", "/");
  std::ifstream sums(folder + "SHA256SUMS");  // lines "HASH  FILE" of the official weights
  std::string hash, file, names;
  while (sums >> hash >> file) {
    const std::string name = official_name(file.substr(0, file.find('.')));
    const std::string fetched = folder + file;
    const bool by_name = official_name(given) == name;
    if (by_name && fs::exists(fetched, error)) return fetched;
    check(!by_name && fs::path(given).filename() != file, by_name ? fetched : given,
          " is missing; weights/get ", name, " fetches the official weights");
    names += (names.empty() ? "" : ", ") + name;
  }
  check(fs::path(given).has_extension() || given.find('/') != std::string::npos, "--weights ", given,
        " is neither a file nor an official model (", names, ")");
  return given;
}

c10::IValue read_weights(const std::string& given) { return read_pth(find_weights_file(given)); }

// Returns the tensor of a key, with or without the prefix "module."; undefined: there is none.
static torch::Tensor find_tensor(const GenericDict& weights, const std::string& key) {
  for (const std::string& name : {key, "module." + key})
    if (weights.contains(name) && weights.at(name).isTensor()) return weights.at(name).toTensor();
  return {};
}

std::string detect_model(const GenericDict& weights, const std::string& likely) {
  for (const ModelRow& size : model_sizes())
    if (size.name == likely && size.make != make_yolox) return likely;
  const torch::Tensor stem = find_tensor(weights, "backbone.backbone.stem.conv.conv.weight");
  if (!stem.defined() || stem.dim() != 4) return "";
  std::string first;
  for (const ModelRow& size : model_sizes()) {
    if (size.make != make_yolox || stem.size(0) != int64_t(size.width * 64)) continue;
    if (first.empty() || size.name == likely) first = size.name;
  }
  return first;
}

int64_t num_classes_of(const GenericDict& weights) {
  for (const auto& e : weights) {
    if (!e.key().isString()) continue;
    if (e.key().toStringRef().ends_with("head.cls_preds.0.weight") && e.value().isTensor() &&
        e.value().toTensor().dim() == 4 && e.value().toTensor().numel() > 0)
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

// Returns the weights without EMA of a checkpoint of a training run.
static GenericDict weights_without_ema(const c10::IValue& file, const std::string& path) {
  usage_check(
      file.isGenericDict() && file.toGenericDict().contains("train"), path,
      " has no weights without EMA, because it is not a checkpoint of a training run; leave --no-ema out");
  return file.toGenericDict().at("train").toGenericDict().at("model").toGenericDict();
}

LoadedModel load_model(const std::string& given, const std::string& model, const std::string& preproc,
                       torch::Device device, bool ema) {
  combination_check(!given.empty(), "--weights FILE is needed");
  const std::string path = find_weights_file(given);
  usage_check(preproc == "auto" || preproc == "bgr" || preproc == "imagenet" || preproc == "legacy",
              "--preproc must be auto, bgr or imagenet, got '", preproc, "'");
  const auto file = read_weights(path);
  const auto weights = ema ? find_weights(file, path) : weights_without_ema(file, path);
  LoadedModel loaded;
  loaded.info = weights_info(file, path);
  if (preproc != "auto") loaded.info.legacy_preproc = preproc != "bgr";
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

// Returns the parameters of the class layers.
static StateDict class_layers(const YOLOX& model) {
  StateDict layers;
  for (const auto& [key, tensor] : state_dict(*model))
    if (key.rfind("head.cls_preds.", 0) == 0) layers.emplace_back(key, tensor);
  return layers;
}

// Sets the class layers of a model whose classes differ from those of the weights. The rows of classes that
// both have by name, without regard to case, come from the weights, the other rows from `fresh`. Returns the
// names of the copied classes. Without any, the model does not change.
static std::vector<std::string> copy_class_rows(YOLOX& model, const StateDict& fresh,
                                                const GenericDict& weights,
                                                const std::vector<std::string>& of_weights,
                                                const std::vector<std::string>& wanted) {
  std::vector<int64_t> from, to;
  std::vector<std::string> copied;
  for (size_t w = 0; w < wanted.size(); ++w) {
    const auto same = [&](const std::string& name) { return lower(name) == lower(wanted[w]); };
    const auto found = std::find_if(of_weights.begin(), of_weights.end(), same);
    if (found == of_weights.end()) continue;
    from.push_back(found - of_weights.begin());
    to.push_back(int64_t(w));
    copied.push_back(wanted[w]);
  }
  if (copied.empty()) return {};
  const torch::NoGradGuard no_grad;
  const StateDict layers = class_layers(model);
  for (size_t k = 0; k < layers.size(); ++k) {
    const torch::Tensor rows = find_tensor(weights, layers[k].first);
    if (!rows.defined() || rows.sizes().slice(1) != layers[k].second.sizes().slice(1)) return {};
    torch::Tensor layer = layers[k].second;
    layer.copy_(fresh[k].second);
    layer.index_copy_(0, torch::tensor(to), rows.to(layer).index_select(0, torch::tensor(from)));
  }
  return copied;
}

// Returns whether the stem of the backbone was loaded, and completely.
static bool has_stem(const LoadReport& report) {
  const auto of_stem = [](const std::string& key) { return key.find("backbone.stem.") != std::string::npos; };
  return std::any_of(report.loaded.begin(), report.loaded.end(), of_stem) &&
         std::none_of(report.missing.begin(), report.missing.end(), of_stem) &&
         std::none_of(report.mismatched.begin(), report.mismatched.end(),
                      [&](const auto& m) { return of_stem(m.key); });
}

Pretrained load_pretrained(YOLOX& model, const std::string& given, const WeightsInfo& wanted,
                           std::vector<std::string>& notes) {
  const std::string path = find_weights_file(given);
  if (const std::string note = file_of_run(given, path); !note.empty()) notes.push_back(note);
  const auto file = read_weights(path);
  const auto weights = find_weights(file, path);
  const std::string found = detect_model(weights, wanted.model);
  check(found.empty() || found == wanted.model, path, " contains weights of ", found, "; use --model ", found,
        " or other weights");
  StateDict fresh = class_layers(model);
  for (auto& [_, tensor] : fresh) tensor = tensor.clone();
  const LoadReport report = load_state_dict(*model, weights, path);
  const auto info = weights_info(file, path);
  const auto of_weights = class_names(info, num_classes_of(weights));
  const auto copied = of_weights == wanted.classes
                          ? std::vector<std::string>()
                          : copy_class_rows(model, fresh, weights, of_weights, wanted.classes);
  const bool class_layers_only =
      report.missing.empty() && report.unexpected.empty() && !report.mismatched.empty() &&
      std::all_of(report.mismatched.begin(), report.mismatched.end(),
                  [](const auto& m) { return m.key.find("head.cls_preds.") != std::string::npos; });
  if (class_layers_only)
    notes.push_back(concat("weights ", report.loaded.size(), " of ",
                           report.loaded.size() + report.mismatched.size(), " tensors of ", path,
                           "; the class layers start fresh",
                           copied.empty() ? "" : ", but for classes that the weights know", " (",
                           num_classes_of(weights), " -> ", model->num_classes, " classes)"));
  else
    notes.push_back("weights " + to_string(report));
  check_finite(*model, path);
  if (!copied.empty())
    notes.push_back(concat("classes ", copied.size(), " of ", model->num_classes,
                           " start from the class layers of the weights, by name: ", listed(copied, 10)));
  else if (info.classes != wanted.classes && info.classes.size() == wanted.classes.size())
    notes.push_back(
        "the weights have the same number of classes with other names; training starts from their class "
        "head");
  return {info, has_stem(report)};
}

}  // namespace yolox
