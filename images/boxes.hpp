// SPDX-License-Identifier: Apache-2.0
// Input size, bounding boxes, clipping and letterbox.
#pragma once
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <string>
#include <vector>

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
ImageSize parse_size(const std::string& text);

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
std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size);

struct Fit {
  cv::Size size;
  Scale scale;  // from the original size to `size`
};

// Returns the largest size with the aspect ratio of the image that fits into `room`. truncate: as official
// YOLOX, truncates the size instead of rounding, and returns the scale before truncation.
Fit fit_into(cv::Size picture, cv::Size room, bool truncate);

struct Letterbox {
  Image image;
  Scale
      scale;  // from the original image to `image`; divide a box of `image` by `scale` to undo the letterbox
};

// Letterbox: resizes an image to fit into `size`, places it at the top left, and pads with grey. This is the
// only transform in evaluation. It equals that of official YOLOX, so that AP values are comparable. The
// result shares the pixels of `image` if the image already has this size.
Letterbox letterbox(const Image& image, cv::Size size);

}  // namespace yolox
