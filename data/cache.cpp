// SPDX-License-Identifier: Apache-2.0
#include "data/cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <mutex>
#include <thread>

#include "base/threads.hpp"

namespace yolox {

CacheFile::CacheFile(const std::string& path, int flags)
    : path(path), fd(open(path.c_str(), flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600)) {
  struct stat s;
  if (fd < 0 || (fstat(fd, &s) == 0 && S_ISREG(s.st_mode) && s.st_uid == geteuid())) return;
  close(fd);
  fd = -1;
  errno = EPERM;
}

bool CacheFile::lock(int kind) const {
  const bool locked = flock(fd, kind | LOCK_NB) == 0;
  check(locked || errno == EWOULDBLOCK, "cannot lock ", path, ": ", std::strerror(errno),
        "; set YOLOX_CACHE_DIR to a folder on a local disk");
  return locked;
}

bool CacheFile::is_current() const {
  struct stat mine, there;
  return fstat(fd, &mine) == 0 && lstat(path.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
         mine.st_dev == there.st_dev;
}

CacheHeader CacheFile::header() const {
  CacheHeader header{};
  return pread(fd, &header, sizeof header, 0) == sizeof header ? header : CacheHeader{};
}

BlobCache::BlobCache(const Place& place, const std::string& key, const std::vector<size_t>& sizes,
                     const Fill& fill, int threads, const Progress& progress)
    : place_(place),
      remedy_(place.keep ? "free some space, set YOLOX_CACHE_DIR, or leave --cache out"
                         : "use --cache disk, or a larger /dev/shm (docker run --shm-size)") {
  check(!key.empty() && key.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos,
        "the key of a cache must be hex digits, got \"", key, "\"");
  offsets_.push_back(sizeof(CacheHeader));
  for (const size_t size : sizes) {
    offsets_.push_back(offsets_.back() + (size + 63) / 64 * 64);
    sizes_hash_ = (sizes_hash_ ^ size) * 1099511628211u;  // FNV-1a, by words
    sizes_hash_ ^= sizes_hash_ >> 32;
  }
  const std::string path = place.folder + "/" + prefix() + key;
  sweep(place, path);
  while (!try_open(path, fill, threads, progress)) continue;
}

BlobCache::~BlobCache() {
  // A forked child shares the lock of its parent. Only the parent releases the lock.
  if (place_.keep || getpid() != owner_) return;
  // Unlock first: two processes that end at the same time and keep their shared locks would both fail to get
  // the exclusive lock, and nobody would remove the file.
  flock(file_->fd, LOCK_UN);
  if (flock(file_->fd, LOCK_EX | LOCK_NB) == 0) file_->remove();
}

void BlobCache::sweep(const Place& place, const std::string& except) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(place.folder, ignored)) {
    const std::string name = entry.path().filename().string(), path = place.folder + "/" + name;
    if (name.compare(0, prefix().size(), prefix()) != 0 || path == except) continue;
    const CacheFile file(path, O_RDONLY);
    if (file.fd >= 0 && flock(file.fd, LOCK_EX | LOCK_NB) == 0 &&
        !(place.keep && file.header().complete == 1))
      file.remove();
  }
}

bool BlobCache::is_complete(const CacheFile& file) const {
  const CacheHeader header = file.header();
  struct stat s;
  return std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && header.sizes == sizes_hash_ &&
         header.bytes == bytes() && header.complete == 1 && fstat(file.fd, &s) == 0 &&
         static_cast<size_t>(s.st_size) == bytes();
}

bool BlobCache::try_open(const std::string& path, const Fill& fill, int threads, const Progress& progress) {
  const size_t n = offsets_.size() - 1;
  auto file = std::make_unique<CacheFile>(path, O_RDWR | O_CREAT);
  check(file->fd >= 0, "cannot use ", path, ": ",
        errno == EPERM || errno == ELOOP ? "not a regular file of this user; remove it, or "
                                         : concat(std::strerror(errno), "; "),
        remedy_);
  const CacheHeader seen = file->header();
  const bool ready = is_complete(*file);  // may change, because the file is not locked yet
  if (!file->lock(ready ? LOCK_SH : LOCK_EX)) {
    // A complete file with other contents and a shared lock belongs to a run that uses it, not to a process
    // that fills it. That run can take days, so waiting is no option.
    check(!(seen.complete == 1 && !ready && file->lock(LOCK_SH)), path,
          " has other contents and is in use by another process; wait until that process ends, or leave "
          "--cache out");
    if (progress) progress(std::min<size_t>(seen.done, n), n);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return false;
  }
  filled_here_ = !ready && file->is_current() && !is_complete(*file);
  if (filled_here_) {
    try {
      fill_file(*file, fill, threads, progress);
    } catch (...) {
      file->remove();
      throw;
    }
  }
  // flock may release the exclusive lock before it takes the shared one, so check the file again.
  if (!ready && !file->lock(LOCK_SH)) return false;
  if (!file->is_current() || !is_complete(*file)) return false;
  map_ = map(*file, PROT_READ);
  file_ = std::move(file);
  return true;
}

std::shared_ptr<unsigned char> BlobCache::map(const CacheFile& file, int protection) const {
  const size_t size = bytes();
  void* data = mmap(nullptr, size, protection, MAP_SHARED, file.fd, 0);
  check(data != MAP_FAILED, "cannot map ", file.path, " (", short_bytes(double(size)),
        "): ", std::strerror(errno), "; leave --cache out");
  return {static_cast<unsigned char*>(data), [size](unsigned char* p) { munmap(p, size); }};
}

void BlobCache::reserve(const CacheFile& file) const {
  struct stat s {};
  struct statvfs disk {};
  check(fstat(file.fd, &s) == 0 && fstatvfs(file.fd, &disk) == 0, "cannot read the status of ", file.path,
        ": ", std::strerror(errno), "; ", remedy_);
  double free = double(disk.f_bavail) * double(disk.f_frsize);
  const double memory = place_.keep ? std::numeric_limits<double>::infinity() : free_memory();
  const char* of = memory < free ? " of memory (10 % of the memory are kept free)" : "";
  free = std::min(free, memory) + double(s.st_blocks) * 512;
  const bool fits = double(bytes()) <= free;
  int error = fits && ftruncate(file.fd, 0) == 0 ? EINTR : ENOSPC;
  while (error == EINTR) error = posix_fallocate(file.fd, 0, static_cast<off_t>(bytes()));
  check(!error, "no room for the cache in ", place_.folder, ": it needs ", short_bytes(double(bytes())),
        ", free ", short_bytes(free), of, fits ? concat(" (", std::strerror(error), ")") : "", "; ", remedy_);
}

void BlobCache::fill_file(const CacheFile& file, const Fill& fill, int threads,
                          const Progress& progress) const {
  reserve(file);
  const auto data = map(file, PROT_READ | PROT_WRITE);
  auto* header = reinterpret_cast<CacheHeader*>(data.get());
  std::memcpy(header->magic, kMagic, sizeof kMagic);
  header->sizes = sizes_hash_;
  header->bytes = bytes();

  const size_t n = offsets_.size() - 1;
  std::mutex mutex;  // protects the header and `told`
  double told = 0;
  parallel_for(
      int64_t(n),
      [&](int64_t i) {
        fill(size_t(i), data.get() + offsets_[i]);
        const std::lock_guard<std::mutex> lock(mutex);
        ++header->done;
        if (!progress || (header->done < n && now() - told < 0.1)) return;
        progress(header->done, n);
        told = now();
      },
      unsigned(std::max(1, threads)));

  // Sync the blobs before `complete` is set, so that a crash in between leaves an incomplete file.
  const auto sync = [&] {
    check(!place_.keep || msync(data.get(), bytes(), MS_SYNC) == 0, "cannot write ", file.path, ": ",
          std::strerror(errno), "; ", remedy_);
  };
  sync();
  header->complete = 1;
  sync();
}

BlobCache::Place ram_place() {
  const char* folder = std::getenv("YOLOX_CACHE_RAM");
  return {folder && *folder ? folder : "/dev/shm", false};
}

BlobCache::Place disk_place() {
  std::string folder;
  const char* const names[][2] = {
      {"YOLOX_CACHE_DIR", ""}, {"XDG_CACHE_HOME", "/yolox"}, {"HOME", "/.cache/yolox"}};
  for (const auto& [name, below] : names)
    if (const char* value = std::getenv(name); folder.empty() && value && *value)
      folder = concat(value, below);
  check(!folder.empty(), "no folder for --cache disk: HOME is not set; set YOLOX_CACHE_DIR");
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  check(!error, "cannot create ", folder, ": ", error.message(), "; set YOLOX_CACHE_DIR");
  return {folder, true};
}

size_t pyramid_bytes(const std::vector<cv::Size>& sizes) {
  size_t bytes = sizeof(PyramidHeader);
  for (const cv::Size s : sizes) bytes += size_t(s.area()) * 3;
  return bytes;
}

void write_pyramid(const std::vector<ImageRegion>& pieces, unsigned char* out) {
  PyramidHeader head{};
  head.count = int64_t(pieces.size());
  unsigned char* pixels = out + sizeof head;
  for (size_t k = 0; k < pieces.size(); ++k) {
    const ImageRegion& p = pieces[k];
    head.levels[k] = {p.image.cols, p.image.rows, p.scale.x, p.scale.y, p.origin.x, p.origin.y};
    p.image.copyTo(cv::Mat(p.image.size(), CV_8UC3, pixels));
    pixels += p.image.total() * 3;
  }
  std::memcpy(out, &head, sizeof head);
}

ImageRegion read_pyramid_level(std::string_view blob, double scale) {
  PyramidHeader head;
  if (blob.size() < sizeof head) return {};
  const auto* bytes = reinterpret_cast<const unsigned char*>(blob.data());
  std::memcpy(&head, bytes, sizeof head);
  if (head.count < 1 || head.count > PyramidHeader::kMaxLevels) return {};
  std::vector<cv::Size> sizes;
  for (int64_t k = 0; k < head.count; ++k) {
    if (!image_detail::is_size(head.levels[k].width, head.levels[k].height)) return {};
    sizes.emplace_back(head.levels[k].width, head.levels[k].height);
  }
  if (blob.size() < pyramid_bytes(sizes)) return {};
  int64_t wanted = 0;
  for (double s = scale / head.levels[0].scale_x; s <= 0.5 && wanted + 1 < head.count; s *= 2) ++wanted;
  const unsigned char* pixels = bytes + sizeof head;
  for (int64_t k = 0; k < wanted; ++k) pixels += size_t(sizes[k].area()) * 3;
  const PyramidLevel& l = head.levels[wanted];
  const cv::Mat view(sizes[wanted], CV_8UC3, const_cast<unsigned char*>(pixels));
  return {view, {l.scale_x, l.scale_y}, {l.x, l.y}};
}

std::string use_cache(Dataset& data, const BlobCache::Place& place, cv::Size input, int threads,
                      const BlobCache::Progress& progress) {
  const auto sizes_of = [=](cv::Size picture) {
    const Fit fit = fit_into(picture, input, /*truncate=*/false);
    std::vector<cv::Size> sizes{fit.scale.x < 1 || fit.scale.y < 1 ? fit.size : picture};
    for (int r = 2; r <= 8; r *= 2)
      sizes.emplace_back(std::max(1, sizes[0].width / r), std::max(1, sizes[0].height / r));
    return sizes;
  };
  std::vector<size_t> bytes;
  for (size_t i = 0; i < data.records.size(); ++i) bytes.push_back(pyramid_bytes(sizes_of(data.size(i))));
  const auto fill = [&](size_t i, unsigned char* out) {
    const cv::Size picture = data.size(i);
    std::vector<ImageRegion> pieces;
    try {
      for (const cv::Size s : sizes_of(picture)) {
        ImageRegion piece{Image(s, 0), {1.0 * s.width / picture.width, 1.0 * s.height / picture.height}};
        if (!pieces.empty()) {
          cv::resize(pieces[0].image, piece.image, s, 0, 0, cv::INTER_AREA);
        } else {
          const double scale = std::max(piece.scale.x, piece.scale.y);
          cv::resize(data.image_region(i, {{0, 0}, picture}, scale).image, piece.image, s);
        }
        pieces.push_back(piece);
      }
    } catch (const ImageError&) {  // the file was damaged after it was checked: store an empty pyramid
      if (data.strict) throw;
      pieces.clear();
    }
    write_pyramid(pieces, out);
  };
  constexpr int kPixels = 1;  // version of the cached pixels; increase it when their computation changes
  ContentKey key;
  const int parts[] = {kPixels, input.width, input.height};
  key.add(data.key);
  key.add(parts, sizeof parts);
  key.add(CV_VERSION);
  const auto cache = std::make_shared<BlobCache>(place, key.text(), bytes, fill, threads, progress);
  data.stored = [cache, bytes](size_t i, double scale) {
    return read_pyramid_level({reinterpret_cast<const char*>(cache->blob(i)), bytes[i]}, scale);
  };
  return concat(short_bytes(double(cache->bytes())), " in ", cache->path());
}

}  // namespace yolox
