// SPDX-License-Identifier: Apache-2.0
// Reader of Pascal VOC data sets: one XML file per image.
#pragma once
#include <filesystem>
#include <string>

#include "data/source.hpp"

namespace yolox {

// Reads one annotation file. A box is x = xmin, y = ymin, w = xmax - xmin, h = ymax - ymin, without +-1.
// Objects marked as difficult become crowds, so that evaluation ignores them, as in VOC, and training does
// not use them. Errors are in Labels::problems.
Labels read_voc_xml(const std::string& path);

// Finds the splits of a folder with Annotations, JPEGImages (Kaggle: annotations, images) and lists in
// ImageSets/Main, or of a folder with train, valid and test that contain XML files beside the images
// (Roboflow), or the single split of a folder with XML files beside the images (labelImg). Returns an empty
// map for any other folder.
SplitReaders voc_splits(const fs::path& root);

}  // namespace yolox
