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
StateDict state_dict(const torch::nn::Module& module, const std::string& prefix = "");

// The same as a dict to store under "model".
GenericDict to_dict(const StateDict& state);

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
GenericDict find_weights(const c10::IValue& file, const std::string& path);

// Copies the tensors of `weights` (name -> tensor) into those of the module that have the same name and
// shape, converted to the module's type and device; a "module." in front (DataParallel) is ignored. Every
// other tensor of the module stays as it is and is in the report. Throws, before anything is copied, where no
// tensor fits, or where an entry with the name of a tensor is none; `path` is for the message.
LoadReport load_state_dict(torch::nn::Module& module, const GenericDict& weights, const std::string& path);

// What was loaded and what was not, for the log: one line when all fitted, else a line per kind of tensor,
// e.g.
//   loaded 442 of 448 tensors
//   head.cls_preds.0.weight: file [80, 64, 1, 1], model [3, 64, 1, 1]: left at its initial value (and 5 more
//   in head.cls_preds) not in the file: 4 in head.stems (head.stems.0.conv.weight, ...): left at their
//   initial values
std::string to_string(const LoadReport& report);

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

GenericDict to_dict(const WeightsInfo& info);

// The entry "yolox" of a file, or the defaults where there is none. Throws where it is damaged, or where it
// names a pixel format that this program cannot feed; `path` is for the message.
WeightsInfo weights_info(const c10::IValue& file, const std::string& path);

}  // namespace yolox
