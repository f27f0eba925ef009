// SPDX-License-Identifier: Apache-2.0
// Draws UTF-8 text into images, with FreeType and the fonts of this machine. Without FreeType or fonts, draws
// with the font of OpenCV, which has only ASCII. A character that no font has is drawn as '?'. Letters are
// placed one after the other: scripts whose letters join or reorder, such as Arabic, are legible letter by
// letter only. All functions may be called from several threads.
#pragma once
#include <opencv2/imgproc.hpp>
#include <string>
#include <vector>

namespace yolox {

// Returns the code points of UTF-8 text. An invalid byte and a control character become U+FFFD.
std::vector<char32_t> code_points(const std::string& text);

// Returns the width and the height in pixels of a line of text. em: font size in pixels. Capitals have about
// 0.7 em. The height depends on em only.
cv::Size text_extent(const std::string& text, int em);

// Draws a line of text into a BGR image. place: the top left corner of its extent.
void draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour);

// Returns the text if it is at most `width` pixels wide, else its beginning followed by "..".
std::string fitted_text(const std::string& text, int em, int width);

// Returns a note for the log if some characters of `names` cannot be drawn, or "".
std::string font_note(const std::vector<std::string>& names);

}  // namespace yolox
