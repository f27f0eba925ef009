// shapes: the data set that needs no files. Scenes of plain shapes with exact boxes, drawn on the fly, to try
// a detector within minutes. Colour and texture tell nothing about the class, only the outline does.
//
// A scene is a function of (seed, split, index) alone, the same on every machine: random numbers are those of
// augment.hpp, outlines are implicit functions taken at the centre of each pixel without sin or exp, and
// blending is in integers, without OpenCV's drawing.
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <opencv2/core.hpp>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/random.hpp"
#include "images/boxes.hpp"

namespace yolox {

struct ShapesScene {
  cv::Mat_<cv::Vec3b> image;  // BGR
  cv::Mat_<uint8_t> mask;     // of each pixel: 1 + index into boxes of the object seen there, or 0
  std::vector<Box> boxes;     // extents of the visible pixels: columns x1 <= x < x2, rows y1 <= y < y2
};

namespace shapes_detail {

constexpr double kMinVisible = 0.3;  // share of an object's pixels that must be seen for it to have a box
constexpr int kMinSide = 5;          // px, shorter boxes (slivers behind something else) are left out
constexpr double kMinRadius = 5;     // px: the smallest shapes have boxes of about 8 px
constexpr double kReach = 1.2;       // no outline leaves the circle of this radius

// The random numbers of a scene, and what is drawn from them often.
struct Dice : Rng {
  using Rng::Rng;
  int randint(int lo, int hi) { return int(Rng::randint(lo, hi)); }
  cv::Vec2d direction();
  cv::Vec3i color_near(const cv::Vec3i& c, int delta);
  cv::Vec3i color() { return color_near({128, 128, 128}, 128); }
};

// The edge of a shape of radius about 1: below 0 inside, with a slope of about 1 where it crosses 0.
using Outline = double (*)(double x, double y);

struct ShapeClass {
  const char* name;
  Outline outline;
};

inline double length(double x, double y) { return std::sqrt(x * x + y * y); }
inline double slab(double x, double y, double half_w, double half_h) {
  return std::max(std::abs(x) - half_w, std::abs(y) - half_h);
}

// Regular pentagram: where at most one of the five half planes that its lines bound is left.
double star(double x, double y);

// To add a class, add a line.
constexpr ShapeClass kClasses[] = {
    {"circle", [](double x, double y) { return length(x, y) - 1; }},
    {"ring", [](double x, double y) { return std::abs(length(x, y) - 0.75) - 0.25; }},
    {"crescent", [](double x, double y) { return std::max(length(x, y) - 1, 0.8 - length(x - 0.55, y)); }},
    {"square", [](double x, double y) { return slab(x, y, 0.8, 0.8); }},
    {"cross", [](double x, double y) { return std::min(slab(x, y, 1, 0.32), slab(x, y, 0.32, 1)); }},
    {"triangle", [](double x, double y) { return std::max(-y, 0.8660254 * std::abs(x) + 0.5 * y) - 0.575; }},
    {"star", star},
};
constexpr int kNumClasses = int(std::size(kClasses));

// What must not be detected: line, bar, arc, corner, blob.
constexpr Outline kDistractors[] = {
    [](double x, double y) { return slab(x, y, 1, 0.03); },
    [](double x, double y) { return slab(x, y, 1, 0.14); },
    [](double x, double y) { return std::max(std::abs(length(x, y) - 0.9) - 0.08, x); },
    [](double x, double y) { return std::max(std::abs(slab(x, y, 0.7, 0.7)) - 0.1, x - y); },
    [](double x, double y) { return std::min(length(x - 0.4, y) - 0.6, length(x + 0.4, y + 0.3) - 0.5); },
};

// One thing to draw: an outline turned, stretched and moved, and what became of it.
struct Shape {
  Outline outline;
  int cls;  // -1: a distractor
  double radius, cx, cy, depth;
  int pixels = 0, visible = 0;                     // all, and those inside the image with nothing in front
  int x1 = INT_MAX, y1 = INT_MAX, x2 = 0, y2 = 0;  // extent of the visible ones
};

enum Texture { kPlain, kGradient, kStripes, kEdge, kNumTextures };

// (1 - t) a + t b with t rounded to 1/256, clamped to [0, 1]
cv::Vec3i blend(const cv::Vec3i& a, const cv::Vec3i& b, double t);

// 0..1..0 over one period, with flat tops
inline double wave(double x) { return std::clamp(6 * std::abs(x - std::floor(x) - 0.5) - 1, 0.0, 1.0); }

// Value noise: random numbers at the knots of a grid, one per unit square, smooth in between.
double clouds(const cv::Mat_<double>& grid, double x, double y);

// Two similar colours in a pattern: plain, gradient, stripes, checker or (twice as often) clouds.
void paint_background(Dice& rng, cv::Mat_<cv::Vec3b>& image);

// Draws the item over what is there, counts its pixels and writes `id` into those of the mask.
void paint(Dice& rng, Shape& item, int id, cv::Mat_<cv::Vec3b>& image, cv::Mat_<uint8_t>& mask);

// What is where: nothing, a crowd of small objects, one large object among others, or a few of any size.
std::vector<Shape> compose(Dice& rng, int width, int height);

// Boxes of the items that the mask has by number (from 1). Renumbers the mask as ShapesScene has it.
std::vector<Box> find_boxes(std::vector<Shape>& items, cv::Mat_<uint8_t>& mask);

// Brightness, contrast and grain of the camera, in 1/256ths.
void develop(Dice& rng, cv::Mat_<cv::Vec3b>& image);

}  // namespace shapes_detail

const std::vector<std::string>& shapes_classes();

// Scene `index` (any number from 0) of split 0 (train) or 1 (val). Width and height are each within a quarter
// of nominal_size. What is seen to less than 30 % has no box. Throws when an argument is out of range.
ShapesScene draw_shapes(uint64_t seed, int split, int64_t index, int nominal_size = 256);

}  // namespace yolox
