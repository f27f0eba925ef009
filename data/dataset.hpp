// From what label files say (formats.hpp) to what training uses: every image is looked at, every box checked,
// the good ones go on, the others are counted and listed.
#pragma once
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/new_file.hpp"
#include "base/threads.hpp"
#include "data/coco_json.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"
#include "images/boxes.hpp"
#include "images/image.hpp"

namespace yolox {

// ---- problems

// What was wrong with the data and left out: counted by kind, listed line by line. Safe to use from all
// threads.
struct Problems {
  void add(const std::string& kind, const std::string& line);
  std::map<std::string, int64_t> summary() const;
  std::vector<std::string> lines() const;
  // All of them, a line each; does nothing when there are none.
  void write(const std::string& path) const;

 private:
  mutable std::mutex mutex;
  std::map<std::string, int64_t> counts;
  std::map<std::string, bool> seen;
};

// ---- images

struct ImageCheck {
  int width = 0, height = 0;  // of the upright picture; 0: it cannot be used
  std::string error;          // why; empty: it can
};

// A number for bytes one after another, in hex digits: FNV-1a.
struct ContentKey {
  uint64_t hash = 0xCBF29CE484222325u;
  const fs::path working_folder = [] {
    std::error_code ignored;
    return fs::current_path(ignored);
  }();
  void add(const void* data, size_t n);
  void add(const std::string& text) { add(text.c_str(), text.size() + 1); }
  // A file by its path, size and times of change: the second one is the system's, which copying, unpacking
  // and touching do not set back.
  void add(const std::string& file, const struct stat& s);
  std::string text() const;
};

struct ImageChecks {
  std::vector<ImageCheck> images;
  std::string key;  // hex digits that stand for the files: names, sizes, times of change
};

// Looks at the header and the end of every image. What was found is kept in the folder `keep` (empty:
// nowhere) under its key, so that the next run with the same files need not open them; but images with an
// error are looked at again, as what was wrong with them may have been the disk or a right.
ImageChecks check_images(const std::vector<std::string>& files, const std::string& keep);

// ---- data sets

struct Record {
  std::string file;  // empty for a drawn image
  int64_t image_id;
  int width, height;       // of the upright picture, pixels
  std::vector<Box> boxes;  // in pixels of the picture, inside of it; no crowds
};

// One split. It has what compose() asks of pictures.
struct Dataset {
  std::string name;                  // where it is from, for messages
  std::vector<std::string> classes;  // names; position = class id
  std::vector<Record> records;
  CocoDataset truth;      // for evaluation: the same images, all annotations as they were
  int shapes_split = -1;  // 0 or 1: the images are drawn
  uint64_t shapes_seed = 0;
  bool strict = false;  // an image that cannot be read ends the run
  std::string key;      // hex digits that stand for the pictures and their order
  // Where pictures come from: encoded, as bytes of a file or of a packed data set; or, where it is set,
  // decoded before (stored.hpp), at least at `scale`. What could not be decoded then is empty.
  std::function<std::string(size_t i)> read;  // not set: the file of the record
  std::function<Piece(size_t i, double scale)> stored;
  std::shared_ptr<Problems> problems = std::make_shared<Problems>();

  cv::Size size(size_t i) const { return {records[i].width, records[i].height}; }
  const std::vector<Box>& boxes(size_t i) const { return records[i].boxes; }
  // Throws ImageError naming the file.
  Piece piece(size_t i, const cv::Rect& part, double scale) const;
  std::string bytes(size_t i) const { return read ? read(i) : read_bytes(records[i].file); }
  std::string name_of(int64_t i) const {
    return records[i].file.empty() ? concat("drawn image ", records[i].image_id) : records[i].file;
  }
  // An image that cannot be used is noted, and the next one takes its place.
  size_t instead_of(size_t i, const ImageError& e, size_t tries) const;
};

// --strict: problems end the run before it begins.
void refuse_problems(const Dataset& data);

// Image i as it is, of cached ones as they are there. Throws ImageError naming the file.
Image read_image(const Dataset& data, size_t i);

// The data set that needs no files: `count` scenes of split 0 (train) or 1 (val).
Dataset shapes_dataset(uint64_t seed, int split, int64_t count);

// Which annotations repeat an earlier one: same image, class and box.
std::vector<bool> find_duplicates(const std::vector<CocoAnnotation>& annotations);

// A split as training and evaluation use it. checks: of its files, in their order.
Dataset make_dataset(Source source, const ImageChecks& checks, bool official_quirks);

// Boxes of each class.
std::vector<int64_t> class_counts(const Dataset& data);

// Classes from the one with the most boxes to the one with the fewest.
std::vector<size_t> by_count(const std::vector<int64_t>& counts);

// ---- splits

struct Splits {
  Dataset train, val;
  bool same = false;  // there is one split only, and it serves as both
};

constexpr int64_t kShapesTrain = 2000, kShapesVal = 200;

Dataset load_dataset(Source source, bool official_quirks, const std::string& keep);

}  // namespace yolox
