// SPDX-License-Identifier: Apache-2.0
// Data sets, the errors of bad ones, packed and cached data sets, and the loader.
#include "base/memory.hpp"
#include "data/shapes.hpp"
#include "tensors.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <map>
#include <opencv2/core/ocl.hpp>

#include "base/printable.hpp"
#include "base/threads.hpp"
#include "coco_eval.hpp"
#include "data.hpp"
#include "data/batch.hpp"
#include "data/store.hpp"
#include "layouts.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

void write_image(const std::string& path, int width, int height, const cv::Scalar& bgr = {10, 20, 30}) {
  fs::create_directories(fs::path(path).parent_path());
  REQUIRE(cv::imwrite(path, cv::Mat(height, width, CV_8UC3, bgr)));
}

// Writes an image of 40x30 random pixels, about 4 KB.
Image write_noise(const std::string& path, int seed) {
  Image image({40, 30}, 0);
  cv::RNG(uint64_t(seed)).fill(image, cv::RNG::UNIFORM, 0, 256);
  fs::create_directories(fs::path(path).parent_path());
  REQUIRE(cv::imwrite(path, image));
  return image;
}

Dataset dataset(const std::string& json) { return load_dataset(read_sources({json}).train, ""); }

// Returns all batches of a loader, in order.
std::vector<Batch> batches(const Loader::Make& make, int64_t first, int64_t end, int batch, cv::Size size,
                           int threads) {
  Loader loader(make, first, end, batch, size, threads, torch::kCPU);
  std::vector<Batch> all;
  for (int64_t at = first; at < end; at += batch) all.push_back(loader.next());
  return all;
}

std::vector<int64_t> indices(const Batch& batch) {
  std::vector<int64_t> all;
  for (const Item& item : batch.items) all.push_back(item.index);
  return all;
}

bool same(const std::vector<Batch>& a, const std::vector<Batch>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Batch& x, const Batch& y) {
    return torch::equal(x.images, y.images) && torch::equal(x.targets.boxes, y.targets.boxes) &&
           torch::equal(x.targets.classes, y.targets.classes) && x.targets.counts == y.targets.counts &&
           indices(x) == indices(y);
  });
}

constexpr int64_t kAlways = int64_t{1} << 40;

Loader::Make augmented_items(const Dataset& data, uint64_t seed) {
  return TrainingItems{data, {.seed = int64_t(seed), .mosaic_iters = kAlways}};
}

Loader::Make plain_items(const Dataset& data) { return TrainingItems{data, {.augmented = false}}; }

}  // namespace

TEST_CASE("data: --debug checks each box before it is sent to a device, and names its image") {
  Dataset data = shapes_dataset(0, 0, 2);
  const Image image(cv::Mat(32, 64, CV_8UC3));
  const auto error = [&](const Box& box) {
    return error_of([&] { check_boxes(Item{{{1, 1, 5, 5, 0}, box}, 1}, image, data); });
  };
  CHECK(error({0, 0, 64, 32, int(data.classes.size()) - 1}) == "");
  CHECK(error({-1e-13, 0, 64 + 1e-13, 32, 0}) == "");  // within rounding
  std::vector<Box> bad_boxes = {{-1, 0, 5, 5, 0}, {0, -1, 5, 5, 0}, {0, 0, 65, 5, 0},
                                {0, 0, 5, 33, 0}, {5, 5, 5, 9, 0},  {5, 5, 9, 5, 0}};
  for (const int cls : {int(data.classes.size()), kIgnoredRegion - 1}) bad_boxes.push_back({0, 0, 5, 5, cls});
  bad_boxes.push_back({0, 0, std::nan(""), 5, 0});
  for (const Box& bad : bad_boxes) CHECK(has(error(bad), "drawn image 2"));
}

SHARED_TEST("data: classes and images of a COCO file are read as by the official code") {
  TempDir dir;
  const auto want = fixture("aug_cv46.pth");
  write_text(dir / "annotations/a.json", contents(shared("fixtures/coco_parse/annotations/a.json")));
  const CocoDataset coco = read_coco(dir / "annotations/a.json");
  for (const auto& image : coco.images)
    write_image(dir / ("images/" + image.file_name), image.width, image.height);

  const Dataset data = dataset(dir / "annotations/a.json");
  CHECK(data.classes ==
        std::vector<std::string>{"person", "dog", "brush"});  // by ascending id, not in the order of the file
  const auto ids = tensor(want, "coco_ids"), class_ids = tensor(want, "coco_class_ids");
  REQUIRE(int64_t(data.records.size()) == ids.numel());
  for (size_t c = 0; c < data.truth.categories.size(); ++c)
    CHECK(data.truth.categories[c].id == class_ids[c].item<int64_t>());
  for (size_t i = 0; i < data.records.size(); ++i) {
    INFO("image " << i);
    const Record& r = data.records[i];
    const auto file = want.at("coco_files").toListRef()[i].toStringRef();
    CHECK(r.file == (dir.path / "images" / file).string());
    CHECK(r.image_id == ids[i].item<int64_t>());
  }
}

TEST_CASE("data: boxes are clipped to the image; crowds and bad boxes are left out, counted and listed") {
  TempDir dir;
  // Without the size of a.png, which is read from the file.
  put(dir, {{"train/a.png", "@100x50"}, {"train/b.png", "@30x40"}, {"annotations/instances_train.json", R"({
    "images": [{"id": 70, "file_name": "a.png"},
               {"id": 5, "file_name": "gone.png", "width": 10, "height": 10},
               {"id": 6, "file_name": "b.png", "width": 30, "height": 40}],
    "categories": [{"id": 90, "name": "brush"}, {"id": 3, "name": "person"}, {"id": 18, "name": "dog"}],
    "annotations": [
      {"id": 1, "image_id": 70, "category_id": 18, "bbox": [1.5, 2.25, 10, 20]},
      {"id": 2, "image_id": 70, "category_id": 90, "bbox": [-5, -3, 20, 10]},
      {"id": 3, "image_id": 70, "category_id": 3, "bbox": [90, 40, 30, 30]},
      {"id": 4, "image_id": 70, "category_id": 3, "bbox": [0, 0, 50, 50], "iscrowd": 1},
      {"id": 5, "image_id": 70, "category_id": 3, "bbox": [10, 10, 0, 5]},
      {"id": 6, "image_id": 70, "category_id": 3, "bbox": [10, 10, 5, -2]},
      {"id": 7, "image_id": 70, "category_id": 3, "bbox": [100, 10, 5, 5]},
      {"id": 8, "image_id": 70, "category_id": 4, "bbox": [1, 1, 5, 5]},
      {"id": 9, "image_id": 99, "category_id": 3, "bbox": [1, 1, 5, 5]},
      {"id": 10, "image_id": 70, "category_id": 3, "bbox": [80, 5, 20.5, 10]},
      {"id": 11, "image_id": 70, "category_id": 18, "bbox": [1.5, 2.25, 10, 20]},
      {"id": 12, "image_id": 70, "category_id": 3, "bbox": [10, 50, 5, 5]}]})"}});
  const Dataset data = dataset(dir / "annotations/instances_train.json");
  const std::string text = replaced(replaced(described("train", data), dir.path.string(), "DIR"),
                                    "DIR/annotations/instances_train.json: annotation ", "A");
  // Clipping by half a pixel (annotation 10) is no problem.
  CHECK(text == R"(train DIR/annotations/instances_train.json: 2 images
classes person, dog, brush
box DIR/train/a.png class 1 [1.5 2.25 11.5 22.25]
box DIR/train/a.png class 2 [0 0 15 7]
box DIR/train/a.png class 0 [90 40 100 50]
box DIR/train/a.png class 0 [80 5 100 15]
region DIR/train/a.png [0 0 50 50]
annotation of an image that is skipped or not listed: A9 of image 99
annotation of an unknown class: A8 of image 70 has the class id 4
box exceeds the image (clipped): A12 of image 70 [10, 50, 5, 5] in 100x50
box exceeds the image (clipped): A2 of image 70 [-5, -3, 20, 10] in 100x50
box exceeds the image (clipped): A3 of image 70 [90, 40, 30, 30] in 100x50
box exceeds the image (clipped): A7 of image 70 [100, 10, 5, 5] in 100x50
box outside of the image: A12 of image 70 [10, 50, 5, 5] in 100x50
box outside of the image: A7 of image 70 [100, 10, 5, 5] in 100x50
box without area: A5 of image 70 [10, 10, 0, 5]
box without area: A6 of image 70 [10, 10, 5, -2]
duplicate box: A11 of image 70 [1.5, 2.25, 10, 20]
image missing: DIR/train/gone.png is missing
)");
  CHECK(class_counts(data) == std::vector<int64_t>{2, 1, 1});
  CHECK(data.truth.images.size() == 2);
  // A crowd is an ignored region.
  const Batch batch = batches(evaluation_items(data), 0, 2, 2, {200, 100}, 1).at(0);
  CHECK(batch.targets.counts == std::vector<int64_t>{4, 0});
  CHECK(torch::equal(batch.targets.ignored[0], torch::tensor({{50.f, 50.f, 100.f, 100.f}})));
  CHECK(batch.targets.ignored[1].abs().sum().item<float>() == 0);
  CHECK(batch.targets.slice(1, 2).ignored.size(0) == 1);
  Tensor images = torch::zeros({2, 3, 100, 200});
  Targets resized = batch.targets;
  resize_batch(images, resized, {50, 100});
  CHECK(torch::equal(resized.ignored * 2, batch.targets.ignored));
}

TEST_CASE("data: equal ids and names in a COCO file are reported, and unusable images with the reason") {
  TempDir dir;
  put(dir, {{"images/good.jpg", "@64x48"},
            {"images/turned.png", "@64x48"},
            {"images/text.jpg", "this is no image"},
            {"images/empty.png", ""},
            {"images/folder.jpg/", ""}});
  const std::string whole = contents(dir / "images/good.jpg");
  write_text(dir / "images/cut.jpg",
             whole.substr(0, whole.size() * 3 / 4));              // OpenCV would decode it, with a grey part
  REQUIRE(mkfifo((dir / "images/pipe.jpg").c_str(), 0600) == 0);  // opening it would block
  std::string json =
      coco({"good.jpg 64x48", "turned.png 48x64", "text.jpg 64x48", "empty.png 64x48", "cut.jpg 64x48",
            "folder.jpg 64x48", "pipe.jpg 64x48", std::string(300, 'n') + ".jpg", "gone.jpg 64x48"},
           {"1 1 [1,1,9,9]", "1 2 [1,1,9,9]"}, {"cat", "cat"});
  json.replace(json.find("\"id\":2,\"image_id\""), 7, "\"id\":1,");
  write_text(dir / "annotations/x.json", json);
  check_text(loading(dir),
             {"x.json: 1 images", "annotations with the id of another one: ", "classes with equal names: ",
              "cat (id 2)", "turned.png is 64x48, annotated as 48x64 (rotated", "text.jpg",
              "empty.png is empty", "cut.jpg cannot be decoded: the file is cut off", "folder.jpg is missing",
              "gone.jpg is missing", "pipe.jpg is missing", "nnn.jpg is missing"});
}

TEST_CASE("data: classes of the evaluated split are those of the training split, matched by name") {
  TempDir dir;
  const auto write = [&](const std::string& split, const std::vector<std::string>& classes, int first) {
    CocoDataset coco;
    coco.images = {{1, split + ".png", 40, 30}};
    for (size_t c = 0; c < classes.size(); ++c) {
      const int64_t id = first + 10 * int64_t(c);
      coco.categories.push_back({id, classes[c]});
      coco.annotations.push_back({int64_t(c) + 1, 1, id, double(classes[c][0] - 'a'), 1, 5, 5, 25, false});
    }
    put(dir, {{"images/" + split + ".png", "@40x30"}, {"annotations/" + split + ".json", coco_text(coco)}});
  };
  const auto splits = [&] { return load_splits({dir.path.string()}); };
  write("train", {"a", "b", "c", "d"}, 1);
  write("val", {"d", "x", "b"}, 2);  // another order, others are missing, and one is unknown
  check_text(loading(dir), {"val DIR/annotations/val.json: 1 images\nclasses a, b, c, d\n",
                            "does not have the classes a, c", "objects of the class x are left out"});
  const Dataset val = splits().val;
  CHECK(val.category_ids == std::vector<int64_t>{kNoCategory, 22, kNoCategory, 2});
  REQUIRE(val.records.at(0).boxes.size() == 2);
  for (const Box& b : val.records[0].boxes) CHECK(b.x1 == b.cls);
  REQUIRE(val.truth.annotations.size() == 2);
  for (const auto& a : val.truth.annotations) CHECK(val.truth.categories.at(a.x).id == a.category_id);
  CHECK(val.problems->lines().size() == 1);  // so that --strict ends
  std::vector<Detection> found;
  for (const auto& a : val.truth.annotations) found.push_back({1, a.category_id, a.x, a.y, a.w, a.h, 0.9});
  const EvalResult result = coco_eval(val.truth, found);
  CHECK(result.AP == doctest::Approx(1));
  CHECK(result.per_class.at(0).AP == -1);
  CHECK(result.per_class.at(3).name == "d");

  write("val", {"a", "b", "c", "d"}, 7);  // other ids of the same classes
  CHECK(splits().val.notes.empty());
  CHECK(splits().val.truth.categories.at(1).id == 17);
  write("val", {"x", "y"}, 1);
  CHECK_HAS(loading(dir), "has other classes (x, y) than a, b, c, d");
}

SHARED_TEST("data: images are decoded as by OpenCV in Python, with the EXIF orientation applied") {
  const auto want = fixture("images_cv46.pth");
  for (const std::string name : {"exif6.jpg", "c420.jpg", "cmyk.jpg", "gray.png", "rgba.png"}) {
    INFO(name);
    const Tensor pixels = tensor(want, name);
    const Image image = decode_image(read_bytes(shared("fixtures/images/" + name)), name);
    CHECK(torch::equal(torch::from_blob(image.data, pixels.sizes(), torch::kByte), pixels));
  }
}

TEST_CASE("data: results of the image check are stored under a key of the files and used again") {
  TempDir dir;
  write_image(dir / "a.png", 40, 30);
  write_text(dir / "b.jpg", "this is no image");
  const std::vector<std::string> files{dir / "a.png", dir / "b.jpg", dir / "c.png"};
  const std::string keep = dir / "runs/.checks";
  const ImageChecks first = check_images(files, keep);
  CHECK(first.images[0].width == 40);
  CHECK(has(first.images[1].error, "b.jpg"));
  CHECK(has(first.images[2].error, "missing"));
  const std::string kept = concat(keep, "/images-", first.key, ".txt");
  REQUIRE(fs::exists(kept));
  // A wrong width shows that the file is read. It is not if it was cut off. An image with an error is checked
  // again, because the cause may have been a file permission.
  for (const auto& [text, width] : std::map<std::string, int>{{"41 30 0 0\n0 0 0 0\n0 0 0 0\nend\n", 41},
                                                              {"0 0 0 0\n7 7 0 0\n0 0 0 0\nend\n", 40},
                                                              {"41 30 0 0\n7 7 0 0\n7 7 0 0\n", 40}}) {
    write_text(kept, text);
    CHECK(check_images(files, keep).images[0].width == width);
  }
  // The key depends on path, size and times of each file.
  const auto key = [&] { return check_images(files, "").key; };
  std::set<std::string> keys{first.key};
  write_image(dir / "b.jpg", 20, 10);
  CHECK(keys.insert(key()).second);
  CHECK(check_images(files, keep).images[1].width == 20);
  const auto touched = fs::last_write_time(files[0]);
  write_image(files[0], 41, 30);
  fs::last_write_time(files[0], touched);  // as unpacking does; the ctime still differs
  CHECK(keys.insert(key()).second);
  fs::create_hard_link(files[0], dir / "d.png");
  CHECK(check_images({files[0]}, "").key != check_images({dir / "d.png"}, "").key);
  // The results cannot be stored, which is no error.
  CHECK(check_images(files, dir / "a.png/no/folder").images[0].width == 41);
  // The key of a data set depends on which of its images are used.
  const auto data_key = [&](int width_of_a, int width_of_b) {
    put(dir,
        {{"x.json", coco({concat("a.png ", width_of_a, "x30"), concat("b.png ", width_of_b, "x30")}, {})}});
    return dataset(dir / "x.json").key;
  };
  for (const char* name : {"images/a.png", "images/b.png"}) write_image(dir / name, 40, 30);
  const std::string both = data_key(40, 40);
  CHECK(std::set<std::string>{both, data_key(40, 41), data_key(41, 40)}.size() == 3);
  CHECK(data_key(40, 40) == both);
}

TEST_CASE("data: an image that became unreadable is replaced, in evaluation skipped; --strict stops") {
  TempDir dir;
  Names names, boxes;
  for (int i = 0; i < 4; ++i) {
    write_image(dir / concat("images/", i, ".png"), 64, 64, cv::Scalar::all(50 * (i + 1)));
    names.push_back(concat(i, ".png"));
    boxes.push_back(concat(i + 1, " 1 [", i, ",0,10,10]"));
  }
  put(dir, {{"annotations/x.json", coco(names, boxes)}});
  Dataset data = dataset(dir / "annotations/x.json");
  CHECK(data.problems->summary().empty());
  write_image(dir / "images/2.png", 64, 65);  // after the check
  batches(plain_items(data), 0, 8, 4, {64, 64}, 2);
  CHECK(has(data.problems->lines().at(0), "2.png is 64x65, expected 64x64"));
  data = dataset(dir / "annotations/x.json");
  write_text(dir / "images/2.png", "this is no image");

  const auto all = batches(plain_items(data), 0, 8, 4, {64, 64}, 2);  // two epochs
  for (const Batch& batch : all) {
    for (int b = 0; b < 4; ++b) {
      const int64_t stands = batch.items[b].index == 2 ? 3 : batch.items[b].index;
      CHECK(batch.images[b][0][0][0].item<int>() == 50 * (stands + 1));
      REQUIRE(batch.targets.counts[b] == 1);
      CHECK(batch.targets.boxes[b][0][0].item<float>() == stands + 5);  // the box of the replacement
    }
  }
  CHECK(data.problems->summary() == std::map<std::string, int64_t>{{"image cannot be used", 1}});

  const Batch judged = batches(evaluation_items(data), 0, 4, 4, {64, 64}, 2).at(0);
  CHECK(indices(judged) == std::vector<int64_t>{0, 1, -1, 3});
  CHECK((judged.images[2] == border_grey).all().item<bool>());
  CHECK(data.problems->summary() == std::map<std::string, int64_t>{{"image cannot be used", 1}});

  data.strict = true;
  CHECK(has(error_of([&] { batches(plain_items(data), 0, 8, 4, {64, 64}, 2); }), "2.png"));
  CHECK(has(error_of([&] { batches(evaluation_items(data), 0, 4, 4, {64, 64}, 2); }), "2.png"));
  data.strict = false;
  for (int i = 0; i < 4; ++i) write_text(dir / concat("images/", i, ".png"), "");
  CHECK(has(error_of([&] { batches(plain_items(data), 0, 8, 4, {64, 64}, 2); }), "no image can be read"));
}

namespace {

// A COCO folder with random images and boxes. One image has none.
struct RandomSet {
  TempDir dir;
  Dataset data;
  RandomSet() {
    Rng rng(1, 2, 3);
    Names names, boxes;
    for (int i = 0; i < 6; ++i) {
      const int64_t w = 8 * rng.randint(12, 40), h = 8 * rng.randint(12, 40);
      cv::Mat picture(int(h / 8), int(w / 8), CV_8UC3);
      cv::RNG(uint64_t(i)).fill(picture, cv::RNG::UNIFORM, 0, 256);
      cv::resize(picture, picture, {int(w), int(h)}, 0, 0, cv::INTER_CUBIC);
      names.push_back(concat("photo", i, i % 3 == 2 ? ".png" : ".jpg"));
      REQUIRE(cv::imwrite(dir / names.back(), picture));
      for (int k = 0; k < (i == 4 ? 0 : 3); ++k) {
        const int64_t x = rng.randint(0, w / 2), y = rng.randint(0, h / 2);
        boxes.push_back(concat(i + 1, " ", 1 + k % 2, " [", x, ",", y, ",", w / 2 - k, ",", h / 4, "]"));
      }
    }
    put(dir, {{"all.json", coco(names, boxes, {"cat", "dog"})}});
    data = dataset(dir / "all.json");
  }
};
const RandomSet& random_set() {
  static const RandomSet made;
  return made;
}
const cv::Size kInput{96, 64};
std::vector<Batch> training_batches(const Dataset& data, int threads = 2) {
  return batches(TrainingItems{data, {.seed = 5, .mosaic_iters = 48}}, 0, 60, 10, kInput, threads);
}

}  // namespace

PROGRAM_TEST(
    "data: a packed data set gives the same batches bit for bit; an incomplete one is refused and can be "
    "completed") {
  TempDir dir;
  const Dataset& from_files = random_set().data;
  const std::string file = dir / "packed\x1b[31m.lmdb";
  // Returns what ./pack says, and "failed: " first if it fails.
  const auto pack = [&](const std::string& data, const std::string& before = "") {
    const std::string command = concat(before, "$YOLOX_PROGRAMS/pack --data ", data, " --out ", file, " > ");
    const int code = std::system((command + (dir / "out.txt") + " 2>&1").c_str());
    return (code == 0 ? "" : "failed: ") + contents(dir / "out.txt");
  };
  const std::string coco = random_set().dir / "all.json";
  // Room for some of the images only: ulimit -f limits the file size, in blocks of 1024 bytes.
  const std::string full = pack(coco, "trap '' XFSZ; ulimit -f 60; ");
  CHECK(full.starts_with("failed: "));
  CHECK_HAS(full, "error: " + printable(file));
  REQUIRE(fs::exists(file));
  CHECK_HAS(error_of([&] { load_splits({file}); }), "make one with ./pack");
  pack(coco);
  CHECK(pack(coco) == printable(file) + " is complete\n");

  const Splits packed = load_splits({file});
  CHECK(packed.same);
  CHECK(packed.train.classes == from_files.classes);
  CHECK(same(training_batches(packed.train), training_batches(from_files)));
  const int64_t n = from_files.records.size();
  CHECK(same(batches(evaluation_items(load_splits({file}, false).val), 0, n, 4, kInput, 2),
             batches(evaluation_items(from_files), 0, n, 4, kInput, 2)));
  CHECK_HAS(error_of([&] { load_splits({file, "test"}, false); }), "only val can be evaluated");
  const std::string whole = contents(file);
  write_text(file, whole.substr(0, whole.size() - 20000));
  CHECK_HAS(error_of([&] { load_splits({file}); }), "is cut off");
  fs::remove(file);
  {
    PackedFile other(file, 1);
    other.put("key", "value");
    other.commit();
  }
  CHECK_HAS(pack(coco), "of another program");
  write_text(file, std::string(10000, 'x'));
  CHECK_HAS(error_of([&] { load_splits({file}); }), file);

  // An interrupted ./pack of the same data continues.
  fs::remove(file);
  Names names;
  std::vector<Image> pictures;
  for (int i = 0; i < 150; ++i) {
    names.push_back(concat(i, ".png"));
    pictures.push_back(write_noise(dir / names.back(), i));
  }
  put(dir, {{"a.json", test::coco(names)}, {"b.json", test::coco(names, {"1 1 [2,2,9,9]"})}});
  CHECK_HAS(pack(dir / "a.json", "trap '' XFSZ; ulimit -f 700; "), "is the disk full?");
  CHECK_HAS(error_of([&] { load_splits({file}); }), "is incomplete; run the same ./pack command");
  const std::string part = contents(file);
  {
    const int lock = open(file.c_str(), O_RDONLY);
    REQUIRE(flock(lock, LOCK_EX) == 0);
    CHECK_HAS(pack(dir / "a.json"), "is being written by another ./pack");
    close(lock);
  }
  CHECK_HAS(pack(dir / "b.json"), "holds other images or labels");
  CHECK(contents(file) == part);
  CHECK_HAS(pack(dir / "a.json"), " of them were already packed");
  const Dataset continued = load_splits({file}).train;
  for (int i = 0; i < 150; ++i) CHECK(cv::norm(read_image(continued, i), pictures[i], cv::NORM_INF) == 0);
}

TEST_CASE("data: cached images give the same boxes and similar pixels, bit-identical in RAM and on disk") {
  const TempDir dir;
  const auto want = training_batches(random_set().data);
  std::vector<std::vector<Batch>> got;
  for (const bool on_disk : {false, true}) {
    Dataset cached = random_set().data;
    const auto cache = std::make_shared<ImageCache>(cached, kInput);
    if (on_disk)
      cache->open_on_disk(dir.path.string(), cached, 2, {});
    else
      cache->create_in_memory(cached, 2, {});
    use_cache(cached, cache);
    got.push_back(training_batches(cached));
    CHECK(same(got.back(), training_batches(cached, 1)));
  }
  CHECK(same(got[0], got[1]));
  double difference = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(torch::equal(got[0][i].targets.boxes, want[i].targets.boxes));
    CHECK(torch::equal(got[0][i].targets.classes, want[i].targets.classes));
    difference +=
        (got[0][i].images.to(torch::kFloat) - want[i].images.to(torch::kFloat)).abs().mean().item<double>() /
        want.size();
  }
  CHECK(difference < 4);  // of 255: cached images are resampled once more
}

PROGRAM_TEST("data: an image that cannot be decoded from a packed or cached set is replaced, and listed") {
  TempDir dir;
  write_noise(dir / "images/a.png", 0);
  write_image(dir / "images/b.png", 40, 30, {1, 1, 1});
  put(dir, {{"x.json", coco({"a.png", "b.png"}, {"2 1 [1,1,9,9]"})}});
  const auto check_replaced = [](const Dataset& data) {
    const Batch batch = batches(plain_items(data), 0, 2, 2, {32, 32}, 1).at(0);
    for (int b = 0; b < 2; ++b) CHECK(batch.images[b][0][0][0].item<int>() == 1);
    CHECK(data.problems->summary() == std::map<std::string, int64_t>{{"image cannot be used", 1}});
    CHECK_HAS(data.problems->lines().at(0), "a.png");
  };
  std::string damaged = contents(dir / "images/a.png");
  damaged.replace(damaged.size() / 2, 4, "nope");  // its header and its end are intact
  write_text(dir / "images/a.png", damaged);
  const std::string file = dir / "p.lmdb";
  const std::string pack = concat("$YOLOX_PROGRAMS/pack --data ", dir / "x.json", " --out ", file, " >&2");
  REQUIRE(std::system(pack.c_str()) == 0);
  CHECK_FALSE(fs::exists(file + ".train.problems.txt"));  // ./pack copies the bytes
  check_replaced(load_splits({file}).train);

  Dataset cached = dataset(dir / "x.json");
  const auto cache = std::make_shared<ImageCache>(cached, cv::Size(32, 32));
  cache->create_in_memory(cached, 1, {});
  use_cache(cached, cache);
  check_replaced(cached);
  write_image(dir / "images/a.png", 40, 30, {2, 2, 2});  // repaired in the meantime
  const Batch mended = batches(plain_items(cached), 0, 2, 2, {32, 32}, 1).at(0);
  CHECK(mended.images.select(1, 0).max().item<int>() == 2);
}

TEST_CASE("loader: threads live as long as the loader; memory, files and threads do not grow over 20 epochs" *
          runs_threads) {
  TempDir dir;
  Names names;
  for (int i = 0; i < 6; ++i) {
    names.push_back(concat(i, ".jpg"));
    write_image(dir / ("images/" + names.back()), 640, 480);
  }
  put(dir, {{"x.json", coco(names, {})}});
  const Dataset data = dataset(dir / "x.json");
  batches(augmented_items(data, 0), 0, 6, 2, {64, 64}, 3);  // makes torch start its own threads
  // Linux lists a thread for a moment after it was joined.
  const auto threads_at_rest = [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return entries_of("/proc/self/task");
  };
  const auto before = threads_at_rest();
  {
    Loader loader(augmented_items(data, 0), 0, 20 * 6, 2, {64, 64}, 3, torch::kCPU);
    std::set<std::string> threads, files;
    double memory = 0;
    for (int epoch = 0; epoch < 20; ++epoch) {
      for (int i = 0; i < 3; ++i) loader.next();
      const auto threads_now = entries_of("/proc/self/task"), files_now = entries_of("/proc/self/fd");
      if (epoch == 0) {
        threads = threads_now;
        files = files_now;
        CHECK(threads.size() == before.size() + 3);
      }
      if (epoch == 3) memory = resident_bytes();
      CHECK(threads_now == threads);                // the same threads, not only the same number
      CHECK(files_now.size() <= files.size() + 3);  // a worker may be reading ahead
    }
    CHECK(resident_bytes() - memory < 16e6);  // an image has 0.9 MB, and about 100 were read in the meantime
    CHECK_THROWS(loader.next());
    CHECK(entries_of("/proc/self/fd").size() <= files.size());
  }
  CHECK(threads_at_rest() == before);
}

TEST_CASE("loader: batches depend on seed and position, not on the number of workers" * runs_threads) {
  const Dataset data = shapes_dataset(1, 0, 3);  // fewer images than a batch has
  const auto one = batches(augmented_items(data, 3), 0, 32, 4, {64, 64}, 1);
  REQUIRE(one.size() == 8);
  CHECK(same(one, batches(augmented_items(data, 3), 0, 32, 4, {64, 64}, 2)));
  CHECK(same(one, batches(augmented_items(data, 3), 0, 32, 4, {64, 64}, 5)));
  CHECK_FALSE(same(one, batches(augmented_items(data, 4), 0, 32, 4, {64, 64}, 2)));
  for (const Batch& batch : one) CHECK(batch.images.size(0) == 4);  // full, also across epochs

  // Start in the middle of an epoch, as after --resume.
  const auto rest = batches(augmented_items(data, 3), 2 * 4, 32, 4, {64, 64}, 2);
  CHECK(same(rest, std::vector<Batch>(one.begin() + 2, one.end())));
}

TEST_CASE("data: weights of classes are inverse frequencies, capped, with a mean of 1 over the boxes") {
  const std::vector<int64_t> counts = {400, 100, 1, 0};
  for (const double power : {0.0, 0.5, 1.0}) {
    const auto w = class_weights(counts, power);
    double mean = 0;
    for (size_t c = 0; c < counts.size(); ++c) mean += w[c] * double(counts[c]) / 501;
    CHECK(mean == doctest::Approx(1));
    CHECK(w[1] / w[0] == doctest::Approx(std::pow(4, power)));
    CHECK(w[2] / w[0] == doctest::Approx(power == 0 ? 1 : 10));
    CHECK(w[3] == w[2]);
  }
}

TEST_CASE("loader: each epoch has every image once, in a new permutation" * runs_threads) {
  const Dataset data = shapes_dataset(1, 0, 10);
  std::vector<int64_t> seen;
  for (const Batch& b : batches(plain_items(data), 0, 40, 4, {32, 32}, 3))
    for (const Item& item : b.items) seen.push_back(item.index);
  std::set<std::vector<int64_t>> orders;
  for (int pass = 0; pass < 4; ++pass) {
    std::vector<int64_t> order(seen.begin() + 10 * pass, seen.begin() + 10 * (pass + 1));
    CHECK(order == epoch_order(10, 0, pass));
    orders.insert(order);
    std::sort(order.begin(), order.end());
    CHECK(order == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  }
  CHECK(orders.size() == 4);
  CHECK(epoch_order(10, 0, 0) != epoch_order(10, 1, 0));
}

TEST_CASE("loader: next() throws the exception of a worker, and nothing hangs" * runs_threads) {
  const Loader::Make make = [](int64_t position, Image& image) {
    check(position != 5, "bad_5.jpg cannot be read");
    image.setTo(cv::Scalar::all(double(position)));
    return Item{{}, position};
  };
  for (const int threads : {1, 4}) {
    Loader loader(make, 0, 12, 2, {32, 32}, threads, torch::kCPU);
    CHECK(indices(loader.next()) == std::vector<int64_t>{0, 1});
    CHECK(indices(loader.next()) == std::vector<int64_t>{2, 3});
    CHECK(error_of([&] { loader.next(); }) == "bad_5.jpg cannot be read");
    CHECK(indices(loader.next()) == std::vector<int64_t>{6, 7});
  }
  Loader unused(make, 0, 1000, 2, {32, 32}, 3, torch::kCPU);  // destroyed while workers are busy
  Loader empty(make, 0, 0, 2, {32, 32}, 3, torch::kCPU);
  CHECK_HAS(error_of([&] { empty.next(); }), "after the last batch");
  // The message of an error in a library names the image.
  Dataset data;
  data.records = {{"some/a.png", 1, 64, 64, {}}};
  const auto error = [&] { return error_of([&] { batches(plain_items(data), 0, 1, 1, {64, 64}, 1); }); };
  data.stored = [](size_t, double) -> ImageRegion { throw std::bad_alloc(); };
  CHECK_HAS(error(), "some/a.png");
  data.stored = [](size_t, double) -> ImageRegion { CV_Error(cv::Error::StsError, "odd"); };
  CHECK_HAS(error(), "some/a.png, or an image beside it in a mosaic: ");
  CHECK_HAS(error(), "odd");
}

TEST_CASE("loader: the same threads work in all epochs, and there is no pause between epochs" *
          runs_threads) {
  std::mutex mutex;
  std::set<std::thread::id> ids;
  const Loader::Make make = [&](int64_t position, Image& image) {
    std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
    image.setTo(cv::Scalar::all(1));
    return Item{{}, position};
  };
  Loader loader(make, 0, 20 * 8, 2, {32, 32}, 3, torch::kCPU);  // 20 epochs of 8 images
  for (int64_t batch = 0; batch < 80; ++batch) {
    CHECK(indices(loader.next()) == std::vector<int64_t>{2 * batch, 2 * batch + 1});
    // At the end of an epoch the first batch of the next one is already prepared.
    if (batch < 77) {
      for (int i = 0; i < 1000 && !loader.ready(); ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(loader.ready());
    }
  }
  CHECK(ids.size() <= 3);
}

TEST_CASE("loader: the number of boxes is not limited: an image with 500 beside one without" * runs_threads) {
  Dataset data = shapes_dataset(0, 0, 2);
  for (Record& r : data.records) r.boxes.clear();
  for (int i = 0; i < 500; ++i)
    data.records[0].boxes.push_back({i % 25 * 2.0, i / 25 * 2.0, i % 25 * 2 + 3.0, i / 25 * 2 + 4.0, i % 7});
  const cv::Size size = data.size(0);
  const Batch batch = batches(plain_items(data), 0, 2, 2, size, 2).at(0);
  const int full = batch.items[0].index == 0 ? 0 : 1;
  REQUIRE(batch.targets.boxes.sizes() == c10::IntArrayRef{2, 500, 4});
  CHECK(batch.targets.counts[full] == 500);
  CHECK(batch.targets.counts[1 - full] == 0);
  CHECK(batch.targets.total() == 500);
  for (const int i : {0, 26, 499}) {
    const Box& b = data.records[0].boxes[i];
    const auto want = torch::tensor({(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, 3.0, 4.0}, torch::kFloat);
    CHECK(torch::allclose(batch.targets.boxes[full][i], want));
    CHECK(batch.targets.classes[full][i].item<int64_t>() == i % 7);
  }
  data.records[0].boxes.clear();
  CHECK(batches(plain_items(data), 0, 2, 2, {64, 64}, 2).at(0).targets.boxes.sizes() ==
        c10::IntArrayRef{2, 0, 4});
}

TEST_CASE("data: shapes: images are those of draw_shapes, and the ground truth equals the records") {
  const Dataset data = shapes_dataset(4, 1, 5);
  CHECK(data.classes == shapes_classes());
  size_t annotations = 0;
  for (int i = 0; i < 5; ++i) {
    const auto scene = draw_shapes(4, 1, i);
    CHECK(cv::norm(read_image(data, i), scene.image, cv::NORM_INF) == 0);
    CHECK(data.records[i].boxes.size() == scene.boxes.size());
    for (const Box& b : scene.boxes) {
      const auto& a = data.truth.annotations.at(annotations++);
      CHECK(a.image_id == data.records[i].image_id);
      CHECK(a.category_id == b.cls + 1);
      CHECK(a.x + a.w == b.x2);
      CHECK(a.area == (b.x2 - b.x1) * (b.y2 - b.y1));
    }
  }
  CHECK(data.truth.annotations.size() == annotations);
}

TEST_CASE("preprocess: BGR 0..255 from the file to the network, in channels-last order") {
  TempDir dir;
  write_image(dir / "a.png", 64, 64, {255, 100, 7});
  Dataset data;
  data.records = {{dir / "a.png", 1, 64, 64, {}}};
  for (const auto& make : {evaluation_items(data), plain_items(data)}) {
    const Tensor x = preprocess(batches(make, 0, 1, 1, {64, 64}, 1).at(0).images, false);
    CHECK(x.sizes() == c10::IntArrayRef{1, 3, 64, 64});
    CHECK((x.scalar_type() == torch::kFloat));
    CHECK(x.is_contiguous(torch::MemoryFormat::ChannelsLast));
    CHECK((x[0][0] == 255).all().item<bool>());
    CHECK((x[0][1] == 100).all().item<bool>());
    CHECK((x[0][2] == 7).all().item<bool>());
  }
  const Tensor pixels = torch::randint(0, 256, {2, 4, 6, 3}, torch::kByte);
  CHECK(torch::equal(preprocess(pixels, false), pixels.permute({0, 3, 1, 2}).to(torch::kFloat)));
  CHECK(preprocess(pixels, true).is_contiguous(torch::MemoryFormat::ChannelsLast));
}

SHARED_TEST("preprocess: legacy preprocessing equals that of YOLOX 0.1.0") {
  const auto f = fixture("aug_cv46.pth");
  const Tensor in = tensor(f, "legacy_in").contiguous(), want = tensor(f, "legacy_out");
  const Image image(cv::Mat(int(in.size(0)), int(in.size(1)), CV_8UC3, in.data_ptr<uint8_t>()));
  const auto boxed = letterbox(image, {int(want.size(2)), int(want.size(1))});
  const cv::Mat pixels = boxed.image.clone();
  const Tensor batch = torch::from_blob(pixels.data, {1, want.size(1), want.size(2), 3}, torch::kByte);
  CHECK(torch::allclose(preprocess(batch, true)[0], want, 1e-6, 1e-6));
}

TEST_CASE("programs: loops of OpenCV use one thread, also in a worker, and OpenCL is off") {
  const auto threads_used = [] {
    std::mutex mutex;
    std::set<std::thread::id> ids;
    cv::parallel_for_({0, 64}, [&](const cv::Range&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
    return ids;
  };
  const auto uses_only_this = [&] { return threads_used() == std::set{std::this_thread::get_id()}; };
  cv::setNumThreads(2);
  cv::ocl::setUseOpenCL(true);
  threads_used();  // starts OpenCV's thread pool
  bool in_worker = false;
  const int code = run_program([&] {
    CHECK(uses_only_this());
    std::thread([&] { in_worker = uses_only_this(); }).join();
    CHECK_FALSE(cv::ocl::useOpenCL());
  });
  CHECK(code == 0);
  CHECK(in_worker);
}

TEST_CASE("loader: --workers auto gives each loader of the machine its share of the cores, at least one") {
  CHECK(loader_threads(5) == 5);
  CHECK(loader_threads(0) == usable_cores());
  CHECK(loader_threads(0, 1000) == 1);
  CHECK(loader_threads(0, 1, true) == usable_cores() - std::min(2, usable_cores() / 4));
  CHECK(usable_cores() >= 1);
  CHECK(usable_cores() <= int(std::thread::hardware_concurrency()));
}

TEST_CASE("loader: starts at most as many threads as images can be in progress" * runs_threads) {
  const size_t before = entries_of("/proc/self/task").size();
  std::atomic<bool> go{false};
  Loader loader(
      [&](int64_t, Image&) {
        while (!go) std::this_thread::yield();
        return Item();
      },
      0, 100, 2, {32, 32}, /*threads=*/50, torch::kCPU);
  CHECK(entries_of("/proc/self/task").size() == before + 6);
  go = true;
}
