// SPDX-License-Identifier: Apache-2.0
// ./pack: writes a data set into one LMDB file, which is fast to copy and fast to read from slow or network
// disks. Training on the file produces the same batches as training on the data set, bit for bit.
//   ./pack --data DIR --out FILE.lmdb
#include <sys/file.h>

#include <unistd.h>
#include <cerrno>
#include <iostream>
#include <map>

#include "base/flags.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "data/cache.hpp"
#include "data/packed.hpp"
#include "formats.hpp"

using namespace yolox;

struct Config : Flags {
  std::string data =
      flag(data, "Files", "data", "", "DIR|FILE", "COCO, VOC or YOLO folder; JSON or YAML file");
  std::string split = flag(split, "Files", "split", "", "NAME", "split to evaluate on [val]");
  std::string images = flag(images, "Files", "images", "", "DIR",
                            "folder of the images of a COCO JSON file [the usual folders]");
  std::string out =
      flag(out, "Files", "out", "", "FILE.lmdb", "output file; an interrupted ./pack is continued");
  bool decoded = flag(decoded, "Files", "decoded", false, "",
                      "store decoded images: no decoding in training, about 10 times the size");
};

// LMDB file open for writing. Its memory map grows as needed.
class LmdbWriter {
 public:
  // Opens or creates the file. Throws if another ./pack writes it, or if it is not a packed data set.
  explicit LmdbWriter(const std::string& path) : path(path) {
    check_lmdb(mdb_env_create(&env), path, "cannot be created");
    check_lmdb(mdb_env_set_mapsize(env, map_size), path, "cannot be created");
    check_lmdb(mdb_env_open(env, path.c_str(), MDB_NOSUBDIR | MDB_NOLOCK, 0644), path, "cannot be created");
    mdb_filehandle_t file;  // flock(), because LMDB's lock is a second file
    check_lmdb(mdb_env_get_fd(env, &file), path, "cannot be locked");
    check(flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, path,
          " is being written by another ./pack; wait for it, or give another --out");
    begin();
    MDB_stat stat;
    check_lmdb(mdb_stat(transaction, table, &stat), path, "cannot be read");
    check(stat.ms_entries == 0 || !get("yolox").empty(), path,
          " is an LMDB file of another program; give another --out");
  }
  ~LmdbWriter() {
    if (transaction) mdb_txn_abort(transaction);
    mdb_env_close(env);
  }
  // Returns the value of `key`, valid until the next put() or commit(). Empty if the file has no such key.
  std::string_view get(const std::string& key) {
    begin();
    return lmdb_get(transaction, table, key, path);
  }
  // Writes a value. Commits every 64 values or 64 MiB.
  void put(const std::string& key, std::string_view bytes) {
    uncommitted_bytes += bytes.size() + 8192;
    if (uncommitted_bytes > map_size / 4 ||
        lmdb_used_bytes(env) + 2 * uncommitted_bytes >
            map_size) {  // for the new values, and for the pages that LMDB copies
      commit();
      while (lmdb_used_bytes(env) + 4 * (bytes.size() + 8192) + (64u << 20) > map_size) map_size *= 2;
      check_lmdb(mdb_env_set_mapsize(env, map_size), path, "cannot grow");
      uncommitted_bytes = bytes.size() + 8192;
    }
    begin();
    MDB_val k = lmdb_value(key), value = lmdb_value(bytes);
    check_lmdb(mdb_put(transaction, table, &k, &value, 0), path, "cannot be written");
    if (uncommitted_bytes > (64u << 20) || ++uncommitted_values >= 64) commit();
  }
  void commit() {
    if (transaction)
      check_lmdb(mdb_txn_commit(std::exchange(transaction, nullptr)), path, "cannot be written");
    uncommitted_bytes = 0;
    uncommitted_values = 0;
  }

 private:
  // Begins a transaction if none is open.
  void begin() {
    if (transaction) return;
    check_lmdb(mdb_txn_begin(env, nullptr, 0, &transaction), path, "cannot be written");
    check_lmdb(mdb_dbi_open(transaction, nullptr, 0, &table), path, "cannot be written");
  }
  const std::string path;
  size_t map_size = size_t(1) << 30,
         uncommitted_bytes = 0;  // bytes: size of the memory map; of uncommitted values
  int uncommitted_values = 0;    // number of uncommitted values
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

// Returns an image, decoded, and its reductions by 2, 4, 8, ... as bytes (PyramidHeader in data/cache.hpp).
// If the image cannot be decoded, there are no levels, and the image is added to the problems of the data
// set.
static std::string decoded_image(const Dataset& data, size_t i) {
  const cv::Size size = data.size(i);
  std::vector<ImageRegion> pieces;
  std::vector<cv::Size> sizes;
  try {
    for (double scale = 1; pieces.size() < size_t(PyramidHeader::kMaxLevels); scale /= 2) {
      pieces.push_back(data.image_region(i, {{0, 0}, size}, scale));
      sizes.push_back(pieces.back().image.size());
      if (sizes.back().area() == 1) break;
    }
  } catch (const ImageError& e) {
    data.problems->add("image cannot be used", e.what());
    pieces.clear();
    sizes.clear();
  }
  std::string bytes(pyramid_bytes(sizes), '\0');
  write_pyramid(pieces, reinterpret_cast<unsigned char*>(bytes.data()));
  return bytes;
}

static void pack(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "packs a data set into one LMDB file", "--data DIR --out FILE.lmdb");
  combination_check(!config.data.empty(),
                    "--data is needed: a folder, or a COCO JSON or YOLO data.yaml file");
  usage_check(config.data != "shapes" && !is_packed(config.data), "--data ", config.data,
              " needs no packing; train on it directly");
  usage_check(fs::path(config.out).extension() == ".lmdb", "--out must end in .lmdb, got '", config.out, "'");
  check(!fs::is_directory(config.out), "--out ", config.out, " is a folder");
  opencv_single_thread();
  const Splits splits = load_splits(config.data, config.split, 0, "", config.images);

  const std::pair<std::string, const Dataset*> parts[] = {{"train", &splits.train}, {"val", &splits.val}};
  std::map<std::string, std::string> labels;
  ContentKey key;  // of images and labels
  for (const auto& [name, data] : parts) {
    labels[name] = splits.same && name == "val" ? "" : coco_text(data->truth);
    key.add(data->key);
    key.add(labels[name]);
  }
  const std::string head = concat("1 ", config.decoded ? "decoded " : "encoded ", key.text());
  LmdbWriter file(config.out);
  const std::string found(file.get("yolox"));
  check(found.empty() || found == head, config.out,
        " holds other images or labels, or was packed with another setting of --decoded; ",
        "delete it or give another --out");
  if (!file.get("complete").empty()) {
    std::cout << printable(config.out) << " is complete\n";
    return;
  }
  file.put("yolox", head);
  size_t done = 0, already_packed = 0;
  const size_t all = splits.train.records.size() + (splits.same ? 0 : splits.val.records.size());
  for (const auto& [name, data] : parts) {
    file.put(name, labels[name]);
    if (splits.same && name == "val") break;
    const size_t chunk = config.decoded ? 8 : 64;  // images in memory
    for (size_t from = 0; from < data->records.size(); from += chunk) {
      std::vector<std::string> images(std::min(chunk, data->records.size() - from));
      std::vector<char> missing(images.size());
      for (size_t k = 0; k < images.size(); ++k) missing[k] = file.get(image_key(name, from + k)).empty();
      parallel_for(int64_t(images.size()), [&, data = data](int64_t k) {
        if (missing[k]) images[k] = config.decoded ? decoded_image(*data, from + k) : data->bytes(from + k);
      });
      for (size_t k = 0; k < images.size(); ++k) {
        if (missing[k]) file.put(image_key(name, from + k), images[k]);
        already_packed += !missing[k];
      }
      done += images.size();
      if (isatty(1)) std::cout << "\r" << done << "/" << all << std::flush;
    }
  }
  file.put("complete", "yes");
  file.commit();
  std::cout << (isatty(1) ? "\r" : "") << printable(config.out) << ": " << all << " images";
  if (already_packed) std::cout << ", " << already_packed << " of them were already packed";
  std::cout << ", " << short_bytes(double(fs::file_size(config.out))) << "\n";
  for (const auto& [name, data] : parts) {
    if (splits.same && name == "val") break;
    const std::string list = concat(config.out, ".", name, ".problems.txt");
    for (const auto& [kind, count] : data->problems->summary())
      std::cout << printable(concat("note: ", data->name, ": ", kind, ": ", count, " (listed in ", list, ")"))
                << "\n";
    data->problems->write(list);
  }
}

int main(int argc, char** argv) {
  return run_program([&] {
    pack(argc, argv);
    check_stdout();
  });
}
