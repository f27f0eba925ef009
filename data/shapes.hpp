// SPDX-License-Identifier: Apache-2.0
// The synthetic data set `shapes`, which needs no files. Scenes of simple shapes with exact bounding boxes
// are rendered on the fly, to try a detector within minutes. The class depends on the outline only, not on
// colour or texture.
//
// A scene depends on (seed, split, index) only and is bit-identical on every machine: random numbers come
// from base/random.hpp, outlines are implicit functions evaluated at pixel centres without sin or exp, and
// blending uses integers instead of OpenCV's drawing functions.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <opencv2/core.hpp>
#include <string>
#include <vector>

#include "base/random.hpp"
#include "images/boxes.hpp"

namespace yolox {

struct ShapesScene {
  cv::Mat_<cv::Vec3b> image;  // BGR
  cv::Mat_<uint8_t> mask;     // instance mask: 1 + index into `boxes` of the visible object, else 0
  std::vector<Box> boxes;     // bounding boxes of the visible pixels: x1 <= x < x2, y1 <= y < y2
};

namespace shapes_detail {

constexpr double kMinVisible = 0.3;  // minimum visible fraction of an object that gets a box
constexpr int kMinSide = 5;          // minimum box side in pixels; drops slivers of occluded objects
constexpr double kMinRadius = 5;     // minimum radius in pixels; the smallest boxes are about 8 pixels wide
constexpr double kReach = 1.2;       // every outline lies inside the circle of this radius

// Random number generator of a scene, with helpers for directions and colours.
struct SceneRng : Rng {
  using Rng::Rng;
  int randint(int lo, int hi) { return int(Rng::randint(lo, hi)); }
  cv::Vec2d direction();
  cv::Vec3i color_near(const cv::Vec3i& c, int delta);
  cv::Vec3i color() { return color_near({128, 128, 128}, 128); }
};

// Signed distance function of a shape with a radius of about 1: negative inside, with a slope of about 1 at
// the edge.
using Outline = double (*)(double x, double y);

struct ShapeClass {
  const char* name;
  Outline outline;
};

inline double length(double x, double y) { return std::sqrt(x * x + y * y); }
inline double box_distance(double x, double y, double half_w, double half_h) {
  return std::max(std::abs(x) - half_w, std::abs(y) - half_h);
}

// Regular pentagram: the points that are outside of at most one of its five half planes.
double star(double x, double y);

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
cv::Vec3i blend(const cv::Vec3i& a, const cv::Vec3i& b, double t);

// Periodic function with period 1 and values 0..1, flat at both extremes.
inline double wave(double x) { return std::clamp(6 * std::abs(x - std::floor(x) - 0.5) - 1, 0.0, 1.0); }

// Value noise: random values at the points of a unit grid, with smooth interpolation.
double value_noise(const cv::Mat_<double>& grid, double x, double y);

// Paints the background with two similar colours in a pattern: plain, gradient, stripes, checkerboard or
// value noise (twice as likely as the others).
void paint_background(SceneRng& rng, cv::Mat_<cv::Vec3b>& image);

// Draws an item on the image, counts its pixels and writes `id` to its pixels of the mask.
void paint(SceneRng& rng, Shape& item, int id, cv::Mat_<cv::Vec3b>& image, cv::Mat_<uint8_t>& mask);

// Draws the layout of a scene: empty, many small objects, one large object with others, or a few objects of
// any size. Returns the items from back to front.
std::vector<Shape> compose(SceneRng& rng, int width, int height);

// Returns the boxes of the items. In the mask, item i has the number i + 1. Renumbers the mask for
// ShapesScene.
std::vector<Box> find_boxes(std::vector<Shape>& items, cv::Mat_<uint8_t>& mask);

// Applies random contrast, brightness and camera noise, in integer arithmetic.
void add_camera_noise(SceneRng& rng, cv::Mat_<cv::Vec3b>& image);

}  // namespace shapes_detail

// Returns the class names.
const std::vector<std::string>& shapes_classes();

// Renders scene `index` (from 0, without limit) of split 0 (train) or 1 (val). Width and height are each
// nominal_size +-25 %, in pixels. Objects of which less than 30 % is visible have no box. Throws if an
// argument is out of range. Thread-safe.
ShapesScene draw_shapes(uint64_t seed, int split, int64_t index, int nominal_size = 256);

}  // namespace yolox
