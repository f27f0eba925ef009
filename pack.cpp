// SPDX-License-Identifier: Apache-2.0
// ./pack: writes a data set into one LMDB file, which is fast to copy and fast to read from slow or network
// disks. Training on the file produces the same batches as training on the data set, bit for bit.
//   ./pack --data DIR --out FILE.lmdb
#include <algorithm>
#include <iostream>
#include <map>
#include <vector>

#include "base/flags.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"
#include "data/store.hpp"
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
  const Splits splits = load_splits({config.data, config.split, config.val_fraction, config.images});
  std::map<std::string, const Dataset*> parts{{"train", &splits.train}};
  if (!splits.same) parts["val"] = &splits.val;

  std::map<std::string, std::string> labels;
  std::string keys;
  const bool tty = can_rewrite_lines();
  size_t room = 0, images = 0, done = 0, packed_before = 0;
  for (const auto& [name, data] : parts) {
    labels[name] = coco_text(data->truth);
    keys += data->key + labels[name];
    images += data->records.size();
    room += 2 * labels[name].size();
    for (const Record& r : data->records) room += fs::file_size(r.file) + 8192;  // and pages of LMDB
  }
  const std::string head = "1 encoded " + content_key(keys);
  PackedFile file(config.out, room);
  const std::string found(file.get("yolox"));
  check(found.empty() || found == head, config.out,
        " holds other images or labels; delete it or give another --out");
  if (!file.get("complete").empty()) {
    std::cout << printable(config.out) << " is complete\n";
    return;
  }
  file.put("yolox", head);
  for (const auto& [name, data] : parts) {
    file.put(name, labels[name]);
    for (size_t first = 0; first < data->records.size(); first += 64) {
      std::vector<std::string> some(std::min<size_t>(64, data->records.size() - first));
      done += some.size();
      if (!file.get(image_key(name, first)).empty()) {  // those of a commit are there together
        packed_before += some.size();
        continue;
      }
      parallel_for(int64_t(some.size()), [&, data = data](int64_t k) { some[k] = data->bytes(first + k); });
      for (size_t k = 0; k < some.size(); ++k) file.put(image_key(name, first + k), some[k]);
      file.commit();
      if (tty) std::cout << "\r" << done << "/" << images << std::flush;
    }
  }
  file.put("complete", "yes");
  file.commit();
  std::cout << (tty ? "\r" : "") << printable(config.out) << ": " << images << " images";
  if (packed_before) std::cout << ", " << packed_before << " of them were already packed";
  std::cout << ", " << short_bytes(double(fs::file_size(config.out))) << "\n";
  for (const auto& [name, data] : parts) {
    const std::string list = concat(config.out, ".", name, ".problems.txt");
    for (const std::string& note : data->notes) std::cout << printable(note) << "\n";
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
