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

  // Returns the length of a record. Throws if it is longer than the file.
  uint64_t bytes(const std::string& name) const {
    const uint64_t bytes = records_.at(name).bytes;
    if (bytes > file_bytes_) damaged(name, " is longer than the file");
    return bytes;
  }

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
    std::string out(bytes(name), '\0');
    read(name, out.data());
    return out;
  }

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

c10::IValue opaque(std::string name) {
  return c10::IValue::make_capsule(c10::make_intrusive<Opaque>(std::move(name)));
}

// The pickle virtual machine. A class or function is an Opaque with its name, a storage a 1-D tensor.
class Unpickler {
 public:
  // program: contents of data.pkl.
  Unpickler(ZipReader& zip, std::string program) : zip_(zip), program_(std::move(program)) {}

  // Executes the program and returns its result. Throws if the program is damaged.
  c10::IValue run() {
    while (step()) {}
    return pop();
  }

 private:
  using Values = std::vector<c10::IValue>;

  ZipReader& zip_;
  const std::string program_;
  size_t at_ = 0;
  Values stack_;
  std::vector<size_t> marks_;  // stack heights at each MARK
  std::unordered_map<uint64_t, c10::IValue> memo_;
  std::unordered_map<std::string, at::Tensor> storages_;  // by record name, as uint8 tensors

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
  double take_big_endian_double() {
    const uint64_t bits = __builtin_bswap64(take<uint64_t>());
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // ---- stack and memo

  void push(c10::IValue value) { stack_.push_back(std::move(value)); }
  void push_text(std::string_view text) { push(std::string(text)); }
  void push_bytes(std::string_view) { push(opaque("bytes")); }
  void push_tuple(Values items) { push(c10::ivalue::Tuple::create(std::move(items))); }
  void push_long(std::string_view bytes) {
    if (bytes.size() > 8) return push(opaque(concat("int of ", bytes.size(), " bytes")));
    uint64_t value = !bytes.empty() && bytes.back() < 0 ? ~uint64_t(0) : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push(int64_t(value));
  }
  const c10::IValue& top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) damaged("data.pkl pops from an empty stack");
    return stack_.back();
  }
  c10::IValue pop() {
    c10::IValue value = top();
    stack_.pop_back();
    return value;
  }
  Values pop(int count) {
    Values out(count);
    for (int i = count; i-- > 0;) out[i] = pop();
    return out;
  }
  Values pop_to_mark() {
    if (marks_.empty()) damaged("data.pkl pops to a missing mark");
    Values out(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return out;
  }
  void recall(uint64_t place) {
    if (!memo_.count(place)) damaged("data.pkl reads an unset memo entry");
    push(memo_[place]);
  }
  // Appends items to the list on top of the stack. Drops them if the top is an opaque object, such as a set.
  void append(const Values& items) {
    if (top().isCapsule()) return;
    if (!top().isList()) damaged("data.pkl appends to a value that is not a list");
    auto list = top().toList();
    for (const auto& item : items) list.push_back(item);
  }
  // Inserts key, value, key, value, ... into the dict on top of the stack.
  void insert(const Values& items) {
    if (top().isCapsule()) return;
    if (!top().isGenericDict() || items.size() % 2)
      damaged("data.pkl sets items of a value that is not a dict");
    for (size_t i = 0; i < items.size(); i += 2) insert(top().toGenericDict(), items[i], items[i + 1]);
  }
  // Leaves out items whose keys are neither text nor numbers.
  static void insert(GenericDict dict, const c10::IValue& key, const c10::IValue& value) {
    if (key.isString() || key.isScalar()) dict.insert_or_assign(key, value);
  }

  // Executes one opcode. Returns false after STOP. Opcode names are those of pickletools.
  bool step() {
    const auto opcode = take<uint8_t>();
    switch (opcode) {
      case 0x80: take(1); break;                            // PROTO
      case 0x95: take(8); break;                            // FRAME
      case '.': return false;                               // STOP
      case '(': marks_.push_back(stack_.size()); break;     // MARK
      case '0': pop(); break;                               // POP
      case '1': pop_to_mark(); break;                       // POP_MARK
      case 'N': push({}); break;                            // NONE
      case 0x88: push(true); break;                         // NEWTRUE
      case 0x89: push(false); break;                        // NEWFALSE
      case 'J': push(int64_t(take<int32_t>())); break;      // BININT
      case 'K': push(int64_t(take<uint8_t>())); break;      // BININT1
      case 'M': push(int64_t(take<uint16_t>())); break;     // BININT2
      case 0x8a: push_long(take(take<uint8_t>())); break;   // LONG1
      case 0x8b: push_long(take(take<uint32_t>())); break;  // LONG4
      case 'G': push(take_big_endian_double()); break;      // BINFLOAT
      case 'X': push_text(take(take<uint32_t>())); break;   // BINUNICODE
      case 0x8c: push_text(take(take<uint8_t>())); break;   // SHORT_BINUNICODE
      case 0x8d: push_text(take(take<uint64_t>())); break;  // BINUNICODE8
      case 'B': push_bytes(take(take<uint32_t>())); break;  // BINBYTES
      case 'C': push_bytes(take(take<uint8_t>())); break;   // SHORT_BINBYTES
      case 0x8e:
      case 0x96: push_bytes(take(take<uint64_t>())); break;  // BINBYTES8, BYTEARRAY8
      case ')': push_tuple({}); break;                       // EMPTY_TUPLE
      case 't': push_tuple(pop_to_mark()); break;            // TUPLE
      case 0x85:
      case 0x86:
      case 0x87: push_tuple(pop(opcode - 0x84)); break;  // TUPLE1, 2, 3
      case ']': push(empty_list()); break;               // EMPTY_LIST
      case 'a': append({pop()}); break;                  // APPEND
      case 'e':
      case 0x90: append(pop_to_mark()); break;  // APPENDS, ADDITEMS
      case '}': push(empty_dict()); break;      // EMPTY_DICT
      case 's': insert(pop(2)); break;          // SETITEM
      case 'u': insert(pop_to_mark()); break;   // SETITEMS
      case 0x8f: push(opaque("set")); break;    // EMPTY_SET
      case 0x91:
        pop_to_mark();
        push(opaque("frozenset"));
        break;                                               // FROZENSET
      case 'q': memo_[take<uint8_t>()] = top(); break;       // BINPUT
      case 'r': memo_[take<uint32_t>()] = top(); break;      // LONG_BINPUT
      case 0x94: memo_.emplace(memo_.size(), top()); break;  // MEMOIZE
      case 'h': recall(take<uint8_t>()); break;              // BINGET
      case 'j': recall(take<uint32_t>()); break;             // LONG_BINGET
      case 'c': {                                            // GLOBAL
        const std::string module = line();
        push(opaque(module + "." + line()));
        break;
      }
      case 0x93: {  // STACK_GLOBAL
        const Values names = pop(2);
        push(opaque(text(names[0]) + "." + text(names[1])));
        break;
      }
      case 'R':
      case 0x81: push(call(pop(2))); break;  // REDUCE, NEWOBJ
      case 0x92: push(call(pop(3))); break;  // NEWOBJ_EX
      case 'b':                              // BUILD: the state, such as the _metadata of a state dict
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

  // ---- typed access to values. Throws if a value has another type.

  static Values items(const c10::IValue& value) {
    if (value.isTuple()) return value.toTupleRef().elements().vec();
    if (!value.isList()) damaged("data.pkl has another value in place of a tuple");
    return value.toListRef().vec();
  }
  static c10::IValue argument(const c10::IValue& tuple, size_t index) {
    const Values all = items(tuple);
    if (index >= all.size()) damaged("data.pkl calls a function with too few arguments");
    return all[index];
  }
  static std::string text(const c10::IValue& value) {
    if (!value.isString()) damaged("data.pkl has another value in place of a string");
    return value.toStringRef();
  }
  static int64_t integer(const c10::IValue& value) {
    if (!value.isInt()) damaged("data.pkl has another value in place of an integer");
    return value.toInt();
  }
  static std::vector<int64_t> integers(const c10::IValue& tuple) {
    std::vector<int64_t> out;
    for (const auto& item : items(tuple)) out.push_back(integer(item));
    return out;
  }
  static std::string class_name(const c10::IValue& value) {
    if (!value.isCapsule()) damaged("data.pkl has another value in place of a class");
    return dynamic_cast<const Opaque&>(*value.toCapsule()).name;
  }

  // ---- calls and storages

  // Returns the result of a call, {function, arguments}, of one of the functions that torch.save uses, or an
  // opaque object for any other function. Does not execute Python code.
  c10::IValue call(const Values& function_and_arguments) {
    const c10::IValue &function = function_and_arguments[0], &arguments = function_and_arguments[1];
    const std::string name = class_name(function);
    if (name == "collections.OrderedDict") return ordered_dict(arguments);
    if (name == "torch._utils._rebuild_tensor_v2") return tensor(items(arguments));
    if (name == "torch._utils._rebuild_parameter" || name == "torch._utils._rebuild_parameter_with_state" ||
        name == "torch.Size")
      return argument(arguments, 0);
    return function;
  }

  // Handles OrderedDict() and OrderedDict([(key, value), ...]).
  c10::IValue ordered_dict(const c10::IValue& arguments) {
    auto dict = empty_dict();
    if (items(arguments).empty()) return dict;
    for (const auto& pair : items(argument(arguments, 0))) insert(dict, argument(pair, 0), argument(pair, 1));
    return dict;
  }

  // Loads a storage from ('storage', type, key, device, number of elements) as a 1-D tensor.
  c10::IValue load_storage(const c10::IValue& tuple) {
    const std::string type_name = class_name(argument(tuple, 1)), name = "data/" + text(argument(tuple, 2));
    const int64_t count = integer(argument(tuple, 4));
    const auto type = std::find_if(kStorageTypes.begin(), kStorageTypes.end(),
                                   [&](const auto& known) { return known.first == type_name; });
    if (type == kStorageTypes.end()) return opaque(type_name);
    if (!zip_.has(name)) damaged("record ", name, " is missing");
    auto& storage = storages_[name];
    if (!storage.defined()) {
      storage = at::empty({int64_t(zip_.bytes(name))}, at::kByte);
      zip_.read(name, static_cast<char*>(storage.mutable_data_ptr()));
    }
    const int64_t room = storage.numel() / int64_t(c10::elementSize(type->second));
    if (count < 0 || count > room) damaged("record ", name, " is shorter than its storage");
    return at::empty({0}, type->second).set_(storage.storage(), 0, {count}, {1});
  }

  // Makes a tensor from (storage, offset, sizes, strides, ...); offset and strides are in elements.
  c10::IValue tensor(const Values& arguments) {
    if (arguments.size() < 4) damaged("data.pkl calls a function with too few arguments");
    if (arguments[0].isCapsule()) return arguments[0];
    if (!arguments[0].isTensor()) damaged("data.pkl has another value in place of a storage");
    const at::Tensor flat = arguments[0].toTensor();
    const int64_t offset = integer(arguments[1]), room = flat.numel();
    const auto sizes = integers(arguments[2]), strides = integers(arguments[3]);
    bool fits = sizes.size() == strides.size() && offset >= 0 && offset <= room, empty = false;
    double last = double(offset);  // index of the last element
    for (size_t d = 0; d < sizes.size() && fits; ++d) {
      fits = sizes[d] >= 0 && strides[d] >= 0;
      empty = empty || sizes[d] == 0;
      last += (double(sizes[d]) - 1) * double(strides[d]);
    }
    if (!fits || (!empty && last >= double(room)))
      damaged("a tensor of shape ", c10::IntArrayRef(sizes), ", strides ", c10::IntArrayRef(strides),
              ", offset ", offset, " does not fit its storage of ", room);
    if (empty) return at::empty(sizes, flat.options());
    return at::empty({0}, flat.options()).set_(flat.storage(), offset, sizes, strides);
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
