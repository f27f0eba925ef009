// SPDX-License-Identifier: Apache-2.0
#include "data/packed.hpp"

#include <cstring>

namespace yolox {

void check_lmdb(int code, const std::string& path, const char* what) {
  check(code == MDB_SUCCESS, path, ": ", what, ": ", mdb_strerror(code),
        code == ENOSPC || code == EIO ? "; is the disk full? Free some space and run ./pack again to resume"
                                      : "");
}

std::string_view lmdb_get(MDB_txn* transaction, MDB_dbi table, const std::string& key,
                          const std::string& path) {
  MDB_val k = lmdb_value(key), value;
  const int code = mdb_get(transaction, table, &k, &value);
  if (code == MDB_NOTFOUND) return {};
  check_lmdb(code, path, "cannot be read");
  return {static_cast<const char*>(value.mv_data), value.mv_size};
}

size_t lmdb_used_bytes(MDB_env* env) {
  MDB_envinfo info;
  MDB_stat stat;
  mdb_env_info(env, &info);
  mdb_env_stat(env, &stat);
  return (info.me_last_pgno + 1) * stat.ms_psize;
}

std::string image_key(const std::string& split, size_t i) {
  char number[24];
  std::snprintf(number, sizeof number, "/%09zu", i);
  return split + number;
}

Packed::Packed(const std::string& path) : path(path) {
  check_lmdb(mdb_env_create(&env), path, "cannot be opened");
  try {
    check_lmdb(mdb_env_open(env, path.c_str(), MDB_RDONLY | MDB_NOSUBDIR | MDB_NOLOCK, 0), path,
               "cannot be opened");
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

Dataset packed_dataset(const std::shared_ptr<Packed>& file, const std::string& split) {
  Source source;
  source.name = concat(file->path, " (", split, ")");
  source.coco = parse_coco(file->get(split), source.name);
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
  if (file->get("yolox").find("decoded") != std::string_view::npos) {
    data.stored = [file, images](size_t i, double scale) { return read_pyramid_level(images[i], scale); };
    data.read = [path = file->path](size_t i) -> std::string {
      throw ImageError(concat(path, ": image ", i, " could not be decoded when it was packed"));
    };
  } else {
    data.read = [file, images](size_t i) { return std::string(images[i]); };
  }
  return data;
}

std::shared_ptr<Packed> open_packed(const std::string& path, const std::string& split) {
  check(split.empty() || split == "val", "--split ", split, ": a packed data set has train and val only");
  const auto file = std::make_shared<Packed>(path);
  const std::string_view head = file->get("yolox");
  check(head.substr(0, 2) == "1 ", path, " is not a packed data set of this program; make one with ./pack");
  check(!file->get("complete").empty(), path, " is incomplete; run the same ./pack command again to resume");
  return file;
}

}  // namespace yolox
