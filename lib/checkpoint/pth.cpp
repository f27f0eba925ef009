// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pth.hpp"

#include <caffe2/serialize/inline_container.h>
#include <zip.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.hpp"
#include "base/new_file.hpp"

namespace yolox {

std::string describe(const c10::IValue& value) {
  if (value.isCapsule()) {
    const auto object = value.toCapsule();
    const auto* opaque = dynamic_cast<const Opaque*>(object.get());
    return opaque ? "the Python object " + opaque->name : "a capsule";
  }
  if (value.isTensor()) return concat("a tensor ", value.toTensor().sizes());
  if (value.isGenericDict()) return concat("a dict of ", value.toGenericDict().size());
  if (value.isList()) return concat("a list of ", value.toListRef().size());
  if (value.isString()) return concat("the string \"", value.toStringRef().substr(0, 60), "\"");
  if (value.isInt()) return concat("the number ", value.toInt());
  if (value.isDouble()) return concat("the number ", value.toDouble());
  return concat("a ", value.tagKind());
}

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pickle is little-endian, and so are the tensors");

namespace {

template <class... Parts>
[[noreturn]] void damaged(const Parts&... parts) {
  fail(parts..., "; the file is damaged or incomplete: download or copy it again");
}

// Throws with the actual format of a file that is not a zip archive. head: the first 512 bytes, or fewer.
[[noreturn]] void refuse_other_format(const std::string& head, uint64_t size) {
  const auto starts = [&](std::string_view with) { return head.compare(0, with.size(), with) == 0; };
  if (size == 0) fail("the file is empty: its download or copy failed, get it again");
  if (starts("version https://git-lfs"))
    fail("is a git-lfs pointer, not the file itself; run \"git lfs pull\"");
  if (starts("\x1f\x8b")) fail("is compressed with gzip; unpack it first");
  if (starts("\x80") || head.compare(std::min<size_t>(257, head.size()), 5, "ustar") == 0)
    fail(
        "is in the format of torch.save before PyTorch 1.6 (or a plain pickle); convert it in Python: "
        "torch.save(torch.load(FILE, map_location='cpu'), NEW_FILE)");
  if (head.size() > 8 && head[8] == '{' && read_number<uint64_t>(head) < size)
    fail(
        "is a safetensors file; convert it in Python: torch.save(safetensors.torch.load_file(FILE), "
        "NEW_FILE)");
  if (head.size() > 2 && head[0] == 8 && head[1] < 32 && (head[2] == 0x12 || head[2] == 0x3a))
    fail(
        "is an ONNX file, which does not contain the names of the weights; use the .pth from which it was "
        "exported");
  const size_t text = head.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  if (text != std::string::npos && head[text] == '<')
    fail("is a web page, not a checkpoint: the download was refused or redirected; download the file again");
  fail("is not a .pth file (torch.save writes a zip archive, which starts with \"PK\")");
}

// Reader of the zip container of .pth files (libzip): uncompressed records in one top-level folder. torch's
// own reader does not compare the checksums, so that a damaged file would be read without an error. Records
// are known by their names without the top-level folder.
class ZipReader {
 public:
  // Opens a file. Throws if the file is damaged or has another format, which the message names.
  explicit ZipReader(const std::string& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    check(std::filesystem::exists(status), "no such file");
    check(!std::filesystem::is_directory(status), "is a folder; use the .pth file");
    check(std::filesystem::is_regular_file(status), "is not a regular file; use the .pth file");
    std::ifstream file(path, std::ios::binary);
    check(file.is_open(), "cannot open the file: ", std::strerror(errno));
    file_bytes_ = std::filesystem::file_size(path);
    std::string head(std::min<uint64_t>(file_bytes_, 512), '\0');
    file.read(head.data(), std::streamsize(head.size()));
    if (head.compare(0, 4, "PK\x03\x04") != 0) refuse_other_format(head, file_bytes_);

    int code = 0;
    archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
    if (code == ZIP_ER_NOZIP) damaged("the end of the zip archive is missing");
    if (!archive_) {
      zip_error_t reason;
      zip_error_init_with_code(&reason, code);
      const std::string text = zip_error_strerror(&reason);
      zip_error_fini(&reason);
      damaged("bad zip directory (", text, ")");
    }
    for (zip_int64_t i = 0; i < zip_get_num_entries(archive_.get(), 0); ++i) {
      zip_stat_t entry;
      if (zip_stat_index(archive_.get(), zip_uint64_t(i), ZIP_FL_ENC_RAW, &entry) != 0 ||
          !(entry.valid & ZIP_STAT_NAME) || !(entry.valid & ZIP_STAT_SIZE))
        damaged("bad zip directory");
      const std::string name = entry.name;
      const bool stored = entry.comp_method == ZIP_CM_STORE && entry.encryption_method == ZIP_EM_NONE;
      if (stored && entry.comp_size != entry.size) damaged(name, " has two different lengths");
      // torch puts all records in one folder, of any name.
      const Record record{zip_uint64_t(i), entry.size, stored, entry.crc != 0};
      if (!records_.emplace(name.substr(name.find('/') + 1), record).second)
        damaged(name, " occurs twice in the zip directory");
    }
  }

  bool has(const std::string& name) const { return records_.count(name) != 0; }

  // Returns the length of a record, as the archive states it. The file may be shorter.
  uint64_t bytes(const std::string& name) const { return records_.at(name).bytes; }

  // Reads the data of a record, bytes(name) bytes, and compares the checksum. Throws if the record is
  // damaged.
  void read(const std::string& name, char* to) {
    const Record& record = records_.at(name);
    check(record.is_stored, name,
          " is compressed or encrypted, which torch.save never does; save the file with torch.save");
    const std::unique_ptr<zip_file_t, int (*)(zip_file_t*)> data(
        zip_fopen_index(archive_.get(), record.index, 0), zip_fclose);
    if (!data) damaged(name, " is not where the zip directory says");
    for (uint64_t done = 0; done < record.bytes;) {
      const zip_int64_t more = zip_fread(data.get(), to + done, record.bytes - done);
      if (more <= 0) damaged("cannot read ", record.bytes, " bytes of ", name);
      done += uint64_t(more);
    }
    char beyond;  // libzip compares the checksum when it meets the end of the data
    if (record.has_checksum && zip_fread(data.get(), &beyond, 1) != 0) damaged(name, " has a wrong checksum");
  }
  std::string read(const std::string& name) {
    if (bytes(name) > file_bytes_) damaged(name, " is longer than the file");
    std::string out(bytes(name), '\0');
    read(name, out.data());
    return out;
  }

  uint64_t file_bytes() const { return file_bytes_; }

 private:
  struct Record {
    uint64_t index = 0, bytes = 0;
    bool is_stored = false;     // neither compressed nor encrypted
    bool has_checksum = false;  // false after torch.serialization.set_crc32_options(False)
  };
  uint64_t file_bytes_ = 0;
  std::unique_ptr<zip_t, void (*)(zip_t*)> archive_{nullptr, zip_discard};
  std::unordered_map<std::string, Record> records_;
};

// Python class names of storages and their element types.
const std::vector<std::pair<std::string, at::ScalarType>> kStorageTypes = {
    {"torch.FloatStorage", at::kFloat},
    {"torch.DoubleStorage", at::kDouble},
    {"torch.HalfStorage", at::kHalf},
    {"torch.BFloat16Storage", at::kBFloat16},
    {"torch.LongStorage", at::kLong},
    {"torch.IntStorage", at::kInt},
    {"torch.ShortStorage", at::kShort},
    {"torch.CharStorage", at::kChar},
    {"torch.ByteStorage", at::kByte},
    {"torch.BoolStorage", at::kBool},
    {"torch.ComplexFloatStorage", at::kComplexFloat},
    {"torch.ComplexDoubleStorage", at::kComplexDouble}};

// Returns false if inserting these keys into a c10::Dict could exhaust the memory. c10::Dict doubles its hash
// table until each key lies within log2(slots) of its preferred slot, so that a few keys with colliding
// hashes make the table huge. Tests the keys with a table of 16 slots per key and the factor of Dict's
// Fibonacci hashing.
bool keys_are_hash_safe(const std::vector<c10::IValue>& keys) {
  int bits = 4;
  while (keys.size() << 4 > uint64_t(1) << bits) ++bits;
  std::vector<uint64_t> slots;
  for (const auto& key : keys)
    slots.push_back(c10::detail::DictKeyHash()(key) * 11400714819323198485ull >> (64 - bits));
  std::sort(slots.begin(), slots.end());
  uint64_t next_free = 0;
  for (const uint64_t slot : slots) {
    next_free = std::max(next_free, slot);
    if (next_free++ - slot >= uint64_t(bits)) return false;
  }
  return true;
}

c10::IValue opaque(std::string name) {
  return c10::IValue::make_capsule(c10::make_intrusive<Opaque>(std::move(name)));
}

// The pickle virtual machine. Values are nodes that refer to each other by index, so that cycles and deeply
// nested lists cannot overflow the stack. build() converts the nodes that are reachable from the result to a
// tree of IValues.
class Unpickler {
 public:
  // program: contents of data.pkl.
  Unpickler(ZipReader& zip, std::string program) : zip_(zip), program_(std::move(program)) {}

  // Executes the program and returns its result. Throws if the program is damaged.
  c10::IValue run() {
    while (step()) {}
    return build(pop(), 0);
  }

 private:
  enum class Kind : uint8_t { kValue, kTuple, kList, kDict, kGlobal, kOpaque, kStorage };
  using Id = uint32_t;
  using Ids = std::vector<Id>;
  struct Node {
    Kind kind;
    c10::IValue value;  // a number, string or tensor; the 1-D tensor of a storage; else a class name
    Ids items;          // elements; a dict has key, value, key, value, ...
  };

  static constexpr Id kNothing = ~Id(0);
  ZipReader& zip_;
  std::string program_;
  size_t at_ = 0, memoized_ = 0, copied_ = 0, built_ = 0;
  std::vector<Node> nodes_;
  Ids stack_, memo_;
  std::vector<size_t> marks_;                             // stack heights at each MARK
  std::unordered_map<std::string, at::Tensor> storages_;  // by record name, as uint8 tensors
  uint64_t loaded_ = 0;                                   // total bytes in storages_

  // ---- reading the program. Throws if the program ends too early.

  std::string_view take(uint64_t bytes) {
    if (bytes > program_.size() - at_) damaged("data.pkl ends too early");
    at_ += bytes;
    return std::string_view(program_).substr(at_ - bytes, bytes);
  }
  template <class T>
  T take() {
    return read_number<T>(take(sizeof(T)));
  }
  std::string line() {
    const size_t end = program_.find('\n', at_);
    if (end == std::string::npos) damaged("data.pkl ends too early");
    const std::string out(take(end - at_));
    take(1);
    return out;
  }

  // ---- stack and nodes

  Id add(Kind kind, c10::IValue value, Ids items = {}) {
    nodes_.push_back({kind, std::move(value), std::move(items)});
    return static_cast<Id>(nodes_.size() - 1);
  }
  void push(Id id) { stack_.push_back(id); }
  void push_value(c10::IValue value) { push(add(Kind::kValue, std::move(value))); }
  void push_text(Kind kind, std::string_view text) { push(add(kind, std::string(text))); }
  void push_group(Kind kind, Ids items) { push(add(kind, {}, std::move(items))); }
  void push_bytes(std::string_view) { push_text(Kind::kOpaque, "bytes"); }
  Id top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) damaged("data.pkl pops from an empty stack");
    return stack_.back();
  }
  Id pop() {
    const Id id = top();
    stack_.pop_back();
    return id;
  }
  Ids pop(int count) {
    Ids out(count);
    for (int i = count; i-- > 0;) out[i] = pop();
    return out;
  }
  Ids pop_to_mark() {
    if (marks_.empty()) damaged("data.pkl pops to a missing mark");
    Ids out(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return out;
  }
  void memoize(uint64_t place) {
    if (place >= program_.size()) damaged("data.pkl has the memo index ", place);
    if (memo_.size() <= place) memo_.resize(place + 1, kNothing);
    memo_[place] = top();
    ++memoized_;
  }
  void recall(uint64_t place) {
    if (place >= memo_.size() || memo_[place] == kNothing) damaged("data.pkl reads an unset memo entry");
    push(memo_[place]);
  }
  // Appends items to the list or dict on top of the stack. Drops the items if the top is an opaque object.
  void extend(const Ids& items, Kind kind) {
    Node& node = nodes_[top()];
    if (node.kind == Kind::kOpaque) return;
    if (node.kind != kind || (kind == Kind::kDict && items.size() % 2))
      damaged("data.pkl appends to a value that is not a container");
    node.items.insert(node.items.end(), items.begin(), items.end());
  }

  // Executes one opcode. Returns false after STOP. Opcode names are those of pickletools.
  bool step() {
    const auto opcode = take<uint8_t>();
    switch (opcode) {
      case 0x80: take(1); break;                                          // PROTO
      case 0x95: take(8); break;                                          // FRAME
      case '.': return false;                                             // STOP
      case '(': marks_.push_back(stack_.size()); break;                   // MARK
      case '0': pop(); break;                                             // POP
      case '1': pop_to_mark(); break;                                     // POP_MARK
      case 'N': push_value({}); break;                                    // NONE
      case 0x88: push_value(true); break;                                 // NEWTRUE
      case 0x89: push_value(false); break;                                // NEWFALSE
      case 'J': push_value(int64_t(take<int32_t>())); break;              // BININT
      case 'K': push_value(int64_t(take<uint8_t>())); break;              // BININT1
      case 'M': push_value(int64_t(take<uint16_t>())); break;             // BININT2
      case 0x8a: push_long(take(take<uint8_t>())); break;                 // LONG1
      case 0x8b: push_long(take(take<uint32_t>())); break;                // LONG4
      case 'G': push_value(take_big_endian_double()); break;              // BINFLOAT
      case 'X': push_text(Kind::kValue, take(take<uint32_t>())); break;   // BINUNICODE
      case 0x8c: push_text(Kind::kValue, take(take<uint8_t>())); break;   // SHORT_BINUNICODE
      case 0x8d: push_text(Kind::kValue, take(take<uint64_t>())); break;  // BINUNICODE8
      case 'B': push_bytes(take(take<uint32_t>())); break;                // BINBYTES
      case 'C': push_bytes(take(take<uint8_t>())); break;                 // SHORT_BINBYTES
      case 0x8e:
      case 0x96: push_bytes(take(take<uint64_t>())); break;      // BINBYTES8, BYTEARRAY8
      case ')': push_group(Kind::kTuple, {}); break;             // EMPTY_TUPLE
      case 't': push_group(Kind::kTuple, pop_to_mark()); break;  // TUPLE
      case 0x85:
      case 0x86:
      case 0x87: push_group(Kind::kTuple, pop(opcode - 0x84)); break;  // TUPLE1, 2, 3
      case ']': push_group(Kind::kList, {}); break;                    // EMPTY_LIST
      case 'a': extend({pop()}, Kind::kList); break;                   // APPEND
      case 'e': extend(pop_to_mark(), Kind::kList); break;             // APPENDS
      case '}': push_group(Kind::kDict, {}); break;                    // EMPTY_DICT
      case 's': extend(pop(2), Kind::kDict); break;                    // SETITEM
      case 'u': extend(pop_to_mark(), Kind::kDict); break;             // SETITEMS
      case 0x8f: push_text(Kind::kOpaque, "set"); break;               // EMPTY_SET
      case 0x90: extend(pop_to_mark(), Kind::kList); break;            // ADDITEMS
      case 0x91:
        pop_to_mark();
        push_text(Kind::kOpaque, "frozenset");
        break;                                     // FROZENSET
      case 'q': memoize(take<uint8_t>()); break;   // BINPUT
      case 'r': memoize(take<uint32_t>()); break;  // LONG_BINPUT
      case 0x94: memoize(memoized_); break;        // MEMOIZE
      case 'h': recall(take<uint8_t>()); break;    // BINGET
      case 'j': recall(take<uint32_t>()); break;   // LONG_BINGET
      case 'c': {                                  // GLOBAL
        const std::string module = line();
        push_global(module, line());
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const Ids names = pop(2);
        push_global(text(names[0]), text(names[1]));
        break;
      }
      case 'R':
      case 0x81: push_call(pop(2)); break;  // REDUCE, NEWOBJ
      case 0x92: push_call(pop(3)); break;  // NEWOBJ_EX
      case 'b':                             // BUILD: the state, such as the _metadata of a state dict
        pop();
        top();
        break;
      case 'Q': push(load_storage(pop())); break;  // BINPERSID
      default:
        damaged("data.pkl has opcode ", int(opcode), " at byte ", at_ - 1,
                ", which torch.save does not write");
    }
    return true;
  }

  void push_global(const std::string& module, const std::string& name) {
    if (module.size() + name.size() > 1000) damaged("data.pkl has a name of over 1000 bytes");
    push_text(Kind::kGlobal, module + "." + name);
  }
  void push_call(const Ids& call) { push(reduce(call[0], call[1])); }
  double take_big_endian_double() {
    const uint64_t bits = __builtin_bswap64(take<uint64_t>());
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  void push_long(std::string_view bytes) {
    if (bytes.size() > 8) return push_text(Kind::kOpaque, concat("int of ", bytes.size(), " bytes"));
    uint64_t value = !bytes.empty() && bytes.back() < 0 ? ~uint64_t(0) : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push_value(int64_t(value));
  }

  // ---- typed access to nodes. Throws if a node has another type.

  const Node& node(Id id, Kind kind) const {
    if (nodes_[id].kind != kind) damaged("data.pkl has an argument of the wrong kind");
    return nodes_[id];
  }
  Id argument(Id tuple, size_t index) const {
    const Node& arguments = node(tuple, Kind::kTuple);
    if (index >= arguments.items.size()) damaged("data.pkl calls a function with too few arguments");
    return arguments.items[index];
  }
  const std::string& text(Id id) const {
    if (!nodes_[id].value.isString()) damaged("data.pkl has another value in place of a string");
    return nodes_[id].value.toStringRef();
  }
  int64_t integer(Id id) const {
    if (!node(id, Kind::kValue).value.isInt()) damaged("data.pkl has another value in place of an integer");
    return nodes_[id].value.toInt();
  }
  std::vector<int64_t> integers(Id tuple) const {
    const Ids& items = node(tuple, Kind::kTuple).items;
    if (items.size() > 64) damaged("data.pkl has a tensor of more than 64 dimensions");
    std::vector<int64_t> out;
    for (const Id item : items) out.push_back(integer(item));
    return out;
  }

  // ---- calls and storages

  // Returns the result of a call (opcode REDUCE) to one of the functions that torch.save uses, or an opaque
  // object for any other function. Does not execute Python code. Results must be small or shared, because a
  // call takes only five bytes and a malicious file can repeat it with the same arguments.
  Id reduce(Id function, Id arguments) {
    if (nodes_[function].kind == Kind::kOpaque) return function;
    const std::string& name = node(function, Kind::kGlobal).value.toStringRef();
    if (name == "collections.OrderedDict") return ordered_dict(arguments);
    if (name == "torch._utils._rebuild_tensor_v2") return tensor(arguments);
    if (name == "torch._utils._rebuild_parameter" || name == "torch._utils._rebuild_parameter_with_state" ||
        name == "torch.Size")
      return argument(arguments, 0);
    return add(Kind::kOpaque, nodes_[function].value);
  }

  // Handles OrderedDict() and OrderedDict([(key, value), ...]).
  Id ordered_dict(Id arguments) {
    Ids items;
    if (!node(arguments, Kind::kTuple).items.empty())
      for (const Id pair : node(argument(arguments, 0), Kind::kList).items) {
        if (++copied_ > program_.size()) damaged("data.pkl repeats its own parts too often");
        if (nodes_[pair].items.size() != 2) damaged("data.pkl has an OrderedDict that is not made of pairs");
        items.insert(items.end(), nodes_[pair].items.begin(), nodes_[pair].items.end());
      }
    return add(Kind::kDict, {}, std::move(items));
  }

  // Loads a storage from ('storage', type, key, device, number of elements) as a 1-D tensor.
  Id load_storage(Id tuple) {
    const c10::IValue type_name = node(argument(tuple, 1), Kind::kGlobal).value;
    const std::string name = "data/" + text(argument(tuple, 2));
    const int64_t count = integer(argument(tuple, 4));
    const auto type = std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                                   [&](const auto& known) { return known.first == type_name.toStringRef(); });
    if (type == kStorageTypes.end()) return add(Kind::kOpaque, type_name);
    if (!zip_.has(name)) damaged("record ", name, " is missing");
    auto& storage = storages_[name];
    if (!storage.defined()) {
      const uint64_t bytes = zip_.bytes(name);
      // Overlapping records could make the program allocate more memory than the file has bytes.
      if (bytes > zip_.file_bytes() - loaded_) damaged("the records are longer than the file");
      loaded_ += bytes;
      storage = at::empty({int64_t(bytes)}, at::kByte);
      zip_.read(name, static_cast<char*>(storage.mutable_data_ptr()));
    }
    const int64_t room = storage.numel() / int64_t(c10::elementSize(type->second));
    if (count < 0 || count > room) damaged("record ", name, " is shorter than its storage");
    return add(Kind::kStorage, at::empty({0}, type->second).set_(storage.storage(), 0, {count}, {1}));
  }

  // Makes a tensor from (storage, offset, sizes, strides, ...); offset and strides are in elements.
  Id tensor(Id arguments) {
    const Id storage_id = argument(arguments, 0);
    if (nodes_[storage_id].kind == Kind::kOpaque) return storage_id;
    const at::Tensor& flat = node(storage_id, Kind::kStorage).value.toTensor();
    const int64_t offset = integer(argument(arguments, 1)), room = flat.numel();
    const auto sizes = integers(argument(arguments, 2)), strides = integers(argument(arguments, 3));
    const auto wrong = [&] {
      damaged("a tensor of shape ", c10::IntArrayRef(sizes), ", strides ", c10::IntArrayRef(strides),
              ", offset ", offset, " does not fit its storage of ", room);
    };
    if (sizes.size() != strides.size() || offset < 0 || offset > room) wrong();
    bool empty = false;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] < 0 || strides[d] < 0) wrong();
      empty |= sizes[d] == 0;
    }
    if (empty) return add(Kind::kValue, at::empty(sizes, flat.options()));
    // Neither the index of the last element nor the number of elements may exceed the storage. Otherwise a
    // view that repeats elements (stride 0) would let a small file cause huge copies.
    int64_t last = offset, count = 1;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > room / count) wrong();
      count *= sizes[d];
      if (last >= room || (sizes[d] > 1 && strides[d] > (room - 1 - last) / (sizes[d] - 1))) wrong();
      last += (sizes[d] - 1) * strides[d];
    }
    if (last >= room) wrong();
    return add(Kind::kValue, at::empty({0}, flat.options()).set_(flat.storage(), offset, sizes, strides));
  }

  // ---- the result

  // Converts a node to a tree of IValues. A value that is referenced twice is built twice. Throws if the tree
  // is too deep or too large, because a few bytes of pickle can describe a tree of exponential size.
  c10::IValue build(Id id, int depth) {
    check(depth < 100, "data.pkl nests its containers more than 100 deep, so it is not a checkpoint");
    check(++built_ <= program_.size(), "data.pkl repeats its own parts too often, so it is not a checkpoint");
    const Node& from = nodes_[id];
    switch (from.kind) {
      case Kind::kValue: return from.value;
      case Kind::kTuple: {
        std::vector<c10::IValue> items;
        for (const Id item : from.items) items.push_back(build(item, depth + 1));
        return c10::ivalue::Tuple::create(std::move(items));
      }
      case Kind::kList: {
        auto list = empty_list();
        for (const Id item : from.items) list.push_back(build(item, depth + 1));
        return list;
      }
      case Kind::kDict: return build_dict(from.items, depth);
      case Kind::kStorage: return opaque("torch storage");
      case Kind::kGlobal:
      case Kind::kOpaque: return opaque(from.value.toStringRef());
    }
    damaged("data.pkl has no result");
  }

  c10::IValue build_dict(const Ids& items, int depth) {
    std::vector<c10::IValue> keys;
    for (size_t i = 0; i < items.size(); i += 2) {
      const c10::IValue& key = nodes_[items[i]].value;
      if (nodes_[items[i]].kind != Kind::kValue || !(key.isString() || key.isScalar()))
        return opaque("dict whose keys are neither text nor numbers");
      keys.push_back(key);
    }
    check(keys_are_hash_safe(keys),
          "data.pkl has a dict with colliding hash keys, so it is not a checkpoint");
    auto dict = empty_dict();
    for (size_t i = 0; i < keys.size(); ++i)
      dict.insert_or_assign(keys[i], build(items[2 * i + 1], depth + 1));
    return dict;
  }
};

// Writes a value as a pickle program of protocol 2. Collects the tensors in `tensors`; the caller must store
// tensor i in the record data/i.
class Pickler {
 public:
  std::string program{"\x80\x02"};
  std::vector<at::Tensor> tensors;

  void add(const c10::IValue& value) {
    if (value.isNone()) return put("N");
    if (value.isBool()) return put(value.toBool() ? "\x88" : "\x89");
    if (value.isInt()) return add_int(value.toInt());
    if (value.isDouble()) return add_double(value.toDouble());
    if (value.isString()) return add_text(value.toStringRef());
    if (value.isTensor()) return add_tensor(value.toTensor());
    if (value.isTuple()) return add_all("(", value.toTupleRef().elements(), "t");
    if (value.isList()) return add_all("](", value.toListRef(), "e");
    check(value.isGenericDict(), "cannot store ", describe(value),
          " in a .pth; store tensors, containers, numbers or text");
    put("}(");
    for (const auto& entry : value.toGenericDict()) {
      add(entry.key());
      add(entry.value());
    }
    put("u");
  }

 private:
  void put(std::string_view bytes) { program += bytes; }

  void add_all(std::string_view open, c10::ArrayRef<c10::IValue> values, std::string_view close) {
    put(open);
    for (const auto& value : values) add(value);
    put(close);
  }

  void add_int(int64_t value) {
    if (value == int32_t(value)) {
      put("J");
      append_number(program, int32_t(value));
    } else {
      put("\x8a\x08");
      append_number(program, value);
    }
  }

  void add_double(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    put("G");
    append_number(program, __builtin_bswap64(bits));
  }

  void add_text(const std::string& text) {
    check(text.size() < (1u << 31), "cannot store a text of ", text.size(), " bytes in a .pth");
    put("X");
    append_number(program, uint32_t(text.size()));
    put(text);
  }

  void add_ints(c10::IntArrayRef values) {
    put("(");
    for (const int64_t value : values) add_int(value);
    put("t");
  }

  void add_tensor(const at::Tensor& tensor) {
    check(tensor.defined() && tensor.layout() == at::kStrided,
          "cannot store an undefined or sparse tensor in a .pth");
    const auto type = std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                                   [&](const auto& known) { return known.second == tensor.scalar_type(); });
    check(type != kStorageTypes.end(), "cannot store a tensor of ", tensor.scalar_type(),
          " in a .pth; convert the tensor");
    put("ctorch._utils\n_rebuild_tensor_v2\n((");
    add_text("storage");
    put("ctorch\n" + type->first.substr(6) + "\n");  // without the module name "torch."
    add_text(std::to_string(tensors.size()));
    add_text("cpu");
    add_int(tensor.numel());
    put("tQ");
    add_int(0);
    add_ints(tensor.sizes());
    add_ints(c10::contiguous_strides(tensor.sizes()));
    put("\x89"
        "ccollections\nOrderedDict\n)RtR");  // requires_grad = False, no hooks
    tensors.push_back(tensor);
  }
};

}  // namespace

c10::IValue read_pth(const std::string& path) {
  try {
    ZipReader zip(path);
    check(!zip.has("constants.pkl"),
          "is a TorchScript program or from the C++ torch::save; use a .pth that Python's "
          "torch.save or this program wrote");
    check(zip.has("data.pkl"), "is a zip archive without data.pkl, so not a checkpoint of torch.save");
    if (zip.has("byteorder")) {
      const std::string order = zip.read("byteorder");
      check(order == "little", "was written on a ", order,
            "-endian machine; save the checkpoint again on a little-endian machine");
    }
    const uint64_t bytes = zip.bytes("data.pkl");
    // A node takes some fifty times the bytes that make it; the largest YOLOX checkpoint has 0.5 MB here.
    check(bytes <= 32 << 20, "data.pkl has ", bytes, " bytes, so it is not a checkpoint (limit 32 MB)");
    return Unpickler(zip, zip.read("data.pkl")).run();
  } catch (const c10::Error& error) {
    fail(path, ": ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(path, ": ", error.what());
  }
}

void write_pth(const std::string& path, const c10::IValue& value) {
  try {
    Pickler pickler;
    pickler.add(value);
    pickler.program += '.';
    check(!is_irregular_file(path), "is not a regular file");
    NewFile file(path);
    // An error of the disk is thrown after the writer has returned. The writer completes the archive when it
    // is destroyed, and an error there would end the process.
    std::exception_ptr failure;
    caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t bytes) {
      try {
        if (!failure) file.write({static_cast<const char*>(data), bytes});
      } catch (...) {
        failure = std::current_exception();
      }
      return bytes;
    });
    const auto rethrow_failure = [&] {
      if (failure) std::rethrow_exception(failure);
    };
    const auto add = [&](const std::string& name, std::string_view bytes) {
      zip.writeRecord(name, bytes.data(), bytes.size());
      rethrow_failure();
    };
    add("data.pkl", pickler.program);
    add("byteorder", "little");
    // Copies tensors from a GPU to pinned memory, and waits once for many of them.
    constexpr size_t kBytesOfWait = size_t{256} << 20;
    const auto& tensors = pickler.tensors;
    for (size_t first = 0, i = 0; first < tensors.size(); first = i) {
      std::vector<torch::Tensor> copies;
      bool waits = false;
      for (size_t bytes = 0; i < tensors.size() && bytes < kBytesOfWait; bytes += tensors[i++].nbytes()) {
        const torch::Tensor& t = tensors[i];
        try {
          copies.push_back(t.detach().to(torch::kCPU, /*non_blocking=*/true));
          waits = waits || t.is_cuda();
        } catch (const c10::Error&) {  // perhaps there is no more pinned memory
          copies.push_back(t.detach().cpu());
        }
      }
      if (waits) torch::cuda::synchronize();
      for (size_t k = 0; k < copies.size(); ++k) {
        const torch::Tensor t = copies[k].contiguous();
        add("data/" + std::to_string(first + k), {static_cast<const char*>(t.const_data_ptr()), t.nbytes()});
      }
    }
    zip.writeEndOfFile();
    rethrow_failure();
    file.commit();
  } catch (const NewFile::Error&) {
    throw;
  } catch (const c10::Error& error) {
    fail("cannot write ", path, ": ", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail("cannot write ", path, ": ", error.what());
  }
}

}  // namespace yolox
