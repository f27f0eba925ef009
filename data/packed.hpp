// SPDX-License-Identifier: Apache-2.0
// Packed data sets: a data set in one LMDB file, written by ./pack (tools/pack.cpp).
#pragma once
#include <lmdb.h>

#include <memory>
#include <string>
#include <string_view>

#include "data/dataset.hpp"

namespace yolox {

// Format of a packed data set: an LMDB file with these keys.
//
//   yolox         "1 encoded|decoded KEY": version, form of the images, hash of the data set that was packed
//
//   train, val    COCO JSON of a split; val is empty if the data set has one split only
//
//   train/N       image N of train: the bytes of its file, or an image pyramid (PyramidHeader); val/N in the
//   same way
//
//   complete      written last

// Throws if `code`, the result of an LMDB function, is an error. what: text of the message, "cannot be read".
void check_lmdb(int code, const std::string& path, const char* what);
inline MDB_val lmdb_value(std::string_view text) { return {text.size(), const_cast<char*>(text.data())}; }
// Returns the value of a key, or an empty view if the key does not exist. The view is valid until the
// transaction ends or writes.
std::string_view lmdb_get(MDB_txn* transaction, MDB_dbi table, const std::string& key,
                          const std::string& path);
// Returns the number of bytes of the file that contain data.
size_t lmdb_used_bytes(MDB_env* env);
// Returns the key of image i: "train/000000012".
std::string image_key(const std::string& split, size_t i);

// A packed data set, open for reading. The views that get() returns are valid during its lifetime. get() may
// be called from one thread only, because an LMDB transaction belongs to one thread.
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

// Returns a split of a packed data set. The data set keeps the file open.
Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split);

// Opens a packed data set. split: the value of --split. Throws if `path` is not a complete packed data set,
// or if `split` is neither empty nor val.
std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split);

}  // namespace yolox
