// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.hpp"

#include <ATen/EmptyTensor.h>
#include <caffe2/serialize/inline_container.h>
#include <zip.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/new_file.hpp"
#include "base/text.hpp"

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

// Throws with the actual format of a file that is not a zip archive. head: its first bytes.
[[noreturn]] void refuse_other_format(const std::string& head) {
  if (head.empty()) fail("the file is empty: its download or copy failed, get it again");
  if (head.starts_with("version https://git-lfs"))
    fail("is a git-lfs pointer, not the file itself; run \"git lfs pull\"");
  if (head.starts_with("<"))
    fail("is a web page, not a checkpoint: the download was refused or redirected; download the file again");
  if (head.starts_with("\x80"))
    fail(
        "is in the format of torch.save before PyTorch 1.6 (or a plain pickle); convert it in Python: "
        "torch.save(torch.load(FILE, map_location='cpu'), NEW_FILE)");
  fail("is not a .pth file (torch.save writes a zip archive, which starts with \"PK\")");
}

// Reader of the zip container of .pth files (libzip). torch's own reader does not compare the checksums, so
// that a damaged file would be read without an error. Records are known by their names without the top-level
// folder, which may have any name.
class ZipReader {
 public:
  // Opens a file. Throws if the file is damaged or has another format, which the message names.
  explicit ZipReader(const std::string& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    check(std::filesystem::exists(status), why_missing(path));
    check(std::filesystem::is_regular_file(status), "is not a regular file; use the .pth file");
    std::ifstream file(path, std::ios::binary);
    check(file.is_open(), "cannot open the file: ", std::strerror(errno));
    file_bytes_ = std::filesystem::file_size(path);
    std::string head(std::min<uint64_t>(file_bytes_, 32), '\0');
    file.read(head.data(), std::streamsize(head.size()));
    if (!head.starts_with("PK\x03\x04")) refuse_other_format(head);

    archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, nullptr));
    const char* first = archive_ ? zip_get_name(archive_.get(), 0, ZIP_FL_ENC_RAW) : nullptr;
    if (!first) damaged("the zip directory at the end of the file is missing or wrong");
    folder_ = first;
    folder_.resize(folder_.find('/') + 1);
  }

  bool has(const std::string& name) const {
    return zip_name_locate(archive_.get(), (folder_ + name).c_str(), ZIP_FL_ENC_RAW) >= 0;
  }

  // Returns the data of a record, uint8. Throws if the record is missing, or its checksum is wrong.
  at::Tensor read(const std::string& name) {
    zip_stat_t record;
    if (zip_stat(archive_.get(), (folder_ + name).c_str(), ZIP_FL_ENC_RAW, &record) != 0)
      damaged("record ", name, " is missing");
    if (record.size > file_bytes_) damaged(name, " is longer than the file");
    const std::unique_ptr<zip_file_t, int (*)(zip_file_t*)> data(
        zip_fopen_index(archive_.get(), record.index, 0), zip_fclose);
    if (!data) damaged(name, " is not where the zip directory says");
    at::Tensor bytes = at::empty({int64_t(record.size)}, at::kByte);
    if (zip_fread(data.get(), bytes.data_ptr(), record.size) != int64_t(record.size))
      damaged("cannot read ", record.size, " bytes of ", name);
    // libzip compares the checksum when it meets the end of the data. A checksum of 0 means none, after
    // torch.serialization.set_crc32_options(False).
    char beyond;
    if (record.crc != 0 && zip_fread(data.get(), &beyond, 1) != 0) damaged(name, " has a wrong checksum");
    return bytes;
  }
  std::string read_text(const std::string& name) {
    const at::Tensor bytes = read(name);
    return {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), size_t(bytes.numel())};
  }

 private:
  uint64_t file_bytes_ = 0;
  std::string folder_;  // "archive/"
  std::unique_ptr<zip_t, void (*)(zip_t*)> archive_{nullptr, zip_discard};
};

// The element types of storages.
constexpr at::ScalarType kStored[] = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                      at::kLong,  at::kInt,    at::kShort,        at::kChar,
                                      at::kByte,  at::kBool,   at::kComplexFloat, at::kComplexDouble};

// Returns the Python class of a storage: "FloatStorage", without the module name "torch.".
std::string storage_class(at::ScalarType type) { return concat(c10::toString(type), "Storage"); }

c10::IValue opaque(std::string name) {
  return c10::IValue::make_capsule(c10::make_intrusive<Opaque>(std::move(name)));
}

// The pickle virtual machine of protocol 2, the protocol of torch.save. A class or function is an Opaque with
// its name, a storage a 1-D tensor. Throws c10::Error or std::out_of_range if the program is damaged.
class Unpickler {
 public:
  // program: contents of data.pkl.
  Unpickler(ZipReader& zip, std::string program) : zip_(zip), program_(std::move(program)) {}

  // Executes the program and returns its result.
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

  // ---- reading the program

  std::string_view take(size_t bytes) {
    TORCH_CHECK(bytes <= program_.size() - at_, "it ends too early");
    at_ += bytes;
    return std::string_view(program_).substr(at_ - bytes, bytes);
  }
  template <class T>
  T take() {
    return read_number<T>(take(sizeof(T)));
  }
  std::string line() {
    const std::string out(take(program_.find('\n', at_) - at_));
    take(1);
    return out;
  }

  // ---- stack and memo

  void push(c10::IValue value) { stack_.push_back(std::move(value)); }
  void push_tuple(Values items) { push(c10::ivalue::Tuple::create(std::move(items))); }
  void push_long(std::string_view bytes) {
    if (bytes.size() > 8) return push(opaque(concat("int of ", bytes.size(), " bytes")));
    uint64_t value = !bytes.empty() && bytes.back() < 0 ? ~uint64_t(0) : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push(int64_t(value));
  }
  const c10::IValue& top() const {
    TORCH_CHECK(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "it pops from an empty stack");
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
    TORCH_CHECK(!marks_.empty(), "it pops to a missing mark");
    Values out(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return out;
  }
  // Appends items to the list on top of the stack. Drops them if the top is an opaque object.
  void append(const Values& items) {
    if (top().isCapsule()) return;
    auto list = top().toList();
    for (const auto& item : items) list.push_back(item);
  }
  // Inserts key, value, key, value, ... into the dict on top of the stack. Leaves out items whose keys are
  // neither text nor numbers.
  void insert(const Values& items) {
    if (top().isCapsule()) return;
    auto dict = top().toGenericDict();
    for (size_t i = 0; i < items.size(); i += 2)
      if (items[i].isString() || items[i].isScalar()) dict.insert_or_assign(items[i], items.at(i + 1));
  }

  // Executes one opcode. Returns false after STOP. Opcode names are those of pickletools.
  bool step() {
    const auto opcode = take<uint8_t>();
    switch (opcode) {
      case 0x80: {  // PROTO
        const int protocol = take<uint8_t>();
        check(protocol == 2, "has pickle protocol ", protocol, "; save it with torch.save's own protocol, 2");
        break;
      }
      case '.': return false;                                                             // STOP
      case '(': marks_.push_back(stack_.size()); break;                                   // MARK
      case 'N': push({}); break;                                                          // NONE
      case 0x88: push(true); break;                                                       // NEWTRUE
      case 0x89: push(false); break;                                                      // NEWFALSE
      case 'J': push(int64_t(take<int32_t>())); break;                                    // BININT
      case 'K': push(int64_t(take<uint8_t>())); break;                                    // BININT1
      case 'M': push(int64_t(take<uint16_t>())); break;                                   // BININT2
      case 0x8a: push_long(take(take<uint8_t>())); break;                                 // LONG1
      case 'G': push(std::bit_cast<double>(__builtin_bswap64(take<uint64_t>()))); break;  // BINFLOAT
      case 'X': push(std::string(take(take<uint32_t>()))); break;                         // BINUNICODE
      case ')': push_tuple({}); break;                                                    // EMPTY_TUPLE
      case 't': push_tuple(pop_to_mark()); break;                                         // TUPLE
      case 0x85:
      case 0x86:
      case 0x87: push_tuple(pop(opcode - 0x84)); break;   // TUPLE1, 2, 3
      case ']': push(empty_list()); break;                // EMPTY_LIST
      case 'a': append({pop()}); break;                   // APPEND
      case 'e': append(pop_to_mark()); break;             // APPENDS
      case '}': push(empty_dict()); break;                // EMPTY_DICT
      case 's': insert(pop(2)); break;                    // SETITEM
      case 'u': insert(pop_to_mark()); break;             // SETITEMS
      case 'q': memo_[take<uint8_t>()] = top(); break;    // BINPUT
      case 'r': memo_[take<uint32_t>()] = top(); break;   // LONG_BINPUT
      case 'h': push(memo_.at(take<uint8_t>())); break;   // BINGET
      case 'j': push(memo_.at(take<uint32_t>())); break;  // LONG_BINGET
      case 'c': {                                         // GLOBAL
        const std::string module = line();
        push(opaque(module + "." + line()));
        break;
      }
      case 'R':
      case 0x81: push(call(pop(2))); break;        // REDUCE, NEWOBJ
      case 'b': pop(); break;                      // BUILD: the state, such as the _metadata of a state dict
      case 'Q': push(load_storage(pop())); break;  // BINPERSID
      default: TORCH_CHECK(false, "it has opcode ", int(opcode), ", which torch.save does not write");
    }
    return true;
  }

  // ---- calls and storages

  static Values items(const c10::IValue& value) {
    return value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
  }
  static std::vector<int64_t> integers(const c10::IValue& tuple) {
    std::vector<int64_t> out;
    for (const auto& item : items(tuple)) out.push_back(item.toInt());
    return out;
  }
  static std::string class_name(const c10::IValue& value) {
    return dynamic_cast<const Opaque&>(*value.toCapsule()).name;
  }

  // Returns the result of a call, {function, arguments}, of one of the functions that torch.save uses, or an
  // opaque object for any other function. Does not execute Python code.
  c10::IValue call(const Values& function_and_arguments) {
    const c10::IValue& function = function_and_arguments[0];
    const std::string name = class_name(function);
    const Values arguments = items(function_and_arguments[1]);
    if (name == "collections.OrderedDict" && arguments.empty()) return empty_dict();
    if (name == "torch._utils._rebuild_tensor_v2") return tensor(arguments);
    if (name == "torch._utils._rebuild_parameter" || name == "torch._utils._rebuild_parameter_with_state" ||
        name == "torch.Size")
      return arguments.at(0);
    return function;
  }

  // Loads a storage from ('storage', type, key, device, number of elements) as a 1-D tensor.
  c10::IValue load_storage(const c10::IValue& tuple) {
    const Values about = items(tuple);
    const std::string type_name = class_name(about.at(1)), name = "data/" + about.at(2).toStringRef();
    const auto type = std::ranges::find(kStored, type_name,
                                        [](at::ScalarType known) { return "torch." + storage_class(known); });
    if (type == std::end(kStored)) return opaque(type_name);
    auto& storage = storages_[name];
    if (!storage.defined()) storage = zip_.read(name);
    const int64_t count = about.at(4).toInt();
    TORCH_CHECK(count >= 0 && count <= storage.numel() / int64_t(c10::elementSize(*type)), "record ", name,
                " is shorter than its storage");
    return at::empty({0}, *type).set_(storage.storage(), 0, {count}, {1});
  }

  // Makes a tensor from (storage, offset, sizes, strides, ...); offset and strides are in elements.
  static c10::IValue tensor(const Values& arguments) {
    if (arguments.at(0).isCapsule()) return arguments[0];
    const at::Tensor flat = arguments[0].toTensor();
    const int64_t offset = arguments.at(1).toInt();
    const auto sizes = integers(arguments.at(2)), strides = integers(arguments.at(3));
    // set_() would enlarge a storage that is too small.
    TORCH_CHECK(offset >= 0 && at::detail::computeStorageNbytes(sizes, strides, flat.itemsize(), offset) <=
                                   flat.nbytes(),
                "a tensor of shape ", c10::IntArrayRef(sizes), " does not fit its storage of ", flat.numel());
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
    if (value.isNone()) {
      put("N");
    } else if (value.isBool()) {
      put(value.toBool() ? "\x88" : "\x89");
    } else if (value.isInt() && value.toInt() == int32_t(value.toInt())) {
      put("J");
      append_number(program, int32_t(value.toInt()));
    } else if (value.isInt()) {
      put("\x8a\x08");
      append_number(program, value.toInt());
    } else if (value.isDouble()) {
      put("G");
      append_number(program, __builtin_bswap64(std::bit_cast<uint64_t>(value.toDouble())));
    } else if (value.isString()) {
      put("X");
      append_number(program, uint32_t(value.toStringRef().size()));
      put(value.toStringRef());
    } else if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isTuple()) {
      add_all("(", value.toTupleRef().elements(), "t");
    } else if (value.isList()) {
      add_all("](", value.toListRef(), "e");
    } else {
      check(value.isGenericDict(), "cannot store ", describe(value),
            " in a .pth; store tensors, containers, numbers or text");
      put("}(");
      for (const auto& entry : value.toGenericDict()) {
        add(entry.key());
        add(entry.value());
      }
      put("u");
    }
  }

 private:
  void put(std::string_view bytes) { program += bytes; }

  void add_all(std::string_view open, c10::ArrayRef<c10::IValue> values, std::string_view close) {
    put(open);
    for (const auto& value : values) add(value);
    put(close);
  }

  void add_tensor(const at::Tensor& tensor) {
    check(tensor.defined() && tensor.layout() == at::kStrided,
          "cannot store an undefined or sparse tensor in a .pth");
    check(std::ranges::count(kStored, tensor.scalar_type()), "cannot store a tensor of ",
          tensor.scalar_type(), " in a .pth; convert the tensor");
    const auto tuple = [](const auto& ints) {
      return c10::ivalue::Tuple::create(std::vector<c10::IValue>(ints.begin(), ints.end()));
    };
    put("ctorch._utils\n_rebuild_tensor_v2\n((");
    add("storage");
    put("ctorch\n" + storage_class(tensor.scalar_type()) + "\n");
    add_all("", {std::to_string(tensors.size()), "cpu", tensor.numel()}, "tQ");
    add_all("", {0, tuple(tensor.sizes()), tuple(c10::contiguous_strides(tensor.sizes()))}, "\x89");
    put("ccollections\nOrderedDict\n)RtR");  // no hooks; \x89: requires_grad is false
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
      const std::string order = zip.read_text("byteorder");
      check(order == "little", "was written on a ", order,
            "-endian machine; save the checkpoint again on a little-endian machine");
    }
    return Unpickler(zip, zip.read_text("data.pkl")).run();
  } catch (const c10::Error& error) {
    const std::string cause = error.what_without_backtrace();
    damaged(path, ": data.pkl cannot be read: ", cause.substr(0, cause.find('\n')));
  } catch (const std::out_of_range&) {
    damaged(path, ": data.pkl cannot be read");
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
    // The writer completes the archive when it is destroyed, and an error there would end the process. So
    // NewFile::flush() throws the errors of the disk.
    caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t bytes) {
      std::fwrite(data, 1, bytes, file.stream());
      return bytes;
    });
    const auto add = [&](const std::string& name, std::string_view bytes) {
      zip.writeRecord(name, bytes.data(), bytes.size());
      file.flush();
    };
    add("data.pkl", pickler.program);
    add("byteorder", "little");
    for (size_t i = 0; i < pickler.tensors.size(); ++i) {
      const at::Tensor t = pickler.tensors[i].detach().cpu().contiguous();
      add("data/" + std::to_string(i), {static_cast<const char*>(t.const_data_ptr()), t.nbytes()});
    }
    zip.writeEndOfFile();
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
