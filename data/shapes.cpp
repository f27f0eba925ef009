// SPDX-License-Identifier: Apache-2.0
#include "data/shapes.hpp"

#include "base/error.hpp"

namespace yolox {

namespace shapes_detail {

cv::Vec2d SceneRng::direction() {
  for (;;) {
    const double x = uniform(-1, 1), y = uniform(-1, 1), norm = std::sqrt(x * x + y * y);
    if (norm > 0.1 && norm <= 1) return {x / norm, y / norm};
  }
}

cv::Vec3i SceneRng::color_near(const cv::Vec3i& c, int delta) {
  cv::Vec3i out;
  for (int k = 0; k < 3; k++) out[k] = std::clamp(c[k] + randint(-delta, delta), 0, 255);
  return out;
}

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

cv::Vec3i blend(const cv::Vec3i& a, const cv::Vec3i& b, double t) {
  const int w = int(std::clamp(t, 0.0, 1.0) * 256 + 0.5);
  cv::Vec3i out;
  for (int k = 0; k < 3; k++) out[k] = ((256 - w) * a[k] + w * b[k] + 128) >> 8;
  return out;
}

double value_noise(const cv::Mat_<double>& grid, double x, double y) {
  const int kx = int(x), ky = int(y);
  const double fx = x - kx, fy = y - ky, sx = fx * fx * (3 - 2 * fx), sy = fy * fy * (3 - 2 * fy);
  const double *upper = grid[ky] + kx, *lower = grid[ky + 1] + kx;
  const double left = upper[0] + sy * (lower[0] - upper[0]), right = upper[1] + sy * (lower[1] - upper[1]);
  return left + sx * (right - left);
}

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

std::vector<Shape> compose(SceneRng& rng, int width, int height) {
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

}  // namespace shapes_detail

const std::vector<std::string>& shapes_classes() {
  static const auto names = [] {
    std::vector<std::string> out;
    for (const auto& shape : shapes_detail::kClasses) out.push_back(shape.name);
    return out;
  }();
  return names;
}

ShapesScene draw_shapes(uint64_t seed, int split, int64_t index, int nominal_size) {
  using namespace shapes_detail;
  check(split == 0 || split == 1, "shapes: split ", split, " does not exist; use 0 (train) or 1 (val)");
  check(index >= 0, "shapes: index ", index, " is negative; use 0 or more");
  check(nominal_size >= 96, "shapes: a nominal size of ", nominal_size, " px is too small; use 96 or more");
  SceneRng rng(seed, split, index);
  const int width = rng.randint(nominal_size * 3 / 4, nominal_size * 5 / 4);
  const int height = rng.randint(nominal_size * 3 / 4, nominal_size * 5 / 4);

  ShapesScene scene{cv::Mat_<cv::Vec3b>(height, width), cv::Mat_<uint8_t>(height, width, uint8_t{0}), {}};
  paint_background(rng, scene.image);
  std::vector<Shape> items = compose(rng, width, height);
  for (size_t i = 0; i < items.size(); i++) paint(rng, items[i], int(i) + 1, scene.image, scene.mask);
  add_camera_noise(rng, scene.image);
  scene.boxes = find_boxes(items, scene.mask);
  return scene;
}

}  // namespace yolox
