// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <opencv2/imgproc.hpp>

#include "base/random.hpp"

namespace yolox {

namespace {

constexpr double kMinVisible = 0.3;  // minimum visible fraction of an object that gets a box
constexpr int kMinSide = 5;          // minimum box side in pixels; drops slivers of occluded objects

// A class: corners at equal angles around the centre, every second one at `inner` of the radius.
struct ShapeClass {
  const char* name;
  int corners;
  double inner;
};
// The classes of the data set. A new line adds a class.
constexpr ShapeClass kClasses[] = {
    {"circle", 64, 1}, {"triangle", 3, 1}, {"square", 4, 1}, {"star", 10, 0.4}};

// Returns the colour with up to `delta` more or less of blue, green and red each.
cv::Vec3b near(Rng& rng, const cv::Vec3b& color, int delta) {
  cv::Vec3b out;
  for (int k = 0; k < 3; ++k) out[k] = cv::saturate_cast<uint8_t>(color[k] + rng.randint(-delta, delta));
  return out;
}

// Returns the outline of an object, turned and stretched, as corners in 1/16 pixel.
std::vector<cv::Point> outline(Rng& rng, const ShapeClass& shape, cv::Point2d centre, double radius) {
  const double turn = rng.uniform(0, 2 * CV_PI), stretch = rng.uniform(0.88, 1.14);
  std::vector<cv::Point> corners;
  for (int i = 0; i < shape.corners; ++i) {
    const double angle = 2 * CV_PI * i / shape.corners, r = radius * (i % 2 == 1 ? shape.inner : 1);
    const double u = r * std::cos(angle) * stretch, v = r * std::sin(angle) / stretch;
    corners.emplace_back(cvRound(16 * (centre.x + u * std::cos(turn) - v * std::sin(turn))),
                         cvRound(16 * (centre.y + u * std::sin(turn) + v * std::cos(turn))));
  }
  return corners;
}

}  // namespace

std::vector<std::string> shapes_classes() {
  std::vector<std::string> names;
  for (const auto& shape : kClasses) names.emplace_back(shape.name);
  return names;
}

ShapesScene draw_shapes(uint64_t seed, int split, int64_t index) {
  Rng rng(seed, split, index);
  const cv::Size size(int(rng.randint(192, 320)), int(rng.randint(192, 320)));
  ShapesScene scene{{}, cv::Mat_<uint8_t>(size, uint8_t{0}), {}};

  // The background: smooth noise around a colour.
  const cv::Vec3b ground = near(rng, {128, 128, 128}, 127);
  cv::Mat_<cv::Vec3b> knots(int(rng.randint(2, 16)), int(rng.randint(2, 16)));
  for (cv::Vec3b& knot : knots) knot = near(rng, ground, 40);
  cv::resize(knots, scene.image, size, 0, 0, cv::INTER_LINEAR);

  // A few objects of any size, many small ones, or none. Smaller ones are in front.
  const double side = std::min(size.width, size.height), kind = rng.uniform(0, 1);
  const bool empty = kind<0.04, crowd = kind> 0.92;
  std::vector<double> radii(size_t(empty ? 0 : crowd ? rng.randint(12, 24) : rng.randint(1, 6)));
  for (double& radius : radii) radius = side * (crowd ? rng.uniform(0.05, 0.12) : rng.uniform(0.06, 0.3));
  std::ranges::sort(radii, std::greater());
  std::vector<Box> objects;
  std::vector<double> areas;  // in pixels
  for (const double radius : radii) {
    const int cls = int(rng.randint(0, int64_t(std::size(kClasses)) - 1));
    const double margin = 0.8 * radius;  // a part of an object may be outside of the image
    const cv::Point2d centre(rng.uniform(margin, size.width - margin),
                             rng.uniform(margin, size.height - margin));
    const auto corners = outline(rng, kClasses[cls], centre, radius);
    cv::Vec3b color;
    do color = near(rng, {128, 128, 128}, 127);
    while (cv::norm(color, ground, cv::NORM_L1) < 170);  // it must contrast with the background
    cv::Mat_<uint8_t> object(size, uint8_t{0});
    cv::fillPoly(object, corners, 255, cv::LINE_8, /*shift=*/4);
    objects.push_back({0, 0, 0, 0, cls});
    areas.push_back(cv::contourArea(corners) / (16 * 16));
    scene.image.setTo(color, object);
    scene.mask.setTo(double(objects.size()), object);
  }

  // The camera: a slight blur, and grain.
  cv::GaussianBlur(scene.image, scene.image, {3, 3}, 0);
  const int grain = int(rng.randint(0, 12));
  for (cv::Vec3b& pixel : scene.image) pixel = near(rng, pixel, grain);

  // The boxes of the objects that are visible.
  for (size_t i = 0; i < objects.size(); ++i) {
    const cv::Mat visible = scene.mask == int(i) + 1;
    const cv::Rect extent = cv::boundingRect(visible);
    const bool boxed = std::min(extent.width, extent.height) >= kMinSide &&
                       cv::countNonZero(visible) >= kMinVisible * areas[i];
    if (boxed)
      scene.boxes.push_back(
          {double(extent.x), double(extent.y), double(extent.br().x), double(extent.br().y), objects[i].cls});
    scene.mask.setTo(boxed ? double(scene.boxes.size()) : 0, visible);
  }
  return scene;
}

}  // namespace yolox
