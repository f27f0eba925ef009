// SPDX-License-Identifier: Apache-2.0
// ./pack: writes a data set into one LMDB file, which is fast to copy and fast to read from slow or network
// disks. Training on the file produces the same batches as training on the data set, bit for bit.
//   ./pack --data DIR --out FILE.lmdb
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <map>

#include "base/flags.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "data/packed.hpp"
#include "formats.hpp"

using namespace yolox;

struct Config : Flags {
  std::string data =
      flag(data, "Files", "data", "", "DIR|FILE", "COCO, VOC or YOLO folder; JSON or YAML file");
  std::string split = flag(split, "Files", "split", "", "NAME", "split to evaluate on [val]");
  std::string images = flag(images, "Files", "images", "", "DIR",
                            "folder of the images of a COCO JSON file [the usual folders]");
  double val_fraction =
      flag(val_fraction, "Files", "val-fraction", 0.0, "X",
           "data with one split: hold out this fraction of its images for evaluation", between(0, 0.9));
  std::string out =
      flag(out, "Files", "out", "", "FILE.lmdb", "output file; an interrupted ./pack is continued");
};

// Locks the output file until this program ends. Creates the file if needed.
static void lock_output(const std::string& path) {
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  check(file >= 0, path, ": cannot be created: ", std::strerror(errno));
  check(flock(file, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK, path,
        " is being written by another ./pack; wait for it, or give another --out");
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
  config.check_values();
  const Splits splits = load_splits(config.data, config.split, 0, "", config.images, config.val_fraction);

  const std::pair<std::string, const Dataset*> parts[] = {{"train", &splits.train}, {"val", &splits.val}};
  std::map<std::string, std::string> labels;
  ContentKey key;  // of images and labels
  for (const auto& [name, data] : parts) {
    labels[name] = splits.same && name == "val" ? "" : coco_text(data->truth);
    key.add(data->key);
    key.add(labels[name]);
  }
  const std::string head = "1 encoded " + key.text();
  lock_output(config.out);
  PackedWriter file(config.out, "; is the disk full? Free some space and run ./pack again to resume");
  const std::string found(file.get("yolox"));
  check(found.empty() || found == head, config.out,
        " holds other images or labels; delete it or give another --out");
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
    already_packed += file.put_images(
        name, data->records.size(), 64, 0, [data = data](size_t i) { return data->bytes(i); },
        [&](size_t n) {
          if (isatty(1)) std::cout << "\r" << done + n << "/" << all << std::flush;
        });
    done += data->records.size();
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
