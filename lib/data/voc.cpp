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
  labels.image = labels.image.substr(labels.image.find_last_of("/\\") + 1);  // npos + 1 is 0
  for (const pugi::xml_node& object : root.children("object")) {
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

// Files of a VOC data set.
struct Voc {
  std::string root, images;                                          // folders
  std::map<std::string, std::map<std::string, std::string>> splits;  // split -> image name -> XML file
  std::map<std::string, Labels> labels;  // contents of the XML files of all splits, read with the first split
  std::map<std::string, int64_t> classes;  // classes of all splits, so that ids do not depend on the split
};

}  // namespace

// Returns files under `folder` by their path relative to `folder`, without the extension.
static std::map<std::string, std::vector<std::string>> files_by_stem(const fs::path& folder,
                                                                     const std::vector<std::string>& files) {
  const size_t start = folder.string().size() + 1;
  std::map<std::string, std::vector<std::string>> stems;
  for (const std::string& file : files) stems[file.substr(start, file.rfind('.') - start)].push_back(file);
  return stems;
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
  source.name = concat(voc.root, " (", split, ")");
  for (const auto& [name, id] : voc.classes) source.coco.categories.push_back({id, name});
  const auto images = files_by_stem(voc.images, labelled_images(voc.images, source.skipped));
  for (const auto& [name, xml] : voc.splits.at(split)) {
    Labels& labels = voc.labels[xml];
    for (size_t i = 0; i < labels.boxes.size(); ++i)
      labels.boxes[i].category_id = voc.classes[labels.names[i]];
    // Prefer the image named as the XML file, because <filename> is often wrong after a renaming.
    std::vector<std::string> files{voc.images + "/" + (labels.image.empty() ? name + ".jpg" : labels.image)};
    if (images.count(name)) files = images.at(name);
    const std::string owner = fs::path(labels.image).stem().string();
    if (!images.count(name) && owner != name && voc.splits.at(split).count(owner)) {
      source.coco.problems.push_back(
          {"label file without image", concat(xml, ": its image ", labels.image, " has another label file")});
      continue;
    }
    const auto named =
        std::ranges::find_if(files, [&](const fs::path& f) { return f.filename() == labels.image; });
    if (files.size() > 1 && named == files.end())
      add_shared_label(source, xml, files);
    else
      add_image(source, named == files.end() ? files[0] : *named, xml, labels);
  }
  std::vector<std::string> unlabelled;
  for (const auto& [name, files] : images)
    if (split == "all" && !voc.splits.at(split).count(name)) unlabelled.push_back(name);
  if (!unlabelled.empty())
    source.notes.push_back(concat("note: ", source.name, ": ", unlabelled.size(),
                                  " images have no XML file and are not used: ", listed(unlabelled, 20)));
  if (source.files.empty())
    fail(source.name, ": none of its ", voc.splits.at(split).size(),
         " annotation files can be used; correct them: ", source.coco.problems[0].second);
  return source;
}

SplitReaders voc_splits(const fs::path& root) {
  const auto voc = std::make_shared<Voc>();
  voc->root = root.string();
  using Part = std::map<std::string, std::string>;  // image name -> XML file
  SplitReaders splits;
  const fs::path lists = root / "ImageSets" / "Main";
  listing(lists);  // throws if it cannot be read
  for (const fs::path& xmls : {root / "Annotations", root / "annotations"})
    for (const fs::path& images : {root / "JPEGImages", root / "images"}) {
      if (!voc->splits.empty() || !is_folder(xmls) || !is_folder(images)) continue;
      voc->images = images.string();
      Part all;
      std::vector<std::string> ignored;
      for (const auto& [name, files] : files_by_stem(xmls, files_under(xmls, {".xml"}, ignored)))
        all[name] = files[0];
      for (const auto& split : kSplits) {
        const fs::path list = lists / (split + ".txt");
        Part part;
        if (is_file(list))
          for_each_line(read_text(list.string()), [&](std::string_view line, int) {
            std::string name(line);  // "NAME" or "NAME 1"; NAME may contain spaces
            if (!all.count(name)) name = name.substr(0, name.find_first_of(" \t"));
            if (!all.count(name) && has_extension(name, kImages)) name.erase(name.rfind('.'));
            part[name] = all.count(name) ? all.at(name) : (xmls / (name + ".xml")).string();
          });
        if (!part.empty())
          voc->splits.insert({split_name(split), part});
        else if (split != "test" && (is_file(list) || fs::is_symlink(list)))
          splits[split_name(split)] = [list]() -> Source {
            fail(list.string(), " names no images; correct it, or delete it if there is no such split");
          };
      }
      if (voc->splits.empty() && !all.empty()) voc->splits["all"] = all;
    }
  // XML files beside the images: in the folders of splits, or in one folder.
  std::vector<std::string> folders = kSplits;
  if (voc->splits.empty()) voc->images = voc->root;
  folders.emplace_back();
  for (const std::string& split : folders) {
    if (voc->images != voc->root || (split.empty() && !voc->splits.empty())) continue;
    Part part;
    std::set<std::string> images;
    for (const fs::path& path : listing(root / split)) {
      const std::string name = (fs::path(split) / path.stem()).string();
      if (has_extension(path, kImages)) images.insert(name);
      if (has_extension(path, {".xml"})) part[name] = path.string();
    }
    const bool beside = std::ranges::any_of(part, [&](const auto& e) { return images.count(e.first) > 0; });
    if (!part.empty() && (beside || !split.empty()))
      voc->splits.insert({split.empty() ? "all" : split_name(split), part});
  }
  if (voc->splits.empty() || voc->splits.count("all")) splits.clear();
  for (const auto& entry : voc->splits)
    splits[entry.first] = [voc, split = entry.first] { return read_voc_split(*voc, split); };
  return splits;
}

SplitReaders nested_voc_splits(const fs::path& root) {
  std::vector<std::string> nested;
  for (const fs::path& parent : {root, root / "VOCdevkit"})
    for (const auto& folder : listing(parent, /*folders_only=*/true))
      if (!voc_splits(folder).empty()) nested.push_back(folder.string());
  check(nested.size() <= 1, "--data ", root.string(),
        " has several Pascal VOC data sets; give one: ", listed(nested));
  return nested.empty() ? SplitReaders() : voc_splits(nested[0]);
}

}  // namespace yolox
