// A split as its files say it, and what the readers of all formats share.
#pragma once
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "data/coco_json.hpp"

namespace yolox {

namespace fs = std::filesystem;

// One split. VOC and YOLO: image ids are 1 + position, category ids are positions.
struct Source {
  std::string name;  // for messages: the JSON file, "DIR (train)" or "data.yaml (train)"
  CocoDataset coco;  // position of a category = class; annotations also of categories that are not there
  std::vector<std::string> files;  // path of each image, parallel to coco.images; it may not exist
  bool relative = false;           // YOLO: boxes (x, y top left, w, h) are in parts of the image's width and
                                   // height, area is 0, and so are the sizes of the images
  std::vector<std::string> label_files;  // parallel to coco.images; empty for COCO
  std::vector<int> lines;  // parallel to coco.annotations: line in its label file; empty for COCO
  std::vector<std::pair<std::string, std::string>> problems;  // kind, line: unreadable, therefore left out

  // Where an annotation is written: "x.json: annotation 7 of image 3" or "labels/a.txt:4".
  std::string where(size_t annotation) const;
};

struct Sources {
  Source train, val;
  bool same = false;  // there is one split only and it serves as both; val is then a copy
};

// ---- files and text

// The bytes of a file without a byte order mark. Returns errno, 0 if all is well.
int read_all(const std::string& path, std::string& text);

std::string read_text(const std::string& path);

inline bool is_folder(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_directory(path, ignored);
}

inline bool is_file(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_regular_file(path, ignored);
}

// The entries of a folder in order, without those that begin with a dot: macOS puts a "._a.jpg" beside each
// a.jpg. None where there is no such folder.
std::vector<fs::path> listing(const fs::path& folder, bool folders_only = false);

std::string lower(std::string text);

inline bool has_extension(const fs::path& path, const std::set<std::string>& wanted) {
  return wanted.count(lower(path.extension().string())) > 0;
}

inline const std::set<std::string> kImages = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"};

// The files of these extensions in a folder and below, sorted; none that begin with a dot. Links are
// followed, each folder is entered once.
std::vector<std::string> files_under(const fs::path& folder, const std::set<std::string>& extensions);

// The same by path without the folder and the extension.
std::map<std::string, std::string> names_under(const std::string& folder,
                                               const std::set<std::string>& extensions);

std::string with_slashes(std::string path);

std::string_view trimmed(std::string_view text);

// Calls f(line, its number from 1) for all lines that are not blank, without the blanks around them.
template <class Function>
void for_each_line(std::string_view text, Function f) {
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    if (const auto line = trimmed(text.substr(0, end)); !line.empty()) f(line, number);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}

// The text as a finite number, whatever the locale; nothing if it is not one from end to end.
std::optional<double> number_of(std::string_view text);

// For messages: short, on one line.
std::string in_quotes(std::string_view text);

// ---- splits

// The split that a file or folder is named after: "instances_val2017", "valid/x" -> "val"; the name itself if
// it is none. Whole words count before parts of words: a data set may be called "latest".
std::string split_name(const std::string& name);

// What a data set has: what reads the split of each name.
using SplitReaders = std::map<std::string, std::function<Source()>>;

// ---- VOC and YOLO: a label file for each image

struct Labels {
  bool usable = false;  // else the image's objects are unknown, and it is left out
  std::string image;    // VOC: <filename>
  int width = 0, height = 0;
  std::vector<CocoAnnotation> boxes;  // VOC: their categories are in `names`
  std::vector<std::string> names;
  std::vector<int> lines;
  std::vector<std::pair<std::string, std::string>> problems;
};

void add_image(Source& source, const std::string& file, const std::string& label_file, const Labels& labels);

}  // namespace yolox
