// SPDX-License-Identifier: Apache-2.0
// Data sets for training and evaluation. Every image file and every annotation is checked. Valid ones are
// used; invalid ones are skipped, counted and listed in problems.txt.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "data/coco_json.hpp"
#include "images/image.hpp"

namespace yolox {

namespace fs = std::filesystem;
struct Source;

// ---- problems

// Problems of the data that made the program skip or change an image or annotation. Thread-safe.
struct Problems {
  // Adds one problem. Repeated calls with the same kind and line count once.
  void add(const std::string& kind, const std::string& line);
  // Returns the number of problems of each kind.
  std::map<std::string, int64_t> summary() const;
  // Returns the problems, sorted, as "kind: line".
  std::vector<std::string> lines() const;
  // Writes lines() to a file. Does nothing if there are no problems.
  void write(const std::string& path) const;

 private:
  mutable std::mutex mutex;
  std::set<std::pair<std::string, std::string>> seen;  // kind, line
};

// ---- images

// Result of the check of one image file.
struct ImageCheck {
  int width = 0, height = 0;  // pixels, after EXIF rotation; 0 if the image is unusable
  std::string error;          // the reason if the image is unusable, else empty
  DeepRange deep = {};        // of an image of 16 bits
};

// Returns a hash of the parts as hex digits: the key of results that depend on them.
template <class... Parts>
std::string content_key(const Parts&... parts) {
  return formatted("%016lx", fnv1a(concat(concat(parts, "\n")...)));
}

// Returns a line with path, size, mtime and ctime of a file, or with its path if it is no regular file. ctime
// matters because cp -p, tar and touch can restore an old mtime, but not the ctime.
std::string file_state(const std::string& file);

struct ImageChecks {
  std::vector<ImageCheck> images;
  std::string key;  // content_key() of the states of all files
};

// Reads the header and the end of every image file, in parallel. Stores the results in the folder `keep`
// under the key of the files, so that the next run with the same files does not open them (empty: does not
// store them). Unusable images are checked again in each run, because the reason may have been a temporary
// disk error or a missing permission.
ImageChecks check_images(const std::vector<std::string>& files, const std::string& keep);

// ---- data sets

// One usable image of a data set and its objects.
struct Record {
  std::string file;  // empty for a synthetic image of `shapes`
  int64_t image_id;
  int width, height;              // pixels, after EXIF rotation
  std::vector<Box> boxes;         // in pixels, clipped to the image; without crowds
  std::vector<Box> ignored = {};  // crowds and difficult objects, as regions of the class kIgnoredRegion
};

constexpr int64_t kNoCategory = INT64_MIN;  // the id of a class that no category of a file has

// One split of a data set. Has the functions that compose() in augment.hpp needs (image_region, size, boxes,
// ...).
struct Dataset {
  std::string name;                  // file or folder and split, for messages
  std::vector<std::string> classes;  // class names; the position is the class id
  std::vector<Record> records;
  CocoDataset truth;  // ground truth for evaluation: the images of `records`, all annotations unclipped
  std::vector<int64_t>
      category_ids;     // of each class in its file; kNoCategory if use_classes() added the class
  bool strict = false;  // true: an unreadable image ends the run
  std::string key;      // hash (hex digits) of the image files and their order
  // Source of encoded images. Not set: the file of the record.
  std::function<std::string(size_t i)> read;
  // Source of decoded images: the image cache or `shapes`. Returns image i at a scale of at least `scale`, or
  // an empty ImageRegion if the image could not be decoded when it was stored. May be empty.
  std::function<ImageRegion(size_t i, double scale)> stored;
  std::shared_ptr<Problems> problems = std::make_shared<Problems>();
  std::vector<std::string> notes = {};         // lines for the log
  std::map<std::string, DeepRange> deep = {};  // of the image files of 16 bits, by path

  cv::Size size(size_t i) const { return {records[i].width, records[i].height}; }
  const std::vector<Box>& boxes(size_t i) const { return records[i].boxes; }
  const std::vector<Box>& ignored(size_t i) const { return records[i].ignored; }
  // Returns at least the region `part` of image i, at a scale of at least `scale`. `part` is in pixels of the
  // image. Throws ImageError with the file name if the image is unreadable.
  ImageRegion image_region(size_t i, const cv::Rect& part, double scale) const;
  // Returns the encoded image i.
  std::string bytes(size_t i) const { return read ? read(i) : read_bytes(records[i].file); }
  std::string name_of(int64_t i) const {
    return records[i].file.empty() ? concat("drawn image ", records[i].image_id) : records[i].file;
  }
  // Records the problem e of image i and returns the index of the image to use instead. Rethrows e with
  // --strict. Throws if `tries` shows that no image of the data set is readable.
  size_t replacement_index(size_t i, const ImageError& e, size_t tries) const;
};

// Throws, with the first 20 problems, if --strict is given and the data set has problems.
void check_strict(const Dataset& data);

// Returns image i: the original, or the resized copy if the data set is cached. Throws ImageError with the
// file name if the image is unreadable.
Image read_image(const Dataset& data, size_t i);

// Returns the synthetic data set `shapes`, which needs no files: `count` scenes of split 0 (train) or 1
// (val).
Dataset shapes_dataset(uint64_t seed, int split, int64_t count);

// Converts a split from the form of the readers to that of training and evaluation. `checks` holds the
// results of check_images() for source.files. Throws if the split has no usable image.
Dataset make_dataset(Source source, const ImageChecks& checks);

// Returns a class name without blanks at its ends, with single blanks inside, and with an accent and its
// letter as one character (NFC, Latin letters), because tools write the same name in several ways.
std::string normal_name(const std::string& name);

// Makes the names of the categories normal_name() and printable(). Equal names are problems.
void normalize_names(CocoDataset& coco, const std::string& file);

// Gives a data set the classes of the training set or of a model. They are matched by name: objects of other
// classes are left out (a problem), and classes that the data set does not have get no objects (a note). The
// category ids of `truth` become class ids. Throws if no name is the same.
void use_classes(Dataset& data, const std::vector<std::string>& classes);

// Throws if most images of 16 bits have a narrow range, and all of these, but for one in twenty, the same.
void check_deep_range(const std::vector<const Dataset*>& splits);

// Returns the numbers of images and boxes, and a hash of classes, sizes and boxes: "205 images, 4888 boxes
// (0123456789abcdef)". The paths of the files do not count.
std::string fingerprint(const Dataset& data);

// Returns the number of boxes of each class.
std::vector<int64_t> class_counts(const Dataset& data);

// Returns a weight of each class, the larger the fewer boxes it has: count to the power -`power`, at most 10
// times that of the most frequent class, and scaled to a mean of 1 over all boxes.
std::vector<double> class_weights(const std::vector<int64_t>& counts, double power);

// Returns the class ids sorted by descending count.
std::vector<size_t> classes_by_count(const std::vector<int64_t>& counts);

// ---- splits

struct Splits {
  Dataset train, val;
  bool same = false;  // true if train and val are the same images, see Sources
};

constexpr int64_t kShapesTrain = 2000, kShapesVal = 200;  // images per split of `shapes`

// Checks the images of a split (check_images, keep) and converts the split (make_dataset).
Dataset load_dataset(Source source, const std::string& keep);

}  // namespace yolox
