// Weights into and out of modules, by name, and what must travel with them: class names, colour order, value
// range. Keys and layout are those of the official YOLOX files (yolox/core/trainer.py,
// yolox/utils/checkpoint.py), so that files go both ways. The file format itself is in pth.hpp.
#pragma once
#include <torch/torch.h>

#include <array>
#include <cmath>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/pth.hpp"
#include "data/batch.hpp"

namespace yolox {

// ---- weights by name

using StateDict = std::vector<std::pair<std::string, torch::Tensor>>;

// Parameters and buffers in the order of Python's state_dict: a module's own parameters, its own buffers,
// then its children in the order in which they were registered. The tensors are the module's own, not copies.
inline StateDict state_dict(const torch::nn::Module& module, const std::string& prefix = "") {
  StateDict out;
  for (const auto& entry : module.named_parameters(/*recurse=*/false))
    out.emplace_back(prefix + entry.key(), entry.value().detach());
  for (const auto& entry : module.named_buffers(/*recurse=*/false))
    out.emplace_back(prefix + entry.key(), entry.value().detach());
  for (const auto& child : module.named_children())
    for (auto& entry : state_dict(*child.value(), prefix + child.key() + "."))
      out.push_back(std::move(entry));
  return out;
}

// The same as a dict to store under "model".
inline GenericDict to_dict(const StateDict& state) {
  auto dict = empty_dict();
  for (const auto& [key, tensor] : state) dict.insert(key, tensor);
  return dict;
}

struct LoadReport {
  struct Mismatch {
    std::string key;
    std::vector<int64_t> file, model;  // shapes
  };
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     // in the model, not in the file: left as they were
  std::vector<std::string> unexpected;  // in the file only
  std::vector<Mismatch> mismatched;     // in both with different shapes: left as they were
  bool complete() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

// The weights of a file: the dict under "model" (official YOLOX), "state_dict" or "ema", else the file itself
// where it is a dict of tensors. Throws where there is none; `path` is for the message.
inline GenericDict find_weights(const c10::IValue& file, const std::string& path) {
  check(file.isGenericDict(), path, ": holds ", describe(file),
        ", not a dict of weights; save model.state_dict()");
  const auto dict = file.toGenericDict();
  std::string found;
  for (const char* key : {"model", "state_dict", "ema"}) {
    if (!dict.contains(key)) continue;
    const auto value = dict.at(key);
    if (value.isGenericDict()) return value.toGenericDict();
    if (!value.isTensor()) found += concat(found.empty() ? "" : ", ", "\"", key, "\" is ", describe(value));
  }
  if (found.empty()) {
    for (const auto& entry : dict)
      if (entry.value().isTensor()) return dict;
    for (const auto& entry : dict) {
      if (found.size() > 200) break;
      found += concat(found.empty() ? "its keys are " : ", ",
                      entry.key().isString() ? entry.key().toStringRef() : "a number");
    }
    if (found.empty()) found = "it is an empty dict";
  }
  fail(path, ": has no weights: ", found, "; save a dict with model.state_dict() under \"model\"");
}

// Copies the tensors of `weights` (name -> tensor) into those of the module that have the same name and
// shape, converted to the module's type and device; a "module." in front (DataParallel) is ignored. Every
// other tensor of the module stays as it is and is in the report. Throws, before anything is copied, where no
// tensor fits, or where an entry with the name of a tensor is none; `path` is for the message.
inline LoadReport load_state_dict(torch::nn::Module& module, const GenericDict& weights,
                                  const std::string& path) {
  LoadReport report;
  std::map<std::string, c10::IValue> in_file;
  std::vector<std::string> file_keys;
  for (const auto& entry : weights) {
    if (!entry.key().isString()) continue;
    std::string key = entry.key().toStringRef();
    if (key.rfind("module.", 0) == 0) key.erase(0, 7);
    check(in_file.emplace(key, entry.value()).second, path, ": has ", key,
          " twice, with and without \"module.\"");
    file_keys.push_back(key);
  }

  const StateDict state = state_dict(module);
  std::vector<std::pair<torch::Tensor, torch::Tensor>> copies;  // to, from
  std::set<std::string> in_model;
  for (const auto& [key, target] : state) {
    in_model.insert(key);
    const auto found = in_file.find(key);
    if (found == in_file.end()) {
      report.missing.push_back(key);
      continue;
    }
    check(found->second.isTensor(), path, ": ", key, " is ", describe(found->second),
          ", not a tensor; save model.state_dict()");
    const auto source = found->second.toTensor();
    if (source.sizes() != target.sizes()) {
      report.mismatched.push_back({key, source.sizes().vec(), target.sizes().vec()});
      continue;
    }
    check(source.is_floating_point() == target.is_floating_point(), path, ": ", key, " holds ",
          source.scalar_type(), " where the model has ", target.scalar_type(),
          "; save the weights as floating point");
    copies.emplace_back(target, source);
    report.loaded.push_back(key);
  }
  for (const auto& key : file_keys)
    if (!in_model.count(key)) report.unexpected.push_back(key);

  check(!copies.empty() || state.empty(), path, ": none of its ", file_keys.size(),
        " entries fits the model: the file has ", file_keys.empty() ? "none" : file_keys.front(),
        ", ..., the model ", state.empty() ? "none" : state.front().first,
        report.mismatched.empty() ? ", ...; is it another network?"
                                  : ", ... in other shapes; is it another size (--model)?");
  torch::NoGradGuard no_grad;
  for (const auto& [target, source] : copies) target.copy_(source);
  return report;
}

// What was loaded and what was not, for the log: one line when all fitted, else a line per kind of tensor,
// e.g.
//   loaded 442 of 448 tensors
//   head.cls_preds.0.weight: file [80, 64, 1, 1], model [3, 64, 1, 1]: left at its initial value (and 5 more
//   in head.cls_preds) not in the file: 4 in head.stems (head.stems.0.conv.weight, ...): left at their
//   initial values
inline std::string to_string(const LoadReport& report) {
  const auto group = [](const std::string& key) {  // the first two names: "head.cls_preds"
    const size_t dot = key.find('.');
    return key.substr(0, dot == std::string::npos ? dot : key.find('.', dot + 1));
  };
  std::ostringstream out;
  out << "loaded " << report.loaded.size() << " of "
      << report.loaded.size() + report.missing.size() + report.mismatched.size() << " tensors";

  std::map<std::string, std::vector<const LoadReport::Mismatch*>> mismatched;
  for (const auto& mismatch : report.mismatched) mismatched[group(mismatch.key)].push_back(&mismatch);
  for (const auto& [name, list] : mismatched) {
    out << "\n"
        << list[0]->key << ": file " << c10::IntArrayRef(list[0]->file) << ", model "
        << c10::IntArrayRef(list[0]->model) << ": left at its initial value";
    if (list.size() > 1) out << " (and " << list.size() - 1 << " more in " << name << ")";
  }
  const auto print = [&](const char* what, const std::vector<std::string>& keys, const char* consequence) {
    std::map<std::string, std::vector<std::string>> groups;
    for (const auto& key : keys) groups[group(key)].push_back(key);
    for (const auto& [name, list] : groups)
      out << "\n"
          << what << ": " << list.size() << " in " << name << " (" << list[0]
          << (list.size() > 1 ? ", ...)" : ")") << ": " << consequence;
  };
  print("not in the file", report.missing, "left at their initial values");
  print("only in the file", report.unexpected, "ignored");
  return out.str();
}

// ---- what the weights need

// Under "yolox" in our own files. Defaults are what a file without it is taken for: official YOLOX from
// 0.1.1.
struct WeightsInfo {
  std::string model;                 // "yolox-nano", ...; empty: unknown
  std::vector<std::string> classes;  // empty: unknown
  int64_t height = 0, width = 0;     // pixels, of the network's input; 0: unknown
  bool legacy_preproc =
      false;  // false: BGR, 0..255; true: RGB, /255, ImageNet's mean and deviation (YOLOX 0.1.0)
};

inline GenericDict to_dict(const WeightsInfo& info) {
  const PixelFormat format = pixel_format(info.legacy_preproc);
  auto classes = empty_list(), size = empty_list(), mean = empty_list(), deviation = empty_list();
  for (const auto& name : info.classes) classes.push_back(name);
  for (const int64_t side : {info.height, info.width}) size.push_back(side);
  for (const double value : format.mean) mean.push_back(value);
  for (const double value : format.std) deviation.push_back(value);
  auto dict = empty_dict();
  dict.insert("model", info.model);
  dict.insert("classes", classes);
  dict.insert("size", size);
  dict.insert("channel_order", format.order);
  dict.insert("value_range", format.range);
  dict.insert("mean", mean);
  dict.insert("std", deviation);
  return dict;
}

// The entry "yolox" of a file, or the defaults where there is none. Throws where it is damaged, or where it
// names a pixel format that this program cannot feed; `path` is for the message.
inline WeightsInfo weights_info(const c10::IValue& file, const std::string& path) {
  WeightsInfo info;
  if (!file.isGenericDict() || !file.toGenericDict().contains("yolox")) return info;
  const auto entry = file.toGenericDict().at("yolox");
  check(entry.isGenericDict(), path, ": \"yolox\" is ", describe(entry), ", not a dict; the file is damaged");
  const auto dict = entry.toGenericDict();
  const auto wrong = [&](const std::string& key, const char* expected) {
    fail(path, ": yolox.", key, dict.contains(key) ? " is " + describe(dict.at(key)) : " is missing",
         ", not ", expected, "; the file is damaged");
  };
  const auto text = [&](const std::string& key) {
    if (!dict.contains(key) || !dict.at(key).isString()) wrong(key, "text");
    return dict.at(key).toStringRef();
  };
  const auto list = [&](const std::string& key) {
    if (!dict.contains(key) || !dict.at(key).isList()) wrong(key, "a list");
    return dict.at(key).toListRef().vec();
  };
  const auto numbers = [&](const std::string& key) {
    std::vector<double> out;
    for (const auto& value : list(key)) {
      if (!value.isInt() && !value.isDouble()) wrong(key, "a list of numbers");
      out.push_back(value.isInt() ? double(value.toInt()) : value.toDouble());
    }
    return out;
  };

  info.model = text("model");
  for (const auto& name : list("classes")) {
    if (!name.isString()) wrong("classes", "a list of names");
    info.classes.push_back(name.toStringRef());
  }
  const auto size = numbers("size");
  // Up to 2^15 pixels, twice what OpenCV's remap takes; the network's strides ask for multiples of 32.
  for (const double side : size)
    if (!(side >= 0 && side <= 32768) || std::fmod(side, 32) != 0) wrong("size", "two multiples of 32");
  if (size.size() != 2) wrong("size", "a height and a width");
  info.height = static_cast<int64_t>(size[0]);
  info.width = static_cast<int64_t>(size[1]);

  if (!dict.contains("value_range") || !(dict.at("value_range").isDouble() || dict.at("value_range").isInt()))
    wrong("value_range", "a number");
  const std::string order = text("channel_order");
  const double range = dict.at("value_range").toScalar().toDouble();
  const auto mean = numbers("mean"), deviation = numbers("std");
  const auto equal = [](const std::vector<double>& a, const std::array<double, 3>& b) {
    bool same = a.size() == 3;
    for (size_t i = 0; same && i < 3; ++i) same = std::abs(a[i] - b[i]) < 1e-6;
    return same;
  };
  for (const bool legacy : {false, true}) {
    const PixelFormat format = pixel_format(legacy);
    if (order != format.order || range != format.range || !equal(mean, format.mean) ||
        !equal(deviation, format.std))
      continue;
    info.legacy_preproc = legacy;
    return info;
  }
  fail(path, ": its weights want ", order, " pixels of 0..", range, ", mean [", c10::Join(", ", mean),
       "], std [", c10::Join(", ", deviation),
       "]; this program feeds BGR 0..255, or RGB 0..1 with ImageNet's mean and std: convert the stem's "
       "weights");
}

}  // namespace yolox
