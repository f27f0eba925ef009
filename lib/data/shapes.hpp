// SPDX-License-Identifier: Apache-2.0
// The synthetic data set `shapes`, which needs no files. Scenes of simple shapes with exact bounding boxes
// are rendered on the fly, to try a detector within minutes. The class depends on the outline only, not on
// colour or texture.
//
// A scene depends on (seed, split, index) only and is bit-identical on every machine: random numbers come
// from base/random.hpp, outlines are implicit functions evaluated at pixel centres without sin or exp, and
// blending uses integers instead of OpenCV's drawing functions.
#pragma once
#include <cstdint>
#include <opencv2/core.hpp>
#include <string>
#include <vector>

#include "images/image.hpp"

namespace yolox {

struct ShapesScene {
  cv::Mat_<cv::Vec3b> image;  // BGR
  cv::Mat_<uint8_t> mask;     // instance mask: 1 + index into `boxes` of the visible object, else 0
  std::vector<Box> boxes;     // bounding boxes of the visible pixels: x1 <= x < x2, y1 <= y < y2
};

// Returns the class names.
const std::vector<std::string>& shapes_classes();

// Renders scene `index` (from 0, without limit) of split 0 (train) or 1 (val). Width and height are each
// nominal_size +-25 %, in pixels. Objects of which less than 30 % is visible have no box. Throws if an
// argument is out of range. Thread-safe.
ShapesScene draw_shapes(uint64_t seed, int split, int64_t index, int nominal_size = 256);

}  // namespace yolox
