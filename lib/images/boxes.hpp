// SPDX-License-Identifier: Apache-2.0
// Input size, bounding boxes, clipping and letterbox.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "images/image.hpp"

namespace yolox {

// Padding value: the grey of every pixel that no image covers.
constexpr uchar border_grey = 114;

// Height and width of the network input in pixels.
struct ImageSize {
  int height, width;
};
// Parses "640" (640x640) or "480x640" (height x width). Throws UsageError unless both are multiples of 32,
// from 32 to 8192.
inline ImageSize parse_size(const std::string& text) {
  ImageSize size{0, 0};
  char x = 'x', rest = 0;
  const int n = std::sscanf(text.c_str(), "%d%c%d%c", &size.height, &x, &size.width, &rest);
  if (n == 1) size.width = size.height;
  const bool is_plain = text.find_first_not_of("0123456789x") == std::string::npos;  // sscanf skips blanks
  const auto is_side = [](int side) { return side >= 32 && side <= 8192 && side % 32 == 0; };
  usage_check(is_plain && (n == 1 || n == 3) && x == 'x' && is_side(size.height) && is_side(size.width),
              "--size must be N or HEIGHTxWIDTH, multiples of 32 up to 8192, got '", text, "'");
  return size;
}

// Bounding box in pixels. Coordinates are pixel edges: an image of width W spans 0..W.
struct Box {
  double x1, y1, x2, y2;
  int cls;  // 0..classes-1, or kIgnoredRegion
};
// Class of a region in which objects may be, such as a crowd: no target, and no background either.
constexpr int kIgnoredRegion = -1;

// An image with its boxes. The number of boxes is not limited.
struct Sample {
  Image image;
  std::vector<Box> boxes;  // and ignored regions
};

inline bool has_area(const Box& b) { return b.x2 > b.x1 && b.y2 > b.y1; }

// Clips a box, given as x, y (top left corner), w, h, to an image of this size. Returns nothing if the
// clipped box has no area.
inline std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size) {
  const Box box{std::max(0.0, x), std::max(0.0, y), std::min<double>(size.width, x + w),
                std::min<double>(size.height, y + h), cls};
  if (!has_area(box)) return {};
  return box;
}

struct Fit {
  cv::Size size;
  Scale scale;  // from the original size to `size`
};

// Returns the largest size with the aspect ratio of the image that fits into `room`. truncate: as official
// YOLOX, truncates the size instead of rounding, and returns the scale before truncation.
inline Fit fit_into(cv::Size picture, cv::Size room, bool truncate) {
  check(!picture.empty(), "the image is empty; was the file read?");
  const double r = std::min(1.0 * room.height / picture.height, 1.0 * room.width / picture.width);
  const auto pixels = [&](int length) {
    const double exact = length * r;
    return std::max(1, static_cast<int>(truncate ? exact : std::round(exact)));
  };
  const cv::Size size(pixels(picture.width), pixels(picture.height));
  if (truncate) return {size, {r, r}};
  return {size, {1.0 * size.width / picture.width, 1.0 * size.height / picture.height}};
}

struct Letterbox {
  Image image;
  Scale
      scale;  // from the original image to `image`; divide a box of `image` by `scale` to undo the letterbox
};

// Letterbox: resizes an image to fit into `size`, places it at the top left, and pads with grey. This is the
// only transform in evaluation. It equals that of official YOLOX, so that AP values are comparable. The
// result shares the pixels of `image` if the image already has this size.
inline Letterbox letterbox(const Image& image, cv::Size size) {
  const Fit to = fit_into(image.size(), size, /*truncate=*/true);
  if (image.size() == size) return {image, to.scale};
  Image canvas(size, border_grey);
  cv::resize(image, canvas(cv::Rect({0, 0}, to.size)), to.size);
  return {canvas, to.scale};
}

}  // namespace yolox
