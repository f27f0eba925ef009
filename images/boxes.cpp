// SPDX-License-Identifier: Apache-2.0
#include "images/boxes.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/error.hpp"

namespace yolox {

ImageSize parse_size(const std::string& text) {
  ImageSize size{0, 0};
  char x = 0, rest = 0;
  const int n = std::sscanf(text.c_str(), "%d%c%d%c", &size.height, &x, &size.width, &rest);
  if (n == 1) size.width = size.height;
  const bool is_plain = text.find_first_not_of("-0123456789x") == std::string::npos;  // sscanf skips blanks
  usage_check(is_plain && (n == 1 || (n == 3 && x == 'x')), "--size must be N or HEIGHTxWIDTH, got '", text,
              "'");
  usage_check(size.height > 0 && size.width > 0 && size.height % 32 == 0 && size.width % 32 == 0, "--size ",
              text, ": height and width must be multiples of 32, such as ",
              std::max(32, (size.height + 16) / 32 * 32),
              size.height == size.width ? "" : concat("x", std::max(32, (size.width + 16) / 32 * 32)));
  usage_check(size.height <= 8192 && size.width <= 8192, "--size ", text, " is larger than 8192");
  return size;
}

std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size) {
  const Box box{std::max(0.0, x), std::max(0.0, y), std::min<double>(size.width, x + w),
                std::min<double>(size.height, y + h), cls};
  if (!has_area(box)) return {};
  return box;
}

Fit fit_into(cv::Size picture, cv::Size room, bool truncate) {
  check(!picture.empty(), "the image is empty; was the file read?");
  const double r = std::min(1.0 * room.height / picture.height, 1.0 * room.width / picture.width);
  const auto pixels = [&](int length) {
    const double exact = length * r;
    return std::max(1, static_cast<int>(truncate ? exact : std::round(exact)));
  };
  const cv::Size size(pixels(picture.width), pixels(picture.height));
  if (truncate) return {size, {r, r}};
  return {size, {1.0 * size.width / picture.width, 1.0 * size.height / picture.height}};
}

Letterbox letterbox(const Image& image, cv::Size size) {
  const Fit to = fit_into(image.size(), size, /*truncate=*/true);
  if (image.size() == size) return {image, to.scale};
  Image canvas(size, border_grey);
  cv::resize(image, canvas(cv::Rect({0, 0}, to.size)), to.size);
  return {canvas, to.scale};
}

}  // namespace yolox
