// SPDX-License-Identifier: Apache-2.0
#include <sys/stat.h>

#include "base/printable.hpp"
#include "checkpoint/checkpoint.hpp"
#include "common.hpp"
#include "formats.hpp"
#include "run/log.hpp"

using namespace yolox;

namespace {

using Names = std::vector<std::string>;

void put_all(const TempDir& dir, const Names& files) {
  for (const auto& file : files) write_text(dir / file);
}

// The evaluated split alone, as ./eval reads it.
Source read_val_source(const std::string& data, const std::string& split = "", const std::string& images = "",
                       double val_fraction = 0) {
  return read_sources({data, split, val_fraction, images}, /*with_train=*/false).val;
}

// Returns the error message, or "". A message is one line, unless it lists paths or the text of a file.
std::string error_of(const std::string& data, const std::string& split = "") {
  try {
    read_sources({data, split});
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    if (!has(text, "Looked for") && !has(text, "names:")) CHECK(!has(text, "\n"));
    return text;
  }
  return "";
}

Names names_of(const Source& source) {
  Names names;
  for (const auto& category : source.coco.categories) names.push_back(category.name);
  return names;
}
std::string problems_of(const Source& source) {
  std::string text;
  for (const auto& [kind, line] : source.problems) text += kind + ": " + line + "\n";
  return text;
}
std::vector<double> box(const CocoAnnotation& a) { return {a.x, a.y, a.w, a.h}; }
// Returns the paths relative to the folder.
Names below(const TempDir& dir, const Names& files) {
  Names names;
  for (const auto& file : files)
    names.push_back(fs::path(file).lexically_normal().lexically_relative(dir.path).string());
  return names;
}

// Returns a COCO file with one image and one box.
std::string small_json(const std::string& file) {
  return R"({"images": [{"id": 3, "file_name": ")" + file +
         R"("}], "categories": [{"id": 1, "name": "a"}],
          "annotations": [{"id": 7, "image_id": 3, "category_id": 1, "bbox": [1, 2, 10, 12]}]})";
}
std::string object(const std::string& name, const std::string& box, const std::string& more = "") {
  return "<object><name>" + name + "</name>" + more + "<bndbox>" + box + "</bndbox></object>";
}
std::string corners(const std::string& x1, const std::string& y1, const std::string& x2,
                    const std::string& y2) {
  return "<xmin>" + x1 + "</xmin><ymin>" + y1 + "</ymin><xmax>" + x2 + "</xmax><ymax>" + y2 + "</ymax>";
}
std::string voc(const std::string& inside) { return "<annotation>\n" + inside + "\n</annotation>\n"; }
// Writes an XML file and an image for each name, with one object of class `cls`.
void put_voc(const std::string& folder, const Names& names, const std::string& cls = "cat") {
  for (const auto& name : names) {
    write_text(folder + "/Annotations/" + name + ".xml", voc(object(cls, corners("1", "2", "3", "5"))));
    write_text(folder + "/JPEGImages/" + name + ".jpg");
  }
}

}  // namespace

// ---- COCO

TEST_CASE("formats: COCO data sets are found in the common folder layouts") {
  struct Layout {
    std::string train_json, val_json, train_image, val_image;
  };
  for (const Layout& l : {
           Layout{"annotations/instances_train2017.json", "annotations/instances_val2017.json",
                  "train2017/a.png", "val2017/b.png"},
           Layout{"annotations/train.json", "annotations/val.json", "images/train/a.png", "images/val/b.png"},
           Layout{"annotations/train.json", "annotations/val.json", "images/a.png", "images/b.png"},
           Layout{"train.json", "val.json", "a.png", "b.png"},
           Layout{"annotations/my_train.json", "annotations/my_val.json", "photos/a.png", "other/b.png"},
           Layout{"annotations/Train.JSON", "annotations/test.json", "train/images/a.png", "data/b.png"},
           Layout{"train/_annotations.coco.json", "valid/_annotations.coco.json", "train/a.png",
                  "valid/b.png"},
           Layout{"train/labels.json", "test/labels.json", "train/data/a.png", "test/data/b.png"},
           Layout{"annotations/trains_train.json", "annotations/trains_validation.json", "images/a.png",
                  "images/b.png"},
           Layout{"annotations/voc_trainval.json", "annotations/voc_test.json", "JPEGImages/a.png",
                  "JPEGImages/b.png"},
       }) {
    INFO(l.train_json << ", " << l.train_image);
    TempDir dir;
    write_text(dir / l.train_json, small_json("a.png"));
    write_text(dir / l.val_json, small_json("b.png"));
    put_all(dir, {l.train_image, l.val_image});
    for (const std::string end : {"", "/"}) {
      const Sources s = read_sources({dir.path.string() + end});
      CHECK_FALSE(s.same);
      CHECK_FALSE(s.train.relative);
      CHECK(fs::equivalent(s.train.files.at(0), dir / l.train_image));
      CHECK(fs::equivalent(s.val.files.at(0), dir / l.val_image));
      CHECK(below(dir, {s.train.name, s.val.name}) == Names{l.train_json, l.val_json});
      CHECK(s.train.problems.empty());
      const Source val = read_val_source(dir.path.string() + end);
      CHECK(val.name == s.val.name);
      CHECK(val.files == s.val.files);
    }
  }
}

TEST_CASE("formats: of images with equal names, the one in the folder of the split is used") {
  TempDir dir;
  for (const std::string split : {"train", "val"})
    write_text(dir / ("annotations/instances_" + split + ".json"), small_json("1.jpg"));
  SUBCASE("by name") { put_all(dir, {"train/1.jpg", "val/1.jpg", "images/1.jpg"}); }
  SUBCASE("by name, in images") { put_all(dir, {"images/train/1.jpg", "images/val/1.jpg", "images/1.jpg"}); }
  SUBCASE("by the first letters") { put_all(dir, {"train2017/1.jpg", "val2017/1.jpg"}); }
  SUBCASE("in images") { put_all(dir, {"images/training/1.jpg", "images/valid/1.jpg"}); }
  SUBCASE("one more level") { put_all(dir, {"train/images/1.jpg", "valid/images/1.jpg"}); }
  const Sources s = read_sources({dir.path.string()});
  CHECK(has(s.train.files.at(0), "train"));
  CHECK(has(s.val.files.at(0), "val"));
  write_text(dir / "annotations/my_dev.json", small_json("2.jpg"));
  put_all(dir, {"all/2.jpg", "dev/2.jpg"});
  CHECK(below(dir, read_sources({dir / "annotations/my_dev.json"}).val.files) == Names{"dev/2.jpg"});
}

TEST_CASE("formats: --data accepts one COCO file, or one for training and one for validation") {
  TempDir dir;
  write_text(dir / "a/first.json", small_json("1.jpg"));
  write_text(dir / "b/second.json", small_json("2.jpg"));
  put_all(dir, {"a/1.jpg", "b/2.jpg"});
  const std::string both = dir / "a/first.json" + "," + (dir / "b/second.json");
  const Sources s = read_sources({both});
  CHECK(below(dir, {s.train.name, s.val.name}) == Names{"a/first.json", "b/second.json"});
  CHECK_FALSE(s.same);
  CHECK(read_val_source(both).name == s.val.name);
  CHECK(read_sources({both, "train"}).same);
  CHECK(read_val_source(both, "train").name == s.train.name);
  CHECK_HAS(error_of(both, "test"), "no split \"test\"; it has train, val");
  CHECK(read_sources({dir / "a/first.json" + "," + (dir / "a/first.json")}).same);
  CHECK_HAS(error_of(dir / "a/first.json,nowhere.json"), "nowhere.json is no file");
  write_text(dir / "a/x,y.json", small_json("1.jpg"));
  for (const std::string& given : {dir / "b", dir / "b/second.json", dir / "a/x,y.json"}) {
    const Sources one = read_sources({given});
    CHECK(one.same);
    CHECK(one.val.files == one.train.files);
    CHECK(one.val.coco.annotations.size() == 1);
    CHECK(read_val_source(given).files == one.train.files);
  }
}

TEST_CASE("formats: the COCO files of a folder are chosen by split; an ambiguous split is an error") {
  TempDir dir;
  write_text(dir / "1.jpg");
  const auto put_json = [&](const Names& files) {
    for (const auto& file : files) write_text(dir / file, small_json("1.jpg"));
  };
  const auto read = [&](const std::string& split = "") {
    const Sources s = read_sources({dir.path.string(), split});
    return below(dir, {s.train.name, s.val.name});
  };
  put_json({"annotations/instances_train.json", "annotations/._instances_train.json", "x.json"});
  write_text(dir / "annotations/captions_train.json", "{}");
  write_text(dir / "annotations/image_info_test-dev.json", "{}");
  CHECK(read() == Names{"annotations/instances_train.json", "annotations/instances_train.json"});
  CHECK_HAS(error_of(dir.path.string(), "test"), "no split \"test\"; it has train");
  put_json({"annotations/instances_test.json"});
  CHECK(read() == Names{"annotations/instances_train.json", "annotations/instances_test.json"});
  put_json({"annotations/instances_val.json"});
  CHECK(read() == Names{"annotations/instances_train.json", "annotations/instances_val.json"});
  CHECK(read("test") == Names{"annotations/instances_train.json", "annotations/instances_test.json"});
  CHECK(read("valid").at(1) == "annotations/instances_val.json");
  CHECK_HAS(error_of(dir.path.string(), "dev"), "\"dev\"; it has test, train, val");
  write_text(dir / "annotations/val_small.json", small_json("1.jpg"));
  CHECK_HAS(error_of(dir.path.string()), "several files for 'val'");
  CHECK(read("test").at(1) == "annotations/instances_test.json");  // the ambiguous split is not needed

  TempDir other;
  write_text(other / "1.jpg");
  write_text(other / "val.json", small_json("1.jpg"));
  CHECK(read_sources({other.path.string()}).same);
  fs::rename(other / "val.json", other / "one.json");
  write_text(other / "two.json", small_json("1.jpg"));
  CHECK_HAS(error_of(other.path.string()), "several JSON files");
  CHECK_HAS(error_of(other.path.string()), "one, two");
  CHECK(read_val_source(other.path.string(), "two").name == other / "two.json");

  TempDir people;  // only files of another task
  write_text(people / "annotations/person_keypoints_train2017.json", small_json("1.jpg"));
  write_text(people / "annotations/person_keypoints_val2017.json", small_json("2.jpg"));
  put_all(people, {"images/1.jpg", "images/2.jpg"});
  CHECK_FALSE(read_sources({people.path.string()}).same);
}

TEST_CASE("formats: file_name in COCO files may be absolute or relative to several folders") {
  struct Case {
    std::string json, file_name, image;
  };
  for (const Case& c : {Case{"annotations/x.json", "sub/deep/a.jpg", "images/sub/deep/a.jpg"},
                        Case{"annotations/x.json", "images/a.jpg", "images/a.jpg"},
                        Case{"images/x.json", "images/a.jpg", "images/a.jpg"},
                        Case{"set/x.json", "set/images/a.jpg", "set/images/a.jpg"},
                        Case{"annotations/x.json", "../images/a.jpg", "images/a.jpg"},
                        Case{"annotations/x.json", R"(images\\sub\\a.jpg)", "images/sub/a.jpg"},
                        Case{"annotations/x.json", "ABSOLUTE/elsewhere/a.jpg", "elsewhere/a.jpg"}}) {
    INFO(c.json << " " << c.file_name);
    TempDir dir;
    std::string name = c.file_name;
    if (has(name, "ABSOLUTE")) name.replace(0, 8, dir.path.string());
    write_text(dir / c.json, small_json(name));
    write_text(dir / c.image);
    CHECK(fs::equivalent(read_sources({dir / c.json}).train.files.at(0), dir / c.image));
  }
}

TEST_CASE("formats: COCO files without images, categories or image files are errors") {
  TempDir dir;
  write_text(dir / "a/annotations/x.json", small_json("a.png"));
  const std::string where = error_of(dir / "a");
  CHECK_HAS(where, "x.json: none of its images");
  CHECK_HAS(where, dir / "a/images/a.png");
  write_text(dir / "b/annotations/x.json", R"({"images": [], "categories": [], "annotations": []})");
  CHECK_HAS(error_of(dir / "b"), "x.json lists no images");
  write_text(dir / "c/annotations/x.json", R"({"images": [{"id": 1}], "categories": [], "annotations": []})");
  CHECK_HAS(error_of(dir / "c"), "x.json lists no categories");
  write_text(dir / "d/annotations/x.json");
  CHECK_HAS(error_of(dir / "d"), "x.json: not valid JSON");
  write_text(dir / "e/x.json", small_json(std::string(5000, 'a')));  // longer than any path
  CHECK_HAS(error_of(dir / "e"), "none of its images");
  write_text(dir / "b.png");
  write_text(dir / "g/x.json", small_json("b.png"));  // b.png lies outside of the data set
  CHECK_HAS(error_of(dir / "g"), "none of its images");
  write_text(dir / "f/x.json", small_json(""));  // a folder is no image
  CHECK_HAS(error_of(dir / "f"), "none of its images");
}

TEST_CASE("formats: JSON files beside a COCO data set that are no COCO files are ignored") {
  TempDir dir;
  put_all(dir, {"train/a.png", "val/b.png"});
  const Names others = {R"({"categories": [{"id": 0, "name": "cat"}], "info": {"year": 2024}})",
                        R"({"images": 12, "annotations": 90})", R"([{"id": 1}])", R"({"1": "cat"})", ""};
  for (const std::string folder : {"annotations/", ""}) {
    fs::remove_all(dir / "annotations");
    for (size_t i = 0; i < others.size(); ++i)
      write_text(dir / concat(folder, "stats_train", i, ".json"), others[i]);
    write_text(dir / (folder + "train.json"), small_json("a.png"));
    write_text(dir / (folder + "val.json"), small_json("b.png"));
    CHECK(below(dir, read_sources({dir.path.string()}).val.files) == Names{"val/b.png"});
  }
}

TEST_CASE("formats: images of COCO are found by the end of a file_name that was written on another machine") {
  for (const std::string name : {R"(..\\..\\upload\\1\\x.jpg)", "images/1/x.jpg", "/mnt/set/1/x.jpg",
                                 R"(C:\\sets\\1\\x.jpg)", "https://bucket.example/a/1/x.jpg"}) {
    INFO(name);
    TempDir dir;
    write_text(dir / "annotations/train.json", small_json(name));
    put_all(dir, {"pictures/1/x.jpg", "pictures/2/x.jpg"});
    const Source source = read_sources({dir.path.string()}).train;
    CHECK(below(dir, source.files) == Names{"pictures/1/x.jpg"});
    REQUIRE(source.notes.size() == 1);
    CHECK_HAS(source.notes[0], "1 of 1 images were found under");
    // With --images, too. A name that two files have is not guessed.
    CHECK(below(dir, read_val_source(dir / "annotations/train.json", "", dir / "pictures").files) ==
          Names{"pictures/1/x.jpg"});
    fs::rename(dir / "pictures/1", dir / "pictures/3");
    CHECK_HAS(error_of(dir.path.string()), "none of its images was found");
    fs::remove(dir / "pictures/2/x.jpg");
    CHECK(below(dir, read_sources({dir.path.string()}).train.files) == Names{"pictures/3/x.jpg"});
  }
}

// ---- Pascal VOC

TEST_CASE("formats: Pascal VOC objects are read with class, box and line number") {
  TempDir dir;
  write_text(dir / "Annotations/b.xml", R"(<?xml version="1.0"?>
<!DOCTYPE annotation [<!ENTITY a "cat">]>
<annotation verified="yes">
  <filename>old name.jpg</filename>
  <size><width>640</width><height>480</height><depth>3</depth></size>
  <object>
    <name> dog &amp; co
    </name>
    <difficult>1</difficult>
    <bndbox><xmax>30.5</xmax><xmin> 10.25 </xmin><ymin>-2</ymin><ymax>1e2</ymax></bndbox>
    <part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>
  </object>
  <object><name>cat</name><difficult>0</difficult><bndbox><xmin>5</xmin><ymin>6</ymin><xmax>5</xmax><ymax>4</ymax></bndbox></object>
</annotation>)");
  write_text(dir / "Annotations/a.xml",
             "\xEF\xBB\xBF" + voc("<size><width>0</width><height>x</height></size>\r\n" +
                                  object("Cat", corners("1", "2", "3", "4"))));
  write_text(dir / "Annotations/c.xml", voc("<filename>C:\\photos\\c.jpg</filename>"));
  write_text(dir / "Annotations/d e.xml", voc("<filename>other.jpg</filename>"));
  write_text(dir / "Annotations/sub/f.xml", voc("<size><width>1e12</width><height>-5</height></size>"));
  put_all(dir, {"JPEGImages/b.JPG", "JPEGImages/old name.jpg", "JPEGImages/a.PnG", "JPEGImages/other.jpg",
                "JPEGImages/sub/f.webp"});
  const Sources s = read_sources({dir.path.string()});
  CHECK(s.same);
  const Source& source = s.train;
  CHECK(source.name == dir.path.string() + " (all)");
  CHECK_FALSE(source.relative);
  CHECK(problems_of(source) == "");
  CHECK(names_of(source) == Names{"Cat", "cat", "dog & co"});
  // The name of the XML file is preferred to <filename>. c has no image; its path is a guess.
  CHECK(below(dir, source.files) == Names{"JPEGImages/a.PnG", "JPEGImages/b.JPG", "JPEGImages/c.jpg",
                                          "JPEGImages/other.jpg", "JPEGImages/sub/f.webp"});
  CHECK(below(dir, source.label_files) == Names{"Annotations/a.xml", "Annotations/b.xml", "Annotations/c.xml",
                                                "Annotations/d e.xml", "Annotations/sub/f.xml"});
  std::vector<int64_t> ids, widths, heights;
  for (const auto& image : source.coco.images) {
    ids.push_back(image.id);
    widths.push_back(image.width);
    heights.push_back(image.height);
  }
  CHECK(ids == std::vector<int64_t>{1, 2, 3, 4, 5});
  CHECK(widths == std::vector<int64_t>{0, 640, 0, 0, 0});
  CHECK(heights == std::vector<int64_t>{0, 480, 0, 0, 0});
  REQUIRE(source.coco.annotations.size() == 3);
  const CocoAnnotation &cat = source.coco.annotations[0], &dog = source.coco.annotations[1],
                       &empty = source.coco.annotations[2];
  CHECK((cat.image_id == 1 && cat.category_id == 0 && cat.id == 1 && cat.area == 4 && !cat.crowd));
  CHECK((dog.image_id == 2 && dog.category_id == 2 && dog.id == 2 && dog.crowd));
  CHECK(box(cat) == std::vector<double>{1, 2, 2, 2});
  CHECK(box(dog) == std::vector<double>{10.25, -2, 20.25, 102});
  CHECK(box(empty) == std::vector<double>{5, 6, 0, -2});  // a later check refuses the box
  CHECK_FALSE(empty.crowd);
  CHECK(source.where(0) == dir / "Annotations/a.xml:3");
  CHECK(source.where(1) == dir / "Annotations/b.xml:6");
  CHECK(source.where(2) == dir / "Annotations/b.xml:13");
}

TEST_CASE("formats: Pascal VOC splits are read from ImageSets/Main; the classes are those of all splits") {
  struct Case {
    Names lists;
    std::string split, train, val;
  };
  for (const Case& c : {
           Case{{"train", "val", "test", "trainval"}, "", "train", "val"},
           Case{{"train", "val", "test", "trainval"}, "test", "train", "test"},
           Case{{"train", "val", "test", "trainval"}, "trainval", "train", "trainval"},
           Case{{"train", "valid", "test"}, "", "train", "val"},
           Case{{"train", "valid"}, "valid", "train", "val"},
           Case{{"train", "valid"}, "val", "train", "val"},
           Case{{"train", "test"}, "", "train", "test"},
           Case{{"trainval", "test"}, "", "trainval", "test"},
           Case{{"trainval", "val", "test"}, "", "trainval", "test"},  // trainval contains val
           Case{{"trainval", "val"}, "", "trainval", "val"},
           Case{{"train"}, "", "train", "train"},
           Case{{"val"}, "", "val", "val"},
           Case{{"cat_train", "cat_val", "trains"}, "", "all", "all"},
       }) {
    INFO(c.lists.at(0) << " and " << c.lists.size() - 1 << " more, split " << c.split);
    TempDir dir;
    put_voc(dir.path.string(), {"a", "unlisted"});
    for (const auto& list : c.lists) {
      const std::string cls = list == "valid" ? "val" : list;
      put_voc(dir.path.string(), {"img_" + cls}, cls);
      write_text(dir / ("ImageSets/Main/" + list + ".txt"),
                 "\xEF\xBB\xBF"
                 "img_" +
                     cls + "  -1\r\n\r\na\r\n");
    }
    write_text(dir / "ImageSets/Main/cat_train.txt", "a -1\n");
    const Sources s = read_sources({dir.path.string(), c.split});
    CHECK(s.train.name == concat(dir.path.string(), " (", c.train, ")"));
    CHECK(s.val.name == concat(dir.path.string(), " (", c.val, ")"));
    CHECK(s.same == (c.train == c.val));
    CHECK(s.train.problems.empty());
    if (c.val != "all")
      CHECK(below(dir, s.val.files) == Names{"JPEGImages/a.jpg", "JPEGImages/img_" + c.val + ".jpg"});
    else
      CHECK(s.val.files.size() == 5);
    // Classes do not depend on which splits are read.
    const Source val = read_val_source(dir.path.string(), c.split);
    CHECK(val.files == s.val.files);
    CHECK(names_of(val) == names_of(s.train));
    CHECK(names_of(s.val) == names_of(s.train));
    CHECK(names_of(val).size() == c.lists.size() + 1);
  }
  TempDir dir;
  put_voc(dir.path.string(), {"a b", "a"});
  write_text(dir / "ImageSets/Main/train.txt", "a b\n");
  write_text(dir / "ImageSets/Main/val.txt", "\n");  // an empty list is ignored
  CHECK(below(dir, read_sources({dir.path.string()}).train.files) == Names{"JPEGImages/a b.jpg"});
  CHECK(read_sources({dir.path.string()}).same);
  CHECK_HAS(error_of(dir.path.string(), "test"), "no split \"test\"; it has train");
}

TEST_CASE("formats: Pascal VOC data sets are found in the common folder layouts") {
  TempDir dir;
  for (const std::string root : {"", "BCCD", "VOC2007", "VOCdevkit/VOC2007"}) {
    const std::string top =
        dir / ("case_" + fs::path(root).filename().string() + std::to_string(root.size()));
    put_voc(top + "/" + root, {"a"});
    const Source source = read_val_source(top);
    CHECK(source.files.size() == 1);
    CHECK(fs::is_regular_file(source.files[0]));
  }
  put_voc(dir / "two/VOCdevkit/VOC2007", {"a"});
  put_voc(dir / "two/VOCdevkit/VOC2012", {"a"});
  CHECK_HAS(error_of(dir / "two"), dir / "two/VOCdevkit/VOC2007" + ", " + (dir / "two/VOCdevkit/VOC2012"));
  CHECK_HAS(error_of(dir / "two"), "give one");
  CHECK(read_val_source(dir / "two/VOCdevkit/VOC2012").files.size() == 1);

  write_text(dir / "kaggle/annotations/a.xml", voc(object("sign", corners("1", "2", "3", "4"))));
  write_text(dir / "kaggle/images/a.png");
  CHECK(below(dir, read_val_source(dir / "kaggle").files) == Names{"kaggle/images/a.png"});

  for (const std::string split : {"train", "valid", "test"}) {  // Roboflow's export
    write_text(dir / ("roboflow/" + split + "/a.rf.1.xml"), voc(object(split, corners("1", "2", "3", "4"))));
    write_text(dir / ("roboflow/" + split + "/a.rf.1.png"));
  }
  const Sources s = read_sources({dir / "roboflow/"});
  CHECK(below(dir, s.train.files) == Names{"roboflow/train/a.rf.1.png"});
  CHECK(below(dir, s.val.files) == Names{"roboflow/valid/a.rf.1.png"});
  CHECK(names_of(s.val) == Names{"test", "train", "valid"});
  CHECK(s.val.coco.annotations.at(0).category_id == 2);
  CHECK(read_val_source(dir / "roboflow", "test").coco.annotations.at(0).category_id == 0);
}

TEST_CASE("formats: unreadable Pascal VOC files and objects are skipped and reported with their line") {
  TempDir dir;
  const std::string good = object("cat", corners("1", "2", "3", "4"));
  put_voc(dir.path.string(), {"good"});
  write_text(dir / "Annotations/broken.xml", "<annotation>\n<object>\n<name>cat</nam\n</object>");
  write_text(dir / "Annotations/cut.xml", voc(good).substr(0, 40));
  write_text(dir / "Annotations/empty.xml");
  write_text(dir / "Annotations/html.xml", "<html><body>Not Found</body></html>");
  write_text(dir / "Annotations/binary.xml", std::string("\x00\xFF\x00<<<>\x01", 8));
  fs::create_directories(dir / "Annotations/folder.xml");
  write_text(
      dir / "Annotations/objects.xml",
      voc("<object><name>cat</name></object>\n" + good + "\n" + object("cat", corners("one", "2", "3", "4")) +
          "\n" + object("cat", corners("1", "2", "nan", "4")) + "\n" +
          object("cat", corners("1", "2", "3", "1e999")) + "\n" +
          object("cat", corners("1", "2", "3", "0x10")) + "\n" + object("", corners("1", "2", "3", "4")) +
          "\n" + object("cat", "<xmin>1</xmin>") + "\n" +
          object("cat\ndog", corners("1\n2", "2", "3", "4"))));
  write_text(
      dir / "Annotations/deep.xml", "<annotation>" + [] {
        std::string deep;
        for (int i = 0; i < 200000; ++i) deep += "<object>";
        return deep;
      }());
  write_text(dir / "Annotations/bomb.xml",
             "<!DOCTYPE a [<!ENTITY b \"aaaaaaaaaa\"><!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;\">"
             "<!ENTITY d \"&c;&c;&c;&c;&c;&c;&c;&c;&c;&c;\"><!ENTITY x SYSTEM \"file:///etc/passwd\">]>" +
                 voc(object("&d;&x;", corners("1", "2", "3", "4"))));
  write_text(dir / "ImageSets/Main/train.txt",
             "good\nbroken\ncut\nempty\nhtml\nbinary\nfolder\nobjects\ndeep\nbomb\ngone\n../../etc/passwd\n");
  const Source source = read_val_source(dir.path.string());
  const std::string problems = problems_of(source);
  CHECK(below(dir, source.label_files) ==
        Names{"Annotations/bomb.xml", "Annotations/good.xml", "Annotations/objects.xml"});
  CHECK(names_of(source) == Names{"&d;&x;", "cat"});  // entities are not expanded
  CHECK(source.coco.annotations.size() == 3);
  CHECK(source.where(2) == dir / "Annotations/objects.xml:3");
  for (const std::string name :
       {"broken.xml:3: ", "cut.xml:2: ", "empty.xml:1: ", "html.xml:1: no <annotation>",
        "binary.xml:1: ", "deep.xml:1: ", "folder.xml: "})
    CHECK_HAS(problems, "label file cannot be read: " + (dir / ("Annotations/" + name)));
  CHECK_HAS(problems, "label file missing: " + (dir / "Annotations/gone.xml: "));
  for (const std::string end :
       {"2: object: no <bndbox>", "4: object: xmin is \"one\"", "5: object: xmax is \"nan\"",
        "6: object: ymax is \"1e999\"", "7: object: ymax is \"0x10\"", "8: object: no <name>",
        "9: object: ymin is \"\"", "10: object: xmin is \"1?2\""})
    CHECK_HAS(problems, "label cannot be read: " + (dir / "Annotations/objects.xml:") + end);
  CHECK(source.problems.size() == 7 + 2 + 8);
  CHECK(std::count(problems.begin(), problems.end(), '\n') == 7 + 2 + 8);

  write_text(dir / "ImageSets/Main/train.txt", "gone\nempty\n");
  CHECK_HAS(error_of(dir.path.string()), "none of its 2 annotation files can be read");
  write_text(dir / "ImageSets/Main/train.txt", std::string("\xFF\xFEg\0o\0", 6));
  CHECK_HAS(error_of(dir.path.string()), "train.txt: is not UTF-8 text");
}

// ---- YOLO

namespace {

// Writes a data set of one folder with these label files. Returns the path of its data.yaml.
std::string put_yolo(const TempDir& dir, const Names& labels, const std::string& more = "") {
  for (size_t i = 0; i < labels.size(); ++i) {
    write_text(dir / concat("images/", char('a' + i), ".jpg"));
    write_text(dir / concat("labels/", char('a' + i), ".txt"), labels[i]);
  }
  write_text(dir / "data.yaml", "train: images\nnames: [cat, dog]\n" + more);
  return dir / "data.yaml";
}
std::string yaml_error(const std::string& text) {
  TempDir dir;
  write_text(dir / "images/a.jpg");
  write_text(dir / "data.yaml", text);
  const std::string error = error_of(dir / "data.yaml");
  CHECK_HAS(error, dir / "data.yaml");
  return error;
}

}  // namespace

TEST_CASE("formats: YOLO label lines are boxes or polygons") {
  TempDir dir;
  put_yolo(dir, {"\xEF\xBB\xBF"
                 "1 0.5 0.5 0.25 0.5\r\n\r\n  0\t0.125 0.25 1e-1 2.5E-1  \r\n"
                 "0 0.4 0.9 0.2 0.3 0.6 0.1\n1.0 .1 .1 .2 .1 .2 .3 .1 .3",
                 "", "7 0.5 0.5 1 1\n-1 0.5 0.5 1 1\n0 40 50 -10 0\n"});
  write_text(dir / "images/d.jpg");
  const Sources s = read_sources({dir.path.string()});
  CHECK(s.same);
  const Source& source = s.val;
  CHECK(source.relative);
  CHECK(source.name == dir / "data.yaml (train)");
  CHECK(names_of(source) == Names{"cat", "dog"});
  CHECK(problems_of(source) == "");
  CHECK(below(dir, source.files) == Names{"images/a.jpg", "images/b.jpg", "images/c.jpg", "images/d.jpg"});
  CHECK(below(dir, source.label_files) ==
        Names{"labels/a.txt", "labels/b.txt", "labels/c.txt", "labels/d.txt"});
  CHECK(source.coco.images.at(3).id == 4);
  CHECK(source.coco.images[3].width == 0);
  REQUIRE(source.coco.annotations.size() == 7);
  const std::vector<std::vector<double>> want = {{0.375, 0.25, 0.25, 0.5},
                                                 {0.075, 0.125, 0.1, 0.25},
                                                 {0.2, 0.1, 0.4, 0.8},
                                                 {0.1, 0.1, 0.1, 0.2},
                                                 {0, 0, 1, 1},
                                                 {0, 0, 1, 1},
                                                 {45, 50, -10, 0}};
  std::vector<int64_t> classes, images;
  for (size_t i = 0; i < want.size(); ++i) {
    const CocoAnnotation& a = source.coco.annotations[i];
    for (int k = 0; k < 4; ++k) CHECK(box(a)[k] == doctest::Approx(want[i][k]));
    CHECK((a.id == int64_t(i) + 1 && a.area == 0 && !a.crowd));
    classes.push_back(a.category_id);
    images.push_back(a.image_id);
  }
  CHECK(classes == std::vector<int64_t>{1, 0, 0, 1, 7, -1, 0});  // a later check refuses 7 and -1
  CHECK(images == std::vector<int64_t>{1, 1, 1, 1, 3, 3, 3});
  CHECK(source.lines == std::vector<int>{1, 3, 4, 5, 1, 2, 3});
  CHECK(source.where(1) == dir / "labels/a.txt:3");
  CHECK(source.where(5) == dir / "labels/c.txt:2");
}

TEST_CASE("formats: unreadable YOLO lines and files are skipped and reported with their line") {
  // The second one has a confidence.
  const Names bad = {"0 0.5 0.5 0.5",       "0 0.5 0.5 0.5 0.5 0.9", "0 0.1 0.1 0.2 0.2 0.3 0.3 0.9",
                     "0.5 0.5 0.5 0.5 0.5", "cat 0.5 0.5 0.5 0.5",   "0 nan 0.5 0.5 0.5",
                     "0 0.5 inf 0.5 0.5",   "0 0.5 0.5 1e999 0.5",   "0 0.5 0.5 0.5 0.5x",
                     "0 0,5 0,5 0,5 0,5",   "0,0.5,0.5,0.5,0.5",     "1e300 0.5 0.5 0.5 0.5",
                     "0 0.5 0.5 1e300 0.5", "\xFF\xFE\x01\x02",      "# a comment"};
  std::string lines;
  for (const auto& line : bad) lines += line + "\n0 0.5 0.5 0.5 0.5\n";
  TempDir dir;
  put_yolo(dir, {lines, std::string("0 0.5 0.5 0.5 0.5\n\0\1\2", 22),
                 "0 .5 .5 .5 .5\n" + std::string(100000, '9')});
  write_text(dir / "images/d.jpg");
  fs::create_directories(dir / "labels/d.txt");
  const Source source = read_val_source(dir.path.string());
  const std::string problems = problems_of(source);
  CHECK(below(dir, source.files) ==
        Names{"images/a.jpg", "images/c.jpg"});  // images with an unreadable label file are skipped
  CHECK(source.coco.annotations.size() == bad.size() + 1);
  for (size_t i = 0; i < bad.size(); ++i) {
    INFO(bad[i]);
    CHECK(source.lines.at(i) == 2 * int(i) + 2);
    CHECK_HAS(problems, concat("label cannot be read: ", dir / "labels/a.txt:", 2 * i + 1, ": \""));
  }
  CHECK_HAS(problems, "label cannot be read: " + (dir / "labels/c.txt:2: \"999"));
  CHECK_HAS(problems, "label file cannot be read: " + (dir / "labels/b.txt: not a text file"));
  CHECK_HAS(problems, "label file cannot be read: " + (dir / "labels/d.txt: Is a directory"));
  CHECK(source.problems.size() == bad.size() + 3);
  CHECK(std::count(problems.begin(), problems.end(), '\n') == int(source.problems.size()));
  for (const auto& problem : source.problems) CHECK(problem.second.size() < 300);

  for (const char* image : {"a", "b", "c"}) fs::remove(dir / concat("images/", image, ".jpg"));
  CHECK_HAS(error_of(dir.path.string()), "none of its 1 label files can be read");
  CHECK_HAS(error_of(dir.path.string()), "labels/d.txt: Is a directory");
}

TEST_CASE("formats: a pipe, a device or a huge file in the place of a text file is reported, and not read") {
  TempDir dir;
  REQUIRE(mkfifo((dir / "pipe.txt").c_str(), 0600) == 0);  // opening it would block
  fs::create_symlink("/dev/zero", dir / "zero.txt");       // endless
  write_text(dir / "huge.txt");
  fs::resize_file(dir / "huge.txt", kMaxTextFile + 1);  // takes no space on the disk
  for (const auto& row : {std::pair<std::string, std::string>{"pipe.txt", "not a regular file"},
                          {"zero.txt", "not a regular file"},
                          {"huge.txt", "larger than 1.0G"}}) {
    const std::string name = row.first, why = row.second;  // clang 14 cannot capture structured bindings
    const Labels labels = read_yolo_txt(dir / name, false);
    CHECK_FALSE(labels.usable);
    REQUIRE(labels.problems.size() == 1);
    CHECK(labels.problems[0].second == dir / name + ": " + why);
    CHECK(error_of([&] { read_text(dir / name); }) ==
          dir / name + ": cannot be read (" + why + "); check the path");
  }
  CHECK_HAS(error_of([&] { read_coco(dir / "pipe.txt"); }), "is not a regular file");
}

TEST_CASE("formats: control characters in class names and problems are escaped") {
  CHECK(printable("a\x1b[2J\r\n\x7f\t") == "a\\x1b[2J\\x0d\\x0a\\x7f\\x09");
  CHECK(printable("a\nb", true) == "a\nb");
  // Bytes of GBK and Latin-1, an overlong slash, a surrogate, and a character that is cut off.
  CHECK(printable("\xc3\xa8\xca\xc6 caf\xe9") == "\xc3\xa8\\xca\\xc6 caf\\xe9");
  CHECK(printable("\xc0\xaf\xed\xa0\x80\xe4\xb8") == "\\xc0\\xaf\\xed\\xa0\\x80\\xe4\\xb8");
  CHECK(printable("Stra\u00dfe \u4e2d\u009b1m") == "Stra\u00dfe \u4e2d\\x9b1m");
  CHECK(shell_word("runs/nano-2") == "runs/nano-2");
  CHECK(shell_word("my run's") == "'my run'\\''s'");
  CHECK(shell_word("") == "''");
  Problems problems;
  problems.add("bad", "x\x1b]0;y\n.jpg");
  CHECK(problems.lines().at(0) == "bad: x\\x1b]0;y\\x0a.jpg");
  WeightsInfo info;
  info.classes = {"c\x1b[31m\nfalse line"};
  auto file = empty_dict();
  file.insert("yolox", to_dict(info));
  CHECK(weights_info(file, "x.pth").classes == Names{"c\\x1b[31m\\x0afalse line"});
  TempDir dir;
  Log log(dir / "log.txt", /*quiet=*/true);
  log.line("a\x1b[31m");
  CHECK(contents(dir / "log.txt") == "a\\x1b[31m\n");
}

TEST_CASE(
    "formats: YOLO labels with keypoints are recognised, also without kpt_shape; polygons stay polygons") {
  const auto first_box = [](const Names& lines, std::string& note, const std::string& more = "") {
    TempDir dir;
    put_yolo(dir, lines, more);
    const Source source = read_val_source(dir.path.string());
    for (const auto& text : source.notes) note += text;
    CHECK_MESSAGE(source.problems.empty(), problems_of(source));
    return box(source.coco.annotations.at(0));
  };
  const std::vector<double> whole = {0.25, 0.25, 0.5, 0.5};
  std::string line = "0 0.5 0.5 0.5 0.5", points;
  for (int k = 0; k < 4; ++k) points += concat(" 0.", 3 + k, " 0.4");
  const std::string with_visibility = line + " 0.3 0.4 2 0.6 0.7 1 0 0 0\n", without = line + points + "\n";
  std::string note;
  CHECK(first_box({line + " 0.1 0.1 2 0.2 0.2 2\n"}, note, "kpt_shape: [2, 3]\n") == whole);
  note.clear();
  CHECK(first_box({with_visibility, with_visibility}, note) == whole);  // 14 columns
  CHECK_HAS(note, "the labels with 14 columns are read as class, box and keypoints");
  note.clear();
  CHECK(first_box({with_visibility + line + "\n"}, note) == whole);  // an object without keypoints
  CHECK_HAS(note, "14 columns");
  // Without visibilities, small polygons may look like that: only a note.
  note.clear();
  CHECK(first_box(Names(10, without), note) != whole);
  CHECK_HAS(note, "the labels with 13 columns are read as polygons");
  CHECK_HAS(note, "add this line to data.yaml: kpt_shape: [4, 2]");

  // A point outside of the box of its line, lines of two lengths, and corners of a box.
  note.clear();
  const std::string outside = line + " 0.3 0.4 0.3 0.4 0.3 0.4 0.99 0.4\n";
  const std::string longer = line + points + " 0.5 0.5\n", corners = line + " 0.4 0.4 0.6 0.4\n";
  Names one_outside(10, without), one_longer(10, without);
  one_outside.back() = outside;
  one_longer.back() = longer;
  Names one_far(10, with_visibility);
  one_far.back() = line + " 0.3 0.4 2 0.99 0.7 1 0 0 0\n";
  for (const Names& lines : {one_outside, one_longer, Names(10, corners)})
    CHECK(first_box(lines, note) != whole);
  CHECK(!has(note, "keypoints"));
  TempDir dir;
  put_yolo(dir, one_far);
  CHECK(read_val_source(dir.path.string()).problems.size() == 10);  // 14 columns are no polygon
}

TEST_CASE("formats: YOLO label files without an image are reported") {
  TempDir dir;
  put_all(dir, {"images/train/a.jpg", "images/train/c.psd", "images/val/b.jpg"});
  for (const std::string name : {"train/a", "train/gone", "train/c", "val/b", "train/classes"})
    write_text(dir / ("labels/" + name + ".txt"), "0 0.5 0.5 1 1");
  write_text(dir / "data.yaml", "train: images/train\nval: images/val\nnames: [cat]");
  const Sources both = read_sources({dir.path.string()});
  CHECK(problems_of(both.train) == "label file without image: " + (dir / "labels/train/gone.txt") + "\n");
  CHECK(problems_of(both.val) == "");
  const fs::path before = fs::current_path();  // relative paths, too
  fs::current_path(dir.path);
  CHECK(problems_of(read_sources({"data.yaml"}).train) ==
        "label file without image: labels/train/gone.txt\n");
  fs::current_path(before);
  // A list names a part of the images of a folder: the others are no orphans.
  write_text(dir / "images/train/d.jpg");
  write_text(dir / "labels/train/d.txt", "0 0.5 0.5 1 1");
  write_text(dir / "list.txt", "images/train/a.jpg\n");
  write_text(dir / "data.yaml", "train: list.txt\nval: images/val\nnames: [cat]");
  CHECK(problems_of(read_sources({dir.path.string()}).train) ==
        "label file without image: " + (dir / "labels/train/gone.txt") + "\n");
}

TEST_CASE("formats: COCO images that are listed twice are put together; two names of one file are an error") {
  const auto json = [](const std::string& first, const std::string& second, int width) {
    return concat(R"({"images": [{"id": 1, "file_name": ")", first, R"(", "width": 40, "height": 30},)",
                  R"( {"id": 2, "file_name": "b.png"}, {"id": 3, "file_name": ")", second, R"(", "width": )",
                  width, R"(, "height": 30}], "categories": [{"id": 1}], "annotations": [)",
                  R"({"image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4]},)",
                  R"({"image_id": 1, "category_id": 1, "bbox": [5, 6, 7, 8]}]})");
  };
  TempDir dir;
  put_all(dir, {"train/a.png", "train/b.png"});
  write_text(dir / "train.json", json("a.png", "a.png", 40));
  const Source source = read_sources({dir.path.string()}).train;
  CHECK(below(dir, source.files) == Names{"train/a.png", "train/b.png"});
  CHECK(source.coco.images.size() == 2);
  CHECK(source.coco.annotations.at(0).image_id == 1);
  CHECK(source.coco.annotations.at(1).image_id == 1);
  REQUIRE(source.notes.size() == 1);
  CHECK_HAS(source.notes[0], "1 images repeat the file_name of another one, such as image 3");
  write_text(dir / "train.json", json("a.png", "a.png", 0));  // an unknown width
  CHECK(read_sources({dir.path.string()}).train.coco.images.at(0).width == 40);
  write_text(dir / "train.json", json("a.png", "a.png", 41));
  CHECK_HAS(error_of(dir.path.string()), "the images 1 (a.png, 40x30) and 3 (a.png, 41x30)");
  // A list that was appended to itself, with new ids.
  std::string twice = json("a.png", "a.png", 40);
  twice.replace(twice.find("[5, 6, 7, 8]"), 12, "[1, 2, 3, 4]");
  write_text(dir / "train.json", twice);
  CHECK(read_sources({dir.path.string()}).train.coco.annotations.size() == 1);
  fs::create_directories(dir / "pictures/of");
  fs::rename(dir / "train", dir / "pictures/of/january");
  write_text(dir / "train.json", json("x/1/a.png", "x/2/a.png", 40));
  CHECK_HAS(error_of(dir.path.string()), "are read from the same file");
}

TEST_CASE("formats: YOLO images are listed recursively and paired with their label files") {
  TempDir dir;
  put_all(dir, {"images/a.JPG", "images/b.Jpeg", "images/sub/c.png", "images/sub/d.tiff", "images/e.bmp",
                "images/f.webp", "images/g.tif", "images/a.png", "images/h.gif", "images/notes.txt",
                "images/._a.jpg", "images/.hidden/x.jpg", "images/x.jpg/i.jpg"});
  fs::create_directory_symlink(dir / "images", dir / "images/sub/loop");
  write_text(dir / "elsewhere/k.jpg");
  fs::create_directory_symlink(dir / "elsewhere", dir / "images/link");
  fs::create_symlink(dir / "nowhere", dir / "images/lost.jpg");
  write_text(dir / "data.yaml", "train: images\nnames: [cat]");
  Source source = read_val_source(dir.path.string());
  CHECK(below(dir, source.files) == Names{"images/a.JPG", "images/a.png", "images/b.Jpeg", "images/e.bmp",
                                          "images/f.webp", "images/g.tif", "images/h.gif",
                                          "images/link/k.jpg", "images/lost.jpg", "images/sub/c.png",
                                          "images/sub/d.tiff", "images/x.jpg/i.jpg"});
  CHECK(below(dir, source.label_files).at(9) == "labels/sub/c.txt");
  // If no label file exists, the path is wrong most of the time.
  CHECK(problems_of(source) ==
        "no image has labels: expected the first label file at " + (dir / "labels/a.txt") + "\n");

  CHECK(yolo_label_file("/images/x/images/train/a.b.jpg") == "/images/x/labels/train/a.b.txt");
  CHECK(yolo_label_file("images/a.jpg") == "labels/a.txt");
  CHECK(yolo_label_file("x/images/images/images.jpg") == "x/images/labels/images.txt");
  CHECK(yolo_label_file("x/my_images/train/a.jpg") == "x/my_images/train/a.txt");
  CHECK_THROWS_WITH_AS(files_under(dir / "nowhere", kImages), doctest::Contains("cannot be listed"),
                       std::runtime_error);
  write_text(dir / "photos/a.jpg");
  write_text(dir / "photos/a.txt", "0 0.5 0.5 1 1");
  write_text(dir / "data.yaml", "train: photos\nnames: [cat]");
  source = read_val_source(dir.path.string());
  CHECK(source.where(0) == dir / "photos/a.txt:1");
}

TEST_CASE("formats: data.yaml: image paths may be absolute or relative to several folders") {
  struct Case {
    std::string yaml;     // in DIR/set/data.yaml
    Names images, train;  // existing files, expected files
  };
  for (const Case& c : {
           Case{"train: images/train", {"set/images/train/a.jpg"}, {"set/images/train/a.jpg"}},
           Case{"path: .\ntrain: images/train/", {"set/images/train/a.jpg"}, {"set/images/train/a.jpg"}},
           Case{"path: ../other\ntrain: ./images",
                {"other/images/a.jpg", "set/images/b.jpg"},
                {"other/images/a.jpg"}},
           Case{"path: /not/here\ntrain: images", {"set/images/a.jpg"}, {"set/images/a.jpg"}},
           Case{"path: ABSOLUTE/other\ntrain: images", {"other/images/a.jpg"}, {"other/images/a.jpg"}},
           Case{"train: ABSOLUTE/other/images", {"other/images/a.jpg"}, {"other/images/a.jpg"}},
           Case{"path: sub\ntrain: images", {"set/sub/b.jpg", "set/images/a.jpg"}, {"set/images/a.jpg"}},
           Case{"train: ../train/images", {"set/train/images/a.jpg"}, {"set/train/images/a.jpg"}},
           Case{"train: ../train/images",
                {"set/train/images/a.jpg", "train/images/b.jpg"},
                {"train/images/b.jpg"}},
           Case{"train: [images/b, images/a]",
                {"set/images/a/2.jpg", "set/images/b/1.jpg"},
                {"set/images/a/2.jpg", "set/images/b/1.jpg"}},
           Case{"train:\n- images/b\n- lists/train.txt",
                {"set/images/b/1.jpg", "set/images/c/1.jpg", "set/lists/d.jpg"},
                {"set/images/b/1.jpg", "set/images/c/1.jpg", "set/images/lost.jpg", "set/lists/d.jpg",
                 "set/lists/images/lost.jpg"}},
           Case{
               "path: /not/here\ntrain: lists/train.txt",
               {"set/images/c/1.jpg", "set/lists/d.jpg"},
               {"set/images/c/1.jpg", "set/images/lost.jpg", "set/lists/d.jpg", "set/lists/images/lost.jpg"}},
           Case{"train: lists/other.txt", {"set/lists/e.jpg", "set/f.jpg"}, {"set/f.jpg", "set/lists/e.jpg"}},
           Case{"path: sub\ntrain: ../train/images",
                {"set/sub/train/images/a.jpg"},
                {"set/sub/train/images/a.jpg"}},
           Case{"train: x.txt", {"set/x.txt/a.jpg"}, {"set/x.txt/a.jpg"}},  // x.txt is a folder
           Case{"train: C:\\sets\\cells\\images\\train",
                {"set/images/train/a.jpg"},
                {"set/images/train/a.jpg"}},
           Case{"train: images\\val", {"set/images/val/b.jpg"}, {"set/images/val/b.jpg"}},
       }) {
    INFO(c.yaml);
    TempDir dir;
    put_all(dir, c.images);
    std::string yaml = c.yaml + "\nnames: [cat]\n";
    if (const size_t at = yaml.find("ABSOLUTE"); at != std::string::npos)
      yaml.replace(at, 8, dir.path.string());
    write_text(dir / "set/data.yaml", yaml);
    write_text(dir / "set/lists/other.txt", "e.jpg\n./f.jpg");
    write_text(dir / "set/lists/train.txt",
               "\xEF\xBB\xBF./d.jpg\r\n\r\nimages\\c\\1.jpg\r\nimages/lost.jpg\n./images/lost.jpg\n");
    CHECK(below(dir, read_sources({dir / "set/data.yaml"}).train.files) == c.train);
  }
  TempDir dir;
  write_text(dir / "data.yaml", "train: images\nval: ../v/images\nnames: [cat]");
  write_text(dir / "images/a.jpg");
  const std::string missing = error_of(dir.path.string());
  CHECK_HAS(missing, "data.yaml: val: neither a folder nor a .txt");
  CHECK_HAS(missing, (dir.path.parent_path() / "v/images").string());
  CHECK(read_val_source(dir.path.string(), "train").files.size() == 1);  // val is not needed
  write_text(dir / "v/images/notes.txt");
  CHECK_HAS(error_of(dir.path.string()), "val: no images in ../v/images");
}

TEST_CASE("formats: data.yaml: each split has a key") {
  struct Case {
    std::string keys, split, train, val;
  };
  for (const Case& c :
       {Case{"train val test", "", "train", "val"}, Case{"train val test", "test", "train", "test"},
        Case{"train valid", "", "train", "valid"}, Case{"train validation", "val", "train", "validation"},
        Case{"train test", "", "train", "test"}, Case{"val", "", "val", "val"}}) {
    INFO(c.keys << " " << c.split);
    TempDir dir;
    std::string yaml = "names: [cat]\ndownload: https://example.com/a.zip\n";
    std::istringstream keys(c.keys);
    for (std::string key; keys >> key;) {
      write_text(dir / (key + "/images/" + key + ".jpg"));
      yaml += key + ": " + key + "/images\n";
    }
    if (!has(c.keys, "test")) yaml += "test:  # optional\n";
    write_text(dir / "data.yaml", yaml);
    const Sources s = read_sources({dir.path.string(), c.split});
    CHECK(fs::path(s.train.files.at(0)).stem() == c.train);
    CHECK(fs::path(s.val.files.at(0)).stem() == c.val);
    CHECK(s.same == (c.train == c.val));
    CHECK(read_val_source(dir.path.string(), c.split).files == s.val.files);
    if (!has(c.keys, "test")) CHECK_HAS(error_of(dir.path.string(), "test"), "no split \"test\"; it has ");
  }
}

TEST_CASE("formats: data.yaml: classes are a list, a map or a count") {
  TempDir dir;
  write_text(dir / "images/a.jpg");
  const auto names = [&](const std::string& yaml) {
    write_text(dir / "data.yaml", "\xEF\xBB\xBF" + yaml + "\r\ntrain: images\r\n");
    const Source source = read_val_source(dir.path.string());
    for (size_t i = 0; i < source.coco.categories.size(); ++i)
      CHECK(source.coco.categories[i].id == int64_t(i));
    return names_of(source);
  };
  CHECK(names("names: [cat, 'a, b', \"null\", 7, yes]\r\nnc: 5") == Names{"cat", "a, b", "null", "7", "yes"});
  CHECK(names("names:\n- cat\n- dog") == Names{"cat", "dog"});
  CHECK(names("names:\r\n  1: dog\r\n  0: cat\r\n  2: \xC3\xA9l\xC3\xA9phant") ==
        Names{"cat", "dog", "\xC3\xA9l\xC3\xA9phant"});
  CHECK(names("names: {0: cat}\nnc: 1") == Names{"cat"});
  CHECK(names("nc: 3") == Names{"0", "1", "2"});
  CHECK(names("names:\nnc: 2") == Names{"0", "1"});
}

TEST_CASE("formats: errors in data.yaml are reported with their line") {
  const std::string train = "train: images\n";
  CHECK_HAS(yaml_error(train + "names: [cat, dog"), "not valid YAML");
  CHECK_HAS(yaml_error(train + "names:\n  - cat\n dog: 1"), "data.yaml:4: not valid YAML");
  CHECK_HAS(yaml_error(train + "names: &x [*y]"), "data.yaml:2: not valid YAML");
  CHECK_HAS(yaml_error(train + "names: [cat]\nval: a\nval: b"), "data.yaml:4: a second val");
  CHECK_HAS(yaml_error(""), "has no keys");
  CHECK_HAS(yaml_error("just text"), "has no keys");
  CHECK_HAS(yaml_error("- a\n- b"), "has no keys");
  CHECK_HAS(yaml_error(std::string("\x89PNG\r\n\x1A\n\0\0", 10)), "is not UTF-8 text");
  CHECK_HAS(yaml_error(train), "no class names");
  CHECK_HAS(yaml_error("names: [cat]"), "no train and no val");
  CHECK_HAS(yaml_error(train + "names: cat"), "data.yaml:2: names must be a list");
  CHECK_HAS(yaml_error(train + "names: []"), "data.yaml:2: names is empty");
  CHECK_HAS(yaml_error(train + "names: {}"), "data.yaml:2: names is empty");
  CHECK_HAS(yaml_error(train + "names: [cat, [dog]]"), "data.yaml:2: names has no text for class 1 of 2");
  CHECK_HAS(yaml_error(train + "names: [cat, null]"), "class 1 of 2");
  CHECK_HAS(yaml_error(train + "names: &a [cat, *a]"), "class 1 of 2");
  CHECK_HAS(yaml_error(train + "names: {0: cat, 2: dog}"), "data.yaml:2: names has no text for class 1 of 2");
  CHECK_HAS(yaml_error(train + "names: {1: cat, 2: dog}"), "class 0 of 2");
  CHECK_HAS(yaml_error(train + "names: {a: cat}"), "class 0 of 1");
  CHECK_HAS(yaml_error(train + "names: {0: cat, 0: dog}"), "class 1 of 2");
  CHECK_HAS(yaml_error(train + "names: {1000000000: cat}"), "class 0 of 1");
  CHECK_HAS(yaml_error(train + "\nnc: 3\nnames: [a, b]"), "data.yaml:3: nc is \"3\", names has 2 entries");
  for (const std::string nc : {"0", "-1", "2.5", "many", "1000000000", "1e30", "[1]", "{}"})
    CHECK_HAS(yaml_error(train + "nc: " + nc), "data.yaml:2: nc is ");
  for (const std::string value : {"{a: b}", "[]", "[[a]]", "[a, {}]", "['']"})
    CHECK_HAS(yaml_error("names: [a]\ntrain: " + value), "data.yaml:2: train must be a folder");
  CHECK_HAS(yaml_error("names: [a]\ntrain: 3"), "train: neither a folder nor a .txt");
  CHECK_HAS(yaml_error("names: [a]\npath: [x]\ntrain: images/a.jpg"), "neither a folder nor a .txt");
  CHECK_HAS(yaml_error(train + "names: " + std::string(20000, '[')), "not valid YAML");
  CHECK_HAS(yaml_error(std::string(20000, '{')), "not valid YAML");
  std::string nested, many;
  for (int i = 0; i < 1000; ++i) nested += std::string(i, ' ') + "a:\n";
  CHECK_HAS(yaml_error(nested), "data.yaml");
  CHECK_HAS(yaml_error("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + train + "names: *c"),
            "class 0 of 2");
}

// ---- which format a folder has

TEST_CASE("formats: in an ambiguous folder data.yaml has priority, then COCO, Pascal VOC and YOLO") {
  TempDir dir;
  put_yolo(dir, {"0 0.5 0.5 1 1"});
  const auto kind = [&] { return fs::path(read_val_source(dir.path.string()).name).extension().string(); };
  CHECK(kind() == ".yaml (train)");
  write_text(dir / "package.json", R"({"name": "x"})");
  write_text(dir / "annotations.json", "[1, 2]");
  write_text(dir / "images/a.json", R"({"shapes": [], "imagePath": "a.jpg"})");  // a file of labelme
  CHECK(kind() == ".yaml (train)");
  write_text(dir / "labels.json", small_json("a.jpg"));
  put_voc(dir.path.string(), {"b"});
  CHECK(kind() == ".yaml (train)");
  // The same with another name, which a file of any program may have.
  fs::rename(dir / "data.yaml", dir / "own.yaml");
  CHECK(kind() == ".json");
  fs::remove(dir / "labels.json");
  CHECK(has(read_val_source(dir.path.string()).name, "(all)"));
  CHECK(read_val_source(dir / "own.yaml").relative);  // an explicit path decides
  write_text(dir / "data.yaml", "seed: 3\n");         // of another program
  write_text(dir / "annotations/train.json", small_json("a.jpg"));
  CHECK(kind() == ".json");
  fs::rename(dir / "own.yaml", dir / "data.yaml");
  fs::remove_all(dir / "annotations");
  fs::remove_all(dir / "Annotations");
  put_voc(dir / "backup", {"b"});  // deeper folders have the lowest priority
  CHECK(kind() == ".yaml (train)");
}

TEST_CASE("formats: data.yaml and dataset.yaml are preferred to other YAML files of a folder") {
  TempDir dir;
  put_yolo(dir, {"0 0.5 0.5 1 1"});
  const auto yaml = [&] { return fs::path(read_val_source(dir.path.string()).name).filename().string(); };
  write_text(dir / "args.yaml", "epochs: 3");
  write_text(dir / "broken.yaml", "[");
  write_text(dir / "coco8.yaml", contents(dir / "data.yaml"));
  CHECK(yaml() == "data.yaml (train)");
  fs::rename(dir / "data.yaml", dir / "dataset.yaml");
  CHECK(yaml() == "dataset.yaml (train)");
  fs::remove(dir / "dataset.yaml");
  CHECK(yaml() == "coco8.yaml (train)");
  write_text(dir / "coco9.yml", contents(dir / "coco8.yaml"));
  CHECK_HAS(error_of(dir.path.string()), "several YAML files");
}

TEST_CASE("formats: a path without a data set is refused with a list of the accepted layouts") {
  TempDir dir;
  CHECK_HAS(error_of(dir / "nowhere"), dir / "nowhere does not exist");
  CHECK_HAS(error_of(dir / "nowhere.yaml"), "does not exist");
  CHECK_HAS(error_of(dir.path.string()), "an empty folder");
  put_all(dir, {"a.jpg", "b.csv", "c.csv", "d/e/f.xml"});
  write_text(dir / "package.json", R"({"name": "x"})");
  const std::string error = error_of(dir.path.string());
  for (const std::string part :
       {"annotations/*.json", "Annotations/*.xml", "data.yaml", "a.jpg, b.csv, c.csv, d,"})
    CHECK_HAS(error, part);
  CHECK_HAS(error_of(dir / "b.csv"), "b.csv: not valid JSON");
}

TEST_CASE("formats: a YOLO folder without class names is answered with a data.yaml that is correct for it") {
  TempDir dir;
  put_all(dir, {"x/images/train/a.jpg", "x/images/val/b.jpg", "y/train/images/a.jpg", "y/valid/images/b.jpg",
                "z/images/a.jpg", "z/images/b.jpg"});
  for (const std::string file : {"x/labels/train/a.txt", "y/train/labels/a.txt", "z/labels/a.txt"})
    write_text(dir / file, "2 0.5 0.5 1 1\n");
  fs::create_directories(dir / "y/valid/labels");
  for (const std::string set : {"x", "y", "z"}) {
    INFO(set);
    const std::string yaml = dir / (set + "/data.yaml"), error = error_of(dir / set),
                      mark = "in each line:\n";
    CHECK_HAS(error, "write " + yaml + " with this text");
    REQUIRE(error.find(mark) != std::string::npos);
    write_text(yaml, error.substr(error.find(mark) + mark.size()));
    const Sources s = read_sources({dir / set});
    CHECK(names_of(s.train) == Names{"name of class 0", "name of class 1", "name of class 2"});
    CHECK(s.train.coco.annotations.size() == 1);
    CHECK(s.same == (set == "z"));
    // Without the file, classes.txt of labelImg is enough.
    fs::remove(yaml);
    write_text(dir / (set + (set == "x"   ? "/classes.txt"
                             : set == "y" ? "/train/labels/classes.txt"
                                          : "/labels/classes.txt")),
               "cat\nred dog\ncow\n\n");
    CHECK(names_of(read_sources({dir / set}).train) == Names{"cat", "red dog", "cow"});
  }
  write_text(dir / "x/classes.txt", "cat\n\ndog\n");  // lines are class ids
  CHECK_HAS(error_of(dir / "x"), "classes.txt:2: empty line");
  put_all(dir, {"w/images/train/a.jpg"});  // no labels
  CHECK_HAS(error_of(dir / "w"), "is no data set");
}

TEST_CASE("formats: labels of labelImg beside the images are read, as YOLO with classes.txt and as VOC") {
  TempDir dir;
  // The folder may be called images, although labels of YOLO are in a folder `labels` in other layouts.
  put_all(dir, {"images/a.jpg", "images/b.PNG", "images/empty.jpg", "split/train/a.jpg", "split/val/b.jpg"});
  for (const std::string file : {"images/a.txt", "split/train/a.txt"})
    write_text(dir / file, "1 0.5 0.5 0.2 0.2\n");
  for (const std::string file : {"images/classes.txt", "split/train/classes.txt"})
    write_text(dir / file, "cat\ndog\n");
  const Sources yolo = read_sources({dir / "images"});
  CHECK(yolo.same);
  CHECK(names_of(yolo.train) == Names{"cat", "dog"});
  CHECK(below(dir, yolo.train.files) == Names{"images/a.jpg", "images/b.PNG", "images/empty.jpg"});
  REQUIRE(yolo.train.coco.annotations.size() == 1);
  CHECK(yolo.train.where(0) == dir / "images/a.txt" + std::string(":1"));
  const Sources split = read_sources({dir / "split"});
  CHECK(below(dir, split.train.files) == Names{"split/train/a.jpg"});
  CHECK(below(dir, split.val.files) == Names{"split/val/b.jpg"});

  for (const std::string name : {"a", "b"})
    write_text(dir / ("voc/" + name + ".xml"), voc(object("cat", corners("1", "2", "3", "5"))));
  CHECK_HAS(error_of(dir / "voc"), "is no data set");  // XML files without images
  put_all(dir, {"voc/a.jpg", "voc/b.JPG"});
  const Sources xml = read_sources({dir / "voc"});
  CHECK(xml.same);
  CHECK(names_of(xml.train) == Names{"cat"});
  CHECK(below(dir, xml.train.files) == Names{"voc/a.jpg", "voc/b.JPG"});
  CHECK(xml.train.coco.annotations.size() == 2);
}

TEST_CASE("formats: a category without boxes that is the supercategory of all others is left out") {
  TempDir dir;
  const auto put = [&](const std::string& split, const std::string& category, const std::string& parent) {
    write_text(dir / (split + ".json"), R"({"images": [{"id": 3, "file_name": "a.png"}], "categories": [
        {"id": 0, "name": "cells", "supercategory": "none"}, {"id": 1, "name": "red", "supercategory": "cells"},
        {"id": 2, "name": "white", "supercategory": ")" +
                                            parent + R"("}],
        "annotations": [{"id": 7, "image_id": 3, "category_id": )" +
                                            category + R"(, "bbox": [1, 2, 10, 12]}]})");
  };
  cv::imwrite(dir / "a.png", cv::Mat(20, 20, CV_8UC3));
  const auto load = [&] { return load_splits({dir.path.string()}); };
  const auto val = [&](const Names& classes) {
    return load_splits({dir.path.string()}, false, classes.size()).val.classes;
  };
  put("train", "1", "cells");
  put("val", "2", "cells");
  const Splits dropped = load();
  CHECK(dropped.train.classes == Names{"red", "white"});
  CHECK(dropped.val.classes == Names{"red", "white"});
  CHECK(dropped.val.records.at(0).boxes.at(0).cls == 1);
  CHECK_HAS(dropped.train.notes.at(0), "left out the category cells");
  CHECK(dropped.train.problems->summary().empty());  // so that --strict accepts the data
  CHECK(val({}) == Names{"red", "white"});
  CHECK(val({"cells", "red", "white"}) == Names{"cells", "red", "white"});  // a model of another program
  put("val", "0", "cells");                                                 // a box in one split is enough
  CHECK(load().train.classes == Names{"cells", "red", "white"});
  put("val", "2", "cells");
  put("train", "1", "none");  // not the supercategory of all
  put("val", "2", "none");
  CHECK(load().train.classes == Names{"cells", "red", "white"});
}

TEST_CASE(
    "formats: YOLO images without a label file are counted, unlike empty label files; pixels are refused") {
  TempDir dir;
  write_text(dir / "data.yaml", "train: images\nnames: [cat]\n");
  put_all(dir, {"images/a.jpg", "images/b.jpg", "images/c.jpg", "labels/b.txt"});
  write_text(dir / "labels/a.txt", "0 0.5 0.5 0.2 0.2\n0 0.95 0.5 0.2 0.2\n0 1.2 0.5 1 0.2\n");
  const Source s = read_val_source(dir.path.string());
  REQUIRE(s.notes.size() == 1);
  CHECK_HAS(s.notes[0], "1 of 3 images have no label file");
  CHECK(s.problems.empty());
  write_text(dir / "labels/c.txt", "0 120 80 40 30\n");
  CHECK(read_val_source(dir.path.string()).coco.annotations.size() ==
        4);  // one wrong box is no reason to stop
  write_text(dir / "labels/c.txt", "0 120 80 40 30\n0 20 200 40 30\n0 600 400 4 3\n");
  CHECK_HAS(error_of(dir.path.string()), "3 of 6 boxes are in pixels, such as " + (dir / "labels/c.txt") +
                                             ":1; YOLO labels are fractions: divide");
}

TEST_CASE("formats: --val-fraction holds out images of a single split, the same for each program") {
  TempDir dir;
  write_text(dir / "yolo/classes.txt", "cat\n");
  std::string images, boxes;
  for (int i = 0; i < 20; ++i) {
    put_all(dir, {concat("yolo/", i, ".jpg")});
    write_text(dir / concat("yolo/", i, ".txt"), concat("\n0 0.5 0.5 0.2 0.", i + 10, "\n"));
    images += concat(i ? "," : "", R"({"file_name": ")", i, R"(.jpg", "id": )", 100 + i, "}");
    boxes += concat(i ? "," : "", R"({"category_id": 1, "bbox": [1, 2, 3, 4], "image_id": )", 100 + i, "}");
  }
  write_text(dir / "coco/a.json",
             R"({"categories": [{"id": 1}], "images": [)" + images + R"(], "annotations": [)" + boxes + "]}");
  for (int i = 0; i < 20; ++i) put_all(dir, {concat("coco/", i, ".jpg")});
  const auto stems = [](const Source& s) {
    Names names;
    for (const auto& file : s.files) names.push_back(fs::path(file).filename().string());
    std::sort(names.begin(), names.end());
    return names;
  };
  const Sources coco = read_sources({dir / "coco", {}, 0.2}), yolo = read_sources({dir / "yolo", {}, 0.2});
  for (const Sources* s : {&coco, &yolo}) {
    CHECK_FALSE(s->same);
    CHECK(s->train.name != s->val.name);
    Names all = stems(s->train);
    CHECK(all.size() == 16);
    for (const auto& name : stems(s->val)) all.push_back(name);
    CHECK(std::set<std::string>(all.begin(), all.end()).size() == 20);
    for (const Source* part : {&s->train, &s->val}) {
      REQUIRE(part->coco.annotations.size() == part->files.size());
      for (size_t i = 0; i < part->files.size(); ++i)
        CHECK(part->coco.annotations[i].image_id == part->coco.images[i].id);
    }
  }
  CHECK(stems(coco.val) == stems(yolo.val));
  CHECK(stems(read_val_source(dir / "yolo", "", "", 0.2)) == stems(yolo.val));
  for (size_t i = 0; i < yolo.val.files.size(); ++i)  // the label belongs to the image
    CHECK(yolo.val.where(i) == fs::path(yolo.val.files[i]).replace_extension(".txt").string() + ":2");
  CHECK(read_sources({dir / "yolo", {}, 0.001}).val.files.size() == 1);
  const auto refused = [&](const std::string& data) {
    return error_of([&] { load_splits({data, {}, 0.2}); });
  };
  write_text(dir / "coco/val.json",
             R"({"categories": [{"id": 1}], "images": [)" + images + R"(], "annotations": []})");
  fs::rename(dir / "coco/a.json", dir / "coco/train.json");
  CHECK_HAS(refused(dir / "coco"), "--val-fraction is for data with one split, but --data");
  CHECK_HAS(refused("shapes"), "--val-fraction is for COCO, VOC and YOLO files");
}

TEST_CASE(
    "formats: a data.yaml whose train and val are one folder has one split; images in both are counted") {
  TempDir dir;
  for (const char* name : {"a", "b", "c"}) {
    put_all(dir, {concat("images/", name, ".jpg"), concat("other/images/", name, ".jpg")});
    write_text(dir / concat("labels/", name, ".txt"), "0 0.5 0.5 0.2 0.2\n");
  }
  write_text(dir / "data.yaml", "train: images\nval: images\nnames: [cat]\n");
  const Sources same = read_sources({dir.path.string()});
  CHECK(same.same);
  CHECK(same.val.notes.empty());
  const Sources held = read_sources({dir.path.string(), {}, 0.4});
  CHECK_FALSE(held.same);
  CHECK(held.train.files.size() == 2);
  CHECK(read_val_source(dir.path.string(), "", "", 0.4).files == held.val.files);

  write_text(dir / "some.txt", "images/b.jpg\nother/images/b.jpg\n");
  write_text(dir / "data.yaml", "train: images\nval: some.txt\nnames: [cat]\n");
  const Sources some = read_sources({dir.path.string()});
  CHECK_FALSE(some.same);
  REQUIRE(some.val.notes.size() == 2);  // and an image without a label file
  CHECK_HAS(some.val.notes[1], "1 of 2 images are training images, too");
  write_text(dir / "data.yaml", "train: images\nval: other/images\nnames: [cat]\n");
  const Sources none = read_sources({dir.path.string()});
  CHECK_FALSE(none.same);
  CHECK(none.val.notes.size() == 1);
}

TEST_CASE("formats: --images names the folder of the images of COCO JSON files") {
  TempDir dir;
  write_text(dir / "ann/one.json", small_json("a.png"));
  write_text(dir / "ann/two.json", small_json("b.png"));
  put_all(dir, {"far/away/a.png", "far/away/b.png"});
  const std::string images = dir / "far/away",
                    both = dir / "ann/one.json" + std::string(",") + (dir / "ann/two.json");
  CHECK_HAS(error_of(dir / "ann/one.json"), "and their folder with --images DIR");
  CHECK(below(dir, read_val_source(dir / "ann/one.json", "", images).files) == Names{"far/away/a.png"});
  const Sources s = read_sources({both, {}, 0, images});
  CHECK(below(dir, s.train.files) == Names{"far/away/a.png"});
  CHECK(below(dir, s.val.files) == Names{"far/away/b.png"});
  const auto refused = [&](const std::string& data, const std::string& folder) {
    return error_of([&] { load_splits({data, {}, 0, folder}); });
  };
  CHECK_HAS(refused(dir / "ann/one.json", dir / "ann"), "none of the images of");
  for (const std::string& data : {std::string("shapes"), dir.path.string(), dir / "x.lmdb"})
    CHECK_HAS(refused(data, images), "--images is for a COCO JSON file, not for --data " + data);
}

TEST_CASE("formats: YOLO 1.1 of CVAT is read: obj.data, obj.names, and lists with paths of another machine") {
  TempDir dir;
  write_text(dir / "obj.data",
             "classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = data/obj.names\nbackup = "
             "backup/\n");
  write_text(dir / "obj.names", "cat\nred dog\n");
  write_text(dir / "train.txt", "data/obj_train_data/a.jpg\n");
  write_text(dir / "valid.txt", "data/obj_valid_data/b.jpg\n");
  for (const std::string image : {"obj_train_data/a", "obj_valid_data/b"}) {
    write_text(dir / (image + ".jpg"));
    write_text(dir / (image + ".txt"), "1 0.5 0.5 0.2 0.4\n");
  }
  const Sources s = read_sources({dir.path.string()});
  CHECK(names_of(s.train) == Names{"cat", "red dog"});
  CHECK(below(dir, s.train.files) == Names{"obj_train_data/a.jpg"});
  CHECK(below(dir, s.val.files) == Names{"obj_valid_data/b.jpg"});
  REQUIRE(s.train.coco.annotations.size() == 1);
  CHECK(s.train.coco.annotations[0].category_id == 1);
  write_text(dir / "obj.data", "classes = 2\ntrain = data/train.txt\n");
  CHECK_HAS(error_of(dir.path.string()), "no names; add names = obj.names");
}
