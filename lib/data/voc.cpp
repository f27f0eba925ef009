// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include <pugixml.hpp>

#include <climits>
#include <memory>

#include "base/text.hpp"
#include "base/threads.hpp"
#include "data/dataset.hpp"

namespace yolox {

Labels read_voc_xml(const std::string& path) {
  Labels labels;
  std::string text;
  ptrdiff_t seen = 0;
  int line = 1;
  const auto go_to = [&](ptrdiff_t offset) {  // updates `line`; offsets must not decrease
    offset = std::clamp(offset, seen, static_cast<ptrdiff_t>(text.size()));
    line += static_cast<int>(std::count(text.begin() + seen, text.begin() + offset, '\n'));
    seen = offset;
  };
  bool missing = false;
  if (const std::string error = read_all(path, text, &missing); !error.empty()) {
    const char* kind = missing ? "label file missing" : "label file cannot be read";
    labels.problems.push_back({kind, concat(path, ": ", error)});
    return labels;
  }
  pugi::xml_document xml;
  const pugi::xml_parse_result parsed = xml.load_buffer(text.data(), text.size());
  const pugi::xml_node root = xml.child("annotation");
  if (!parsed || !root) {
    const char* wrong = parsed ? "no <annotation> element" : parsed.description();
    go_to(parsed.offset);
    labels.problems.push_back({"label file cannot be read", concat(path, ":", line, ": ", wrong)});
    return labels;
  }
  labels.usable = true;
  const auto number = [](const pugi::xml_node& node, const char* name) {
    return parse_number(trimmed(node.child_value(name)));
  };
  const auto pixels = [&](const char* name) {
    const double value = number(root.child("size"), name).value_or(0);
    return value >= 1 && value <= INT_MAX ? static_cast<int>(value) : 0;
  };
  labels.width = pixels("width");
  labels.height = pixels("height");
  labels.image = trimmed(root.child_value("filename"));
  labels.image = labels.image.substr(labels.image.find_last_of("/\\") + 1);             // npos + 1 is 0
  const pugi::xml_node objects = root.child("objects") ? root.child("objects") : root;  // FAIR1M
  for (const pugi::xml_node& object : objects.children("object")) {
    go_to(object.offset_debug());
    const std::string name = normal_name(std::string(trimmed(object.child_value("name"))));
    const pugi::xml_node box = object.child("bndbox");
    std::string wrong = name.empty() ? "no <name>" : box ? "" : "no <bndbox>";
    std::vector<double> v;
    for (const char* side : {"xmin", "ymin", "xmax", "ymax"}) {
      const auto value = number(box, side);
      v.push_back(value.value_or(0));
      if (wrong.empty() && !value)
        wrong = concat(side, " is ", quote(box.child_value(side)), ", a number is needed");
    }
    if (!wrong.empty()) {
      labels.problems.push_back({"label cannot be read", concat(path, ":", line, ": object: ", wrong)});
      continue;
    }
    const double w = v[2] - v[0], h = v[3] - v[1];
    const std::string_view difficult = trimmed(object.child_value("difficult"));  // 1, True or yes
    const bool is_difficult = !difficult.empty() && std::string("1tTyY").find(difficult[0]) < 5;
    labels.boxes.push_back({0, 0, 0, v[0], v[1], w, h, w * h, is_difficult, line});
    labels.names.push_back(name);
  }
  return labels;
}

namespace {

// VOC2007/Annotations/train/a.xml has the name VOC2007/train/a, and so has its image,
// VOC2007/JPEGImages/train/a.jpg.
struct VocPlace {
  std::string name;        // without folders of labels and images, and without extension
  bool in_root = true;     // folders of splits alone are in front of the folder of labels or images
  bool in_folder = false;  // there is such a folder
  bool of_labels = false;  // the last such folder is one of labels
};

using Part = std::map<std::string, std::string>;  // XML file by VocPlace::name

// Files of a VOC data set.
struct Voc {
  fs::path root;                                           // folder
  std::vector<std::string> notes;                          // for the log
  std::map<std::string, std::vector<std::string>> images;  // by their names without folders
  Part all;                                                // all XML files
  std::map<std::string, int> xmls;                         // number of XML files by names without folders
  std::map<std::string, Part> splits;
  bool has_lists = false;                  // the splits are those of lists
  std::set<std::string> image_splits;      // of the folders of images
  bool has_whole_names = false;            // an XML file and its image have one VocPlace::name
  std::map<std::string, Labels> labels;    // of the XML files of all splits, read with the first split
  std::map<std::string, int64_t> classes;  // of all splits, so that ids do not depend on the split
};

}  // namespace

static VocPlace voc_place(const fs::path& file, const fs::path& root = "") {
  static const std::set<std::string> kLabels = {"annotations", "annotation", "labels", "xml", "xmls"};
  VocPlace place;
  fs::path name;
  for (const fs::path& part : file.lexically_relative(root).parent_path()) {
    const std::string kind = lower(part.string());
    const bool labels = kLabels.count(kind) > 0, images = kind == "jpegimages" || kind == "images";
    if (labels || images) place.of_labels = labels;
    if (!labels && !images) name /= part;
    place.in_folder = place.in_folder || labels || images;
    place.in_root = place.in_root && (place.in_folder || !split_of(part).empty());
  }
  place.name = (name / file.stem()).string();
  return place;
}

static std::string lower_stem(const fs::path& file) { return lower(file.stem().string()); }

static std::string split_below(const fs::path& root, const fs::path& file) {
  return split_of(file.lexically_relative(root).parent_path());
}

// Reads one split. The first call reads the label files of all splits. Throws if no file of the split is
// usable.
static Source read_voc_split(Voc& voc, const std::string& split) {
  if (voc.labels.empty()) {
    for (const auto& [_, part] : voc.splits)
      for (const auto& [name, xml] : part) voc.labels[xml];
    std::vector<std::pair<const std::string, Labels>*> entries;
    for (auto& entry : voc.labels) entries.push_back(&entry);
    parallel_for(int64_t(entries.size()),
                 [&](int64_t i) { entries[i]->second = read_voc_xml(entries[i]->first); });
    for (const auto* entry : entries)
      for (const auto& name : entry->second.names) voc.classes[name];
    int64_t id = 0;
    for (auto& entry : voc.classes) entry.second = id++;
  }
  Source source;
  source.name = concat(voc.root.string(), " (", split, ")");
  source.notes = std::exchange(voc.notes, {});
  for (const auto& [name, id] : voc.classes) source.coco.categories.push_back({id, name});
  const bool any = voc.has_lists || split == "all";  // images may be in any folder
  const std::string folder = voc.image_splits.count(split) ? split : "";
  std::set<std::string> used;
  for (const auto& entry : voc.splits.at(split)) {
    const std::string &name = entry.first, &xml = entry.second;
    Labels& labels = voc.labels[xml];
    for (size_t i = 0; i < labels.boxes.size(); ++i)
      labels.boxes[i].category_id = voc.classes[labels.names[i]];
    // Masks may have the names of images: where a whole name counts, the last part alone needs <filename>.
    const auto is_named = [&](const fs::path& file) { return file.filename() == labels.image; };
    const auto is_own = [&](const fs::path& file) { return voc_place(file, voc.root).name == name; };
    const auto may_be = [&](const fs::path& file) {
      return !voc.all.count(voc_place(file, voc.root).name) && (!voc.has_whole_names || is_named(file)) &&
             (any || split_below(voc.root, file) == folder);
    };
    // Prefer the image named as the XML file, because <filename> is often wrong after a renaming.
    const std::string own = lower_stem(xml), named = lower_stem(labels.image);
    std::vector<std::string> files;
    std::ranges::copy_if(voc.images[own], std::back_inserter(files), is_own);
    for (const std::string& stem : {own, named})
      if (files.empty() && voc.xmls[stem] <= 1)
        std::ranges::copy_if(voc.images[stem], std::back_inserter(files), may_be);
    if (std::ranges::any_of(files, is_named)) std::erase_if(files, std::not_fn(is_named));
    used.insert(files.begin(), files.end());
    if (files.empty() && labels.usable)
      source.coco.problems.push_back(
          {"label file without image",
           concat(xml, ": its image ", labels.image.empty() ? own : labels.image,
                  voc.xmls[named] > 0 && named != own ? " has another label file" : " is missing")});
    else if (files.size() > 1)
      add_shared_label(source, xml, files);
    else
      add_image(source, files.empty() ? xml : files[0], xml, labels);
  }
  std::vector<std::string> unlabelled;
  for (const auto& [stem, images] : voc.images)
    if (!voc.has_lists && !voc.xmls.count(stem) && !used.count(images[0]) &&
        split_below(voc.root, images[0]) == folder)
      unlabelled.push_back(fs::path(images[0]).filename().string());
  if (!unlabelled.empty())
    source.notes.push_back(concat("note: ", source.name, ": ", unlabelled.size(),
                                  " images have no XML file and are not used: ", listed(unlabelled, 20)));
  if (source.files.empty())
    fail(source.name, ": none of its ", voc.splits.at(split).size(),
         " annotation files can be used; correct them: ", source.coco.problems[0].second);
  return source;
}

// Reads the lists of the splits in a folder. needed: the lists belong to this data set alone, and one without
// names is an error. Other lists count if one is of train or trainval, and if half of the names are known.
static void read_voc_lists(Voc& voc, const fs::path& folder, bool needed) {
  const fs::path xmls = fs::path(voc.all.begin()->second).parent_path();
  // A name, or the path of an image or XML file, maybe of another machine.
  const auto name_of = [&](const std::string& text) {
    const fs::path path = fs::path(to_forward_slashes(text)).lexically_normal();
    std::string name =
        is_picture(path) || has_extension(path, {".xml"}) ? voc_place(path.relative_path()).name : text;
    for (size_t at; !voc.all.count(name) && (at = name.find('/')) != std::string::npos;)
      name.erase(0, at + 1);
    return voc.all.count(text) ? text : name;
  };
  std::string empty;
  for (const fs::path& list : listing(folder)) {
    std::string split = lower_stem(list);
    if (split.ends_with("_list")) split.resize(split.size() - 5);               // of PaddleX
    if (split == "default" && !is_file(folder / "train.txt")) split = "train";  // of CVAT: without a subset
    Part part;
    size_t known = 0;
    if (!has_extension(list, {".txt"}) || split_of(split).empty()) continue;
    if (is_file(list))
      for_each_line(read_text(list.string()), [&](const std::string_view& line, int) {
        std::string name = name_of(std::string(line));  // or "NAME 1", "IMAGE XML"; NAME may have spaces
        if (!voc.all.count(name)) name = name_of(std::string(line.substr(0, line.find_first_of(" \t"))));
        known += voc.all.count(name);
        part[name] = voc.all.count(name) ? voc.all.at(name) : (xmls / (name + ".xml")).string();
      });
    if (part.empty() && needed && split != "test") empty = list.string();
    if (!part.empty() && (needed || 2 * known >= part.size())) voc.splits.insert({split_of(split), part});
  }
  check(voc.splits.empty() || empty.empty(), empty,
        " names no images; correct it, or delete it if there is no such split");
  if (!needed && !voc.splits.count("train") && !voc.splits.count("trainval")) voc.splits.clear();
  voc.has_lists = !voc.splits.empty();
}

// Sets the splits to those of the folders of the labels, else of their images.
static void split_by_folders(Voc& voc) {
  for (const auto& [name, xml] : voc.all) {
    std::set<std::string> of_images;
    for (const std::string& image : voc.images[lower_stem(xml)])
      of_images.insert(split_below(voc.root, image));
    of_images.erase("");
    std::string split = split_below(voc.root, xml);
    if (split.empty() && of_images.size() == 1) split = *of_images.begin();
    voc.splits[split.empty() ? "all" : split][name] = xml;
  }
  if (voc.splits.size() == 1 || !voc.splits.count("all")) return;
  const Part others = voc.splits.extract("all").mapped();
  if (!voc.splits.count("train") && !voc.splits.count("trainval"))
    voc.splits["train"] = others;
  else
    voc.notes.push_back(concat("note: ", voc.root.string(), ": ", others.size(),
                               " XML files are in no folder of a split and not used, such as ",
                               others.begin()->second));
}

SplitReaders voc_splits(const fs::path& root) {
  const auto voc = std::make_shared<Voc>();
  voc->root = root;
  std::set<std::string> names;  // VocPlace::name of images
  const auto files = files_under(root, voc->notes);
  if (std::ranges::none_of(files, [](const auto& file) { return has_extension(file, {".xml"}); })) return {};
  for (const fs::path file : files) {
    const VocPlace place = voc_place(file, root);
    if (!is_picture(file) || (place.of_labels && !is_file(fs::path(file).replace_extension(".xml"))))
      continue;
    voc->images[lower_stem(file)].push_back(file);  // no mask
    names.insert(place.name);
    voc->image_splits.insert(split_below(root, file));
  }
  int64_t yolo = 0;  // label files of YOLO less those of VOC
  for (const fs::path file : files) {
    const std::string stem = lower_stem(file);
    const VocPlace place = voc_place(file, root);
    const bool matches = voc->images.count(stem) > 0;
    yolo += matches && has_extension(file, {".txt"}) && names.count(place.name);
    if (!has_extension(file, {".xml"})) continue;
    yolo -= matches;
    if (!place.in_root || !(place.in_folder || matches)) continue;
    const auto [other, is_new] = voc->all.emplace(place.name, file);
    check(is_new || same_content(other->second, file), other->second, " and ", file.string(),
          " are different label files of one image; remove one of them");
    if (!is_new) continue;
    ++voc->xmls[stem];
    voc->has_whole_names = voc->has_whole_names || names.count(place.name);
  }
  if (voc->all.empty() || yolo > 0) return {};
  const fs::path lists = root / "ImageSets";
  for (const fs::path& place : {lists / "Main", lists, root / "annotations", root})
    if (!voc->has_lists) read_voc_lists(*voc, place, place.string().starts_with(lists.string()));
  if (!voc->has_lists) split_by_folders(*voc);
  SplitReaders splits;
  for (const auto& entry : voc->splits)
    splits[entry.first] = [voc, split = entry.first] { return read_voc_split(*voc, split); };
  return splits;
}

}  // namespace yolox
