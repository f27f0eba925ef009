// SPDX-License-Identifier: Apache-2.0
#include "data/cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "base/memory.hpp"
#include "data/packed.hpp"

namespace yolox {

namespace {

// A cache file and its lock. Processes synchronise with flock, which the kernel releases when a process is
// killed. A process that writes, sweeps or removes the file holds an exclusive lock. A process that reads the
// file holds a shared lock until it ends.
//
// fd is -1, with errno set, if the file cannot be opened. A file that is not regular or belongs to another
// user is refused with EPERM, because anybody can create a file of this name in a world-writable folder such
// as /dev/shm.
struct CacheFile {
  const std::string path;
  int fd;
  bool temporary = false;  // the destructor removes the file if no other process uses it

  CacheFile(const std::string& path, int flags)
      : path(path), fd(open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600)) {
    struct stat s;
    if (fd < 0 || (fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && s.st_uid == geteuid())) return;
    close(fd);
    fd = -1;
    errno = EPERM;
  }
  CacheFile(const CacheFile&) = delete;
  ~CacheFile() {
    if (temporary) {
      // Unlock first: two processes that end at the same time and keep their shared locks would both fail to
      // get the exclusive lock, and nobody would remove the file.
      flock(fd, LOCK_UN);
      if (flock(fd, LOCK_EX | LOCK_NB) == 0) remove();
    }
    if (fd >= 0) close(fd);
  }
  // Locks the file with LOCK_SH or LOCK_EX without waiting. Returns false if another process holds a
  // conflicting lock. Throws if the file system does not support flock.
  bool lock(int kind) const {
    const bool locked = flock(fd, kind | LOCK_NB) == 0;
    check(locked || errno == EWOULDBLOCK, "cannot lock ", path, ": ", std::strerror(errno),
          "; set YOLOX_CACHE_DIR to a folder on a local disk");
    return locked;
  }
  // Returns true if the path still names this file. Otherwise the file was removed or replaced, and a lock on
  // this descriptor protects nothing.
  bool is_current() const {
    struct stat mine, there;
    return fstat(fd, &mine) == 0 && lstat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
           mine.st_dev == there.st_dev;
  }
  void remove() const {
    if (is_current()) unlink(path.c_str());
  }
};

const std::string cache_head = "1 cache ";

std::string cache_prefix() { return concat("yolox-cache-", geteuid(), "-"); }

// Opens a cache file whose value of `yolox` begins with `head`. Returns null if it is another file, damaged
// or incomplete. The caller must hold a lock.
std::unique_ptr<Packed> open_complete(const std::string& path, const std::string& head) {
  try {
    auto file = std::make_unique<Packed>(path);
    if (file->get("yolox").substr(0, head.size()) == head && !file->get("complete").empty()) return file;
  } catch (const std::exception&) {}
  return nullptr;
}

const char* cache_remedy(const CachePlace& place) {
  return place.keep ? "; free some space, set YOLOX_CACHE_DIR, or leave --cache out"
                    : "; use --cache disk, or a larger /dev/shm (docker run --shm-size)";
}

void check_room(const CacheFile& file, const CachePlace& place, double bytes) {
  struct statvfs disk {};
  check(fstatvfs(file.fd, &disk) == 0, "cannot read the status of ", file.path, ": ", std::strerror(errno),
        cache_remedy(place));
  const double room = double(disk.f_bavail) * double(disk.f_frsize);
  const double memory = place.keep ? std::numeric_limits<double>::infinity() : free_memory();
  const double free = std::min(room, memory);
  check(bytes <= free, "no room for the cache in ", place.folder, ": it needs ", short_bytes(bytes),
        ", free ", short_bytes(free), memory < room ? " of memory (10 % of the memory are kept free)" : "",
        cache_remedy(place));
}

struct ImageCache {
  std::unique_ptr<CacheFile> lock;
  std::unique_ptr<Packed> file;
};

// Opens a cache file. Calls write() with the exclusive lock if it does not exist, or is incomplete or
// damaged. Calls wait(bytes) every 50 ms while another process writes it.
template <class Write, class Wait>
ImageCache open_cache(const CachePlace& place, const std::string& path, const std::string& head,
                      const Write& write, const Wait& wait) {
  for (;;) {
    auto file = std::make_unique<CacheFile>(path, O_RDWR | O_CREAT);
    check(file->fd >= 0, "cannot use ", path, ": ",
          errno == EPERM || errno == ELOOP ? "not a regular file of this user; remove it"
                                           : concat(std::strerror(errno), cache_remedy(place)));
    const bool alone = file->lock(LOCK_EX);
    if (!alone && !file->lock(LOCK_SH)) {
      struct stat s {};
      fstat(file->fd, &s);
      wait(double(s.st_size));
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      continue;
    }
    if (!file->is_current()) continue;
    if (!open_complete(path, head)) {
      if (!alone) {  // damaged: other processes keep what they have opened
        file->remove();
        continue;
      }
      file->temporary = true;
      check(ftruncate(file->fd, 0) == 0, "cannot write ", path, ": ", std::strerror(errno));
      write(*file);
      file->temporary = false;
    }
    // flock may release the exclusive lock before it takes the shared one, so check the file again.
    if (alone && !file->lock(LOCK_SH)) continue;
    auto complete = file->is_current() ? open_complete(path, head) : nullptr;
    if (!complete) continue;
    file->temporary = !place.keep;
    return {std::move(file), std::move(complete)};
  }
}

}  // namespace

CachePlace ram_place() {
  const char* folder = std::getenv("YOLOX_CACHE_RAM");
  return {folder && *folder ? folder : "/dev/shm", false};
}

std::string cache_folder() {
  const char* const names[][2] = {
      {"YOLOX_CACHE_DIR", ""}, {"XDG_CACHE_HOME", "/yolox"}, {"HOME", "/.cache/yolox"}};
  for (const auto& [name, below] : names)
    if (const char* value = std::getenv(name); value && *value) return concat(value, below);
  return "";
}

CachePlace disk_place() {
  const std::string folder = cache_folder();
  check(!folder.empty(), "no folder for --cache disk: HOME is not set; set YOLOX_CACHE_DIR");
  std::error_code error;
  fs::create_directories(folder, error);
  check(!error, "cannot create ", folder, ": ", error.message(), "; set YOLOX_CACHE_DIR");
  return {folder, true};
}

void sweep_caches(const CachePlace& place, const std::string& except) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(place.folder, ignored)) {
    const std::string name = entry.path().filename().string(), path = place.folder + "/" + name;
    if (!name.starts_with(cache_prefix()) || path == except) continue;
    const CacheFile file(path, O_RDONLY);
    if (file.fd >= 0 && flock(file.fd, LOCK_EX | LOCK_NB) == 0 &&
        !(place.keep && open_complete(path, cache_head)))
      file.remove();
  }
}

std::string use_cache(Dataset& data, const CachePlace& place, cv::Size input, int threads,
                      const std::function<void(size_t done, size_t n)>& progress) {
  const auto sizes_of = [=](cv::Size picture) {
    const Fit fit = fit_into(picture, input, /*truncate=*/false);
    std::vector<cv::Size> sizes{fit.scale.x < 1 || fit.scale.y < 1 ? fit.size : picture};
    for (int r = 2; r <= 8; r *= 2)
      sizes.emplace_back(std::max(1, sizes[0].width / r), std::max(1, sizes[0].height / r));
    return sizes;
  };
  const auto pyramid = [&](size_t i) {
    const cv::Size picture = data.size(i);
    std::vector<ImageRegion> levels;
    try {
      for (const cv::Size s : sizes_of(picture)) {
        ImageRegion level{Image(s, 0), {1.0 * s.width / picture.width, 1.0 * s.height / picture.height}};
        if (!levels.empty()) {
          cv::resize(levels[0].image, level.image, s, 0, 0, cv::INTER_AREA);
        } else {
          const double scale = std::max(level.scale.x, level.scale.y);
          cv::resize(data.image_region(i, {{0, 0}, picture}, scale).image, level.image, s);
        }
        levels.push_back(level);
      }
    } catch (const ImageError&) {  // the file was damaged after it was checked: store an empty pyramid
      if (data.strict) throw;
      levels.clear();
    }
    return pyramid_of(levels);
  };
  constexpr int kPixels = 1;  // version of the cached pixels; increase it when their computation changes
  ContentKey key;
  const int parts[] = {kPixels, input.width, input.height};
  key.add(data.key);
  key.add(parts, sizeof parts);
  key.add(CV_VERSION);

  const size_t n = data.records.size();
  double bytes = 65536;
  for (size_t i = 0; i < n; ++i) {
    bytes += sizeof(PyramidHeader) + 4096;  // and what LMDB adds: half a page, and the key
    for (const cv::Size s : sizes_of(data.size(i))) bytes += 3.0 * s.area();
  }
  const std::string path = concat(place.folder, "/", cache_prefix(), key.text());
  const std::string head = cache_head + key.text();
  const auto told = [&](size_t done) {
    if (progress) progress(done, n);
  };
  const auto write = [&](const CacheFile& file) {
    check_room(file, place, bytes);
    PackedWriter out(path, cache_remedy(place));
    out.put("yolox", head);
    const unsigned at_once = unsigned(std::max(1, threads));
    out.put_images("train", n, 8 * at_once, at_once, pyramid, told);
    out.put("complete", "yes");
    out.commit();
  };
  sweep_caches(place, path);
  const auto cache = std::make_shared<ImageCache>(open_cache(place, path, head, write, [&](double so_far) {
    told(size_t(double(n) * std::min(1.0, so_far / bytes)));
  }));
  std::vector<std::string_view> images;  // read here, because an LMDB transaction belongs to one thread
  for (size_t i = 0; i < n; ++i) images.push_back(cache->file->get(image_key("train", i)));
  data.stored = [cache, images](size_t i, double scale) { return read_pyramid_level(images[i], scale); };
  return concat(short_bytes(double(fs::file_size(path))), " in ", path);
}

}  // namespace yolox
