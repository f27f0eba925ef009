// SPDX-License-Identifier: Apache-2.0
// UTF-8 text in pictures. Draws with a font of this machine if OpenCV has the module freetype, otherwise with
// OpenCV's own font, which has ASCII only and shows '?' for other characters. All functions may be called
// from several threads.
#pragma once
#include <opencv2/imgproc.hpp>
#include <string>
#include <vector>

namespace yolox {

// Returns the size in pixels of a line of text. em: font size in pixels. The height depends on em only.
cv::Size text_extent(const std::string& text, int em);

// Draws a line of text into a BGR image. place: top left corner of its extent.
void draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour);

// Returns a note for the log if letters of `names` may be missing in pictures, or "".
std::string font_note(const std::vector<std::string>& names);

}  // namespace yolox
