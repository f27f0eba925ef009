// SPDX-License-Identifier: Apache-2.0
// Images in one LMDB file: packed data sets, written by ./pack (pack.cpp), and image caches
// (cache.hpp).
#pragma once
#include <lmdb.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.hpp"

namespace yolox {

// Format: an LMDB file with these keys.
//
//   yolox         "1 encoded|cache KEY": version, form of the images, hash of what the file contains
//
//   train, val    COCO JSON of a split; val is empty if the data set has one split only. Not in a cache
//
//   train/N       image N of train: the bytes of its file, or in a cache an image pyramid (PyramidHeader);
//   val/N in the same way
//
//   complete      written last

// ---- pyramids

// Header of one level of an image pyramid.
struct PyramidLevel {
  int32_t width, height;
  double scale_x, scale_y, x, y;  // ImageRegion::scale and ImageRegion::origin
};

// Header of an image pyramid: the image and its reductions by 2, 4, 8, ... follow as BGR pixels. The pyramid
// lets a sample that shows an image at a small scale read few bytes.
struct PyramidHeader {
  static constexpr int kMaxLevels = 13;
  int64_t count;
  PyramidLevel levels[kMaxLevels];
};

// Returns the bytes of a pyramid with these levels, the largest first.
std::string pyramid_of(const std::vector<ImageRegion>& levels);

// Returns the smallest level of a pyramid whose scale, relative to the original image, is at least `scale`
// (level 0 if none is). Returns an empty ImageRegion if the pyramid is empty or truncated. The pixels are a
// view of `pyramid`; the caller must not write to them.
ImageRegion read_pyramid_level(std::string_view pyramid, double scale);

// ---- the file

// Returns the key of image i: "train/000000012".
std::string image_key(const std::string& split, size_t i);

// A file open for reading. The views that get() returns are valid during its lifetime. get() may be called
// from one thread only, because an LMDB transaction belongs to one thread.
class Packed {
 public:
  explicit Packed(const std::string& path);
  ~Packed() { close(); }
  Packed(const Packed&) = delete;

  // Returns the value of a key, or an empty view if the key does not exist.
  std::string_view get(const std::string& key) const;
  const std::string path;

 private:
  void close();
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

// A file open for writing. Its memory map grows as needed. If the process is killed, the file has the values
// of the last commit.
class PackedWriter {
 public:
  // Opens or creates the file. Throws if it is an LMDB file of another program. remedy: end of the message if
  // the disk is full. The caller makes sure that no other process writes the file.
  PackedWriter(const std::string& path, const std::string& remedy);
  ~PackedWriter();
  PackedWriter(const PackedWriter&) = delete;

  // Returns the value of `key`, valid until the next put() or commit(). Empty if the file has no such key.
  std::string_view get(const std::string& key);
  // Writes a value. Commits every 64 values or 64 MiB.
  void put(const std::string& key, std::string_view bytes);
  // Writes those of the n images of a split that the file does not have yet. image(i) returns the bytes of
  // image i. It is called from `threads` threads (0: one per core), for `chunk` images before these are
  // written. progress(done) is called after each chunk. Returns the number of images that the file had.
  size_t put_images(const std::string& split, size_t n, size_t chunk, unsigned threads,
                    const std::function<std::string(size_t)>& image,
                    const std::function<void(size_t)>& progress);
  void commit();

 private:
  void begin();  // begins a transaction if none is open
  void check_done(int code, const char* what) const;
  const std::string path, remedy;
  size_t map_size = 0, uncommitted_bytes = 0;
  int uncommitted_values = 0;
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

// ---- packed data sets

inline bool is_packed(const std::string& path) {
  return is_file(path) && fs::path(path).extension() == ".lmdb";
}

// Returns a split of a packed data set. The data set keeps the file open.
Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split);

// Opens a packed data set. split: the value of --split. Throws if `path` is not a complete packed data set,
// or if `split` is neither empty nor val.
std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split);

}  // namespace yolox
