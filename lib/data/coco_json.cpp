// SPDX-License-Identifier: Apache-2.0
#include "data/coco_json.hpp"

#include <rapidjson/error/en.h>
#include <rapidjson/reader.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <optional>
#include <string_view>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "data/source.hpp"

namespace yolox {

namespace {

// A number, and if it is whole also as an integer.
struct JsonNumber {
  double value;
  bool whole;
  int64_t integer;
};

// Returns the number in a text, or nothing if the text is anything else.
std::optional<JsonNumber> parse_json_number(std::string_view text) {
  const char *begin = text.data(), *end = begin + text.size();
  int64_t i = 0;
  if (const auto read = std::from_chars(begin, end, i); read.ec == std::errc() && read.ptr == end)
    return JsonNumber{static_cast<double>(i), true, i};
  double d = 0;
  const auto read = std::from_chars(begin, end, d);
  if (read.ec == std::errc::invalid_argument || read.ptr != end) return {};
  if (read.ec == std::errc::result_out_of_range) {
    // Out of range: the sign of the exponent tells underflow from overflow. Without an exponent, a number
    // with a point is tiny, because the parser refuses too many digits before the point.
    const size_t e = text.find_first_of("eE");
    const bool tiny = e == text.npos ? text.find('.') != text.npos : text[e + 1] == '-';
    d = tiny ? 0 : HUGE_VAL;
  }
  // Accept 3.0 as an integer, because exporters that store all columns as floats write ids like that. Beyond
  // 2^53 a double does not represent every integer.
  const bool whole = std::abs(d) <= 0x1p53 && d == std::floor(d);
  return JsonNumber{d, whole, whole ? static_cast<int64_t>(d) : 0};
}

// One key of a JSON object and its value.
struct JsonField {
  enum Kind { null, number, text, list, other } kind = null;
  std::string key, string;           // string: the value of a text
  JsonNumber value = {0, false, 0};  // the value of a number; 0 for false and 1 for true
  std::vector<double> numbers;       // the values of a list of finite numbers; other lists are `other`
};

// Returns the number of a field, also one in quotes.
std::optional<JsonNumber> number_of(const JsonField* field) {
  if (field && field->kind == JsonField::text) return parse_json_number(field->string);
  if (!field || field->kind != JsonField::number) return {};
  return field->value;
}

// One entry of a top-level list, which should be a JSON object, with its position for error messages. The
// getters return the fallback if the key is missing or null. They throw if there is no fallback or if the
// value has the wrong type. A number in quotes is a number, and a number in the place of a text is that text.
// If a key occurs twice, its last value counts.
struct JsonRecord {
  std::string file, table;
  size_t index = 0;
  bool is_object = true;
  std::vector<JsonField> fields;  // only the first `count` are valid; the rest is reused to save allocations
  size_t count = 0;

  // "file.json: annotations[12]"
  std::string where() const { return concat(file, ": ", table, "[", index, "]"); }

  void check_is_object() const {
    if (!is_object) fail(where(), " is not an object {...}; repair or remove the entry");
  }

  const JsonField* find(const char* key) const {
    for (size_t i = count; i-- > 0;)
      if (fields[i].key == key) return fields[i].kind == JsonField::null ? nullptr : &fields[i];
    return nullptr;
  }

  [[noreturn]] void throw_bad_value(const char* key, const char* needed) const {
    const JsonField* field = find(key);
    if (!field) fail(where(), " has no \"", key, "\", ", needed, " is needed; add it or remove the entry");
    std::string found = "an object, or a list with other values than finite numbers";
    if (field->kind == JsonField::number) found = concat(field->value.value);
    if (field->kind == JsonField::text) found = "the text \"" + field->string.substr(0, 80) + "\"";
    if (field->kind == JsonField::list) found = concat(field->numbers.size(), " numbers");
    fail(where(), ".", key, ": found ", found, ", ", needed, " is needed; repair the entry");
  }

  double number(const char* key, std::optional<double> fallback = {}) const {
    const JsonField* field = find(key);
    if (!field && fallback) return *fallback;
    const auto n = number_of(field);
    if (!n || !std::isfinite(n->value)) throw_bad_value(key, "a finite number");
    return n->value;
  }

  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const {
    const JsonField* field = find(key);
    if (!field && fallback) return *fallback;
    const auto n = number_of(field);
    if (!n || !n->whole) throw_bad_value(key, "an integer of 64 bits");
    return n->integer;
  }

  // An integer, or for a text such as "a5" or "007" a negative number that depends on the text alone, so that
  // annotations and detections find their image.
  int64_t id(const char* key, std::optional<int64_t> fallback = {}) const {
    const JsonField* field = find(key);
    if (!field || field->kind != JsonField::text) return integer(key, fallback);
    const auto n = number_of(field);
    if (n && n->whole && concat(n->integer) == field->string) return n->integer;
    return static_cast<int64_t>(fnv1a(field->string) | uint64_t{1} << 63);
  }

  int pixels(const char* key) const {
    const int64_t size = integer(key, 0);
    if (size < 0 || size > INT_MAX) throw_bad_value(key, "a size in pixels");
    return static_cast<int>(size);
  }

  std::string string(const char* key, const std::string& fallback) const {
    const JsonField* field = find(key);
    if (!field) return fallback;
    if (field->kind == JsonField::number)
      return field->value.whole ? concat(field->value.integer) : concat(field->value.value);
    if (field->kind != JsonField::text) throw_bad_value(key, "a text in quotes");
    return field->string;
  }

  const std::vector<double>& box(const char* key) const {
    const JsonField* field = find(key);
    if (!field || field->kind != JsonField::list || field->numbers.size() != 4)
      throw_bad_value(key, "a list of four finite numbers");
    return field->numbers;
  }
};

// A list of JSON objects to read: the value of the top-level key `name`, or the whole file if the name is
// empty.
struct JsonTable {
  std::string name;
  std::function<void(const JsonRecord&)> read;  // called for each entry, in file order
  bool found = false;                           // output: true if the file contains the list
};

// Handler of RapidJSON's SAX events; builds the records. Depth 1 is inside the top-level object, 2 inside a
// table, 3 inside a record, 4 inside a list of a record; deeper values are dropped, and so are those of an
// entry that is no object. If the whole file is one list, the depth starts at 1.
class JsonTableReader : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, JsonTableReader> {
 public:
  JsonTableReader(const std::string& file, std::vector<JsonTable>& tables) : tables_(tables) {
    record_.file = file;
    if (tables[0].name.empty()) {
      table_ = &tables[0];
      depth_ = 1;
    }
  }
  bool Null() { return value(JsonField::null); }
  bool Bool(bool b) { return value(JsonField::number, {double(b), true, b}); }
  // Numbers arrive as text, because RapidJSON converts numbers such as 0e30 incorrectly.
  bool RawNumber(const char* s, size_t n, bool) {
    if (!table_ || depth_ > 4) return true;
    return value(JsonField::number, parse_json_number({s, n}).value_or(kNoNumber));
  }
  bool String(const char* s, size_t n, bool) { return value(JsonField::text, {0, false, 0}, {s, n}); }
  bool StartObject() { return open(false); }
  bool StartArray() { return open(true); }
  bool EndObject(size_t) { return close(); }
  bool EndArray(size_t) { return close(); }
  bool Key(const char* s, size_t n, bool) {
    if (depth_ == 1) {
      table_ = nullptr;
      const std::string_view name(s, n);
      for (JsonTable& table : tables_)
        if (table.name == (name == "annotation" ? "annotations" : name)) table_ = &table;  // as in HIT-UAV
    } else if (depth_ == 3 && table_) {
      if (record_.count == record_.fields.size()) record_.fields.emplace_back();
      record_.fields[record_.count++].key.assign(s, n);
    }
    return true;
  }

 private:
  static constexpr JsonNumber kNoNumber{HUGE_VAL, false, 0};

  JsonField& field() { return record_.fields[record_.count - 1]; }

  bool value(JsonField::Kind kind, JsonNumber number = {0, false, 0}, std::string_view string = {}) {
    if (!table_) return true;
    if (depth_ == 2) {
      record_.count = 0;
      record_.is_object = false;
      end_entry();
    } else if (!record_.is_object) {
      return true;
    } else if (depth_ == 3) {
      field().kind = kind;
      field().value = number;
      field().string = string;
    } else if (depth_ == 4) {
      if (kind == JsonField::text) number = parse_json_number(string).value_or(kNoNumber);
      if ((kind != JsonField::number && kind != JsonField::text) || !std::isfinite(number.value))
        field().kind = JsonField::other;
      field().numbers.push_back(number.value);
    }
    return true;
  }

  bool open(bool list) {
    // The parser recurses, so a file of a million "[" would overflow the stack. COCO's own files are 5 deep.
    check(depth_ < 200, record_.file, ": nested more than 200 deep, so not a COCO file; use another file");
    if (table_ && depth_ == 1) {
      table_->found = list;
      record_.table = table_->name.empty() ? "detections" : table_->name;
      record_.index = 0;
      if (!list) table_ = nullptr;
    } else if (table_ && depth_ == 2) {
      record_.count = 0;
      record_.is_object = !list;
    } else if (table_ && record_.is_object) {
      field().kind = list && depth_ == 3 ? JsonField::list : JsonField::other;
      field().numbers.clear();
    }
    ++depth_;
    return true;
  }

  bool close() {
    --depth_;
    if (depth_ == 2 && table_) end_entry();
    if (depth_ == 1) table_ = nullptr;
    return true;
  }

  void end_entry() {
    table_->read(record_);
    ++record_.index;
  }

  std::vector<JsonTable>& tables_;
  JsonTable* table_ = nullptr;  // the table that is being read, or null
  JsonRecord record_;
  int depth_ = 0;
};

// Returns the content of a file. Throws if it cannot be read.
std::string read_json(const std::string& path) {
  std::string text;
  const std::string error = read_all(path, text, nullptr, /*limit=*/SIZE_MAX);
  check(error.empty(), path, ": cannot be read (", error, "), a JSON file is needed; check the path");
  return text;
}

// Reads the tables in file order. text: is overwritten. path: for error messages.
void read_json_tables(std::string text, const std::string& path, std::vector<JsonTable>& tables) {
  rapidjson::InsituStringStream stream(text.data());
  rapidjson::Reader reader;
  JsonTableReader handler(path, tables);
  // Accept NaN and Infinity, because Python's json module writes them. The getters of JsonRecord reject them
  // with a message that names the entry; elsewhere they do no harm.
  const auto flags =
      rapidjson::kParseInsituFlag | rapidjson::kParseNumbersAsStringsFlag | rapidjson::kParseNanAndInfFlag;
  const auto result = reader.Parse<flags>(stream, handler);
  if (result.IsError()) {
    const bool at_end = stream.Peek() == '\0';
    fail(path, ": not valid JSON at byte ", result.Offset(), ": ", rapidjson::GetParseError_En(result.Code()),
         at_end ? " The file ends there: is it empty or cut off? Copy the file again"
                : " Repair or replace the file");
  }
}

}  // namespace

CocoDataset parse_coco(std::string text, const std::string& path) {
  CocoDataset data;
  const auto skipping = [&data](const char* kind, const auto& read) {
    return [&data, kind, read](const JsonRecord& r) {
      try {
        r.check_is_object();
        read(r);
      } catch (const std::runtime_error& e) {
        data.problems.push_back({kind, e.what()});
      }
    };
  };
  const auto image = [&data](const JsonRecord& r) {
    const int64_t id = r.id("id");
    const std::string name = formatted("%012lld.jpg", static_cast<long long>(id));
    data.images.push_back(
        {id, r.string("file_name", r.string("filename", name)), r.pixels("width"), r.pixels("height")});
  };
  const auto category = [&data](const JsonRecord& r) {
    const int64_t id = r.id("id");
    const JsonField* parent = r.find("supercategory");
    data.categories.push_back({id, r.string("name", std::to_string(id)), parent ? parent->string : ""});
  };
  const auto annotation = [&data](const JsonRecord& r) {
    if (!r.find("bbox")) {
      data.problems.push_back({"annotation without bbox", r.where()});
      return;
    }
    const std::vector<double>& box = r.box("bbox");
    data.annotations.push_back({r.id("id", static_cast<int64_t>(r.index) + 1), r.id("image_id"),
                                r.id("category_id"), box[0], box[1], box[2], box[3],
                                r.number("area", box[2] * box[3]), r.integer("iscrowd", 0) != 0});
  };
  std::vector<JsonTable> tables = {{"images", skipping("image entry cannot be read", image)},
                                   {"categories", skipping("category cannot be read", category)},
                                   {"annotations", skipping("annotation cannot be read", annotation)}};
  read_json_tables(std::move(text), path, tables);
  for (const JsonTable& table : tables)
    check(table.found, path, ": no list \"", table.name,
          "\" at the top level; a COCO annotation file has images, annotations and categories");

  if (data.images.empty() && !data.problems.empty()) fail(data.problems[0].second);
  std::sort(data.categories.begin(), data.categories.end(), [](auto& a, auto& b) { return a.id < b.id; });
  const auto repeated_ids = [](const auto& entries) {
    std::vector<int64_t> ids, repeated;
    for (const auto& entry : entries) ids.push_back(entry.id);
    std::sort(ids.begin(), ids.end());
    for (size_t i = 1; i < ids.size(); ++i)
      if (ids[i] == ids[i - 1]) repeated.push_back(ids[i]);
    return repeated;
  };
  data.repeated_ids = int64_t(repeated_ids(data.annotations).size());
  for (const int64_t id : repeated_ids(data.images))
    fail(path, ": two images have the id ", id, "; make the ids unique");
  for (const int64_t id : repeated_ids(data.categories))
    fail(path, ": two categories have the id ", id, "; make the ids unique");
  return data;
}

CocoDataset read_coco(const std::string& path) {
  try {
    return parse_coco(read_json(path), path);
  } catch (const std::runtime_error&) {
    const std::string other = other_format(path);
    if (other.empty()) throw;
    fail(path, " is ", other);
  }
}

std::vector<Detection> read_detections(const std::string& path) {
  std::vector<Detection> detections;
  const auto detection = [&](const JsonRecord& r) {
    r.check_is_object();
    const std::vector<double>& box = r.box("bbox");
    detections.push_back(
        {r.id("image_id"), r.id("category_id"), box[0], box[1], box[2], box[3], r.number("score")});
  };
  std::vector<JsonTable> tables = {{"", detection}};
  read_json_tables(read_json(path), path, tables);
  check(tables[0].found, path,
        ": not a list of detections [{\"image_id\", \"category_id\", \"bbox\", \"score\"}, ",
        "...]; use a file of detections");
  return detections;
}

void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write) {
  NewFile file(path);
  std::vector<char> buffer(1 << 16);
  rapidjson::FileWriteStream stream(file.stream(), buffer.data(), buffer.size());
  JsonWriter writer(stream);
  write(writer);
  stream.Flush();
  file.commit();
}

void write_field(JsonWriter& writer, const char* key, int64_t value) {
  writer.Key(key);
  writer.Int64(value);
}

void write_field(JsonWriter& writer, const char* key, double value) {
  check(std::isfinite(value), "\"", key, "\" is ", value,
        ", which JSON cannot represent; only finite numbers can be written");
  writer.Key(key);
  writer.Double(value);
}

void write_field(JsonWriter& writer, const char* key, const std::string& value) {
  writer.Key(key);
  size_t at = 0;  // JSON is UTF-8
  for (size_t bytes; at < value.size() && (bytes = utf8_bytes(value, at)) > 0;) at += bytes;
  const std::string text = at < value.size() ? printable(value) : value;
  writer.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

void write_detections(const std::string& path, const std::vector<Detection>& detections,
                      const std::map<int64_t, std::string>& file_names) {
  write_json(path, [&](JsonWriter& writer) {
    write_list(writer, detections, [&](const Detection& d) {
      write_field(writer, "image_id", d.image_id);
      write_field(writer, "category_id", d.category_id);
      write_bbox(writer, d);
      write_field(writer, "score", d.score);
      if (const auto name = file_names.find(d.image_id); name != file_names.end())
        write_field(writer, "file_name", name->second);
    });
  });
}

static void write_coco(JsonWriter& writer, const CocoDataset& data) {
  writer.StartObject();
  if (!data.description.empty()) {
    writer.Key("info");
    writer.StartObject();
    write_field(writer, "description", data.description);
    write_field(writer, "max_dets", int64_t{data.max_detections});
    writer.EndObject();
  }
  writer.Key("images");
  write_list(writer, data.images, [&](const CocoImage& image) {
    write_field(writer, "id", image.id);
    write_field(writer, "file_name", image.file_name);
    write_field(writer, "width", int64_t{image.width});
    write_field(writer, "height", int64_t{image.height});
  });
  writer.Key("categories");
  write_list(writer, data.categories, [&](const CocoCategory& category) {
    write_field(writer, "id", category.id);
    write_field(writer, "name", category.name);
  });
  writer.Key("annotations");
  write_list(writer, data.annotations, [&](const CocoAnnotation& a) {
    write_field(writer, "id", a.id);
    write_field(writer, "image_id", a.image_id);
    write_field(writer, "category_id", a.category_id);
    write_bbox(writer, a);
    write_field(writer, "area", a.area);
    write_field(writer, "iscrowd", int64_t{a.crowd});
  });
  writer.EndObject();
}

void write_coco(const std::string& path, const CocoDataset& data) {
  write_json(path, [&](JsonWriter& writer) { write_coco(writer, data); });
}

std::string coco_text(const CocoDataset& data) {
  char* text = nullptr;
  size_t size = 0;
  {
    File file(open_memstream(&text, &size), std::fclose);
    check(file != nullptr, "not enough memory to write the annotations as text");
    std::vector<char> buffer(1 << 16);
    rapidjson::FileWriteStream stream(file.get(), buffer.data(), buffer.size());
    JsonWriter writer(stream);
    write_coco(writer, data);
    stream.Flush();
  }
  const std::unique_ptr<char, void (*)(void*)> owner(text, std::free);
  return {text, size};
}

}  // namespace yolox
