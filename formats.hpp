// SPDX-License-Identifier: Apache-2.0
// Finds and reads data sets: COCO JSON, Pascal VOC XML and YOLO txt in the folder layouts of common tools,
// packed data sets, and `shapes`.
#pragma once
#include <filesystem>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/text.hpp"
#include "data/dataset.hpp"
#include "data/source.hpp"
#include "data/store.hpp"

namespace yolox {

namespace fs = std::filesystem;

// A data set and its evaluated split, as the flags of the programs name them.
struct DataOptions {
  std::string data;         // folder, COCO JSON file, TRAIN.json,VAL.json, data.yaml, packed file, or shapes
  std::string split = {};   // the evaluated split; empty: val, or test if there is no val
  double val_fraction = 0;  // if the data set has one split: hold_out() this fraction of it; 0: off
  std::string images = {};  // folder of the images of COCO JSON files; empty: the usual folders
  uint64_t seed = 0;        // of `shapes`
  std::string keep = {};    // folder of stored results, see check_images(); empty: none
};

// Throws UsageError if the folder of the images is given.
inline void refuse_images(const DataOptions& o) {
  usage_check(o.images.empty(), "--images is for a COCO JSON file, not for --data ", o.data);
}

// Detects the format of a data set of files and returns a reader per split. Throws std::runtime_error that
// lists the expected files, and UsageError if o.images is given for anything but COCO JSON files.
inline SplitReaders find_splits(const DataOptions& o) {
  const std::string &data = o.data, &images = o.images;
  fs::path path(data);
  if (!path.has_filename()) path = path.parent_path();  // "DIR/"
  const size_t comma = is_folder(path) || is_file(path) ? std::string::npos : data.find(',');
  SplitReaders splits;
  if (comma != std::string::npos) {
    for (const auto& [split, file] :
         {std::pair("train", data.substr(0, comma)), {"val", data.substr(comma + 1)}}) {
      check(is_file(file), "--data ", data, ": ", file,
            " is no file; give TRAIN.json,VAL.json, or merge data sets with tools/merge_coco.py");
      splits[split] = [file = file, images] { return read_coco_source(file, images); };
    }
    return splits;
  }
  const bool is_json = is_file(path) && !has_extension(path, {".yaml", ".yml", ".data"});
  if (is_json) return {{split_name(path.stem().string()), [=] { return read_coco_source(data, images); }}};
  refuse_images(o);
  if (is_file(path)) return yolo_file_splits(data);
  check(is_folder(path), "--data ", data, " ", why_missing(data),
        "; give a folder (COCO, Pascal VOC or YOLO), a COCO JSON file, a data.yaml, or shapes");
  // A new format goes before yolo_folder_splits, which throws if a folder only lacks class names.
  using FindSplits = SplitReaders (*)(const fs::path& folder);
  for (const FindSplits find : {data_yaml_splits, coco_splits, voc_splits, yolo_splits, yolo_folder_splits})
    if (splits = find(path); !splits.empty()) return splits;
  if (const auto only = listing(path); only.size() == 1 && is_folder(only[0])) {
    DataOptions below = o;  // archives often hold the data set in a folder
    below.data = only[0].string();
    return find_splits(below);
  }
  std::vector<std::string> entries, notes, files = files_under(path, notes);
  std::erase_if(files, [](const std::string& file) { return has_extension(file, kImages); });
  for (size_t i = 0; i < std::min<size_t>(files.size(), 1000); ++i)
    if (const std::string other = other_format(files[i]); !other.empty())
      fail("--data ", data, ": ", files[i], " is ", other);
  for (const auto& entry : listing(path)) entries.push_back(entry.filename().string());
  fail("--data ", data,
       " is no data set: looked for COCO (annotations/*.json, *.json, train/*.json), Pascal VOC "
       "(Annotations/*.xml with images, train/*.xml, *.xml beside the images) and YOLO (data.yaml, "
       "classes.txt, obj.data), found ",
       entries.empty() ? "an empty folder" : listed(entries));
}

// Reads the labels of the train split and of the evaluated split of a data set of files. with_train false:
// the train split is read only if it is also the evaluated split. Throws std::runtime_error that names the
// file, or lists the expected files.
inline Sources read_sources(const DataOptions& o, bool with_train = true) {
  const SplitReaders splits = find_splits(o);
  const auto first = [&](const std::string& word, const std::string& other) {
    return splits.count(word) ? word : splits.count(other) ? other : "";
  };
  std::string train = first("train", "trainval"), val = o.split, names;
  if (val == "valid" || val == "validation") val = "val";
  for (const auto& entry : splits) names += (names.empty() ? "" : ", ") + entry.first;
  check(val.empty() || splits.count(val), "--data ", o.data, ": no split \"", val, "\"; it has ", names);
  // trainval contains val, so that the held-out split is test.
  if (val.empty()) val = train == "trainval" ? first("test", "val") : first("val", "test");
  for (const auto& entry : splits)
    check(train.empty() || !val.empty() || entry.first.starts_with("train"), "--data ", o.data,
          " has the splits ", names,
          ", and none of them is called val or test; give --split NAME, or one file");
  if (train.empty() && val.empty() && splits.size() == 1) train = splits.begin()->first;
  if (train.empty() && (!with_train || !o.split.empty() || splits.size() == 1)) train = val;
  if (val.empty()) val = train;
  check(!train.empty(), "--data ", o.data, " has the splits ", names, ", and none of them is called ",
        with_train ? "train; give --data TRAIN.json,VAL.json" : "val or test; give --split NAME");
  Sources sources;
  sources.same = train == val;
  sources.val = splits.at(val)();
  if (with_train && sources.same && std::ranges::count(kSplits, val) && !val.starts_with("train"))
    sources.val.notes.push_back(
        concat("warning: ", o.data, " has the split ", val, " only: training uses it"));
  if (with_train || sources.same || o.val_fraction > 0)
    sources.train = sources.same ? sources.val : splits.at(train)();
  if (!sources.same && !sources.train.files.empty()) compare_splits(sources);
  if (o.val_fraction > 0) {
    usage_check(sources.same, "--val-fraction is for data with one split, but --data ", o.data,
                " has several");
    sources.val = hold_out(sources.train, o.val_fraction);
    sources.same = false;
  }
  return sources;
}

// Loads the train split and the evaluated split, which gets the classes of the train split. Throws
// std::runtime_error if the splits have no class in common or the train split has no usable box.
// with_train false, for ./eval: loads the evaluated split alone, with its own classes. model_classes: then
// the number of classes of the model, 0 if unknown, because a model may have learned the category that
// drop_parent_category() drops.
inline Splits load_splits(const DataOptions& o, bool with_train = true, size_t model_classes = 0) {
  Splits splits;
  Dataset &train = splits.train, &val = splits.val;
  const bool packed = is_packed(o.data);
  if (o.data == "shapes" || packed) {
    refuse_images(o);
    usage_check(o.split.empty() || o.split == "val", "--split ", o.split, ": of --data ", o.data,
                " only val can be evaluated; leave --split out");
    usage_check(o.val_fraction == 0, "--val-fraction is for COCO, VOC and YOLO files, not for --data ",
                o.data, packed ? "; give it to ./pack" : "");
  }
  if (o.data == "shapes") {
    if (with_train) train = shapes_dataset(o.seed, 0, kShapesTrain);
    val = shapes_dataset(o.seed, 1, kShapesVal);
  } else if (packed) {
    const auto file = std::make_shared<PackedFile>(o.data);
    splits.same = file->get("val").empty();
    if (with_train && !splits.same) train = packed_dataset(file, "train");
    val = packed_dataset(file, splits.same ? "train" : "val");
  } else {
    Sources sources = read_sources(o, with_train);
    splits.same = sources.same;
    if (with_train)
      drop_parent_category({&sources.train, &sources.val});
    else if (sources.val.coco.categories.size() != model_classes)
      drop_parent_category({&sources.val});
    if (with_train && !splits.same) train = load_dataset(std::move(sources.train), o.keep);
    val = load_dataset(std::move(sources.val), o.keep);
    check_deep_range({&val, &train});
  }
  if (!with_train) {
    if (splits.same)
      val.notes.push_back(
          "warning: these are the images that ./train would train on, and AP may be too high for others; "
          "if it held some out, give its --val-fraction here");
    return splits;
  }
  if (splits.same) {
    train = val;
    val.name += concat(" (warning: the training images; ", packed ? "./pack " : "",
                       "--val-fraction 0.1 holds out a tenth for evaluation)");
  }
  use_classes(val, train.classes);
  const auto counts = class_counts(train);
  if (std::accumulate(counts.begin(), counts.end(), int64_t(0)) == 0) {
    size_t regions = 0;
    for (const Record& r : train.records) regions += r.ignored.size();
    check(regions == 0, train.name, ": all ", regions,
          " boxes are crowds (iscrowd 1) or difficult objects, which "
          "training ignores; set iscrowd, or difficult, to 0 for single objects");
    const auto problems = train.problems->lines();
    fail(train.name, " has no usable box; check the boxes, images and classes of its labels",
         problems.empty() ? "" : "; the first problem: " + problems[0]);
  }
  return splits;
}

}  // namespace yolox
