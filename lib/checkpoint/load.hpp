// SPDX-License-Identifier: Apache-2.0
// Finds and reads the weights file that a user names, and loads it into a model.
#pragma once

#include <string>
#include <vector>

#include "base/flags.hpp"
#include "base/torch.hpp"
#include "checkpoint/checkpoint.hpp"
#include "images/image.hpp"
#include "models.hpp"

namespace yolox {

// Flags of the programs that use a trained model.
struct ModelFlags : Flags {
  std::string weights =
      flag(weights, "Model", "weights", "", "FILE",
           "checkpoint (ours or official), or name of a model that weights/get has downloaded");
  std::string model = flag(model, "Model", "model", "", "NAME", model_names() + " [from the checkpoint]");
  std::string size =
      flag(size, "Model", "size", "", "N|HxW", "input size in pixels [from the checkpoint or the model]");
  std::string preproc = flag(preproc, "Model", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");

  // As Flags::check_values(), also of --size.
  void check_values() const {
    Flags::check_values();
    if (!size.empty() || was_given("size")) parse_size(size);
  }
};

// Returns the path of a weights file. given: a path; the folder of a run, for its best.pth, or last.pth if
// there is no best.pth; or the name of a model such as yolox-s or s, for the file that weights/get has
// downloaded. Throws if a file of official weights is missing, or if a folder has no checkpoint.
std::string find_weights_file(const std::string& given);
// Reads this file, a .pth checkpoint.
c10::IValue read_weights(const std::string& given);

// Returns the name of the model to which weights belong, from the shape of the stem, or "" if no model fits.
// If several models fit, prefers `likely`, else the first one. Returns `likely` if this model has a make
// function of its own, because only the name tells such models apart.
std::string detect_model(const GenericDict& weights, const std::string& likely = "");

// Returns the number of classes of the weights, or 0 if they have no head.
int64_t num_classes_of(const GenericDict& weights);

// Returns the class names of a model: those of its file, else those of COCO if the model has 80 classes, else
// an empty list.
std::vector<std::string> class_names(const WeightsInfo& info, int64_t classes);

struct LoadedModel {
  YOLOX model{nullptr};
  WeightsInfo info;    // info.classes is empty if the file contains no class names
  std::string report;  // the file used of a run folder, entries that the model does not have; may be empty
};

// Loads a model with all of its weights, in evaluation mode, on the device. given: as for read_weights().
// model: expected model, or "" to take the model from the file. preproc: "auto" (from the file), "bgr", or
// "imagenet" alias "legacy". ema: false for the weights without EMA of a checkpoint of a training run. Throws
// if the weights are incomplete.
LoadedModel load_model(const std::string& given, const std::string& model, const std::string& preproc,
                       torch::Device device, bool ema = true);

// Returns the input size: the flag --size if given, else the size with which the weights were trained, else
// the default size of the model.
ImageSize input_size(const WeightsInfo& info, const std::string& flag);

struct Pretrained {
  WeightsInfo info;  // metadata of the file
  bool has_stem;     // whether the stem of the backbone was loaded, and completely
};

// Initialises a new model with the weights of a file, for fine-tuning. Appends a report of skipped tensors to
// `notes`. Throws if the weights belong to another model than wanted.model.
Pretrained load_pretrained(YOLOX& model, const std::string& given, const WeightsInfo& wanted,
                           std::vector<std::string>& notes);

}  // namespace yolox
