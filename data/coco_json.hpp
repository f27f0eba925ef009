// SPDX-License-Identifier: Apache-2.0
// Reader and writer of COCO JSON: annotation files (images, categories, annotations) and result files (the
// list of detections that the COCO evaluation server accepts). Formats: cocodataset.org/#format-data and
// #format-results.
// The reader streams: it never holds the whole file and skips segmentations, so that memory use is that of
// the structs below. Each error message is one line with the file and either the entry and key, or the byte
// offset of a syntax error.
#pragma once
#include <rapidjson/error/en.h>
#include <rapidjson/filereadstream.h>
#include <rapidjson/filewritestream.h>
#include <rapidjson/reader.h>
#include <rapidjson/writer.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// Boxes are x, y (top left corner), width, height in pixels of the original image, not clipped to the image.
struct CocoImage {
  int64_t id = 0;
  std::string file_name;      // default: the id as "%012d.jpg"
  int width = 0, height = 0;  // pixels; default: 0
};
struct CocoCategory {
  int64_t id = 0;
  std::string name;                // default: the id as a decimal number
  std::string supercategory = {};  // default: empty; not written
};
struct CocoAnnotation {
  int64_t id = 0;  // default: 1 + position in the file
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double area = 0;     // area of the segmentation in square pixels; default: w * h
  bool crowd = false;  // iscrowd
};
// Returns the image, class, box and crowd flag. Annotations that are equal in these repeat each other.
inline auto identity(const CocoAnnotation& a) {
  return std::tuple(a.image_id, a.category_id, a.x, a.y, a.w, a.h, a.crowd);
}
struct CocoDataset {
  std::vector<CocoImage> images;            // in file order, with unique ids
  std::vector<CocoCategory> categories;     // sorted by id, with unique ids; the position is the class id
  std::vector<CocoAnnotation> annotations;  // in file order, including those of unknown images or categories
  int64_t without_box = 0;                  // number of annotations skipped because they have no bbox
  int64_t repeated_ids = 0;                 // number of annotations whose id an earlier one has
  int64_t zero_ids = 0;                     // number of annotations with id 0
  std::vector<std::pair<std::string, std::string>> problems;  // entries that are skipped: kind, text
};
struct Detection {
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double score = 0;
};

// One key of a JSON object and its value.
struct JsonField {
  enum Kind { null, number, text, list, other } kind = null;
  std::string key, string;  // string: the value of a text
  double number_value = 0;  // the value of a number; 0 for false and 1 for true
  bool whole = false;       // true if the number is an integer, with its value in `integer`
  int64_t integer = 0;
  std::vector<double> numbers;  // the values of a list of finite numbers; other lists have the kind `other`
};

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
  const JsonField* find(const char* key) const;
  [[noreturn]] void throw_bad_value(const char* key, const char* needed) const;
  double number(const char* key, std::optional<double> fallback = {}) const;
  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const;
  // An integer, or for a text such as "a5" or "007" a negative number that depends on the text alone, so that
  // annotations and detections find their image.
  int64_t id(const char* key, std::optional<int64_t> fallback = {}) const;
  int pixels(const char* key) const;
  std::string string(const char* key, const std::string& fallback) const;
  const std::vector<double>& box(const char* key) const;
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
  JsonTableReader(const std::string& file, std::vector<JsonTable>& tables);
  bool Null() { return value(JsonField::null); }
  bool Bool(bool b) { return value(JsonField::number, b, true, b); }
  // Numbers arrive as text, because RapidJSON converts numbers such as 0e30 incorrectly.
  bool RawNumber(const char* s, size_t n, bool);
  bool String(const char* s, size_t n, bool) { return value(JsonField::text, 0, false, 0, {s, n}); }
  bool StartObject() { return open(false); }
  bool StartArray() { return open(true); }
  bool EndObject(size_t) { return close(); }
  bool EndArray(size_t) { return close(); }
  bool Key(const char* s, size_t n, bool);

 private:
  JsonField& field() { return record_.fields[record_.count - 1]; }

  bool value(JsonField::Kind kind, double number = 0, bool whole = false, int64_t integer = 0,
             std::string_view string = {});
  bool open(bool list);
  bool close();
  void end_entry() {
    table_->read(record_);
    ++record_.index;
  }

  std::vector<JsonTable>& tables_;
  JsonTable* table_ = nullptr;  // the table that is being read, or null
  JsonRecord record_;
  int depth_ = 0;
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// Opens a file for reading. Throws if the file does not exist or is a folder.
File open_json(const std::string& path);

// Reads the tables in file order. path: for error messages.
void read_json_tables(File file, const std::string& path, std::vector<JsonTable>& tables);

// Reads a COCO annotation file. Skips entries in which a value is missing or has the wrong type
// (CocoDataset::problems). Throws if the file has another format, or if two images or two categories have the
// same id.
CocoDataset read_coco(File file, const std::string& path);

inline CocoDataset read_coco(const std::string& path) { return read_coco(open_json(path), path); }
// Parses COCO JSON text, which must not be empty. name: for error messages.
inline CocoDataset parse_coco(std::string_view text, const std::string& name) {
  return read_coco(File(fmemopen(const_cast<char*>(text.data()), text.size(), "rb"), std::fclose), name);
}

// Reads a list of detections. Throws if the file has another format, or if a value is missing, not finite or
// of the wrong type.
std::vector<Detection> read_detections(const std::string& path);

using JsonWriter = rapidjson::Writer<rapidjson::FileWriteStream>;

// Writes a JSON file with the content that `write(writer)` produces. The file is replaced atomically. Throws
// if the file cannot be written.
void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write);

// Replaces each byte that is not valid UTF-8 by U+FFFD. JSON must be UTF-8, but file names may contain other
// bytes.
std::string as_utf8(const std::string& text);

// Writes "key": value. A double is written with enough digits to read back the same value. Throws if a double
// is not finite.
void write_field(JsonWriter& writer, const char* key, int64_t value);
void write_field(JsonWriter& writer, const char* key, double value);
void write_field(JsonWriter& writer, const char* key, const std::string& value);
// Writes "bbox": [x, y, w, h]. Throws if a value is not finite.
template <class Box>
void write_bbox(JsonWriter& writer, const Box& box) {
  writer.Key("bbox");
  writer.StartArray();
  for (const double value : {box.x, box.y, box.w, box.h}) {
    check(std::isfinite(value), "a box has the value ", value,
          ", which JSON cannot represent; only finite numbers can be written");
    writer.Double(value);
  }
  writer.EndArray();
}
// Writes the list [{...}, {...}]. write_entry(entry) writes the fields of one object.
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

// Writes a list of detections. file_names: file name by image id, written beside the id.
void write_detections(const std::string& path, const std::vector<Detection>& detections,
                      const std::map<int64_t, std::string>& file_names = {});

void write_coco(JsonWriter& writer, const CocoDataset& data);
inline void write_coco(const std::string& path, const CocoDataset& data) {
  write_json(path, [&](JsonWriter& writer) { write_coco(writer, data); });
}
// Returns the data set as COCO JSON text.
std::string coco_text(const CocoDataset& data);

}  // namespace yolox
