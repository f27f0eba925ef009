// SPDX-License-Identifier: Apache-2.0
// Image cache (--cache ram|disk): blobs of known sizes, such as decoded images, in one memory-mapped file
// that all processes of the machine share. The first process that opens a key fills the file; the other
// processes wait for it.
//
// Processes synchronise with flock on the cache file. A process that fills, sweeps or removes the file holds
// an exclusive lock. A process that uses the file holds a shared lock until it ends. The kernel releases the
// lock of a killed process, so that a waiting process can take over.
#pragma once
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "data/dataset.hpp"

namespace yolox {

struct CacheHeader {
  char magic[16];         // includes the version of the file layout
  uint64_t sizes, bytes;  // hash of the blob sizes; file size in bytes
  uint64_t done;          // number of blobs filled so far; waiting processes report it as their progress
  uint64_t complete;      // 1 after all blobs have been written to the disk
  uint64_t unused[2];     // padding, so that the first blob starts at byte 64
};
static_assert(sizeof(CacheHeader) == 64);

// An open file descriptor; the destructor closes it. fd is -1, with errno set, if the file cannot be opened.
// A file that is not regular or belongs to another user is refused with EPERM, because anybody can create a
// file of this name in a world-writable folder such as /dev/shm.
struct CacheFile {
  std::string path;
  int fd;

  CacheFile(const std::string& path, int flags);
  CacheFile(const CacheFile&) = delete;
  ~CacheFile() {
    if (fd >= 0) close(fd);
  }
  // Locks the file with LOCK_SH or LOCK_EX without waiting. Returns false if another process holds a
  // conflicting lock. Throws if the file system does not support flock.
  bool lock(int kind) const;
  // Returns true if the path still names this file. Otherwise the file was removed or replaced, and a lock on
  // this descriptor protects nothing.
  bool is_current() const;
  // Removes the file. The caller must hold the exclusive lock, otherwise another process may be using it.
  void remove() const {
    if (is_current()) unlink(path.c_str());
  }
  CacheHeader header() const;
};

// A cache file that is filled once and then mapped read-only.
class BlobCache {
 public:
  struct Place {
    std::string folder;
    bool keep;  // true: on disk, kept for later runs; false: in RAM, removed by its last user
  };

  using Fill = std::function<void(size_t i, unsigned char* out)>;
  using Progress = std::function<void(size_t done, size_t n)>;

  // Opens the cache file of `key`, and fills it if necessary. `key`: hex digits, a hash of everything that
  // the contents depend on. fill(i, out) must write sizes[i] bytes to `out`. It is called from `threads`
  // threads, once per blob and machine. If fill() throws, the constructor removes the file and rethrows the
  // first exception. progress(done, n) is called from one thread at a time, at most ten times a second while
  // this process fills and every 50 ms while another process does. An exception of progress() ends filling or
  // waiting. Throws before it writes anything if there is not enough space.
  BlobCache(const Place& place, const std::string& key, const std::vector<size_t>& sizes, const Fill& fill,
            int threads, const Progress& progress = {});
  BlobCache(const BlobCache&) = delete;

  ~BlobCache();

  // Returns blob i: sizes[i] bytes, 64-byte aligned, valid during the lifetime of the cache.
  const unsigned char* blob(size_t i) const { return map_.get() + offsets_[i]; }
  // Returns the size of the cache file in bytes.
  size_t bytes() const { return offsets_.back(); }
  // Returns true if this process filled the file, false if the file already existed or another process filled
  // it.
  bool filled_here() const { return filled_here_; }
  const std::string& path() const { return file_->path; }

  // Removes files that killed processes left behind: in RAM every file that no process uses, on disk every
  // file that is incomplete. Does not touch the file `except`.
  static void sweep(const Place& place, const std::string& except = "");

 private:
  static constexpr char kMagic[16] = "yolox-cache v1";
  static std::string prefix() { return concat("yolox-cache-", geteuid(), "-"); }

  Place place_;
  uint64_t sizes_hash_ = 14695981039346656037u;
  std::vector<size_t> offsets_;  // [N+1]
  const char* remedy_;
  std::unique_ptr<CacheFile> file_;
  std::shared_ptr<unsigned char> map_;
  bool filled_here_ = false;
  pid_t owner_ = getpid();

  bool is_complete(const CacheFile& file) const;

  // Tries once to lock, fill and map the file. Returns false if another process holds the lock, or if the
  // file was replaced in the meantime.
  bool try_open(const std::string& path, const Fill& fill, int threads, const Progress& progress);

  // Maps the whole file. Does not call madvise: MADV_WILLNEED per blob gained nothing, and MADV_RANDOM makes
  // reading from disk 16 times slower (600 blobs of 900 KB: 8.9 s instead of 0.56 s).
  std::shared_ptr<unsigned char> map(const CacheFile& file, int protection) const;

  // Allocates the disk blocks of the whole file. Otherwise a write to the mapping raises SIGBUS when the disk
  // becomes full. The space that an old file occupies counts as available. Throws if there is too little.
  void reserve(const CacheFile& file) const;

  // Fills the file. The caller must hold the exclusive lock.
  void fill_file(const CacheFile& file, const Fill& fill, int threads, const Progress& progress) const;
};

// Returns the folder of --cache ram: $YOLOX_CACHE_RAM, or /dev/shm if that is not set.
BlobCache::Place ram_place();

// Returns the folder of --cache disk: $YOLOX_CACHE_DIR, else $XDG_CACHE_HOME/yolox, else ~/.cache/yolox.
// Creates the folder.
BlobCache::Place disk_place();

// Header of one level of an image pyramid.
struct PyramidLevel {
  int32_t width, height;
  double scale_x, scale_y, x, y;  // ImageRegion::scale and ImageRegion::origin
};

// Header of an image pyramid in a blob: the image and its reductions by 2, 4, 8, ... follow as BGR pixels.
// The pyramid lets a sample that shows an image at a small scale read few bytes.
struct PyramidHeader {
  static constexpr int kMaxLevels = 13;
  int64_t count;
  PyramidLevel levels[kMaxLevels];
};

// Returns the size in bytes of a pyramid whose levels have these sizes.
size_t pyramid_bytes(const std::vector<cv::Size>& sizes);

void write_pyramid(const std::vector<ImageRegion>& pieces, unsigned char* out);

// Returns the smallest level of a pyramid whose scale, relative to the original image, is at least `scale`
// (level 0 if none is). Returns an empty ImageRegion if the blob is empty or truncated. The pixels are a view
// of `blob`; the caller must not write to them.
ImageRegion read_pyramid_level(std::string_view blob, double scale);

// Fills the cache, or opens an existing one, and makes `data` read its images from the cache. Images are
// stored no larger than the input size. Returns the size and the path of the cache for the log.
std::string use_cache(Dataset& data, const BlobCache::Place& place, cv::Size input, int threads,
                      const BlobCache::Progress& progress);

}  // namespace yolox
