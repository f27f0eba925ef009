// SPDX-License-Identifier: Apache-2.0
// Drawings for users: boxes with labels, the images of a batch, and statistics of the annotations. Text is
// drawn with a font of this machine if OpenCV has the module freetype, otherwise with that of OpenCV, which
// has ASCII only.
#pragma once

#include <string>
#include <vector>

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

// Returns the names of the images of a batch.
std::vector<std::string> image_names(const Batch& batch);

// Draws the first 16 images of a batch with their names and their ground truth, in rows of four. Images
// smaller than 320 pixels are enlarged.
Image draw_truth(const Batch& batch);

// Draws the first 8 images of a batch twice, side by side: with the ground truth, and with the detections of
// a score of at least 0.25. found: for each image, in its pixels.
Image draw_comparison(const Batch& batch, const std::vector<std::vector<ScoredBox>>& found);

// Returns the boxes labelled with their class names, the smallest first. Ignored regions have no label.
std::vector<LabelledBox> labelled_boxes(const std::vector<Box>& boxes,
                                        const std::vector<std::string>& classes);

// Returns the detections with at least this score, labelled with class name and score.
std::vector<LabelledBox> labelled_boxes(const std::vector<ScoredBox>& found,
                                        const std::vector<std::string>& classes, double min_score = 0);

// Draws the density of box centres and of box sizes, relative to the image size.
Image draw_label_statistics(const Dataset& data);

// Writes an image file. Returns false if the file cannot be written. Does not throw, because a missing
// drawing must not end a run.
bool save_image(const std::string& path, const Image& image);

// Returns a note for the log if letters of `names` may be missing in pictures, or "".
std::string font_note(const std::vector<std::string>& names);

// Draws a line of UTF-8 text into a BGR image, and returns its width in pixels. An empty image: returns the
// width only. place: top left corner. em: font size in pixels.
int draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour);

}  // namespace yolox
