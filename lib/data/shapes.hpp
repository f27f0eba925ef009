// SPDX-License-Identifier: Apache-2.0
// The synthetic data set `shapes`, which needs no files: scenes of simple shapes with exact bounding boxes,
// drawn on the fly, to try a detector within minutes. The class depends on the outline only, not on the
// colour.
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
std::vector<std::string> shapes_classes();

// Draws scene `index` (from 0, without limit) of split 0 (train) or 1 (val), which depends on the arguments
// only. Width and height are each 192 to 320 pixels. Objects of which less than 30 % is visible have no box.
// Thread-safe.
ShapesScene draw_shapes(uint64_t seed, int split, int64_t index);

}  // namespace yolox
