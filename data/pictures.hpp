// Pictures for people: boxes with their names, a batch as the network sees it, and what the labels of a data
// set are like.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "data.hpp"

namespace yolox {

// Hues a golden angle apart: the same for a class in every picture, and neighbours differ.
cv::Scalar class_colour(int cls);

// A box in pixels of the picture, with its text above it, or inside where there is no room.
void draw_box(cv::Mat& image, const Box& box, const std::string& text);

struct DrawnBox {
  Box box;  // in pixels of the image
  std::string text;
};

// Up to 16 images of a batch, [B, H, W, 3] uint8, with their boxes, four to a row.
Image draw_batch(const Tensor& batch, const std::vector<std::vector<DrawnBox>>& boxes);

// The boxes to learn.
std::vector<std::vector<DrawnBox>> drawn(const Targets& targets, const std::vector<std::string>& classes);

// The boxes found, rows x1, y1, x2, y2, objectness, class score, class: those with a score of 0.25 or more.
std::vector<std::vector<DrawnBox>> drawn(const std::vector<Tensor>& found,
                                         const std::vector<std::string>& classes);

// Boxes per class, where in their images their centres are, and how large they are in parts of the image.
Image draw_labels(const Dataset& data);

// False where the file cannot be written; a picture is not worth ending a run for.
bool save_picture(const std::string& path, const Image& image);

}  // namespace yolox
