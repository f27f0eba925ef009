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

// ---- --cache

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
void lmdb(int code, const std::string& path, const char* what);
inline MDB_val lmdb_value(std::string_view text) { return {text.size(), const_cast<char*>(text.data())}; }
// What is under a key, valid until the transaction ends or writes; no data where there is nothing.
std::string_view lmdb_get(MDB_txn* transaction, MDB_dbi table, const std::string& key,
                          const std::string& path);
// Of the file, as far as it is used.
size_t lmdb_bytes(MDB_env* env);
std::string image_key(const std::string& split, size_t i);

// Such a file, open for reading. What get() gives is valid as long as it is open.
class Packed {
 public:
  explicit Packed(const std::string& path);
  ~Packed() { close(); }
  Packed(const Packed&) = delete;

  std::string_view get(const std::string& key) const { return lmdb_get(transaction, table, key, path); }
  const std::string path;

 private:
  void close();
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

inline bool is_packed(const std::string& path) {
  return is_file(path) && fs::path(path).extension() == ".lmdb";
}

// A split of a packed data set; it keeps the file open.
Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split, bool official_quirks);

std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split);

}  // namespace yolox
