// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include <yaml-cpp/yaml.h>

#include "base/text.hpp"
#include "base/threads.hpp"

namespace yolox {

namespace {

// What data.yaml, obj.data or the folders say.
struct YoloYaml {
  std::string file;
  fs::path folder, root;                                   // folder of the file; base of relative paths
  std::vector<std::string> names;                          // class names
  bool keypoints = false;                                  // true: keypoints follow the box in each line
  std::map<std::string, std::vector<std::string>> splits;  // split -> image folders and lists of images
  std::vector<std::string> unused = {};                    // folders of images that are in no split
};

}  // namespace

// Returns the class names of a file with a name in each line. The number of a line is the class id, so that
// an empty line is an error, except at the end.
static std::vector<std::string> read_names(const std::string& file) {
  std::vector<std::string> names;
  for_each_line(read_text(file), [&](std::string_view name, int number) {
    check(
        number == int(names.size()) + 1, file, ":", names.size() + 1,
        ": empty line; each line is the name of a class, and its number is the class id; delete the line or "
        "write the name");
    names.emplace_back(name);
  });
  return names;
}

// Returns the path of a file of names: as it is given, or one of this name in the folder.
static std::string names_file(const fs::path& folder, const std::string& value) {
  const fs::path given = folder / to_forward_slashes(value);
  return (is_file(given) ? given : folder / given.filename()).string();
}

// Returns the lines KEY = VALUE of an obj.data of Darknet as YAML.
static YAML::Node yaml_of_obj_data(const std::string& text) {
  YAML::Node yaml(YAML::NodeType::Map);
  for_each_line(text, [&](std::string_view line, int) {
    const size_t equals = std::min(line.find('='), line.size() - 1);
    const std::string key(trimmed(line.substr(0, equals))), value(trimmed(line.substr(equals + 1)));
    if (line[0] != '#' && !value.empty() && key != "eval") yaml[lower(key)] = value;
  });
  return yaml;
}

// Reads a data.yaml (docs.ultralytics.com/datasets/detect), or an obj.data of Darknet, as CVAT writes it too.
static YoloYaml read_data_yaml(const std::string& file) {
  YoloYaml data;
  data.file = file;
  data.folder = fs::path(file).has_parent_path() ? fs::path(file).parent_path() : ".";
  const std::string text = read_text(file);
  try {
    const YAML::Node yaml = has_extension(file, {".data"}) ? yaml_of_obj_data(text) : YAML::Load(text);
    check(yaml.IsMap(), file, ": has no keys; add train, val and names");
    const YAML::Node names = yaml["names"], nc = yaml["nc"], path = yaml["path"];
    const auto line = [&](const YAML::Node& node) {
      return concat(file, ":", node ? std::max(node.Mark().line + 1, 1) : 1, ": ");
    };
    std::set<std::string> keys;
    for (const auto& entry : yaml)
      check(keys.insert(entry.first.Scalar()).second, line(entry.first), "a second ", entry.first.Scalar(),
            "; delete one of them");
    const bool named = names && !names.IsNull(), counted = nc && !nc.IsNull();
    check(named || counted, file,
          ": no class names; add names: [first, second, ...], or names = FILE to an obj.data");
    const std::string list = named && names.IsScalar() ? names_file(data.folder, names.Scalar()) : "";
    check(list.empty() || is_file(list), line(names), "names must be a list, id: name, or a file");
    if (!list.empty()) data.names = read_names(list);
    for (size_t i = 0; named && i < names.size(); ++i) {
      const YAML::Node name = names.IsMap() ? names[std::to_string(i)] : names[i];
      check(name && name.IsScalar(), line(names), "names has no text for class ", i, " of ", names.size(),
            "; give it one, such as unused, because the numbers of the labels count");
      data.names.push_back(name.Scalar());
    }
    if (counted) {
      const double count = nc.IsScalar() ? parse_number(nc.Scalar()).value_or(0) : 0;
      const bool sane = count >= 1 && count <= 100000 && count == std::floor(count);
      check(sane && (!named || count == double(data.names.size())), line(nc), "nc is ",
            nc.IsScalar() ? quote(nc.Scalar()) : "no number",
            named ? concat(", names has ", data.names.size(), " entries") : "", "; correct it");
      for (int i = 0; !named && i < count; ++i) data.names.push_back(std::to_string(i));
    }
    check(!data.names.empty(), line(names), "names is empty; list the classes");
    data.keypoints = yaml["kpt_shape"].IsDefined() && !yaml["kpt_shape"].IsNull();
    if (path && path.IsScalar()) data.root = data.folder / path.Scalar();
    if (data.root.empty() || !is_folder(data.root)) data.root = data.folder;
    for (const auto& item : yaml) {
      const YAML::Node entry = item.second;
      const std::string split = item.first.Scalar();
      std::vector<std::string> places;
      const bool empty = entry.IsNull() || (entry.IsScalar() && entry.Scalar().empty());
      if (split_of(split).empty() || (empty && split == "test")) continue;
      check(!empty, file, ": ", split, " is empty; give its images, or delete the line");
      if (entry.IsScalar()) places = {entry.Scalar()};
      for (size_t i = 0; entry.IsSequence() && i < entry.size(); ++i) places.push_back(entry[i].Scalar());
      check(!places.empty() && !std::count(places.begin(), places.end(), ""), line(entry), split,
            " must be a folder of images, a .txt that lists images, or a list of these");
      const auto [first, is_new] = data.splits.insert({split_of(split), places});
      check(is_new || first->second == places, line(entry), split, " and another key are the split ",
            first->first, "; delete one of them");
    }
  } catch (const YAML::Exception& e) {
    fail(file, ":", e.mark.line + 1, ": not valid YAML (", e.msg, "); correct that line");
  }
  check(!data.splits.empty(), file, ": no train and no val; add the folders of the images");
  return data;
}

// Returns the folder of images or the list of images that an entry of data.yaml names. A path that was
// written on another machine is found by its end. Empty if there is none.
static fs::path place_of(const YoloYaml& data, const std::string& entry) {
  std::string inside = entry;  // Roboflow writes ../train/images for a folder beside data.yaml
  while (inside.starts_with("../")) inside.erase(0, 3);
  std::vector<fs::path> places;
  for (const fs::path& base : {data.root, data.folder})
    for (const std::string& path : {entry, inside}) places.push_back(base / path);
  check(entry == inside || !is_folder(places[0]) || !is_folder(places[1]), data.file, ": ", entry, " can be ",
        places[0].lexically_normal().string(), " and ", places[1].string(), "; give the absolute path");
  for (size_t at; (at = inside.find('/')) != std::string::npos;) {
    inside.erase(0, at + 1);
    places.push_back(data.root / inside);
  }
  // The last name alone, such as images, may be that of the folder of another split.
  for (size_t i = 0; i < places.size(); ++i)
    if ((is_folder(places[i]) && (i < 4 || i + 1 < places.size())) ||
        (has_extension(places[i], {".txt"}) && is_file(places[i])))
      return places[i].lexically_normal();
  return {};
}

// Returns the image files of a split, sorted by path. Throws if there are none.
static std::vector<std::string> yolo_images(const YoloYaml& data, const std::string& split, Source& source) {
  std::vector<std::string> images;
  for (const std::string& given : data.splits.at(split)) {
    const fs::path entry = to_forward_slashes(given), place = place_of(data, entry);
    check(!place.empty(), data.file, ": ", split,
          ": neither a folder nor a .txt: ", (data.root / entry).lexically_normal().string(),
          "; correct the key \"path\" or \"", split, "\", or delete the line");
    if (is_folder(place)) {
      for (const fs::path file : files_under(place, source.notes)) {
        const auto exists_as = [&](const auto& end) {
          return is_file(fs::path(file).replace_extension(end));
        };
        // A HEIC file, for example, may have a JPEG copy, which is the labelled one.
        if (is_picture(file) && (has_extension(file, kImages) || std::ranges::none_of(kImages, exists_as)))
          images.push_back(file);
      }
      continue;
    }
    std::vector<std::string> lost, files;  // lost: lines whose file is not where the line says
    for_each_line(read_text(place.string()), [&](std::string_view text, int) {
      const std::string line = to_forward_slashes(std::string(text));
      fs::path file = data.root / line, other = place.parent_path() / line;
      if (line.starts_with("./")) file.swap(other);  // "./" is relative to the list, as in COCO for YOLO
      if (!is_file(file) && is_file(other)) file = other;
      if (is_file(file))
        images.push_back(file.lexically_normal().string());
      else
        lost.push_back(line);
    });
    if (!lost.empty())
      files = find_images(source, place.string(), lost, data.root, split, "correct the paths in the list");
    images.insert(images.end(), files.begin(), files.end());
  }
  check(!images.empty(), data.file, ": ", split, ": no images in ", listed(data.splits.at(split)),
        "; correct that entry");
  std::sort(images.begin(), images.end());
  const size_t entries = images.size();
  images.erase(std::unique(images.begin(), images.end()), images.end());
  if (images.size() < entries)
    source.notes.push_back(concat("note: ", data.file, ": ", split, ": ", entries - images.size(), " of ",
                                  entries, " images are named again, and used once"));
  return images;
}

std::string yolo_label_file(const std::string& image) {
  std::string file = "/" + fs::path(image).replace_extension(".txt").string();
  for (const std::string folder : {"/images/", "/JPEGImages/"})  // the second one is a rule of Darknet
    if (const size_t at = file.rfind(folder); at != std::string::npos)
      return file.replace(at, folder.size(), "/labels/").substr(1);
  return file.substr(1);
}

// Returns the label file of an image, by the rule of YOLO or beside it, as of Darknet and labelImg.
static std::string label_file_of(const std::string& image) {
  for (const std::string& file : {yolo_label_file(image), image})
    for (const char* extension : {".txt", ".TXT"})
      if (const fs::path path = fs::path(file).replace_extension(extension); is_file(path)) return path;
  return yolo_label_file(image);
}

Labels read_yolo_txt(const std::string& path, bool keypoints) {
  Labels labels;
  std::string text;
  const std::string error = read_all(path, text, &labels.missing);
  labels.usable = labels.missing;
  if (labels.missing) return labels;
  if (!error.empty() || text.find('\0') != std::string::npos) {
    const std::string wrong = error.empty() ? "not a text file" : error;
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
      const auto value = parse_number(line.substr(at, end - at));
      numbers = numbers && value && std::abs(*value) < 1e6;  // a class id or a fraction of the image size
      v.push_back(value.value_or(0));
    }
    const bool closed = v.size() > 7 && v[1] == v[v.size() - 2] && v[2] == v.back();  // a polygon
    if (numbers && v.size() > 5 && !closed) labels.long_lines.push_back(v.size());
    if (keypoints && v.size() > 5) v.resize(5);
    const bool box = v.size() == 5, outline = v.size() >= 7 && v.size() % 2 == 1;
    const bool whole = v[0] == std::floor(v[0]) && std::abs(v[0]) < 1e15;
    // Such as truncated and occluded, or confidence and track.
    const bool flags = v.size() == 7 && std::max({v[1], v[2], v[3], v[4]}) <= 1 && v[6] == std::floor(v[6]) &&
                       (v[6] > 1 || (v[6] >= 0 && v[5] * (v[5] - 1) == 0));
    if (!numbers || !whole || flags || !(box || outline)) {
      labels.problems.push_back(
          {"label cannot be read",
           concat(path, ":", number, ": ", quote(line), " is not ",
                  "\"class cx cy w h\" or \"class x1 y1 x2 y2 x3 y3 ...\" in fractions of the image size",
                  numbers && v.size() == 6 ? "; delete the sixth column if it is a confidence" : "",
                  flags ? "; delete the last two columns" : "")});
      return;
    }
    double x1 = v[1], y1 = v[2], x2 = v[1], y2 = v[2];
    for (size_t i = 3; outline && i < v.size(); i += 2) {
      x1 = std::min(x1, v[i]);
      x2 = std::max(x2, v[i]);
      y1 = std::min(y1, v[i + 1]);
      y2 = std::max(y2, v[i + 1]);
    }
    const double w = box ? v[3] : x2 - x1, h = box ? v[4] : y2 - y1;
    if (box) {
      x1 -= w / 2;
      y1 -= h / 2;
    }
    labels.boxes.push_back({0, 0, static_cast<int64_t>(v[0]), x1, y1, w, h, 0, false, number});
  });
  return labels;
}

// Lists label files without image. Throws if a tool has left the classes beside the labels in another order.
static void check_label_folders(const YoloYaml& data, Source& source) {
  std::set<fs::path> folders, places{data.folder};
  for (const std::string& file : source.label_files) folders.insert(fs::path(file).parent_path());
  for (const fs::path& folder : folders) places.insert({folder, folder.parent_path()});
  for (const fs::path& place : places)
    for (const char* file : {"classes.txt", "_darknet.labels", "obj.names"}) {
      const std::string list = (place / file).string();
      std::string text;
      std::vector<std::string> names;
      if (is_file(list)) read_all(list, text);
      for_each_line(text, [&](std::string_view name, int) { names.emplace_back(name); });
      size_t known = 0, moved = 0;
      for (size_t i = 0; i < names.size(); ++i) {
        const auto found = std::ranges::find(data.names, lower(names[i]), lower);
        known += found != data.names.end();
        moved += found != data.names.end() && found - data.names.begin() != int64_t(i);
      }
      check(2 * known <= names.size() || moved == 0, list, " and ", data.file,
            " number the classes in different ways; correct the one that does not belong to the labels");
    }
  for (const fs::path& folder : folders) {
    std::string images = "/" + folder.string() + "/";
    const size_t at = images.rfind("/labels/");
    const bool beside = at == std::string::npos;
    images = (beside ? images : images.replace(at, 8, "/images/")).substr(1);
    std::set<fs::path> stems;
    for (const fs::path& image : listing(images))
      if (is_picture(image)) stems.insert(image.stem());
    for (const fs::path& file : listing(folder))
      if (!stems.empty() && has_extension(file, {".txt"}) && !stems.count(file.stem()) &&
          file.filename() != "classes.txt" &&
          (!beside || !read_yolo_txt(file.string(), data.keypoints).boxes.empty()))
        source.coco.problems.push_back({"label file without image", file.string()});
  }
}

static Source read_yolo_split(const YoloYaml& data, const std::string& split) {
  Source source;
  source.name = concat(data.file, " (", split, ")");
  source.relative = true;
  for (const auto& name : data.names)
    source.coco.categories.push_back({static_cast<int64_t>(source.coco.categories.size()), name});
  const std::vector<std::string> images = yolo_images(data, split, source);
  std::vector<Labels> labels(images.size());
  std::vector<std::string> label_files(images.size());
  parallel_for(int64_t(images.size()), [&](int64_t i) {
    label_files[i] = label_file_of(images[i]);
    labels[i] = read_yolo_txt(label_files[i], data.keypoints);
  });
  size_t lines = 0;  // with more columns than a box; those of polygons differ, but for corners of boxes
  std::set<size_t> columns;
  for (const Labels& l : labels) {
    lines += l.long_lines.size();
    columns.insert(l.long_lines.begin(), l.long_lines.end());
  }
  check(data.keypoints || lines < 5 || columns.size() > 1 || columns.count(9), source.name, ": ", lines,
        " labels have ", columns.empty() ? 0 : *columns.begin(),
        " columns: are they boxes with keypoints, a ",
        "score or a track? Add kpt_shape: [NUMBER OF KEYPOINTS, 2] to a data.yaml, or delete the columns ",
        "after the fifth; of a polygon, repeat the first corner at its end");
  const auto note = [&](const auto&... text) {
    source.notes.push_back(concat("note: ", source.name, ": ", text...));
  };
  std::map<std::string, std::vector<std::string>> images_of;  // by label file
  std::vector<std::string> unlabelled;
  for (size_t i = 0; i < images.size(); ++i) images_of[label_files[i]].push_back(images[i]);
  for (size_t i = 0; i < images.size(); ++i) {
    const auto& sharing = images_of.at(label_files[i]);
    if (labels[i].missing) unlabelled.push_back(fs::path(images[i]).filename().string());
    const std::string beside = fs::path(images[i]).replace_extension(".txt").string();
    if (beside != label_files[i] && is_file(beside) && !same_content(beside, label_files[i]) &&
        !read_yolo_txt(beside, data.keypoints).boxes.empty())
      source.coco.problems.push_back(
          {"image with two label files, which is left out", concat(label_files[i], " and ", beside)});
    else if (sharing.size() == 1 || labels[i].boxes.empty())
      add_image(source, images[i], label_files[i], labels[i]);
    else if (images[i] == sharing[0])
      add_shared_label(source, label_files[i], sharing);
  }
  if (split != "all" && !data.unused.empty())
    note("folders of no split, which are not used: ", listed(data.unused));
  check_label_folders(data, source);
  if (!unlabelled.empty())
    note(unlabelled.size(), " of ", images.size(),
         " images have no label file and count as images without objects: ", listed(unlabelled, 20));
  if (source.files.empty() && !images.empty())
    fail(source.name, ": none of its ", images.size(),
         " label files can be used; correct them: ", source.coco.problems[0].second);
  if (source.coco.annotations.empty() && source.coco.problems.empty())
    source.coco.problems.push_back(
        {"no image has labels", unlabelled.empty()
                                    ? "all label files are empty"
                                    : concat("expected the first label file at ", source.label_files[0])});
  return source;
}

static SplitReaders splits_of(const YoloYaml& yaml) {
  SplitReaders splits;
  for (const auto& entry : yaml.splits)
    splits[entry.first] = [yaml, split = entry.first] { return read_yolo_split(yaml, split); };
  return splits;
}

SplitReaders yolo_file_splits(const std::string& file) { return splits_of(read_data_yaml(file)); }

static bool has_usual_name(const fs::path& yaml) { return yaml.stem() == "data" || yaml.stem() == "dataset"; }

// Returns the YAML files of a folder with the key `names`.
static std::vector<std::string> yaml_files(const fs::path& folder) {
  std::vector<std::string> files;
  for (const fs::path& path : listing(folder)) {
    std::string text;
    if (!has_extension(path, {".yaml", ".yml"})) continue;
    const std::string error = read_all(path.string(), text);
    check(error.empty() || !has_usual_name(path), path.string(), ": cannot be read (", error,
          "); check its permissions");
    try {
      const YAML::Node yaml = YAML::Load(text);
      if (yaml.IsMap() && yaml["names"]) files.push_back(path.string());
    } catch (const YAML::Exception&) {}  // of another program, or reading it says what is wrong
  }
  return files;
}

SplitReaders data_yaml_splits(const fs::path& folder) {
  for (const std::string& file : yaml_files(folder))
    if (has_usual_name(file)) return yolo_file_splits(file);
  return {};
}

SplitReaders yolo_splits(const fs::path& folder) {
  for (const fs::path& place : {folder, folder / "data"})
    for (const fs::path& path : listing(place)) {
      if (!has_extension(path, {".data"})) continue;
      const std::string text = read_head(path, 1 << 16);
      if (path.filename() == "obj.data" ||
          (text.find("names") != std::string::npos && text.find("train") != std::string::npos))
        return yolo_file_splits(path.string());
    }
  for (const fs::path& path : listing(folder))  // whose error says what is missing
    if (has_extension(path, {".yaml", ".yml"}) && has_usual_name(path))
      return yolo_file_splits(path.string());
  const auto found = yaml_files(folder);
  check(found.size() <= 1, "--data ", folder.string(), " has several YAML files with names: ", listed(found),
        "; give --data one of these files");
  return found.empty() ? SplitReaders() : yolo_file_splits(found[0]);
}

SplitReaders yolo_folder_splits(const fs::path& folder) {
  YoloYaml data;
  data.folder = data.root = folder;
  std::vector<std::string> notes;
  for (const fs::path names : files_under(folder, notes)) {
    const auto is_other = [](const fs::path& part) {
      return part != "." && part != "labels" && part != "images" && split_of(part).empty();
    };
    if ((names.filename() != "classes.txt" && names.filename() != "_darknet.labels") ||
        std::ranges::any_of(names.parent_path().lexically_relative(folder), is_other))
      continue;
    const auto list = read_names(names.string());
    const size_t both = std::min(list.size(), data.names.size());
    check(std::equal(list.begin(), list.begin() + both, data.names.begin()), names.string(), " and ",
          data.file,
          " number the classes in different ways; renumber the labels of one, and make them equal");
    if (list.size() <= both) continue;
    data.file = names.string();
    data.names = list;
  }
  // Adds a folder of images if there are labels, or class names and images.
  const auto add = [&](const std::string& split, const fs::path& images, const fs::path& labels) {
    if (is_folder(labels) ? is_folder(images)
                          : !data.names.empty() && std::ranges::any_of(listing(images), is_picture))
      data.splits[split].push_back(images.lexically_relative(folder).string());
  };
  const fs::path images = folder / "images", labels = folder / "labels";
  for (const fs::path& place : listing(images, /*folders_only=*/true))
    if (const std::string split = split_of(place.filename()); !split.empty())
      add(split, place, labels);
    else
      data.unused.push_back(place.string());
  for (const fs::path& place : listing(folder, /*folders_only=*/true))
    if (const std::string split = split_of(place.filename()); !split.empty())
      add(split, is_folder(place / "images") ? place / "images" : place, place / "labels");
  if (data.splits.empty() && !is_folder(labels)) add("all", folder, "");
  if (data.splits.empty()) add("all", images, labels);
  std::string lines;
  for (const auto& [split, images] : data.splits)
    lines += concat("\"", split == "all" ? "train" : split, ": ", images[0], "\", ");
  check(lines.empty() || !data.names.empty(), "--data ", folder.string(),
        " looks like YOLO, but the class names are missing; write ", (folder / "data.yaml").string(),
        " with the lines ", lines, "\"names: [first, second]\", or a classes.txt with a name in each line");
  return splits_of(data);
}

}  // namespace yolox
