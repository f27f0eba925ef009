// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>

#include "base/random.hpp"
#include "base/text.hpp"

namespace yolox {

namespace {

constexpr double kMinVisible = 0.3;  // minimum visible fraction of an object that gets a box
constexpr int kMinSide = 5;          // minimum box side in pixels; drops slivers of occluded objects
constexpr double kMinRadius = 5;     // minimum radius in pixels; the smallest boxes are about 8 pixels wide
constexpr double kReach = 1.2;       // every outline lies inside the circle of this radius

// Random number generator of a scene, with helpers for directions and colours.
struct SceneRng : Rng {
  using Rng::Rng;
  int randint(int lo, int hi) { return int(Rng::randint(lo, hi)); }
  cv::Vec2d direction() {
    for (;;) {
      const double x = uniform(-1, 1), y = uniform(-1, 1), norm = std::sqrt(x * x + y * y);
      if (norm > 0.1 && norm <= 1) return {x / norm, y / norm};
    }
  }
  cv::Vec3i color_near(const cv::Vec3i& c, int delta) {
    cv::Vec3i out;
    for (int k = 0; k < 3; k++) out[k] = std::clamp(c[k] + randint(-delta, delta), 0, 255);
    return out;
  }
  cv::Vec3i color() { return color_near({128, 128, 128}, 128); }
};

// Signed distance function of a shape with a radius of about 1: negative inside, with a slope of about 1 at
// the edge.
using Outline = double (*)(double x, double y);

struct ShapeClass {
  const char* name;
  Outline outline;
};

double length(double x, double y) { return std::sqrt(x * x + y * y); }
double box_distance(double x, double y, double half_w, double half_h) {
  return std::max(std::abs(x) - half_w, std::abs(y) - half_h);
}

// Regular pentagram: the points that are outside of at most one of its five half planes.
double star(double x, double y) {
  constexpr double kX[] = {0, 0.9510565, 0.5877853, -0.5877853, -0.9510565};
  constexpr double kY[] = {1, 0.3090170, -0.8090170, -0.8090170, 0.3090170};
  double first = -9, second = -9;
  for (int i = 0; i < 5; i++) {
    const double d = kX[i] * x + kY[i] * y - 0.37;
    second = std::max(second, std::min(first, d));
    first = std::max(first, d);
  }
  return second;
}

// The classes of the data set. A new line adds a class.
constexpr ShapeClass kClasses[] = {
    {"circle", [](double x, double y) { return length(x, y) - 1; }},
    {"ring", [](double x, double y) { return std::abs(length(x, y) - 0.75) - 0.25; }},
    {"crescent", [](double x, double y) { return std::max(length(x, y) - 1, 0.8 - length(x - 0.55, y)); }},
    {"square", [](double x, double y) { return box_distance(x, y, 0.8, 0.8); }},
    {"cross",
     [](double x, double y) { return std::min(box_distance(x, y, 1, 0.32), box_distance(x, y, 0.32, 1)); }},
    {"triangle", [](double x, double y) { return std::max(-y, 0.8660254 * std::abs(x) + 0.5 * y) - 0.575; }},
    {"star", star},
};
constexpr int kNumClasses = int(std::size(kClasses));

// Distractors without annotation: line, bar, arc, corner, blob.
constexpr Outline kDistractors[] = {
    [](double x, double y) { return box_distance(x, y, 1, 0.03); },
    [](double x, double y) { return box_distance(x, y, 1, 0.14); },
    [](double x, double y) { return std::max(std::abs(length(x, y) - 0.9) - 0.08, x); },
    [](double x, double y) { return std::max(std::abs(box_distance(x, y, 0.7, 0.7)) - 0.1, x - y); },
    [](double x, double y) { return std::min(length(x - 0.4, y) - 0.6, length(x + 0.4, y + 0.3) - 0.5); },
};

// One object or distractor of a scene.
struct Shape {
  Outline outline;
  int cls;                                         // class id; -1 for a distractor
  double radius, cx, cy, depth;                    // pixels; a smaller depth is in front
  int pixels = 0, visible = 0;                     // area in pixels; visible area inside the image
  int x1 = INT_MAX, y1 = INT_MAX, x2 = 0, y2 = 0;  // bounding box of the visible pixels
};

enum Texture { kPlain, kGradient, kStripes, kEdge, kNumTextures };

// Returns (1 - t) a + t b. t is clamped to [0, 1] and rounded to 1/256.
cv::Vec3i blend(const cv::Vec3i& a, const cv::Vec3i& b, double t) {
  const int w = int(std::clamp(t, 0.0, 1.0) * 256 + 0.5);
  cv::Vec3i out;
  for (int k = 0; k < 3; k++) out[k] = ((256 - w) * a[k] + w * b[k] + 128) >> 8;
  return out;
}

// Periodic function with period 1 and values 0..1, flat at both extremes.
double wave(double x) { return std::clamp(6 * std::abs(x - std::floor(x) - 0.5) - 1, 0.0, 1.0); }

// Value noise: random values at the points of a unit grid, with smooth interpolation.
double value_noise(const cv::Mat_<double>& grid, double x, double y) {
  const int kx = int(x), ky = int(y);
  const double fx = x - kx, fy = y - ky, sx = fx * fx * (3 - 2 * fx), sy = fy * fy * (3 - 2 * fy);
  const double *upper = grid[ky] + kx, *lower = grid[ky + 1] + kx;
  const double left = upper[0] + sy * (lower[0] - upper[0]), right = upper[1] + sy * (lower[1] - upper[1]);
  return left + sx * (right - left);
}

// Paints the background with two similar colours in a pattern: plain, gradient, stripes, checkerboard or
// value noise (twice as likely as the others).
void paint_background(SceneRng& rng, cv::Mat_<cv::Vec3b>& image) {
  const cv::Vec3i from = rng.color(), to = rng.color_near(from, 60);
  const cv::Vec2d dir = rng.direction();
  const double period = rng.uniform(10, 60);  // px
  const int kind = rng.randint(0, 5);
  const double fine = 3 / period;  // grid points per pixel of the finer noise
  cv::Mat_<double> grid(int(image.rows * fine) + 2, int(image.cols * fine) + 2);
  for (double& knot : grid) knot = rng.uniform(0, 1);
  for (int y = 0; y < image.rows; y++) {
    for (int x = 0; x < image.cols; x++) {
      const double u = (dir[0] * x + dir[1] * y) / period, v = (dir[0] * y - dir[1] * x) / period;
      double t = 0;
      if (kind == 1) t = 0.5 + u * period / (image.cols + image.rows);
      if (kind == 2) t = wave(u);
      if (kind == 3) t = (int(std::floor(u)) + int(std::floor(v))) & 1;
      if (kind >= 4)
        t = 0.7 * value_noise(grid, x / period, y / period) + 0.3 * value_noise(grid, x * fine, y * fine);
      image(y, x) = blend(from, to, t);
    }
  }
}

// Draws an item on the image, counts its pixels and writes `id` to its pixels of the mask.
void paint(SceneRng& rng, Shape& item, int id, cv::Mat_<cv::Vec3b>& image, cv::Mat_<uint8_t>& mask) {
  const cv::Vec2d dir = rng.direction();
  const double stretch = rng.uniform(0.88, 1.14), stripes = rng.uniform(0.8, 2.5);
  const cv::Vec3i under = image(int(item.cy), int(item.cx));
  cv::Vec3i color;
  do color = rng.color();
  while (cv::norm(color - under, cv::NORM_L1) < 170);  // the item must contrast with the background
  const cv::Vec3i second = rng.color_near(color, 40);
  const int texture = rng.bernoulli(0.5) ? kPlain : rng.randint(0, kNumTextures - 1);
  const double reach = kReach * item.radius * std::max(stretch, 1 / stretch) + 1;
  const double ax = item.radius * stretch, ay = item.radius / stretch;
  for (int y = int(std::floor(item.cy - reach)); y <= item.cy + reach; y++) {
    for (int x = int(std::floor(item.cx - reach)); x <= item.cx + reach; x++) {
      const double dx = x + 0.5 - item.cx, dy = y + 0.5 - item.cy;
      const double u = (dx * dir[0] + dy * dir[1]) / ax, v = (dy * dir[0] - dx * dir[1]) / ay;
      const double edge = item.outline(u, v) * item.radius;  // signed distance from the edge, pixels
      if (edge >= 0.5) continue;
      item.pixels += edge < 0;
      if (x < 0 || y < 0 || x >= image.cols || y >= image.rows) continue;
      if (edge < 0) mask(y, x) = uint8_t(id);
      double t = 0;
      if (texture == kGradient) t = 0.5 + 0.5 * u;
      if (texture == kStripes) t = wave(u * stripes);
      if (texture == kEdge) t = 2 + edge / (0.06 * item.radius + 0.5);
      image(y, x) = blend(image(y, x), blend(color, second, t), 0.5 - edge);
    }
  }
}

// Draws the layout of a scene: empty, many small objects, one large object with others, or a few objects of
// any size. Returns the items from back to front.
std::vector<Shape> draw_layout(SceneRng& rng, int width, int height) {
  const double side = std::min(width, height), kind = rng.uniform(0, 1);
  const bool empty = kind < 0.04, large = kind >= 0.74 && kind < 0.94, crowd = kind >= 0.94;
  const int objects = empty ? 0 : crowd ? rng.randint(15, 30) : rng.randint(1, 6);
  const int distractors = rng.randint(0, 3);
  const int only_class = crowd && rng.bernoulli(0.3) ? rng.randint(0, kNumClasses - 1) : -1;
  std::vector<Shape> items(objects + distractors);
  for (int i = 0; i < objects + distractors; i++) {
    Shape& item = items[i];
    const double u = rng.uniform(0, 1);
    if (i < objects) {
      item.cls = only_class >= 0 ? only_class : rng.randint(0, kNumClasses - 1);
      item.outline = kClasses[item.cls].outline;
      item.radius = side * (large && i == 0 ? 0.3 + 0.2 * u : crowd ? 0.02 + 0.08 * u : 0.04 + 0.22 * u);
      item.depth = item.radius = std::max(item.radius, kMinRadius);  // smaller objects are in front
    } else {
      item.cls = -1;
      item.outline = kDistractors[rng.randint(0, int(std::size(kDistractors)) - 1)];
      item.radius = side * (0.04 + 0.2 * u * u);
      item.depth = item.radius * rng.uniform(0, 1);
    }
    const double margin = item.radius * (rng.bernoulli(0.2) ? 0.2 : 0.95);  // 20 % may cross the image border
    for (int attempt = 0; attempt < 4; attempt++) {                         // four attempts to avoid overlap
      item.cx = rng.uniform(margin, width - margin);
      item.cy = rng.uniform(margin, height - margin);
      const auto near = [&](const Shape& b) {
        return length(b.cx - item.cx, b.cy - item.cy) < 0.7 * (b.radius + item.radius);
      };
      if (std::none_of(items.begin(), items.begin() + i, near)) break;
    }
  }
  std::stable_sort(items.begin(), items.end(), [](auto& a, auto& b) { return a.depth > b.depth; });
  return items;
}

// Returns the boxes of the items. In the mask, item i has the number i + 1. Renumbers the mask for
// ShapesScene.
std::vector<Box> find_boxes(std::vector<Shape>& items, cv::Mat_<uint8_t>& mask) {
  for (int y = 0; y < mask.rows; y++) {
    for (int x = 0; x < mask.cols; x++) {
      if (mask(y, x) == 0) continue;
      Shape& item = items[mask(y, x) - 1];
      item.visible++;
      item.x1 = std::min(item.x1, x);
      item.x2 = std::max(item.x2, x + 1);
      item.y1 = std::min(item.y1, y);
      item.y2 = std::max(item.y2, y + 1);
    }
  }
  std::vector<Box> boxes;
  std::vector<uint8_t> number = {0};  // old mask value -> new mask value
  for (const Shape& item : items) {
    const bool sliver = std::min(item.x2 - item.x1, item.y2 - item.y1) < kMinSide;
    const bool boxed = item.cls >= 0 && !sliver && item.visible >= kMinVisible * item.pixels;
    if (boxed) boxes.push_back({1.0 * item.x1, 1.0 * item.y1, 1.0 * item.x2, 1.0 * item.y2, item.cls});
    number.push_back(boxed ? uint8_t(boxes.size()) : 0);
  }
  for (uint8_t& id : mask) id = number[id];
  return boxes;
}

// Applies random contrast, brightness and camera noise, in integer arithmetic.
void add_camera_noise(SceneRng& rng, cv::Mat_<cv::Vec3b>& image) {
  const int contrast = rng.randint(180, 280), brightness = rng.randint(-35, 35);
  const int grain = rng.bernoulli(0.3) ? 0 : rng.randint(0, 20);
  for (cv::Vec3b& pixel : image) {
    uint64_t bits = rng.next();
    for (int k = 0; k < 3; k++, bits >>= 16) {
      const int noise = int(bits & 255) - int(bits >> 8 & 255);  // triangular distribution
      const int level = 128 * 256 + (pixel[k] - 128) * contrast + brightness * 256 + noise * grain;
      pixel[k] = uint8_t(std::clamp(level / 256, 0, 255));
    }
  }
}

}  // namespace

const std::vector<std::string>& shapes_classes() {
  static const auto names = [] {
    std::vector<std::string> out;
    for (const auto& shape : kClasses) out.push_back(shape.name);
    return out;
  }();
  return names;
}

ShapesScene draw_shapes(uint64_t seed, int split, int64_t index, int nominal_size) {
  check(split == 0 || split == 1, "shapes: split ", split, " does not exist; use 0 (train) or 1 (val)");
  check(index >= 0, "shapes: index ", index, " is negative; use 0 or more");
  check(nominal_size >= 96, "shapes: a nominal size of ", nominal_size, " px is too small; use 96 or more");
  SceneRng rng(seed, split, index);
  const int width = rng.randint(nominal_size * 3 / 4, nominal_size * 5 / 4);
  const int height = rng.randint(nominal_size * 3 / 4, nominal_size * 5 / 4);

  ShapesScene scene{cv::Mat_<cv::Vec3b>(height, width), cv::Mat_<uint8_t>(height, width, uint8_t{0}), {}};
  paint_background(rng, scene.image);
  std::vector<Shape> items = draw_layout(rng, width, height);
  for (size_t i = 0; i < items.size(); i++) paint(rng, items[i], int(i) + 1, scene.image, scene.mask);
  add_camera_noise(rng, scene.image);
  scene.boxes = find_boxes(items, scene.mask);
  return scene;
}

}  // namespace yolox
