// SPDX-License-Identifier: Apache-2.0
// The scripts of tools/, on real files.
#include "programs.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Runs a script of tools/ in the folder. modules: those that it needs. code: its exit code. Returns its
// stdout, or "" and a message if no Python has the modules.
std::string run_script(const TempDir& dir, const std::string& modules, const std::string& command,
                       int code = 0) {
  const std::string python = cached_python_with(modules);
  if (python.empty()) {
    MESSAGE("skipped: no Python with " << modules << " (set PYTHON)");
    return "";
  }
  const Outcome o = shell(dir, concat(python, " " YOLOX_SOURCE_DIR "/tools/", command));
  REQUIRE_MESSAGE(o.code == code, command << "\n" << o.out << o.err);
  return o.out;
}

const std::string kPhotos = "data/coco_val2017_union/val2017/";

}  // namespace

SHARED_PROGRAM_TEST("tools: with tiles.py, eval and demo find the small objects of a large picture") {
  TempDir dir;
  // A picture of 12 photos.
  const CocoDataset photos =
      read_coco(shared("data/coco_val2017_union/annotations/instances_val2017_union.json"));
  const int side = 640, columns = 4, rows = 3;
  CocoDataset set;
  set.categories = photos.categories;
  Image picture({columns * side, rows * side}, 114);
  for (int i = 0; i < columns * rows; ++i) {
    const CocoImage& photo = photos.images.at(size_t(i));
    const cv::Point place(i % columns * side, i / columns * side);
    const Image pixels(cv::imread(shared(kPhotos + photo.file_name)));
    pixels.copyTo(picture(cv::Rect(place, pixels.size())));
    for (CocoAnnotation a : photos.annotations) {
      if (a.image_id != photo.id) continue;
      a.x += place.x;
      a.y += place.y;
      a.image_id = 7;
      set.annotations.push_back(a);
    }
  }
  set.images = {{7, "1.jpg", picture.cols, picture.rows}};
  fs::create_directories(dir / "data/images");
  cv::imwrite(dir / "data/images/1.jpg", picture);
  write_coco(dir / "data/all.json", set);
  if (run_script(dir, "cv2", "tiles.py cut data/all.json tiles/val.json --overlap 0.5").empty()) return;
  // Tiles of 640 pixels, 320 apart, and the whole picture, in which all objects are.
  const Dataset tiles = load_splits({dir / "tiles/val.json"}).train;
  CHECK(tiles.records.size() == 7 * 5 + 1);
  CHECK(tiles.boxes(35).size() == load_splits({dir / "data/all.json"}).train.boxes(0).size());
  const std::string weights = "--weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "' ";
  const auto ap = [&](const std::string& flags) {
    succeed(dir, "eval", flags + " --json e.json");
    return json_number(dir / "e.json", "AP");
  };
  succeed(dir, "eval", "--data tiles/val.json --save-dt found.json " + weights);
  succeed(dir, "demo", "--source tiles/val --conf 0.01 --nms 0.65 --json drawn.json " + weights);
  run_script(dir, "cv2", "tiles.py merge tiles/val.json found.json whole.json");
  run_script(dir, "cv2", "tiles.py merge tiles/val.json drawn.json of_demo.json");
  const double whole = ap("--data data " + weights), merged = ap("--gt data/all.json --dt whole.json");
  CHECK_MESSAGE(merged > whole + 0.1, whole << " " << merged);
  CHECK(ap("--gt data/all.json --dt of_demo.json") == doctest::Approx(merged).epsilon(0.01));
  REQUIRE(cv::imwrite(dir / "deep.png", cv::Mat(8, 8, CV_16UC1)));
  fs::rename(dir / "deep.png", dir / "data/images/1.jpg");  // 16 bits
  run_script(dir, "cv2", "tiles.py cut data/all.json deep.json", /*code=*/1);
}

SHARED_PROGRAM_TEST("tools: merge_coco.py merges a COCO and a YOLO set, renames and ignores classes") {
  TempDir dir;
  const std::string coco = shared("data/coco128_json/annotations/instances_train2017.json"),
                    yolo = shared("data/deeppcb/val/images");
  if (run_script(dir, "cv2, yaml",
                 "merge_coco.py '" + coco + "' '" + yolo + "' --out set/train.json " +
                     "--rename car=vehicle truck=vehicle --ignore person")
          .empty())
    return;
  const Dataset merged = load_splits({dir / "set/train.json"}).train, a = load_splits({coco}).train,
                b = load_splits({shared("data/deeppcb")}).val;
  CHECK(merged.records.size() == a.records.size() + b.records.size());
  CHECK(merged.classes.size() == a.classes.size() - 2 + b.classes.size());
  CHECK(merged.problems->lines().empty());
  std::map<std::string, int64_t> counts;
  for (const Dataset* d : {&a, &b})
    for (size_t c = 0; c < d->classes.size(); ++c) counts[d->classes[c]] += class_counts(*d)[c];
  counts["vehicle"] = counts["car"] + counts["truck"];
  size_t regions = 0, expected = size_t(counts["person"]);
  for (size_t c = 0; c < merged.classes.size(); ++c)
    CHECK_MESSAGE(class_counts(merged)[c] == counts[merged.classes[c]], merged.classes[c]);
  for (const Record& r : merged.records) regions += r.ignored.size();
  for (const Record& r : a.records) expected += r.ignored.size();
  CHECK(regions == expected);
  CHECK(std::count(merged.classes.begin(), merged.classes.end(), "person") == 0);
}

SHARED_PROGRAM_TEST("tools: duplicates.py finds copies of photos, and two classes on one object") {
  TempDir dir;
  const CocoDataset photos =
      read_coco(shared("data/coco_val2017_union/annotations/instances_val2017_union.json"));
  for (const std::string split : {"train", "val"}) {
    CocoDataset part;
    part.categories = {{1, "cat"}, {2, "dog"}};
    fs::create_directories(dir / split);
    for (int64_t i = split == "train" ? 0 : 5; i < 8; ++i) {  // photos 5 to 7 are in both splits
      cv::Mat pixels = cv::imread(shared(kPhotos + photos.images[size_t(i)].file_name));
      if (split == "val") cv::resize(pixels, pixels, {}, 0.7, 0.7, cv::INTER_AREA);
      if (split == "val" && i == 7) pixels = pixels(cv::Rect(0, 0, pixels.cols / 2, pixels.rows / 2));
      cv::imwrite(dir / concat(split, "/", i, ".jpg"), pixels, {cv::IMWRITE_JPEG_QUALITY, 60});
      part.images.push_back({i, concat(i, ".jpg"), pixels.cols, pixels.rows});
    }
    part.annotations = {{1, 5, 1, 10, 10, 50, 50, 2500, false}, {2, 5, 2, 11, 11, 50, 50, 2500, false}};
    write_coco(dir / (split + ".json"), part);
  }
  const std::string printed = run_script(dir, "cv2", "duplicates.py train.json val.json", /*code=*/1);
  if (printed.empty()) return;
  CHECK_MESSAGE(has(printed, "images of one split that look alike: 0\n"), printed);
  CHECK(has(printed, "AP is too high): 2\n  train/5.jpg and val/5.jpg\n  train/6.jpg and val/6.jpg\n"));
  CHECK(has(printed, "train.json: classes with boxes on the same object: 1\n  cat and dog: 1 times\n"));
}
