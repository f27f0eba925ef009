// COCO data sets: a JSON file for each split.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "data/source.hpp"

namespace yolox {

// Folder that holds the images of a COCO JSON file: the first of the usual places that has one of a hundred
// of them. Throws with all of the places where none has.
fs::path find_image_folder(const fs::path& json, const CocoDataset& coco);

Source read_coco_source(const std::string& json);

// COCO JSON files of a folder: those in annotations, else its own, else those in its sub-folders.
SplitReaders coco_splits(const fs::path& root);

}  // namespace yolox
