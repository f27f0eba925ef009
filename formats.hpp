// Data sets as their files say: COCO JSON, Pascal VOC XML and YOLO txt, in the layouts that the usual tools
// write. Images are not opened: nothing is checked against them here.
#pragma once
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <pugixml.hpp>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "data/coco_json.hpp"
#include "base/error.hpp"
#include "base/threads.hpp"

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

// ---- COCO

// Folder that holds the images of a COCO JSON file: the first of the usual places that has one of a hundred
// of them. Throws with all of the places where none has.
inline fs::path find_image_folder(const fs::path& json, const CocoDataset& coco) {
  const fs::path folder = json.parent_path().empty() ? "." : json.parent_path();
  const fs::path root = folder.filename() == "annotations" ? folder / ".." : folder;
  std::string split = json.stem().string();
  if (split.rfind("instances_", 0) == 0) split = split.substr(10);
  std::vector<fs::path> places = {root / split, root / "images" / split, root / "images", root};
  for (const fs::path& parent : {root, root / "images"}) {
    std::vector<fs::path> others = listing(parent, /*folders_only=*/true);
    // Both splits may have an image of this name: "val" and "val2017" first for annotations_val.
    std::stable_partition(others.begin(), others.end(), [&](const fs::path& p) {
      const std::string name = p.filename().string();
      return split.find(name) != std::string::npos || split_name(name) == split_name(split);
    });
    for (const auto& other : others) places.push_back(other), places.push_back(other / "images");
  }
  places.push_back(root / "..");  // for file names that begin with the name of the data set
  const size_t step = coco.images.size() / 100 + 1;
  for (const auto& place : places)
    for (size_t i = 0; i < coco.images.size(); i += step) {
      const fs::path file = with_slashes(coco.images[i].file_name);
      if ((place != places.back() || file.has_parent_path()) && is_file(place / file))
        return place.lexically_normal();
    }
  std::string looked;
  for (const auto& place : places)
    looked += "\n  " + (place / with_slashes(coco.images[0].file_name)).lexically_normal().string();
  fail(json.string(),
       ": none of its images is in any of the usual places; put the images into one of them. Looked for",
       looked);
}

inline Source read_coco_source(const std::string& json) {
  Source source;
  source.name = json;
  source.coco = read_coco(json);
  check(!source.coco.images.empty(), json, " lists no images; give a file that does");
  check(!source.coco.categories.empty(), json, " lists no categories; give a file that does");
  const fs::path folder = find_image_folder(json, source.coco);
  for (const CocoImage& image : source.coco.images)  // an absolute path stays as it is
    source.files.push_back((folder / with_slashes(image.file_name)).string());
  return source;
}

// COCO JSON files of a folder: those in annotations, else its own, else those in its sub-folders.
inline SplitReaders coco_splits(const fs::path& root) {
  std::vector<fs::path> files, boxes;
  const auto add = [&](const fs::path& folder, bool known) {
    for (const auto& path : listing(folder)) {
      if (!has_extension(path, {".json"}) || !is_file(path)) continue;
      char start[4096];  // there are other JSON files: the keys of COCO's come early
      const File file(std::fopen(path.c_str(), "rb"), std::fclose);
      const std::string_view text(start, file ? std::fread(start, 1, sizeof start, file.get()) : 0);
      bool coco = known;
      for (const char* key : {"\"images\"", "\"annotations\"", "\"categories\""})
        coco = coco || text.find(key) != std::string_view::npos;
      if (coco) files.push_back(path);
    }
  };
  add(root / "annotations", true);
  if (files.empty()) add(root, false);
  if (files.empty())
    for (const auto& folder : listing(root, /*folders_only=*/true)) add(folder, false);
  for (const auto& file : files) {  // files for other tasks are set aside where there are some for boxes
    bool other = false;
    for (const char* task : {"caption", "keypoint", "panoptic", "stuff", "image_info"})
      other = other || file.stem().string().find(task) != std::string::npos;
    if (!other) boxes.push_back(file);
  }
  std::map<std::string, std::vector<std::string>> named;  // by file or folder: train/_annotations.coco.json
  for (const auto& file : boxes.empty() ? files : boxes)
    named[split_name(fs::path(file).replace_extension().lexically_relative(root).string())].push_back(
        file.string());
  SplitReaders splits;
  for (const auto& [split, found] : named)
    splits[split] = [root, split = split, found = found] {
      check(found.size() == 1, "--data ", root.string(), " has several files for '", split,
            "': ", listed(found), "; give --data TRAIN.json,VAL.json");
      return read_coco_source(found[0]);
    };
  return splits;
}

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

// ---- Pascal VOC

// One annotation file. Boxes are x = xmin, y = ymin, w = xmax - xmin, h = ymax - ymin, no +-1. Objects marked
// difficult become crowds: evaluation does not count them, as in VOC, and training does not learn them.
inline Labels read_voc_xml(const std::string& path) {
  Labels labels;
  std::string text;
  ptrdiff_t seen = 0;
  int line = 1;
  const auto go_to = [&](ptrdiff_t offset) {  // a byte that is not before the last one
    offset = std::clamp(offset, seen, static_cast<ptrdiff_t>(text.size()));
    line += static_cast<int>(std::count(text.begin() + seen, text.begin() + offset, '\n'));
    seen = offset;
  };
  if (const int error = read_all(path, text)) {
    const char* kind = error == ENOENT ? "label file missing" : "label file cannot be read";
    labels.problems.push_back({kind, concat(path, ": ", std::strerror(error))});
    return labels;
  }
  pugi::xml_document xml;
  const pugi::xml_parse_result parsed = xml.load_buffer(text.data(), text.size());
  const pugi::xml_node root = xml.child("annotation");
  if (!parsed || !root) {
    const char* wrong = parsed ? "there is no <annotation>" : parsed.description();
    go_to(parsed.offset);
    labels.problems.push_back({"label file cannot be read", concat(path, ":", line, ": ", wrong)});
    return labels;
  }
  labels.usable = true;
  const auto number = [](const pugi::xml_node& node, const char* name) {
    return number_of(trimmed(node.child_value(name)));
  };
  const auto pixels = [&](const char* name) {
    const double value = number(root.child("size"), name).value_or(0);
    return value >= 1 && value <= INT_MAX ? static_cast<int>(value) : 0;
  };
  labels.width = pixels("width"), labels.height = pixels("height");
  labels.image = trimmed(root.child_value("filename"));
  labels.image = labels.image.substr(labels.image.find_last_of("/\\") + 1);  // npos + 1 is 0
  for (const pugi::xml_node& object : root.children("object")) {
    go_to(object.offset_debug());
    const std::string name(trimmed(object.child_value("name")));
    const pugi::xml_node box = object.child("bndbox");
    std::string wrong = name.empty() ? "no <name>" : box ? "" : "no <bndbox>";
    std::vector<double> v;
    for (const char* side : {"xmin", "ymin", "xmax", "ymax"}) {
      const auto value = number(box, side);
      v.push_back(value.value_or(0));
      if (wrong.empty() && !value)
        wrong = concat(side, " is ", in_quotes(box.child_value(side)), ", a number is needed");
    }
    if (!wrong.empty()) {
      labels.problems.push_back({"label cannot be read", concat(path, ":", line, ": object: ", wrong)});
      continue;
    }
    const double w = v[2] - v[0], h = v[3] - v[1];
    labels.boxes.push_back({0, 0, 0, v[0], v[1], w, h, w * h, number(object, "difficult") == 1.0});
    labels.names.push_back(name);
    labels.lines.push_back(line);
  }
  return labels;
}

struct Voc {
  std::string root, images;
  std::map<std::string, std::map<std::string, std::string>> splits;  // name of an image -> its XML file
  std::map<std::string, Labels> labels;    // of all splits, by XML file; read when a split is
  std::map<std::string, int64_t> classes;  // of all splits, so that ids do not depend on which are chosen
};

inline Source read_voc_split(Voc& voc, const std::string& split) {
  if (voc.labels.empty()) {
    for (const auto& [_, part] : voc.splits)
      for (const auto& [name, xml] : part) voc.labels[xml];
    std::vector<std::pair<const std::string, Labels>*> entries;
    for (auto& entry : voc.labels) entries.push_back(&entry);
    in_threads(int64_t(entries.size()),
               [&](int64_t i) { entries[i]->second = read_voc_xml(entries[i]->first); });
    for (const auto* entry : entries)
      for (const auto& name : entry->second.names) voc.classes[name];
    int64_t id = 0;
    for (auto& entry : voc.classes) entry.second = id++;
  }
  Source source;
  source.name = concat(voc.root, " (", split, ")");
  for (const auto& [name, id] : voc.classes) source.coco.categories.push_back({id, name});
  const auto images = names_under(voc.images, kImages);
  for (const auto& [name, xml] : voc.splits.at(split)) {
    Labels& labels = voc.labels[xml];
    for (size_t i = 0; i < labels.boxes.size(); ++i)
      labels.boxes[i].category_id = voc.classes[labels.names[i]];
    // <filename> comes second: it is often that of before a renaming
    const std::string other = voc.images + "/" + (labels.image.empty() ? name + ".jpg" : labels.image);
    const auto image = images.find(name);
    add_image(source, image != images.end() ? image->second : other, xml, labels);
  }
  if (source.files.empty())
    fail(source.name, ": none of its ", voc.splits.at(split).size(),
         " annotation files can be read; correct them: ", source.problems[0].second);
  return source;
}

// The splits of a folder with Annotations, JPEGImages (Kaggle: annotations, images) and lists in
// ImageSets/Main, or with folders train, valid, test that have XML files beside images (Roboflow). None if it
// is neither.
inline SplitReaders voc_splits(const fs::path& root) {
  const auto voc = std::make_shared<Voc>();
  voc->root = root.string();
  const std::vector<std::string> known = {"train", "trainval", "val", "valid", "test"};
  using Part = std::map<std::string, std::string>;
  for (const fs::path& xmls : {root / "Annotations", root / "annotations"})
    for (const fs::path& images : {root / "JPEGImages", root / "images"}) {
      if (!voc->splits.empty() || !is_folder(xmls) || !is_folder(images)) continue;
      voc->images = images.string();
      const Part all = names_under(xmls.string(), {".xml"});
      for (const auto& split : known) {
        const fs::path list = root / "ImageSets" / "Main" / (split + ".txt");
        Part part;
        if (is_file(list))
          for_each_line(read_text(list.string()), [&](std::string_view line, int) {
            std::string name(line);  // "NAME" or "NAME 1"; a name may have blanks
            if (!all.count(name)) name = name.substr(0, name.find_first_of(" \t"));
            part[name] = all.count(name) ? all.at(name) : (xmls / (name + ".xml")).string();
          });
        if (!part.empty()) voc->splits.insert({split_name(split), part});
      }
      if (voc->splits.empty() && !all.empty()) voc->splits["all"] = all;
    }
  if (voc->splits.empty()) {
    voc->images = voc->root;
    for (const auto& split : known) {
      Part part;
      for (const auto& path : listing(root / split))
        if (has_extension(path, {".xml"})) part[split + "/" + path.stem().string()] = path.string();
      if (!part.empty()) voc->splits.insert({split_name(split), part});
    }
  }
  SplitReaders splits;
  for (const auto& entry : voc->splits)
    splits[entry.first] = [voc, split = entry.first] { return read_voc_split(*voc, split); };
  return splits;
}

// ---- YOLO

struct YoloYaml {
  std::string file;
  fs::path folder, root;  // of the file; what its entries are relative to
  std::vector<std::string> names;
  bool keypoints = false;                                  // lines go on after the box
  std::map<std::string, std::vector<std::string>> splits;  // folders and lists of images
};

// A data.yaml as docs.ultralytics.com/datasets/detect describes it. Throws where it is not.
inline YoloYaml read_data_yaml(const std::string& file) {
  YoloYaml data;
  data.file = file;
  data.folder = fs::path(file).has_parent_path() ? fs::path(file).parent_path() : ".";
  const std::string text = read_text(file);
  try {
    const YAML::Node yaml = YAML::Load(text);
    check(yaml.IsMap(), file, ": has no keys; train, val and names are needed");
    const YAML::Node names = yaml["names"], nc = yaml["nc"], path = yaml["path"];
    const auto line = [&](const YAML::Node& node) {
      return concat(file, ":", node ? node.Mark().line + 1 : 1, ": ");
    };
    const bool named = names && !names.IsNull(), counted = nc && !nc.IsNull();
    check(named || counted, file, ": no names of classes; add names: [first, second, ...]");
    check(!named || names.IsSequence() || names.IsMap(), line(names), "names must be a list or id: name");
    for (size_t i = 0; named && i < names.size(); ++i) {
      const YAML::Node name = names.IsMap() ? names[std::to_string(i)] : names[i];
      check(name && name.IsScalar(), line(names), "names has no text for class ", i, " of ", names.size(),
            "; number them 0, 1, ... without a gap");
      data.names.push_back(name.Scalar());
    }
    if (counted) {
      const double count = nc.IsScalar() ? number_of(nc.Scalar()).value_or(0) : 0;
      const bool sane = count >= 1 && count <= 100000 && count == std::floor(count);
      check(sane && (!named || count == static_cast<double>(names.size())), line(nc), "nc is ",
            nc.IsScalar() ? in_quotes(nc.Scalar()) : "no number",
            named ? concat(", names has ", names.size(), " entries") : "", "; correct it");
      for (int i = 0; !named && i < count; ++i) data.names.push_back(std::to_string(i));
    }
    check(!data.names.empty(), line(names), "names is empty; list the classes");
    data.keypoints = yaml["kpt_shape"].IsDefined();
    data.root = data.folder / (path && path.IsScalar() ? path.Scalar() : "");
    if (!is_folder(data.root)) data.root = data.folder;
    for (const char* split : {"train", "trainval", "val", "valid", "validation", "test"}) {
      const YAML::Node entry = yaml[split];
      std::vector<std::string> places;
      if (!entry || entry.IsNull() || (entry.IsScalar() && entry.Scalar().empty())) continue;
      if (entry.IsScalar()) places = {entry.Scalar()};
      for (size_t i = 0; entry.IsSequence() && i < entry.size(); ++i) places.push_back(entry[i].Scalar());
      check(!places.empty() && !std::count(places.begin(), places.end(), ""), line(entry), split,
            " must be a folder of images, a .txt that lists images, or a list of these");
      data.splits.insert({split_name(split), places});
    }
  } catch (const YAML::Exception& e) {
    fail(file, ":", e.mark.line + 1, ": not valid YAML (", e.msg, "); correct that line");
  }
  check(!data.splits.empty(), file, ": no train and no val; add the folders of the images");
  return data;
}

// The images in a folder or a list, sorted by path.
inline std::vector<std::string> yolo_images(const YoloYaml& data, const std::string& split) {
  std::vector<std::string> images;
  for (const std::string& entry : data.splits.at(split)) {
    std::string inside = entry;  // Roboflow writes ../train/images for what is beside data.yaml
    while (inside.rfind("../", 0) == 0) inside.erase(0, 3);
    fs::path place;
    for (const fs::path& p :
         {data.root / entry, data.root / inside, data.folder / entry, data.folder / inside})
      if (place.empty() && (is_folder(p) || (p.extension() == ".txt" && is_file(p))))
        place = p.lexically_normal();
    check(!place.empty(), data.file, ": ", split,
          ": neither a folder nor a .txt: ", (data.root / entry).lexically_normal().string(),
          "; correct path or ", split);
    if (is_folder(place)) {
      for (const auto& file : files_under(place, kImages)) images.push_back(file);
      continue;
    }
    for_each_line(read_text(place.string()), [&](std::string_view text, int) {
      const std::string line = with_slashes(std::string(text));
      fs::path file = data.root / line, other = place.parent_path() / line;
      if (line.rfind("./", 0) == 0) file.swap(other);  // as in the lists of COCO for YOLO
      images.push_back((is_file(other) && !is_file(file) ? other : file).lexically_normal().string());
    });
  }
  check(!images.empty(), data.file, ": ", split, ": no images in ", listed(data.splits.at(split)),
        "; correct that entry");
  std::sort(images.begin(), images.end());
  return images;
}

// a/images/train/b.jpg -> a/labels/train/b.txt; beside the image where no folder is called images.
inline std::string yolo_label_file(const std::string& image) {
  std::string file = "/" + fs::path(image).replace_extension(".txt").string();
  if (const size_t at = file.rfind("/images/"); at != std::string::npos) file.replace(at, 8, "/labels/");
  return file.substr(1);
}

// Lines "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." (an outline; the box around it is read), in parts
// of the image. No file: an image without objects.
inline Labels read_yolo_txt(const std::string& path, bool keypoints) {
  Labels labels;
  std::string text;
  const int error = read_all(path, text);
  labels.usable = error == ENOENT;
  if (labels.usable) return labels;
  if (error || text.find('\0') != std::string::npos) {
    const char* wrong = error ? std::strerror(error) : "it is not text";
    labels.problems.push_back({"label file cannot be read", concat(path, ": ", wrong)});
    return labels;
  }
  labels.usable = true;
  std::vector<double> v;
  for_each_line(text, [&](std::string_view line, int number) {
    bool numbers = true;
    v.clear();
    for (size_t at = 0, end; (at = line.find_first_not_of(" \t", at)) != std::string_view::npos; at = end) {
      end = std::min(line.find_first_of(" \t", at), line.size());
      const auto value = number_of(line.substr(at, end - at));
      numbers = numbers && value && std::abs(*value) < 1e6;  // they are parts of 1, or a class
      v.push_back(value.value_or(0));
    }
    if (keypoints && v.size() > 5) v.resize(5);
    const bool box = v.size() == 5, outline = v.size() >= 7 && v.size() % 2 == 1;
    const bool whole = v[0] == std::floor(v[0]) && std::abs(v[0]) < 1e15;
    if (!numbers || !whole || !(box || outline)) {
      labels.problems.push_back(
          {"label cannot be read",
           concat(path, ":", number, ": ", in_quotes(line), " is not ",
                  "\"class cx cy w h\" or \"class x1 y1 x2 y2 x3 y3 ...\" in parts of the image")});
      return;
    }
    double x1 = v[1], y1 = v[2], x2 = v[1], y2 = v[2];
    for (size_t i = 3; outline && i < v.size(); i += 2) {
      x1 = std::min(x1, v[i]), x2 = std::max(x2, v[i]);
      y1 = std::min(y1, v[i + 1]), y2 = std::max(y2, v[i + 1]);
    }
    const double w = box ? v[3] : x2 - x1, h = box ? v[4] : y2 - y1;
    if (box) x1 -= w / 2, y1 -= h / 2;
    labels.boxes.push_back({0, 0, static_cast<int64_t>(v[0]), x1, y1, w, h, 0, false});
    labels.lines.push_back(number);
  });
  return labels;
}

inline Source read_yolo_split(const YoloYaml& data, const std::string& split) {
  Source source;
  source.name = concat(data.file, " (", split, ")");
  source.relative = true;
  for (const auto& name : data.names)
    source.coco.categories.push_back({static_cast<int64_t>(source.coco.categories.size()), name});
  const std::vector<std::string> images = yolo_images(data, split);
  std::vector<Labels> labels(images.size());
  in_threads(int64_t(images.size()),
             [&](int64_t i) { labels[i] = read_yolo_txt(yolo_label_file(images[i]), data.keypoints); });
  for (size_t i = 0; i < images.size(); ++i)
    add_image(source, images[i], yolo_label_file(images[i]), labels[i]);
  if (source.coco.annotations.empty() && source.problems.empty())
    source.problems.push_back(
        {"no image has labels", concat("the first would be in ", source.label_files[0])});
  return source;
}
inline SplitReaders yolo_splits(const std::string& file) {
  SplitReaders splits;
  const auto data = std::make_shared<YoloYaml>(read_data_yaml(file));
  for (const auto& entry : data->splits)
    splits[entry.first] = [data, split = entry.first] { return read_yolo_split(*data, split); };
  return splits;
}

// data.yaml or dataset.yaml, else the only YAML file that has names; "" if there is none.
inline std::string find_data_yaml(const std::string& data) {
  std::vector<std::string> found;
  for (const fs::path& path : listing(data)) {
    std::string text;
    if (!has_extension(path, {".yaml", ".yml"}) || read_all(path.string(), text)) continue;
    if (path.stem() == "data" || path.stem() == "dataset") return path.string();
    try {
      const YAML::Node yaml = YAML::Load(text);
      if (yaml.IsMap() && yaml["names"]) found.push_back(path.string());
    } catch (const YAML::Exception&) {}  // a YAML file of something else
  }
  check(found.size() <= 1, "--data ", data, " has several YAML files with names: ", listed(found),
        "; give one of them");
  return found.empty() ? "" : found[0];
}

// ---- any of them

// Finds out what a data set is. Throws with what was looked for.
inline SplitReaders find_splits(const std::string& data) {
  fs::path path(data);
  if (!path.has_filename()) path = path.parent_path();  // "DIR/"
  if (const size_t comma = data.find(','); comma != std::string::npos && !is_folder(path) && !is_file(path)) {
    SplitReaders splits;
    for (const auto& [split, file] :
         {std::pair("train", data.substr(0, comma)), {"val", data.substr(comma + 1)}}) {
      check(is_file(file), "--data ", data, ": ", file, " is no file; give TRAIN.json,VAL.json");
      splits[split] = [file = file] { return read_coco_source(file); };
    }
    return splits;
  }
  if (is_file(path)) {
    if (has_extension(path, {".yaml", ".yml"})) return yolo_splits(data);
    return {{split_name(path.stem().string()), [data] { return read_coco_source(data); }}};
  }
  check(
      is_folder(path), "--data ", data,
      " does not exist; give a folder (COCO, Pascal VOC or YOLO), a COCO JSON file, a data.yaml, or shapes");
  if (const SplitReaders coco = coco_splits(path); !coco.empty()) return coco;
  if (const SplitReaders voc = voc_splits(path); !voc.empty()) return voc;
  if (const std::string yaml = find_data_yaml(path.string()); !yaml.empty()) return yolo_splits(yaml);
  std::vector<std::string> nested, entries;
  for (const fs::path& parent : {path, path / "VOCdevkit"})
    for (const auto& folder : listing(parent, /*folders_only=*/true))
      if (!voc_splits(folder).empty()) nested.push_back(folder.string());
  check(nested.size() <= 1, "--data ", data, " has several Pascal VOC data sets; give one: ", listed(nested));
  if (nested.size() == 1) return voc_splits(nested[0]);
  check(!is_folder(path / "labels") && !is_folder(path / "train" / "labels"), "--data ", data,
        " looks like YOLO, but the names of the classes are missing (classes.txt is not enough); write ",
        (path / "data.yaml").string(),
        "\n  path: .\n  train: images/train\n  val: images/val\n  names:\n    0: first");
  for (const auto& entry : listing(path)) entries.push_back(entry.filename().string());
  fail("--data ", data,
       " is no data set: looked for COCO (annotations/*.json, *.json, train/*.json), Pascal VOC "
       "(Annotations/*.xml with JPEGImages, train/*.xml) and YOLO (data.yaml), found ",
       entries.empty() ? "an empty folder" : listed(entries));
}

// data: a folder, a COCO JSON file, "TRAIN.json,VAL.json" or a data.yaml. split: which split .val is to be;
// "" for val, else test. Without with_train, .train stays empty where it differs from .val. Throws
// std::runtime_error that names the file, or what was looked for.
inline Sources read_sources(const std::string& data, const std::string& split = "", bool with_train = true) {
  const SplitReaders there = find_splits(data);
  const auto first = [&](const auto&... words) {
    std::string found;
    for (const char* word : {words...})
      if (found.empty() && there.count(word)) found = word;
    return found;
  };
  std::string train = first("train", "trainval"), val = split, names;
  if (val == "valid" || val == "validation") val = "val";
  for (const auto& entry : there) names += (names.empty() ? "" : ", ") + entry.first;
  check(split.empty() || there.count(val), "--data ", data, ": no split \"", split, "\"; it has ", names);
  // trainval holds val: what is held out is then test
  if (split.empty()) val = train == "trainval" ? first("test", "val") : first("val", "test");
  if (train.empty() && val.empty() && there.size() == 1) train = there.begin()->first;
  if (train.empty()) train = val;
  if (val.empty()) val = train;
  check(!train.empty(), "--data ", data,
        " has several JSON files, none with train or val in its name: ", names,
        "; give --data TRAIN.json,VAL.json");
  Sources sources;
  sources.same = train == val;
  sources.val = there.at(val)();
  if (with_train || sources.same) sources.train = sources.same ? sources.val : there.at(train)();
  sources.same = sources.same || sources.train.name == sources.val.name;  // "a.json,a.json"
  return sources;
}
// Only the split that is evaluated: read_sources(data, split).val.
inline Source read_val_source(const std::string& data, const std::string& split = "") {
  return read_sources(data, split, /*with_train=*/false).val;
}

}  // namespace yolox
