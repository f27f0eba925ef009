// PyTorch's .pth files, in and out, without Python: the zip container and the part of pickle that torch.save
// writes. A file comes from anywhere, so reading runs nothing and trusts nothing: it builds tensors, dicts,
// lists, tuples, numbers, strings and None only, keeps every other object by name alone, and checks each size
// against the file. Formats: PKWARE APPNOTE 6.3.9 (zip, zip64, CRC-32), CPython Lib/pickletools.py (opcodes,
// protocols 2 to 5), torch/serialization.py and torch/_utils.py (names of the records, storages and rebuild
// functions).
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/new_file.hpp"
#include "checkpoint/zip.hpp"

namespace yolox {

using c10::impl::GenericDict;  // keeps the order in which entries came
using c10::impl::GenericList;

inline GenericDict empty_dict() { return GenericDict(c10::AnyType::get(), c10::AnyType::get()); }
inline GenericList empty_list() { return GenericList(c10::AnyType::get()); }

// Reads what torch.save wrote (PyTorch 1.6 or later, any pickle protocol from 2). OrderedDict becomes a dict,
// a Parameter a tensor, a numpy scalar a number. Tensors are on the CPU, without gradient, own their memory,
// and share it where they did in Python. Objects of any other class are kept as Opaque. Throws
// std::runtime_error with one line that names the file and, where it is not a .pth, what it is instead.
c10::IValue read_pth(const std::string& path);

// Writes a file that read_pth, torch.load(weights_only=True) and torch::pickle_load read. Tensors are stored
// as contiguous CPU tensors without gradient, each with a storage of its own; equal values give equal bytes.
// The file appears whole or not at all: on an error (std::runtime_error, one line) an older file of that name
// is as it was.
void write_pth(const std::string& path, const c10::IValue& value);

// Stands for an object of a class that is not rebuilt: argparse.Namespace, a pickled module, a numpy array,
// bytes.
struct Opaque : torch::CustomClassHolder {
  explicit Opaque(std::string name) : name(std::move(name)) {}
  std::string name;
};

// What a value is, for messages: "a tensor", "a dict of 3", "the Python object argparse.Namespace".
std::string describe(const c10::IValue& value);

namespace pth {

// ---- pickle, reading

const std::vector<std::pair<std::string, at::ScalarType>>& storage_types();

// Whether these keys spread over a hash table of 16 slots per key. c10::Dict doubles its table until every
// key lies within log2(slots) of the slot that its hash asks for, so that a few keys made to collide would
// take all memory. The factor is that of its Fibonacci hashing.
bool spread_out(const std::vector<c10::IValue>& keys);

// The machine that pickle is a program for. Values are nodes that refer to each other by number, so that
// neither a cycle nor a million nested lists can hurt; build() then makes a tree of IValues from those that
// the result reaches.
class Unpickler {
 public:
  Unpickler(ZipReader& zip, std::string program) : zip_(zip), program_(std::move(program)) {}

  c10::IValue run();

 private:
  enum class Kind : uint8_t { kValue, kTuple, kList, kDict, kBytes, kGlobal, kOpaque, kNumpyType, kStorage };
  struct Node {
    Kind kind;
    c10::IValue value;  // the number, string, tensor; of a storage the 1-D tensor; of others bytes or name
    std::vector<uint32_t> items;  // elements; in a dict key, value, key, value
  };
  using Id = uint32_t;
  using Ids = std::vector<Id>;

  // Reading the program
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
  // Appends to the list or dict on the stack; objects that are not rebuilt swallow what is put into them.
  void extend(const Ids& items, Kind kind);

  // One opcode; false at the end of the program. Names as in pickletools.
  bool step();

  void push_global(const std::string& module, const std::string& name);
  void push_global_from_lines();
  void push_global_from_stack();
  void push_call(const Ids& call) { push(reduce(call[0], call[1])); }
  double take_big_endian_double();
  void push_long(std::string_view bytes);

  // Typed access to what the program left
  const Node& node(Id id, Kind kind) const;
  Id argument(Id tuple, size_t index) const;
  const std::string& text(Id id) const;
  int64_t integer(Id id) const;
  std::vector<int64_t> integers(Id tuple) const;

  // What a call gives: one of the few that torch.save uses, else an object known by name. Nothing is run.
  // What is made here is small or shared, since a call is five bytes and can be repeated with the same
  // arguments.
  Id reduce(Id function, Id arguments);
  static bool is_rebuild_tensor(const std::string& name) {
    return name == "torch._utils._rebuild_tensor_v2" || name == "torch._utils._rebuild_tensor";
  }
  // State is ignored (the _metadata of a state dict), but for a numpy type, where it holds the byte order.
  void set_state(Id state);
  // OrderedDict() or OrderedDict([(key, value), ...])
  Id ordered_dict(Id arguments);
  // Protocol 2 has no bytes: it has text of code points below 256, here in UTF-8. Needed for numpy scalars
  // only.
  Id latin1(Id from);
  Id numpy_type(Id name);
  Id numpy_scalar(Id arguments);

  // ('storage', type, key, device, number of elements) -> the whole storage as a 1-D tensor
  Id load_storage(Id tuple);

  // (storage, offset, sizes, strides, ...), offset and strides in elements
  Id tensor(Id arguments);

  // The result as a tree. A value that is used twice is made twice, within a limit: what a few bytes of
  // pickle can repeat without end is no checkpoint.
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
  std::vector<size_t> marks_;                             // heights of the stack
  std::unordered_map<std::string, at::Tensor> storages_;  // by record, as bytes
  uint64_t loaded_ = 0;                                   // bytes in storages_
};

// ---- writing

// Pickle of a value, protocol 2; its tensors are left in `tensors`, record data/i holds the i-th.
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

c10::IValue read_pth(const std::string& path);

void write_pth(const std::string& path, const c10::IValue& value);

}  // namespace yolox
