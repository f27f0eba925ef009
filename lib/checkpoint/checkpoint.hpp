// SPDX-License-Identifier: Apache-2.0
// Folder checkpoint/: reading and writing .pth files without Python, loading weights into a model, and ONNX
// export.
// This file: .pth files, state dicts of modules, and the metadata of weights (class names, colour order,
// value range). Keys and layout are those of official YOLOX (yolox/core/trainer.py,
// yolox/utils/checkpoint.py), so that each program can read the files of the other one.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "base/torch.hpp"

namespace yolox {

// ---- .pth files: the zip container and the part of pickle that torch.save uses. The reader executes no code
// from the file. It builds only tensors, dicts, lists, tuples, numbers, strings and None, and keeps the class
// name of every other object. Formats: CPython Lib/pickletools.py (opcodes, protocol 2),
// torch/serialization.py and torch/_utils.py (names of records, storages and rebuild functions).

using c10::impl::GenericDict;  // keeps the insertion order
using c10::impl::GenericList;

inline GenericDict empty_dict() { return GenericDict(c10::AnyType::get(), c10::AnyType::get()); }
inline GenericList empty_list() { return GenericList(c10::AnyType::get()); }

// Reads a file that torch.save wrote (PyTorch 1.6 or later, with its default pickle protocol). An OrderedDict
// becomes a dict, a Parameter a tensor, and an object of any other class an Opaque. Tensors are on the CPU,
// do not require gradients, and share storages as in Python. Throws std::runtime_error with one line that
// names the file and, if the file is not a .pth, its actual format.
c10::IValue read_pth(const std::string& path);

// Writes a file that read_pth, torch.load(weights_only=True) and torch::pickle_load can read. Tensors are
// stored as contiguous CPU tensors without gradient, each with its own storage. Equal values give equal
// bytes. The file is replaced atomically: on an error (std::runtime_error, one line), an older file of this
// name is unchanged.
void write_pth(const std::string& path, const c10::IValue& value);

// Placeholder for an object whose class is not rebuilt, such as argparse.Namespace, a pickled module, a numpy
// number or bytes. `name` is the name of the class or of the function that makes the object.
struct Opaque : torch::CustomClassHolder {
  explicit Opaque(std::string name) : name(std::move(name)) {}
  std::string name;
};

// Describes a value for a message: "a tensor [3, 4]", "a dict of 3", "the Python object argparse.Namespace".
std::string describe(const c10::IValue& value);

// ---- weights by name

using StateDict = std::vector<std::pair<std::string, torch::Tensor>>;

// Returns parameters and buffers in the order of Python's state_dict(): the module's own parameters, its own
// buffers, then its children in the order of registration. The tensors share memory with the module.
StateDict state_dict(const torch::nn::Module& module, const std::string& prefix = "");

// Converts a state dict to the dict that checkpoints store under "model".
GenericDict to_dict(const StateDict& state);

// Result of load_state_dict().
struct LoadReport {
  std::vector<std::string> loaded;
  std::vector<std::string> missing;     // in the model only; not changed
  std::vector<std::string> unexpected;  // in the file only; ignored
  std::vector<std::string>
      mismatched;  // in both, with different shapes; not changed: "NAME: file [3], model [4]"
  bool complete() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
};

// Returns the state dict of a file: the dict under "model" (official YOLOX), "state_dict" or "ema", else the
// file itself if it is a dict of tensors. Throws if the file contains no state dict. path: for error
// messages.
GenericDict find_weights(const c10::IValue& file, const std::string& path);

// Copies the tensors of `weights` (name -> tensor) to the tensors of the module with the same name and shape,
// and converts type and device. Ignores the prefix "module." (DataParallel). All other tensors of the module
// keep their values and are listed in the report. Throws, before it copies anything, if no tensor fits, or if
// an entry with the name of a tensor is not a tensor. path: for error messages.
LoadReport load_state_dict(torch::nn::Module& module, const GenericDict& weights, const std::string& path);

// Throws if a tensor of the module, with weights from the file `path`, contains NaN or infinity.
void check_finite(const torch::nn::Module& module, const std::string& path);

// Formats a report for the log: one line if all tensors were loaded, else also one line per kind of the
// others, as "not in the file: 12 (head.stems.0.conv.weight, head.stems.0.bn.weight, ...): left at ...".
std::string to_string(const LoadReport& report);

// ---- metadata of weights

// Metadata that our own files contain under "yolox". The defaults hold for files without this entry: official
// YOLOX from 0.1.1.
struct WeightsInfo {
  std::string model;                 // "yolox-nano", ...; empty: unknown
  std::vector<std::string> classes;  // class names; empty: unknown
  int64_t height = 0, width = 0;     // size of the network's input in pixels; 0: unknown
  // False: BGR in 0..255. True: RGB in 0..1, normalised with ImageNet's mean and standard deviation (YOLOX
  // 0.1.0).
  bool legacy_preproc = false;
};

// Converts metadata to the dict that checkpoints store under "yolox".
GenericDict to_dict(const WeightsInfo& info);

// Returns the metadata of a file, or the defaults if the file has none. Throws if the metadata is damaged or
// requires an unsupported pixel format. path: for error messages.
WeightsInfo weights_info(const c10::IValue& file, const std::string& path);

}  // namespace yolox
