// SPDX-License-Identifier: Apache-2.0
#include "run/fast_paths.hpp"

#include <algorithm>
#include <fstream>
#include <utility>

#include "base/device.hpp"
#include "base/program.hpp"
#include "data/store.hpp"
#include "layers/bn_silu.hpp"

namespace yolox {

std::string fast_path_note(torch::Device device, bool several) {
  std::ifstream version("/proc/driver/nvidia/version");
  std::string driver;
  std::getline(version, driver);
  const std::string name = device_name(device);  // "cuda:0 (NVIDIA H100)"
  return concat(name.substr(name.find(' ') + 1), "; driver ", driver, "; LibTorch ", TORCH_VERSION,
                "; revision ", git_revision(), has_fused_norm() ? ": norm graph" : ": graph",
                several ? " ranks" : "");
}

// Returns true if ./gpu-check has passed with this program on this GPU. several: with several GPUs. gpu-check
// knows cache_folder(), too.
static bool is_checked(torch::Device device, bool several) {
  std::ifstream notes(cache_folder() + "/fast-paths.txt");
  const std::string on_several = fast_path_note(device, true), on_one = fast_path_note(device, false);
  for (std::string line; std::getline(notes, line);)
    if (line == on_several || (line == on_one && !several)) return true;
  return false;
}

// Returns why a path cannot be used with these settings, or "".
static std::string obstacle(const std::string& path, const Config& config, torch::Device device,
                            bool graphs) {
  if (!device.is_cuda()) return "needs a GPU";
  if (path == "norm" && config.amp == "fp64") return "does not support --amp fp64";
  if (path == "norm")
    return has_fused_norm() ? "" : "is not possible, because nvcc was not found when this program was built";
  if (!graphs) return "is not possible in this program";
  if (config.dtr != "off") return "is not possible with --dtr";
  if (config.debug) return "is not possible with --debug";
  if (config.profile) return "is not possible with --profile, which times the parts of a step";
  if (config.bs == 0) return "is not possible with --bs auto, because a graph needs memory of its own";
  return "";
}

bool uses_fast_path(const Config& config, const std::string& name) {
  const std::vector<std::string> used = split_list(config.fast);
  return std::find(used.begin(), used.end(), name) != used.end();
}

std::string use_fast_paths(Config& config, torch::Device device, Ranks& ranks, bool graphs) {
  for (const std::string& name : split_list(config.fast)) {
    const bool is_path = name == "norm" || name == "graph";
    usage_check(is_path || name == "off" || name == "auto", "--fast must be off, auto, norm or graph, got '",
                name, "'");
    const std::string why = is_path ? obstacle(name, config, device, graphs) : "";
    usage_check(why.empty() || !config.was_given("fast"), "--fast ", name, " ", why);
  }
  const bool by_note = uses_fast_path(config, "auto") && device.is_cuda();
  std::string used;
  std::vector<std::string> shown, unchecked;
  for (const auto& [name, text] : {std::pair("norm", "fused norm"), {"graph", "CUDA graphs"}}) {
    if (!obstacle(name, config, device, graphs).empty()) continue;
    const bool several = !ranks.alone() && name == std::string("graph");
    const bool checked = by_note && ranks.max(!is_checked(device, several)) == 0;
    if (checked || uses_fast_path(config, name)) {
      used += concat(used.empty() ? "" : ",", name);
      shown.push_back(text);
    } else if (by_note) {
      unchecked.push_back(text);
    }
  }
  config.fast = used.empty() ? "off" : used;
  if (uses_fast_path(config, "norm")) use_fused_norm(true);  // graphs are turned on by StepGraphs
  std::string fact = listed(shown);
  if (!unchecked.empty())
    fact += concat(fact.empty() ? "" : "; ", "without ", listed(unchecked),
                   ", because ./gpu-check has not passed with this program on ",
                   ranks.alone() ? "this GPU" : "several GPUs of this machine", "; run ./gpu-check once");
  return fact.empty() ? "" : "fast    " + fact;
}

}  // namespace yolox
