// SPDX-License-Identifier: Apache-2.0
// Tables of data sets: the files of each row, and parts of the text that describes what the readers make of
// them.
#pragma once
#include <sys/stat.h>

#include <opencv2/imgcodecs.hpp>

#include "common.hpp"
#include "formats.hpp"

namespace yolox::test {

using Names = std::vector<std::string>;
using Files = std::vector<std::pair<std::string, std::string>>;  // path, content

// A picture as the content of a file: "@64x48" is grey, "@64x48 100-900" has these values in 16 bits.
inline void write_picture(const std::string& path, const std::string& content) {
  int width = 0, height = 0, low = 0, high = 0;
  const bool deep = std::sscanf(content.c_str(), "@%dx%d %d-%d", &width, &height, &low, &high) == 4;
  cv::Mat image(height, width, deep ? CV_16UC1 : CV_8UC3, cv::Scalar::all(deep ? low : 99));
  if (deep) image(cv::Rect(0, 0, width / 2, height)).setTo(high);
  fs::create_directories(fs::path(path).parent_path());
  REQUIRE(cv::imwrite(path, image));
}

inline std::string replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// Writes files. In their content, "DIR" is the path of the folder. A path that ends with a slash is a folder.
inline void put(const TempDir& dir, const Files& files) {
  for (const auto& [path, content] : files) {
    const std::string text = replaced(content, "DIR", dir.path.string());
    if (path.ends_with('/'))
      fs::create_directories(dir / path);
    else if (text.starts_with("@"))
      write_picture(dir / path, text);
    else
      write_text(dir / path, text);
  }
}

inline std::string described(const std::string& name, const Source& s) {
  std::string text = concat(name, " ", s.name, ":");
  for (const std::string& file : s.files) text += " " + fs::path(file).lexically_normal().string();
  Names classes;
  for (const auto& category : s.coco.categories) classes.push_back(category.name);
  text += "\nclasses " + listed(classes, 99) + "\n";
  for (size_t i = 0; i < s.coco.annotations.size(); ++i) {
    const CocoAnnotation& a = s.coco.annotations[i];
    text += concat("box ", s.where(i), " class ", a.category_id, " [", a.x, " ", a.y, " ", a.w, " ", a.h, "]",
                   a.crowd ? " crowd\n" : "\n");
  }
  for (const auto& [kind, line] : s.coco.problems) text += kind + ": " + line + "\n";
  for (const std::string& note : s.notes) text += note + "\n";
  return text;
}

inline std::string described(const std::string& name, const Dataset& d) {
  std::string text =
      concat(name, " ", d.name, ": ", d.records.size(), " images\nclasses ", listed(d.classes, 99), "\n");
  for (const Record& r : d.records) {
    for (const Box& b : r.boxes)
      text += concat("box ", r.file, " class ", b.cls, " [", b.x1, " ", b.y1, " ", b.x2, " ", b.y2, "]\n");
    for (const Box& b : r.ignored)
      text += concat("region ", r.file, " [", b.x1, " ", b.y1, " ", b.x2, " ", b.y2, "]\n");
  }
  for (const std::string& line : d.problems->lines()) text += line + "\n";
  for (const std::string& note : d.notes) text += note + "\n";
  return text;
}

// Returns f() or, if it throws, "error: " and the message, with "DIR" in place of the folder.
template <class Function>
std::string text_of(const TempDir& dir, Function f) {
  std::string text;
  try {
    text = f();
  } catch (const std::runtime_error& e) {
    text = concat("error: ", e.what());
    CHECK_FALSE(has(text, "\n"));
  }
  return replaced(text, dir.path.string(), "DIR");
}

// Returns what is read from a data set, or the error. The evaluated split is the same without the train
// split. o.data and o.images: relative to the folder, or absolute.
inline std::string reading(const TempDir& dir, DataOptions o = {}) {
  o.data = o.data.empty() ? dir.path.string() : o.data[0] == '/' ? o.data : dir / o.data;
  if (const size_t comma = o.data.find(','); comma != std::string::npos && !fs::exists(o.data))
    o.data.insert(comma + 1, dir / "");
  if (!o.images.empty()) o.images = dir / o.images;
  return text_of(dir, [&] {
    const Sources s = read_sources(o);
    CHECK(read_sources(o, /*with_train=*/false).val.files == s.val.files);
    return described("train", s.train) + (s.same ? "one split" : described("val", s.val));
  });
}
// The same for what is trained on.
inline std::string loading(const TempDir& dir, DataOptions o = {}) {
  o.data = o.data.empty() ? dir.path.string() : dir / o.data;
  return text_of(dir, [&] {
    const Splits s = load_splits(o);
    return described("train", s.train) + (s.same ? "one split" : described("val", s.val));
  });
}

struct Row {
  std::string title;
  Files files;
  Names wanted;  // parts of the text; "!part" must not be in it
  DataOptions options = {};
};
inline void check_text(const std::string& text, const Names& wanted) {
  for (const std::string& part : wanted) {
    if (part[0] != '!')
      CHECK_HAS(text, part);
    else
      CHECK_MESSAGE(!has(text, part.substr(1)), "in: " << text << "\nunwanted: " << part.substr(1));
  }
}
inline void check_rows(const std::vector<Row>& rows,
                       std::string (*read)(const TempDir&, DataOptions) = reading) {
  for (const Row& row : rows) {
    INFO(row.title);
    TempDir dir;
    put(dir, row.files);
    check_text(read(dir, row.options), row.wanted);
  }
}

// Returns a COCO file. images: file name, and size if known: "a.jpg 64x48". boxes: image, category and box:
// "1 1 [1,2,10,12]", and "crowd" if it is one. The ids of images and categories are 1, 2, ...
inline std::string coco(const Names& images, const Names& boxes = {"1 1 [1,2,10,12]"},
                        const Names& classes = {"a"}) {
  CocoDataset data;
  for (const std::string& text : images) {
    CocoImage image{int64_t(data.images.size()) + 1, text};
    const size_t blank = std::min(text.rfind(' '), text.size() - 1);
    if (std::sscanf(&text[blank], " %dx%d", &image.width, &image.height) == 2) image.file_name.resize(blank);
    data.images.push_back(image);
  }
  for (const std::string& name : classes)
    data.categories.push_back({int64_t(data.categories.size()) + 1, name});
  for (const std::string& text : boxes) {
    CocoAnnotation a{};
    a.id = int64_t(data.annotations.size()) + 1;
    REQUIRE(std::sscanf(text.c_str(), "%ld %ld [%lf,%lf,%lf,%lf]", &a.image_id, &a.category_id, &a.x, &a.y,
                        &a.w, &a.h) == 6);
    a.area = a.w * a.h;
    a.crowd = has(text, "crowd");
    data.annotations.push_back(a);
  }
  return coco_text(data);
}

// Returns a VOC object. box: x1 y1 x2 y2.
inline std::string object(const std::string& name, const std::string& box = "1 2 30 50",
                          const std::string& more = "") {
  std::istringstream numbers(box);
  std::string text = "<object><name>" + name + "</name>" + more + "<bndbox>", number;
  for (const std::string side : {"xmin", "ymin", "xmax", "ymax"})
    if (numbers >> number) text += "<" + side + ">" + number + "</" + side + ">";
  return text + "</bndbox></object>";
}
inline std::string voc(const std::string& inside) { return "<annotation>\n" + inside + "\n</annotation>\n"; }

// Returns the rows of a table of data sets. A line is "title | files | part | part ..."; a line that begins
// with a blank continues the one before. Files are separated by blanks: PATH, or PATH(CONTENT), with images
// in a .json file (or IMAGES;BOX;BOX ... for coco(), with two classes), names of objects in an .xml file,
// and text in others, in which ";" is the end of a line, and "#1" a label of class 1. --split=NAME,
// --data=NAME and --images=NAME are options.
inline std::vector<Row> rows(const std::string& table) {
  std::vector<Row> rows;
  std::istringstream lines(replaced(table, "\n ", " "));
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    Names parts;
    for (size_t at = 0, end; at <= line.size(); at = end + 3) {
      end = std::min(line.find(" | ", at), line.size());
      parts.push_back(replaced(line.substr(at, end - at), "\\n", "\n"));
    }
    REQUIRE(parts.size() > 2);
    Row row{parts[0], {}, {parts.begin() + 2, parts.end()}};
    int depth = 0;
    std::string word;
    for (const char c : parts[1] + " ") {
      depth += (c == '(') - (c == ')');
      if (c != ' ' || depth > 0) word += c;
      if (c != ' ' || depth > 0 || word.empty()) continue;
      const size_t open = std::min(word.find('('), word.size()), equals = word.find('=');
      const std::string path = word.substr(0, open);
      std::string content = open < word.size() ? word.substr(open + 1, word.size() - open - 2) : path, text;
      if (word.starts_with("--")) {
        std::string& option = word.starts_with("--data")    ? row.options.data
                              : word.starts_with("--split") ? row.options.split
                                                            : row.options.images;
        option = word.substr(equals + 1);
      } else if (open < word.size() && path.ends_with(".json") && !std::strchr("{[", content[0])) {
        const Names lists = split_list(content, ';'), boxes(lists.begin() + 1, lists.end());
        const bool with_boxes = has(content, ";");
        row.files.emplace_back(
            path, with_boxes ? coco(split_list(lists[0]), boxes, {"a", "b"}) : coco(split_list(content)));
      } else if (open < word.size() && path.ends_with(".xml")) {
        for (const std::string& name : split_list(content)) text += object(name);
        row.files.emplace_back(path, voc(text));
      } else {
        for (const char cls : {'0', '1', '2'})
          content = replaced(content, std::string("#") + cls, cls + std::string(" 0.5 0.5 0.2 0.4"));
        row.files.emplace_back(path, replaced(content, ";", "\n"));
      }
      word.clear();
    }
    rows.push_back(row);
  }
  return rows;
}

inline Files files(const std::string& words) { return rows("- | " + words + " | -")[0].files; }

}  // namespace yolox::test
