// Pascal VOC data sets: an XML file for each image.
#pragma once
#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <pugixml.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/threads.hpp"
#include "data/source.hpp"

namespace yolox {

// One annotation file. Boxes are x = xmin, y = ymin, w = xmax - xmin, h = ymax - ymin, no +-1. Objects marked
// difficult become crowds: evaluation does not count them, as in VOC, and training does not learn them.
Labels read_voc_xml(const std::string& path);

struct Voc {
  std::string root, images;
  std::map<std::string, std::map<std::string, std::string>> splits;  // name of an image -> its XML file
  std::map<std::string, Labels> labels;    // of all splits, by XML file; read when a split is
  std::map<std::string, int64_t> classes;  // of all splits, so that ids do not depend on which are chosen
};

Source read_voc_split(Voc& voc, const std::string& split);

// The splits of a folder with Annotations, JPEGImages (Kaggle: annotations, images) and lists in
// ImageSets/Main, or with folders train, valid, test that have XML files beside images (Roboflow). None if it
// is neither.
SplitReaders voc_splits(const fs::path& root);

}  // namespace yolox
