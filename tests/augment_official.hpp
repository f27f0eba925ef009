// SPDX-License-Identifier: Apache-2.0
// The augmentation pipeline of official YOLOX, pixel for pixel, for parity tests. These are the known bugs of
// the official code, and the behaviour of compose() in augment.hpp:
//   official                                                  compose()
//   moves a box that crosses the left or top edge             clips the box (clip_box)
//   truncates sizes, so that an image may be resized twice    rounds sizes; boxes use the rounded sizes
//   affine: boxes are up to half a pixel off the image        maps pixel edges, as resize does
//   MixUp: truncates the mean, pads with black                rounds the mean, pads with grey
//   MixUp: skipped for a mosaic without boxes                 applied to every mosaic
//   jitter and flip: skipped for an image without boxes       applied to every image
//   if all boxes are too small, jitter and flip are undone    the image has no boxes
//   keeps boxes without area until the end                    drops boxes without area at once
// Source: YOLOX, data/data_augment.py and data/datasets/mosaicdetection.py.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <opencv2/imgproc.hpp>
#include <optional>

#include "augment.hpp"

namespace yolox::official {

inline Box scaled_shifted(const Box& b, Scale scale, double dx = 0, double dy = 0) {
  return {b.x1 * scale.x + dx, b.y1 * scale.y + dy, b.x2 * scale.x + dx, b.y2 * scale.y + dy, b.cls};
}

inline Box mirrored(const Box& b, double width) { return {width - b.x2, b.y1, width - b.x1, b.y2, b.cls}; }

// Converts an annotation (x, y, w, h) to a box. Adds width and height after the corner was clipped, and keeps
// boxes without area.
inline std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size) {
  const double x1 = std::max(0.0, x), y1 = std::max(0.0, y);
  const double x2 = std::min<double>(size.width, x1 + std::max(0.0, w));
  const double y2 = std::min<double>(size.height, y1 + std::max(0.0, h));
  if (x2 < x1 || y2 < y1) return {};
  return Box{x1, y1, x2, y2, cls};
}

// Clamps a box to an image of this size. A box outside of the image becomes a line or a point on its edge.
inline Box clamped(const Box& b, cv::Size size) {
  const auto x = [&](double v) { return std::clamp(v, 0.0, static_cast<double>(size.width)); };
  const auto y = [&](double v) { return std::clamp(v, 0.0, static_cast<double>(size.height)); };
  return {x(b.x1), y(b.y1), x(b.x2), y(b.y2), b.cls};
}

// Returns the image with HSV jitter. Hue wraps around; saturation and value are clamped to 0..255.
inline Image hsv(const Image& image, const HsvDraw& draw) {
  const int h = static_cast<int>(draw.h), s = static_cast<int>(draw.s), v = static_cast<int>(draw.v);
  Image::Pixels table(1, 256);
  for (int i = 0; i < 256; ++i) {
    const int hue = ((i + h) % 180 + 180) % 180;  // OpenCV's hue: 0..179
    table(0, i) = {static_cast<uchar>(hue), cv::saturate_cast<uchar>(i + s), cv::saturate_cast<uchar>(i + v)};
  }
  Image jittered, out;
  cv::cvtColor(image, jittered, cv::COLOR_BGR2HSV);
  cv::LUT(jittered, table, jittered);
  cv::cvtColor(jittered, out, cv::COLOR_HSV2BGR);
  return out;
}

// Flips image and boxes horizontally.
inline Sample flip(const Sample& in) {
  Sample out;
  cv::flip(in.image, out.image, 1);
  for (const Box& b : in.boxes) out.boxes.push_back(mirrored(b, in.image.cols));
  return out;
}

// Resizes image and boxes so that the image fits into `room`. The result shares the pixels of `in` if the
// size does not change.
inline Sample fit(const Sample& in, cv::Size room) {
  const Fit to = fit_into(in.image.size(), room, /*truncate=*/true);
  Sample out{in.image, {}};
  if (to.size != in.image.size()) cv::resize(in.image, out.image, to.size);
  for (const Box& b : in.boxes) out.boxes.push_back(scaled_shifted(b, to.scale));
  return out;
}

// Mosaic: places four images around `centre` on a grey canvas of twice `size`. Each image is resized to fit
// into `size` and clipped to the canvas. Order: top left, top right, bottom left, bottom right.
inline Sample mosaic(const std::array<Sample, 4>& tiles, cv::Point centre, cv::Size size) {
  const cv::Size canvas_size = size * 2;
  Sample out{Image(canvas_size, border_grey), {}};
  for (std::size_t i = 0; i < 4; ++i) {
    const Sample& tile = tiles[i];
    const Fit to = fit_into(tile.image.size(), size, /*truncate=*/true);
    const bool left = i % 2 == 0, top = i < 2;
    const cv::Point corner(left ? centre.x - to.size.width : centre.x,
                           top ? centre.y - to.size.height : centre.y);
    const cv::Rect whole(corner, to.size), visible = whole & cv::Rect({0, 0}, canvas_size);
    if (visible == whole) {
      cv::resize(tile.image, out.image(visible), to.size);
    } else {
      const Image resized = fit({tile.image, {}}, size).image;
      resized(visible - corner).copyTo(out.image(visible));
    }
    for (const Box& b : tile.boxes) {
      const Box placed = scaled_shifted(b, to.scale, corner.x, corner.y);
      out.boxes.push_back(clamped(placed, canvas_size));
    }
  }
  return out;
}

// Random affine transform (rotation, scale, shear, shift) of a mosaic into an image of this size. A box
// becomes the axis-aligned bounding box of its four transformed corners.
inline Sample random_affine(const Sample& in, const AffineDraw& draw, cv::Size size) {
  const cv::Matx23d m = affine_matrix(draw, size);
  Sample out;
  cv::warpAffine(in.image, out.image, m, size, cv::INTER_LINEAR, cv::BORDER_CONSTANT,
                 cv::Scalar::all(border_grey));
  for (const Box& b : in.boxes) {
    const auto x = [&](double px, double py) { return m(0, 0) * px + m(0, 1) * py + m(0, 2); };
    const auto y = [&](double px, double py) { return m(1, 0) * px + m(1, 1) * py + m(1, 2); };
    const auto [x1, x2] = std::minmax({x(b.x1, b.y1), x(b.x2, b.y2), x(b.x1, b.y2), x(b.x2, b.y1)});
    const auto [y1, y2] = std::minmax({y(b.x1, b.y1), y(b.x2, b.y2), y(b.x1, b.y2), y(b.x2, b.y1)});
    out.boxes.push_back(clamped({x1, y1, x2, y2, b.cls}, size));
  }
  return out;
}

// MixUp: the mean of a sample and a second image, with the boxes of both. The second image is letterboxed to
// the size of the sample, scaled, flipped if draw.flip, and cropped at draw.offset. draw.candidates is not
// used, because the caller has already chosen `other`.
inline Sample mixup(const Sample& in, const Sample& other, const MixupDraw& draw) {
  const cv::Size size = in.image.size(), zoomed = mixup_size(size, draw.scale);
  const Letterbox boxed = letterbox(other.image, size);
  Image big;
  cv::resize(boxed.image, big, zoomed);
  if (draw.flip) cv::flip(big, big, 1);
  const cv::Rect part = cv::Rect(draw.offset, size) & cv::Rect({0, 0}, zoomed);
  Image overlay(size, 0);
  big(part).copyTo(overlay(cv::Rect({0, 0}, part.size())));

  for (int y = 0; y < size.height; ++y) {
    const uchar* a = in.image.ptr(y);
    uchar* b = overlay.ptr(y);
    for (int i = 0; i < 3 * size.width; ++i) b[i] = static_cast<uchar>((a[i] + b[i]) >> 1);
  }

  Sample out{overlay, in.boxes};
  const Scale scale{boxed.scale.x * draw.scale, boxed.scale.y * draw.scale};
  for (const Box& b : other.boxes) {
    Box placed = clamped(scaled_shifted(b, scale), zoomed);
    if (draw.flip) placed = mirrored(placed, zoomed.width);
    const Box cut = clamped(scaled_shifted(placed, {1, 1}, -draw.offset.x, -draw.offset.y), size);
    out.boxes.push_back(cut);
  }
  return out;
}

// Applies HSV jitter, flip and letterbox, then drops boxes that are not wider and higher than one pixel. If
// no box is left, returns the input, letterboxed only.
inline Sample train_transform(const Sample& in, const ColourFlipDraw& draw, cv::Size size) {
  const auto boxed = [&](const Sample& s) {
    const Letterbox to = letterbox(s.image, size);
    Sample out{to.image, {}};
    for (const Box& b : s.boxes) out.boxes.push_back(scaled_shifted(b, to.scale));
    return out;
  };
  Sample jittered = in;
  if (draw.hsv) jittered.image = hsv(jittered.image, *draw.hsv);
  if (draw.flip) jittered = flip(jittered);
  Sample out = boxed(jittered);
  const auto small = [](const Box& b) { return !(b.x2 - b.x1 > 1 && b.y2 - b.y1 > 1); };
  out.boxes.erase(std::remove_if(out.boxes.begin(), out.boxes.end(), small), out.boxes.end());
  return out.boxes.empty() ? boxed(in) : out;
}

// Builds a training sample from its random draw, as official YOLOX does. compose() in augment.hpp is the
// counterpart.
template <class Pictures>
void compose(const Pictures& pictures, const SampleDraw& draw, Sample& sample) {
  const cv::Size size = sample.image.size();
  const auto load = [&](std::size_t index) {
    return augment_detail::with_readable(pictures, index, [&](std::size_t i) {
      const ImageRegion piece = pictures.image_region(i, {{0, 0}, pictures.size(i)}, 1);
      Sample loaded{piece.image, {}};
      for (const Box& b : pictures.boxes(i)) loaded.boxes.push_back(scaled_shifted(b, piece.scale));
      const bool cached = piece.scale.x != 1 || piece.scale.y != 1;  // the cache stores resized images
      return cached ? loaded : fit(loaded, size);
    });
  };
  Sample made = load(draw.index);
  if (draw.mosaic) {
    const auto& [centre, others, affine] = *draw.mosaic;
    const std::array<Sample, 4> tiles{made, load(others[0]), load(others[1]), load(others[2])};
    made = random_affine(mosaic(tiles, centre, size), affine, size);
  }
  if (draw.mixup && !made.boxes.empty()) {
    const auto& tried = draw.mixup->candidates;
    const auto found =
        std::find_if(tried.begin(), tried.end(), [&](std::size_t i) { return !pictures.boxes(i).empty(); });
    if (found != tried.end()) made = mixup(made, load(*found), *draw.mixup);
  }
  made = train_transform(made, draw.colour_flip, size);
  made.image.copyTo(sample.image);
  sample.boxes = made.boxes;
}

}  // namespace yolox::official
