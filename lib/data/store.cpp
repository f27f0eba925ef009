// SPDX-License-Identifier: Apache-2.0
#include "data/store.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/memory.hpp"
#include "base/threads.hpp"
#include "data/source.hpp"

namespace yolox {

// ---- packed data sets

static MDB_val lmdb_value(std::string_view text) { return {text.size(), const_cast<char*>(text.data())}; }

void PackedFile::check_done(int code, const char* failure) const {
  const bool no_room = code == ENOSPC || code == EIO;
  check(code == MDB_SUCCESS, path, ": ", failure, ": ", mdb_strerror(code),
        no_room ? "; is the disk full? Free some space and run ./pack again to resume" : "");
}

PackedFile::PackedFile(const std::string& path, size_t room) : path(path) {
  std::error_code none;
  const size_t size = is_file(path) ? size_t(fs::file_size(path, none)) : 0;
  const unsigned flags = room ? 0 : MDB_RDONLY;
  MDB_env* opened = nullptr;
  check_done(mdb_env_create(&opened), "cannot be opened");
  env.reset(opened);
  // The space for writing includes the pages that LMDB copies.
  if (room) check_done(mdb_env_set_mapsize(opened, size + room + (size_t(1) << 30)), "cannot be opened");
  check_done(mdb_env_open(opened, path.c_str(), flags | MDB_NOSUBDIR | MDB_NOLOCK, 0644), "cannot be opened");
  mdb_filehandle_t file;
  mdb_env_get_fd(opened, &file);
  check(!room || flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, path,
        " is being written by another ./pack; wait for it, or give another --out");
  begin(flags);
  check_done(mdb_dbi_open(transaction.get(), nullptr, 0, &table), "cannot be read");
  MDB_envinfo info;
  MDB_stat stat;
  mdb_env_info(opened, &info);
  check_done(mdb_stat(transaction.get(), table, &stat), "cannot be read");
  if (room) {
    check(stat.ms_entries == 0 || !get("yolox").empty(), path,
          " is an LMDB file of another program; give another --out");
  } else {
    const size_t used = (info.me_last_pgno + 1) * stat.ms_psize;
    check(used <= size, path, " is cut off: it has ", size, " of ", used, " bytes; copy it again");
    check(get("yolox").starts_with("1 encoded "), path,
          " is not a packed data set of this program; make one with ./pack");
    check(!get("complete").empty(), path, " is incomplete; run the same ./pack command again to resume");
  }
}

void PackedFile::begin(unsigned flags) {
  MDB_txn* begun = nullptr;
  check_done(mdb_txn_begin(env.get(), nullptr, flags, &begun), "cannot be opened");
  transaction.reset(begun);
}

std::string_view PackedFile::get(const std::string& key) const {
  MDB_val k = lmdb_value(key), value;
  const int code = mdb_get(transaction.get(), table, &k, &value);
  if (code == MDB_NOTFOUND) return {};
  check_done(code, "cannot be read");
  return {static_cast<const char*>(value.mv_data), value.mv_size};
}

void PackedFile::put(const std::string& key, std::string_view text) {
  MDB_val k = lmdb_value(key), value = lmdb_value(text);
  check_done(mdb_put(transaction.get(), table, &k, &value, 0), "cannot be written");
}

void PackedFile::commit() {
  check_done(mdb_txn_commit(transaction.release()), "cannot be written");
  begin(0);
}

std::string image_key(const std::string& split, size_t i) { return split + formatted("/%09zu", i); }

Dataset packed_dataset(const std::shared_ptr<PackedFile>& file, const std::string& split) {
  Source source;
  source.name = concat(file->path, " (", split, ")");
  source.coco = parse_coco(std::string(file->get(split)), source.name);
  ImageChecks checks;
  std::vector<std::string_view> images;  // read here, because an LMDB transaction belongs to one thread
  for (size_t i = 0; i < source.coco.images.size(); ++i) {
    const CocoImage& image = source.coco.images[i];
    images.push_back(file->get(image_key(split, i)));
    check(!images.back().empty(), file->path, " has no image ", image.file_name, "; pack it again");
    source.files.push_back(concat(file->path, ": ", image.file_name));
    checks.images.push_back({image.width, image.height, ""});
  }
  checks.key = content_key(split, file_state(file->path));
  Dataset data = make_dataset(std::move(source), checks);
  data.read = [file, images](size_t i) { return std::string(images[i]); };
  return data;
}

// ---- image cache

constexpr const char* kRemedy =
    "; free some space, use --cache disk with another YOLOX_CACHE_DIR, or leave --cache out";

// Throws with the reason in `errno`.
static void require(bool done, const std::string& failure) {
  check(done, failure, ": ", std::strerror(errno), kRemedy);
}

std::string cache_folder() {
  const char* const names[][2] = {
      {"YOLOX_CACHE_DIR", ""}, {"XDG_CACHE_HOME", "/yolox"}, {"HOME", "/.cache/yolox"}};
  for (const auto& [name, below] : names)
    if (const char* value = std::getenv(name); value && *value) return concat(value, below);
  return "";
}

ImageCache::ImageCache(const Dataset& data, cv::Size input) : input(input) {
  std::string files;
  for (size_t i = 0; i < data.records.size(); ++i) {
    sizes.push_back(data.size(i));
    files += data.records[i].file + "\n";
  }
  offsets.push_back(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    size_t bytes = 0;
    for (const cv::Size s : level_sizes(i)) bytes += size_t(s.area()) * 3;
    offsets.push_back(offsets.back() + bytes);
  }
  constexpr int kPixels = 1;  // version of the cached pixels; increase it when their computation changes
  data_name = concat("yolox-cache-", content_key(files, input), "-");
  name = data_name + content_key(kPixels, CV_VERSION, data.key);
}

ImageCache::~ImageCache() {
  if (memory) munmap(const_cast<char*>(memory), offsets.back());
  if (fd >= 0) close(fd);
}

std::vector<cv::Size> ImageCache::level_sizes(size_t i) const {
  const Fit fit = fit_into(sizes[i], input, /*truncate=*/false);
  const cv::Size largest = fit.scale.x < 1 || fit.scale.y < 1 ? fit.size : sizes[i];
  std::vector<cv::Size> levels{largest};
  for (int r = 2; r <= 8; r *= 2)
    levels.emplace_back(std::max(1, largest.width / r), std::max(1, largest.height / r));
  return levels;
}

void ImageCache::check_room(const std::string& place, double free) const {
  check(bytes() <= free, "no room for the cache in ", place, ": it needs ", short_bytes(bytes()), ", free ",
        short_bytes(free), kRemedy);
}

std::string ImageCache::create_in_memory(const Dataset& data, int threads, const Progress& progress) {
  check_room("memory, of which 10 % are kept free", free_memory());
  fd = memfd_create(name.c_str(), MFD_CLOEXEC);
  require(fd >= 0, "--cache ram");
  fill(data, threads, progress);
  return concat("/proc/", getpid(), "/fd/", fd);
}

void ImageCache::open_memory(const std::string& path) {
  std::error_code unknown;  // the name shows that the path is not of another container
  if (fs::read_symlink(path, unknown) == concat("/memfd:", name, " (deleted)"))
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(fd >= 0, "--cache ram: cannot open ", path, ", the memory of the first rank of this machine",
        "; use --cache disk, or run all ranks of a machine in one container");
  map();
}

std::string ImageCache::open_on_disk(const std::string& folder, const Dataset& data, int threads,
                                     const Progress& progress) {
  check(!folder.empty(), "no folder for --cache disk: HOME is not set; set YOLOX_CACHE_DIR");
  std::error_code error;
  fs::create_directories(folder, error);
  check(!error, "cannot create ", folder, ": ", error.message(), "; set YOLOX_CACHE_DIR");
  const std::string path = concat(folder, "/", name), part = path + ".part";
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string file = entry.path().filename().string();
    if (file.starts_with(data_name) && !file.starts_with(name)) fs::remove(entry.path(), error);
  }
  if (fs::file_size(path, error) == offsets.back()) {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    require(fd >= 0, "cannot open " + path);
    map();
    return path;
  }
  // Two processes may write the same file at the same time, because both write the same bytes.
  fd = open(part.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  require(fd >= 0, "cannot write " + part);
  try {
    check_room(folder, double(fs::space(folder).available));
    fill(data, threads, progress);
    require(fsync(fd) == 0, "cannot write the image cache");
  } catch (...) {
    fs::remove(part, error);
    throw;
  }
  fs::rename(part, path, error);  // fails if the other process has renamed it
  return path;
}

void ImageCache::fill(const Dataset& data, int threads, const Progress& progress) {
  require(ftruncate(fd, off_t(offsets.back())) == 0, "cannot write the image cache");
  std::mutex mutex;
  size_t done = 0;
  const size_t n = sizes.size();
  parallel_for(
      int64_t(n),
      [&](int64_t i) {
        const std::vector<cv::Size> levels = level_sizes(i);
        std::string pixels(offsets[i + 1] - offsets[i], '\0');
        const cv::Mat largest(levels[0], CV_8UC3, pixels.data());
        try {
          const double scale =
              std::max(1.0 * levels[0].width / sizes[i].width, 1.0 * levels[0].height / sizes[i].height);
          const Image image = data.image_region(i, {{0, 0}, sizes[i]}, scale).image;
          size_t at = 0;
          for (const cv::Size s : levels) {
            cv::Mat level(s, CV_8UC3, pixels.data() + at);
            cv::resize(at ? largest : image, level, s, 0, 0, at ? cv::INTER_AREA : cv::INTER_LINEAR);
            at += size_t(s.area()) * 3;
          }
          write(pixels, offsets[i]);
          write("\1", size_t(i));
        } catch (const ImageError&) {  // the file was damaged after it was checked
          if (data.strict) throw;
        }
        const std::lock_guard lock(mutex);
        if (progress && (++done % 64 == 0 || done == n)) progress(done, n);
      },
      unsigned(std::max(1, threads)));
  map();
}

void ImageCache::write(std::string_view bytes, size_t at) const {
  while (!bytes.empty()) {
    const ssize_t n = pwrite(fd, bytes.data(), bytes.size(), off_t(at));
    require(n > 0, "cannot write the image cache");
    bytes.remove_prefix(size_t(n));
    at += size_t(n);
  }
}

void ImageCache::map() {
  void* mapped = mmap(nullptr, offsets.back(), PROT_READ, MAP_SHARED, fd, 0);
  require(mapped != MAP_FAILED, "cannot map the image cache");
  memory = static_cast<const char*>(mapped);
}

ImageRegion ImageCache::read(size_t i, double scale) const {
  if (!memory[i]) return {};
  const std::vector<cv::Size> levels = level_sizes(i);
  const char* pixels = memory + offsets[i];
  size_t level = 0;
  for (double s = scale / (1.0 * levels[0].width / sizes[i].width); s <= 0.5 && level + 1 < levels.size();
       s *= 2)
    pixels += size_t(levels[level++].area()) * 3;
  const cv::Size size = levels[level];
  const cv::Mat view(size, CV_8UC3, const_cast<char*>(pixels));
  return {view, {1.0 * size.width / sizes[i].width, 1.0 * size.height / sizes[i].height}};
}

}  // namespace yolox
