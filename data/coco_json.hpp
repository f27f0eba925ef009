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

  const JsonField* find(const char* key) const;
  [[noreturn]] void refuse(const char* key, const char* needed) const;
  double number(const char* key, std::optional<double> fallback = {}) const;
  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const;
  int pixels(const char* key) const;
  std::string string(const char* key, const std::string& fallback) const;
  const std::vector<double>& box(const char* key) const;
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
  JsonTableReader(const std::string& file, std::vector<JsonTable>& tables);
  bool Null() { return value(JsonField::null); }
  bool Bool(bool b) { return value(JsonField::number, b, true, b); }
  // Numbers come as text: RapidJSON itself makes of 0e30 any number but 0.
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
  [[noreturn]] void not_a_record() const {
    fail(record_.where(), " is not an object {...}; repair the entry");
  }

  std::vector<JsonTable>& tables_;
  JsonTable* table_ = nullptr;  // the one we are in
  JsonRecord record_;
  int depth_ = 0;
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_json(const std::string& path);

// Reads the tables from a file, in the order in which the file has them. path: for messages.
void read_json_tables(File file, const std::string& path, std::vector<JsonTable>& tables);

// Throws on a file that is no COCO annotation file, on values of the wrong type and on ids given twice.
CocoDataset read_coco(File file, const std::string& path);

inline CocoDataset read_coco(const std::string& path) { return read_coco(open_json(path), path); }
// From text that is not empty; name: for messages.
inline CocoDataset parse_coco(std::string_view text, const std::string& name) {
  return read_coco(File(fmemopen(const_cast<char*>(text.data()), text.size(), "rb"), std::fclose), name);
}

// Throws on a file that is no list of detections and on values missing, of the wrong type or not finite.
std::vector<Detection> read_detections(const std::string& path);

using JsonWriter = rapidjson::Writer<rapidjson::FileWriteStream>;

// Writes what `write(writer)` puts into a rapidjson::Writer. The file appears whole or not at all; throws
// where it cannot be written.
void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write);

// The text with U+FFFD for each byte that is not UTF-8, as names of files may have: JSON is UTF-8.
std::string as_utf8(const std::string& text);

// "key": value. Doubles are written so that they read back equal; one that is not finite is an error.
void write_field(JsonWriter& writer, const char* key, int64_t value);
void write_field(JsonWriter& writer, const char* key, double value);
void write_field(JsonWriter& writer, const char* key, const std::string& value);
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

void write_detections(const std::string& path, const std::vector<Detection>& detections);

void write_coco(JsonWriter& writer, const CocoDataset& data);
inline void write_coco(const std::string& path, const CocoDataset& data) {
  write_json(path, [&](JsonWriter& writer) { write_coco(writer, data); });
}
std::string coco_text(const CocoDataset& data);

}  // namespace yolox
