// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include <map>
#include <opencv2/imgproc.hpp>
#include <set>

#include "common.hpp"

using namespace yolox;

namespace {

// FNV-1a over the size, the pixels, the mask and the boxes.
uint64_t hash(const ShapesScene& scene) {
  uint64_t h = 0xCBF29CE484222325u;
  const auto add = [&](uint64_t byte) { h = (h ^ (byte & 255)) * 0x100000001B3u; };
  const auto add_int = [&](int v) {
    for (int shift = 0; shift < 32; shift += 8) add(uint32_t(v) >> shift);
  };
  add_int(scene.image.cols);
  add_int(scene.image.rows);
  for (const cv::Vec3b& pixel : scene.image)
    for (const uchar value : pixel.val) add(value);
  for (const uint8_t id : scene.mask) add(id);
  for (const Box& b : scene.boxes)
    for (const double value : {b.x1, b.y1, b.x2, b.y2, double(b.cls)}) add_int(int(value));
  return h;
}

double area(const Box& b) { return (b.x2 - b.x1) * (b.y2 - b.y1); }

double iou(const Box& a, const Box& b) {
  const double w = std::min(a.x2, b.x2) - std::max(a.x1, b.x1),
               h = std::min(a.y2, b.y2) - std::max(a.y1, b.y1);
  const double both = std::max(0.0, w) * std::max(0.0, h);
  return both / (area(a) + area(b) - both);
}

}  // namespace

TEST_CASE("shapes: a scene has the same bytes on every machine") {
  CHECK(hash(draw_shapes(0, 0, 0)) == 2419984756186603554u);
  CHECK(hash(draw_shapes(0, 1, 7)) == 11260071975836018860u);
  CHECK(hash(draw_shapes(12345, 0, 1000000, 192)) == 1097108037083274846u);
}

TEST_CASE("shapes: a scene depends on seed, split and index, and on nothing else") {
  std::set<uint64_t> seen;
  for (const uint64_t seed : {0, 1})
    for (const int split : {0, 1})
      for (int index = 0; index < 20; index++) seen.insert(hash(draw_shapes(seed, split, index)));
  CHECK(seen.size() == 80);
  CHECK(seen.count(hash(draw_shapes(1, 1, 3))) == 1);
}

TEST_CASE("shapes: a box is the extent of the visible pixels of its object") {
  int boxes = 0;
  for (int index = 0; index < 100; index++) {
    const ShapesScene scene = draw_shapes(3, 0, index);
    REQUIRE(scene.mask.size() == scene.image.size());
    for (size_t i = 0; i < scene.boxes.size(); i++) {
      const Box& b = scene.boxes[i];
      const cv::Rect extent = cv::boundingRect(scene.mask == int(i) + 1);
      CHECK(extent == cv::Rect(cv::Point(int(b.x1), int(b.y1)), cv::Point(int(b.x2), int(b.y2))));
      CHECK(std::min(extent.width, extent.height) >= 5);
      CHECK((b.cls >= 0 && b.cls < int(shapes_classes().size())));
    }
    double last;
    cv::minMaxLoc(scene.mask, nullptr, &last);
    CHECK(last <= double(scene.boxes.size()));
    boxes += int(scene.boxes.size());
  }
  CHECK(boxes > 200);
}

TEST_CASE("shapes: 500 scenes contain empty, crowded, overlapping, cut, small and large objects") {
  const int scenes = 500;
  int boxes = 0, empty = 0, crowded = 0, overlapping = 0, at_border = 0, small = 0, large = 0;
  double smallest = 1000;
  std::map<int, int> count;
  std::map<int, cv::Vec3d> color;
  cv::Vec3d overall(0, 0, 0);
  for (int index = 0; index < scenes; index++) {
    const ShapesScene scene = draw_shapes(0, 0, index);
    const double w = scene.image.cols, h = scene.image.rows;
    CHECK((w >= 192 && w <= 320 && h >= 192 && h <= 320));
    empty += scene.boxes.empty();
    crowded += scene.boxes.size() >= 13;
    for (size_t i = 0; i < scene.boxes.size(); i++) {
      const Box& b = scene.boxes[i];
      boxes++;
      count[b.cls]++;
      const double side = std::max(b.x2 - b.x1, b.y2 - b.y1);
      small += side <= 16;
      smallest = std::min(smallest, side);
      large += side > 0.7 * std::min(w, h);
      at_border += b.x1 == 0 || b.y1 == 0 || b.x2 == w || b.y2 == h;
      for (size_t j = 0; j < i; j++) overlapping += iou(b, scene.boxes[j]) > 0.1;
      const cv::Scalar mean = cv::mean(scene.image, scene.mask == int(i) + 1);
      const cv::Vec3d c(mean[0], mean[1], mean[2]);
      color[b.cls] += c;
      overall += c;
    }
  }
  MESSAGE("boxes ", boxes, ", empty ", empty, ", crowded ", crowded, ", overlapping pairs ", overlapping,
          ", at the border ", at_border, ", up to 16 px ", small, ", smallest ", smallest, ", over 70 % ",
          large);
  CHECK((empty >= 8 && empty <= 40));
  CHECK(crowded >= scenes / 50);
  CHECK(overlapping >= scenes / 10);
  CHECK(at_border >= scenes / 10);
  CHECK(small >= boxes / 50);
  CHECK(smallest <= 9);
  CHECK(large >= scenes / 50);
  CHECK(count.size() == shapes_classes().size());
  overall /= boxes;
  for (const auto& one : count) {
    const auto cls = one.first;
    const double n = one.second;
    CHECK(n * double(count.size()) / boxes == doctest::Approx(1).epsilon(0.35));  // balanced
    const cv::Vec3d off = color[cls] / n - overall;
    CHECK_MESSAGE(cv::norm(off, cv::NORM_INF) < 15, "colour tells ", shapes_classes()[cls]);
  }
}

TEST_CASE("shapes: arguments out of range are refused with a message") {
  CHECK_THROWS_WITH(draw_shapes(0, 2, 0), "shapes: split 2 does not exist; use 0 (train) or 1 (val)");
  CHECK_THROWS_WITH(draw_shapes(0, 0, -1), "shapes: index -1 is negative; use 0 or more");
  CHECK_THROWS_WITH(draw_shapes(0, 0, 0, 32), doctest::Contains("use 96 or more"));
  CHECK_NOTHROW(draw_shapes(0, 0, 0, 96));
}
