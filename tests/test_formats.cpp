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

TEST_CASE("formats: COCO data sets are found in the common folder layouts") {
  std::istringstream layouts(R"(
annotations/instances_train2017.json annotations/instances_val2017.json train2017/a.png val2017/b.png
annotations/train.json annotations/val.json images/train/a.png images/val/b.png
train.json val.json a.png b.png
annotations/my_train.json annotations/my_val.json photos/a.png other/b.png
annotations/Train.JSON annotations/test.json train/images/a.png data/b.png
train/_annotations.coco.json valid/_annotations.coco.json train/a.png valid/b.png
train/labels.json test/labels.json train/data/a.png test/data/b.png
annotations/trains_train.json annotations/trains_validation.json images/a.png images/b.png
annotations/voc_trainval.json annotations/voc_test.json JPEGImages/a.png JPEGImages/b.png
annotations/person_keypoints_train2017.json annotations/person_keypoints_val2017.json images/a.png images/b.png
labels/train.json labels/val.json images/a.png images/b.png
annotations_trainval2017/instances_train2017.json annotations_trainval2017/instances_val2017.json x/a.png y/b.png
)");
  for (std::string train, val, a, b; layouts >> train >> val >> a >> b;) {
    INFO(train << ", " << a);
    TempDir dir;
    put(dir, {{train, coco({"a.png"})}, {val, coco({"b.png"})}, {a, ""}, {b, ""}});
    for (const std::string end : {"", "/"})
      check_text(reading(dir, {dir.path.string() + end}),
                 {"train DIR/" + train + ": DIR/" + a + "\nclasses a\nbox",
                  "val DIR/" + val + ": DIR/" + b + "\nclasses a\nbox", "annotation 1 of image 1", "!note"});
  }
}

TEST_CASE("formats: the images of a COCO file are found in one folder or several, never those of another") {
  const std::string table = R"(
by name | TWO train/1.jpg train/2.jpg val/1.jpg val/2.jpg images/1.jpg | DIR/train/1.jpg DIR/train/2.jpg
 | DIR/val/1.jpg
in images | TWO images/train/1.jpg images/train/2.jpg images/val/1.jpg images/1.jpg
 | images/train/1.jpg DIR/images/train/2 | images/val/1.jpg
by the first letters | TWO train2017/1.jpg train2017/2.jpg val2017/1.jpg | train2017/1.jpg | val2017/1.jpg
by meaning | TWO images/training/1.jpg images/training/2.jpg images/valid/1.jpg | training/1.jpg | valid/1.jpg
one more level | TWO train/images/1.jpg train/images/2.jpg valid/images/1.jpg | train/images/1.jpg
 | valid/images/1.jpg
a part of the name of the file | annotations/my_dev.json(2.jpg) all/2.jpg dev/2.jpg | : DIR/dev/2.jpg
an image that the folder lacks is not taken from the other split | TWO train/1.jpg val/1.jpg val/2.jpg
 | DIR/train/1.jpg DIR/train/2.jpg
spread over folders | x.json(1.jpg,2.jpg,3.jpg) cam1/1.jpg cam2/2.jpg cam3/a/3.jpg
 | cam1/1.jpg DIR/cam2/2.jpg DIR/cam3/a/3.jpg
spread over the folders of splits | lvis_train.json(1.jpg,2.jpg,3.jpg) train2017/1.jpg train2017/2.jpg
 val2017/3.jpg | train2017/1.jpg DIR/train2017/2.jpg DIR/val2017/3.jpg
a stray copy decides nothing | annotations/instances_train.json(1.jpg,2.jpg,3.jpg) images/1.jpg images/2.jpg
 images/3.jpg train/1.jpg | images/1.jpg DIR/images/2.jpg DIR/images/3.jpg
the folder with more of the images | x.json(1.jpg,2.jpg,3.jpg) cam1/1.jpg cam2/1.jpg cam2/2.jpg cam2/3.jpg
 | cam2/1.jpg DIR/cam2/2.jpg DIR/cam2/3.jpg
lost in its own folder | x.json(D:\s\cam1\1.jpg,D:\s\cam1\2.jpg) cam1/1.jpg cam2/2.jpg | cam1/1.jpg | !cam2/2.jpg
most of the images are enough | x.json(1.jpg,2.jpg,3.jpg) cam1/1.jpg cam1/2.jpg cam2/1.jpg cam2/2.jpg cam2/3.jpg
 | cam2/1.jpg DIR/cam2/2.jpg DIR/cam2/3.jpg
two recordings, one deeper | x.json(1.jpg) one/1.jpg two/rgb/1.jpg
 | such as DIR/one/1.jpg and DIR/two/rgb/1.jpg
copies | x.json(1.jpg) cam1/1.jpg(same) cam2/1.jpg(same) | : DIR/cam1/1.jpg
two recordings with equal names | TWO images/a/1.jpg images/a/2.jpg images/b/1.jpg images/b/2.jpg
 | error: DIR/annotations/val.json: two folders have images of its names, such as DIR/images/a/1.jpg and
 DIR/images/b/1.jpg; name the folder of its images val, or give this file as --data and the folder with --images
 DIR
one of them is named | TWO a/1.jpg b/1.jpg --data=annotations/val.json --images=b | : DIR/b/1.jpg
the file has the name of a folder | cam2.json(1.jpg) cam1/1.jpg cam2/1.jpg | : DIR/cam2/1.jpg
a name with folders | annotations/x.json(sub/deep/a.jpg) images/sub/deep/a.jpg a.jpg
 | : DIR/images/sub/deep/a.jpg
with images | annotations/x.json(images/a.jpg) images/a.jpg | : DIR/images/a.jpg
the file is beside the images | images/x.json(images/a.jpg) images/a.jpg --data=images/x.json
 | : DIR/images/a.jpg
with the data set | set/x.json(set/images/a.jpg) set/images/a.jpg --data=set/x.json | : DIR/set/images/a.jpg
relative to annotations | annotations/x.json(../images/a.jpg) images/a.jpg | : DIR/images/a.jpg | !note
of Windows | annotations/x.json(images\sub\a.jpg) images/sub/a.jpg | : DIR/images/sub/a.jpg
below a folder called test | train.json(/home/me/test/ds/train/a.jpg) train/a.jpg | : DIR/train/a.jpg
absolute | annotations/x.json(DIR/elsewhere/a.jpg) elsewhere/a.jpg | : DIR/elsewhere/a.jpg
absolute, outside of the data set | set/annotations/x.json(DIR/elsewhere/a.jpg) elsewhere/a.jpg set/masks/a.jpg --data=set
 | : DIR/elsewhere/a.jpg
no images | a/annotations/x.json(a.png) --data=a | error: DIR/a/annotations/x.json: none of its images was found
 under DIR/a, such as a.png; correct file_name, or give this file as --data and their folder with --images DIR
outside of the data set | g/x.json(b.png) b.png --data=g | none of its images
longer than any path | x.json(LONG) | none of its images
a folder is no image | x.json(images/) images/a.jpg | none of its images
)";
  check_rows(
      rows(replaced(replaced(table, "TWO", "annotations/train.json(1.jpg,2.jpg) annotations/val.json(1.jpg)"),
                    "LONG", std::string(5000, 'a'))));
  // Paths of another machine are found by their ends.
  for (const std::string name : {R"(..\..\upload\1\x.jpg)", "images/1/x.jpg", "/mnt/set/1/x.jpg",
                                 R"(C:\sets\1\x.jpg)", "https://bucket.example/a/1/x.jpg"}) {
    INFO(name);
    TempDir dir;
    put(dir, files("annotations/train.json(" + name + ") pictures/1/x.jpg pictures/2/x.jpg"));
    check_text(reading(dir),
               {": DIR/pictures/1/x.jpg\n", "1 of 1 images were found under DIR by the end of"});
    fs::rename(dir / "pictures/1", dir / "pictures/3");  // a name that two files have is not guessed
    CHECK_HAS(reading(dir), "two folders have images of its names");
  }
}

TEST_CASE("formats: COCO files are chosen by split or named by --data, with --images for their folder") {
  const std::string table = R"(
two files | PAIR | train DIR/a/first.json: DIR/a/1.jpg | val DIR/b/second.json: DIR/b/2.jpg
two files, one split | PAIR --split=train | train DIR/a/first.json | one split
two files, no such split | PAIR --split=test | no split "test"; it has train, val
the same file twice | a/first.json(1.jpg) a/1.jpg --data=a/first.json,a/first.json | one split
no file | a/first.json(1.jpg) a/1.jpg --data=a/first.json,nowhere.json | nowhere.json is no file
a comma in the name | a/x,y.json(1.jpg) a/1.jpg --data=a/x,y.json | one split | box | !error
--images | x/one.json(a.png) far/away/a.png --data=x/one.json --images=far/away | : DIR/far/away/a.png
--images for two | x/one.json(a.png) x/two.json(b.png) far/a.png far/b.png --data=x/one.json,x/two.json
 --images=far | : DIR/far/a.png | : DIR/far/b.png
--images without them | x/one.json(a.png) x/b.png --data=x/one.json --images=x
 | --images DIR/x: DIR/x/one.json: none of its images
--images of nothing | x/one.json(a.png) --data=x/one.json --images=nowhere | --images DIR/nowhere is no folder
files of other tasks and programs | TRAIN x.json(1.jpg) annotations/._instances_train.json(1.jpg)
 annotations/captions_train.json({}) annotations/image_info_test-dev.json({})
 | train DIR/annotations/instances_train.json | one split
no such split | TRAIN --split=test | no split "test"; it has train
test if there is no val | TRAIN VAL(test) | train DIR/annotations/instances_train.json
 | val DIR/annotations/instances_test.json
val before test | TRAIN VAL(test) VAL(val) | val DIR/annotations/instances_val.json
a named split | TRAIN VAL(test) VAL(val) --split=test | val DIR/annotations/instances_test.json
valid is val | TRAIN VAL(test) VAL(val) --split=valid | val DIR/annotations/instances_val.json
two files of a split | TRAIN VAL(val) annotations/val_small.json(2.jpg) | several files for 'val'
that is not needed | TRAIN VAL(test) VAL(val) annotations/val_small.json(2.jpg) --split=test
 | val DIR/annotations/instances_test.json
one split | val.json(1.jpg) 1.jpg | one split
no split | one.json(1.jpg) two.json(1.jpg) 1.jpg | the splits one, two, and none of them is called train
no split, named | one.json(1.jpg) two.json(1.jpg) 1.jpg --split=two | one split | DIR/two.json
)";
  std::string text = replaced(table, "PAIR",
                              "a/first.json(1.jpg) b/second.json(2.jpg) a/1.jpg b/2.jpg "
                              "--data=a/first.json,b/second.json");
  text = replaced(text, "TRAIN", "annotations/instances_train.json(1.jpg) 1.jpg 2.jpg");
  for (const std::string split : {"val", "test"})
    text = replaced(text, "VAL(" + split + ")", "annotations/instances_" + split + ".json(2.jpg)");
  check_rows(rows(text));
  for (const std::string data : {"shapes", YOLOX_SOURCE_DIR, "x.lmdb"}) {
    const DataOptions options{data, {}, 0, "far"};
    CHECK_HAS(error_of([&] { load_splits(options); }), "--images is for a COCO JSON file, not for --data ");
  }
  // Files of other programs are left out.
  const Names others = {R"({"categories": [{"id": 0, "name": "cat"}], "info": {"year": 2024}})",
                        R"({"images": 12, "annotations": 90})", R"([{"id": 1}])", R"({"1": "cat"})", ""};
  for (const std::string folder : {"", "annotations/"}) {
    Files beside = files(folder + "train.json(a.png) " + folder + "val.json(b.png) train/a.png val/b.png");
    for (const auto& other : others)
      beside.emplace_back(concat(folder, "stats_train", beside.size(), ".json"), other);
    check_rows({{folder, beside, {"val DIR/" + folder + "val.json: DIR/val/b.png"}}});
  }
  check_rows(
      {{"no list",
        {{"b/annotations/x.json", R"({"images": [], "categories": [], "annotations": []})"}},
        {"x.json lists no images"},
        {"b"}},
       {"no categories", {{"annotations/x.json", coco({"a"}, {}, {})}}, {"x.json lists no categories"}},
       {"no JSON", {{"annotations/x.json", ""}}, {"x.json: not valid JSON"}},
       {"other keys, and a box that CVAT has turned",
        {{"x.json", R"({"images":[{"id":1,"filename":"a.jpg"}],"categories":[{"id":1,"name":"a"}],)"
                    R"("annotation":[{"id":1,"image_id":1,"category_id":1,"bbox":[1,2,3,4]},{"image_id":1,)"
                    R"("category_id":1,"bbox":[1,2,6,4],"attributes":{"rotation":90.0}}]})"},
         {"a.jpg", ""}},
        {": DIR/a.jpg\nclasses a\nbox DIR/x.json: annotation 1 of image 1 class 1 [1 2 3 4]",
         "annotation 2 of image 1 class 1 [2 1 4 6]"}}});
}

TEST_CASE("formats: COCO images that are listed twice are put together; two names of one file are an error") {
  const std::string table = R"(
twice | train.json(a.png 0x30,b.png,a.png 40x30;3 1 [1,2,3,4];1 1 [5,6,7,8]) a.png b.png | DIR/a.png DIR/b.png\n
 | 1 of image 1 class 1 [1 2 3 4] | 2 of image 1 class 1 [5 6 7 8]
 | 1 images repeat the file_name of another one, such as image 3
a list that was appended to itself | train.json(a.png,b.png,a.png;3 1 [1,2,3,4];1 1 [1,2,3,4]) a.png b.png
 | 1 of image 1 class 1 [1 2 3 4] | !annotation 2
another size | train.json(a.png 40x30,b.png,a.png 41x30;3 1 [1,2,3,4]) a.png b.png
 | the images 1 (a.png, 40x30) and 3 (a.png, 41x30)
two names of one file | train.json(x/1/a.png,c.png,x/2/a.png;3 1 [1,2,3,4]) a.png b.png
 | are read from the same file
)";
  check_rows(rows(table));
}

TEST_CASE("formats: a category without boxes that is the supercategory of all others is left out") {
  const auto files = [](int of_train, int of_val, const std::string& parent = "cells") {
    Files all = {{"a.png", "@20x20"}};
    for (const auto& [split, category] : {std::pair("train", of_train), {"val", of_val}}) {
      std::string text = coco({"a.png"}, {concat("1 ", category, " [1,2,10,12]")}, {"cells", "red", "white"});
      text = replaced(text, "\"red\"", "\"red\",\"supercategory\":\"cells\"");
      text = replaced(text, "\"white\"", "\"white\",\"supercategory\":\"" + parent + "\"");
      all.emplace_back(concat(split, ".json"), text);
    }
    return all;
  };
  check_rows({{"dropped",
               files(2, 3),
               {"train.json: 1 images\nclasses red, white\n",
                "val.json: 1 images\nclasses red, white\nbox DIR/a.png class 1",
                "left out the category cells", "!unknown class"}},
              {"with a box", files(2, 1), {"classes cells, red, white"}},
              {"not of all", files(2, 3, "none"), {"classes cells, red, white"}}},
             loading);
  TempDir dir;
  put(dir, files(2, 3));
  const Dataset of_three = load_splits({dir.path.string()}, false, /*model_classes=*/3).val;
  CHECK(of_three.classes == Names{"cells", "red", "white"});  // a model of another program
}

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
            {"Annotations/sub/f.xml", voc("<size><width>1e12</width><height>-5</height></size>")},
            {"JPEGImages/old name.jpg", ""}});
  put(dir, files("JPEGImages/b.JPG JPEGImages/a.PnG JPEGImages/other.jpg JPEGImages/sub/f.webp"));
  // The name of the XML file is preferred to <filename>. c has no image. A later check
  // refuses the box of the second object of b.
  CHECK_HAS(reading(dir),
            "train DIR (all): DIR/JPEGImages/a.PnG DIR/JPEGImages/b.JPG "
            "DIR/JPEGImages/other.jpg DIR/JPEGImages/sub/f.webp\nclasses Cat, cat, dog & co\n"
            "box DIR/Annotations/a.xml:3 class 0 [1 2 2 2]\n"
            "box DIR/Annotations/b.xml:6 class 2 [10.25 -2 20.25 102] crowd\n"
            "box DIR/Annotations/b.xml:13 class 1 [5 6 0 -2]\n"
            "label file without image: DIR/Annotations/c.xml: its image c.jpg is missing\n"
            "note: DIR (all): 1 images have no XML file and are not used: old name.jpg\none split");
  const Source source = read_sources({dir.path.string()}).train;
  CHECK_FALSE(source.relative);
  std::string sizes;
  for (const auto& image : source.coco.images)
    sizes += concat(image.id, " ", image.width, "x", image.height, ", ");
  CHECK(sizes == "1 0x0, 2 640x480, 3 0x0, 4 0x0, ");
  CHECK(source.coco.annotations.at(0).area == 4);
}

TEST_CASE("formats: Pascal VOC data sets are found in the common layouts, with the classes of all splits") {
  const std::string table = R"(
train, val, test, trainval | OBJECTS L/train.txt(a) L/val.txt(b) L/test.txt(c) L/trainval.txt(a;b)
 | train DIR (train): DIR/JPEGImages/a.jpg\nclasses cat, cow, dog | val DIR (val): DIR/JPEGImages/b.jpg\nclasses cat
trainval is named | OBJECTS L/train.txt(a) L/trainval.txt(a;b) --split=trainval | (train): | val DIR (trainval):
valid | OBJECTS L/train.txt(a) L/valid.txt(b) --split=valid | train DIR (train): | val DIR (val):
training and validation | OBJECTS L/training.txt(a) L/validation.txt(b) | train DIR (train): DIR/JPEGImages/a.jpg | (val): DIR/JPEGImages/b.jpg
test for val | OBJECTS L/train.txt(a) L/test.txt(b) | train DIR (train): | val DIR (test):
test after trainval | OBJECTS L/trainval.txt(a) L/val.txt(a) L/test.txt(b) | train DIR (trainval): | val DIR (test):
val after trainval | OBJECTS L/trainval.txt(a) L/val.txt(b) | train DIR (trainval): | val DIR (val):
one list | OBJECTS L/val.txt(b) | train DIR (val): DIR/JPEGImages/b.jpg\n | one split
lists of a class, an empty one | OBJECTS L/cat_train.txt(a -1) L/trains.txt(a) L/val.txt(;) | train DIR (all):
no such list | OBJECTS L/train.txt(a) --split=test | no split "test"; it has train
columns and line ends | OBJECTS L/train.txt(b  -1; ;a   1;) | : DIR/JPEGImages/a.jpg DIR/JPEGImages/b.jpg\n
below, in YOLO format | D/images/a.jpg D/labels/a.txt(#0) D/classes.txt(cat) | (all): DIR/VOCdevkit/images/a.jpg\n
two levels below | D/VOC2007/Annotations/a.xml(cat) D/VOC2007/JPEGImages/a.jpg | : DIR/D/VOC2007/JPEGImages/a.jpg\n
several | TWO | DIR/VOCdevkit is no data set | found VOC2007, VOC2012
Kaggle | annotations/a.xml(sign) images/a.png | : DIR/images/a.png
Roboflow | ROBOFLOW | (train): DIR/train/a.rf.1.png\nclasses one, three, two | (val): DIR/valid/a.rf.1.png | class 2
Roboflow, test | ROBOFLOW --split=test | (test): DIR/test/a.rf.1.png | class 1
labelImg | a.xml(cat) b.xml(cat) a.jpg b.JPG | : DIR/a.jpg DIR/b.JPG\nclasses cat\nbox | one split
no images | a.xml(cat) | is no data set
split folders | train/xmls/a.xml(a) train/images/a.jpg test/xmls/b.xml(b) test/images/b.jpg | /train/images/a.jpg\n | (test): DIR/test/images/b.jpg
splits below | Annotations/Train/a.xml(a) JPEGImages/Train/a.jpg Annotations/val/a.xml(b) JPEGImages/val/a.jpg | /Train/a.jpg\n | /val/a.jpg\n
lists beside | OBJECTS train.txt(JPEGImages/a.jpg Annotations/a.xml) Val.txt(b) | Images/a.jpg\n | (val): DIR/JPEGImages/b.jpg
deeper images | labels/a.xml(cat) images/set/a.jpg images/set/b.jpg | : DIR/images/set/a.jpg\n | not used: b.jpg
images in splits | annotations/a.c.xml(a) annotations/b.xml(b) images/train/a.c.jpg images/val/b.jpg masks/b.png | /train/a.c.jpg\n | (val): DIR/images/val/b.jpg\n
images beside labels | annotations/a.b.xml(a) annotations/a.b.png | : DIR/annotations/a.b.png\n
YOLO, and a stray file | images/a.jpg images/b.jpg labels/a.txt(#0) labels/b.txt(#0) labels/a.xml(x) classes.txt(cat) | classes cat\n
masks | annotations/xmls/a.xml(a) annotations/xmls/b.xml(a) masks/b.png images/a.jpg | : DIR/images/a.jpg\n | b.xml: its image b is missing
)";
  std::string text = replaced(table, "OBJECTS",
                              "Annotations/a.xml(cat) Annotations/b.xml(dog) Annotations/c.xml(cow) "
                              "JPEGImages/a.jpg JPEGImages/b.jpg JPEGImages/c.jpg");
  text = replaced(text, " L/", " ImageSets/Main/");
  text = replaced(text, "ROBOFLOW",
                  "train/a.rf.1.xml(one) train/a.rf.1.png valid/a.rf.1.xml(two) valid/a.rf.1.png "
                  "test/a.rf.1.xml(three) test/a.rf.1.png");
  text = replaced(text, "TWO",
                  "D/VOC2007/Annotations/a.xml(cat) D/VOC2007/JPEGImages/a.jpg "
                  "D/VOC2012/Annotations/a.xml(cat) D/VOC2012/JPEGImages/a.jpg");
  check_rows(rows(replaced(text, "D/", "VOCdevkit/")));
  const auto named = [](const std::string& name) {  // two images of one name
    Files all = files("JPEGImages/a.jpg JPEGImages/a.png JPEGImages/b.jpg Annotations/b.xml(cat)");
    all.emplace_back("Annotations/a.xml", voc("<filename>" + name + "</filename>" + object("cat")));
    return all;
  };
  check_rows(
      {{"<filename> tells them apart", named("a.png"), {": DIR/JPEGImages/a.png DIR/JPEGImages/b.jpg\n"}},
       {"<filename> names neither",
        named("c.png"),
        {": DIR/JPEGImages/b.jpg\n",
         "label file of several images, which are left out: DIR/Annotations/a.xml: DIR/JPEGImages/a.jpg, "
         "DIR/JPEGImages/a.png; keep one"}},
       {"two label files for one image",
        files("JPEGImages/a.jpg Annotations/a.xml(cat) xmls/a.xml(dog)"),
        {"DIR/Annotations/a.xml and DIR/xmls/a.xml are different label files of one image"}},
       {"names with spaces",
        {{"Annotations/a b.xml", voc(object("cat"))},
         {"JPEGImages/a b.jpg", ""},
         {"Annotations/a.xml", voc(object("cat"))},
         {"JPEGImages/a.jpg", ""},
         {"ImageSets/Main/train.txt",
          "\xEF\xBB\xBF"
          "a b\r\n\r\n"}},
        {": DIR/JPEGImages/a b.jpg\n"}}});
}

TEST_CASE("formats: unreadable Pascal VOC files and objects are skipped and reported with their line") {
  const std::string good = object("cat");
  std::string deep = "<annotation>";
  for (int i = 0; i < 200000; ++i) deep += "<object>";
  const std::vector<std::array<std::string, 3>> bad_files = {
      {"broken", "<annotation>\n<object>\n<name>cat</nam\n</object>", ":3: "},
      {"cut", voc(good).substr(0, 40), ":2: "},
      {"empty", "", ":1: "},
      {"html", "<html><body>Not Found</body></html>", ":1: no <annotation>"},
      {"binary", std::string("\x00\xFF\x00<<<>\x01", 8), ":1: "},
      {"deep", deep, ":1: "}};
  const std::vector<std::array<std::string, 2>> bad_objects = {
      {"<object><name>cat</name></object>", "no <bndbox>"},
      {object("cat", "one 2 3 4"), "xmin is \"one\""},
      {object("cat", "1 2 nan 4"), "xmax is \"nan\""},
      {object("cat", "1 2 3 1e999"), "ymax is \"1e999\""},
      {object("cat", "1 2 3 0x10"), "ymax is \"0x10\""},
      {object(""), "no <name>"},
      {object("cat", "1"), "ymin is \"\""},
      {"<object><name>cat</name><bndbox><xmin>1\x07"
       "2</xmin></bndbox></object>",
       "xmin is \"1\\x072\""}};
  TempDir dir;
  put(dir, files("JPEGImages/good.jpg JPEGImages/objects.jpg JPEGImages/bomb.jpg Annotations/good.xml(cat) "
                 "Annotations/folder.xml/"));
  std::string list = "good\nfolder\nobjects\nbomb\ngone\n../../etc/passwd\n", objects;
  Names wanted = {"classes &c;&x;, cat\n",  // entities are not expanded
                  "label file missing: DIR/Annotations/gone.xml: ",
                  "label file cannot be read: DIR/Annotations/folder.xml: "};
  for (const auto& [name, text, where] : bad_files) {
    put(dir, {{"Annotations/" + name + ".xml", text}});
    list += name + "\n";
    wanted.push_back("label file cannot be read: DIR/Annotations/" + name + ".xml" + where);
  }
  for (const auto& [text, why] : bad_objects) {
    wanted.push_back(concat("label cannot be read: DIR/Annotations/objects.xml:", 2 + count_of(objects, "\n"),
                            ": object: ", why));
    wanted.push_back(concat("box DIR/Annotations/objects.xml:", 3 + count_of(objects, "\n"), " class 1"));
    objects += text + "\n" + good + "\n";
  }
  put(dir, {{"Annotations/objects.xml", voc(objects)},
            {"Annotations/bomb.xml",
             "<!DOCTYPE a [<!ENTITY b \"aaaaaaaaaa\"><!ENTITY c \"&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;\">"
             "<!ENTITY x SYSTEM \"file:///etc/passwd\">]>" +
                 voc(object("&c;&x;"))},
            {"ImageSets/Main/train.txt", list}});
  check_text(reading(dir), wanted);
  CHECK(read_sources({dir.path.string()}).train.coco.problems.size() ==
        3 + bad_files.size() + bad_objects.size());
  put(dir, {{"ImageSets/Main/train.txt", "gone\nempty\n"}});
  CHECK_HAS(reading(dir), "none of its 2 annotation files can be used");
  put(dir, {{"ImageSets/Main/train.txt", std::string("\xFF\xFEg\0o\0", 6)}});
  CHECK_HAS(reading(dir), "train.txt: is not UTF-8 text");
}

namespace {

// A data set of one folder with these label files, of the images a.jpg, b.jpg, ...
Files yolo(const Names& labels) {
  Files files = {{"data.yaml", "train: images\nnames: [cat, dog]\n"}};
  for (size_t i = 0; i < labels.size(); ++i)
    files.insert(files.end(), {{concat("images/", char('a' + i), ".jpg"), ""},
                               {concat("labels/", char('a' + i), ".txt"), labels[i]}});
  return files;
}

// Returns rows in which a(LINES), b(LINES) and c(LINES) are label files, each with a picture of 64x48 pixels.
std::vector<Row> labelled(std::string table) {
  for (const std::string name : {"a", "b", "c"})
    table =
        replaced(table, " " + name + "(", concat(" images/", name, ".png(@64x48) labels/", name, ".txt("));
  std::vector<Row> all = rows(table);
  for (Row& row : all) row.files.insert(row.files.begin(), yolo({})[0]);
  return all;
}

}  // namespace

TEST_CASE("formats: YOLO labels are boxes or polygons; unreadable lines and files are reported by line") {
  TempDir dir;
  put(dir, yolo({"\xEF\xBB\xBF"
                 "1 0.5 0.5 0.25 0.5\r\n\r\n  0\t0.125 0.25 1e-1 2.5E-1  \r\n"
                 "0 0.4 0.9 0.2 0.3 0.6 0.1\n1.0 .1 .1 .2 .1 .2 .3 .1 .3\n+0 +.5 +0.5 +1 1",
                 "", "7 0.5 0.5 1 1\n-1 0.5 0.5 1 1\n0 40 50 -10 0\n"}));
  put(dir, {{"images/d.jpg", ""}});
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
  for (const auto& problem : read_sources({other.path.string()}).train.coco.problems)
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
  CHECK_HAS(error_of([&] { read_coco(dir / "pipe.txt"); }), "not a regular file");
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

TEST_CASE("formats: YOLO labels with keypoints need kpt_shape; polygons and corners of boxes do not") {
  const std::string box = "0 0.5 0.5 0.5 0.5", whole = "a.txt:1 class 0 [0.25 0.25 0.5 0.5]",
                    three = "0 .1 .1 .9 .1 .9 .9", of_three = "a.txt:1 class 0 [0.1 0.1 0.8 0.8]";
  const auto ten = [](const std::string& label) { return yolo(Names(10, label)); };
  Files pose = ten(box + " 0.1 0.1 2 0.2 0.2 2"), null = pose;
  pose[0].second += "kpt_shape: [2, 3]\n";
  null[0].second += "kpt_shape:\n";
  check_rows(
      {{"kpt_shape", pose, {whole, "!cannot"}},
       {"without a value", null, {"10 labels have 11 columns: are they boxes with keypoints"}},
       {"a score and a track", ten(box + " 0.93 1"), {"error: ", "10 labels have 7 columns", "kpt_shape: ["}},
       {"polygons", yolo({three, three, three, three, three + " .1 .9 .1 .5"}), {of_three}},
       {"closed polygons", ten(three + " .1 .9 .1 .1"), {of_three}},
       {"corners of a box", ten(box + " 0.4 0.4 0.6 0.4"), {"!" + whole, "!error"}}});
}

TEST_CASE("formats: YOLO images are listed recursively, with label files; those without are reported") {
  TempDir dir;
  put(dir,
      files("images/a.JPG images/b.Jpeg images/sub/c.png images/sub/d.tiff images/e.bmp images/f.webp "
            "images/g.tif images/a.png images/h.gif images/notes.txt images/._a.jpg images/.hidden/x.jpg "
            "images/x.jpg/i.jpg elsewhere/k.jpg images/@eaDir/a.jpg/thumb.jpg images/lost+found/l.jpg "
            "data.yaml(train: images;names: [cat])"));
  fs::create_directory_symlink(dir / "images", dir / "images/sub/loop");
  fs::create_directory_symlink(dir / "elsewhere", dir / "images/link");
  fs::create_symlink(dir / "nowhere", dir / "images/lost.jpg");
  // If no label file exists, the path is wrong most of the time.
  check_text(
      reading(dir),
      {": DIR/images/a.JPG DIR/images/a.png DIR/images/b.Jpeg DIR/images/e.bmp DIR/images/f.webp "
       "DIR/images/g.tif DIR/images/h.gif DIR/images/link/k.jpg DIR/images/lost.jpg DIR/images/sub/c.png "
       "DIR/images/sub/d.tiff DIR/images/x.jpg/i.jpg\n",
       "no image has labels: expected the first label file at DIR/labels/a.txt\n",
       "12 of 12 images have no label file and count as images without objects: a.JPG, a.png, b.Jpeg",
       "left out folders of the system, or unreadable: DIR/images/@eaDir, DIR/images/lost+found\n"});
  CHECK(yolo_label_file("/images/x/images/train/a.b.jpg") == "/images/x/labels/train/a.b.txt");
  CHECK(yolo_label_file("images/a.jpg") == "labels/a.txt");
  CHECK(yolo_label_file("VOC2007/JPEGImages/a.jpg") == "VOC2007/labels/a.txt");  // of Darknet
  CHECK(yolo_label_file("x/images/images/images.jpg") == "x/images/labels/images.txt");
  CHECK(yolo_label_file("x/my_images/train/a.jpg") == "x/my_images/train/a.txt");
  Names notes;
  CHECK_HAS(error_of([&] { files_under(dir / "nowhere", notes); }), "cannot be listed");
  check_rows(rows(R"(
beside the images | photos/a.jpg photos/a.txt(#0) data.yaml(train: photos;names: [cat]) | box DIR/photos/a.txt:1
beside the images, in a folder images | images/a.jpg images/a.txt(#0) data.yaml(train: images;names: [cat])
 | box DIR/images/a.txt:1
one label file for two images, an empty one is allowed | images/a.jpg images/b.jpg images/c.jpg images/a.png
 images/c.png labels/a.txt(#0) labels/b.txt(#0) labels/c.txt() data.yaml(train: images;names: [cat])
 | : DIR/images/b.jpg DIR/images/c.jpg DIR/images/c.png\n
 | label file of several images, which are left out: DIR/labels/a.txt: DIR/images/a.jpg, DIR/images/a.png; keep
 one of them
two label files for one image, text of others is allowed | images/a.jpg images/b.jpg images/a.txt(#1) images/b.txt(a cat)
 labels/a.txt(#0) labels/b.txt(#0) data.yaml(train: images;names: [cat, dog]) | : DIR/images/b.jpg\n
 | image with two label files, which is left out: DIR/labels/a.txt and DIR/images/a.txt
no other images | images/a.jpg images/a.png labels/a.txt(#0) data.yaml(train: images;names: [cat])
 | none of its 2 label files can be used; correct them: DIR/labels/a.txt: DIR/images/a.jpg, 
)"));
  TempDir lost;
  put(lost,
      files(
          "images/train/a.jpg images/train/c.psd images/val/b.jpg images/train/d.jpg labels/train/a.txt(#0) "
          "labels/train/gone.txt(#0) labels/train/c.txt(#0) labels/train/d.txt(#0) labels/val/b.txt(#0) "
          "labels/train/classes.txt(#0) list.txt(images/train/a.jpg;images/train/a.jpg)"));
  for (const std::string train : {"images/train", "list.txt"}) {  // a list names a part of the images
    put(lost, {{"data.yaml", "train: " + train + "\nval: images/val\nnames: [cat]"}});
    const std::string text = reading(lost);
    CHECK_HAS(text, "label file without image: DIR/labels/train/gone.txt\n");
    CHECK(count_of(text, "label file without image") == 2);  // and that of c.psd, which is not read
  }
  const fs::path before = fs::current_path();
  fs::current_path(lost.path);
  CHECK_HAS(described("", read_sources({"data.yaml"}).train), "without image: labels/train/gone.txt\n");
  fs::current_path(before);
}

TEST_CASE("formats: data.yaml: image paths are absolute or relative to several folders; a split has a key") {
  const std::string table = R"(
below the file | Y(train: images/train) set/images/train/a.jpg | TR set/images/train/a.jpg
path | Y(path: .;train: images/train/) set/images/train/a.jpg | TR set/images/train/a.jpg
path elsewhere | Y(path: ../other;train: ./images) other/images/a.jpg set/images/b.jpg | TR other/images/a.jpg
path of another machine | Y(path: /not/here;train: images) set/images/a.jpg | TR set/images/a.jpg
absolute path | Y(path: DIR/other;train: images) other/images/a.jpg | TR other/images/a.jpg
absolute folder | Y(train: DIR/other/images) other/images/a.jpg | TR other/images/a.jpg
path without the folder | Y(path: sub;train: images) set/sub/b.jpg set/images/a.jpg | TR set/images/a.jpg
Roboflow | Y(train: ../train/images) set/train/images/a.jpg | TR set/train/images/a.jpg
two that Roboflow may mean | Y(train: ../train/images) set/train/images/a.jpg train/images/b.jpg | can be DIR/train/images and DIR/set/train/images
in path | Y(path: sub;train: ../train/images) set/sub/train/images/a.jpg | TR set/sub/train/images/a.jpg
two folders | Y(train: [images/b, images/a]) set/images/a/2.jpg set/images/b/1.jpg
 | TR set/images/a/2.jpg DIR/set/images/b/1.jpg
a folder and a list | Y(train:;- images/b;- lists/other.txt) set/images/b/1.jpg set/lists/e.jpg set/f.jpg
 set/lists/other.txt(e.jpg;./f.jpg) | TR set/f.jpg DIR/set/images/b/1.jpg DIR/set/lists/e.jpg
a list, with images that are lost | Y(path: /not/here;train: lists/train.txt) set/images/c/1.jpg set/lists/d.jpg
 set/lists/train.txt(./d.jpg; ;images\c\1.jpg;images/lost.jpg;./images/lost.jpg)
 | TR set/images/c/1.jpg DIR/set/images/lost.jpg DIR/set/lists/d.jpg | 1 of 4 images are named again
a folder named as a list | Y(train: x.txt) set/x.txt/a.jpg | TR set/x.txt/a.jpg
Windows | Y(train: C:\sets\cells\images\train) set/images/train/a.jpg | TR set/images/train/a.jpg
not another split | Y(train: C:\sets\images) set/images/train/a.jpg | neither a folder nor a .txt
a list of another machine | Y(train: far.txt) set/far.txt(D:\old\cam1\a.jpg;E:\x\cam2\b.jpg) set/cam1/a.jpg
 set/cam2/b.jpg | TR set/cam1/a.jpg DIR/set/cam2/b.jpg
of two recordings | Y(train: list.txt) set/list.txt(/old/x/1.jpg) set/cam1/1.jpg set/cam2/1.jpg
 | list.txt: two folders have images of its names | correct the paths in the list
no folder | Y(train: images;val: ../v/images) set/images/a.jpg
 | DIR/set/data.yaml: val: neither a folder nor a .txt: DIR/v/images
which is not needed | Y(train: images;val: ../v/images) set/images/a.jpg --split=train | TR set/images/a.jpg
no images | Y(train: images;val: v) set/images/a.jpg set/v/notes.txt | val: no images in v
three splits | Y(train: a;val: b;test: c) IMAGES | TR set/a/1.jpg | (val): DIR/set/b/2.jpg
test is named | Y(train: a;val: b;test: c) IMAGES --split=test | TR set/a/1.jpg | (test): DIR/set/c/3.jpg
valid | Y(train: a;valid: b;test:) IMAGES --split=val | TR set/a/1.jpg | (val): DIR/set/b/2.jpg
train and test | Y(train: a;test: c;download: x) IMAGES | TR set/a/1.jpg | (test): DIR/set/c/3.jpg
dev | Y(train: a;Dev: b) IMAGES | TR set/a/1.jpg | (val): DIR/set/b/2.jpg
val alone | Y(val: b) IMAGES | train DIR/set/data.yaml (val): DIR/set/b/2.jpg | one split
no test | Y(train: a;test:  # optional) IMAGES --split=test | no split "test"; it has train
)";
  std::string text = replaced(table, "Y(", "--data=set set/data.yaml(names: [cat];");
  text = replaced(text, "TR ", "train DIR/set/data.yaml (train): DIR/");
  check_rows(rows(replaced(text, "IMAGES", "set/a/1.jpg set/b/2.jpg set/c/3.jpg")));
}

TEST_CASE("formats: data.yaml: classes are a list, a map or a count; errors are reported with their line") {
  const std::string train = "train: images\n";
  std::string nested;
  for (int i = 0; i < 1000; ++i) nested += std::string(i, ' ') + "a:\n";
  std::vector<std::pair<std::string, std::string>> cases = {
      // the file, and a part of the text
      {"\xEF\xBB\xBFnames: [cat, 'a, b', \"null\", 7, yes]\r\nnc: 5\r\n" + train,
       "classes cat, a, b, null, 7, yes\n"},
      {"names:\n- cat\n- dog\n" + train, "classes cat, dog\n"},
      {"names:\r\n  1: dog\r\n  0: cat\r\n  2: \xC3\xA9l\xC3\xA9phant\r\n" + train,
       "classes cat, dog, \xC3\xA9l\xC3\xA9phant\n"},
      {"nc: 3\n" + train, "classes 0, 1, 2\n"},
      {"names:\nnc: 2\n" + train, "classes 0, 1\n"},
      {"names: D:\\set\\names.txt\nnc: 2\n" + train, "classes cat, big dog\n"},
      {train + "names:\n  - cat\n dog: 1", "data.yaml:4: not valid YAML"},
      {train + "names: &x [*y]", "data.yaml:2: not valid YAML"},
      {train + "names: [cat]\nval: a\nval: b", "data.yaml:4: a second val"},
      {train + "names: [cat]\nval: a\nvalid: b", "data.yaml:4: valid and another key are the split val"},
      {"", "has no keys"},
      {"just text", "has no keys"},
      {"- a\n- b", "has no keys"},
      {std::string("\x89PNG\r\n\x1A\n\0\0", 10), "is not UTF-8 text"},
      {train, "no class names"},
      {"names: [cat]", "no train and no val"},
      {train + "names: cat", "data.yaml:2: names must be a list"},
      {train + "names: []", "data.yaml:2: names is empty"},
      {train + "names: [cat, [dog]]", "data.yaml:2: names has no text for class 1 of 2"},
      {train + "names: [cat, null]", "class 1 of 2"},
      {train + "names: {0: cat, 2: dog}", "data.yaml:2: names has no text for class 1 of 2"},
      {train + "names: {1: cat, 2: dog}", "class 0 of 2"},
      {train + "names: {0: cat, 0: dog}", "class 1 of 2"},
      {train + "\nnc: 3\nnames: [a, b]", "data.yaml:3: nc is \"3\", names has 2 entries"},
      {"names: [a]\ntrain: 3", "train: neither a folder nor a .txt"},
      {"names: [a]\npath: [x]\ntrain: images/a.jpg", "neither a folder nor a .txt"},
      {train + "names: " + std::string(20000, '['), "not valid YAML"},
      {nested, "error: DIR/data.yaml"},
      {"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + train + "names: *c", "class 0 of 2"}};
  for (const std::string nc : {"0", "-1", "2.5", "many", "1000000000", "[1]", "{}"})
    cases.emplace_back(train + "nc: " + nc, "data.yaml:2: nc is ");
  for (const std::string value : {"{a: b}", "[]", "[[a]]", "['']"})
    cases.emplace_back("names: [a]\ntrain: " + value, "data.yaml:2: train must be a folder");
  for (const auto& [yaml, wanted] : cases) {
    const std::string begin = yaml.substr(0, 200);
    INFO(begin);
    TempDir dir;
    put(dir, {{"images/a.jpg", ""}, {"names.txt", "cat\nbig dog\n"}, {"data.yaml", yaml}});
    check_text(reading(dir, {"data.yaml"}), {wanted, "DIR/data.yaml"});
  }
}

TEST_CASE("formats: labels of labelImg, CVAT, Darknet, Yolo_mark and Roboflow in YOLO format are read") {
  // DARKNET(data file, prefix of its paths, folder of the images, folder of the labels, folder of all)
  const auto darknet = [](const std::string& data, const std::string& path, const std::string& images,
                          const std::string& labels, const std::string& all = "") {
    return concat(all, data, "(# mine;classes= 2;train  = ", path,
                  "train.txt;#valid = old.txt;valid = ", path, "valid.txt;names = ", path,
                  "my.names;;backup =;eval=coco;) ", all, "my.names(cat;red dog;) ", all, "train.txt(", path,
                  images, "/a.jpg) ", all, "valid.txt(", path, images, "/b.jpg) ", all, images, "/a.jpg ",
                  all, images, "/b.jpg ", all, labels, "/a.txt(#1) ", all, labels, "/b.txt(#1)");
  };
  std::string table = R"(
# The folder may be called images, although labels of YOLO are in a folder `labels` in other layouts.
labelImg | images/a.jpg images/b.PNG images/c.jpg images/a.txt(#1) images/classes.txt(cat;dog) --data=images
 | : DIR/images/a.jpg DIR/images/b.PNG DIR/images/c.jpg\nclasses cat, dog\nbox DIR/images/a.txt:1BOX | one split
labelImg, from the folder above | images/a.jpg images/a.txt(#1) images/classes.txt(cat;dog) | : DIR/images/a.jpg\nclasses cat, dog
classes in two orders | train/a.jpg train/a.txt(#1) train/classes.txt(cat;dog) val/b.jpg val/classes.txt(dog;cat;cow) | number the classes in diff
data.yaml and classes.txt | data.yaml(train: images;names: [dog, cat];) images/a.jpg labels/a.txt(#1) labels/classes.txt(cat;dog) | number the classes in diff
obj.names of CVAT | data.yaml(train: images;names: [dog, cat];) images/a.jpg labels/a.txt(#1) obj.names(cat;dog) | obj.names and DIR/data.yaml
a lost image | data.yaml(train: images;names: [dog];) images/a.jpg images/a.txt(#0) images/b.txt(#0) images/read.txt(x) | !read | without image: DIR/images/b.txt
another classes.txt | data.yaml(train: images;names: [dog, cat];) images/a.jpg labels/a.txt(#1) labels/classes.txt(cat;;x) | classes dog, cat
labelImg, with splits | train/a.jpg val/b.jpg train/a.txt(#1) train/classes.txt(cat;dog) | : DIR/train/a.jpg\n
 | : DIR/val/b.jpg\n
no names | obj.data(train = train.txt) train.txt(a.jpg) a.jpg | no class names; add | names = FILE to an obj.data
Roboflow | ROBOFLOW | train/_darknet.labels (train): DIR/train/a.jpg\nclasses cat, red dog\nbox
 | val DIR/train/_darknet.labels (val): DIR/valid/a.jpg\n
Roboflow, one folder | ROBOFLOW --data=train | : DIR/train/a.jpg\nclasses cat, red dog\nbox DIR/train/a.txt:1BOX
images and labels with names | a/images/train/a.jpg a/images/val/b.jpg a/labels/train/a.txt(#1)
 a/labels/classes.txt(cat;red dog;;) --data=a | (train): DIR/a/images/train/a.jpg\nclasses cat, red dog\nbox
 | (val): DIR/a/images/val/b.jpg
one folder of images | images/a.jpg labels/a.txt(#1) classes.txt(cat;dog) | (all): DIR/images/a.jpg\nclasses cat, dog
folders of splits | images/train2017/a.jpg images/Test/b.jpg labels/train2017/a.TXT(#0) labels/Test/b.txt(#0) classes.txt(cat) | (train): DIR/images/train2017/a.jpg\nclasses cat\nbox DIR/labels/train2017/a.TXT:1 | (test): DIR/images/Test/b.jpg
a part of a split | images/train/a.jpg images/train_part2/b.jpg labels/train/a.txt(#0) classes.txt(cat)
 | folders of no split, which are not used: DIR/images/train_part2
an empty line is a class | images/a.jpg labels/a.txt(#1) classes.txt(cat;;dog) | classes.txt:2: empty line
without names | images/train/a.jpg images/val/b.jpg labels/train/a.txt(#1)
 | write DIR/data.yaml with the lines "train: images/train", "val: images/val", "names: [first, second]", or a
 classes.txt with a name in each line
without names, one folder | images/a.jpg labels/a.txt(#1) | with the lines "train: images", "names:
without labels | images/train/a.jpg | is no data set
)";
  const std::string read =
      " | classes cat, red dog\\nbox | a.txt:1BOX | b.txt:1BOX | train DIR/ | val DIR/ | !no label";
  for (const std::string& row :
       {darknet("obj.data", "", "obj_train_data", "obj_train_data"),       // CVAT
        darknet("obj.data", "data/", "obj_train_data", "obj_train_data"),  // paths of another machine
        darknet("obj.data", "", "images", "labels"), darknet("coco.data", "DIR/", "images", "labels"),
        darknet("coco.data", "DIR/", "images", "labels") + " --data=coco.data",
        darknet("obj.data", "data/", "img", "img", "data/"),  // Yolo_mark
        darknet("obj.data", "data/", "img", "img", "data/") + " --data=data"})
    table += row.substr(0, 20) + " | " + row + read + "\n";
  table = replaced(table, "ROBOFLOW",
                   "train/a.jpg train/a.txt(#1) train/_darknet.labels(cat;red dog) valid/a.jpg "
                   "valid/a.txt(#1) valid/_darknet.labels(cat;red dog)");
  check_rows(rows(replaced(table, "BOX", " class 1 [0.4 0.3 0.2 0.4]")));
}

TEST_CASE("formats: boxes that are no pixels, and classes that begin with 1, are refused in each format") {
  // The same six boxes in each of 4 images, in units by row.
  struct Unit {
    std::string wanted;
    double x, y;         // factors
    double corners = 0;  // share of x and y that is added to width and height
    double centre = 0;   // share of width and height that is added to x and y
    std::string size = "160x120";
  };
  const double boxes[6][4] = {{10, 20, 60, 30},  {90, 10, 50, 60}, {20, 70, 70, 40},
                              {100, 60, 55, 50}, {5, 5, 40, 40},   {80, 30, 70, 80}};
  for (const Unit& u :
       {Unit{"one split", 1, 1}, Unit{"24 of 24 boxes are fractions of the image size", 1. / 160, 1. / 120},
        Unit{"24 of 24 boxes are within 0..100, although the images are larger: per cent", 1 / 1.6, 1 / 1.2},
        Unit{"24 of 24 boxes are within 0..1000, although the images are larger: thousandths", 6.25, 1 / 0.12,
             0, 0, "1600x1200"},
        Unit{"24 of 24 boxes are within 0..100, although the images are larger: per cent", 0.53, 0.7},
        Unit{"24 of 24 boxes are corners (x1, y1, x2, y2)", 1, 1, 1},
        Unit{"24 of 24 boxes are corners (x1, y1, x2, y2)", 0.5, 0.5, 1},
        Unit{"do the boxes begin with their centre?", 1, 1, 0, 0.5},
        Unit{"24 of 24 boxes reach beyond their images", 4, 4}}) {
    Files as_coco, as_voc;
    Names images, annotations;
    for (int i = 0; i < 4; ++i) {
      std::string objects;
      for (const auto& b : boxes) {
        const double x = (b[0] + u.centre * b[2]) * u.x, y = (b[1] + u.centre * b[3]) * u.y,
                     w = b[2] * u.x + u.corners * x, h = b[3] * u.y + u.corners * y;
        annotations.push_back(concat(i + 1, " 1 [", x, ",", y, ",", w, ",", h, "]"));
        objects += object("a", concat(x, " ", y, " ", x + w, " ", y + h));
      }
      images.push_back(concat(i, ".png ", u.size));
      as_coco.emplace_back(concat(i, ".png"), "@" + u.size);
      as_voc.insert(as_voc.end(), {{concat("JPEGImages/", i, ".png"), "@" + u.size},
                                   {concat("Annotations/", i, ".xml"), voc(objects)}});
    }
    as_coco.emplace_back("x.json", coco(images, annotations));
    check_rows({{"COCO", as_coco, {u.wanted}}, {"VOC", as_voc, {u.wanted}}}, loading);
  }
  const std::string table = R"(
one wrong line is no reason to stop | a(INSIDE) b() c(0 120 80 40 30)
 | one split | box outside of the image: DIR/labels/c.txt:1
pixels | a(INSIDE) b(0 120 80 40 30) c(0 20 200 40 30;0 600 400 4 3)
 | 3 of 5 boxes OUT/b.txt:1 [ | ; YOLO labels are
corners | a(0 0.7 0.6 0.9 0.8) | 1 of 1 boxes OUT/a.txt:1 | corners
top left | a(0 0.02 0.3 0.2 0.2;0 0.01 0.4 0.2 0.2;0 0.4 0.02 0.2 0.3) b(0 0.5 0.01 0.2 0.2;0 0.03 0.5 0.3 0.2;0 0.5 0.5 0.2 0.2)
 | 5 of 6 boxes | do the labels begin with the top left corner?
divided twice | a(0 0.005 0.005 0.002 0.002) | 1 of 1 boxes are fractions | divided by the image size twice?
from 1 | a(#1) b(#2)
 | error: DIR/data.yaml (train): the classes of the labels are off by one: there is no class 2, as in DIR/labels/b.txt:1 | subtract 1 from each class
from 0 | a(#0) b(#2) | annotation of an unknown class: DIR/labels/b.txt:1 | one split
)";
  const std::string inside = "0 0.5 0.5 0.2 0.2;0 0.95 0.5 0.1 0.2",
                    out = "reach beyond their images, such as DIR/labels";
  check_rows(labelled(replaced(replaced(table, "INSIDE", inside), "OUT", out)), loading);
}

TEST_CASE("formats: a box twice, also with another last digit, is one box; crowds alone are no objects") {
  const std::string table = R"(
last digit | x.json(a.png;1 1 [10,20,30,40];1 1 [10.005,70,30,40];1 1 [10.01,20,30,39.99]) PICTURE
 | box DIR/a.png class 0 [10 20 40 60]\n | duplicate box: DIR/x.json: annotation 3 | !annotation 2
another class, near | x.json(a.png;1 1 [10,20,30,40];1 2 [10,20,30,40];1 1 [11,20,30,40]) PICTURE
 | class 1 | !duplicate
thin, near | x.json(a.png;1 1 [10,2,3,80];1 1 [10.5,2,3,80]) PICTURE | !duplicate
crowds | x.json(a.png;1 1 [10,20,30,40] crowd;1 1 [50,20,30,40] crowd) PICTURE
 | error: DIR/x.json: all 2 boxes are crowds (iscrowd 1) or difficult objects
classes from 0, categories from 1 | x.json(a.png;1 0 [10,20,30,40];1 1 [50,20,30,40]) PICTURE
 | error: DIR/x.json: the classes of the labels are off by one: there is no class 0 | add 1 to each class
none | x.json(a.png;1 1 [1,1,0,0]) PICTURE | no usable box | the first problem: box without area
empty | x.json(a.png;) PICTURE | no usable box
)";
  const std::string picture = "a.png(@160x120)";
  check_rows(rows(replaced(table, "PICTURE", picture)), loading);
  const std::string difficult = object("a", "1 2 30 50", "<difficult> True</difficult>");
  check_rows({{"VOC", {{"a.png", "@160x120"}, {"a.xml", voc(difficult)}}, {"all 1 boxes are crowds"}}},
             loading);
  TempDir dir;
  put(dir, files("x.json(a.png;1 1 [10,20,30,40] crowd;1 1 [50,20,30,40]) " + picture));
  Log log(dir / "log.txt", /*quiet=*/true);
  log_classes(log, load_splits({dir.path.string()}));
  CHECK_HAS(contents(dir / "log.txt"), "and 1 ignored regions (crowds, difficult objects)\n");
}

TEST_CASE("formats: class names are compared in one normal form, and a message says what differs") {
  const auto pair = [](const std::string& train, const std::string& val) {
    return Files{{"train.json", coco({"a.png"}, {"1 1 [1,2,10,12]"}, {train, "box"})},
                 {"val.json", coco({"b.png"}, {"1 1 [1,2,10,12]"}, {val, "box"})},
                 {"a.png", "@20x20"},
                 {"b.png", "@20x21"}};
  };
  std::vector<Row> all = {
      {"case",
       pair("Disc", "disc"),
       {"\"disc\" and \"Disc\" differ in case, blanks, - or _", "objects of the class disc are left out"}},
      {"underscore", pair("red_disc", "red disc"), {"\"red disc\" and \"red_disc\" differ in case"}},
      {"a Cyrillic letter",
       pair("disc", "dis\u0441"),
       {"differ in a character: \"\u0441\" (2 bytes) and \"c\" (1 bytes)"}}};
  const std::vector<std::pair<std::string, std::string>> equal = {
      {"disc ", "disc"},         {" red  disc", "red disc"},         {"red\u00a0disc", "red disc"},
      {"B\u00e4r", "Ba\u0308r"}, {"A\u030a\u017c", "\u00c5z\u0307"}, {"\u3000\u732b", "\u732b"}};
  for (const auto& [train, val] : equal)
    all.push_back(
        {val,
         pair(train, val),
         {"val DIR/val.json: 1 images\nclasses " + normal_name(val) + ", box\nbox DIR/b.png class 0", "!note",
          "!left out"}});
  check_rows(all, loading);
  all = {{"regions", pair("DontCare", "DontCare"), {"the class DontCare is learned like the others"}}};
  check_rows(all, loading);
  CHECK(normal_name("a\u0308\u0323 \xff\u00df") == "\u00e4\u0323 \xff\u00df");
  check_rows(rows("VOC | a.jpg b.jpg a.xml(red disc) b.xml(red\u00a0disc ) | classes red disc\\n"));
}

TEST_CASE("formats: in an ambiguous folder data.yaml has priority, then COCO, Pascal VOC and YOLO") {
  const std::string table = R"(
data.yaml | DATA COCO VOC images/a.json(x.jpg) package.json({"name": "x"}) args.yaml(epochs: 3) broken.yaml([)
 coco8.yaml(names: [x])
 | train DIR/data.yaml (train)
dataset.yaml | SET dataset.yaml(NAMES) COCO VOC | train DIR/dataset.yaml (train)
a file of any program may have another name | SET own.yaml(NAMES) COCO VOC | train DIR/labels.json
Pascal VOC | SET own.yaml(NAMES) VOC | train DIR (all)
an explicit path decides | SET own.yaml(NAMES) COCO VOC --data=own.yaml | train DIR/own.yaml (train)
data.yaml of another program | SET own.yaml(NAMES) COCO data.yaml(seed: 3) | train DIR/labels.json
deeper folders come last | DATA backup/Annotations/b.xml(cat) backup/JPEGImages/b.jpg | train DIR/data.yaml (train)
another name | SET coco8.yaml(NAMES) args.yaml(epochs: 3) annotations.json([1, 2]) | train DIR/coco8.yaml (train)
keys in quotes, beside files of other programs | SET coco8.yaml({"train": "images", "names": ["cat"]})
 notes.data(we train) broken.yaml([) | train DIR/coco8.yaml (train)
two | SET coco8.yaml(NAMES) coco9.yml(NAMES) | several YAML files
nowhere | a.jpg --data=nowhere | DIR/nowhere does not exist
no file | a.jpg --data=nowhere.yaml | does not exist
empty | x/ --data=x | an empty folder
unknown | a.jpg b.log d/e/f.xml package.json({"name": "x"}) | annotations/*.json | Annotations/*.xml | data.yaml
 | a.jpg, b.log, d, package.json
)";
  std::string text = replaced(table, "DATA", "SET data.yaml(NAMES)");
  text = replaced(text, "SET", "images/a.jpg labels/a.txt(#0)");
  text = replaced(text, "NAMES", "train: images;names: [cat]");
  text = replaced(text, "COCO", "labels.json(a.jpg)");
  check_rows(rows(replaced(text, " VOC", " Annotations/b.xml(cat) JPEGImages/b.jpg")));
}

TEST_CASE("formats: data sets of formats that are not read are refused by name, with the way out") {
  const std::string table = R"(
zip | x/a.zip(PK@) | DIR/x/a.zip is an archive; unpack it
tar | x/a.tar.gz(GZ@) | DIR/x/a.tar.gz is an archive; unpack it
labelme | x/a.json({"version": "5", "shapes": [], "imagePath": "a.jpg"}) | DIR/x/a.json is a file of labelme; convert it
VIA | x/via.json({"a.jpg1": {"regions": [{"shape_attributes": {"name": "rect"}}]}}) | DIR/x/via.json is a file of VIA; 
Supervisely | x/b.json({"objects": [{"classTitle": "cat", "points": {}}]}) | DIR/x/b.json is a file of Supervisely; 
Label Studio | x/tasks.json([{"result": [{"from_name": "label", "to_name": "image"}]}])
 | DIR/x/tasks.json is a file of Label Studio; 
CreateML | x/c.json([{"annotations": [{"label": "cat", "coordinates": {"x": 1}}]}]) | DIR/x/c.json is a CreateML file; 
Open Images | x/boxes.csv(ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax;)
 | DIR/x/boxes.csv is a table of Open Images; 
a CSV table | x/train.csv(filename,width,height,class,xmin,ymin,xmax,ymax;) | DIR/x/train.csv is a CSV table; 
KITTI | x/label_2/0.txt(Car 0.00 0 -1.57 1 2 3 4 1.5 1.6 3.7 1.0 1.6 9.0 -1.5;)
 | DIR/x/label_2/0.txt is a label file of KITTI; 
TFRecord | x/a.tfrecord(x) | DIR/x/a.tfrecord is a TFRecord or Parquet file; 
)";
  for (Row& row : rows(replaced(replaced(table, "PK@", "PK\3\4"), "GZ@", "\x1F\x8B\x08"))) {
    const std::string file = row.files[0].first;
    row.files.emplace_back("x/a.jpg", "");
    row.options.data = "x";
    check_rows({row});
    row.options.data = file;
    if (!file.ends_with(".txt") && !file.ends_with(".tfrecord")) check_rows({row});
  }
}

TEST_CASE("formats: --val-fraction holds out the same images in each format, no copies and no video frames") {
  struct Case {
    std::string note;
    std::string (*name)(int);  // of image i of 60
    int group;                 // number of images that stay together
    int classes = 1;
  };
  const auto names = [](const Source& s) {
    std::set<std::string> all;
    for (const auto& file : s.files) all.insert(fs::path(file).stem());
    return all;
  };
  TempDir dir;
  for (const Case& c :
       {Case{"copies of a picture (NAME.rf.HASH)",
             [](int i) { return concat("IMG_", i / 3, "_jpg.rf.", i * 7919 % 1000, "abc"); }, 3},
        Case{"as frames of a video, are on the same side",
             [](int i) { return concat("street", char('a' + i / 6), formatted("_%06d", i)); }, 6},
        // Images that are numbered by class, and frames of one video.
        Case{"the images are numbered",
             [](int i) { return concat("kind", char('a' + i / 6), formatted("_%06d", i)); }, 1, 10},
        Case{"the images are numbered", [](int i) { return concat("clip_", i); }, 1}}) {
    INFO(c.name(0));
    for (const std::string form : {"coco", "yolo"}) fs::remove_all(dir / form);
    put(dir, {{"yolo/classes.txt", "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n"}});
    Names images, boxes;
    for (int i = 0; i < 60; ++i) {
      const int cls = i * c.classes / 60;
      images.push_back(c.name(i) + ".jpg");
      boxes.push_back(concat(i + 1, " ", cls + 1, " [1,2,3,4]"));
      put(dir, {{"coco/" + images.back(), ""},
                {"yolo/" + images.back(), ""},
                {"yolo/" + c.name(i) + ".txt", concat("\n", cls, " 0.5 0.5 0.2 0.", i + 10, "\n")}});
    }
    put(dir, {{"coco/train.json", coco(images, boxes, Names(10, "a"))}});
    const Sources of_coco = read_sources({dir / "coco", {}, 0.2}),
                  of_yolo = read_sources({dir / "yolo", {}, 0.2});
    CHECK(names(of_coco.val) == names(of_yolo.val));
    for (const Sources* s : {&of_coco, &of_yolo}) {
      CHECK_FALSE(s->same);
      CHECK(s->train.name != s->val.name);
      CHECK(s->val.files.size() == 12);
      std::set<std::string> all = names(s->train);
      CHECK(all.size() == 48);
      all.merge(names(s->val));
      CHECK(all.size() == 60);
      for (const Source* part : {&s->train, &s->val}) {
        REQUIRE(part->coco.annotations.size() == part->files.size());
        for (size_t i = 0; i < part->files.size(); ++i)
          CHECK(part->coco.annotations[i].image_id == part->coco.images[i].id);
      }
    }
    std::set<int64_t> in_train;
    for (const auto& image : of_coco.train.coco.images) in_train.insert((image.id - 1) / c.group);
    for (const auto& image : of_coco.val.coco.images) CHECK_FALSE(in_train.count((image.id - 1) / c.group));
    CHECK_HAS(described("val", of_coco.val), c.note);
    CHECK(read_sources({dir / "yolo", {}, 0.2}, false).val.files == of_yolo.val.files);
    for (size_t i = 0; i < 12; ++i)  // the label belongs to the image
      CHECK(of_yolo.val.where(i) == fs::path(of_yolo.val.files[i]).replace_extension(".txt").string() + ":2");
  }
  CHECK(read_sources({dir / "yolo", {}, 0.001}).val.files.size() == 1);
  put(dir, {{"coco/val.json", coco({"other.jpg"})}, {"coco/other.jpg", ""}});
  CHECK_HAS(reading(dir, {"coco", "", 0.2}), "--val-fraction is for data with one split, but --data");
  const DataOptions shapes{"shapes", {}, 0.2};
  CHECK_HAS(error_of([&] { load_splits(shapes); }), "--val-fraction is for COCO, VOC and YOLO files");
}

TEST_CASE("formats: splits of the same images are one; images in both are counted, by whatever path") {
  const std::string set =
      "images/a.jpg images/b.jpg images/c.jpg other/images/a.jpg other/images/b.jpg labels/a.txt(#0) "
      "labels/b.txt(#0) labels/c.txt(#0) some.txt(DIR/images/b.jpg;./other/images/b.jpg) ";
  const auto with = [&](const std::string& val) {
    return files(set + "data.yaml(train: images;val: " + val + ";names: [cat])");
  };
  check_rows(
      {{"one folder", with("images"), {"one split", "!note"}},
       {"one folder, held out", with("images"), {"2 images held out"}, {"", "", 0.7}},
       {"an absolute path", with("DIR/images"), {"one split", "!note"}},
       {"a list in another order of writing", with("some.txt"), {"1 of 2 images are training images, too"}},
       {"another folder", with("other/images"), {"val ", "!training images"}}});
  TempDir dir;
  put(dir, with("val/images"));
  fs::create_directories(dir / "val/images");
  fs::create_symlink("../../images/a.jpg", dir / "val/images/a.jpg");
  fs::create_hard_link(dir / "images/b.jpg", dir / "val/images/x.jpg");
  fs::copy_file(dir / "images/c.jpg", dir / "val/images/c.jpg");
  put(dir, {{"images/d.jpg", "12"}, {"val/images/d.jpg", "34"}});
  CHECK_HAS(reading(dir), "3 of 4 images are training images, too");
  TempDir one;  // a single split, which is evaluated
  put(one,
      files("images/a.png(@64x48) images/b.png(@64x48) labels/a.txt(#0) labels/b.txt(#0) classes.txt(cat)"));
  CHECK_HAS(load_splits({one.path.string()}).val.name, "warning: the training images; --val-fraction");
  for (const double held_out : {0., 0.5}) {
    const Dataset val = load_splits({one.path.string(), {}, held_out}, /*with_train=*/false).val;
    CHECK(has(described("", val), "images that ./train would train on") == (held_out == 0));
  }
}

TEST_CASE("formats: a split that cannot be used is an error, and no other split takes its place") {
  check_rows(rows(R"(
an empty file | annotations/train.json() annotations/val.json(a.jpg) a.jpg | error: DIR/annotations/train.json: not valid JSON
a pointer of Git LFS | annotations/train.json({version https://git-lfs.github.com/spec/v1) annotations/val.json(a.jpg) a.jpg
 | error: DIR/annotations/train.json is a pointer of Git LFS | git lfs pull
a compressed file | annotations/train.json(a.jpg) annotations/val.json.gz(x) a.jpg | error: | val.json.gz is an archive
a file of another name | annotations/train.json(a.jpg) annotations/holdout.json(a.jpg) a.jpg
 | error: | has the splits holdout, train, and none of them is called val or test; give --split
an evaluation split alone | annotations/val.json(a.jpg) a.jpg | one split | warning: DIR has the split val only
a list of VOC without images | ImageSets/Main/train.txt(a) ImageSets/Main/val.txt() Annotations/a.xml(x) JPEGImages/a.jpg
 | error: DIR/ImageSets/Main/val.txt names no images
a file without a split beside one of val | annotations/instances_default.json(a.jpg) annotations/val.json(b.jpg) a.jpg b.jpg
 | error: | has the splits instances_default, val, and none of them is called train
lists of CVAT | ImageSets/Main/default.txt(a) ImageSets/Main/Validation.txt(b) Annotations/a.xml(x) Annotations/b.xml(x) JPEGImages/a.jpg
 JPEGImages/b.jpg | (train): DIR/JPEGImages/a.jpg | val DIR (val): DIR/JPEGImages/b.jpg
lists of PaddleX | train_list.txt(JPEGImages/a.jpg Annotations/a.xml) val_list.txt(JPEGImages/b.jpg Annotations/b.xml) Annotations/a.xml(x)
 Annotations/b.xml(x) JPEGImages/a.jpg JPEGImages/b.jpg | val DIR (val): DIR/JPEGImages/b.jpg
a list of VOC with extensions | ImageSets/Main/train.txt(a.jpg) Annotations/a.xml(x) JPEGImages/a.jpg | class 0 | !problem
a key of data.yaml without a value | data.yaml(train: images;val:;names: [a];) images/a.jpg labels/a.txt(#0)
 | error: DIR/data.yaml: val is empty
obj.data with another key | obj.data(names = obj.names;train = train.txt;val = val.txt;) obj.names(a) train.txt(a.jpg) val.txt(b.jpg)
 a.jpg b.jpg a.txt(#0) b.txt(#0) | val DIR/obj.data (val): DIR/b.jpg
a folder that is gone | annotations/instances_train2017.json(a.jpg;1 1 [1,2,10,12]) annotations/instances_val2017.json(a.jpg;1 1 [5,5,9,9])
 val2017/a.jpg | error: | with other boxes | is a folder of images missing
names of another split | train.json(train/a.jpg) val/a.jpg | error: | none of its images was found
a list of another split | data.yaml(train: train.txt;val: images/val;names: [a];) train.txt(images/train/a.jpg) images/val/a.jpg
 labels/val/a.txt(#0) | DIR/images/train/a.jpg
a folder with a part of the images | annotations/train.json(a.jpg,b.jpg,c.jpg) annotations/val.json(a.jpg,b.jpg,c.jpg)
 train/a.jpg train/b.jpg train/c.jpg val/a.jpg | val DIR/annotations/val.json: DIR/val/a.jpg DIR/val/b.jpg DIR/val/c.jpg
folders of splits deeper down | annotations/train.json(a.jpg) annotations/val.json(a.jpg;1 1 [5,5,9,9]) x/train/images/a.jpg
 x/val/images/a.jpg | train.json: DIR/x/train/images/a.jpg | val.json: DIR/x/val/images/a.jpg
files of other programs | train.json(a.jpg) val.json.bak(a.jpg) val_found.json([]) test_args.json({"lr": 1}) a.jpg | one split
names without extension | train.json(a) a.jpg | error: | such as a; correct file_name
folders with the names of splits in them | my_train/labels.json(a.jpg) my_train/a.jpg my_val/labels.json(b.jpg) my_val/b.jpg | val DIR/my_val/labels.json: DIR/my_val/b
more columns | data.yaml(train: images;names: [a];) images/a.jpg labels/a.txt(0 .5 .5 .2 .4 0 1;0 .5 .5 .2 .4 .9 7) | label cannot be read: DIR/labels/a.txt:1: | label cannot be read: DIR/labels/a.txt:2: | delete the last two columns
)"));
  check_rows(
      {{"two label files of one picture",
        {{"Annotations/a.xml", voc("<filename>a.jpg</filename>" + object("x"))},
         {"Annotations/b.xml", voc("<filename>a.jpg</filename>" + object("x", "5 6 20 20"))},
         {"JPEGImages/a.jpg", "@64x48"}},
        {"label file without image: DIR/Annotations/b.xml: its image a.jpg has another label file"}},
       {"width and height in place of corners",
        {{"Annotations/a.xml", voc(object("x", "20 30 12 9") + object("x", "30 20 9 12"))},
         {"JPEGImages/a.jpg", "@64x48"}},
        {"error: DIR (all): 2 of 2 boxes end before they begin", "are xmax and ymax width and height?"}},
       {"numbers with a comma",
        {{"Annotations/a.xml", voc(object("x", "1,5 2 30 40"))}, {"JPEGImages/a.jpg", "@64x48"}},
        {"error: DIR (all) has no classes; the first problem: ", "a number is needed"}},
       {"classes that look alike",
        {{"Annotations/a.xml", voc(object("Disc") + object("disc"))}, {"JPEGImages/a.jpg", "@64x48"}},
        {"the classes \"disc\" and \"Disc\" differ in case, blanks, - or _"}},
       {"classes that differ in a letter",
        {{"Annotations/a.xml", voc(object("\u7ea2\u706f") + object("\u7eff\u706f"))},
         {"JPEGImages/a.jpg", "@64x48"}},
        {"!the classes"}},
       {"a box in fractions among boxes in pixels",
        {{"a.json", coco({"a.jpg"}, {"1 1 [1,2,10,12]", "1 1 [5,5,10,12]", "1 1 [0.2,0.3,0.4,0.4]"})},
         {"a.jpg", "@64x48"}},
        {"box below one pixel: DIR/a.json: annotation 3 of image 1"}}},
      loading);
}

TEST_CASE("formats: images whose 16 bits have few values are refused with a command that converts them") {
  const std::string table = R"(
12 bits, and one of 16 | images/a.png(@64x48 0-4095) images/b.png(@64x48 16-900) images/c.png(@64x48 0-60000) LABELS
 | error: DIR/data.yaml (train): REFUSED 0 to 4095 of 65535, such as DIR/images/b.png
 | imread(f, -1) | - 0) * (255 / 4095)) | if i.dtype == 'uint16']" DIR/images/*.png
14 bits of a thermal camera | images/a.png(@64x48 7000-7900) images/b.png(@64x48 7100-8020) LABELS
 | REFUSED 7000 to 8020 | - 7000) * (255 / 1020)
TIFF | images/a.tiff(@64x48 22000-24040) images/b.tiff(@64x48 22000-22001) LABELS | REFUSED 22000 to 24040
PGM | images/a.pgm(@64x48 0-255) images/b.pgm(@64x48 0-255) LABELS | REFUSED 0 to 255
one value | images/a.png(@64x48 300-300) images/b.png(@64x48 300-300) LABELS | REFUSED 300 to 300
train and val, and an image of 8 bits | train/a.png(@64x48 0-4095) val/b.png(@64x48 0-900) val/c.png(@64x48) classes.txt(cat)
 train/a.txt(#0) val/b.txt(#0) | REFUSED 0 to 4095 | if i.dtype == 'uint16']" DIR/train/*.png DIR/val/*.png
black, and 8 bits | images/a.png(@64x48 0-0) images/b.png(@64x48) images/c.tif(@64x48) LABELS | one split | !error
16 bits, the range of all | images/a.png(@64x48 0-60000) images/b.png(@64x48 0-100) LABELS | one split | !error
)";
  const std::string refused = "the images of 16 bits have only the values ",
                    labels = "labels/a.txt(#0) data.yaml(train: images;names: [cat])";
  check_rows(rows(replaced(replaced(table, "REFUSED ", refused), "LABELS", labels)), loading);
  TempDir dir;
  put(dir, files("images/a.png(@64x48 0-4095) images/b.png(@64x48 0-4095) " + labels));
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
