// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.hpp"

#include <array>
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "base/printable.hpp"
#include "data/batch.hpp"

namespace yolox {

StateDict state_dict(const torch::nn::Module& module, const std::string& prefix) {
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

GenericDict to_dict(const StateDict& state) {
  auto dict = empty_dict();
  for (const auto& [key, tensor] : state) dict.insert(key, tensor);
  return dict;
}

GenericDict find_weights(const c10::IValue& file, const std::string& path) {
  check(file.isGenericDict(), path, ": contains ", describe(file),
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

LoadReport load_state_dict(torch::nn::Module& module, const GenericDict& weights, const std::string& path) {
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
    check(source.is_floating_point() == target.is_floating_point(), path, ": ", key, " has the type ",
          source.scalar_type(), ", the model has ", target.scalar_type(),
          "; save the weights as floating point");
    copies.emplace_back(target, source);
    report.loaded.push_back(key);
  }
  for (const auto& key : file_keys)
    if (!in_model.count(key)) report.unexpected.push_back(key);

  check(!copies.empty() || state.empty(), path, ": none of its ", file_keys.size(),
        " entries fits the model: the file has ", file_keys.empty() ? "none" : file_keys.front(),
        ", ..., the model ", state.empty() ? "none" : state.front().first,
        report.mismatched.empty() ? ", ...; are these the weights of another network?"
                                  : ", ... in other shapes; are these the weights of another --model?");
  torch::NoGradGuard no_grad;
  for (const auto& [target, source] : copies) target.copy_(source);
  return report;
}

void check_finite(const torch::nn::Module& module, const std::string& path) {
  std::vector<std::string> bad;
  for (const auto& [name, tensor] : state_dict(module))
    if (!torch::isfinite(tensor).all().item<bool>()) bad.push_back(name);
  check(bad.empty(), path, ": ", bad.size(), bad.size() == 1 ? " tensor contains" : " tensors contain",
        " NaN or infinity (", listed(bad, 3),
        "); the training that wrote it has diverged; use an older checkpoint");
}

std::string to_string(const LoadReport& report) {
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

GenericDict to_dict(const WeightsInfo& info) {
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

WeightsInfo weights_info(const c10::IValue& file, const std::string& path) {
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
    info.classes.push_back(printable(name.toStringRef()));
  }
  const auto size = numbers("size");
  // A side may have up to 2^15 pixels, twice the limit of OpenCV's remap, and must be a multiple of the
  // largest stride, 32.
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
  fail(path, ": its weights need ", order, " pixels of 0..", range, ", mean [", c10::Join(", ", mean),
       "], std [", c10::Join(", ", deviation),
       "]; this program supports BGR 0..255, or RGB 0..1 with ImageNet's mean and std; convert the weights "
       "of the stem");
}

}  // namespace yolox
