// SPDX-License-Identifier: Apache-2.0
// Reader and writer of PyTorch's .pth files, without Python: the zip container and the part of pickle that
// torch.save uses. Files may come from untrusted sources, so the reader executes no code from the file. It
// builds only tensors, dicts, lists, tuples, numbers, strings and None, keeps the class name of every other
// object, and checks each size against the file size. Formats: CPython Lib/pickletools.py (opcodes, protocols
// 2 to 5), torch/serialization.py and torch/_utils.py (names of records, storages and rebuild functions).
#pragma once
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/bytes.hpp"
#include "checkpoint/zip.hpp"

namespace yolox {

using c10::impl::GenericDict;  // keeps the insertion order
using c10::impl::GenericList;

inline GenericDict empty_dict() { return GenericDict(c10::AnyType::get(), c10::AnyType::get()); }
inline GenericList empty_list() { return GenericList(c10::AnyType::get()); }

// Reads a file that torch.save wrote (PyTorch 1.6 or later, pickle protocol 2 or later). An OrderedDict
// becomes a dict, a Parameter a tensor, a numpy scalar a number, and an object of any other class an Opaque.
// Tensors are on the CPU, do not require gradients, and share storages as in Python. Throws
// std::runtime_error with one line that names the file and, if the file is not a .pth, its actual format.
c10::IValue read_pth(const std::string& path);

// Writes a file that read_pth, torch.load(weights_only=True) and torch::pickle_load can read. Tensors are
// stored as contiguous CPU tensors without gradient, each with its own storage. Equal values give equal
// bytes. The file is replaced atomically: on an error (std::runtime_error, one line), an older file of this
// name is unchanged.
void write_pth(const std::string& path, const c10::IValue& value);

// Placeholder for an object whose class is not rebuilt, such as argparse.Namespace, a pickled module, a numpy
// array or bytes. `name` is the name of the class.
struct Opaque : torch::CustomClassHolder {
  explicit Opaque(std::string name) : name(std::move(name)) {}
  std::string name;
};

// Describes a value for a message: "a tensor [3, 4]", "a dict of 3", "the Python object argparse.Namespace".
std::string describe(const c10::IValue& value);

namespace pth {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pickle is little-endian, and so are the tensors");

// ---- pickle, reading

// Python class names of storages and their element types.
const std::vector<std::pair<std::string, at::ScalarType>>& storage_types();

// Returns false if inserting these keys into a c10::Dict could exhaust the memory. c10::Dict doubles its hash
// table until each key lies within log2(slots) of its preferred slot, so that a few keys with colliding
// hashes make the table huge. Tests the keys with a table of 16 slots per key and the factor of Dict's
// Fibonacci hashing.
bool keys_are_hash_safe(const std::vector<c10::IValue>& keys);

// The pickle virtual machine. Values are nodes that refer to each other by index, so that cycles and deeply
// nested lists cannot overflow the stack. build() converts the nodes that are reachable from the result to a
// tree of IValues.
class Unpickler {
 public:
  // program: contents of data.pkl.
  Unpickler(ZipReader& zip, std::string program) : zip_(zip), program_(std::move(program)) {}

  // Executes the program and returns its result. Throws if the program is damaged.
  c10::IValue run();

 private:
  enum class Kind : uint8_t { kValue, kTuple, kList, kDict, kBytes, kGlobal, kOpaque, kNumpyType, kStorage };
  struct Node {
    Kind kind;
    c10::IValue value;  // a number, string or tensor; the 1-D tensor of a storage; else bytes or a class name
    std::vector<uint32_t> items;  // elements; a dict has key, value, key, value, ...
  };
  using Id = uint32_t;
  using Ids = std::vector<Id>;

  // Reading the program. Throws if the program ends too early.
  std::string_view take(uint64_t bytes);
  template <class T>
  T take() {
    return number<T>(take(sizeof(T)));
  }
  std::string line();

  // Stack and nodes
  Id add(Kind kind, c10::IValue value, Ids items = {});
  void push(Id id) { stack_.push_back(id); }
  void push_value(c10::IValue value) { push(add(Kind::kValue, std::move(value))); }
  void push_text(Kind kind, std::string_view text) { push(add(kind, std::string(text))); }
  void push_group(Kind kind, Ids items) { push(add(kind, {}, std::move(items))); }
  Id top();
  Id pop();
  Ids pop(int count);
  Ids pop_to_mark();
  void memoize(uint64_t place);
  void recall(uint64_t place);
  // Appends items to the list or dict on top of the stack. Drops the items if the top is an opaque object.
  void extend(const Ids& items, Kind kind);

  // Executes one opcode. Returns false after STOP. Opcode names are those of pickletools.
  bool step();

  void push_global(const std::string& module, const std::string& name);
  void push_global_from_lines();
  void push_global_from_stack();
  void push_call(const Ids& call) { push(reduce(call[0], call[1])); }
  double take_big_endian_double();
  void push_long(std::string_view bytes);

  // Typed access to nodes. Throws if a node has another type.
  const Node& node(Id id, Kind kind) const;
  Id argument(Id tuple, size_t index) const;
  const std::string& text(Id id) const;
  int64_t integer(Id id) const;
  std::vector<int64_t> integers(Id tuple) const;

  // Returns the result of a call (opcode REDUCE) to one of the functions that torch.save uses, or an opaque
  // object for any other function. Does not execute Python code. Results must be small or shared, because a
  // call takes only five bytes and a malicious file can repeat it with the same arguments.
  Id reduce(Id function, Id arguments);
  static bool is_rebuild_tensor(const std::string& name) {
    return name == "torch._utils._rebuild_tensor_v2" || name == "torch._utils._rebuild_tensor";
  }
  // Handles opcode BUILD. Ignores the state (such as the _metadata of a state dict), except for a numpy
  // dtype, whose state contains the byte order.
  void set_state(Id state);
  // Handles OrderedDict() and OrderedDict([(key, value), ...]).
  Id ordered_dict(Id arguments);
  // Handles _codecs.encode(text, 'latin1'), which protocol 2 uses for bytes. Needed for numpy scalars only.
  // The text is in UTF-8, with code points below 256.
  Id latin1(Id from);
  Id numpy_type(Id name);
  Id numpy_scalar(Id arguments);

  // Loads a storage from ('storage', type, key, device, number of elements) as a 1-D tensor.
  Id load_storage(Id tuple);

  // Makes a tensor from (storage, offset, sizes, strides, ...); offset and strides are in elements.
  Id tensor(Id arguments);

  // Converts a node to a tree of IValues. A value that is referenced twice is built twice. Throws if the tree
  // is too deep or too large, because a few bytes of pickle can describe a tree of exponential size.
  c10::IValue build(Id id, int depth);
  c10::IValue build_dict(const Ids& items, int depth);
  static c10::IValue opaque(std::string name) {
    return c10::IValue::make_capsule(c10::make_intrusive<Opaque>(std::move(name)));
  }

  static constexpr Id kNothing = ~Id(0);
  ZipReader& zip_;
  std::string program_;
  size_t at_ = 0, memoized_ = 0, copied_ = 0, built_ = 0;
  std::vector<Node> nodes_;
  Ids stack_, memo_;
  std::vector<size_t> marks_;                             // stack heights at each MARK
  std::unordered_map<std::string, at::Tensor> storages_;  // by record name, as uint8 tensors
  uint64_t loaded_ = 0;                                   // total bytes in storages_
};

// ---- pickle, writing

// Writes a value as a pickle program of protocol 2. Collects the tensors in `tensors`; the caller must store
// tensor i in the record data/i.
class Pickler {
 public:
  std::string program{"\x80\x02"};
  std::vector<at::Tensor> tensors;

  void add(const c10::IValue& value);

 private:
  void put(std::string_view bytes) { program += bytes; }
  void add_all(std::string_view open, const std::vector<c10::IValue>& values, std::string_view close);
  void add_int(int64_t value);
  void add_double(double value);
  void add_text(const std::string& text);
  void add_ints(c10::IntArrayRef values);
  void add_tensor(const at::Tensor& tensor);
};

}  // namespace pth

}  // namespace yolox
