// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/load.hpp"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/text.hpp"
#include "checkpoint/checkpoint.hpp"
#include "data/source.hpp"

namespace yolox {

std::string find_weights_file(const std::string& given) {
  namespace fs = std::filesystem;
  std::error_code error;
  combination_check(!given.empty(), "--weights FILE is needed");
  if (fs::is_directory(given, error)) {
    for (const char* name : {"best.pth", "last.pth"})
      if (fs::exists(fs::path(given) / name, error)) return fs::path(given) / name;
    fail(given, " is a folder without best.pth and last.pth; give a weights file or the folder of a run");
  }
  if (fs::exists(given, error)) return given;
  const char* folder_of_archive = std::getenv("YOLOX_WEIGHTS_DIR");  // tools/release.sh
  const fs::path folder = folder_of_archive ? folder_of_archive : YOLOX_SOURCE_DIR "/weights";
  std::string official;
  for (const ModelRow& row : model_sizes()) {
    if (row.make != make_yolox) continue;
    std::string file = row.name + ".pth";
    file[5] = '_';  // yolox_s.pth
    const bool by_name = official_name(given) == row.name;
    const std::string path = by_name ? (folder / file).string() : given;
    if (by_name && fs::exists(path, error)) return path;
    check(!by_name && fs::path(given).filename() != file, path, " is missing; weights/get ", row.name,
          " fetches the official weights");
    official += (official.empty() ? "" : ", ") + row.name;
  }
  check(fs::path(given).has_extension() || given.find('/') != std::string::npos, "--weights ", given,
        " is neither a file nor an official model (", official, ")");
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
  const torch::Tensor layer = find_tensor(weights, "head.cls_preds.0.weight");
  return layer.defined() && layer.dim() == 4 && layer.numel() > 0 ? layer.size(0) : 0;
}

std::vector<std::string> class_names(const WeightsInfo& info, int64_t classes) {
  if (!info.classes.empty()) return info.classes;
  return classes == int64_t(coco_classes().size()) ? coco_classes() : std::vector<std::string>();
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
  const std::string path = find_weights_file(given);
  usage_check(preproc == "auto" || preproc == "bgr" || preproc == "imagenet" || preproc == "legacy",
              "--preproc must be auto, bgr, imagenet or legacy, got '", preproc, "'");
  const auto file = read_pth(path);
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
  if (path != given) loaded.report = "weights " + path;
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

// Sets the rows of the class layers whose classes the weights have by name, without regard to case, to those
// of the weights. Returns the names of these classes.
static std::vector<std::string> copy_class_rows(YOLOX& model, const GenericDict& weights,
                                                const std::vector<std::string>& of_weights,
                                                const std::vector<std::string>& wanted) {
  const torch::NoGradGuard no_grad;
  std::vector<std::string> copied;
  for (size_t row = 0; row < wanted.size(); ++row) {
    const auto found = std::ranges::find(of_weights, lower(wanted[row]), lower);
    if (found == of_weights.end()) continue;
    for (const auto& [key, layer] : state_dict(*model)) {
      if (!key.starts_with("head.cls_preds.")) continue;
      const torch::Tensor rows = find_tensor(weights, key);
      if (!rows.defined() || rows.sizes().slice(1) != layer.sizes().slice(1)) return {};
      layer[int64_t(row)].copy_(rows[found - of_weights.begin()]);
    }
    copied.push_back(wanted[row]);
  }
  return copied;
}

// Returns whether the stem of the backbone was loaded, and completely.
static bool has_stem(const LoadReport& report) {
  const auto of_stem = [](const std::string& key) { return key.find("backbone.stem.") != std::string::npos; };
  return std::any_of(report.loaded.begin(), report.loaded.end(), of_stem) &&
         std::none_of(report.missing.begin(), report.missing.end(), of_stem) &&
         std::none_of(report.mismatched.begin(), report.mismatched.end(), of_stem);
}

Pretrained load_pretrained(YOLOX& model, const std::string& given, const WeightsInfo& wanted,
                           std::vector<std::string>& notes) {
  const std::string path = find_weights_file(given);
  const auto file = read_pth(path);
  const auto weights = find_weights(file, path);
  const std::string found = detect_model(weights, wanted.model);
  check(found.empty() || found == wanted.model, path, " contains weights of ", found, "; use --model ", found,
        " or other weights");
  const LoadReport report = load_state_dict(*model, weights, path);
  check_finite(*model, path);
  notes.push_back(concat("weights ", path, ": ", to_string(report)));
  const auto info = weights_info(file, path);
  const auto of_weights = class_names(info, num_classes_of(weights));
  if (of_weights == wanted.classes) return {info, has_stem(report)};
  const auto copied = copy_class_rows(model, weights, of_weights, wanted.classes);
  if (!copied.empty())
    notes.push_back(concat("classes ", copied.size(), " of ", model->num_classes,
                           " start from the class layers of the weights, by name: ", listed(copied, 10)));
  else if (info.classes.size() == wanted.classes.size())
    notes.push_back(
        "the weights have the same number of classes with other names; training starts from their class "
        "head");
  return {info, has_stem(report)};
}

}  // namespace yolox
