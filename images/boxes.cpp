// SPDX-License-Identifier: Apache-2.0
#include "images/boxes.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace yolox {

void opencv_single_thread() {
  cv::setNumThreads(0);
  cv::ocl::setUseOpenCL(false);
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
