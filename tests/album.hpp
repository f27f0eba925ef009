// SPDX-License-Identifier: Apache-2.0
// Helpers for tests of augmentation: a data set in memory for compose(), images with one solid colour per box
// on grey, and the measurement of the extent of a colour in an augmented image.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>

#include "augment.hpp"
#include "common.hpp"

namespace yolox::test {

// ---- images ----

// Data set in memory for compose(). image_region() returns a copy of the part, so that compose() cannot read
// pixels outside it.
struct MemoryDataset {
  std::vector<Sample> samples;
  int most_reduced = 1;            // largest reduction of a piece (2, 4, ...), chosen like decode_region()
  bool whole = false;              // image_region() returns the whole image
  std::set<std::size_t> broken{};  // image_region() throws for these
  std::vector<std::vector<Box>> regions{};  // ignored(), by index; empty: none
  std::vector<std::size_t> replacements{};  // results of replacement_index(), in turn; then it throws

  struct Asked {
    std::size_t index;
    cv::Rect part;
    double scale;
  };
  mutable std::vector<Asked> asked{};  // of image_region()
  mutable std::vector<std::pair<std::size_t, std::size_t>>
      replaced{};  // of replacement_index(): index, tries

  cv::Size size(std::size_t i) const { return samples.at(i).image.size(); }
  const std::vector<Box>& boxes(std::size_t i) const { return samples.at(i).boxes; }
  const std::vector<Box>& ignored(std::size_t i) const {
    static const std::vector<Box> none;
    return i < regions.size() ? regions[i] : none;
  }
  ImageRegion image_region(std::size_t i, const cv::Rect& part, double scale) const {
    asked.push_back({i, part, scale});
    if (broken.count(i)) throw ImageError(concat("picture ", i, " is damaged"));
    const cv::Rect all({0, 0}, size(i)), wanted = whole ? all : part;
    REQUIRE((part & all) == part);
    REQUIRE(!part.empty());
    int r = 1;
    while (r < most_reduced && scale * r <= 0.5) r *= 2;
    const cv::Rect grid(wanted.tl() / r, (wanted.br() + cv::Point(r - 1, r - 1)) / r);  // in reduced pixels
    const cv::Rect taken(grid.tl() * r, grid.size() * r);
    cv::Mat grown, piece;  // the last reduced pixels may exceed the edge, as in a JPEG
    cv::copyMakeBorder(samples[i].image, grown, 0, r, 0, r, cv::BORDER_REPLICATE);
    cv::resize(grown(taken), piece, grid.size(), 0, 0, cv::INTER_AREA);
    return {piece, {1.0 / r, 1.0 / r}, taken.tl()};
  }
  std::size_t replacement_index(std::size_t i, const ImageError& error, std::size_t tries) const {
    CHECK(has(error.what(), std::to_string(i)));
    if (replaced.size() == replacements.size()) throw;
    replaced.push_back({i, tries});
    return replacements[replaced.size() - 1];
  }
};

inline cv::Size random_size(Rng& rng, int lo, int hi) {
  return {static_cast<int>(rng.randint(lo, hi)), static_cast<int>(rng.randint(lo, hi))};
}

inline Image noise(cv::Size size, std::uint64_t seed = 0) {
  Image image(size, 0);
  Rng rng(seed, 0, 0);
  for (auto& p : image)
    p = {uchar(rng.randint(0, 255)), uchar(rng.randint(0, 255)), uchar(rng.randint(0, 255))};
  return image;
}

inline Image coloured(cv::Size size, const cv::Vec3b& colour) {
  Image image(size, 0);
  image.setTo(colour);
  return image;
}

inline int max_difference(const Image& a, const Image& b) {
  REQUIRE(a.size() == b.size());
  return static_cast<int>(cv::norm(a, b, cv::NORM_INF));
}

inline double max_corner_difference(const Box& a, const Box& b) {
  return std::max(
      {std::abs(a.x1 - b.x1), std::abs(a.y1 - b.y1), std::abs(a.x2 - b.x2), std::abs(a.y2 - b.y2)});
}

// ---- coloured boxes ----

inline const std::vector<cv::Vec3b> colours = {{255, 0, 0},   {0, 255, 0},   {0, 0, 255}, {255, 255, 0},
                                               {255, 0, 255}, {0, 255, 255}, {0, 0, 0},   {255, 255, 255}};

// Returns a grey image with two solid boxes of classes `cls` and `cls` + 1. The class selects the colour.
inline Sample marked_image(Rng& rng, cv::Size size, int cls) {
  Sample s{Image(size, border_grey), {}};
  for (int half : {0, 1}) {  // one box in each half, without contact
    const int left = half * size.width / 2 + 2, right = left + size.width / 2 - 4;
    int x1 = static_cast<int>(rng.randint(left, right - 12)),
        x2 = static_cast<int>(rng.randint(x1 + 10, right));
    int y1 = static_cast<int>(rng.randint(0, size.height - 12));
    int y2 = static_cast<int>(rng.randint(y1 + 10, size.height));
    // A box near the edge is moved to the edge, because the grey strip between could be less than a reduced
    // pixel.
    for (int* low : {&x1, &y1})
      if (*low < 8) *low = 0;
    if (x2 > size.width - 8) x2 = size.width;
    if (y2 > size.height - 8) y2 = size.height;
    s.image(cv::Rect({x1, y1}, cv::Point(x2, y2))).setTo(colours[cls + half]);
    s.boxes.push_back({double(x1), double(y1), double(x2), double(y2), cls + half});
  }
  return s;
}

// Returns the bounding box of the pixels with the colour of `cls`, or nothing. A pixel has the colour if it
// is at least the fraction `least` of the way from grey to the colour.
inline std::optional<Box> extent(const Image& image, int cls, double least = 0.5) {
  const cv::Vec3d grey = cv::Vec3d::all(border_grey), to = cv::Vec3d(colours[cls]) - grey;
  const double length = to.dot(to);
  Box box{1e9, 1e9, -1e9, -1e9, cls};
  for (int y = 0; y < image.rows; ++y) {
    const uchar* pixels = image.ptr<uchar>(y);  // much faster than Vec without optimisation
    for (int x = 0; x < image.cols; ++x) {
      double along = 0;
      for (int c = 0; c < 3; ++c) along += (pixels[3 * x + c] - border_grey) * to.val[c];
      const double t = along / length;
      if (t < least || cv::norm(cv::Vec3d(image(y, x)) - grey - t * to) > 12) continue;
      box = {std::min(box.x1, double(x)), std::min(box.y1, double(y)), std::max(box.x2, x + 1.0),
             std::max(box.y2, y + 1.0), cls};
    }
  }
  return box.x2 > 0 ? std::optional<Box>(box) : std::nullopt;
}

// Checks that each box matches the extent of its colour within `tolerance` pixels, and that each colour with
// an extent of more than 2 pixels has a box. Returns the number of compared boxes.
inline int check_marks(const Sample& s, double tolerance, double least = 0.5) {
  std::map<int, Box> boxes;
  for (const Box& b : s.boxes) CHECK(boxes.emplace(b.cls, b).second);
  int compared = 0;
  for (int cls = 0; cls < int(colours.size()); ++cls) {
    const auto seen = extent(s.image, cls, least);
    const auto box = boxes.find(cls);
    if (box == boxes.end()) {
      CHECK_MESSAGE((!seen || std::min(seen->x2 - seen->x1, seen->y2 - seen->y1) <= 2), "colour without box");
    } else if (std::min(box->second.x2 - box->second.x1, box->second.y2 - box->second.y1) > 3) {
      REQUIRE(seen);
      const Box& b = box->second;
      const auto text = [](const Box& x) { return concat(x.x1, " ", x.y1, " ", x.x2, " ", x.y2); };
      CHECK_MESSAGE(max_corner_difference(*seen, b) <= tolerance,
                    "box " << text(b) << ", pixels " << text(*seen));
      ++compared;
    }
  }
  return compared;
}

}  // namespace yolox::test

namespace yolox::official {

// Returns the image with the HSV jitter of official YOLOX (data/data_augment.py), with tables of OpenCV. Hue
// wraps around; saturation and value are clamped to 0..255.
inline Image hsv(const Image& image, const HsvDraw& draw) {
  const int h = static_cast<int>(draw.h), s = static_cast<int>(draw.s), v = static_cast<int>(draw.v);
  Image::Pixels table(1, 256);
  for (int i = 0; i < 256; ++i) {
    const int hue = ((i + h) % 180 + 180) % 180;  // OpenCV's hue: 0..179
    table(0, i) = {static_cast<uchar>(hue), cv::saturate_cast<uchar>(i + s), cv::saturate_cast<uchar>(i + v)};
  }
  Image jittered, out;
  cv::cvtColor(image, jittered, cv::COLOR_BGR2HSV);
  cv::LUT(jittered, table, jittered);
  cv::cvtColor(jittered, out, cv::COLOR_HSV2BGR);
  return out;
}

}  // namespace yolox::official
