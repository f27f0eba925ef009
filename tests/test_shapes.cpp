// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include <opencv2/imgproc.hpp>

#include "common.hpp"

using namespace yolox;

TEST_CASE("shapes: scenes have the same bytes on every machine") {
  // 200 scenes have empty, crowded, overlapping, cut, small and large objects.
  const auto hash = [](uint64_t seed, int split, int64_t first, int64_t count, int size = 256) {
    std::string bytes;
    for (int64_t i = first; i < first + count; ++i) {
      const ShapesScene scene = draw_shapes(seed, split, i, size);
      append_number(bytes, scene.image.cols);
      append_number(bytes, scene.image.rows);
      bytes.append(reinterpret_cast<const char*>(scene.image.data), scene.image.total() * 3);
      bytes.append(reinterpret_cast<const char*>(scene.mask.data), scene.mask.total());
      for (const Box& b : scene.boxes)
        for (const double value : {b.x1, b.y1, b.x2, b.y2, double(b.cls)}) append_number(bytes, int(value));
    }
    return fnv1a(bytes);
  };
  CHECK(hash(0, 0, 0, 1) == 2419984756186603554u);
  CHECK(hash(12345, 0, 1000000, 1, 192) == 1097108037083274846u);
  CHECK(hash(0, 0, 0, 200) == 13911809207011212329u);
  CHECK(hash(0, 1, 0, 20) == 14927670890481927648u);
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

TEST_CASE("shapes: arguments out of range are refused with a message") {
  CHECK_THROWS_WITH(draw_shapes(0, 2, 0), "shapes: split 2 does not exist; use 0 (train) or 1 (val)");
  CHECK_THROWS_WITH(draw_shapes(0, 0, -1), "shapes: index -1 is negative; use 0 or more");
  CHECK_THROWS_WITH(draw_shapes(0, 0, 0, 32), doctest::Contains("use 96 or more"));
}
