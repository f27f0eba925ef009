// SPDX-License-Identifier: Apache-2.0
// Reader of YOLO data sets: a data.yaml and one text file per image.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "data/source.hpp"

namespace yolox {

struct YoloYaml {
  std::string file;
  fs::path folder, root;                                   // folder of the file; base of relative paths
  std::vector<std::string> names;                          // class names
  bool keypoints = false;                                  // true: keypoints follow the box in each line
  bool beside = false;                                     // true: the label files are beside the images
  std::map<std::string, std::vector<std::string>> splits;  // split -> image folders and lists of images
};

// Reads a data.yaml (docs.ultralytics.com/datasets/detect). Throws if the file does not have this format.
YoloYaml read_data_yaml(const std::string& file);

// Reads an obj.data of Darknet, as CVAT writes it: names, and a list of images for each split. Throws if the
// file does not have this format.
YoloYaml read_obj_data(const std::string& file);

// Returns the image files of a split, sorted by path. A path that was written on another machine is found by
// its end. Throws if there are none.
std::vector<std::string> yolo_images(const YoloYaml& data, const std::string& split);

// Returns the path of the label file of an image: a/images/train/b.jpg -> a/labels/train/b.txt. If no folder
// is called images, the label file is beside the image.
std::string yolo_label_file(const std::string& image);

// Reads a label file. A line is "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ...": a polygon, of which the
// bounding box is read. Coordinates are fractions of the image size. A missing file means an image without
// objects. Errors are in Labels::problems.
Labels read_yolo_txt(const std::string& path, bool keypoints);

Source read_yolo_split(const YoloYaml& data, const std::string& split);

// Returns the readers of the splits.
SplitReaders yolo_splits(const YoloYaml& yaml);

// Returns the data set of a YOLO folder without data.yaml, from the folders that exist: images/train or
// train/images and so on, images, or images beside their label files. The names are those of a classes.txt
// (labelImg), empty if there is none. `splits` is empty if the folder has no such layout.
YoloYaml yolo_folders(const std::string& folder);

// Returns the text of a data.yaml for the splits of yolo_folders(). The names are placeholders for the
// classes that occur in the label files.
std::string suggested_yaml(const YoloYaml& data);

// Returns data.yaml or dataset.yaml of a folder, else its only YAML file with `names`, or "" if the folder
// has none. Throws if several files have `names`.
std::string find_data_yaml(const std::string& data);

}  // namespace yolox
