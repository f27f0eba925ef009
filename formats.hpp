// SPDX-License-Identifier: Apache-2.0
// Finds and reads data sets: COCO JSON, Pascal VOC XML and YOLO txt, in the folder layouts of common tools.
// Images are not opened here.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/flags.hpp"
#include "base/threads.hpp"
#include "data/coco_json.hpp"
#include "data/dataset.hpp"
#include "data/source.hpp"
#include "data/store.hpp"

namespace yolox {

namespace fs = std::filesystem;

// Throws UsageError if --images is given, or --val-fraction if not 0.
inline void refuse_images(const std::string& images, const std::string& data, double val_fraction = 0) {
  usage_check(images.empty(), "--images is for a COCO JSON file, not for --data ", data);
  usage_check(val_fraction == 0, "--val-fraction is for COCO, VOC and YOLO files, not for --data ", data,
              is_packed(data) ? "; give it to ./pack" : "");
}

// Detects the format of a data set and returns a reader per split. images: folder of the images of COCO JSON
// files; empty: the usual folders are searched. Throws std::runtime_error that lists the expected files, and
// UsageError if `images` is given for another format.
inline SplitReaders find_splits(const std::string& data, const std::string& images = "") {
  fs::path path(data);
  if (!path.has_filename()) path = path.parent_path();  // "DIR/"
  if (const size_t comma = data.find(','); comma != std::string::npos && !is_folder(path) && !is_file(path)) {
    SplitReaders splits;
    for (const auto& [split, file] :
         {std::pair("train", data.substr(0, comma)), {"val", data.substr(comma + 1)}}) {
      check(is_file(file), "--data ", data, ": ", file, " is no file; give TRAIN.json,VAL.json");
      splits[split] = [file = file, images] { return read_coco_source(file, images); };
    }
    return splits;
  }
  if (is_file(path)) {
    if (!has_extension(path, {".json"})) refuse_images(images, data);
    if (has_extension(path, {".yaml", ".yml"})) return yolo_splits(read_data_yaml(data));
    return {{split_name(path.stem().string()), [data, images] { return read_coco_source(data, images); }}};
  }
  refuse_images(images, data);
  check(
      is_folder(path), "--data ", data,
      " does not exist; give a folder (COCO, Pascal VOC or YOLO), a COCO JSON file, a data.yaml, or shapes");
  if (const std::string yaml = find_data_yaml(path.string(), /*both=*/true); !yaml.empty())
    return yolo_splits(read_data_yaml(yaml));
  if (const SplitReaders coco = coco_splits(path); !coco.empty()) return coco;
  if (const SplitReaders voc = voc_splits(path); !voc.empty()) return voc;
  if (const fs::path darknet = path / "obj.data"; is_file(darknet))
    return yolo_splits(read_obj_data(darknet.string()));
  if (const std::string yaml = find_data_yaml(path.string()); !yaml.empty())
    return yolo_splits(read_data_yaml(yaml));
  std::vector<std::string> nested, entries;
  for (const fs::path& parent : {path, path / "VOCdevkit"})
    for (const auto& folder : listing(parent, /*folders_only=*/true))
      if (!voc_splits(folder).empty()) nested.push_back(folder.string());
  check(nested.size() <= 1, "--data ", data, " has several Pascal VOC data sets; give one: ", listed(nested));
  if (nested.size() == 1) return voc_splits(nested[0]);
  if (const YoloYaml yolo = yolo_folders(path.string()); !yolo.splits.empty()) {
    if (!yolo.names.empty()) return yolo_splits(yolo);
    fail("--data ", data, " looks like YOLO, but the class names are missing; write ",
         (path / "data.yaml").string(),
         " with this text and the names of your classes, or a classes.txt with a name in each line:\n",
         suggested_yaml(yolo));
  }
  for (const auto& entry : listing(path)) entries.push_back(entry.filename().string());
  fail("--data ", data,
       " is no data set: looked for COCO (annotations/*.json, *.json, train/*.json), Pascal VOC "
       "(Annotations/*.xml with JPEGImages, train/*.xml, *.xml beside the images) and YOLO (data.yaml, "
       "classes.txt, obj.data), found ",
       entries.empty() ? "an empty folder" : listed(entries));
}

// Reads the train split and the evaluated split. there: the splits of the data set, from find_splits(). Other
// parameters and errors as read_sources().
inline Sources read_splits(const SplitReaders& there, const std::string& data, const std::string& split,
                           bool with_train, double val_fraction) {
  const auto first = [&](const auto&... words) {
    std::string found;
    for (const char* word : {words...})
      if (found.empty() && there.count(word)) found = word;
    return found;
  };
  std::string train = first("train", "trainval"), val = split, names;
  for (const auto& entry : there) names += (names.empty() ? "" : ", ") + entry.first;
  check(split.empty() || there.count(val), "--data ", data, ": no split \"", split, "\"; it has ", names);
  // trainval contains val, so that the held-out split is test.
  if (split.empty()) val = train == "trainval" ? first("test", "val") : first("val", "test");
  if (train.empty() && val.empty() && there.size() == 1) train = there.begin()->first;
  if (train.empty()) train = val;
  if (val.empty()) val = train;
  check(!train.empty(), "--data ", data,
        " has several JSON files, but no file name contains train or val: ", names,
        "; give --data TRAIN.json,VAL.json");
  Sources sources;
  sources.same = train == val;
  sources.val = there.at(val)();
  if (with_train || sources.same || val_fraction > 0)
    sources.train = sources.same ? sources.val : there.at(train)();
  if (!sources.same && !sources.train.files.empty()) compare_splits(sources);
  if (val_fraction > 0 && sources.same) {
    sources.val = hold_out(sources.train, val_fraction);
    sources.same = false;
    sources.held_out = true;
  }
  return sources;
}

// Returns the name of a split as find_splits() has it.
inline std::string plain_split(const std::string& split) {
  return split == "valid" || split == "validation" ? "val" : split;
}

// Reads the train split and the evaluated split of a data set. data: a folder, a COCO JSON file,
// "TRAIN.json,VAL.json" or a data.yaml. split: name of the split to evaluate on; empty: val, or test if there
// is no val. with_train false: the train split is read only if it is also the evaluated split. images: as for
// find_splits(). val_fraction: if the data set has one split, hold_out() this fraction of it; 0: off. Throws
// std::runtime_error that names the file, or lists the expected files.
inline Sources read_sources(const std::string& data, const std::string& split = "", bool with_train = true,
                            const std::string& images = "", double val_fraction = 0) {
  return read_splits(find_splits(data, images), data, plain_split(split), with_train, val_fraction);
}

// Returns the data sets of --data A,B. TRAIN.json,VAL.json at the beginning are one data set, and so is the
// name of a file or folder that contains a comma.
inline std::vector<std::string> data_sets(const std::string& data) {
  std::vector<std::string> parts = split_list(data);
  if (parts.size() < 2 || is_file(data) || is_folder(data)) return {data};
  const auto is_json = [](const std::string& part) { return has_extension(part, {".json"}); };
  if (is_json(parts[0]) && is_json(parts[1])) {
    parts[0] += "," + parts[1];
    parts.erase(parts.begin() + 1);
  }
  for (const std::string& part : parts)
    usage_check(
        part != "shapes" && !is_packed(part), "--data ", data, ": ", part,
        " cannot be one of several data sets; give folders, COCO JSON files or data.yaml files, which "
        "./pack can put into one file");
  return parts;
}

// Reads the data sets of --data. Parameters as read_sources(). Of several data sets, one whose only split is
// val or test is for evaluation only: `train` has no images. One that has no evaluation split, or not the
// split that is asked for, is for training only: `val` has no images.
inline std::vector<Sources> read_data_sets(const std::string& data, const std::string& split, bool with_train,
                                           const std::string& images, double val_fraction) {
  const std::vector<std::string> parts = data_sets(data);
  std::vector<Sources> all;
  bool evaluated = true, held_out = false;
  if (parts.size() == 1) {
    all.push_back(read_sources(data, split, with_train, images, val_fraction));
    held_out = all[0].held_out;
  } else {
    evaluated = split.empty();
    for (const std::string& part : parts) {
      const SplitReaders there = find_splits(part, images);
      const bool has = there.count(plain_split(split)) > 0,
                 only_val = there.size() == 1 && (there.count("val") || there.count("test"));
      Sources s = read_splits(there, part, has ? plain_split(split) : "", /*with_train=*/true,
                              only_val ? 0 : val_fraction);
      if (s.same) (only_val ? s.train : s.val) = Source();
      if (only_val)
        s.val.notes.push_back(concat("note: ", part, ": by its name for evaluation, not for training"));
      if (!split.empty() && !has && !s.held_out) s.val = Source();
      s.same = false;
      evaluated = evaluated || has;
      held_out = held_out || s.held_out;
      all.push_back(std::move(s));
    }
  }
  check(evaluated, "--data ", data, ": none has a split \"", split, "\"");
  usage_check(val_fraction == 0 || held_out, "--val-fraction is for data with one split, but --data ", data,
              parts.size() > 1 ? " has no such data set" : " has several");
  return all;
}

// Loads the sources as one data set. With several, images and classes get new ids. keep: see check_images().
inline Dataset load_all(const std::vector<Source*>& sources, const std::string& keep) {
  if (sources.size() == 1) return load_dataset(std::move(*sources[0]), keep);
  Dataset all;
  for (Source* source : sources) append(all, load_dataset(std::move(*source), keep));
  return all;
}

// Changes of the classes after reading (--class-map, --ignore-class).
struct ClassChanges {
  std::string renamed = {};  // "OLD=NEW,..."
  std::string ignored = {};  // "NAME,...": classes whose objects become ignored regions
};

// Applies `changes` to the splits of a data set. Throws UsageError if they are malformed or name a class that
// no split has. any_name: such a class is passed over, because the evaluation split alone may not have it.
inline void change_classes(const std::vector<Dataset*>& splits, const ClassChanges& changes,
                           bool any_name = false) {
  const auto apply = [&](const char* flag, const std::map<std::string, std::string>& names) {
    std::vector<std::string> known;
    for (const Dataset* d : splits) known.insert(known.end(), d->classes.begin(), d->classes.end());
    for (const auto& [name, _] : names)
      usage_check(any_name || std::count(known.begin(), known.end(), name) > 0, flag, ": ", splits[0]->name,
                  " has no class ", name, "; it has ", listed(splits[0]->classes, 80));
    for (Dataset* d : splits) rename_classes(*d, names);
  };
  std::map<std::string, std::string> names;
  for (const std::string& pair : split_list(changes.renamed)) {
    const size_t equals = pair.find('=');
    usage_check(equals != std::string::npos && equals + 1 < pair.size(), "--class-map ", pair,
                " is not OLD=NEW");
    names[pair.substr(0, equals)] = pair.substr(equals + 1);
  }
  apply("--class-map", names);
  names.clear();
  for (const std::string& name : split_list(changes.ignored)) names[name] = "";
  apply("--ignore-class", names);
}

// Adds a note if images of the evaluation split are in the training split, or images are in it twice.
inline void compare_files(Splits& splits) {
  std::set<std::string> trained;
  int64_t repeated = 0, evaluated = 0;
  for (const Record& r : splits.train.records) repeated += !trained.insert(r.file).second;
  for (const Record& r : splits.val.records) evaluated += int64_t(trained.count(r.file));
  if (repeated > 0)
    splits.train.notes.push_back(concat("warning: ", repeated,
                                        " training images are in several data sets, and what ",
                                        "is labelled in one of them only is background in the others"));
  if (evaluated > 0)
    splits.val.notes.push_back(overlap_warning(splits.val.name, evaluated, splits.val.records.size()));
}

// Loads the train split and the evaluated split. data: any data set of read_sources(), several of them as
// "A,B", see read_data_sets(), a packed data set, or "shapes". split: name of the split to evaluate on;
// empty: val. seed: of the shapes. keep: see check_images(). Throws std::runtime_error if the splits have no
// class in common or the train split has no usable box.
inline Splits load_splits(const std::string& data, const std::string& split, uint64_t seed,
                          const std::string& keep, const std::string& images = "", double val_fraction = 0,
                          const ClassChanges& changes = {}) {
  if (data == "shapes" || is_packed(data)) refuse_images(images, data, val_fraction);
  Splits splits;
  if (data == "shapes") {
    splits = {shapes_dataset(seed, 0, kShapesTrain), shapes_dataset(seed, 1, kShapesVal), false};
  } else if (is_packed(data)) {
    const auto file = open_packed(data, split);
    splits = {packed_dataset(file, "train"), {}, file->get("val").empty()};
    if (!splits.same) splits.val = packed_dataset(file, "val");
  } else {
    std::vector<Sources> all = read_data_sets(data, split, /*with_train=*/true, images, val_fraction);
    std::vector<Source*> train, val;
    for (Sources& s : all) {
      std::vector<Source*> read;
      if (all.size() == 1 || !s.train.files.empty()) read.push_back(train.emplace_back(&s.train));
      if (all.size() == 1 || !s.val.files.empty()) read.push_back(val.emplace_back(&s.val));
      if (!read.empty()) drop_parent_category(read);
    }
    if (all[0].same) val.clear();  // they are the training images
    check(!train.empty(), "--data ", data, ": none of the data sets has a training split");
    splits = {load_all(train, keep), {}, val.empty()};
    if (!splits.same) splits.val = load_all(val, keep);
    if (all.size() > 1) compare_files(splits);
  }
  if (splits.same) {
    change_classes({&splits.train}, changes);
    splits.val = splits.train;
    splits.val.name += concat(" (warning: the training images; ", is_packed(data) ? "./pack " : "",
                              "--val-fraction 0.1 holds out a tenth for evaluation)");
  } else {
    change_classes({&splits.train, &splits.val}, changes);
  }
  use_classes(splits.val, splits.train.classes);
  const auto counts = class_counts(splits.train);
  if (std::accumulate(counts.begin(), counts.end(), int64_t(0)) == 0) {
    const auto problems = splits.train.problems->lines();
    fail(splits.train.name, " has no usable box; check the boxes, images and classes of its labels",
         problems.empty() ? "" : "; the first problem: " + problems[0]);
  }
  return splits;
}

// Loads only the evaluated split; parameters as load_splits(). classes: those of the model, empty if unknown;
// a category that load_splits() drops is kept if the model has it.
inline Dataset load_val(const std::string& data, const std::string& split, uint64_t seed,
                        const std::string& keep, const std::string& images = "",
                        const std::vector<std::string>& classes = {}, double val_fraction = 0,
                        const ClassChanges& changes = {}) {
  if (data == "shapes" || is_packed(data)) refuse_images(images, data, val_fraction);
  Dataset val;
  bool same = false;
  if (data == "shapes") {
    val = shapes_dataset(seed, 1, kShapesVal);
  } else if (is_packed(data)) {
    const auto file = open_packed(data, split);
    same = file->get("val").empty();
    val = packed_dataset(file, same ? "train" : "val");
  } else {
    std::vector<Sources> all = read_data_sets(data, split, /*with_train=*/false, images, val_fraction);
    std::vector<Source*> evaluated;
    for (Sources& s : all)
      if (!s.val.files.empty()) evaluated.push_back(&s.val);
    if (evaluated.empty())  // as in training, the training images
      for (Sources& s : all)
        if (!s.train.files.empty() || all.size() == 1) evaluated.push_back(&s.train);
    for (Source* source : evaluated)
      if (source->coco.categories.size() != classes.size()) drop_parent_category({source});
    same = all[0].same && all.size() == 1;
    val = load_all(evaluated, keep);
  }
  if (same)
    val.notes.push_back(
        "warning: these are the images that ./train would train on, and AP may be too high for other images; "
        "if it held some out, give its --val-fraction here");
  change_classes({&val}, changes, /*any_name=*/true);
  return val;
}

}  // namespace yolox
