// COCO JSON files in and out: annotation files (images, categories, annotations) and detection files (the
// list that COCO's evaluation server takes). Format: cocodataset.org/#format-data and #format-results.
// Reading streams: a file is never held as a whole and outlines (segmentation) are passed over, so memory is
// what the structs below take. Every error is one line with the file, the entry and the key, or the byte
// where JSON ends.
#pragma once
#include <rapidjson/error/en.h>
#include <rapidjson/filereadstream.h>
#include <rapidjson/filewritestream.h>
#include <rapidjson/reader.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.hpp"
#include "base/new_file.hpp"

namespace yolox {

// Boxes are x, y (top left), width, height in pixels of the original picture, not clipped to it.
struct CocoImage {
  int64_t id = 0;
  std::string file_name;      // "%012d.jpg" of the id where the file gives none
  int width = 0, height = 0;  // 0 where the file does not say
};
struct CocoCategory {
  int64_t id = 0;
  std::string name;  // the id in digits where the file gives none
};
struct CocoAnnotation {
  int64_t id = 0;  // 1 + position in the file where the file gives none
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double area = 0;  // of the outline where the file has one, else w * h
  bool crowd = false;
};
struct CocoDataset {
  std::vector<CocoImage> images;            // in file order, ids unique
  std::vector<CocoCategory> categories;     // by ascending id, ids unique: position = class index
  std::vector<CocoAnnotation> annotations;  // in file order, also those of unknown images and categories
  int64_t without_box = 0;                  // annotations that have no bbox and are therefore left out
};
struct Detection {
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double score = 0;
};

struct JsonField {
  enum Kind { null, number, text, list, other } kind = null;
  std::string key, string;  // string: of a text
  double number_value = 0;  // of a number; false and true are 0 and 1
  bool whole = false;       // the number is whole and `integer` is its value
  int64_t integer = 0;
  std::vector<double> numbers;  // of a list of finite numbers; any other list is of kind `other`
};

// One {...} of a list of such, and where it stands. The getters throw if the value is of another type. Null
// is taken as missing; what is missing is the fallback, else an error. Of equal keys the last one counts.
struct JsonRecord {
  std::string file, table;
  size_t index = 0;
  std::vector<JsonField> fields;  // the first `count`; the others keep their memory for the next record
  size_t count = 0;

  // "file.json: annotations[12]"
  std::string where() const { return concat(file, ": ", table, "[", index, "]"); }

  const JsonField* find(const char* key) const {
    for (size_t i = count; i-- > 0;)
      if (fields[i].key == key) return fields[i].kind == JsonField::null ? nullptr : &fields[i];
    return nullptr;
  }
  [[noreturn]] void refuse(const char* key, const char* needed) const {
    const JsonField* field = find(key);
    if (!field) fail(where(), " has no \"", key, "\", ", needed, " is needed; add it or remove the entry");
    std::string found = "an object or a list of more than finite numbers";
    if (field->kind == JsonField::number) found = concat(field->number_value);
    if (field->kind == JsonField::text) found = "the text \"" + field->string.substr(0, 80) + "\"";
    if (field->kind == JsonField::list) found = concat(field->numbers.size(), " numbers");
    fail(where(), ".", key, ": found ", found, ", ", needed, " is needed; repair the entry");
  }
  double number(const char* key, std::optional<double> fallback = {}) const {
    const JsonField* field = find(key);
    if (!field && fallback) return *fallback;
    if (!field || field->kind != JsonField::number || !std::isfinite(field->number_value))
      refuse(key, "a finite number");
    return field->number_value;
  }
  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const {
    const JsonField* field = find(key);
    if (!field && fallback) return *fallback;
    if (!field || field->kind != JsonField::number || !field->whole) refuse(key, "a whole number of 64 bits");
    return field->integer;
  }
  int pixels(const char* key) const {
    const int64_t value = integer(key, 0);
    if (value < 0 || value > INT_MAX) refuse(key, "a size in pixels");
    return static_cast<int>(value);
  }
  std::string string(const char* key, const std::string& fallback) const {
    const JsonField* field = find(key);
    if (field && field->kind != JsonField::text) refuse(key, "a text in quotes");
    return field ? field->string : fallback;
  }
  const std::vector<double>& box(const char* key) const {
    const JsonField* field = find(key);
    if (!field || field->kind != JsonField::list || field->numbers.size() != 4)
      refuse(key, "a list of 4 finite numbers");
    return field->numbers;
  }
};

// A list of records to read: the value of the top-level key `name`, or the whole file if the name is empty.
struct JsonTable {
  std::string name;
  std::function<void(const JsonRecord&)> read;  // called for each record, in file order
  bool found = false;                           // out: the file has such a list
};

// Receives RapidJSON's events and puts records together. Depth 1 is inside the top-level object, 2 inside a
// table, 3 inside a record, 4 inside a list of a record, and deeper values are dropped. A file that is one
// list starts at 1.
class JsonTableReader : public rapidjson::BaseReaderHandler<rapidjson::UTF8<>, JsonTableReader> {
 public:
  JsonTableReader(const std::string& file, std::vector<JsonTable>& tables) : tables_(tables) {
    record_.file = file;
    if (tables[0].name.empty()) table_ = &tables[0], depth_ = 1;
  }
  bool Null() { return value(JsonField::null); }
  bool Bool(bool b) { return value(JsonField::number, b, true, b); }
  // Numbers come as text: RapidJSON itself makes of 0e30 any number but 0.
  bool RawNumber(const char* s, size_t n, bool) {
    if (!table_ || depth_ > 4) return true;
    const std::string_view text(s, n);
    int64_t i = 0;
    if (const auto read = std::from_chars(s, s + n, i); read.ec == std::errc() && read.ptr == s + n)
      return value(JsonField::number, static_cast<double>(i), true, i);
    double d = 0;
    if (std::from_chars(s, s + n, d).ec == std::errc::result_out_of_range) {
      const size_t e = text.find_first_of("eE");  // too many digits before the point end in the parser
      d = e == text.npos || text[e + 1] == '-' ? 0 : HUGE_VAL;
    }
    // 3.0 may be an id: tables that keep every column as floats are written so. Doubles beyond 2^53 are all
    // whole.
    const bool whole = std::abs(d) <= 0x1p53 && d == std::floor(d);
    return value(JsonField::number, d, whole, whole ? static_cast<int64_t>(d) : 0);
  }
  bool String(const char* s, size_t n, bool) { return value(JsonField::text, 0, false, 0, {s, n}); }
  bool StartObject() { return open(false); }
  bool StartArray() { return open(true); }
  bool EndObject(size_t) { return close(); }
  bool EndArray(size_t) { return close(); }
  bool Key(const char* s, size_t n, bool) {
    if (depth_ == 1) {
      table_ = nullptr;
      for (JsonTable& table : tables_)
        if (table.name == std::string_view(s, n)) table_ = &table;
    } else if (depth_ == 3 && table_) {
      if (record_.count == record_.fields.size()) record_.fields.emplace_back();
      record_.fields[record_.count++].key.assign(s, n);
    }
    return true;
  }

 private:
  JsonField& field() { return record_.fields[record_.count - 1]; }

  bool value(JsonField::Kind kind, double number = 0, bool whole = false, int64_t integer = 0,
             std::string_view string = {}) {
    if (!table_) return true;
    if (depth_ == 2) not_a_record();
    if (depth_ == 3) {
      field().kind = kind;
      field().number_value = number;
      field().whole = whole;
      field().integer = integer;
      field().string = string;
    } else if (depth_ == 4) {
      if (kind != JsonField::number || !std::isfinite(number)) field().kind = JsonField::other;
      field().numbers.push_back(number);
    }
    return true;
  }
  bool open(bool list) {
    // The parser recurses, so a file of a million "[" would overflow the stack. COCO's own files are 5 deep.
    check(depth_ < 200, record_.file, ": nested 200 deep, as no COCO file is; give another file");
    if (table_ && depth_ == 1) {
      table_->found = list;
      record_.table = table_->name.empty() ? "detections" : table_->name;
      record_.index = 0;
      if (!list) table_ = nullptr;
    } else if (table_ && depth_ == 2) {
      if (list) not_a_record();
      record_.count = 0;
    } else if (table_) {
      field().kind = list && depth_ == 3 ? JsonField::list : JsonField::other;
      field().numbers.clear();
    }
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    if (depth_ == 2 && table_) {
      table_->read(record_);
      ++record_.index;
    }
    if (depth_ == 1) table_ = nullptr;
    return true;
  }
  [[noreturn]] void not_a_record() const {
    fail(record_.where(), " is not an object {...}; repair the entry");
  }

  std::vector<JsonTable>& tables_;
  JsonTable* table_ = nullptr;  // the one we are in
  JsonRecord record_;
  int depth_ = 0;
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

inline File open_json(const std::string& path) {
  check(!std::filesystem::is_directory(path), path, ": is a folder, a JSON file is needed");
  File file(std::fopen(path.c_str(), "rb"), std::fclose);
  check(file != nullptr, path, ": cannot be read (", std::strerror(errno), "); check the path");
  return file;
}

// Reads the tables from a file, in the order in which the file has them. path: for messages.
inline void read_json_tables(File file, const std::string& path, std::vector<JsonTable>& tables) {
  const int first = std::getc(file.get());
  if (first == 0xEF) {  // the byte order mark that some Windows programs put in front of UTF-8
    std::getc(file.get()), std::getc(file.get());
  } else if (first != EOF) {
    std::ungetc(first, file.get());
  }
  std::vector<char> buffer(1 << 16);
  rapidjson::FileReadStream stream(file.get(), buffer.data(), buffer.size());
  rapidjson::Reader reader;
  JsonTableReader handler(path, tables);
  // Python's json writes NaN: where it does not matter let it pass, where it does name the entry.
  const auto flags = rapidjson::kParseNumbersAsStringsFlag | rapidjson::kParseNanAndInfFlag;
  const auto result = reader.Parse<flags>(stream, handler);
  check(!std::ferror(file.get()), path, ": error while reading (", std::strerror(errno), "); check the disk");
  if (result.IsError()) {
    const bool at_end = stream.Peek() == '\0';
    fail(path, ": not valid JSON at byte ", result.Offset(), ": ", rapidjson::GetParseError_En(result.Code()),
         at_end ? " The file ends there: is it empty or cut off? Copy it again"
                : " Repair or replace the file");
  }
}

// Throws on a file that is no COCO annotation file, on values of the wrong type and on ids given twice.
inline CocoDataset read_coco(File file, const std::string& path) {
  CocoDataset data;
  const auto image = [&](const JsonRecord& r) {
    const int64_t id = r.integer("id");
    char name[32];
    std::snprintf(name, sizeof name, "%012lld.jpg", static_cast<long long>(id));
    data.images.push_back({id, r.string("file_name", name), r.pixels("width"), r.pixels("height")});
  };
  const auto category = [&](const JsonRecord& r) {
    const int64_t id = r.integer("id");
    data.categories.push_back({id, r.string("name", std::to_string(id))});
  };
  const auto annotation = [&](const JsonRecord& r) {
    if (!r.find("bbox")) {
      ++data.without_box;
      return;
    }
    const std::vector<double>& box = r.box("bbox");
    data.annotations.push_back({r.integer("id", static_cast<int64_t>(r.index) + 1), r.integer("image_id"),
                                r.integer("category_id"), box[0], box[1], box[2], box[3],
                                r.number("area", box[2] * box[3]), r.integer("iscrowd", 0) != 0});
  };
  std::vector<JsonTable> tables = {{"images", image}, {"categories", category}, {"annotations", annotation}};
  read_json_tables(std::move(file), path, tables);
  for (const JsonTable& table : tables)
    check(table.found, path, ": no list \"", table.name,
          "\" at the top level; a COCO annotation file has images, annotations and categories");

  std::sort(data.categories.begin(), data.categories.end(), [](auto& a, auto& b) { return a.id < b.id; });
  const auto check_unique = [&](const auto& entries, const char* what) {
    std::vector<int64_t> ids;
    for (const auto& entry : entries) ids.push_back(entry.id);
    std::sort(ids.begin(), ids.end());
    const auto twice = std::adjacent_find(ids.begin(), ids.end());
    if (twice != ids.end()) fail(path, ": two ", what, " have the id ", *twice, "; give each its own");
  };
  check_unique(data.images, "images");
  check_unique(data.categories, "categories");
  return data;
}

inline CocoDataset read_coco(const std::string& path) { return read_coco(open_json(path), path); }
// From text that is not empty; name: for messages.
inline CocoDataset parse_coco(std::string_view text, const std::string& name) {
  return read_coco(File(fmemopen(const_cast<char*>(text.data()), text.size(), "rb"), std::fclose), name);
}

// Throws on a file that is no list of detections and on values missing, of the wrong type or not finite.
inline std::vector<Detection> read_detections(const std::string& path) {
  std::vector<Detection> detections;
  const auto detection = [&](const JsonRecord& r) {
    const std::vector<double>& box = r.box("bbox");
    detections.push_back(
        {r.integer("image_id"), r.integer("category_id"), box[0], box[1], box[2], box[3], r.number("score")});
  };
  std::vector<JsonTable> tables = {{"", detection}};
  read_json_tables(open_json(path), path, tables);
  check(tables[0].found, path,
        ": not a list of detections [{\"image_id\", \"category_id\", \"bbox\", \"score\"}, ",
        "...]; give such a file");
  return detections;
}

using JsonWriter = rapidjson::Writer<rapidjson::FileWriteStream>;

// Writes what `write(writer)` puts into a rapidjson::Writer. The file appears whole or not at all; throws
// where it cannot be written.
inline void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write) {
  NewFile file(path);
  std::vector<char> buffer(1 << 16);
  rapidjson::FileWriteStream stream(file.stream(), buffer.data(), buffer.size());
  JsonWriter writer(stream);
  write(writer);
  stream.Flush();
  file.commit();
}

// The text with U+FFFD for each byte that is not UTF-8, as names of files may have: JSON is UTF-8.
inline std::string as_utf8(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const auto byte = [&](size_t k) { return at + k < text.size() ? uint8_t(text[at + k]) : 0u; };
    const unsigned first = byte(0), second = byte(1);
    const size_t n = first < 0x80                    ? 1
                     : first >= 0xC2 && first < 0xE0 ? 2
                     : first >= 0xE0 && first < 0xF0 ? 3
                                                     : 4;
    bool good = first < 0x80 || (first >= 0xC2 && first < 0xF5);
    for (size_t k = 1; k < n; ++k) good = good && (byte(k) & 0xC0) == 0x80;
    // too long for what they say, halves of UTF-16, beyond the last one
    good = good && !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second >= 0xA0) &&
           !(first == 0xF0 && second < 0x90) && !(first == 0xF4 && second >= 0x90);
    out += good ? text.substr(at, n) : "\xEF\xBF\xBD";
    at += good ? n : 1;
  }
  return out;
}

// "key": value. Doubles are written so that they read back equal; one that is not finite is an error.
inline void write_field(JsonWriter& writer, const char* key, int64_t value) {
  writer.Key(key);
  writer.Int64(value);
}
inline void write_field(JsonWriter& writer, const char* key, double value) {
  check(std::isfinite(value), "\"", key, "\" is ", value,
        ", which JSON cannot say; only finite numbers are written");
  writer.Key(key);
  writer.Double(value);
}
inline void write_field(JsonWriter& writer, const char* key, const std::string& value) {
  writer.Key(key);
  const std::string text = as_utf8(value);
  writer.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}
// "bbox": [x, y, w, h]
template <class Box>
void write_bbox(JsonWriter& writer, const Box& box) {
  writer.Key("bbox");
  writer.StartArray();
  for (const double value : {box.x, box.y, box.w, box.h}) {
    check(std::isfinite(value), "a box has ", value,
          ", which JSON cannot say; only finite numbers are written");
    writer.Double(value);
  }
  writer.EndArray();
}
// [{...}, {...}], with write_entry(entry) for what is inside the braces.
template <class Entries, class WriteEntry>
void write_list(JsonWriter& writer, const Entries& entries, WriteEntry write_entry) {
  writer.StartArray();
  for (const auto& entry : entries) {
    writer.StartObject();
    write_entry(entry);
    writer.EndObject();
  }
  writer.EndArray();
}

inline void write_detections(const std::string& path, const std::vector<Detection>& detections) {
  write_json(path, [&](JsonWriter& writer) {
    write_list(writer, detections, [&](const Detection& d) {
      write_field(writer, "image_id", d.image_id);
      write_field(writer, "category_id", d.category_id);
      write_bbox(writer, d);
      write_field(writer, "score", d.score);
    });
  });
}

inline void write_coco(JsonWriter& writer, const CocoDataset& data) {
  writer.StartObject();
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
inline void write_coco(const std::string& path, const CocoDataset& data) {
  write_json(path, [&](JsonWriter& writer) { write_coco(writer, data); });
}
inline std::string coco_text(const CocoDataset& data) {
  char* text = nullptr;
  size_t size = 0;
  {
    File file(open_memstream(&text, &size), std::fclose);
    check(file != nullptr, "out of memory for the annotations as text");
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
