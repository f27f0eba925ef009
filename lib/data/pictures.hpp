// SPDX-License-Identifier: Apache-2.0
// Drawings for users: boxes with labels, the images of a batch, and statistics of the annotations. Text is
// drawn with a font of this machine if OpenCV has the module freetype, otherwise with that of OpenCV, which
// has ASCII only.
#pragma once

#include <string>
#include <vector>

#include "base/torch.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"

namespace yolox {

// Returns the BGR colour of a class. Hues are a golden angle apart, so that consecutive classes differ
// clearly.
cv::Scalar class_colour(int cls);

struct LabelledBox {
  Box box;           // in pixels of the image
  std::string text;  // label, UTF-8
};

// Draws boxes with their labels above them, within the image; the first box is drawn over the others. Regions
// of the class kIgnoredRegion are white.
void draw_boxes(cv::Mat& image, const std::vector<LabelledBox>& boxes);

// Draws the first 16 images of a batch, [B, H, W, 3] uint8, with their boxes, in rows of four. titles: text
// above each image; may be empty. Images smaller than 320 pixels are enlarged.
Image draw_batch(const Tensor& batch, const std::vector<std::vector<LabelledBox>>& boxes,
                 const std::vector<std::string>& titles = {});

// Draws the first 8 images of a batch twice, side by side: with the ground truth, and with the detections.
// names: of the images.
Image draw_comparison(const Tensor& batch, const std::vector<std::vector<LabelledBox>>& truth,
                      const std::vector<std::vector<LabelledBox>>& found,
                      const std::vector<std::string>& names);

// Returns the names of the images of a batch, without folders.
std::vector<std::string> short_names(const std::vector<int64_t>& indices, const Dataset& data);

// Returns the ground-truth boxes of each image, labelled with their class names, and its ignored regions, the
// smallest first.
std::vector<std::vector<LabelledBox>> labelled_boxes(const Targets& targets,
                                                     const std::vector<std::string>& classes);

// Returns the detections of each image with a score of at least kPictureScore, labelled with class name and
// score. found: per image [D, 7] with x1, y1, x2, y2, objectness, class score, class.
std::vector<std::vector<LabelledBox>> labelled_boxes(const std::vector<Tensor>& found,
                                                     const std::vector<std::string>& classes);
constexpr float kPictureScore = 0.25F;

// Draws the number of boxes per class, the density of box centres, and the density of box sizes. Centres and
// sizes are relative to the image size.
Image draw_label_statistics(const Dataset& data);

// Writes an image file. Returns false if the file cannot be written. Does not throw, because a missing
// drawing must not end a run.
bool save_image(const std::string& path, const Image& image);

// Returns a note for the log if letters of `names` may be missing in pictures, or "".
std::string font_note(const std::vector<std::string>& names);

// Draws a line of UTF-8 text into a BGR image. place: top left corner. em: font size in pixels.
void draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour);

}  // namespace yolox
