// SPDX-License-Identifier: Apache-2.0
#include "data/coco.hpp"

#include <algorithm>
#include <map>

#include "base/error.hpp"

namespace yolox {

fs::path find_image_folder(const fs::path& json, const CocoDataset& coco) {
  const fs::path folder = json.parent_path().empty() ? "." : json.parent_path();
  const fs::path root = folder.filename() == "annotations" ? folder / ".." : folder;
  std::string split = json.stem().string();
  if (split.rfind("instances_", 0) == 0) split = split.substr(10);
  std::vector<fs::path> places = {root / split, root / "images" / split, root / "images", root};
  for (const fs::path& parent : {root, root / "images"}) {
    std::vector<fs::path> others = listing(parent, /*folders_only=*/true);
    // Two splits may have an image of the same name, so search the folders named after the split first.
    std::stable_partition(others.begin(), others.end(), [&](const fs::path& p) {
      const std::string name = p.filename().string();
      return split.find(name) != std::string::npos || split_name(name) == split_name(split);
    });
    for (const auto& other : others) {
      places.push_back(other);
      places.push_back(other / "images");
    }
  }
  places.push_back(root / "..");  // for file names that begin with the folder of the data set
  const size_t step = coco.images.size() / 100 + 1;
  for (const auto& place : places)
    for (size_t i = 0; i < coco.images.size(); i += step) {
      const fs::path file = to_forward_slashes(coco.images[i].file_name);
      if ((place != places.back() || file.has_parent_path()) && is_file(place / file))
        return place.lexically_normal();
    }
  std::string looked;
  for (const auto& place : places)
    looked += "\n  " + (place / to_forward_slashes(coco.images[0].file_name)).lexically_normal().string();
  fail(json.string(),
       ": none of its images was found in the usual folders; give their folder with --images DIR. Looked for",
       looked);
}

Source read_coco_source(const std::string& json, const std::string& images) {
  Source source;
  source.name = json;
  source.coco = read_coco(json);
  check(!source.coco.images.empty(), json, " lists no images; use a file with images");
  check(!source.coco.categories.empty(), json, " lists no categories; use a file with categories");
  const fs::path folder = images.empty() ? find_image_folder(json, source.coco) : fs::path(images);
  for (const CocoImage& image : source.coco.images)  // operator/ keeps an absolute file_name unchanged
    source.files.push_back((folder / to_forward_slashes(image.file_name)).string());
  check(images.empty() ||
            std::any_of(source.files.begin(), source.files.end(), [](const auto& f) { return is_file(f); }),
        "--images ", images, ": none of the images of ", json, " is there, such as ", source.files[0],
        "; file names in the JSON file are relative to this folder");
  return source;
}

SplitReaders coco_splits(const fs::path& root) {
  std::vector<fs::path> files, boxes;
  const auto add = [&](const fs::path& folder, bool known) {
    for (const auto& path : listing(folder)) {
      if (!has_extension(path, {".json"}) || !is_file(path)) continue;
      char start[4096];  // a COCO file has one of its keys near the start; other JSON files have none
      const File file(std::fopen(path.c_str(), "rb"), std::fclose);
      const std::string_view text(start, file ? std::fread(start, 1, sizeof start, file.get()) : 0);
      bool coco = known;
      for (const char* key : {"\"images\"", "\"annotations\"", "\"categories\""})
        coco = coco || text.find(key) != std::string_view::npos;
      if (coco) files.push_back(path);
    }
  };
  add(root / "annotations", true);
  if (files.empty()) add(root, false);
  if (files.empty())
    for (const auto& folder : listing(root, /*folders_only=*/true)) add(folder, false);
  for (const auto& file : files) {  // prefer files with boxes to files of other COCO tasks
    bool other = false;
    for (const char* task : {"caption", "keypoint", "panoptic", "stuff", "image_info"})
      other = other || file.stem().string().find(task) != std::string::npos;
    if (!other) boxes.push_back(file);
  }
  // The name of the split is in the file name or in the folder name (train/_annotations.coco.json).
  std::map<std::string, std::vector<std::string>> named;
  for (const auto& file : boxes.empty() ? files : boxes)
    named[split_name(fs::path(file).replace_extension().lexically_relative(root).string())].push_back(
        file.string());
  SplitReaders splits;
  for (const auto& [split, found] : named)
    splits[split] = [root, split = split, found = found] {
      check(found.size() == 1, "--data ", root.string(), " has several files for '", split,
            "': ", listed(found), "; give --data TRAIN.json,VAL.json");
      return read_coco_source(found[0]);
    };
  return splits;
}

const std::vector<std::string>& coco_classes() {
  static const std::vector<std::string> names = {"person",        "bicycle",      "car",
                                                 "motorcycle",    "airplane",     "bus",
                                                 "train",         "truck",        "boat",
                                                 "traffic light", "fire hydrant", "stop sign",
                                                 "parking meter", "bench",        "bird",
                                                 "cat",           "dog",          "horse",
                                                 "sheep",         "cow",          "elephant",
                                                 "bear",          "zebra",        "giraffe",
                                                 "backpack",      "umbrella",     "handbag",
                                                 "tie",           "suitcase",     "frisbee",
                                                 "skis",          "snowboard",    "sports ball",
                                                 "kite",          "baseball bat", "baseball glove",
                                                 "skateboard",    "surfboard",    "tennis racket",
                                                 "bottle",        "wine glass",   "cup",
                                                 "fork",          "knife",        "spoon",
                                                 "bowl",          "banana",       "apple",
                                                 "sandwich",      "orange",       "broccoli",
                                                 "carrot",        "hot dog",      "pizza",
                                                 "donut",         "cake",         "chair",
                                                 "couch",         "potted plant", "bed",
                                                 "dining table",  "toilet",       "tv",
                                                 "laptop",        "mouse",        "remote",
                                                 "keyboard",      "cell phone",   "microwave",
                                                 "oven",          "toaster",      "sink",
                                                 "refrigerator",  "book",         "clock",
                                                 "vase",          "scissors",     "teddy bear",
                                                 "hair drier",    "toothbrush"};
  return names;
}

}  // namespace yolox
