// SPDX-License-Identifier: Apache-2.0
// Reader and writer of PyTorch's .pth files, without Python: the zip container and the part of pickle that
// torch.save uses. The reader executes no code from the file. It builds only tensors, dicts, lists, tuples,
// numbers, strings and None, and keeps the class name of every other object. Formats: CPython
// Lib/pickletools.py (opcodes, protocol 2), torch/serialization.py and torch/_utils.py (names of
// records, storages and rebuild functions).
#pragma once
#include <torch/torch.h>

#include <string>
#include <utility>

namespace yolox {

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

}  // namespace yolox
