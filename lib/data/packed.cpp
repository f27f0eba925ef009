// SPDX-License-Identifier: Apache-2.0
#include "data/packed.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/threads.hpp"

namespace yolox {

static void check_lmdb(int code, const std::string& path, const char* what, const std::string& remedy = "") {
  check(code == MDB_SUCCESS, path, ": ", what, ": ", mdb_strerror(code),
        code == ENOSPC || code == EIO ? remedy : "");
}

static MDB_val lmdb_value(std::string_view text) { return {text.size(), const_cast<char*>(text.data())}; }

static std::string_view lmdb_get(MDB_txn* transaction, MDB_dbi table, const std::string& key,
                                 const std::string& path) {
  MDB_val k = lmdb_value(key), value;
  const int code = mdb_get(transaction, table, &k, &value);
  if (code == MDB_NOTFOUND) return {};
  check_lmdb(code, path, "cannot be read");
  return {static_cast<const char*>(value.mv_data), value.mv_size};
}

// Returns the number of bytes of the file that contain data.
static size_t lmdb_used_bytes(MDB_env* env) {
  MDB_envinfo info;
  MDB_stat stat;
  mdb_env_info(env, &info);
  mdb_env_stat(env, &stat);
  return (info.me_last_pgno + 1) * stat.ms_psize;
}

// ---- pyramids

// Returns the size in bytes of a pyramid whose levels have these sizes.
static size_t pyramid_bytes(const std::vector<cv::Size>& sizes) {
  size_t bytes = sizeof(PyramidHeader);
  for (const cv::Size s : sizes) bytes += size_t(s.area()) * 3;
  return bytes;
}

std::string pyramid_of(const std::vector<ImageRegion>& levels) {
  std::vector<cv::Size> sizes;
  for (const ImageRegion& l : levels) sizes.push_back(l.image.size());
  std::string bytes(pyramid_bytes(sizes), '\0');
  PyramidHeader head{};
  char* pixels = bytes.data() + sizeof head;
  for (const ImageRegion& l : levels) {
    head.levels[head.count++] = {l.image.cols, l.image.rows, l.scale.x, l.scale.y, l.origin.x, l.origin.y};
    l.image.copyTo(cv::Mat(l.image.size(), CV_8UC3, pixels));
    pixels += l.image.total() * 3;
  }
  std::memcpy(bytes.data(), &head, sizeof head);
  return bytes;
}

ImageRegion read_pyramid_level(std::string_view pyramid, double scale) {
  PyramidHeader head;
  if (pyramid.size() < sizeof head) return {};
  std::memcpy(&head, pyramid.data(), sizeof head);
  if (head.count < 1 || head.count > PyramidHeader::kMaxLevels) return {};
  std::vector<cv::Size> sizes;
  for (int64_t k = 0; k < head.count; ++k) {
    if (!image_detail::is_size(head.levels[k].width, head.levels[k].height)) return {};
    sizes.emplace_back(head.levels[k].width, head.levels[k].height);
  }
  if (pyramid.size() < pyramid_bytes(sizes)) return {};
  int64_t wanted = 0;
  for (double s = scale / head.levels[0].scale_x; s <= 0.5 && wanted + 1 < head.count; s *= 2) ++wanted;
  const char* pixels = pyramid.data() + sizeof head;
  for (int64_t k = 0; k < wanted; ++k) pixels += size_t(sizes[k].area()) * 3;
  const PyramidLevel& l = head.levels[wanted];
  const cv::Mat view(sizes[wanted], CV_8UC3, const_cast<char*>(pixels));
  return {view, {l.scale_x, l.scale_y}, {l.x, l.y}};
}

// ---- the file

std::string image_key(const std::string& split, size_t i) { return split + formatted("/%09zu", i); }

Packed::Packed(const std::string& path) : path(path) {
  check_lmdb(mdb_env_create(&env), path, "cannot be opened");
  try {
    check_lmdb(mdb_env_open(env, path.c_str(), MDB_RDONLY | MDB_NOSUBDIR | MDB_NOLOCK, 0), path,
               "cannot be opened");
    mdb_filehandle_t file;
    mdb_env_get_fd(env, &file);
    fcntl(file, F_SETFD, FD_CLOEXEC);  // programs that this one starts must not keep a removed file
    check_lmdb(mdb_txn_begin(env, nullptr, MDB_RDONLY, &transaction), path, "cannot be read");
    check_lmdb(mdb_dbi_open(transaction, nullptr, 0, &table), path, "cannot be read");
    struct stat s {};
    check(::stat(path.c_str(), &s) == 0 && lmdb_used_bytes(env) <= size_t(s.st_size), path,
          " is cut off: it has ", s.st_size, " of ", lmdb_used_bytes(env), " bytes; copy it again");
  } catch (...) {
    close();
    throw;
  }
}

void Packed::close() {
  if (transaction) mdb_txn_abort(transaction);
  mdb_env_close(env);
}

std::string_view Packed::get(const std::string& key) const { return lmdb_get(transaction, table, key, path); }

PackedWriter::PackedWriter(const std::string& path, const std::string& remedy) : path(path), remedy(remedy) {
  check_done(mdb_env_create(&env), "cannot be created");
  check_done(mdb_env_open(env, path.c_str(), MDB_NOSUBDIR | MDB_NOLOCK, 0644), "cannot be created");
  begin();
  MDB_stat stat;
  check_done(mdb_stat(transaction, table, &stat), "cannot be read");
  check(stat.ms_entries == 0 || !get("yolox").empty(), path,
        " is an LMDB file of another program; give another --out");
}

PackedWriter::~PackedWriter() {
  if (transaction) mdb_txn_abort(transaction);
  mdb_env_close(env);
}

void PackedWriter::check_done(int code, const char* what) const { check_lmdb(code, path, what, remedy); }

void PackedWriter::begin() {
  if (transaction) return;
  // Address space for a transaction: 64 MiB, an image of up to 4 GiB, and the pages that LMDB copies.
  const size_t used = lmdb_used_bytes(env), room = size_t(8) << 30;
  if (used + room > map_size) {
    map_size = 2 * (used + room);
    check_done(mdb_env_set_mapsize(env, map_size), "cannot grow");
  }
  check_done(mdb_txn_begin(env, nullptr, 0, &transaction), "cannot be written");
  check_done(mdb_dbi_open(transaction, nullptr, 0, &table), "cannot be written");
}

std::string_view PackedWriter::get(const std::string& key) {
  begin();
  return lmdb_get(transaction, table, key, path);
}

void PackedWriter::put(const std::string& key, std::string_view bytes) {
  begin();
  MDB_val k = lmdb_value(key), value = lmdb_value(bytes);
  check_done(mdb_put(transaction, table, &k, &value, 0), "cannot be written");
  uncommitted_bytes += bytes.size();
  if (uncommitted_bytes > (64u << 20) || ++uncommitted_values >= 64) commit();
}

size_t PackedWriter::put_images(const std::string& split, size_t n, size_t chunk, unsigned threads,
                                const std::function<std::string(size_t)>& image,
                                const std::function<void(size_t)>& progress) {
  size_t already_there = 0;
  for (size_t from = 0; from < n; from += chunk) {
    std::vector<std::string> images(std::min(chunk, n - from));
    std::vector<char> missing(images.size());
    for (size_t k = 0; k < images.size(); ++k) missing[k] = get(image_key(split, from + k)).empty();
    parallel_for(
        int64_t(images.size()),
        [&](int64_t k) {
          if (missing[k]) images[k] = image(from + k);
        },
        threads);
    for (size_t k = 0; k < images.size(); ++k) {
      if (missing[k]) put(image_key(split, from + k), images[k]);
      already_there += !missing[k];
    }
    progress(from + images.size());
  }
  return already_there;
}

void PackedWriter::commit() {
  if (transaction) check_done(mdb_txn_commit(std::exchange(transaction, nullptr)), "cannot be written");
  uncommitted_bytes = 0;
  uncommitted_values = 0;
}

// ---- packed data sets

Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split) {
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
  ContentKey key;
  struct stat s {};
  ::stat(file->path.c_str(), &s);
  key.add(file->path + split, s);
  checks.key = key.text();
  Dataset data = make_dataset(std::move(source), checks);
  data.read = [file, images](size_t i) { return std::string(images[i]); };
  return data;
}

std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split) {
  check(split.empty() || split == "val", "--split ", split,
        ": of a packed data set, only val can be evaluated; leave --split out");
  const auto file = std::make_shared<Packed>(path);
  const std::string_view head = file->get("yolox");
  check(head.starts_with("1 encoded "), path,
        " is not a packed data set of this program; make one with ./pack");
  check(!file->get("complete").empty(), path, " is incomplete; run the same ./pack command again to resume");
  return file;
}

}  // namespace yolox
