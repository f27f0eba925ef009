// SPDX-License-Identifier: Apache-2.0
// The images of a data set in one file: packed data sets, which ./pack writes (pack.cpp), and the cache of
// decoded images (--cache ram|disk).
#pragma once
#include <lmdb.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/dataset.hpp"
#include "data/source.hpp"

namespace yolox {

// ---- packed data sets

// An LMDB file with these keys:
//
//   yolox         "1 encoded KEY": version, form of the images, hash of what the file contains
//   train, val    COCO JSON of a split; there is no val if the data set has one split only
//   train/N       bytes of the file of image N of train, see image_key(); val/N in the same way
//   complete      written last
//
// The views that get() returns are valid until the next put() or commit(). An object may be used by one
// thread only, because an LMDB transaction belongs to one thread.
class PackedFile {
 public:
  // Opens a complete file for reading. With room > 0, opens or creates a file for writing, with room for as
  // many more bytes. Throws if it is no LMDB file, is cut off or incomplete, belongs to another program, or
  // if another process writes it.
  explicit PackedFile(const std::string& path, size_t room = 0);

  // Returns the value of a key, or an empty view if the key does not exist.
  std::string_view get(const std::string& key) const;
  void put(const std::string& key, std::string_view value);
  // Writes to disk. If the process is killed, the file has the values of the last commit.
  void commit();
  const std::string path;

 private:
  struct Close {
    void operator()(MDB_env* env) const { mdb_env_close(env); }
    void operator()(MDB_txn* transaction) const { mdb_txn_abort(transaction); }
  };
  void begin(unsigned flags);
  void check_done(int code, const char* failure) const;
  std::unique_ptr<MDB_env, Close> env;
  std::unique_ptr<MDB_txn, Close> transaction;  // after `env`, because it must end first
  MDB_dbi table = 0;
};

// Returns the key of image i: "train/000000012".
std::string image_key(const std::string& split, size_t i);

inline bool is_packed(const std::string& path) {
  return is_file(path) && fs::path(path).extension() == ".lmdb";
}

// Returns a split of a packed data set. The data set keeps the file open.
Dataset packed_dataset(const std::shared_ptr<PackedFile>& file, const std::string& split);

// ---- image cache

// Returns the folder for files that runs share: $YOLOX_CACHE_DIR, else $XDG_CACHE_HOME/yolox, else
// ~/.cache/yolox, or "" if HOME is not set.
std::string cache_folder();

// The decoded images of a data set, no larger than the network's input, in one block of memory or one file
// that the processes of a machine share. Beside each image are its reductions by 2, 4 and 8, so that a sample
// that shows an image at a small scale reads few bytes. All offsets follow from the sizes of the images.
class ImageCache {
 public:
  using Progress = std::function<void(size_t done, size_t n)>;

  // input: size of the network's input.
  ImageCache(const Dataset& data, cv::Size input);
  ~ImageCache();
  ImageCache(const ImageCache&) = delete;

  // Decodes all images on `threads` threads into anonymous memory (memfd), which the kernel frees when its
  // last process ends. Returns the path by which other processes can open it. progress: called from one
  // thread at a time. Throws before it decodes if there is not enough memory.
  std::string create_in_memory(const Dataset& data, int threads, const Progress& progress);
  // Opens the memory of another process of this user. path: what create_in_memory() returned there.
  void open_memory(const std::string& path);
  // Opens the file in `folder`, or decodes all images into a new one, which replaces older ones of the same
  // data set. Returns the path. Throws before it decodes if there is not enough space.
  std::string open_on_disk(const std::string& folder, const Dataset& data, int threads,
                           const Progress& progress);

  // Returns the smallest copy of image i whose scale is at least `scale` (the largest if none is), or an
  // empty ImageRegion if the image could not be decoded. The pixels are a view, and read-only.
  ImageRegion read(size_t i, double scale) const;

  double bytes() const { return double(offsets.back()); }

 private:
  std::vector<cv::Size> level_sizes(size_t i) const;
  void check_room(const std::string& place, double free) const;
  void fill(const Dataset& data, int threads, const Progress& progress);
  void map();
  void write(std::string_view bytes, size_t at) const;

  const cv::Size input;
  std::vector<cv::Size> sizes;  // of the original images
  std::vector<size_t> offsets;  // of the pixels of each image, after one byte an image: 1 if it was decoded
  std::string data_name, name;  // of the file: without and with what changes when a file changes
  int fd = -1;
  const char* memory = nullptr;
};

// Makes a data set read its images from the cache.
inline void use_cache(Dataset& data, const std::shared_ptr<const ImageCache>& cache) {
  data.stored = [cache](size_t i, double scale) { return cache->read(i, scale); };
}

}  // namespace yolox
