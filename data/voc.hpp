// SPDX-License-Identifier: Apache-2.0
// Reader of Pascal VOC data sets: one XML file per image.
#pragma once
#include <filesystem>
#include <map>
#include <string>

#include "data/source.hpp"

namespace yolox {

// Reads one annotation file. A box is x = xmin, y = ymin, w = xmax - xmin, h = ymax - ymin, without +-1.
// Objects marked as difficult become crowds, so that evaluation ignores them, as in VOC, and training does
// not use them. Errors are in Labels::problems.
Labels read_voc_xml(const std::string& path);

// Files of a VOC data set.
struct Voc {
  std::string root, images;                                          // folders
  std::map<std::string, std::map<std::string, std::string>> splits;  // split -> image name -> XML file
  std::map<std::string, Labels> labels;  // contents of the XML files of all splits, read with the first split
  std::map<std::string, int64_t> classes;  // classes of all splits, so that ids do not depend on the split
};

// Reads one split. The first call reads the label files of all splits. Throws if no file of the split is
// usable.
Source read_voc_split(Voc& voc, const std::string& split);

// Finds the splits of a folder with Annotations, JPEGImages (Kaggle: annotations, images) and lists in
// ImageSets/Main, or of a folder with train, valid and test that contain XML files beside the images
// (Roboflow), or the single split of a folder with XML files beside the images (labelImg). Returns an empty
// map for any other folder.
SplitReaders voc_splits(const fs::path& root);

}  // namespace yolox
