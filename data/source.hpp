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
  std::string where(size_t annotation) const {
    const CocoAnnotation& a = coco.annotations[annotation];
    if (lines.empty()) return concat(name, ": annotation ", a.id, " of image ", a.image_id);
    return concat(label_files[a.image_id - 1], ":", lines[annotation]);
  }
};

struct Sources {
  Source train, val;
  bool same = false;  // there is one split only and it serves as both; val is then a copy
};

// ---- files and text

// The bytes of a file without a byte order mark. Returns errno, 0 if all is well.
inline int read_all(const std::string& path, std::string& text) {
  text.clear();
  const File file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file) return errno;
  char buffer[1 << 14];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) text.append(buffer, n);
  if (std::ferror(file.get())) return errno;
  if (text.rfind("\xEF\xBB\xBF", 0) == 0) text.erase(0, 3);
  return 0;
}

inline std::string read_text(const std::string& path) {
  std::string text;
  const int error = read_all(path, text);
  check(error == 0, path, ": cannot be read (", std::strerror(error), "); check the path");
  check(text.find('\0') == std::string::npos, path, ": is not UTF-8 text; save it as such");
  return text;
}

inline bool is_folder(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_directory(path, ignored);
}

inline bool is_file(const fs::path& path, std::error_code ignored = {}) {
  return fs::is_regular_file(path, ignored);
}

// The entries of a folder in order, without those that begin with a dot: macOS puts a "._a.jpg" beside each
// a.jpg. None where there is no such folder.
inline std::vector<fs::path> listing(const fs::path& folder, bool folders_only = false) {
  std::error_code ignored;
  std::vector<fs::path> entries;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (entry.path().filename().string()[0] != '.' && (!folders_only || entry.is_directory(ignored)))
      entries.push_back(entry.path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

inline std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

inline bool has_extension(const fs::path& path, const std::set<std::string>& wanted) {
  return wanted.count(lower(path.extension().string())) > 0;
}

inline const std::set<std::string> kImages = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"};

// The files of these extensions in a folder and below, sorted; none that begin with a dot. Links are
// followed, each folder is entered once.
inline std::vector<std::string> files_under(const fs::path& folder, const std::set<std::string>& extensions) {
  std::vector<std::string> files;
  std::error_code error, ignored;
  std::set<fs::path> entered = {fs::canonical(folder, ignored)};
  fs::recursive_directory_iterator it(folder, fs::directory_options::follow_directory_symlink, error), end;
  for (; !error && it != end; it.increment(error)) {
    const fs::path& path = it->path();
    const bool hidden = path.filename().string()[0] == '.';
    if (it->is_directory(ignored)) {
      if (hidden || !entered.insert(fs::canonical(path, ignored)).second) it.disable_recursion_pending();
    } else if (!hidden && has_extension(path, extensions)) {
      files.push_back(path.string());
    }
  }
  check(!error, folder.string(), ": cannot be listed (", error.message(), "); check its rights");
  std::sort(files.begin(), files.end());
  return files;
}

// The same by path without the folder and the extension.
inline std::map<std::string, std::string> names_under(const std::string& folder,
                                                      const std::set<std::string>& extensions) {
  std::map<std::string, std::string> names;
  for (const std::string& file : files_under(folder, extensions))
    names.emplace(file.substr(folder.size() + 1, file.rfind('.') - folder.size() - 1), file);
  return names;
}

inline std::string with_slashes(std::string path) {  // Windows' programs write a\b.jpg
  std::replace(path.begin(), path.end(), '\\', '/');
  return path;
}

inline std::string_view trimmed(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}

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
inline std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return {};
  return value;
}

// For messages: short, on one line.
inline std::string in_quotes(std::string_view text) {
  std::string shown(text.substr(0, 60));
  for (char& c : shown)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  return "\"" + shown + (text.size() > 60 ? "...\"" : "\"");
}

// ---- splits

// The split that a file or folder is named after: "instances_val2017", "valid/x" -> "val"; the name itself if
// it is none. Whole words count before parts of words: a data set may be called "latest".
inline std::string split_name(const std::string& name) {
  std::string words = " " + lower(name) + " ";
  for (char& c : words)
    if (!std::isalpha(static_cast<unsigned char>(c))) c = ' ';
  const std::vector<std::pair<std::string, std::string>> known = {
      {"trainval", "trainval"}, {"train", "train"}, {"val", "val"},        {"test", "test"},
      {"training", "train"},    {"valid", "val"},   {"validation", "val"}, {"testing", "test"}};
  for (const std::string edge : {" ", ""})
    for (const auto& [word, split] : known)
      if (words.find(edge + word + edge) != std::string::npos) return split;
  return name;
}

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

inline void add_image(Source& source, const std::string& file, const std::string& label_file,
                      const Labels& labels) {
  source.problems.insert(source.problems.end(), labels.problems.begin(), labels.problems.end());
  if (!labels.usable) return;
  const int64_t id = static_cast<int64_t>(source.files.size()) + 1;
  source.coco.images.push_back({id, file, labels.width, labels.height});
  source.files.push_back(file);
  source.label_files.push_back(label_file);
  for (CocoAnnotation a : labels.boxes) {
    a.id = static_cast<int64_t>(source.coco.annotations.size()) + 1;
    a.image_id = id;
    source.coco.annotations.push_back(a);
  }
  source.lines.insert(source.lines.end(), labels.lines.begin(), labels.lines.end());
}

}  // namespace yolox
