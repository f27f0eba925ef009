// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.hpp"

#include <algorithm>
#include <map>
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
  for (const char* key : {"model", "state_dict", "ema"})
    if (dict.contains(key) && dict.at(key).isGenericDict()) return dict.at(key).toGenericDict();
  std::vector<std::string> entries;
  for (const auto& entry : dict) {
    if (entry.value().isTensor()) return dict;
    entries.push_back(concat(entry.key().isString() ? entry.key().toStringRef() : "a number", ": ",
                             describe(entry.value())));
  }
  fail(path, ": has no weights, its entries are ", entries.empty() ? "none" : listed(entries),
       "; save a dict with model.state_dict() under \"model\"");
}

LoadReport load_state_dict(torch::nn::Module& module, const GenericDict& weights, const std::string& path) {
  LoadReport report;
  std::map<std::string, c10::IValue> in_file;
  for (const auto& entry : weights) {
    if (!entry.key().isString()) continue;
    const std::string& key = entry.key().toStringRef();
    in_file[key.starts_with("module.") ? key.substr(7) : key] = entry.value();
  }
  const StateDict state = state_dict(module);
  const std::string first = in_file.empty() ? "none" : in_file.begin()->first;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> copies;  // to, from
  for (const auto& [key, target] : state) {
    const auto found = in_file.extract(key);
    if (found.empty()) {
      report.missing.push_back(key);
      continue;
    }
    check(found.mapped().isTensor(), path, ": ", key, " is ", describe(found.mapped()),
          ", not a tensor; save model.state_dict()");
    const auto source = found.mapped().toTensor();
    if (source.sizes() != target.sizes()) {
      report.mismatched.push_back(concat(key, ": file ", source.sizes(), ", model ", target.sizes()));
      continue;
    }
    copies.emplace_back(target, source);
    report.loaded.push_back(key);
  }
  for (const auto& [key, _] : in_file) report.unexpected.push_back(key);

  check(!copies.empty() || state.empty(), path, ": no entry fits the model: the file has ", first,
        ", ..., the model ", state.empty() ? "none" : state.front().first,
        ", ...; are these the weights of another network or --model?");
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
  std::ostringstream out;
  out << "loaded " << report.loaded.size() << " of "
      << report.loaded.size() + report.missing.size() + report.mismatched.size() << " tensors";

  const auto print = [&](const char* what, const std::vector<std::string>& keys, const char* consequence) {
    if (!keys.empty())
      out << "\n" << what << ": " << keys.size() << " (" << listed(keys, 2) << "): " << consequence;
  };
  print("of another shape", report.mismatched, "left at their initial values");
  print("not in the file", report.missing, "left at their initial values");
  print("only in the file", report.unexpected, "ignored");
  return out.str();
}

GenericDict to_dict(const WeightsInfo& info) {
  const PixelFormat format = pixel_format(info.legacy_preproc);
  auto dict = empty_dict();
  dict.insert("model", info.model);
  dict.insert("classes", info.classes);
  dict.insert("size", std::vector<int64_t>{info.height, info.width});
  dict.insert("channel_order", format.order);
  dict.insert("value_range", format.range);
  dict.insert("mean", format.mean);
  dict.insert("std", format.std);
  return dict;
}

WeightsInfo weights_info(const c10::IValue& file, const std::string& path) {
  WeightsInfo info;
  if (!file.isGenericDict() || !file.toGenericDict().contains("yolox")) return info;
  std::string order;
  double range = 0;
  std::vector<double> mean, deviation;
  try {
    const auto dict = file.toGenericDict().at("yolox").toGenericDict();
    const auto numbers = [&](const char* key) {
      std::vector<double> out;
      for (const auto& value : dict.at(key).toListRef()) out.push_back(value.toScalar().toDouble());
      return out;
    };
    info.model = dict.at("model").toStringRef();
    for (const auto& name : dict.at("classes").toListRef())
      info.classes.push_back(printable(name.toStringRef()));
    const auto size = numbers("size");
    info.height = int64_t(size.at(0));
    info.width = int64_t(size.at(1));
    for (const int64_t side : {info.height, info.width})
      check(side >= 0 && side % 32 == 0 && side <= 32768, "no size of a network");
    order = dict.at("channel_order").toStringRef();
    range = dict.at("value_range").toScalar().toDouble();
    mean = numbers("mean");
    deviation = numbers("std");
  } catch (const std::exception&) {  // std::out_of_range, c10::Error
    fail(path, ": the entry \"yolox\" is damaged; download or copy the file again");
  }
  for (const bool legacy : {false, true}) {
    const PixelFormat format = pixel_format(legacy);
    info.legacy_preproc = legacy;
    if (order == format.order && range == format.range && std::ranges::equal(mean, format.mean) &&
        std::ranges::equal(deviation, format.std))
      return info;
  }
  fail(path, ": its weights need ", order, " pixels of 0..", range, ", mean [", c10::Join(", ", mean),
       "], std [", c10::Join(", ", deviation),
       "]; this program supports BGR 0..255, or RGB 0..1 with ImageNet's mean and std; convert the weights "
       "of the stem");
}

}  // namespace yolox
