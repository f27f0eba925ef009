// Packs a data set into one LMDB file: quick to copy, quick to read from slow or network disks. Training from
// it makes the same batches, bit for bit.
//   ./pack --data DIR --out FILE.lmdb
#include <iostream>

#include "flags.hpp"
#include "stored.hpp"

using namespace yolox;

struct Config : Flags {
  std::string data =
      flag(data, "What", "data", "", "DIR|FILE", "COCO, VOC or YOLO folder, a JSON or YAML file");
  std::string split =
      flag(split, "What", "split", "", "NAME", "split to evaluate on, such as test; val when left out");
  std::string out =
      flag(out, "What", "out", "", "FILE.lmdb", "file to write; one that was cut off is continued");
  bool decoded = flag(decoded, "What", "decoded", false, "",
                      "store pixels instead of files: no decoding in training, about ten times the size");
};

// An LMDB file open for writing, which grows as it needs.
class Packing {
 public:
  explicit Packing(const std::string& path) : path(path) {
    lmdb(mdb_env_create(&env), path, "cannot be made");
    lmdb(mdb_env_set_mapsize(env, room), path, "cannot be made");
    lmdb(mdb_env_open(env, path.c_str(), MDB_NOSUBDIR | MDB_NOLOCK, 0644), path, "cannot be made");
  }
  ~Packing() {
    if (transaction) mdb_txn_abort(transaction);
    mdb_env_close(env);
  }
  std::string_view get(const std::string& key) {
    begin();
    return lmdb_get(transaction, table, key, path);
  }
  void put(const std::string& key, std::string_view bytes) {
    pending += bytes.size() + 8192;
    if (pending > room / 4 ||
        used() + 2 * pending > room) {  // room for what is coming, and for LMDB's copies
      commit();
      while (used() + 4 * (bytes.size() + 8192) + (64u << 20) > room) room *= 2;
      lmdb(mdb_env_set_mapsize(env, room), path, "cannot grow");
      pending = bytes.size() + 8192;
    }
    begin();
    MDB_val k = lmdb_value(key), value = lmdb_value(bytes);
    lmdb(mdb_put(transaction, table, &k, &value, 0), path, "cannot be written");
    if (pending > (64u << 20)) commit();
  }
  void commit() {
    if (transaction) lmdb(mdb_txn_commit(std::exchange(transaction, nullptr)), path, "cannot be written");
    pending = 0;
  }

 private:
  void begin() {
    if (transaction) return;
    lmdb(mdb_txn_begin(env, nullptr, 0, &transaction), path, "cannot be written");
    lmdb(mdb_dbi_open(transaction, nullptr, 0, &table), path, "cannot be written");
  }
  size_t used() const {
    MDB_envinfo info;
    MDB_stat stat;
    mdb_env_info(env, &info), mdb_env_stat(env, &stat);
    return (info.me_last_pgno + 1) * stat.ms_psize;
  }
  const std::string path;
  size_t room = size_t(1) << 30, pending = 0;
  MDB_env* env = nullptr;
  MDB_txn* transaction = nullptr;
  MDB_dbi table = 0;
};

// The levels of a picture that decode_piece() can be asked for.
static std::string decoded_image(const Dataset& data, size_t i) {
  const cv::Size size = data.size(i);
  std::vector<Piece> pieces;
  std::vector<cv::Size> sizes;
  for (double scale = 1; pieces.size() < size_t(Levels::kMost); scale /= 2) {
    pieces.push_back(data.piece(i, {{0, 0}, size}, scale));
    sizes.push_back(pieces.back().image.size());
    if (sizes.back().area() == 1) break;
  }
  std::string bytes(levels_bytes(sizes), '\0');
  write_levels(pieces, reinterpret_cast<unsigned char*>(bytes.data()));
  return bytes;
}

static void pack(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "packs a data set into one LMDB file");
  usage_check(!config.data.empty(), "--data is needed: a folder, or a COCO JSON or YOLO data.yaml file");
  usage_check(config.data != "shapes" && !is_packed(config.data), "--data ", config.data,
              " needs no packing");
  usage_check(fs::path(config.out).extension() == ".lmdb", "--out must end in .lmdb, got '", config.out, "'");
  check(!fs::is_directory(config.out), "--out ", config.out, " is a folder");
  opencv_single_thread();
  const Splits splits = load_splits(config.data, config.split, 0, /*official_quirks=*/false, "");

  const std::string head =
      concat("1 ", config.decoded ? "decoded " : "encoded ", splits.train.key, splits.val.key);
  Packing file(config.out);
  const std::string found(file.get("yolox"));
  check(found.empty() || found == head, config.out,
        " holds another data set, or the same one packed in another way; ",
        "delete it or give another --out");
  if (!file.get("complete").empty()) {
    std::cout << config.out << " is complete\n";
    return;
  }
  file.put("yolox", head);
  size_t done = 0, there = 0;
  const size_t all = splits.train.records.size() + (splits.same ? 0 : splits.val.records.size());
  for (const auto& [split, data] : {std::pair("train", &splits.train), std::pair("val", &splits.val)}) {
    const bool left_out = splits.same && data == &splits.val;
    file.put(split, left_out ? "" : coco_text(data->truth));
    for (const auto& [kind, count] : data->problems->summary())
      if (!left_out) std::cout << "note: " << data->name << ": " << kind << ": " << count << "\n";
    constexpr size_t kTogether = 64;
    for (size_t from = 0; from < data->records.size() && !left_out; from += kTogether) {
      std::vector<std::string> images(std::min(kTogether, data->records.size() - from));
      std::vector<char> wanted(images.size());
      for (size_t k = 0; k < images.size(); ++k) wanted[k] = file.get(image_key(split, from + k)).empty();
      in_threads(int64_t(images.size()), [&, data = data](int64_t k) {
        if (wanted[k]) images[k] = config.decoded ? decoded_image(*data, from + k) : data->bytes(from + k);
      });
      for (size_t k = 0; k < images.size(); ++k) {
        if (wanted[k]) file.put(image_key(split, from + k), images[k]);
        there += !wanted[k];
      }
      done += images.size();
      if (isatty(1)) std::cout << "\r" << done << "/" << all << std::flush;
    }
  }
  file.put("complete", "yes");
  file.commit();
  std::cout << (isatty(1) ? "\r" : "") << config.out << ": " << all << " images";
  if (there) std::cout << ", " << there << " of them were there";
  std::cout << ", " << short_bytes(double(fs::file_size(config.out))) << "\n";
}

int main(int argc, char** argv) {
  return run_program([&] { pack(argc, argv); });
}
