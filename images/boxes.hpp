// Boxes, and fitting pictures into the input size.
#pragma once
#include <algorithm>
#include <cmath>
#include <opencv2/core.hpp>
#include <opencv2/core/ocl.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "images/image.hpp"

namespace yolox {

// Grey of every pixel that no picture covers.
constexpr uchar border_grey = 114;

// OpenCV's own threads would compete with the workers, each of which already has a core. Call it first in
// main(). (The OpenCL switch holds for the calling thread; others never turn it on as long as they use
// cv::Mat only.)
void opencv_single_thread();

struct Box {
  double x1, y1, x2, y2;
  int cls;  // 0..classes-1
};

struct Sample {
  Image image;
  std::vector<Box> boxes;  // as many as there are: nothing here cuts the list
};

inline bool has_area(const Box& b) { return b.x2 > b.x1 && b.y2 > b.y1; }

// An annotation's corner, width and height -> the box inside a picture of this size; nothing if none is left.
// official_quirks: width and height count from the corner already cut, and a box without width or height
// stays.
std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size,
                            bool official_quirks);

struct Fit {
  cv::Size size;
  Scale scale;  // the factors to it
};

// The largest size with the picture's shape that fits into `room`. truncate: as official YOLOX rounds, the
// factor that of before rounding.
Fit fit_into(cv::Size picture, cv::Size room, bool truncate);

struct Letterbox {
  Image image;
  Scale scale;  // a box found in `image`, divided by this, is a box in the original
};

// Fitted into the top left corner of a grey picture of this size: all that evaluation does to a picture, as
// official YOLOX does it: AP compares.
// Shares pixels if nothing is to do.
Letterbox letterbox(const Image& image, cv::Size size);

}  // namespace yolox
