// Blobs of known sizes, such as decoded pictures, in one file that all processes of the machine map: what
// --cache ram|disk is made of. The first process that asks for a key fills its file, the others wait for it.
//
// flock on the file says who does what: whoever fills, sweeps or removes it holds it exclusively, users hold
// it shared while they live. The kernel drops the lock of a process that is killed, so a waiter takes over.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "base/threads.hpp"
#include "data/dataset.hpp"
#include "run/log.hpp"

namespace yolox {

struct CacheHeader {
  char magic[16];         // with the version of this layout
  uint64_t sizes, bytes;  // hash of the sizes of the blobs, size of the file
  uint64_t done;          // blobs filled so far, for those who wait
  uint64_t complete;      // 1 when all data is where it survives a crash
  uint64_t unused[2];     // blobs start at 64
};
static_assert(sizeof(CacheHeader) == 64);

// An open file, closed at the end. fd is -1 if it cannot be opened (errno) or is not a regular file of this
// user: in a folder that all may write to, anything can lie under our name.
struct CacheFile {
  std::string path;
  int fd;

  CacheFile(const std::string& path, int flags);
  CacheFile(const CacheFile&) = delete;
  ~CacheFile() {
    if (fd >= 0) close(fd);
  }
  // LOCK_SH or LOCK_EX without waiting; false: another process holds it.
  bool lock(int kind) const;
  // False: the path names another file by now, or none, so a lock on this one protects nothing.
  bool current() const;
  // With the lock held exclusively, without which it could be the file of someone else.
  void remove() const {
    if (current()) unlink(path.c_str());
  }
  CacheHeader header() const;
};

class BlobCache {
 public:
  struct Place {
    std::string folder;
    bool keep;  // true: on disk, kept for later runs; false: in RAM, gone with its last user
  };

  using Fill = std::function<void(size_t i, unsigned char* out)>;
  using Progress = std::function<void(size_t done, size_t n)>;

  // The blobs of `key` (hex digits, which stand for all that the contents depend on).
  // fill(i, out) writes sizes[i] bytes to out. It is called from `threads` threads, once per blob and
  // machine; its first exception comes out of here, and the file is removed. progress(done, n) is called now
  // and then, from one thread at a time, also while another process fills; an exception in it ends filling or
  // waiting. Throws if there is no room, before anything is written.
  BlobCache(const Place& place, const std::string& key, const std::vector<size_t>& sizes, const Fill& fill,
            int threads, const Progress& progress = {});
  BlobCache(const BlobCache&) = delete;

  ~BlobCache();

  // sizes[i] bytes, 64-byte aligned, valid as long as the cache lives.
  const unsigned char* blob(size_t i) const { return map_.get() + offsets_[i]; }
  // Of the whole file.
  size_t bytes() const { return offsets_.back(); }
  // False: it was there already, or another process made it.
  bool filled_here() const { return filled_here_; }
  const std::string& path() const { return file_->path; }

  // Removes what processes that were killed have left: in RAM every file that nobody uses, on disk those that
  // were not filled to the end.
  static void sweep(const Place& place, const std::string& but_for = "");

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

  bool usable(const CacheFile& file) const;

  // One attempt to get hold of the file. False: another process has it, or it was replaced meanwhile.
  bool attach(const std::string& path, const Fill& fill, int threads, const Progress& progress);

  // No advice to the kernel: MADV_WILLNEED per blob gained nothing, and MADV_RANDOM makes reading from disk
  // 16 times slower (600 blobs of 900 KB: 8.9 s, not 0.56 s).
  std::shared_ptr<unsigned char> map(const CacheFile& file, int protection) const;

  // Reserves all space, so that a reader cannot be hit by a disk that is full later. What the file takes up
  // already counts as free.
  void reserve(const CacheFile& file) const;

  // Fills the file, with its lock held exclusively.
  void make(const CacheFile& file, const Fill& fill, int threads, const Progress& progress) const;
};

// /dev/shm; the environment variable YOLOX_CACHE_RAM names another folder.
BlobCache::Place ram_place();

// $YOLOX_CACHE_DIR, else $XDG_CACHE_HOME/yolox, else ~/.cache/yolox. Makes the folder.
BlobCache::Place disk_place();

// A picture as bytes: itself and its reductions by 2, 4, 8, ..., so that what is shown small is read small.
struct Level {
  int32_t width, height;
  double scale_x, scale_y, x, y;  // see Piece
};

struct Levels {
  static constexpr int kMost = 13;
  int64_t count;
  Level levels[kMost];
};

size_t levels_bytes(const std::vector<cv::Size>& sizes);

void write_levels(const std::vector<Piece>& pieces, unsigned char* out);

// The level that decode_piece() would decode, relative to the largest one; nothing where there is none, or
// not all of it. The pixels stay where they are: they are not to be written to.
Piece read_levels(std::string_view blob, double scale);

// From now on the data set's pictures come from the cache, which is filled first. In it a picture is no
// larger than training shows it unzoomed. official_quirks: resized as official YOLOX does. Gives its size and
// place, for the log.
std::string use_cache(Dataset& data, const BlobCache::Place& place, cv::Size input, bool official_quirks,
                      int threads, const BlobCache::Progress& progress);

}  // namespace yolox
