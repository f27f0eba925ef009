// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include "base/flags.hpp"
#include "base/text.hpp"

namespace yolox {

// Merges images that are listed several times under one file name, because each entry may have only a part of
// the boxes. Throws if several names mean one file, or if the entries differ in size.
static void merge_repeated_images(Source& source) {
  CocoDataset& coco = source.coco;
  std::map<std::string, size_t> first_of;  // index of the image by file
  std::map<int64_t, int64_t> merged;       // id of the first entry by the id of a later one
  for (size_t i = 0; i < coco.images.size(); ++i) {
    const CocoImage image = coco.images[i];
    const std::string file = source.files[i];
    const size_t kept = first_of.size();
    const auto [found, is_new] = first_of.emplace(file, kept);
    CocoImage& first = coco.images[found->second];
    if (is_new) {
      first = image;
      source.files[kept] = file;
      continue;
    }
    const auto differ = [](int a, int b) { return a != b && a > 0 && b > 0; };  // 0: unknown
    check(first.file_name == image.file_name && !differ(first.width, image.width) &&
              !differ(first.height, image.height),
          source.name, ": the images ", first.id, " (", first.file_name, ", ", first.width, "x", first.height,
          ") and ", image.id, " (", image.file_name, ", ", image.width, "x", image.height,
          ") are read from the same file, ", file, "; correct or remove one of them");
    first.width = std::max(first.width, image.width);
    first.height = std::max(first.height, image.height);
    merged[image.id] = first.id;
  }
  if (merged.empty()) return;
  coco.images.resize(first_of.size());
  source.files.resize(first_of.size());
  source.notes.push_back(concat("note: ", source.name, ": ", merged.size(),
                                " images repeat the file_name of another one, such as image ",
                                merged.begin()->first, "; their annotations are put together"));
  std::set<int64_t> joined;
  for (const auto& [_, first] : merged) joined.insert(first);
  for (CocoAnnotation& a : coco.annotations)
    if (const auto id = merged.find(a.image_id); id != merged.end()) a.image_id = id->second;
  // A list that was appended to itself has each annotation twice.
  std::set<decltype(identity(CocoAnnotation()))> known;
  std::erase_if(coco.annotations, [&](const auto& a) {
    return joined.count(a.image_id) > 0 && !known.insert(identity(a)).second;
  });
}

Source read_coco_source(const std::string& json, const std::string& images, const fs::path& data) {
  Source source;
  source.name = json;
  source.coco = read_coco(json);
  check(!source.coco.images.empty(), json, " lists no images; use a file with images");
  check(!source.coco.categories.empty(), json, " lists no categories; use a file with categories",
        source.coco.problems.empty() ? "" : "; the first problem: " + source.coco.problems[0].second);
  fs::path root = fs::path(json).parent_path();
  if (lower(root.filename().string()) == "annotations") root = root.parent_path();
  if (!images.empty()) root = images;
  if (root.empty()) root = ".";
  check(is_folder(root), "--images ", images, " is no folder; give the folder of the images");
  std::string split = fs::path(json).stem().string();
  if (split.starts_with("instances_")) split = split.substr(10);
  std::vector<std::string> names;
  for (const CocoImage& image : source.coco.images)
    names.push_back(images.empty() ? image.file_name : fs::path(image.file_name).relative_path().string());
  const auto found = [&](const fs::path& place) {
    source.files = find_images(source, json, names, place, split,
                               "name the folder of its images " + split +
                                   ", or give this file as --data and the folder with --images DIR");
    return std::ranges::any_of(source.files, [](const auto& file) { return is_file(file); });
  };
  if (!found(root) && (data.empty() || !found(data)))
    fail(images.empty() ? "" : "--images " + images + ": ", json, ": none of its images was found under ",
         root.string(), ", such as ", names[0],
         images.empty()
             ? "; correct file_name, or give this file as --data and their folder with --images DIR"
             : "; give the folder with these images");
  merge_repeated_images(source);
  return source;
}

// Returns true if a file names the three lists of COCO, or the start of a large file one of them.
static bool is_coco_file(const fs::path& path) {
  constexpr size_t kStart = 1 << 20;
  const std::string text = read_head(path, kStart);
  int found = 0;
  for (const char* name : {"\"images\"", "\"annotation", "\"categories\""})
    found += text.find(name) != std::string::npos;
  return found >= (text.size() < kStart ? 3 : 1);
}

// Returns true if a file that is no COCO file may be a damaged one. Other programs have JSON files, too.
static bool is_damaged(const fs::path& file, const fs::path& root) {
  const std::string text = read_head(file, 1 << 20), name = file.lexically_relative(root).string();
  if (text.empty() || !other_format(file).empty()) return true;
  bool known = !split_of(file.stem()).empty() || text.find("\"images\"") != std::string::npos;
  for (const char* word : {"instances", "annotation"}) known = known || name.find(word) != std::string::npos;
  return known && has_extension(file, {".json"});
}

SplitReaders coco_splits(const fs::path& root) {
  std::vector<fs::path> files, others, boxes;  // others: that are no COCO files
  const auto add = [&](const fs::path& folder, bool all = false) {
    for (const auto& path : listing(folder)) {
      if (lower(path.filename().string()).find(".json") == std::string::npos || is_folder(path)) continue;
      const bool usable = has_extension(path, {".json"}) && is_file(path) &&
                          (is_coco_file(path) || (all && other_format(path).empty()));
      (usable ? files : others).push_back(path);
    }
  };
  add(root / "annotations");
  if (files.empty()) add(root / "annotations", /*all=*/true);  // whose error says what is missing
  if (files.empty()) add(root);
  if (files.empty())
    for (const auto& folder : listing(root, /*folders_only=*/true)) add(folder);
  const auto is_other_task = [](const fs::path& file) {
    for (const char* task : {"caption", "keypoint", "panoptic", "stuff", "image_info"})
      if (file.stem().string().find(task) != std::string::npos) return true;
    return false;
  };
  std::ranges::copy_if(files, std::back_inserter(boxes),
                       [&](const auto& file) { return !is_other_task(file); });
  // The name of the split is in the file name or in the folder name (train/_annotations.coco.json).
  const auto split_in = [&](const fs::path& file) {
    const fs::path place = fs::path(file).replace_extension().lexically_relative(root);
    const std::string name = place.filename().string(), whole = place.string();
    for (const std::string& text : {split_of(place.parent_path()).empty() ? name : whole, whole})
      if (const std::string split = split_name(text); std::ranges::count(kSplits, split)) return split;
    return name;
  };
  std::map<std::string, std::vector<std::string>> named;
  for (const auto& file : boxes.empty() ? files : boxes) named[split_in(file)].push_back(file.string());
  // A damaged file of another split, or val.json.gz: reading it says why it cannot be used.
  for (const auto& file : named.empty() ? std::vector<fs::path>() : others)
    if (const std::string split = split_in(file);
        std::ranges::count(kSplits, split) && !is_other_task(file) && is_damaged(file, root))
      named.insert({split, {file.string()}});
  SplitReaders splits;
  for (const auto& [split, found] : named)
    splits[split] = [root, split = split, found = found] {
      check(found.size() == 1, "--data ", root.string(), " has several files for '", split,
            "': ", listed(found), "; give --data TRAIN.json,VAL.json");
      return read_coco_source(found[0], "", root);
    };
  return splits;
}

const std::vector<std::string>& coco_classes() {
  static const std::vector<std::string> names = split_list(
      "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
      "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
      "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
      "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,"
      "fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,"
      "cake,chair,couch,potted plant,bed,dining table,toilet,tv,laptop,mouse,remote,keyboard,"
      "cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,"
      "hair drier,toothbrush");
  return names;
}

}  // namespace yolox
