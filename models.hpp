// SPDX-License-Identifier: Apache-2.0
// The table of models: the names of --model, the sizes and their recipes. A new size is a row here. A model
// with a backbone or head of its own is a header that is included here, and a row with its make function.
#pragma once
#include <cctype>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "models/yolox_p2.hpp"
#include "models/yolox_pico.hpp"
#include "yolox.hpp"

namespace yolox {

// Hyper-parameters that depend on the model size, in all recipes. --mosaic-prob, --mixup-prob and
// --multiscale override some of them.
struct SizeDefaults {
  double mosaic_prob;                       // probability of mosaic
  double mosaic_scale_lo, mosaic_scale_hi;  // scale range of mosaic
  double mixup_prob;                        // probability of MixUp
  int smaller, larger;                      // multi-scale: range around the input size, in units of 32 pixels
};

// A row of the table of models.
struct ModelRow : ModelSize {
  int input;  // default input size for training and evaluation: side of the square in pixels
  SizeDefaults defaults;
  YOLOX (*make)(const ModelSize& size, int num_classes) = make_yolox;
};

constexpr SizeDefaults kNanoDefaults = {0.5, 0.5, 1.5, 0, 3, 7};
constexpr SizeDefaults kTinyDefaults = {1, 0.5, 1.5, 0, 3, 7};
constexpr SizeDefaults kFullDefaults = {1, 0.1, 2, 1, 5, 5};

// Returns the table: six official sizes and two examples.
inline const std::vector<ModelRow>& model_sizes() {
  static const std::vector<ModelRow> sizes = {
      {{"yolox-nano", 0.33, 0.25, true}, 416, kNanoDefaults},
      {{"yolox-tiny", 0.33, 0.375, false}, 416, kTinyDefaults},
      {{"yolox-s", 0.33, 0.5, false}, 640, kFullDefaults},
      {{"yolox-m", 0.67, 0.75, false}, 640, kFullDefaults},
      {{"yolox-l", 1.0, 1.0, false}, 640, kFullDefaults},
      {{"yolox-x", 1.33, 1.25, false}, 640, kFullDefaults},
      {{"yolox-pico", 0.33, 0.25, true}, 320, kNanoDefaults, make_yolox_pico},
      {{"yolox-s-p2", 0.33, 0.5, false}, 640, kFullDefaults, make_yolox_p2},
  };
  return sizes;
}

// Returns "yolox-nano, yolox-tiny, ...".
inline std::string model_names() {
  std::vector<std::string> names;
  for (const auto& size : model_sizes()) names.push_back(size.name);
  return listed(names, names.size());
}

// Returns the name of an official model as the table has it: "yolox-s" for "s", "yolox_s" and "YOLOX-S".
inline std::string official_name(std::string name) {
  for (char& c : name) c = c == '_' ? '-' : char(std::tolower(static_cast<unsigned char>(c)));
  return name.rfind("yolox-", 0) == 0 ? name : "yolox-" + name;
}

// Returns the row with this name or official_name(). Throws UsageError if the name is unknown.
inline const ModelRow& model_size(const std::string& name) {
  for (const auto& size : model_sizes())
    if (size.name == name || size.name == official_name(name)) return size;
  throw UsageError(concat("--model ", name, " is unknown; choose ", model_names()));
}

// Returns a new model. name: of model_sizes(). Throws UsageError if the name is unknown, std::runtime_error
// if num_classes < 1.
inline YOLOX make_model(const std::string& name, int num_classes) {
  check(num_classes >= 1, "a detector needs at least one class, got ", num_classes);
  const ModelRow& size = model_size(name);
  return size.make(size, num_classes);
}

}  // namespace yolox
