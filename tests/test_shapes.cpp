// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include <opencv2/imgproc.hpp>

#include "common.hpp"

using namespace yolox;

TEST_CASE("shapes: a scene depends on seed, split and index") {
  const auto bytes = [](uint64_t seed, int split, int64_t index) {
    const ShapesScene scene = draw_shapes(seed, split, index);
    std::string all = concat(scene.image.size());
    all.append(reinterpret_cast<const char*>(scene.image.data), scene.image.total() * 3);
    for (const Box& b : scene.boxes) all += concat(" ", b.x1, " ", b.y1, " ", b.x2, " ", b.y2, " ", b.cls);
    return all;
  };
  const std::string scene = bytes(1, 0, 1000000);
  CHECK(scene == bytes(1, 0, 1000000));
  for (const auto& other : {bytes(2, 0, 1000000), bytes(1, 1, 1000000), bytes(1, 0, 1000001)})
    CHECK(scene != other);
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
