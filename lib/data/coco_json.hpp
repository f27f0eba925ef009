// SPDX-License-Identifier: Apache-2.0
// Reader and writer of COCO JSON: annotation files (images, categories, annotations) and result files (the
// list of detections that the COCO evaluation server accepts). Formats: cocodataset.org/#format-data and
// #format-results.
// The reader skips segmentations. Each error message is one line with the file and either the entry and key,
// or the byte offset of a syntax error.
#pragma once
#include <rapidjson/filewritestream.h>
#include <rapidjson/writer.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace yolox {

using ProblemList = std::vector<std::pair<std::string, std::string>>;  // kind, text

// Boxes are x, y (top left corner), width, height in pixels of the original image, not clipped to the image.
// "without": what read_coco() sets if a file lacks the key. A reader of another format sets every member.
struct CocoImage {
  int64_t id = 0;
  std::string file_name;      // without: the id as "%012d.jpg"
  int width = 0, height = 0;  // pixels; 0: unknown, and not compared with the file
};
struct CocoCategory {
  int64_t id = 0;
  std::string name;                // without: the id as a decimal number
  std::string supercategory = {};  // without: empty; not written
};
struct CocoAnnotation {
  int64_t id = 0;  // without: 1 + position in the file
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double area = 0;     // of the segmentation in square pixels, for AP of sizes; without: w * h
  bool crowd = false;  // iscrowd
  int line = 0;        // in the label file of the image; 0 for COCO
};
// Returns the image, class, box and crowd flag. Annotations that are equal in these repeat each other.
inline auto identity(const CocoAnnotation& a) {
  return std::tuple(a.image_id, a.category_id, a.x, a.y, a.w, a.h, a.crowd);
}
struct CocoDataset {
  std::vector<CocoImage> images;            // in file order, with unique ids
  std::vector<CocoCategory> categories;     // sorted by id, with unique ids; the position is the class id
  std::vector<CocoAnnotation> annotations;  // in file order, including those of unknown images or categories
  std::string description = {};             // of the info; written, not read
  int max_detections = 100;                 // for AP, see coco_eval.hpp; written with the description
  ProblemList problems;                     // entries that are skipped, and equal ids and names
};
struct Detection {
  int64_t image_id = 0, category_id = 0;
  double x = 0, y = 0, w = 0, h = 0;
  double score = 0;
};

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// Reads a COCO annotation file. Skips entries in which a value is missing or has the wrong type
// (CocoDataset::problems). Throws if the file has another format, or if two images or two categories have the
// same id.
CocoDataset read_coco(const std::string& path);
// Parses COCO JSON text. path: for error messages.
CocoDataset parse_coco(std::string text, const std::string& path);

// Reads a list of detections. Throws if the file has another format, or if a value is missing, not finite or
// of the wrong type.
std::vector<Detection> read_detections(const std::string& path);

using JsonWriter = rapidjson::Writer<rapidjson::FileWriteStream>;

// Writes a JSON file with the content that `write(writer)` produces. The file is replaced atomically. Throws
// if the file cannot be written.
void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write);

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

void write_coco(const std::string& path, const CocoDataset& data);
// Returns the data set as COCO JSON text.
std::string coco_text(const CocoDataset& data);

}  // namespace yolox
