// Pictures that were read before: decoded ones in a cache (--cache ram|disk), and data sets packed into one
// LMDB file (pack.cpp).
#pragma once
#include <lmdb.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/cache.hpp"
#include "data/dataset.hpp"

namespace yolox {

// ---- decoded pictures

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
inline size_t levels_bytes(const std::vector<cv::Size>& sizes) {
  size_t bytes = sizeof(Levels);
  for (const cv::Size s : sizes) bytes += size_t(s.area()) * 3;
  return bytes;
}
inline void write_levels(const std::vector<Piece>& pieces, unsigned char* out) {
  Levels head{};
  head.count = int64_t(pieces.size());
  unsigned char* pixels = out + sizeof head;
  for (size_t k = 0; k < pieces.size(); ++k) {
    const Piece& p = pieces[k];
    head.levels[k] = {p.image.cols, p.image.rows, p.scale.x, p.scale.y, p.origin.x, p.origin.y};
    p.image.copyTo(cv::Mat(p.image.size(), CV_8UC3, pixels));
    pixels += p.image.total() * 3;
  }
  std::memcpy(out, &head, sizeof head);
}
// The level that decode_piece() would decode, relative to the largest one; nothing where there is none, or
// not all of it. The pixels stay where they are: they are not to be written to.
inline Piece read_levels(std::string_view blob, double scale) {
  Levels head;
  if (blob.size() < sizeof head) return {};
  const auto* bytes = reinterpret_cast<const unsigned char*>(blob.data());
  std::memcpy(&head, bytes, sizeof head);
  if (head.count < 1 || head.count > Levels::kMost) return {};
  std::vector<cv::Size> sizes;
  for (int64_t k = 0; k < head.count; ++k) {
    if (!image_detail::is_size(head.levels[k].width, head.levels[k].height)) return {};
    sizes.emplace_back(head.levels[k].width, head.levels[k].height);
  }
  if (blob.size() < levels_bytes(sizes)) return {};
  int64_t wanted = 0;
  for (double s = scale / head.levels[0].scale_x; s <= 0.5 && wanted + 1 < head.count; s *= 2) ++wanted;
  const unsigned char* pixels = bytes + sizeof head;
  for (int64_t k = 0; k < wanted; ++k) pixels += size_t(sizes[k].area()) * 3;
  const Level& l = head.levels[wanted];
  const cv::Mat view(sizes[wanted], CV_8UC3, const_cast<unsigned char*>(pixels));
  return {view, {l.scale_x, l.scale_y}, {l.x, l.y}};
}

// ---- --cache

// From now on the data set's pictures come from the cache, which is filled first. In it a picture is no
// larger than training shows it unzoomed. official_quirks: resized as official YOLOX does. Gives its size and
// place, for the log.
inline std::string use_cache(Dataset& data, const BlobCache::Place& place, cv::Size input,
                             bool official_quirks, int threads, const BlobCache::Progress& progress) {
  const auto sizes_of = [=](cv::Size picture) {
    const Fit fit = fit_into(picture, input, official_quirks);
    if (official_quirks) return std::vector<cv::Size>{fit.size};
    std::vector<cv::Size> sizes{fit.scale.x < 1 || fit.scale.y < 1 ? fit.size : picture};
    for (int r = 2; r <= 8; r *= 2)
      sizes.emplace_back(std::max(1, sizes[0].width / r), std::max(1, sizes[0].height / r));
    return sizes;
  };
  std::vector<size_t> bytes;
  for (size_t i = 0; i < data.records.size(); ++i) bytes.push_back(levels_bytes(sizes_of(data.size(i))));
  const auto fill = [&](size_t i, unsigned char* out) {
    const cv::Size picture = data.size(i);
    std::vector<Piece> pieces;
    try {
      for (const cv::Size s : sizes_of(picture)) {
        Piece piece{Image(s, 0), {1.0 * s.width / picture.width, 1.0 * s.height / picture.height}};
        if (!pieces.empty()) {
          cv::resize(pieces[0].image, piece.image, s, 0, 0, cv::INTER_AREA);
        } else {
          const double scale = official_quirks ? 1 : std::max(piece.scale.x, piece.scale.y);
          cv::resize(data.piece(i, {{0, 0}, picture}, scale).image, piece.image, s);
          if (official_quirks) piece.scale = fit_into(picture, input, true).scale;
        }
        pieces.push_back(piece);
      }
    } catch (const ImageError&) {  // damaged since it was checked: no levels
      if (data.strict) throw;
      pieces.clear();
    }
    write_levels(pieces, out);
  };
  constexpr int kPixels = 1;  // to be raised when what is cached of a picture changes
  ContentKey key;
  const int parts[] = {kPixels, input.width, input.height, official_quirks};
  key.add(data.key), key.add(parts, sizeof parts), key.add(CV_VERSION);
  const auto cache = std::make_shared<BlobCache>(place, key.text(), bytes, fill, threads, progress);
  data.stored = [cache, bytes](size_t i, double scale) {
    return read_levels({reinterpret_cast<const char*>(cache->blob(i)), bytes[i]}, scale);
  };
  return concat(short_bytes(double(cache->bytes())), " in ", cache->path());
}

// ---- packed data sets

// An LMDB file with these keys:
//
//   yolox         "1 encoded|decoded KEY": version, what images are, what they were packed from
//
//   train, val    COCO JSON of a split; val is empty when there is one split only
//
//   train/N       image N of train, the bytes of its file or its levels; val/N too
//
//   complete      written last
inline void lmdb(int code, const std::string& path, const char* what) {
  check(
      code == MDB_SUCCESS, path, ": ", what, ": ", mdb_strerror(code),
      code == ENOSPC || code == EIO ? "; is the disk full? Make room and run ./pack again, it goes on" : "");
}
inline MDB_val lmdb_value(std::string_view text) { return {text.size(), const_cast<char*>(text.data())}; }
// What is under a key, valid until the transaction ends or writes; no data where there is nothing.
inline std::string_view lmdb_get(MDB_txn* transaction, MDB_dbi table, const std::string& key,
                                 const std::string& path) {
  MDB_val k = lmdb_value(key), value;
  const int code = mdb_get(transaction, table, &k, &value);
  if (code == MDB_NOTFOUND) return {};
  lmdb(code, path, "cannot be read");
  return {static_cast<const char*>(value.mv_data), value.mv_size};
}
// Of the file, as far as it is used.
inline size_t lmdb_bytes(MDB_env* env) {
  MDB_envinfo info;
  MDB_stat stat;
  mdb_env_info(env, &info), mdb_env_stat(env, &stat);
  return (info.me_last_pgno + 1) * stat.ms_psize;
}
inline std::string image_key(const std::string& split, size_t i) {
  char number[24];
  std::snprintf(number, sizeof number, "/%09zu", i);
  return split + number;
}

// Such a file, open for reading. What get() gives is valid as long as it is open.
class Packed {
 public:
  explicit Packed(const std::string& path) : path(path) {
    lmdb(mdb_env_create(&env), path, "cannot be opened");
    try {
      lmdb(mdb_env_open(env, path.c_str(), MDB_RDONLY | MDB_NOSUBDIR | MDB_NOLOCK, 0), path,
           "cannot be opened");
      lmdb(mdb_txn_begin(env, nullptr, MDB_RDONLY, &transaction), path, "cannot be read");
      lmdb(mdb_dbi_open(transaction, nullptr, 0, &table), path, "cannot be read");
      struct stat s {};
      check(::stat(path.c_str(), &s) == 0 && lmdb_bytes(env) <= size_t(s.st_size), path,
            " is cut off: it has ", s.st_size, " of ", lmdb_bytes(env), " bytes; copy it again");
    } catch (...) {
      close();
      throw;
    }
  }
  ~Packed() { close(); }
  Packed(const Packed&) = delete;

  std::string_view get(const std::string& key) const { return lmdb_get(transaction, table, key, path); }
  const std::string path;

 private:
  void close() {
    if (transaction) mdb_txn_abort(transaction);
    mdb_env_close(env);
  }
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

inline bool is_packed(const std::string& path) {
  return is_file(path) && fs::path(path).extension() == ".lmdb";
}

// A split of a packed data set; it keeps the file open.
inline Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split,
                              bool official_quirks) {
  Source source;
  source.name = concat(file->path, " (", split, ")");
  source.coco = parse_coco(file->get(split), source.name);
  ImageChecks checks;
  std::vector<std::string_view> images;  // read out here: an LMDB transaction belongs to one thread
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
  Dataset data = make_dataset(std::move(source), checks, official_quirks);
  if (file->get("yolox").find("decoded") != std::string_view::npos) {
    data.stored = [file, images](size_t i, double scale) { return read_levels(images[i], scale); };
    data.read = [path = file->path](size_t i) -> std::string {
      throw ImageError(concat(path, ": image ", i, " could not be decoded when it was packed"));
    };
  } else {
    data.read = [file, images](size_t i) { return std::string(images[i]); };
  }
  return data;
}

inline std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split) {
  check(split.empty() || split == "val", "--split ", split, ": a packed data set has train and val only");
  const auto file = std::make_shared<Packed>(path);
  const std::string_view head = file->get("yolox");
  check(head.substr(0, 2) == "1 ", path, " is no packed data set of this program; make one with ./pack");
  check(!file->get("complete").empty(), path,
        " was not packed to its end; run the same ./pack again, it goes on");
  return file;
}

// ---- --data

// data: what formats.hpp reads, a packed data set, or "shapes". split: the one to evaluate on; empty: val.
// keep: see check_images().
inline Splits load_splits(const std::string& data, const std::string& split, uint64_t seed,
                          bool official_quirks, const std::string& keep) {
  if (data == "shapes")
    return {shapes_dataset(seed, 0, kShapesTrain), shapes_dataset(seed, 1, kShapesVal), false};
  Splits splits;
  if (is_packed(data)) {
    const auto file = open_packed(data, split);
    splits = {packed_dataset(file, "train", official_quirks), {}, file->get("val").empty()};
    if (!splits.same) splits.val = packed_dataset(file, "val", official_quirks);
  } else {
    Sources sources = read_sources(data, split);
    splits = {load_dataset(std::move(sources.train), official_quirks, keep), {}, sources.same};
    if (!splits.same) splits.val = load_dataset(std::move(sources.val), official_quirks, keep);
  }
  if (splits.same) splits.val = splits.train;
  check(splits.train.classes == splits.val.classes, splits.train.name, " and ", splits.val.name,
        " list different classes (", splits.train.classes.size(), " and ", splits.val.classes.size(),
        "); they must be the same");
  const auto counts = class_counts(splits.train);
  if (std::accumulate(counts.begin(), counts.end(), int64_t(0)) == 0) {
    const auto problems = splits.train.problems->lines();
    fail(splits.train.name, " has no usable box; check the boxes, images and classes of its labels",
         problems.empty() ? "" : "; the first problem: " + problems[0]);
  }
  return splits;
}
inline Dataset load_val(const std::string& data, const std::string& split, uint64_t seed,
                        const std::string& keep) {
  if (data == "shapes") return shapes_dataset(seed, 1, kShapesVal);
  if (!is_packed(data)) return load_dataset(read_val_source(data, split), false, keep);
  const auto file = open_packed(data, split);
  return packed_dataset(file, file->get("val").empty() ? "train" : "val", false);
}

}  // namespace yolox
