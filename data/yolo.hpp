// YOLO data sets: a data.yaml, and a text file for each image.
#pragma once
#include <yaml-cpp/yaml.h>
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/threads.hpp"
#include "data/source.hpp"

namespace yolox {

struct YoloYaml {
  std::string file;
  fs::path folder, root;  // of the file; what its entries are relative to
  std::vector<std::string> names;
  bool keypoints = false;                                  // lines go on after the box
  std::map<std::string, std::vector<std::string>> splits;  // folders and lists of images
};

// A data.yaml as docs.ultralytics.com/datasets/detect describes it. Throws where it is not.
YoloYaml read_data_yaml(const std::string& file);

// The images in a folder or a list, sorted by path.
std::vector<std::string> yolo_images(const YoloYaml& data, const std::string& split);

// a/images/train/b.jpg -> a/labels/train/b.txt; beside the image where no folder is called images.
std::string yolo_label_file(const std::string& image);

// Lines "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." (an outline; the box around it is read), in parts
// of the image. No file: an image without objects.
Labels read_yolo_txt(const std::string& path, bool keypoints);

Source read_yolo_split(const YoloYaml& data, const std::string& split);

SplitReaders yolo_splits(const std::string& file);

// data.yaml or dataset.yaml, else the only YAML file that has names; "" if there is none.
std::string find_data_yaml(const std::string& data);

}  // namespace yolox
