// SPDX-License-Identifier: Apache-2.0
#include "base/printable.hpp"
#include "checkpoint/checkpoint.hpp"
#include "layouts.hpp"
#include "run/log.hpp"
#include "run/progress.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// A label line of YOLO in the middle of the image, of class 0.
const std::string kLine = "0 0.5 0.5 0.2 0.4\n";

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
           // Only files of another task.
           Layout{"annotations/person_keypoints_train2017.json", "annotations/person_keypoints_val2017.json",
                  "images/a.png", "images/b.png"},
       }) {
    INFO(l.train_json << ", " << l.train_image);
    TempDir dir;
    put(dir, {{l.train_json, coco({"a.png"})},
              {l.val_json, coco({"b.png"})},
              {l.train_image, ""},
              {l.val_image, ""}});
    for (const std::string end : {"", "/"})
      check_text(reading(dir, {dir.path.string() + end}),
                 {"train DIR/" + l.train_json + ": DIR/" + l.train_image + "\nclasses a\nbox",
                  "val DIR/" + l.val_json + ": DIR/" + l.val_image + "\nclasses a\nbox",
                  "annotation 1 of image 1", "!image missing", "!note"});
  }
}

TEST_CASE(
    "formats: the images of a COCO file are found in one folder or several, and never those of another one") {
  const Files two = {{"annotations/train.json", coco({"1.jpg", "2.jpg"})},
                     {"annotations/val.json", coco({"1.jpg"})}};
  const auto with = [&](Files files, const Names& images) {
    for (const auto& image : images) files.emplace_back(image, image);
    return files;
  };
  const auto one = [&](const std::string& name, const std::string& json, const Names& images) {
    return with({{json, coco({name})}}, images);
  };
  const std::string in_train = "train/1.jpg DIR/", in_val = "val/1.jpg\n";
  check_rows({
      // clang-format off
      // Of equal names, those in the folder of the split.
      {"by name", with(two, {"train/1.jpg", "train/2.jpg", "val/1.jpg", "val/2.jpg", "images/1.jpg"}),
          {"DIR/train/1.jpg DIR/train/2.jpg", "DIR/val/1.jpg"}},
      {"by name, in images", with(two, {"images/train/1.jpg", "images/train/2.jpg", "images/val/1.jpg",
          "images/1.jpg"}), {"images/train/1.jpg DIR/images/train/2", "images/val/1.jpg"}},
      {"by the first letters", with(two, {"train2017/1.jpg", "train2017/2.jpg", "val2017/1.jpg"}),
          {"train2017/1.jpg", "val2017/1.jpg"}},
      {"by meaning", with(two, {"images/training/1.jpg", "images/training/2.jpg", "images/valid/1.jpg"}),
          {"training/1.jpg", "valid/1.jpg"}},
      {"one more level", with(two, {"train/images/1.jpg", "train/images/2.jpg", "valid/images/1.jpg"}),
          {"train/images/1.jpg", "valid/images/1.jpg"}},
      {"a part of the name of the file", one("2.jpg", "annotations/my_dev.json", {"all/2.jpg", "dev/2.jpg"}),
          {": DIR/dev/2.jpg"}},
      {"an image that the folder lacks is not taken from the other split", with(two, {"train/1.jpg",
          "val/1.jpg", "val/2.jpg"}), {"DIR/train/1.jpg DIR/train/2.jpg"}},
      // Folders of other names.
      {"spread over folders", with({{"x.json", coco({"1.jpg", "2.jpg", "3.jpg"})}}, {"cam1/1.jpg",
          "cam2/2.jpg", "cam3/a/3.jpg"}), {"cam1/1.jpg DIR/cam2/2.jpg DIR/cam3/a/3.jpg"}},
      {"spread over the folders of splits", with({{"lvis_train.json", coco({"1.jpg", "2.jpg", "3.jpg"})}},
          {"train2017/1.jpg", "train2017/2.jpg", "val2017/3.jpg"}),
          {"train2017/1.jpg DIR/train2017/2.jpg DIR/val2017/3.jpg"}},
      {"a stray copy decides nothing", with({{"annotations/instances_train.json", coco({"1.jpg", "2.jpg",
          "3.jpg"})}}, {"images/1.jpg", "images/2.jpg", "images/3.jpg", "train/1.jpg"}),
          {"images/1.jpg DIR/images/2.jpg DIR/images/3.jpg"}},
      {"the folder with more of the images", with({{"x.json", coco({"1.jpg", "2.jpg", "3.jpg"})}},
          {"cam1/1.jpg", "cam2/1.jpg", "cam2/2.jpg", "cam2/3.jpg"}),
          {"cam2/1.jpg DIR/cam2/2.jpg DIR/cam2/3.jpg"}},
      {"most of the images are enough", with({{"x.json", coco({"1.jpg", "2.jpg", "3.jpg"})}},
          {"cam1/1.jpg", "cam1/2.jpg", "cam2/1.jpg", "cam2/2.jpg", "cam2/3.jpg"}),
          {"cam2/1.jpg DIR/cam2/2.jpg DIR/cam2/3.jpg"}},
      {"two recordings, one deeper", with({{"x.json", coco({"1.jpg"})}}, {"one/1.jpg", "two/rgb/1.jpg"}),
          {"such as DIR/one/1.jpg and DIR/two/rgb/1.jpg"}},
      {"copies", {{"x.json", coco({"1.jpg"})}, {"cam1/1.jpg", "same"}, {"cam2/1.jpg", "same"}},
          {": DIR/cam1/1.jpg"}},
      {"two recordings with equal names", with(two, {"images/a/1.jpg", "images/a/2.jpg", "images/b/1.jpg",
          "images/b/2.jpg"}), {"error: DIR/annotations/val.json: two folders have images of its names, such "
          "as DIR/images/a/1.jpg and DIR/images/b/1.jpg; name the folder of its images val, or give this "
          "file as --data and the folder with --images DIR"}},
      {"the same, and one is named", with(two, {"a/1.jpg", "b/1.jpg"}), {": DIR/b/1.jpg"},
          {"annotations/val.json", "", 0, "b"}},
      {"the same, the file has the name of a folder", one("1.jpg", "cam2.json", {"cam1/1.jpg", "cam2/1.jpg"}),
          {": DIR/cam2/1.jpg"}},
      // Names with folders.
      {"relative to images", one("sub/deep/a.jpg", "annotations/x.json", {"images/sub/deep/a.jpg", "a.jpg"}),
          {": DIR/images/sub/deep/a.jpg"}},
      {"with images", one("images/a.jpg", "annotations/x.json", {"images/a.jpg"}), {": DIR/images/a.jpg"}},
      {"the file is beside the images", one("images/a.jpg", "images/x.json", {"images/a.jpg"}),
          {": DIR/images/a.jpg"}, {"images/x.json"}},
      {"with the data set", one("set/images/a.jpg", "set/x.json", {"set/images/a.jpg"}),
          {": DIR/set/images/a.jpg"}, {"set/x.json"}},
      {"relative to annotations", one("../images/a.jpg", "annotations/x.json", {"images/a.jpg"}),
          {": DIR/images/a.jpg", "!note"}},
      {"of Windows", one(R"(images\\sub\\a.jpg)", "annotations/x.json", {"images/sub/a.jpg"}),
          {": DIR/images/sub/a.jpg"}},
      {"absolute", one("DIR/elsewhere/a.jpg", "annotations/x.json", {"elsewhere/a.jpg"}),
          {": DIR/elsewhere/a.jpg"}},
      {"absolute, outside of the data set", one("DIR/elsewhere/a.jpg", "set/annotations/x.json",
          {"elsewhere/a.jpg"}), {": DIR/elsewhere/a.jpg"}, {"set"}},
      {"no images", one("a.png", "a/annotations/x.json", {}), {"error: DIR/a/annotations/x.json: none of its "
          "images was found under DIR/a, such as a.png; give this file as --data and their folder with "
          "--images DIR"}, {"a"}},
      {"longer than any path", one(std::string(5000, 'a'), "x.json", {}), {"none of its images"}},
      {"outside of the data set", one("b.png", "g/x.json", {"b.png"}), {"none of its images"}, {"g"}},
      {"a folder is no image", one("", "x.json", {}), {"none of its images"}},
      // clang-format on
  });
  // Paths of another machine are found by their ends.
  for (const std::string name : {R"(..\\..\\upload\\1\\x.jpg)", "images/1/x.jpg", "/mnt/set/1/x.jpg",
                                 R"(C:\\sets\\1\\x.jpg)", "https://bucket.example/a/1/x.jpg"}) {
    INFO(name);
    TempDir dir;
    put(dir, with({{"annotations/train.json", coco({name})}}, {"pictures/1/x.jpg", "pictures/2/x.jpg"}));
    check_text(reading(dir),
               {": DIR/pictures/1/x.jpg\n", "1 of 1 images were found under DIR by the end of"});
    check_text(reading(dir, {"annotations/train.json", "", 0, "pictures"}), {": DIR/pictures/1/x.jpg\n"});
    fs::rename(dir / "pictures/1", dir / "pictures/3");  // a name that two files have is not guessed
    CHECK_HAS(reading(dir), "two folders have images of its names");
    fs::remove(dir / "pictures/2/x.jpg");
    CHECK_HAS(reading(dir), ": DIR/pictures/3/x.jpg\n");
  }
}

TEST_CASE(
    "formats: --data accepts one COCO file, or one for training and one for validation; --images their "
    "folder") {
  TempDir dir;
  put(dir, {{"a/first.json", coco({"1.jpg"})},
            {"b/second.json", coco({"2.jpg"})},
            {"a/x,y.json", coco({"1.jpg"})},
            {"a/1.jpg", ""},
            {"b/2.jpg", ""},
            {"ann/one.json", coco({"a.png"})},
            {"ann/two.json", coco({"b.png"})},
            {"far/away/a.png", ""},
            {"far/away/b.png", ""}});
  const std::string both = "a/first.json,b/second.json";
  check_text(reading(dir, {both}),
             {"train DIR/a/first.json: DIR/a/1.jpg", "val DIR/b/second.json: DIR/b/2.jpg"});
  check_text(reading(dir, {both, "train"}), {"train DIR/a/first.json", "one split"});
  check_text(reading(dir, {both, "test"}), {"no split \"test\"; it has train, val"});
  check_text(reading(dir, {"a/first.json,a/first.json"}), {"one split"});
  check_text(reading(dir, {"a/first.json,nowhere.json"}), {"nowhere.json is no file"});
  for (const std::string data : {"b", "b/second.json", "a/x,y.json"})
    check_text(reading(dir, {data}), {"one split", "box ", "!error"});
  check_text(reading(dir, {"ann/one.json"}), {"and their folder with --images DIR"});
  check_text(reading(dir, {"ann/one.json", "", 0, "far/away"}), {": DIR/far/away/a.png"});
  check_text(reading(dir, {"ann/one.json,ann/two.json", "", 0, "far/away"}),
             {": DIR/far/away/a.png", ": DIR/far/away/b.png"});
  check_text(reading(dir, {"ann/one.json", "", 0, "ann"}),
             {"--images DIR/ann: DIR/ann/one.json: none of its images"});
  check_text(reading(dir, {"ann/one.json", "", 0, "nowhere"}), {"--images DIR/nowhere is no folder"});
  for (const std::string& data : {std::string("shapes"), dir.path.string(), dir / "x.lmdb"})
    CHECK_HAS(error_of([&] {
                load_splits({data, {}, 0, dir / "far"});
              }),
              "--images is for a COCO JSON file, not for --data " + data);
}

TEST_CASE("formats: the COCO files of a folder are chosen by split; an ambiguous split is an error") {
  TempDir dir;
  const std::string json = coco({"1.jpg"});
  const auto read = [&](const std::string& split, const Names& wanted) {
    check_text(reading(dir, {"", split}), wanted);
  };
  put(dir, {{"1.jpg", ""},
            {"annotations/instances_train.json", json},
            {"annotations/._instances_train.json", json},
            {"x.json", json},
            {"annotations/captions_train.json", "{}"},
            {"annotations/image_info_test-dev.json", "{}"}});
  read("", {"train DIR/annotations/instances_train.json", "one split"});
  read("test", {"no split \"test\"; it has train"});
  put(dir, {{"annotations/instances_test.json", coco({"1.jpg"}, {})}});
  read("", {"train DIR/annotations/instances_train.json", "val DIR/annotations/instances_test.json"});
  put(dir, {{"annotations/instances_val.json", coco({"1.jpg"}, {})}});
  read("", {"val DIR/annotations/instances_val.json"});
  read("test", {"val DIR/annotations/instances_test.json"});
  read("valid", {"val DIR/annotations/instances_val.json"});
  read("dev", {"\"dev\"; it has test, train, val"});
  put(dir, {{"annotations/val_small.json", json}});
  read("", {"several files for 'val'"});
  read("test", {"val DIR/annotations/instances_test.json"});  // the ambiguous split is not needed
  // Files of other programs are left out.
  const Names others = {R"({"categories": [{"id": 0, "name": "cat"}], "info": {"year": 2024}})",
                        R"({"images": 12, "annotations": 90})", R"([{"id": 1}])", R"({"1": "cat"})", ""};
  Files beside = {
      {"train.json", coco({"a.png"})}, {"val.json", coco({"b.png"})}, {"train/a.png", ""}, {"val/b.png", ""}};
  for (const auto& other : others) beside.emplace_back(concat("stats_train", beside.size(), ".json"), other);
  Files in_annotations = beside;
  for (auto& file : in_annotations)
    if (file.first.ends_with(".json")) file.first = "annotations/" + file.first;
  check_rows({
      // clang-format off
      {"one split", {{"val.json", json}, {"1.jpg", ""}}, {"one split"}},
      {"no split", {{"one.json", json}, {"two.json", json}, {"1.jpg", ""}}, {"several JSON files",
          "one, two"}},
      {"no split, named", {{"one.json", json}, {"two.json", json}, {"1.jpg", ""}}, {"one split",
          "DIR/two.json"}, {"", "two"}},
      {"other files", beside, {"val DIR/val.json: DIR/val/b.png"}},
      {"other files in annotations", in_annotations, {"val DIR/annotations/val.json: DIR/val/b.png"}},
      {"no list", {{"b/annotations/x.json", R"({"images": [], "categories": [], "annotations": []})"}},
          {"x.json lists no images"}, {"b"}},
      {"no categories", {{"annotations/x.json", coco({"a"}, {}, {})}}, {"x.json lists no categories"}},
      {"no JSON", {{"annotations/x.json", ""}}, {"x.json: not valid JSON"}},
      {"other keys", {{"x.json",
          R"({"images":[{"id":1,"filename":"a.jpg"}],"categories":[{"id":1,"name":"a"}],)"
          R"("annotation":[{"id":1,"image_id":1,"category_id":1,"bbox":[1,2,3,4]}]})"},
          {"a.jpg", ""}}, {": DIR/a.jpg\nclasses a\nbox DIR/x.json: annotation 1 of image 1 class 1 [1 2 3 "
          "4]"}},
      // clang-format on
  });
}

TEST_CASE("formats: COCO images that are listed twice are put together; two names of one file are an error") {
  const Names boxes = {"3 1 [1,2,3,4]", "1 1 [5,6,7,8]"};
  check_rows({
      // clang-format off
      {"twice", {{"train.json", coco({"a.png 40x30", "b.png", "a.png 40x30"}, boxes)}, {"train/a.png", ""},
          {"train/b.png", ""}}, {"train/a.png DIR/train/b.png\n", "1 of image 1 class 1 [1 2 3 4]",
          "2 of image 1 class 1 [5 6 7 8]", "1 images repeat the file_name of another one, such as image 3"}},
      {"unknown width", {{"train.json", coco({"a.png 0x30", "b.png", "a.png 40x30"}, boxes)}, {"train/a.png",
          ""}}, {"1 images repeat"}},
      {"other size", {{"train.json", coco({"a.png 40x30", "b.png", "a.png 41x30"}, boxes)}, {"train/a.png",
          ""}}, {"the images 1 (a.png, 40x30) and 3 (a.png, 41x30)"}},
      {"a list that was appended to itself", {{"train.json", coco({"a.png", "b.png", "a.png"},
          {"3 1 [1,2,3,4]", "1 1 [1,2,3,4]"})}, {"a.png", ""}}, {"2 of image 1 class 1 [1 2 3 4]",
          "!annotation 1"}},
      {"two names of one file", {{"train.json", coco({"x/1/a.png", "b.png", "x/2/a.png"}, boxes)},
          {"pictures/of/january/a.png", ""}}, {"are read from the same file"}},
      // clang-format on
  });
}

TEST_CASE("formats: a category without boxes that is the supercategory of all others is left out") {
  const auto json = [](int category, const std::string& parent) {
    std::string text = coco({"a.png"}, {concat("1 ", category, " [1,2,10,12]")}, {"cells", "red", "white"});
    text.insert(text.find("\"red\"") + 5, ",\"supercategory\":\"cells\"");
    return text.insert(text.find("\"white\"") + 7, ",\"supercategory\":\"" + parent + "\"");
  };
  const auto files = [&](const std::string& train, const std::string& val) {
    return Files{{"train.json", train}, {"val.json", val}, {"a.png", "@20x20"}};
  };
  check_rows(
      {
          // clang-format off
      {"dropped", files(json(2, "cells"), json(3, "cells")), {"train.json: 1 images\nclasses red, white\n",
          "val.json: 1 images\nclasses red, white\nbox DIR/a.png class 1", "left out the category cells",
          "!unknown class"}},
      {"with a box", files(json(2, "cells"), json(1, "cells")), {"classes cells, red, white"}},
      {"not of all", files(json(2, "none"), json(3, "none")), {"classes cells, red, white"}},
          // clang-format on
      },
      loading);
  TempDir dir;
  put(dir, files(json(2, "cells"), json(3, "cells")));
  const auto classes = [&](size_t of_model) {
    return load_splits({dir.path.string()}, false, of_model).val.classes;
  };
  CHECK(classes(0) == Names{"red", "white"});
  CHECK(classes(3) == Names{"cells", "red", "white"});  // a model of another program
}

// ---- Pascal VOC

TEST_CASE("formats: Pascal VOC objects are read with class, box and line number") {
  TempDir dir;
  put(dir, {{"Annotations/b.xml", R"(<?xml version="1.0"?>
<!DOCTYPE annotation [<!ENTITY a "cat">]>
<annotation verified="yes">
  <filename>old name.jpg</filename>
  <size><width>640</width><height>480</height><depth>3</depth></size>
  <object>
    <name> dog &amp;  co
    </name>
    <difficult>1</difficult>
    <bndbox><xmax>30.5</xmax><xmin> 10.25 </xmin><ymin>-2</ymin><ymax>1e2</ymax></bndbox>
    <part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>
  </object>
  <object><name>cat</name><difficult>0</difficult><bndbox><xmin>5</xmin><ymin>6</ymin><xmax>5</xmax><ymax>4</ymax></bndbox></object>
</annotation>)"},
            {"Annotations/a.xml", "\xEF\xBB\xBF" + voc("<size><width>0</width><height>x</height></size>\r\n" +
                                                       object("Cat", "1 2 3 4"))},
            {"Annotations/c.xml", voc("<filename>C:\\photos\\c.jpg</filename>")},
            {"Annotations/d e.xml", voc("<filename>other.jpg</filename>")},
            {"Annotations/sub/f.xml", voc("<size><width>1e12</width><height>-5</height></size>")}});
  put_all(dir, {"JPEGImages/b.JPG", "JPEGImages/old name.jpg", "JPEGImages/a.PnG", "JPEGImages/other.jpg",
                "JPEGImages/sub/f.webp"});
  // The name of the XML file is preferred to <filename>. c has no image; its path is a guess. A later check
  // refuses the box of the second object of b.
  CHECK_HAS(reading(dir),
            "train DIR (all): DIR/JPEGImages/a.PnG DIR/JPEGImages/b.JPG DIR/JPEGImages/c.jpg "
            "DIR/JPEGImages/other.jpg "
            "DIR/JPEGImages/sub/f.webp\nclasses Cat, cat, dog & co\n"
            "box DIR/Annotations/a.xml:3 class 0 [1 2 2 2]\n"
            "box DIR/Annotations/b.xml:6 class 2 [10.25 -2 20.25 102] crowd\n"
            "box DIR/Annotations/b.xml:13 class 1 [5 6 0 -2]\n"
            "note: DIR (all): 2 images have no XML file and are not used: old name, other\none split");
  const Source source = read_sources({dir.path.string()}).train;
  CHECK_FALSE(source.relative);
  std::vector<int> sizes;
  for (const auto& image : source.coco.images)
    sizes.insert(sizes.end(), {int(image.id), image.width, image.height});
  CHECK(sizes == std::vector<int>{1, 0, 0, 2, 640, 480, 3, 0, 0, 4, 0, 0, 5, 0, 0});
  CHECK(source.coco.annotations.at(0).area == 4);
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
           Case{{"train"}, "", "train", ""},
           Case{{"val"}, "", "val", ""},
           Case{{"cat_train", "cat_val", "trains"}, "", "all", ""},
       }) {
    INFO(c.lists.at(0) << " and " << c.lists.size() - 1 << " more, split " << c.split);
    TempDir dir;
    Files files = {{"ImageSets/Main/cat_train.txt", "a -1\n"}};
    std::set<std::string> classes = {"cat"};
    const auto add = [&](const std::string& name, const std::string& cls) {
      files.insert(files.end(),
                   {{"Annotations/" + name + ".xml", voc(object(cls))}, {"JPEGImages/" + name + ".jpg", ""}});
    };
    add("a", "cat");
    add("unlisted", "cat");
    for (const auto& list : c.lists) {
      const std::string cls = list == "valid" ? "val" : list;
      add("img_" + cls, cls);
      files.emplace_back("ImageSets/Main/" + list + ".txt", "\xEF\xBB\xBFimg_" + cls + "  -1\r\n\r\na\r\n");
      classes.insert(cls);
    }
    put(dir, files);
    const auto wanted = [&](const std::string& name, const std::string& split) {
      const std::string images =
          split == "all" ? "" : " DIR/JPEGImages/a.jpg DIR/JPEGImages/img_" + split + ".jpg\nclasses ";
      return concat(name, " DIR (", split, "):", images,
                    split == "all" ? "" : listed({classes.begin(), classes.end()}, 99));
    };
    check_text(
        reading(dir, {"", c.split}),
        {wanted("train", c.train), c.val.empty() ? "one split" : wanted("val", c.val), "!image missing"});
  }
  const Files spaces = {{"Annotations/a b.xml", voc(object("cat"))}, {"JPEGImages/a b.jpg", ""},
                        {"Annotations/a.xml", voc(object("cat"))},   {"JPEGImages/a.jpg", ""},
                        {"ImageSets/Main/train.txt", "a b\n"},       {"ImageSets/Main/val.txt", "\n"}};
  check_rows({
      // clang-format off
      {"names with spaces, an empty list", spaces, {": DIR/JPEGImages/a b.jpg\n", "one split"}},
      {"no such list", spaces, {"no split \"test\"; it has train"}, {"", "test"}},
      // clang-format on
  });
}

TEST_CASE("formats: Pascal VOC data sets are found in the common folder layouts") {
  const auto set = [](const std::string& root) {
    return Files{{root + "Annotations/a.xml", voc(object("cat"))}, {root + "JPEGImages/a.jpg", ""}};
  };
  std::vector<Row> rows;
  for (const std::string root : {"", "BCCD/", "VOC2007/", "VOCdevkit/VOC2007/"})
    rows.push_back({root, set(root), {": DIR/" + root + "JPEGImages/a.jpg\n", "one split"}});
  Files two = set("VOCdevkit/VOC2007/"), roboflow,
        same_stem = {{"JPEGImages/a.jpg", "1"}, {"JPEGImages/a.png", "2"}, {"JPEGImages/b.jpg", ""}};
  for (const auto& file : set("VOCdevkit/VOC2012/")) two.push_back(file);
  for (const std::string split : {"train", "valid", "test"})
    roboflow.insert(roboflow.end(),
                    {{split + "/a.rf.1.xml", voc(object(split))}, {split + "/a.rf.1.png", ""}});
  same_stem.emplace_back("Annotations/b.xml", voc(object("cat")));
  const auto named = [&](const std::string& name) {
    Files files = same_stem;
    files.emplace_back("Annotations/a.xml", voc("<filename>" + name + "</filename>" + object("cat")));
    return files;
  };
  rows.insert(
      rows.end(),
      {{"several", two, {"DIR/VOCdevkit/VOC2007, DIR/VOCdevkit/VOC2012", "give one"}},
       {"one of several", two, {": DIR/VOCdevkit/VOC2012/JPEGImages/a.jpg"}, {"VOCdevkit/VOC2012"}},
       {"Kaggle", {{"annotations/a.xml", voc(object("sign"))}, {"images/a.png", ""}}, {": DIR/images/a.png"}},
       {"Roboflow",
        roboflow,
        {"(train): DIR/train/a.rf.1.png\nclasses test, train, valid", "(val): DIR/valid/a.rf.1.png",
         "class 2 "}},
       {"Roboflow, test", roboflow, {"(test): DIR/test/a.rf.1.png", "class 0 "}, {"", "test"}},
       {"labelImg",
        {{"a.xml", voc(object("cat"))}, {"b.xml", voc(object("cat"))}, {"a.jpg", ""}, {"b.JPG", ""}},
        {": DIR/a.jpg DIR/b.JPG\nclasses cat\nbox", "one split"}},
       {"XML files without images", {{"a.xml", voc(object("cat"))}}, {"is no data set"}},
       {"<filename> tells two images apart",
        named("a.png"),
        {": DIR/JPEGImages/a.png DIR/JPEGImages/b.jpg\n"}},
       {"<filename> names neither",
        named("c.png"),
        {": DIR/JPEGImages/b.jpg\n",
         "label file of several images, which are left out: "
         "DIR/Annotations/a.xml: DIR/JPEGImages/a.jpg, DIR/JPEGImages/a.png; keep one"}}});
  check_rows(rows);
}

TEST_CASE("formats: unreadable Pascal VOC files and objects are skipped and reported with their line") {
  TempDir dir;
  const std::string good = object("cat");
  std::string deep = "<annotation>";
  for (int i = 0; i < 200000; ++i) deep += "<object>";
  put(dir,
      {{"JPEGImages/good.jpg", ""},
       {"Annotations/good.xml", voc(good)},
       {"Annotations/broken.xml", "<annotation>\n<object>\n<name>cat</nam\n</object>"},
       {"Annotations/cut.xml", voc(good).substr(0, 40)},
       {"Annotations/empty.xml", ""},
       {"Annotations/html.xml", "<html><body>Not Found</body></html>"},
       {"Annotations/binary.xml", std::string("\x00\xFF\x00<<<>\x01", 8)},
       {"Annotations/folder.xml/", ""},
       {"Annotations/objects.xml",
        voc("<object><name>cat</name></object>\n" + good + "\n" + object("cat", "one 2 3 4") + "\n" +
            object("cat", "1 2 nan 4") + "\n" + object("cat", "1 2 3 1e999") + "\n" +
            object("cat", "1 2 3 0x10") + "\n" + object("") + "\n" + object("cat", "1") +
            "\n<object><name>cat</name><bndbox><xmin>1\n2</xmin></bndbox></object>")},
       {"Annotations/deep.xml", deep},
       {"Annotations/bomb.xml",
        "<!DOCTYPE a [<!ENTITY b \"aaaaaaaaaa\"><!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;\">"
        "<!ENTITY x SYSTEM \"file:///etc/passwd\">]>" +
            voc(object("&c;&x;"))},
       {"ImageSets/Main/train.txt",
        "good\nbroken\ncut\nempty\nhtml\nbinary\nfolder\nobjects\ndeep\nbomb\ngone\n../../etc/passwd\n"}});
  const Source source = read_sources({dir.path.string()}).train;
  CHECK(source.problems.size() == 7 + 2 + 8);
  Names wanted = {"classes &c;&x;, cat\n",  // entities are not expanded
                  "box DIR/Annotations/objects.xml:3 class 1",
                  "label file missing: DIR/Annotations/gone.xml: "};
  for (const std::string name :
       {"broken.xml:3: ", "cut.xml:2: ", "empty.xml:1: ", "html.xml:1: no <annotation>",
        "binary.xml:1: ", "deep.xml:1: ", "folder.xml: "})
    wanted.push_back("label file cannot be read: DIR/Annotations/" + name);
  for (const std::string end :
       {"2: object: no <bndbox>", "4: object: xmin is \"one\"", "5: object: xmax is \"nan\"",
        "6: object: ymax is \"1e999\"", "7: object: ymax is \"0x10\"", "8: object: no <name>",
        "9: object: ymin is \"\"", "10: object: xmin is \"1?2\""})
    wanted.push_back("label cannot be read: DIR/Annotations/objects.xml:" + end);
  check_text(reading(dir), wanted);
  put(dir, {{"ImageSets/Main/train.txt", "gone\nempty\n"}});
  CHECK_HAS(reading(dir), "none of its 2 annotation files can be used");
  put(dir, {{"ImageSets/Main/train.txt", std::string("\xFF\xFEg\0o\0", 6)}});
  CHECK_HAS(reading(dir), "train.txt: is not UTF-8 text");
}

// ---- YOLO

namespace {

// A data set of one folder with these label files, of the images a.jpg, b.jpg, ...
Files yolo(const Names& labels, const std::string& more = "", const std::string& image = "") {
  Files files = {{"data.yaml", "train: images\nnames: [cat, dog]\n" + more}};
  for (size_t i = 0; i < labels.size(); ++i)
    files.insert(files.end(), {{concat("images/", char('a' + i), image.empty() ? ".jpg" : ".png"), image},
                               {concat("labels/", char('a' + i), ".txt"), labels[i]}});
  return files;
}

}  // namespace

TEST_CASE(
    "formats: YOLO label lines are boxes or polygons; unreadable lines and files are reported with their "
    "line") {
  TempDir dir;
  put(dir, yolo({"\xEF\xBB\xBF"
                 "1 0.5 0.5 0.25 0.5\r\n\r\n  0\t0.125 0.25 1e-1 2.5E-1  \r\n"
                 "0 0.4 0.9 0.2 0.3 0.6 0.1\n1.0 .1 .1 .2 .1 .2 .3 .1 .3\n+0 +.5 +0.5 +1 1",
                 "", "7 0.5 0.5 1 1\n-1 0.5 0.5 1 1\n0 40 50 -10 0\n"}));
  put_all(dir, {"images/d.jpg"});
  CHECK_HAS(
      reading(dir),
      "train DIR/data.yaml (train): DIR/images/a.jpg DIR/images/b.jpg DIR/images/c.jpg DIR/images/d.jpg\n"
      "classes cat, dog\n"
      "box DIR/labels/a.txt:1 class 1 [0.375 0.25 0.25 0.5]\n"
      "box DIR/labels/a.txt:3 class 0 [0.075 0.125 0.1 0.25]\n"
      "box DIR/labels/a.txt:4 class 0 [0.2 0.1 0.4 0.8]\n"
      "box DIR/labels/a.txt:5 class 1 [0.1 0.1 0.1 0.2]\n"
      "box DIR/labels/a.txt:6 class 0 [0 0 1 1]\n"
      "box DIR/labels/c.txt:1 class 7 [0 0 1 1]\n"  // a later check refuses these
      "box DIR/labels/c.txt:2 class -1 [0 0 1 1]\n"
      "box DIR/labels/c.txt:3 class 0 [45 50 -10 0]\n"
      "note: DIR/data.yaml (train): 1 of 4 images have no label file and count as images without "
      "objects: d.jpg\none split");
  CHECK(read_sources({dir.path.string()}).train.relative);

  // The second one has a confidence.
  const Names bad = {"0 0.5 0.5 0.5",       "0 0.5 0.5 0.5 0.5 0.9", "0 0.1 0.1 0.2 0.2 0.3 0.3 0.9",
                     "0.5 0.5 0.5 0.5 0.5", "cat 0.5 0.5 0.5 0.5",   "0 nan 0.5 0.5 0.5",
                     "0 0.5 inf 0.5 0.5",   "0 0.5 0.5 1e999 0.5",   "0 0.5 0.5 0.5 0.5x",
                     "0 0,5 0,5 0,5 0,5",   "0,0.5,0.5,0.5,0.5",     "1e300 0.5 0.5 0.5 0.5",
                     "0 0.5 0.5 1e300 0.5", "\xFF\xFE\x01\x02",      "# a comment",
                     "0 +-0.5 0.5 0.5 0.5"};
  std::string lines;
  Names wanted = {
      ": DIR/images/a.jpg DIR/images/c.jpg\n",  // images with an unreadable label file are skipped
      "label cannot be read: DIR/labels/c.txt:2: \"999",
      "label file cannot be read: DIR/labels/b.txt: not a text file",
      "label file cannot be read: DIR/labels/d.txt: Is a directory",
      ":3: \"0 0.5 0.5 0.5 0.5 0.9\" is not",
      "delete the sixth column if it is a confidence"};
  for (size_t i = 0; i < bad.size(); ++i) {
    lines += bad[i] + "\n" + kLine;
    wanted.push_back(concat("label cannot be read: DIR/labels/a.txt:", 2 * i + 1, ": \""));
    wanted.push_back(concat("box DIR/labels/a.txt:", 2 * i + 2, " class 0"));
  }
  TempDir other;
  put(other, yolo({lines, std::string("0 0.5 0.5 0.5 0.5\n\0\1\2", 22), kLine + std::string(100000, '9')}));
  put(other, {{"images/d.jpg", ""}, {"labels/d.txt/", ""}});
  check_text(reading(other), wanted);
  for (const auto& problem : read_sources({other.path.string()}).train.problems)
    CHECK(problem.second.size() < 300);
  for (const char* image : {"a", "b", "c"}) fs::remove(other / concat("images/", image, ".jpg"));
  check_text(reading(other), {"none of its 1 label files can be used", "labels/d.txt: Is a directory"});
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
  const std::string line = "0 0.5 0.5 0.5 0.5", points = " 0.3 0.4 0.4 0.4 0.5 0.4 0.6 0.4",
                    with_visibility = line + " 0.3 0.4 2 0.6 0.7 1 0 0 0\n", without = line + points + "\n",
                    whole = "a.txt:1 class 0 [0.25 0.25 0.5 0.5]";
  const auto last = [](Names lines, const std::string& other) {
    lines.back() = other;
    return lines;
  };
  check_rows({
      // clang-format off
      {"kpt_shape", yolo({line + " 0.1 0.1 2 0.2 0.2 2\n"}, "kpt_shape: [2, 3]\n"), {whole, "!label cannot"}},
      {"visibilities", yolo({with_visibility, with_visibility}), {whole, "the labels with 14 columns are "
          "read as class, box and keypoints"}},
      {"an object without keypoints", yolo({with_visibility + line + "\n"}), {whole, "14 columns",
          "!label cannot"}},
      // Without visibilities, small polygons may look like that: only a note.
      {"no visibilities", yolo(Names(10, without)), {"!" + whole,
          "the labels with 13 columns are read as polygons",
          "add this line to data.yaml: kpt_shape: [4, 2]"}},
      {"a point outside of the box", yolo(last(Names(10, without), line +
          " 0.3 0.4 0.3 0.4 0.3 0.4 0.99 0.4\n")), {"!" + whole, "!keypoints"}},
      {"lines of two lengths", yolo(last(Names(10, without), line + points + " 0.5 0.5\n")), {"!" + whole,
          "!keypoints"}},
      {"corners of a box", yolo(Names(10, line + " 0.4 0.4 0.6 0.4\n")), {"!" + whole, "!keypoints"}},
      {"14 columns are no polygon", yolo(last(Names(10, with_visibility), line +
          " 0.3 0.4 2 0.99 0.7 1 0 0 0\n")), {"a.txt:1: ", "b.txt:1: ", "j.txt:1: ", "!box"}},
      // clang-format on
  });
}

TEST_CASE("formats: YOLO label files without an image are reported; relative paths work") {
  TempDir dir;
  put_all(dir, {"images/train/a.jpg", "images/train/c.psd", "images/val/b.jpg"});
  for (const std::string name : {"train/a", "train/gone", "train/c", "val/b", "train/classes"})
    put(dir, {{"labels/" + name + ".txt", kLine}});
  put(dir, {{"data.yaml", "train: images/train\nval: images/val\nnames: [cat]"}});
  const std::string orphan = "label file without image: DIR/labels/train/gone.txt\n";
  const auto check_one = [&] {
    const std::string text = reading(dir);
    CHECK_HAS(text, orphan);
    CHECK(count_of(text, "label file without image") == 1);
  };
  check_one();
  const fs::path before = fs::current_path();
  fs::current_path(dir.path);
  CHECK_HAS(described("", read_sources({"data.yaml"}).train),
            "label file without image: labels/train/gone.txt\n");
  fs::current_path(before);
  // A list names a part of the images of a folder: the others are no orphans.
  put(dir, {{"images/train/d.jpg", ""},
            {"labels/train/d.txt", kLine},
            {"list.txt", "images/train/a.jpg\nimages/train/a.jpg\n"},
            {"data.yaml", "train: list.txt\nval: images/val\nnames: [cat]"}});
  check_one();
}

TEST_CASE("formats: YOLO images are listed recursively and paired with their label files") {
  TempDir dir;
  put_all(dir, {"images/a.JPG", "images/b.Jpeg", "images/sub/c.png", "images/sub/d.tiff", "images/e.bmp",
                "images/f.webp", "images/g.tif", "images/a.png", "images/h.gif", "images/notes.txt",
                "images/._a.jpg", "images/.hidden/x.jpg", "images/x.jpg/i.jpg", "elsewhere/k.jpg",
                "images/@eaDir/a.jpg/thumb.jpg", "images/lost+found/l.jpg"});
  fs::create_directory_symlink(dir / "images", dir / "images/sub/loop");
  fs::create_directory_symlink(dir / "elsewhere", dir / "images/link");
  fs::create_symlink(dir / "nowhere", dir / "images/lost.jpg");
  put(dir, {{"data.yaml", "train: images\nnames: [cat]"}});
  // If no label file exists, the path is wrong most of the time.
  check_text(
      reading(dir),
      {": DIR/images/a.JPG DIR/images/a.png DIR/images/b.Jpeg DIR/images/e.bmp DIR/images/f.webp "
       "DIR/images/g.tif DIR/images/h.gif DIR/images/link/k.jpg DIR/images/lost.jpg DIR/images/sub/c.png "
       "DIR/images/sub/d.tiff DIR/images/x.jpg/i.jpg\n",
       "no image has labels: expected the first label file at DIR/labels/a.txt\n",
       "12 of 12 images have no label file and count as images without objects: a.JPG, a.png, b.Jpeg",
       "skipped: DIR/images/@eaDir\n", "skipped: DIR/images/lost+found\n"});
  CHECK(yolo_label_file("/images/x/images/train/a.b.jpg") == "/images/x/labels/train/a.b.txt");
  CHECK(yolo_label_file("images/a.jpg") == "labels/a.txt");
  CHECK(yolo_label_file("VOC2007/JPEGImages/a.jpg") == "VOC2007/labels/a.txt");  // of Darknet
  CHECK(yolo_label_file("x/images/images/images.jpg") == "x/images/labels/images.txt");
  CHECK(yolo_label_file("x/my_images/train/a.jpg") == "x/my_images/train/a.txt");
  Names skipped;
  CHECK_HAS(error_of([&] { files_under(dir / "nowhere", kImages, skipped); }), "cannot be listed");
  Files shared = yolo({kLine, kLine, ""});
  for (const std::string name : {"a", "c"}) shared.emplace_back("images/" + name + ".png", "");
  Files only_shared = yolo({kLine});
  only_shared.emplace_back("images/a.png", "");
  check_rows({
      // clang-format off
      {"beside the images", {{"photos/a.jpg", ""}, {"photos/a.txt", kLine}, {"data.yaml",
          "train: photos\nnames: [cat]"}}, {"box DIR/photos/a.txt:1"}},
      {"beside the images, in a folder images", {{"images/a.jpg", ""}, {"images/a.txt", kLine}, {"data.yaml",
          "train: images\nnames: [cat]"}}, {"box DIR/images/a.txt:1"}},
      // An empty label file may belong to two images.
      {"one label file for two images", shared, {": DIR/images/b.jpg DIR/images/c.jpg DIR/images/c.png\n",
          "label file of several images, which are left out: DIR/labels/a.txt: DIR/images/a.jpg, "
          "DIR/images/a.png; keep one of them"}},
      {"no other images", only_shared, {"none of its 2 label files can be used; correct them: "
          "DIR/labels/a.txt: DIR/images/a.jpg, "}},
      // clang-format on
  });
}

TEST_CASE("formats: data.yaml: image paths may be absolute or relative to several folders") {
  struct Case {
    std::string yaml;     // in DIR/set/data.yaml
    Names images, train;  // existing files, expected files
  };
  const Names listed_images = {"set/images/c/1.jpg", "set/images/lost.jpg", "set/images/lost.jpg",
                               "set/lists/d.jpg"};
  for (const Case& c : {
           Case{"train: images/train", {"set/images/train/a.jpg"}, {}},
           Case{"path: .\ntrain: images/train/", {"set/images/train/a.jpg"}, {}},
           Case{"path: ../other\ntrain: ./images",
                {"other/images/a.jpg", "set/images/b.jpg"},
                {"other/images/a.jpg"}},
           Case{"path: /not/here\ntrain: images", {"set/images/a.jpg"}, {}},
           Case{"path: DIR/other\ntrain: images", {"other/images/a.jpg"}, {}},
           Case{"train: DIR/other/images", {"other/images/a.jpg"}, {}},
           Case{"path: sub\ntrain: images", {"set/sub/b.jpg", "set/images/a.jpg"}, {"set/images/a.jpg"}},
           Case{"train: ../train/images", {"set/train/images/a.jpg"}, {}},
           Case{"train: ../train/images",
                {"set/train/images/a.jpg", "train/images/b.jpg"},
                {"train/images/b.jpg"}},
           Case{"train: [images/b, images/a]", {"set/images/a/2.jpg", "set/images/b/1.jpg"}, {}},
           Case{"train:\n- images/b\n- lists/other.txt",
                {"set/images/b/1.jpg", "set/lists/e.jpg", "set/f.jpg"},
                {"set/f.jpg", "set/images/b/1.jpg", "set/lists/e.jpg"}},
           Case{"path: /not/here\ntrain: lists/train.txt",
                {"set/images/c/1.jpg", "set/lists/d.jpg"},
                {"set/images/c/1.jpg", "set/images/lost.jpg", "set/images/lost.jpg", "set/lists/d.jpg"}},
           Case{"train: lists/other.txt", {"set/lists/e.jpg", "set/f.jpg"}, {"set/f.jpg", "set/lists/e.jpg"}},
           Case{"path: sub\ntrain: ../train/images", {"set/sub/train/images/a.jpg"}, {}},
           Case{"train: x.txt", {"set/x.txt/a.jpg"}, {}},  // x.txt is a folder
           Case{"train: C:\\sets\\cells\\images\\train", {"set/images/train/a.jpg"}, {}},
           Case{"train: images\\val", {"set/images/val/b.jpg"}, {}},
           Case{"train: lists/far.txt", {"set/cam1/a.jpg", "set/cam2/b.jpg"}, {}},
       }) {
    INFO(c.yaml);
    TempDir dir;
    put_all(dir, c.images);
    put(dir, {{"set/data.yaml", c.yaml + "\nnames: [cat]\n"},
              {"set/lists/other.txt", "e.jpg\n./f.jpg"},
              {"set/lists/far.txt", "D:\\old\\cam1\\a.jpg\nE:\\x\\cam2\\b.jpg\n"},
              {"set/lists/train.txt",
               "\xEF\xBB\xBF./d.jpg\r\n\r\nimages\\c\\1.jpg\r\nimages/lost.jpg\n./images/lost.jpg\n"}});
    std::string wanted = "train DIR/set/data.yaml (train):";
    for (const std::string& image : c.train.empty() ? c.images : c.train) wanted += " DIR/" + image;
    CHECK_HAS(reading(dir, {"set/data.yaml"}), wanted + "\n");
  }
  TempDir dir;
  put(dir, {{"data.yaml", "train: images\nval: ../v/images\nnames: [cat]"}, {"images/a.jpg", ""}});
  check_text(reading(dir), {"DIR/data.yaml: val: neither a folder nor a .txt",
                            (dir.path.parent_path() / "v/images").string()});
  CHECK_HAS(reading(dir, {"", "train"}), ": DIR/images/a.jpg");  // val is not needed
  put(dir, {{"v/images/notes.txt", ""}});
  CHECK_HAS(reading(dir), "val: no images in ../v/images");
  check_rows({
      // clang-format off
      {"a list of two recordings with equal names", {{"data.yaml", "train: list.txt\nnames: [cat]"},
          {"list.txt", "/old/x/1.jpg\n"}, {"cam1/1.jpg", "1"}, {"cam2/1.jpg", "2"}},
          {"list.txt: two folders have images of its names", "correct the paths in the list"}},
      // clang-format on
  });
}

TEST_CASE("formats: data.yaml: each split has a key") {
  struct Case {
    std::string keys, split, train, val;
  };
  for (const Case& c :
       {Case{"train val test", "", "train", "val"}, Case{"train val test", "test", "train", "test"},
        Case{"train valid", "", "train", "valid"}, Case{"train validation", "val", "train", "validation"},
        Case{"train test", "", "train", "test"}, Case{"val", "", "val", ""}}) {
    INFO(c.keys << " " << c.split);
    TempDir dir;
    std::string yaml = "names: [cat]\ndownload: https://example.com/a.zip\n";
    std::istringstream keys(c.keys);
    for (std::string key; keys >> key;) {
      put_all(dir, {key + "/images/" + key + ".jpg"});
      yaml += key + ": " + key + "/images\n";
    }
    if (!has(c.keys, "test")) yaml += "test:  # optional\n";
    put(dir, {{"data.yaml", yaml}});
    check_text(reading(dir, {"", c.split}),
               {c.train + "): DIR/" + c.train + "/images/" + c.train + ".jpg\n",
                c.val.empty() ? "one split" : "): DIR/" + c.val + "/images/" + c.val + ".jpg\n"});
    if (!has(c.keys, "test")) CHECK_HAS(reading(dir, {"", "test"}), "no split \"test\"; it has ");
  }
}

TEST_CASE("formats: data.yaml: classes are a list, a map or a count; errors are reported with their line") {
  const std::string train = "train: images\n";
  std::string nested;
  for (int i = 0; i < 1000; ++i) nested += std::string(i, ' ') + "a:\n";
  std::vector<std::pair<std::string, std::string>> rows = {
      // the file, and a part of the text
      {"\xEF\xBB\xBFnames: [cat, 'a, b', \"null\", 7, yes]\r\nnc: 5\r\n" + train,
       "classes cat, a, b, null, 7, yes\n"},
      {"names:\n- cat\n- dog\n" + train, "classes cat, dog\n"},
      {"names:\r\n  1: dog\r\n  0: cat\r\n  2: \xC3\xA9l\xC3\xA9phant\r\n" + train,
       "classes cat, dog, \xC3\xA9l\xC3\xA9phant\n"},
      {"names: {0: cat}\nnc: 1\n" + train, "classes cat\n"},
      {"nc: 3\n" + train, "classes 0, 1, 2\n"},
      {"names:\nnc: 2\n" + train, "classes 0, 1\n"},
      {train + "names: [cat, dog", "not valid YAML"},
      {train + "names:\n  - cat\n dog: 1", "data.yaml:4: not valid YAML"},
      {train + "names: &x [*y]", "data.yaml:2: not valid YAML"},
      {train + "names: [cat]\nval: a\nval: b", "data.yaml:4: a second val"},
      {"", "has no keys"},
      {"just text", "has no keys"},
      {"- a\n- b", "has no keys"},
      {std::string("\x89PNG\r\n\x1A\n\0\0", 10), "is not UTF-8 text"},
      {train, "no class names"},
      {"names: [cat]", "no train and no val"},
      {train + "names: cat", "data.yaml:2: names must be a list"},
      {train + "names: []", "data.yaml:2: names is empty"},
      {train + "names: {}", "data.yaml:2: names is empty"},
      {train + "names: [cat, [dog]]", "data.yaml:2: names has no text for class 1 of 2"},
      {train + "names: [cat, null]", "class 1 of 2"},
      {train + "names: &a [cat, *a]", "class 1 of 2"},
      {train + "names: {0: cat, 2: dog}", "data.yaml:2: names has no text for class 1 of 2"},
      {train + "names: {1: cat, 2: dog}", "class 0 of 2"},
      {train + "names: {a: cat}", "class 0 of 1"},
      {train + "names: {0: cat, 0: dog}", "class 1 of 2"},
      {train + "names: {1000000000: cat}", "class 0 of 1"},
      {train + "\nnc: 3\nnames: [a, b]", "data.yaml:3: nc is \"3\", names has 2 entries"},
      {"names: [a]\ntrain: 3", "train: neither a folder nor a .txt"},
      {"names: [a]\npath: [x]\ntrain: images/a.jpg", "neither a folder nor a .txt"},
      {train + "names: " + std::string(20000, '['), "not valid YAML"},
      {std::string(20000, '{'), "not valid YAML"},
      {nested, "error: DIR/data.yaml"},
      {"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + train + "names: *c", "class 0 of 2"}};
  for (const std::string nc : {"0", "-1", "2.5", "many", "1000000000", "1e30", "[1]", "{}"})
    rows.emplace_back(train + "nc: " + nc, "data.yaml:2: nc is ");
  for (const std::string value : {"{a: b}", "[]", "[[a]]", "[a, {}]", "['']"})
    rows.emplace_back("names: [a]\ntrain: " + value, "data.yaml:2: train must be a folder");
  for (const auto& [yaml, wanted] : rows) {
    const std::string begin = yaml.substr(0, 200);
    INFO(begin);
    TempDir dir;
    put(dir, {{"images/a.jpg", ""}, {"data.yaml", yaml}});
    check_text(reading(dir, {"data.yaml"}), {wanted, "DIR/data.yaml"});
  }
}

TEST_CASE("formats: a YOLO folder without class names is answered with a data.yaml that is correct for it") {
  TempDir dir;
  put_all(dir, {"x/images/train/a.jpg", "x/images/val/b.jpg", "y/train/images/a.jpg", "y/valid/images/b.jpg",
                "z/images/a.jpg", "z/images/b.jpg"});
  put_all(dir, {"x/labels/train/a.txt", "y/train/labels/a.txt", "z/labels/a.txt"}, "2 0.5 0.5 0.2 0.2\n");
  put(dir, {{"y/valid/labels/", ""}});
  for (const auto& [set, classes] :
       {std::pair("x/", "classes.txt"), {"y/", "train/labels/classes.txt"}, {"z/", "labels/classes.txt"}}) {
    const std::string folder = set;
    INFO(folder);
    const std::string error = reading(dir, {set}), mark = "in each line:\n",
                      one = set[0] == 'z' ? "one split" : "val ";
    CHECK_HAS(error, concat("write DIR/", set, "data.yaml with this text"));
    REQUIRE(error.find(mark) != std::string::npos);
    put(dir, {{concat(set, "data.yaml"), error.substr(error.find(mark) + mark.size())}});
    check_text(reading(dir, {set}), {"classes name of class 0, name of class 1, name of class 2\nbox", one});
    // Without the file, classes.txt of labelImg is enough.
    fs::remove(dir / concat(set, "data.yaml"));
    put(dir, {{concat(set, classes), "cat\nred dog\ncow\n\n"}});
    check_text(reading(dir, {set}), {"classes cat, red dog, cow\n", one});
  }
  put(dir, {{"x/classes.txt", "cat\n\ndog\n"}, {"w/images/train/a.jpg", ""}});
  CHECK_HAS(reading(dir, {"x"}), "classes.txt:2: empty line");  // lines are class ids
  CHECK_HAS(reading(dir, {"w"}), "is no data set");             // no labels
}

TEST_CASE("formats: labels of labelImg, CVAT, Darknet, Yolo_mark and Roboflow in YOLO format are read") {
  const std::string line = "1 0.5 0.5 0.2 0.4\n", box = " class 1 [0.4 0.3 0.2 0.4]";
  const auto darknet = [&](const std::string& folder, const std::string& labels, const std::string& data,
                           const std::string& path = "") {
    return Files{{data, "# mine\r\nclasses= 2\r\ntrain  = " + path +
                            "train.txt\r\n#valid = old.txt\r\nvalid = " + path +
                            "valid.txt\r\nnames = " + path + "my.names\r\n\r\nbackup =\r\neval=coco\r\n"},
                 {"my.names", "cat\r\nred dog\r\n"},
                 {"train.txt", path + folder + "a.jpg\r\n"},
                 {"valid.txt", path + folder + "b.jpg\r\n"},
                 {folder + "a.jpg", ""},
                 {folder + "b.jpg", ""},
                 {labels + "a.txt", line},
                 {labels + "b.txt", line}};
  };
  const Names read = {"classes cat, red dog\nbox",
                      "a.txt:1" + box,
                      "b.txt:1" + box,
                      "train DIR/",
                      "val DIR/",
                      "!no label file"};
  const auto inside = [](Files files, const std::string& folder) {
    for (auto& file : files) file.first = folder + file.first;
    return files;
  };
  Files roboflow, no_names = darknet("x/", "x/", "obj.data");
  for (const std::string split : {"train/", "valid/"})
    roboflow.insert(
        roboflow.end(),
        {{split + "a.jpg", ""}, {split + "a.txt", line}, {split + "_darknet.labels", "cat\nred dog"}});
  no_names[0].second = "classes = 2\ntrain = train.txt\n";
  check_rows({
      // clang-format off
      // The folder may be called images, although labels of YOLO are in a folder `labels` in other layouts.
      {"labelImg", {{"images/a.jpg", ""}, {"images/b.PNG", ""}, {"images/c.jpg", ""}, {"images/a.txt", line},
          {"images/classes.txt", "cat\ndog\n"}}, {": DIR/images/a.jpg DIR/images/b.PNG "
          "DIR/images/c.jpg\nclasses cat, dog\nbox DIR/images/a.txt:1" + box, "one split"}, {"images"}},
      {"labelImg, with splits", {{"train/a.jpg", ""}, {"val/b.jpg", ""}, {"train/a.txt", line},
          {"train/classes.txt", "cat\ndog\n"}}, {": DIR/train/a.jpg\n", ": DIR/val/b.jpg\n"}},
      {"CVAT", darknet("obj_train_data/", "obj_train_data/", "obj.data"), read},
      {"CVAT, paths of another machine", darknet("obj_train_data/", "obj_train_data/", "obj.data", "data/"),
          read},
      {"no names", no_names, {"no names; add names = obj.names"}},
      {"images and labels", darknet("images/", "labels/", "obj.data"), read},
      {"the same, the file", darknet("images/", "labels/", "obj.data"), read, {"obj.data"}},
      {"absolute paths, another name", darknet("images/", "labels/", "coco.data", "DIR/"), read},
      {"the same, the file", darknet("images/", "labels/", "coco.data", "DIR/"), read, {"coco.data"}},
      {"Yolo_mark", inside(darknet("img/", "img/", "obj.data", "data/"), "data/"), read},
      {"Yolo_mark, its folder", inside(darknet("img/", "img/", "obj.data", "data/"), "data/"), read,
          {"data"}},
      {"Roboflow", roboflow, {"train/_darknet.labels (train): DIR/train/a.jpg\nclasses cat, red dog\nbox",
          "val DIR/train/_darknet.labels (val): DIR/valid/a.jpg\n"}},
      {"Roboflow, one folder", roboflow, {": DIR/train/a.jpg\nclasses cat, red dog\nbox DIR/train/a.txt:1" +
          box, "one split"}, {"train"}},
      // clang-format on
  });
}

// ---- units, numbers and names

TEST_CASE(
    "formats: boxes that are no pixels, or classes that do not begin with 0, are refused in each format") {
  // The same six boxes in each of 4 images of 160x120, in units by row.
  struct Unit {
    std::string wanted;
    double x, y;  // factors
    bool corners = false;
  };
  const double boxes[6][4] = {{10, 20, 60, 30},  {90, 10, 50, 60}, {20, 70, 70, 40},
                              {100, 60, 55, 50}, {5, 5, 40, 40},   {80, 30, 70, 80}};
  for (const Unit& u :
       {Unit{"one split", 1, 1}, Unit{"error: DIR", 1. / 160, 1. / 120},
        Unit{"24 of 24 boxes are fractions of the image size", 1. / 160, 1. / 120},
        Unit{"all 24 boxes are within 0..100, although the images are larger: per cent", 1 / 1.6, 1 / 1.2},
        Unit{"boxes reach beyond their images", 1, 1, true},
        Unit{"24 of 24 boxes reach beyond their images", 4, 4}}) {
    Files as_coco, as_voc;
    Names images, annotations;
    std::string objects;
    for (int i = 0; i < 4; ++i) {
      objects.clear();
      for (const auto& b : boxes) {
        const double x = b[0] * u.x, y = b[1] * u.y, w = b[2] * u.x + (u.corners ? x : 0),
                     h = b[3] * u.y + (u.corners ? y : 0);
        annotations.push_back(concat(i + 1, " 1 [", x, ",", y, ",", w, ",", h, "]"));
        objects += object("a", concat(x, " ", y, " ", x + w, " ", y + h));
      }
      images.push_back(concat(i, ".png 160x120"));
      as_coco.emplace_back(concat(i, ".png"), "@160x120");
      as_voc.insert(as_voc.end(), {{concat("JPEGImages/", i, ".png"), "@160x120"},
                                   {concat("Annotations/", i, ".xml"), voc(objects)}});
    }
    as_coco.emplace_back("x.json", coco(images, annotations));
    check_rows({{"COCO", as_coco, {u.wanted}}, {"VOC", as_voc, {u.wanted}}}, loading);
  }
  const std::string pixels = "0 120 80 40 30\n", inside = "0 0.5 0.5 0.2 0.2\n0 0.95 0.5 0.1 0.2\n",
                    out = "reach beyond their images, such as DIR/labels/";
  const std::string image = "@64x48";
  check_rows(
      {{"one wrong line is no reason to stop",
        yolo({inside, "", pixels}, "", image),
        {"one split", "box outside of the image: DIR/labels/c.txt:1"}},
       {"pixels",
        yolo({inside, pixels, "0 20 200 40 30\n0 600 400 4 3\n"}, "", image),
        {"3 of 5 boxes " + out + "b.txt:1; YOLO labels are"}},
       {"corners", yolo({"0 0.7 0.6 0.9 0.8\n"}, "", image), {"1 of 1 boxes " + out + "a.txt:1", "corners"}},
       {"divided twice",
        yolo({"0 0.005 0.005 0.002 0.002\n"}, "", image),
        {"1 of 1 boxes are fractions", "divided by the image size twice?"}},
       {"from 1",
        yolo({"1 0.5 0.5 0.2 0.2\n", "2 0.5 0.5 0.2 0.2\n"}, "", image),
        {"error: DIR/data.yaml (train): the labels have the classes 1 to 2, and none is 0, such as "
         "DIR/labels/b.txt:1",
         "subtract 1 from each class"}},
       {"from 0",
        yolo({"0 0.5 0.5 0.2 0.2\n", "2 0.5 0.5 0.2 0.2\n"}, "", image),
        {"annotation of an unknown class: DIR/labels/b.txt:1", "one split"}}},
      loading);
}

TEST_CASE(
    "formats: a box twice, also with another last digit, is one box; only crowds are named; two near boxes "
    "are two") {
  const auto json = [](const Names& boxes) {
    return Files{{"x.json", coco({"a.png"}, boxes, {"a", "b"})}, {"a.png", "@160x120"}};
  };
  const std::string one = "box DIR/a.png class 0 [10 20 40 60]\n";
  check_rows(
      {
          // clang-format off
      {"equal", json({"1 1 [10,20,30,40]", "1 1 [10,20,30,40]"}), {one,
          "duplicate box: DIR/x.json: annotation 2"}},
      {"last digit", json({"1 1 [10,20,30,40]", "1 1 [10.01,20,30,39.99]"}), {one,
          "duplicate box: DIR/x.json: annotation 2"}},
      {"between others", json({"1 1 [10,20,30,40]", "1 1 [10.005,70,30,40]", "1 1 [10.01,20,30,40]"}),
          {"annotation 3", "!annotation 2"}},
      {"another class", json({"1 1 [10,20,30,40]", "1 2 [10,20,30,40]"}), {"class 1", "!duplicate"}},
      {"near", json({"1 1 [10,20,30,40]", "1 1 [11,20,30,40]"}), {"!duplicate"}},
      {"crowds", json({"1 1 [10,20,30,40],\"iscrowd\":1", "1 1 [50,20,30,40],\"iscrowd\":1"}),
          {"error: DIR/x.json: all 2 boxes are crowds (iscrowd 1) or difficult objects"}},
      {"difficult", {{"a.png", "@160x120"}, {"a.xml", voc(object("a", "1 2 30 50",
          "<difficult>1</difficult>"))}}, {"all 1 boxes are crowds"}},
      {"none", json({"1 1 [1,1,0,0]"}), {"no usable box", "the first problem: box without area"}},
      {"empty", json({}), {"no usable box"}},
          // clang-format on
      },
      loading);
}

TEST_CASE("formats: the log counts ignored regions") {
  TempDir dir;
  put(dir, {{"x.json", coco({"a.png"}, {"1 1 [10,20,30,40],\"iscrowd\":1", "1 1 [50,20,30,40]"})},
            {"a.png", "@160x120"}});
  Log log(dir / "log.txt", /*quiet=*/true);
  log_classes(log, load_splits({dir.path.string()}));
  CHECK_HAS(contents(dir / "log.txt"),
            "boxes   1 for training: a 1; and 1 ignored regions (crowds, difficult objects)\n");
}

PROGRAM_TEST("eval: detections and a ground truth in fractions, or with corners, are refused") {
  TempDir dir;
  const auto eval = [&](const std::string& of_truth, const std::string& of_found) {
    put(dir, {{"gt.json", coco({"a.png 160x120"}, {"1 1 " + of_truth})},
              {"dt.json", "[{\"image_id\":1,\"category_id\":1,\"score\":0.9,\"bbox\":" + of_found + "}]"}});
    const std::string command = concat("$YOLOX_PROGRAMS/eval --gt ", dir / "gt.json", " --dt ",
                                       dir / "dt.json", " > ", dir / "out.txt 2>&1");
    const bool refused = std::system(command.c_str()) != 0;
    return concat(refused ? "refused " : "", contents(dir / "out.txt"));
  };
  const std::string right = "[80,60,40,50]", fractions = "[0.5,0.5,0.25,0.42]", corners = "[80,60,120,110]";
  CHECK_HAS(eval(right, right), "AP");
  CHECK_HAS(eval(fractions, right), "refused error: " + (dir / "gt.json: 1 of 1 boxes are fractions"));
  CHECK_HAS(eval(right, fractions), "refused error: " + (dir / "dt.json: 1 of 1 boxes are fractions"));
  CHECK_HAS(eval(right, corners),
            "refused error: " + (dir / "dt.json: 1 of 1 boxes reach beyond their images"));
  CHECK_HAS(eval(right, "[80,60,9000,9000]"), "AP");  // of an untrained model
}

TEST_CASE("formats: class names are compared in one normal form, and a message says what differs") {
  const auto pair = [](const std::string& train, const std::string& val) {
    return Files{{"train.json", coco({"a.png"}, {"1 1 [1,2,10,12]"}, {train, "box"})},
                 {"val.json", coco({"b.png"}, {"1 1 [1,2,10,12]"}, {val, "box"})},
                 {"a.png", "@20x20"},
                 {"b.png", "@20x21"}};
  };
  std::vector<Row> rows;
  for (const auto& [train, val] : {std::pair("disc ", "disc"),
                                   {" red  disc", "red disc"},
                                   {"red\u00a0disc", "red disc"},
                                   {"B\u00e4r", "Ba\u0308r"},
                                   {"A\u030a\u017c", "\u00c5z\u0307"},
                                   {"\u3000\u732b", "\u732b"}})
    rows.push_back(
        {val,
         pair(train, val),
         {"val DIR/val.json: 1 images\nclasses " + normal_name(val) + ", box\nbox DIR/b.png class 0", "!note",
          "!left out"}});
  rows.push_back(
      {"case",
       pair("Disc", "disc"),
       {"\"disc\" and \"Disc\" differ in case, blanks, - or _", "objects of the class disc are left out"}});
  rows.push_back(
      {"underscore", pair("red_disc", "red disc"), {"\"red disc\" and \"red_disc\" differ in case"}});
  rows.push_back({"a Cyrillic letter",
                  pair("disc", "dis\u0441"),
                  {"differ in a character: \"\u0441\" (2 bytes) and \"c\" (1 bytes)"}});
  check_rows(rows, loading);
  CHECK(normal_name("a\u0308\u0323 \xff\u00df") == "\u00e4\u0323 \xff\u00df");
  check_rows({
      // clang-format off
      {"VOC", {{"a.jpg", ""}, {"b.jpg", ""}, {"a.xml", voc(object("red disc"))}, {"b.xml",
          voc(object("red\u00a0disc "))}}, {"classes red disc\n"}},
      // clang-format on
  });
}

// ---- which format a folder has

TEST_CASE("formats: in an ambiguous folder data.yaml has priority, then COCO, Pascal VOC and YOLO") {
  TempDir dir;
  put(dir, yolo({kLine}));
  const auto kind = [&](const std::string& wanted, const std::string& data = "") {
    CHECK_HAS(reading(dir, {data}), "train DIR/" + wanted);
  };
  const Files in_voc = {{"Annotations/b.xml", voc(object("cat"))}, {"JPEGImages/b.jpg", ""}};
  kind("data.yaml (train)");
  put(dir, {{"package.json", R"({"name": "x"})"},
            {"annotations.json", "[1, 2]"},
            {"images/a.json", R"({"shapes": [], "imagePath": "a.jpg"})"}});  // a file of labelme
  kind("data.yaml (train)");
  put(dir, {{"labels.json", coco({"a.jpg"})}});
  put(dir, in_voc);
  kind("data.yaml (train)");
  fs::rename(dir / "data.yaml", dir / "own.yaml");  // a file of any program may have another name
  kind("labels.json");
  fs::remove(dir / "labels.json");
  CHECK_HAS(reading(dir), "train DIR (all)");
  kind("own.yaml (train)", "own.yaml");  // an explicit path decides
  put(dir, {{"data.yaml", "seed: 3\n"}, {"annotations/train.json", coco({"a.jpg"})}});  // of another program
  kind("annotations/train.json");
  fs::rename(dir / "own.yaml", dir / "data.yaml");
  fs::remove_all(dir / "annotations");
  fs::remove_all(dir / "Annotations");
  put(dir, {{"backup/Annotations/b.xml", voc(object("cat"))}, {"backup/JPEGImages/b.jpg", ""}});
  kind("data.yaml (train)");  // deeper folders have the lowest priority

  const std::string yaml = contents(dir / "data.yaml");
  put(dir, {{"args.yaml", "epochs: 3"}, {"broken.yaml", "["}, {"coco8.yaml", yaml}});
  kind("data.yaml (train)");
  fs::rename(dir / "data.yaml", dir / "dataset.yaml");
  kind("dataset.yaml (train)");
  fs::remove(dir / "dataset.yaml");
  fs::remove_all(dir / "backup");
  kind("coco8.yaml (train)");
  put(dir, {{"coco9.yml", yaml}});
  CHECK_HAS(reading(dir), "several YAML files");
}

TEST_CASE(
    "formats: a path without a data set is refused, and formats that are not read are named with the way "
    "out") {
  const auto one = [](const std::string& name, const std::string& text) {
    return Files{{"x/" + name, text}, {"x/a.jpg", ""}};
  };
  std::vector<Row> rows = {
      // clang-format off
      {"nowhere", {}, {"DIR/nowhere does not exist"}, {"nowhere"}},
      {"no file", {}, {"does not exist"}, {"nowhere.yaml"}},
      {"empty", {}, {"an empty folder"}},
      {"unknown", {{"a.jpg", ""}, {"b.log", ""}, {"d/e/f.xml", ""}, {"package.json", R"({"name": "x"})"}},
          {"annotations/*.json", "Annotations/*.xml", "data.yaml", "a.jpg, b.log, d, package.json"}},
      {"an archive as file", {{"x.zip", "PK\3\4 and so on"}}, {"error: DIR/x.zip is an archive; unpack it"},
          {"x.zip"}},
      {"labelme as file", {{"x.json", R"({"shapes": [], "imagePath": "a.jpg"})"}},
          {"DIR/x.json is a file of labelme; convert it"}, {"x.json"}},
      {"a table as file", {{"x.csv", "a.jpg,1,2,3,4,cat\n"}}, {"DIR/x.csv is a CSV table"}, {"x.csv"}},
      // clang-format on
  };
  for (const auto& [name, text, wanted] : std::vector<std::array<std::string, 3>>{
           {"a.zip", "PK\3\4", "an archive; unpack it"},
           {"a.tar.gz", "\x1F\x8B\x08", "an archive"},
           {"a.json", R"({"version": "5", "shapes": [], "imagePath": "a.jpg", "imageData": null})",
            "a file of labelme"},
           {"via.json",
            R"({"a.jpg1": {"filename": "a.jpg", "regions": [{"shape_attributes": {"name": "rect"}}]}})",
            "a file of VIA"},
           {"a.jpg.json", R"({"objects": [{"classTitle": "cat", "points": {"exterior": []}}]})",
            "a file of Supervisely"},
           {"tasks.json", R"([{"annotations": [{"result": [{"from_name": "label", "to_name": "image"}]}]}])",
            "a file of Label Studio"},
           {"_annotations.createml.json",
            R"([{"image": "a.jpg", "annotations": [{"label": "cat", "coordinates": {"x": 1}}]}])",
            "a CreateML file"},
           {"boxes.csv", "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax\n",
            "a table of Open Images"},
           {"train.csv", "filename,width,height,class,xmin,ymin,xmax,ymax\n", "a CSV table"},
           {"label_2/0.txt", "Car 0.00 0 -1.57 1 2 3 4 1.5 1.6 3.7 1.0 1.6 9.0 -1.5\n",
            "a label file of KITTI"},
           {"a.tfrecord", "x", "a TFRecord or Parquet file"}})
    rows.push_back({name, one(name, text), {"DIR/x/" + name + " is " + wanted, "; "}, {"x"}});
  check_rows(rows);
}

// ---- parts of a data set

TEST_CASE("formats: --val-fraction holds out images of a single split, the same for each program") {
  TempDir dir;
  Names images, boxes;
  put(dir, {{"yolo/classes.txt", "cat\n"}});
  for (int i = 0; i < 20; ++i) {
    put(dir, {{concat("yolo/", i, ".jpg"), ""},
              {concat("coco/", i, ".jpg"), ""},
              {concat("yolo/", i, ".txt"), concat("\n0 0.5 0.5 0.2 0.", i + 10, "\n")}});
    images.push_back(concat(i, ".jpg"));
    boxes.push_back(concat(i + 1, " 1 [1,2,3,4]"));
  }
  put(dir, {{"coco/a.json", coco(images, boxes)}});
  const auto stems = [](const Source& s) {
    std::set<std::string> names;
    for (const auto& file : s.files) names.insert(fs::path(file).filename().string());
    return names;
  };
  const Sources coco_part = read_sources({dir / "coco", {}, 0.2}),
                yolo_part = read_sources({dir / "yolo", {}, 0.2});
  for (const Sources* s : {&coco_part, &yolo_part}) {
    CHECK_FALSE(s->same);
    CHECK(s->train.name != s->val.name);
    std::set<std::string> all = stems(s->train);
    CHECK(all.size() == 16);
    all.merge(stems(s->val));
    CHECK(all.size() == 20);
    for (const Source* part : {&s->train, &s->val}) {
      REQUIRE(part->coco.annotations.size() == part->files.size());
      for (size_t i = 0; i < part->files.size(); ++i)
        CHECK(part->coco.annotations[i].image_id == part->coco.images[i].id);
    }
  }
  CHECK(stems(coco_part.val) == stems(yolo_part.val));
  CHECK(read_sources({dir / "yolo", {}, 0.2}, false).val.files == yolo_part.val.files);
  for (size_t i = 0; i < yolo_part.val.files.size(); ++i)  // the label belongs to the image
    CHECK(yolo_part.val.where(i) ==
          fs::path(yolo_part.val.files[i]).replace_extension(".txt").string() + ":2");
  CHECK(read_sources({dir / "yolo", {}, 0.001}).val.files.size() == 1);
  CHECK_HAS(yolo_part.val.notes.at(0), "the images are numbered; if they are frames of a few videos");
  put(dir, {{"coco/val.json", coco(images, {})}});
  fs::rename(dir / "coco/a.json", dir / "coco/train.json");
  CHECK_HAS(reading(dir, {"coco", "", 0.2}), "--val-fraction is for data with one split, but --data");
  CHECK_HAS(error_of([&] {
              load_splits({"shapes", {}, 0.2});
            }),
            "--val-fraction is for COCO, VOC and YOLO files");
}

TEST_CASE("formats: --val-fraction keeps copies of a picture and frames of a video on one side") {
  struct Case {
    std::string title, note;
    std::string (*name)(int);   // of image i of 60
    std::string (*group)(int);  // what stays together
    int (*cls)(int);
    size_t held;
  };
  const auto one_class = [](int) { return 1; };
  for (const Case& c : {Case{"copies of Roboflow", "copies of a picture (NAME.rf.HASH)",
                             [](int i) { return concat("IMG_", i / 3, "_jpg.rf.", i * 7919 % 1000, "abc"); },
                             [](int i) { return concat(i / 3); }, one_class, 12},
                        Case{"frames of videos", "as frames of a video, are on the same side",
                             [](int i) { return concat("street", char('a' + i / 6), formatted("_%06d", i)); },
                             [](int i) { return concat(i / 6); }, one_class, 12},
                        Case{"images numbered by class", "the images are numbered",
                             [](int i) { return concat("kind", char('a' + i / 6), formatted("_%06d", i)); },
                             [](int i) { return concat(i); }, [](int i) { return i / 6 + 1; }, 12},
                        Case{"one video", "the images are numbered", [](int i) { return concat("clip_", i); },
                             [](int i) { return concat(i); }, one_class, 12}}) {
    INFO(c.title);
    TempDir dir;
    Names images, boxes;
    for (int i = 0; i < 60; ++i) {
      images.push_back(c.name(i) + ".jpg");
      boxes.push_back(concat(i + 1, " ", c.cls(i), " [1,2,3,4]"));
      put(dir, {{images.back(), ""}});
    }
    put(dir, {{"x.json", coco(images, boxes, Names(10, "a"))}});
    const Sources s = read_sources({dir.path.string(), {}, 0.2});
    CHECK(s.val.files.size() == c.held);
    std::set<std::string> in_train, in_val;
    for (const auto& image : s.train.coco.images) in_train.insert(c.group(int(image.id) - 1));
    for (const auto& image : s.val.coco.images) in_val.insert(c.group(int(image.id) - 1));
    for (const auto& group : in_val) CHECK_FALSE(in_train.count(group));
    std::string notes;
    for (const auto& note : s.val.notes) notes += note + "\n";
    CHECK_HAS(notes, c.note);
  }
}

TEST_CASE(
    "formats: splits of the same images are one split; images in both are counted, however paths are "
    "written") {
  Files files;
  for (const std::string name : {"a", "b", "c"})
    files.insert(files.end(), {{"images/" + name + ".jpg", ""},
                               {"other/images/" + name + ".jpg", ""},
                               {"labels/" + name + ".txt", kLine}});
  const auto with = [&](const std::string& val, const std::string& list = "",
                        const std::string& train = "images") {
    Files all = files;
    all.insert(all.end(),
               {{"data.yaml", "train: " + train + "\nval: " + val + "\nnames: [cat]\n"}, {"some.txt", list}});
    return all;
  };
  check_rows({
      // clang-format off
      {"one folder", with("images"), {"one split", "!note"}},
      {"one folder, held out", with("images"), {"2 images held out"}, {"", "", 0.7}},
      {"an absolute path", with("DIR/images"), {"one split", "!note"}},
      {"a list in another order of writing", with("some.txt", "DIR/images/b.jpg\n./other/images/b.jpg\n"),
          {"1 of 2 images are training images, too"}},
      {"another folder", with("other/images"), {"val ", "!training images"}},
      // clang-format on
  });
  TempDir dir;
  put(dir, with("val/images"));
  fs::create_directories(dir / "val/images");
  fs::create_symlink("../../images/a.jpg", dir / "val/images/a.jpg");
  fs::create_hard_link(dir / "images/b.jpg", dir / "val/images/x.jpg");
  fs::copy_file(dir / "images/c.jpg", dir / "val/images/c.jpg");
  CHECK_HAS(reading(dir), "2 of 3 images are training images, too");
}

TEST_CASE("formats: images whose 16 bits have few values are refused with a command that converts them") {
  const auto deep = [](const std::string& a, const std::string& b, const std::string& extension = ".png") {
    return Files{{"images/a" + extension, a},
                 {"images/b" + extension, b},
                 {"labels/a.txt", kLine},
                 {"data.yaml", "train: images\nnames: [cat]"}};
  };
  const std::string refused = "the images of 16 bits have only the values ";
  check_rows(
      {{"12 bits",
        deep("@64x48 0-4095", "@64x48 16-900"),
        {"error: DIR/data.yaml (train): " + refused + "0 to 4095 of 65535, such as DIR/images/b.png",
         "imread(f, -1)", "- 0) * (255 / 4095))", "sys.argv[1:]]\" DIR/images/*.png"}},
       {"14 bits of a thermal camera",
        deep("@64x48 7000-7900", "@64x48 7100-8020"),
        {refused + "7000 to 8020", "- 7000) * (255 / 1020)"}},
       {"TIFF", deep("@64x48 22000-24040", "@64x48 22000-22001", ".tiff"), {refused + "22000 to 24040"}},
       {"PGM", deep("@64x48 0-255", "@64x48 0-255", ".pgm"), {refused + "0 to 255"}},
       {"one value", deep("@64x48 300-300", "@64x48 300-300"), {refused + "300 to 300"}},
       {"16 bits", deep("@64x48 0-60000", "@64x48 0-100"), {"one split", "!error"}},  // the range of all
       {"8 bits", deep("@64x48", "@64x48"), {"one split", "!error"}},
       {"8 bits in a TIFF", deep("@64x48", "@64x48", ".tif"), {"one split", "!error"}}},
      loading);
  TempDir dir;
  put(dir, deep("@64x48 0-4095", "@64x48 0-4095"));
  cv::Mat hot(48, 64, CV_16UC4, cv::Scalar(900, 900, 900, 65535)), flt(48, 64, CV_16S, cv::Scalar(99));
  hot.at<cv::Vec4w>(5, 5) = {65535, 65535, 65535, 65535};  // one broken pixel, and alpha
  REQUIRE(cv::imwrite(dir / "images/a.png", hot));
  CHECK_HAS(loading(dir), refused + "0 to 4095");
  REQUIRE(cv::imwrite(dir / "images/c.tiff", flt));
  for (int i = 0; i < 20; ++i)
    put(dir, {{concat("images/", i, ".png"), i ? "@64x48 0-4095" : "@64x48 0-65535"}});
  CHECK_HAS(loading(dir), refused + "0 to 4095");  // but for one
  for (int i = 0; i < 20; ++i) fs::remove(dir / concat("images/", i, ".png"));
  put(dir, {{"images/a.png", "@64x48"}, {"images/b.png", "@64x48"}});
  CHECK_HAS(loading(dir),
            "DIR/images/c.tiff has pixels of the type CV_16SC1, which cannot be read; convert it to 8 bits");
}
