// SPDX-License-Identifier: Apache-2.0
// Reader of COCO data sets: one JSON file per split. The class names of COCO.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "data/source.hpp"

namespace yolox {

// Reads the annotations and finds the images of a split: in the folder `images`, or if that is empty in one
// of the usual folders, and otherwise by the ends of their paths (FilesByEnd). Throws if the file lists no
// images or no categories, or, with a list of these folders, if no image is found.
Source read_coco_source(const std::string& json, const std::string& images = "");

// Finds the COCO JSON files of a data set, those with images, annotations and categories: in the folder
// `annotations`, else in `root` itself, else in its subfolders. Returns one reader per split.
SplitReaders coco_splits(const fs::path& root);

// Returns the 80 class names of COCO. Official checkpoints contain no class names; an official checkpoint
// with 80 classes has these, in this order.
const std::vector<std::string>& coco_classes();

}  // namespace yolox
