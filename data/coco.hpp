// SPDX-License-Identifier: Apache-2.0
// Reader of COCO data sets: one JSON file per split. The class names of COCO.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "data/source.hpp"

namespace yolox {

// Returns the folder that contains the images of a COCO JSON file: the first of the usual folders in which at
// least one of about 100 sampled images exists. Returns "" if none contains any.
fs::path find_image_folder(const fs::path& json, const CocoDataset& coco);

// Reads the annotations and finds the images of a split: in the folder `images`, or if that is empty with
// find_image_folder(), and otherwise by the ends of their paths (FilesByEnd). Throws if the file lists no
// images or no categories, or if no image is found.
Source read_coco_source(const std::string& json, const std::string& images = "");

// Finds the COCO JSON files of a data set, those with images, annotations and categories: in the folder
// `annotations`, else in `root` itself, else in its subfolders. Returns one reader per split.
SplitReaders coco_splits(const fs::path& root);

// Returns the 80 class names of COCO. Official checkpoints contain no class names; an official checkpoint
// with 80 classes has these, in this order.
const std::vector<std::string>& coco_classes();

}  // namespace yolox
