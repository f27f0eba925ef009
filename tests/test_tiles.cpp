// SPDX-License-Identifier: Apache-2.0
// Tiles of large images: their places, the objects in them, and the detections of all tiles of an image.
#include "common.hpp"

#include <algorithm>
#include <set>
#include <vector>

#include "base/random.hpp"
#include "data/tiles.hpp"
#include "formats.hpp"

using namespace yolox;
using namespace yolox::test;

TEST_CASE("tiles: they cover the image, lie inside it, and overlap by the given fraction") {
  Rng rng(0, 0, 0);
  for (int i = 0; i < 300; ++i) {
    const int side = int(rng.randint(32, 700)), width = int(rng.randint(1, 3000)),
              height = int(rng.randint(1, 3000));
    const double overlap = 0.1 * double(rng.randint(0, 8));
    CAPTURE(side);
    CAPTURE(width);
    CAPTURE(height);
    CAPTURE(overlap);
    std::set<int> xs, ys;
    const auto tiles = tiles_of({width, height}, side, overlap);
    for (const cv::Rect& t : tiles) {
      REQUIRE(t.size() == cv::Size(std::min(side, width), std::min(side, height)));
      REQUIRE((t & cv::Rect(0, 0, width, height)) == t);
      xs.insert(t.x);
      ys.insert(t.y);
    }
    CHECK(tiles.size() == xs.size() * ys.size());
    for (const auto& [starts, length] : {std::pair(xs, width), {ys, height}}) {
      CHECK(*starts.begin() == 0);
      CHECK(*starts.rbegin() == std::max(0, length - side));
      int before = 0;
      for (const int start : starts) {
        CHECK(before + side - start >= side * overlap - 1);
        before = start;
      }
    }
  }
  CHECK(tiles_of({1000, 500}, 640, 0.2).size() == 2);
  CHECK(tiles_of({640, 640}, 640, 0.2).size() == 1);
}

// A split with one image of 300 x 200 pixels.
static Dataset one_image(const TempDir& dir, const std::vector<Box>& boxes) {
  Image image({300, 200}, 0);
  Rng rng(0, 0, 1);
  for (cv::Vec3b& pixel : image) pixel = cv::Vec3b::all(uchar(rng.randint(0, 255)));
  cv::GaussianBlur(image, image, {9, 9}, 0);
  cv::imwrite(dir / "a.png", image);
  CocoDataset coco;
  coco.images = {{7, "a.png", 300, 200}};
  coco.categories = {{3, "cat"}, {5, "dog"}};
  for (const Box& b : boxes)
    coco.annotations.push_back({int64_t(coco.annotations.size()) + 1, 7, b.cls == 0 ? 3 : 5, b.x1, b.y1,
                                b.x2 - b.x1, b.y2 - b.y1, (b.x2 - b.x1) * (b.y2 - b.y1), b.cls < 0});
  write_coco(dir / "x.json", coco);
  return load_splits(dir / "x.json", "", 0, "").train;
}

TEST_CASE(
    "tiles: each shows the pixels and objects of its part; an object of which it shows less than half is "
    "ignored") {
  TempDir dir;
  // Tiles of 100 pixels without overlap begin at 0, 100, 200 and at 0, 100.
  const Dataset data = one_image(dir, {{10, 20, 30, 40, 0}, {90, 50, 120, 60, 1}, {210, 110, 290, 190, -1}});
  const Tiles tiles = training_tiles(data, 100, 0, /*all_empty=*/true);
  REQUIRE(tiles.data.records.size() == 7);
  const Image whole = read_image(data, 0);
  std::map<std::pair<int, int>, Record> at;
  for (size_t i = 0; i < 7; ++i) {
    const cv::Rect& part = tiles.part[i];
    const bool all = part.width == 300;
    at[{all ? -1 : part.x, part.y}] = tiles.data.records[i];
    const Image shown = read_image(tiles.data, i);
    REQUIRE(shown.size() == (all ? cv::Size(300, 200) : cv::Size(100, 100)));
    CHECK(cv::norm(shown, whole(part), cv::NORM_INF) < 20);  // a JPEG of quality 95
    CHECK(tiles.data.truth.images[i].id == tiles.data.records[i].image_id);
    CHECK(tiles.data.truth.images[i].file_name ==
          (all ? "a.jpg" : concat("a_", part.x, "_", part.y, ".jpg")));
  }
  const auto is = [](const std::vector<Box>& boxes, const Box& b) {
    return boxes.size() == 1 && boxes[0].x1 == b.x1 && boxes[0].y1 == b.y1 && boxes[0].x2 == b.x2 &&
           boxes[0].y2 == b.y2 && boxes[0].cls == b.cls;
  };
  CHECK(is(at[{0, 0}].boxes, {10, 20, 30, 40, 0}));
  CHECK(is(at[{0, 0}].ignored, {90, 50, 100, 60, kIgnoredRegion}));  // a third of the dog
  CHECK(is(at[{100, 0}].boxes, {0, 50, 20, 60, 1}));
  CHECK(is(at[{200, 100}].ignored, {10, 10, 90, 90, kIgnoredRegion}));
  CHECK(at[{100, 100}].boxes.empty());
  CHECK(at[{100, 100}].ignored.empty());
  CHECK(is(at[{-1, 0}].boxes, {90, 50, 120, 60, 1}));  // no tile shows all of it
  CHECK(at[{-1, 0}].ignored.size() == 2);              // the cat, which a tile shows, and the crowd
  // Written and read again, the labels are the same.
  const CocoDataset again = parse_coco(coco_text(tiles.data.truth), "tiles");
  CHECK(again.annotations.size() == 7);
  int64_t crowds = 0;
  for (const CocoAnnotation& a : again.annotations) {
    crowds += a.crowd;
    if (a.w == 80) CHECK(a.category_id == 5);  // the crowd of dogs
  }
  CHECK(crowds == 4);

  // As many tiles without objects as with objects.
  const Tiles fewer = training_tiles(data, 100, 0, /*all_empty=*/false);
  CHECK(fewer.data.records.size() == 6);
  CHECK(std::count_if(fewer.data.records.begin(), fewer.data.records.end(),
                      [](const Record& r) { return r.boxes.empty(); }) == 3);

  const Tiles seen = inference_tiles(data, 100, 0);
  REQUIRE(seen.data.records.size() == 7);
  CHECK(seen.part.back() == cv::Rect(0, 0, 300, 200));
  for (size_t i = 0; i < 7; ++i)
    CHECK(cv::norm(read_image(seen.data, i), whole(seen.part[i]), cv::NORM_INF) == 0);
  CHECK(inference_tiles(data, 300, 0.2).data.records.size() == 1);  // the whole image is its only tile

  fs::remove(dir / "a.png");  // it cannot be decoded later either, and is listed
  const Tiles damaged = training_tiles(data, 100, 0, true);
  CHECK(has(damaged.data.bytes(0), "no image: "));
  CHECK(has(data.problems->lines().at(0), "a.png"));
}

TEST_CASE("tiles: parts of objects and repetitions are left out, neighbours in one tile stay") {
  const cv::Rect left(0, 0, 100, 100), right(80, 0, 100, 100), whole(0, 0, 180, 100);
  const auto kept = [](const std::vector<TileDetection>& found) {
    std::vector<double> scores;
    for (const TileDetection& d : merge_tiles(found, {180, 100})) scores.push_back(d.score);
    return scores;
  };
  using Scores = std::vector<double>;
  // An object in both tiles and in the whole image.
  CHECK(kept({{{84, 10, 96, 20, 0}, 0.5, left},
              {{84.5, 10, 96, 20.5, 0}, 0.9, right},
              {{85, 10, 97, 21, 0}, 0.3, whole}}) == Scores{0.9});
  // Objects of two classes at one place, and two objects of one class.
  CHECK(kept({{{85, 10, 95, 20, 0}, 0.5, left}, {{85, 10, 95, 20, 1}, 0.4, right}}) == Scores{0.5, 0.4});
  CHECK(kept({{{40, 10, 60, 20, 0}, 0.5, left}, {{43, 10, 63, 20, 0}, 0.4, left}}) == Scores{0.5, 0.4});
  // The right tile shows all of an object that the left one cuts. At the edge of the image nothing is cut.
  CHECK(kept({{{70, 10, 99, 20, 0}, 0.9, left}, {{84, 10, 130, 20, 0}, 0.5, right}}) == Scores{0.5});
  CHECK(kept({{{0, 0, 20, 99, 0}, 0.9, left}, {{150, 50, 179.5, 100, 0}, 0.5, right}}) == Scores{0.9, 0.5});
  CHECK(kept({{{82, 30, 110, 60, 0}, 0.9, right}, {{60, 30, 110, 60, 0}, 0.2, whole}}) == Scores{0.2});
}
