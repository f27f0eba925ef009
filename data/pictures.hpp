// SPDX-License-Identifier: Apache-2.0
// Drawings for users: boxes with labels, the images of a batch, and statistics of the annotations.
#pragma once
#include <torch/torch.h>

#include <string>
#include <vector>

#include "data/batch.hpp"
#include "data/dataset.hpp"

namespace yolox {

// Returns the BGR colour of a class. Hues are a golden angle apart, so that consecutive classes differ
// clearly.
cv::Scalar class_colour(int cls);

// Draws a box, in pixels of the image. The text is above the box, or inside if there is no space above.
void draw_box(cv::Mat& image, const Box& box, const std::string& text);

struct LabelledBox {
  Box box;  // in pixels of the image
  std::string text;
};

// Draws the first 16 images of a batch, [B, H, W, 3] uint8, with their boxes, in rows of four.
Image draw_batch(const Tensor& batch, const std::vector<std::vector<LabelledBox>>& boxes);

// Returns the ground-truth boxes of each image, labelled with their class names.
std::vector<std::vector<LabelledBox>> labelled_boxes(const Targets& targets,
                                                     const std::vector<std::string>& classes);

// Returns the detections of each image with a score of at least 0.25, labelled with class name and score.
// found: per image [D, 7] with x1, y1, x2, y2, objectness, class score, class.
std::vector<std::vector<LabelledBox>> labelled_boxes(const std::vector<Tensor>& found,
                                                     const std::vector<std::string>& classes);

// Draws the number of boxes per class, the density of box centres, and the density of box sizes. Centres and
// sizes are relative to the image size.
Image draw_label_statistics(const Dataset& data);

// Writes an image file. Returns false if the file cannot be written. Does not throw, because a missing
// drawing must not end a run.
bool save_image(const std::string& path, const Image& image);

}  // namespace yolox
