// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include <pugixml.hpp>

#include <climits>
#include <memory>

#include "base/text.hpp"
#include "base/threads.hpp"

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
    labels.boxes.push_back({0, 0, 0, v[0], v[1], w, h, w * h, number(object, "difficult") == 1.0, line});
    labels.names.push_back(name);
  }
  return labels;
}

namespace {

using Part = std::map<std::string, std::string>;  // XML file by VocPlace::name

// Files of a VOC data set.
struct Voc {
  std::string root;                                        // folder
  std::vector<std::string> skipped;                        // see Source
  std::map<std::string, std::vector<std::string>> images;  // by VocPlace::name
  Part all;                                                // all XML files
  std::map<std::string, Part> splits;
  bool has_lists = false;                // the splits are those of lists
  std::string note;                      // for the log
  std::map<std::string, Labels> labels;  // contents of the XML files of all splits, read with the first split
  std::map<std::string, int64_t> classes;  // classes of all splits, so that ids do not depend on the split
};

// VOC2007/Annotations/train/a.xml has the folder VOC2007 and the name VOC2007/train/a, and its image
// VOC2007/JPEGImages/train/a.jpg has the same name.
struct VocPlace {
  fs::path folder;   // in front of the folder of labels or images, without folders of splits at its end
  std::string name;  // without folders of labels and images, and without extension
  bool in_folder = false, of_labels = false;  // there is such a folder, and the last one has labels
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
    if (!place.in_folder) place.folder /= part;
  }
  while (!split_of(place.folder.filename()).empty()) place.folder = place.folder.parent_path();
  place.name = (name / file.stem()).string();
  return place;
}

static std::string lower_stem(const fs::path& file) { return lower(file.stem().string()); }
static std::string split_of_name(const std::string& name) { return split_of(fs::path(name).parent_path()); }

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
  source.name = concat(voc.root, " (", split, ")");
  source.skipped = voc.skipped;
  if (!voc.note.empty()) source.notes.push_back(std::exchange(voc.note, ""));
  for (const auto& [name, id] : voc.classes) source.coco.categories.push_back({id, name});
  const Part& part = voc.splits.at(split);
  // By the last part of the name: XML files, and images that no XML file has the name of.
  std::map<std::string, int> xmls;
  std::map<std::string, std::vector<std::string>> others;
  for (const auto& [name, xml] : part) ++xmls[lower_stem(xml)];
  const bool any = voc.has_lists || split == "all";  // images may be in any folder
  const auto of_split = [&](const auto& entry) { return split_of_name(entry.first) == split; };
  const std::string folder_split = std::ranges::any_of(voc.images, of_split) ? split : "";
  for (const auto& [name, files] : voc.images)
    for (const std::string& file : files)
      if (!voc.all.count(name) && (any || split_of_name(name) == folder_split))
        others[lower_stem(file)].push_back(file);
  // Masks may have the names of images: where a whole name counts, the last part alone needs <filename>.
  const bool whole = std::ranges::any_of(part, [&](const auto& e) { return voc.images.count(e.first) > 0; });
  std::set<fs::path> used, folders;
  for (const auto& [name, xml] : part) {
    Labels& labels = voc.labels[xml];
    for (size_t i = 0; i < labels.boxes.size(); ++i)
      labels.boxes[i].category_id = voc.classes[labels.names[i]];
    // Prefer the image named as the XML file, because <filename> is often wrong after a renaming.
    const std::string own = lower_stem(xml), named = lower_stem(labels.image);
    std::vector<std::string> files;
    if (voc.images.count(name)) files = voc.images.at(name);
    for (const std::string& stem : {own, named})
      if (files.empty() && xmls[stem] <= 1) files = others[stem];
    const auto is_named = [&](const fs::path& file) { return file.filename() == labels.image; };
    if (std::ranges::any_of(files, is_named) || (whole && !voc.images.count(name)))
      std::erase_if(files, std::not_fn(is_named));
    if (files.empty() && labels.usable) {
      source.coco.problems.push_back(
          {"label file without image",
           concat(xml, ": its image ", labels.image.empty() ? own : labels.image,
                  xmls[named] > 0 && named != own ? " has another label file" : " is missing")});
      continue;
    }
    if (files.empty()) files = {xml};  // for its problems
    used.insert(files.begin(), files.end());
    folders.insert(fs::path(files[0]).parent_path());
    if (files.size() > 1)
      add_shared_label(source, xml, files);
    else
      add_image(source, files[0], xml, labels);
  }
  std::vector<std::string> unlabelled;
  std::set<std::string> labelled;
  for (const auto& [_, xml] : voc.all) labelled.insert(lower_stem(xml));
  for (const auto& [name, files] : voc.images)
    if (!voc.has_lists && !used.count(files[0]) && !labelled.count(lower_stem(files[0])) &&
        folders.count(fs::path(files[0]).parent_path()))
      unlabelled.push_back(name);
  if (!unlabelled.empty())
    source.notes.push_back(concat("note: ", source.name, ": ", unlabelled.size(),
                                  " images have no XML file and are not used: ", listed(unlabelled, 20)));
  if (source.files.empty())
    fail(source.name, ": none of its ", part.size(),
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
    if (!has_extension(list, {".txt"}) || !std::ranges::count(kSplits, split)) continue;
    if (is_file(list))
      for_each_line(read_text(list.string()), [&](const std::string_view& line, int) {
        std::string name = name_of(std::string(line));  // or "NAME 1", "IMAGE XML"; NAME may have spaces
        if (!voc.all.count(name)) name = name_of(std::string(line.substr(0, line.find_first_of(" \t"))));
        known += voc.all.count(name);
        part[name] = voc.all.count(name) ? voc.all.at(name) : (xmls / (name + ".xml")).string();
      });
    if (part.empty() && needed && split != "test") empty = list.string();
    if (!part.empty() && (needed || 2 * known >= part.size())) voc.splits.insert({split_name(split), part});
  }
  check(voc.splits.empty() || empty.empty(), empty,
        " names no images; correct it, or delete it if there is no such split");
  if (!needed && !voc.splits.count("train") && !voc.splits.count("trainval")) voc.splits.clear();
  voc.has_lists = !voc.splits.empty();
}

// Sets the splits to those of the folders of the labels, else of their images.
static void split_by_folders(Voc& voc) {
  std::map<std::string, std::set<std::string>> of_images;
  for (const auto& [name, files] : voc.images)
    if (const std::string split = split_of_name(name); !split.empty())
      of_images[lower_stem(files[0])].insert(split);
  for (const auto& [name, xml] : voc.all) {
    const auto& of_image = of_images[lower_stem(xml)];
    std::string split = split_of_name(name);
    if (split.empty() && of_image.size() == 1) split = *of_image.begin();
    voc.splits[split.empty() ? "all" : split][name] = xml;
  }
  if (voc.splits.size() == 1 || !voc.splits.count("all")) return;
  const Part others = voc.splits.extract("all").mapped();
  if (!voc.splits.count("train") && !voc.splits.count("trainval"))
    voc.splits["train"] = others;
  else
    voc.note =
        concat("note: ", voc.root, ": ", others.size(),
               " XML files are in no folder of a split and not used, such as ", others.begin()->second);
}

// nested: a data set in a folder below.
static SplitReaders find_voc(const fs::path& root, bool nested) {
  const auto voc = std::make_shared<Voc>();
  const std::vector<std::string> files = files_under(root, {}, voc->skipped);
  if (std::ranges::none_of(files, [](const auto& file) { return has_extension(file, {".xml"}); })) return {};
  std::set<std::string> pictures, folders;  // names and paths of images, without extension; data sets
  for (const std::string& file : files)
    if (is_picture(file)) pictures.insert({lower_stem(file), fs::path(file).replace_extension().string()});
  int64_t yolo = 0;  // label files of YOLO less those of VOC
  for (const std::string& file : files) {
    const bool xml = has_extension(file, {".xml"}), matches = pictures.count(lower_stem(file)) > 0;
    const bool beside = pictures.count(fs::path(file).replace_extension().string()) > 0,
               txt = has_extension(file, {".txt"}) && (beside || file.find("/labels/") != std::string::npos);
    yolo += matches * (int(txt) - int(xml));
    if (!xml) continue;
    const VocPlace place = voc_place(file, root);
    const auto depth = std::distance(place.folder.begin(), place.folder.end());
    if (depth <= 2 && (depth > 0) == nested && (place.in_folder || (nested ? beside : matches)))
      folders.insert((depth == 0 ? root : root / place.folder).string());
  }
  if (folders.empty() || yolo > 0) return {};
  check(folders.size() <= 1, "--data ", root.string(),
        " has several Pascal VOC data sets; give one: ", listed({folders.begin(), folders.end()}));
  voc->root = *folders.begin();
  for (const std::string& file : files) {
    if (!file.starts_with(voc->root + "/")) continue;
    const VocPlace place = voc_place(file, voc->root);
    if (has_extension(file, {".xml"}) && place.folder.empty() &&
        (place.in_folder || pictures.count(lower_stem(file))))
      voc->all.emplace(place.name, file);
    const bool of_images = !place.of_labels || is_file(fs::path(file).replace_extension(".xml"));  // no mask
    if (is_picture(file) && of_images) voc->images[place.name].push_back(file);
  }
  if (voc->all.empty()) return {};
  const fs::path base = voc->root, lists = base / "ImageSets";
  for (const fs::path& place : {lists / "Main", lists, base / "annotations", base})
    if (!voc->has_lists) read_voc_lists(*voc, place, place.string().starts_with(lists.string()));
  if (!voc->has_lists) split_by_folders(*voc);
  SplitReaders splits;
  for (const auto& entry : voc->splits)
    splits[entry.first] = [voc, split = entry.first] { return read_voc_split(*voc, split); };
  return splits;
}

SplitReaders voc_splits(const fs::path& root) { return find_voc(root, /*nested=*/false); }
SplitReaders nested_voc_splits(const fs::path& root) { return find_voc(root, /*nested=*/true); }

}  // namespace yolox
