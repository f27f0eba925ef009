// SPDX-License-Identifier: Apache-2.0
// Annotations of a split as read from its files, the readers of COCO, Pascal VOC and YOLO, and functions that
// they share.
#pragma once
#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "data/coco_json.hpp"

namespace yolox {

namespace fs = std::filesystem;

// One split as read from its files. In VOC and YOLO, an image id is 1 + its position in the files and a
// category id is a position.
struct Source {
  std::string name;                // for messages: the JSON file, "DIR (train)" or "data.yaml (train)"
  CocoDataset coco;                // may contain annotations of unknown categories
  std::vector<std::string> files;  // path of each image, parallel to coco.images; the file may not exist
  // True for YOLO: boxes (x, y of the top left corner, w, h) are fractions of the image width and height, and
  // the areas of boxes and the sizes of images are 0.
  bool relative = false;
  std::vector<std::string> label_files;  // of the image with the id 1 + index; empty for COCO
  std::vector<std::string> notes;        // lines for the log that are no problems

  // Returns the position of an annotation: "x.json: annotation 7 of image 3" or "labels/a.txt:4".
  std::string where(size_t annotation) const;
};

struct Sources {
  Source train, val;
  // True if the data set has one split only, or two splits of the same images and boxes. `val` is then equal
  // to `train`.
  bool same = false;
};

// Sets `same` if both splits have the same images and boxes, as in a data.yaml with the same folder twice. If
// some images are in both splits, a note of the evaluation split says how many. Images are the same if they
// are the same file, however their paths are written, or copies under one name. Throws if most of the shared
// files have other boxes in the other split.
void compare_splits(Sources& sources);

// Drops the category that is the supercategory of all others, if it has no annotation in any of the sources,
// which are splits of one data set. Roboflow writes such a category. The notes say so.
void drop_parent_category(const std::vector<Source*>& sources);

// Moves a fraction of the images of a split, at least one, to a second split, which is returned. Copies of
// one picture (NAME.rf.HASH of Roboflow) stay together, and so do the numbered frames of a video if there are
// enough videos. The choice depends on the file names alone, so that every program that is given the same
// fraction makes the same choice. Throws if the split has fewer than two pictures.
Source hold_out(Source& all, double fraction);

// ---- boxes

// A box, the size of its image in pixels, 0 if unknown, and its index in a list of annotations.
struct PlacedBox {
  double x, y, w, h;
  int width, height;
  size_t index;
};

// Throws if the boxes cannot be x, y (top left corner), width, height in pixels: half of them or more are
// within the first two pixels (fractions) or reach beyond their images, or fewer that would not with their
// centre there, or all are within 0..100 or 0..1000 of larger images. relative: they were converted from
// fractions. where(index) names the position of a box.
void check_units(const std::string& name, const std::vector<PlacedBox>& boxes, bool relative,
                 const std::function<std::string(size_t)>& where);

// ---- files and text

// Largest text file that is read, in bytes: a list of ten million images.
constexpr size_t kMaxTextFile = 1000000000;

// Reads a file of at most `limit` bytes into `text`, without a UTF-8 byte order mark. Returns "", or the
// reason why it cannot be read. missing: set to true if there is no such file. A pipe or a device is not
// read, because it may never end.
std::string read_all(const std::string& path, std::string& text, bool* missing = nullptr,
                     size_t limit = kMaxTextFile);

// Returns the text of a file of at most `limit` bytes. Throws if the file is unreadable or contains a null
// byte (UTF-16, binary).
std::string read_text(const std::string& path, size_t limit = kMaxTextFile);

// Returns true if two files have the same content.
bool same_content(const std::string& a, const std::string& b);

inline bool is_folder(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_directory(path, ignored);
}

inline bool is_file(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_regular_file(path, ignored);
}

// Returns the entries of a folder, sorted, or an empty list if the folder does not exist. Skips names that
// begin with a dot, because macOS writes a "._a.jpg" beside each a.jpg. Throws if a folder whose name is that
// of a part of a data set may not be read.
std::vector<fs::path> listing(const fs::path& folder, bool folders_only = false);

std::string lower(std::string text);

inline bool has_extension(const fs::path& path, const std::set<std::string>& wanted) {
  return wanted.count(lower(path.extension().string())) > 0;
}

inline const std::set<std::string> kImages = {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp",
                                              ".tif", ".tiff", ".pgm", ".ppm",  ".pbm", ".pnm", ".dib"};
// Formats that not every OpenCV reads. A labelled file of these is used, or skipped, counted and listed.
inline const std::set<std::string> kOtherImages = {".gif", ".avif", ".heic", ".heif", ".jp2"};

inline bool is_picture(const fs::path& path) {
  return has_extension(path, kImages) || has_extension(path, kOtherImages);
}

// Returns the files in a folder and its subfolders, sorted. Skips names that begin with a dot. Follows
// symbolic links, but enters each folder only once. Folders of the system (lost+found, @eaDir) and unreadable
// ones are left out, and a line of `notes` names them. Throws if `folder` itself cannot be listed.
std::vector<std::string> files_under(const fs::path& folder, std::vector<std::string>& notes);

// Finds image files under `root` by their names, which may have folders in front of them, also those of
// another machine (a note says how many were found by a part of their name). Of several files with an equal
// name, the one that shares the longest end with the name is taken. If folders have files of the same names,
// one of the name of `split` is preferred to `images` and `root`, and these to others, unless it has less
// than half as many of the files. Throws if two folders are equally good and their files differ; the message
// begins with `list`, the file with the names, and ends with `remedy`.
// Returns the path of each image; one that is not found gets the path at which it was expected.
std::vector<std::string> find_images(Source& source, const std::string& list,
                                     const std::vector<std::string>& names, const fs::path& root,
                                     const std::string& split, const std::string& remedy);

// Replaces backslashes by slashes.
std::string to_forward_slashes(std::string path);

std::string_view trimmed(std::string_view text);

// Calls f(line, line number from 1) for each line that is not blank. The line is trimmed.
template <class Function>
void for_each_line(std::string_view text, Function f) {
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (const auto line = trimmed(text.substr(0, end)); !line.empty()) f(line, number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// Parses a finite number, independently of the locale. Returns nothing if `text` is anything else.
std::optional<double> parse_number(std::string_view text);

// Quotes a text for a message: at most 60 characters of it, printable().
std::string quote(std::string_view text);

// Returns the first bytes of a file, "" if it cannot be read.
std::string read_head(const fs::path& file, size_t bytes);

// Returns what a file is if it belongs to a format that is not read, and the way out: "a file of labelme;
// convert it ...". "" for any other file.
std::string other_format(const fs::path& file);

// ---- splits

// Returns the split in the name of a file or folder ("instances_val2017", "valid/x" -> "val"), or `name`
// itself if it contains no split. Whole words are tried before parts of words, because "latest" contains
// "test".
std::string split_name(const std::string& name);

// Returns the last split in a path, but for digits and signs: "val2017/a" -> "val". "" if there is none.
std::string split_of(const fs::path& path);

// Names of folders, keys and lists that hold a split.
inline const std::vector<std::string> kSplits = {"train", "trainval", "val", "valid", "validation", "test"};

// The reader of each split of a data set, by the name of the split.
using SplitReaders = std::map<std::string, std::function<Source()>>;

// ---- label files of VOC and YOLO

// Contents of one label file.
struct Labels {
  bool usable = false;        // false if the objects of the image are unknown; the image is then skipped
  bool missing = false;       // YOLO: there is no label file, so that the image has no objects
  std::string image;          // VOC: <filename> without folder
  int width = 0, height = 0;  // pixels; 0 if unknown
  std::vector<CocoAnnotation> boxes;  // VOC: category_id is not set yet, see `names`
  std::vector<std::string> names;     // VOC: class name of each box
  std::vector<size_t> long_lines;     // YOLO: the number of columns of each line with more than a box has
  ProblemList problems;
};

// Adds an image and its annotations to a split. Adds only the problems if the labels are not usable.
void add_image(Source& source, const std::string& file, const std::string& label_file, const Labels& labels);

// Adds the problem that a label file belongs to several images, so that none of them can be used.
void add_shared_label(Source& source, const std::string& label_file, const std::vector<std::string>& images);

// ---- COCO: a JSON file for each split

// Reads the annotations and finds the images of a split in the folder `images`, or if that is empty near the
// file, else in the folder `data`, see find_images(). Throws if the file lists no images or no categories, or
// if no image is found.
Source read_coco_source(const std::string& json, const std::string& images = "", const fs::path& data = {});

// Finds the COCO JSON files of a data set, those with images, annotations and categories: in the folder
// `annotations`, else in `root` itself, else in its subfolders. Returns one reader per split.
SplitReaders coco_splits(const fs::path& root);

// Returns the 80 class names of COCO. Official checkpoints contain no class names; an official checkpoint
// with 80 classes has these, in this order.
const std::vector<std::string>& coco_classes();

// ---- Pascal VOC: an XML file for each image

// Reads one annotation file. A box is x = xmin, y = ymin, w = xmax - xmin, h = ymax - ymin, without +-1.
// Objects marked as difficult become crowds, so that evaluation ignores them, as in VOC, and training does
// not use them. Errors are in Labels::problems.
Labels read_voc_xml(const std::string& path);

// Finds the splits of XML files in a folder (Annotations, annotations, labels, xmls, also in folders of
// splits), or beside their images in the folder itself or in folders of splits (Roboflow, labelImg). Images
// may be anywhere below. Splits are those of lists (ImageSets/Main, ImageSets, or beside the folders), else
// of folders. Returns an empty map for any other folder.
SplitReaders voc_splits(const fs::path& root);

// ---- YOLO: a data.yaml or obj.data, and a text file for each image

// Returns the readers of the splits of a data.yaml, or of an obj.data of Darknet. Throws if the file does not
// have this format.
SplitReaders yolo_file_splits(const std::string& file);

// The splits of YOLO folders, an empty map for other folders. First, those of a data.yaml or dataset.yaml
// with `names`.
SplitReaders data_yaml_splits(const fs::path& folder);

// Then, those of a .data file of Darknet, in the folder or in its folder `data`; else of data.yaml,
// dataset.yaml or the only YAML file with `names`. Throws if several have `names`.
SplitReaders yolo_splits(const fs::path& folder);

// At last, those of folders that exist: images/train or train/images and so on, images, or images beside
// their label files. The names are those of a classes.txt (labelImg) or _darknet.labels (Roboflow). Throws if
// there is none; the message has the lines of a data.yaml.
SplitReaders yolo_folder_splits(const fs::path& folder);

// Returns the path of the label file of an image: a/images/train/b.jpg -> a/labels/train/b.txt. If no folder
// is called images, the label file is beside the image.
std::string yolo_label_file(const std::string& image);

// Reads a label file. A line is "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ...": a polygon, of which the
// bounding box is read. Coordinates are fractions of the image size. What follows a box is ignored if
// `keypoints` is set. A missing file means an image without objects. Errors are in Labels::problems.
Labels read_yolo_txt(const std::string& path, bool keypoints);

}  // namespace yolox
