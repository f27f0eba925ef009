// SPDX-License-Identifier: Apache-2.0
// ./check: reads a data set as ./train does, and prints its classes, its problems, images that it has twice,
// and boxes of two classes on the same object. Exit code 1 if it has problems, or images in both splits.
//   ./check --data DIR
#include <iomanip>
#include <iostream>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/program.hpp"
#include "formats.hpp"
#include "tools/doubles.hpp"

using namespace yolox;

struct Config : Flags {
  std::string data = flag(data, "Data", "data", "", "DIR|FILE",
                          "COCO, VOC or YOLO folder; JSON, YAML or .lmdb file, as for ./train");
  std::string split = flag(split, "Data", "split", "", "NAME", "split to compare with train [val]");
  std::string images = flag(images, "Data", "images", "", "DIR",
                            "folder of the images of a COCO JSON file [the usual folders]");
  double val_fraction = flag(val_fraction, "Data", "val-fraction", 0.0, "X",
                             "hold out a fraction for evaluation; 0 = off", between(0, 0.9));
  std::string json = flag(json, "Output", "json", "", "FILE", "write everything that was found");
};

// What was found, as lists of lines with a heading each.
struct Findings {
  struct List {
    std::string key, heading;
    std::vector<std::string> lines;
  };
  std::vector<List> lists;

  // Adds a list, and prints its heading and its first lines.
  void add(const std::string& key, const std::string& heading, const std::vector<std::string>& lines) {
    constexpr size_t kShown = 10;
    lists.push_back({key, heading, lines});
    if (lines.empty()) return;
    std::cout << "\n" << heading << ": " << lines.size() << "\n";
    for (size_t i = 0; i < std::min(lines.size(), kShown); ++i)
      std::cout << "  " << printable(lines[i]) << "\n";
    if (lines.size() > kShown)
      std::cout << "  and " << lines.size() - kShown << " more; --json FILE lists all\n";
  }
};

// Prints the images and boxes of each class and split.
static void print_classes(const Splits& splits) {
  const auto row = [&](const std::string& name, int64_t train, int64_t val) {
    const std::string shown = cut_text(name, 29);
    std::cout << shown << std::string(30 - count_characters(shown), ' ') << std::setw(10) << train;
    if (!splits.same) std::cout << std::setw(10) << val;
    std::cout << "\n";
  };
  std::cout << std::setw(40) << "train" << (splits.same ? "" : "       val") << "\n";
  const auto train = class_counts(splits.train), val = class_counts(splits.val);
  const auto empty = [](const Dataset& data) {
    return std::ranges::count_if(data.records, [](const Record& r) { return r.boxes.empty(); });
  };
  row("images", int64_t(splits.train.records.size()), int64_t(splits.val.records.size()));
  row("images without boxes", empty(splits.train), empty(splits.val));
  for (const size_t c : classes_by_count(train)) row(splits.train.classes[c], train[c], val[c]);
}

// Compares the images of both splits. Returns true if some are in both.
static bool compare_images(const Splits& splits, Findings& findings) {
  std::vector<Fingerprint> images = fingerprints(splits.train);
  const size_t of_train = images.size();
  if (!splits.same) {
    const auto of_val = fingerprints(splits.val);
    images.insert(images.end(), of_val.begin(), of_val.end());
  }
  const auto name = [&](size_t i) {
    return i < of_train ? splits.train.name_of(int64_t(i)) : splits.val.name_of(int64_t(i - of_train));
  };
  std::vector<std::string> within, across, alike, alike_across;
  const auto list = [&](const std::vector<Pair>& pairs, auto& in_one, auto& in_both) {
    for (const auto& [a, b] : pairs)
      (a < of_train && b >= of_train ? in_both : in_one).push_back(name(a) + " and " + name(b));
  };
  list(equal_images(images), within, across);
  list(similar_images(images), alike, alike_across);
  findings.add("equal_across_splits", "images for evaluation that equal a training image (AP is too high)",
               across);
  findings.add("similar_across_splits",
               "images for evaluation that look like a training image (AP may be too high)", alike_across);
  findings.add("equal", "images that equal another one of their split", within);
  findings.add("similar", "images that look like another one of their split", alike);
  return !across.empty();
}

// Returns the exit code.
static int check_data(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "checks a data set", "--data DIR");
  combination_check(!config.data.empty(),
                    "--data is needed: a folder, or a COCO JSON or YOLO data.yaml file");
  config.check_values();
  std::vector<std::string> inputs = split_list(config.data);
  inputs.push_back(config.data);
  protect_inputs("--json", config.json, inputs);
  const Splits splits = load_splits(config.data, config.split, 0, "", config.images, config.val_fraction);
  std::vector<const Dataset*> parts = {&splits.train};
  if (!splits.same) parts.push_back(&splits.val);
  print_classes(splits);
  for (const Dataset* data : parts)
    for (const std::string& note : data->notes) std::cout << printable(note) << "\n";

  Findings findings;
  const bool in_both = compare_images(splits, findings);
  size_t problems = 0;
  for (const Dataset* data : parts) {
    std::vector<std::string> overlaps;
    for (const ClassOverlap& o : class_overlaps(*data))
      overlaps.push_back(concat(data->classes[o.first], " and ", data->classes[o.second], ": ", o.boxes,
                                " times, such as in ", data->name_of(int64_t(o.image))));
    const std::string split = data == &splits.train ? "train" : "val";
    findings.add(split + "_class_overlaps", "pairs of classes with boxes on the same object (" + split + ")",
                 overlaps);
    const auto lines = data->problems->lines();
    problems += lines.size();
    findings.add(split + "_problems", "problems (" + split + ")", lines);
  }
  if (!config.json.empty())
    write_json(config.json, [&](JsonWriter& writer) {
      writer.StartObject();
      for (const auto& [name, data] : {std::pair("train", &splits.train), {"val", &splits.val}}) {
        writer.Key(name);
        writer.StartObject();
        write_field(writer, "images", int64_t(data->records.size()));
        const auto counts = class_counts(*data);
        writer.Key("boxes");
        writer.StartObject();
        for (size_t c = 0; c < counts.size(); ++c) write_field(writer, data->classes[c].c_str(), counts[c]);
        writer.EndObject();
        writer.EndObject();
      }
      for (const auto& list : findings.lists) {
        writer.Key(list.key.c_str());
        writer.StartArray();
        for (const std::string& line : list.lines) writer.String(as_utf8(line).c_str());
        writer.EndArray();
      }
      writer.EndObject();
    });
  std::string result = "found no problems of files or labels";
  if (problems > 0 || in_both)
    result = concat("found problems: ", problems, in_both ? ", and images in both splits" : "");
  std::cout << "\n" << result << "\n";
  if (splits.same)
    std::cout << "note: the data set has one split, so that ./train measures AP on the training images; "
                 "--val-fraction 0.1 holds out a tenth\n";
  return problems > 0 || in_both;
}

int main(int argc, char** argv) {
  int code = 0;
  const int failed = run_program([&] {
    code = check_data(argc, argv);
    check_stdout();
  });
  return failed ? failed : code;
}
