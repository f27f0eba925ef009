// SPDX-License-Identifier: Apache-2.0
// Training augmentation of images and boxes: letterbox, mosaic, random affine, MixUp, HSV jitter, flip; by
// flags also vertical flip, quarter turns, blur, grey images and cutout.
//
// Images are BGR, 8 bits per channel (type Image). Boxes are x1, y1, x2, y2 in pixels of their image.
// Coordinates are pixel edges: an image of width W spans 0..W. Sizes are cv::Size, width first.
//
// Method: YOLOX (arXiv 2107.08430, section 2.1 "strong data augmentation") as in the official code
// (data/data_augment.py and data/datasets/mosaicdetection.py). Mosaic: YOLOv4 (arXiv 2004.10934,
// section 3.3). MixUp: Zhang et al. (arXiv 1710.09412).
//
// draw_sample() draws the random parameters, compose() computes the pixels. A draw can therefore be logged,
// changed and replayed. compose() knows the visible part of each image before it reads the image. It decodes
// only this part, at the needed resolution, and resamples it once, directly into the sample. The official
// code resizes, pastes, warps, mixes, jitters and flips, with up to four resamplings; docs/official.md lists
// the effects of this that are corrected here.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <vector>

#include "base/random.hpp"
#include "images/image.hpp"
#include "images/pixels.hpp"

namespace yolox {

// ---- settings ----

// Settings of the augmentation, with the defaults of yolox-s to yolox-x. config.hpp declares flags for some
// of them; models.hpp has mosaic_prob, mosaic_scale_lo, mosaic_scale_hi and mixup_prob of each model.
struct AugmentConfig {
  double mosaic_prob = 1;                             // probability of mosaic
  double mosaic_scale_lo = 0.1, mosaic_scale_hi = 2;  // range of the scale of a mosaic
  double degrees = 10;                                // mosaic: maximum rotation, either direction
  double translate = 0.1;                             // mosaic: maximum shift as a fraction of the input size
  double shear = 2;                                   // mosaic: maximum shear in degrees, below 45
  double mixup_prob = 1;                              // probability of MixUp in a mosaic
  double mixup_scale_lo = 0.5, mixup_scale_hi = 1.5;  // MixUp: range of the scale of the second image
  int mixup_tries = 20;    // candidates for the second image of MixUp; no MixUp if none of them has boxes
  double hsv_prob = 1;     // probability of HSV jitter
  double hsv_h = 5;        // maximum change of hue in units of 2 degrees
  double hsv_s = 30;       // maximum change of saturation (0..255)
  double hsv_v = 30;       // maximum change of value (0..255)
  double flip_prob = 0.5;  // probability of a horizontal flip
  double vflip_prob = 0;   // probability of a vertical flip
  double turn_prob = 0;    // probability of a rotation by 90, 180 or 270 degrees
  double blur_prob = 0;    // probability of a Gaussian blur, sigma 0.5 to 2 pixels
  double grey_prob = 0;    // probability of a grey image
  double cutout_prob = 0;  // probability of a grey rectangle of 10 to 40 % of width and height
};

// ---- draws ----

// Random parameters of the HSV jitter.
struct HsvDraw {
  double h, s, v;  // added to hue (units of 2 degrees), saturation and value (0..255); truncated to integers
};

// Random parameters of the affine transformation.
struct AffineDraw {
  double angle;             // degrees, anticlockwise
  double scale;             // scale factor
  double shear_x, shear_y;  // degrees
  double shift_x, shift_y;  // fractions of the output width and height
};

// Random parameters of mosaic.
struct MosaicDraw {
  cv::Point centre;                   // common corner of the four images, on a canvas of twice the input size
  std::array<std::size_t, 3> others;  // top right, bottom left, bottom right; the sample is top left
  AffineDraw affine;
};

// Random parameters of MixUp.
struct MixupDraw {
  double scale;      // scale of the second image
  bool flip;         // horizontal flip of the second image
  cv::Point offset;  // top left corner of the crop, if the second image exceeds the input size
  std::vector<std::size_t> candidates;  // the first candidate with boxes is the second image
};

// Random parameters of the augmentations that are off by default.
struct ExtraDraw {
  bool flip_vertical = false;
  int turns = 0;    // of each image, in quarters, clockwise
  double blur = 0;  // standard deviation in pixels; 0: none
  bool grey = false;
  cv::Rect2d cutout;  // in fractions of the sample without its letterbox border; empty: none
};

// All random parameters of one training sample.
struct SampleDraw {
  std::size_t index;
  std::optional<MosaicDraw> mosaic;
  std::optional<MixupDraw> mixup;  // only with mosaic
  std::optional<HsvDraw> hsv = {};
  bool flip = false;  // horizontal
  ExtraDraw extra = {};
};

inline HsvDraw draw_hsv(Rng& rng, const AugmentConfig& c) {
  const auto gain = [&](double range) {
    const double value = rng.uniform(-range, range);
    return rng.bernoulli(0.5) ? value : 0.0;
  };
  return {gain(c.hsv_h), gain(c.hsv_s), gain(c.hsv_v)};  // braces: evaluated from left to right
}

inline AffineDraw draw_affine(Rng& rng, const AugmentConfig& c) {
  return {rng.uniform(-c.degrees, c.degrees),     rng.uniform(c.mosaic_scale_lo, c.mosaic_scale_hi),
          rng.uniform(-c.shear, c.shear),         rng.uniform(-c.shear, c.shear),
          rng.uniform(-c.translate, c.translate), rng.uniform(-c.translate, c.translate)};
}

// n: number of images in the data set. size: input size of the network.
inline MosaicDraw draw_mosaic(Rng& rng, const AugmentConfig& c, std::size_t n, cv::Size size) {
  MosaicDraw d;
  d.centre.y = static_cast<int>(rng.uniform(0.5 * size.height, 1.5 * size.height));
  d.centre.x = static_cast<int>(rng.uniform(0.5 * size.width, 1.5 * size.width));
  for (auto& i : d.others) i = rng.randint(0, n - 1);
  d.affine = draw_affine(rng, c);
  return d;
}

// Returns the size of the second image of MixUp after letterbox and scaling, at least 1 x 1.
inline cv::Size mixup_size(cv::Size size, double scale) {
  return {std::max(1, static_cast<int>(size.width * scale)),
          std::max(1, static_cast<int>(size.height * scale))};
}

inline MixupDraw draw_mixup(Rng& rng, const AugmentConfig& c, std::size_t n, cv::Size size) {
  MixupDraw d;
  d.scale = rng.uniform(c.mixup_scale_lo, c.mixup_scale_hi);
  d.flip = rng.bernoulli(0.5);
  for (int i = 0; i < c.mixup_tries; ++i) d.candidates.push_back(rng.randint(0, n - 1));
  const cv::Size room = mixup_size(size, d.scale) - size;
  if (room.height > 0) d.offset.y = static_cast<int>(rng.randint(0, room.height - 1));
  if (room.width > 0) d.offset.x = static_cast<int>(rng.randint(0, room.width - 1));
  return d;
}

inline ExtraDraw draw_extra(Rng& rng, const AugmentConfig& c) {
  ExtraDraw d;
  d.flip_vertical = rng.bernoulli(c.vflip_prob);
  if (rng.bernoulli(c.turn_prob)) d.turns = static_cast<int>(rng.randint(1, 3));
  if (rng.bernoulli(c.blur_prob)) d.blur = rng.uniform(0.5, 2);
  d.grey = rng.bernoulli(c.grey_prob);
  if (rng.bernoulli(c.cutout_prob)) {
    d.cutout.width = rng.uniform(0.1, 0.4);
    d.cutout.height = rng.uniform(0.1, 0.4);
    d.cutout.x = rng.uniform(0, 1 - d.cutout.width);
    d.cutout.y = rng.uniform(0, 1 - d.cutout.height);
  }
  return d;  // append new draws above this line, so that earlier ones keep their numbers
}

// Draws the random parameters of sample `index` out of n. Depends only on the arguments, not on the contents
// of the data set. mosaic_phase: false in the last epochs, which have neither mosaic nor MixUp.
inline SampleDraw draw_sample(Rng& rng, const AugmentConfig& c, std::size_t n, std::size_t index,
                              cv::Size size, bool mosaic_phase) {
  SampleDraw d{index, {}, {}, {}};
  if (mosaic_phase && rng.bernoulli(c.mosaic_prob)) {
    d.mosaic = draw_mosaic(rng, c, n, size);
    if (rng.bernoulli(c.mixup_prob)) d.mixup = draw_mixup(rng, c, n, size);
  }
  if (rng.bernoulli(c.hsv_prob)) d.hsv = draw_hsv(rng, c);
  d.flip = rng.bernoulli(c.flip_prob);
  d.extra = draw_extra(rng, c);
  return d;
}

// ---- transformations ----

// Returns the affine matrix (rotation, scale, shear, shift) from canvas to output coordinates, both in pixel
// edges. Rotation and scale are about the top left corner of the canvas, not about its centre, because the
// official code does the same and reached the published accuracy with it.
inline cv::Matx23d affine_matrix(const AffineDraw& d, cv::Size size) {
  const auto radians = [](double degrees) { return degrees * CV_PI / 180; };
  const double a = d.scale * std::cos(radians(d.angle)), b = d.scale * std::sin(radians(d.angle));
  const double shear_x = std::tan(radians(d.shear_x)), shear_y = std::tan(radians(d.shear_y));
  return {a - shear_y * b, b + shear_y * a, d.shift_x * size.width,  //
          shear_x * a - b, shear_x * b + a, d.shift_y * size.height};
}

// Affine transformation of coordinates in pixel edges.
struct Affine {
  cv::Matx23d m{1, 0, 0, 0, 1, 0};
  cv::Point2d operator()(double x, double y) const {
    return {m(0, 0) * x + m(0, 1) * y + m(0, 2), m(1, 0) * x + m(1, 1) * y + m(1, 2)};
  }
  // Returns the composition: first this transformation, then n.
  Affine then(const Affine& n) const {
    return {n.m * cv::Matx33d(m(0, 0), m(0, 1), m(0, 2), m(1, 0), m(1, 1), m(1, 2), 0, 0, 1)};
  }
  // Returns the axis-aligned bounding box of the transformed rectangle.
  cv::Rect2d bounding_box(const cv::Rect2d& r) const {
    const auto a = (*this)(r.x, r.y), b = (*this)(r.x + r.width, r.y), c = (*this)(r.x, r.y + r.height),
               d = (*this)(r.x + r.width, r.y + r.height);
    const auto [x1, x2] = std::minmax({a.x, b.x, c.x, d.x});
    const auto [y1, y2] = std::minmax({a.y, b.y, c.y, d.y});
    return {x1, y1, x2 - x1, y2 - y1};
  }
};
inline Affine inverse(const Affine& map) {
  cv::Matx23d m;
  cv::invertAffineTransform(map.m, m);
  return {m};
}
inline Affine scale_shift(Scale scale, double dx, double dy) { return {{scale.x, 0, dx, 0, scale.y, dy}}; }
inline Affine flip(cv::Size2d size, bool horizontal, bool vertical = false) {
  return {{horizontal ? -1. : 1., 0, horizontal ? size.width : 0, 0, vertical ? -1. : 1.,
           vertical ? size.height : 0}};
}
// Returns the clockwise rotation of an image by quarters of a turn, from image to rotated image.
inline Affine turn(cv::Size picture, int quarters) {
  const double w = picture.width, h = picture.height;
  if (quarters == 1) return {{0, -1, h, 1, 0, 0}};
  if (quarters == 2) return {{-1, 0, w, 0, -1, h}};
  return quarters == 3 ? Affine{{0, 1, 0, -1, 0, w}} : Affine{};
}

// Position of an image in the sample.
struct Placement {
  Affine picture_to_canvas;  // quarter turns, scale, shift and flip only
  Affine canvas_to_sample;
  cv::Rect2d canvas;  // the image is clipped to this rectangle
};

// ---- samples ----

namespace augment_detail {

inline cv::Rect2d whole(cv::Size size) { return {0, 0, double(size.width), double(size.height)}; }

// Draws an image into the sample and appends its boxes, clipped. Throws what pictures.image_region() throws.
template <class Pictures>
void place(const Pictures& pictures, std::size_t index, const Placement& p, Sample& sample) {
  const cv::Size size = pictures.size(index);
  const cv::Rect2d frame = whole(sample.image.size());
  const Affine picture_to_sample = p.picture_to_canvas.then(p.canvas_to_sample);
  const Affine sample_to_picture = inverse(picture_to_sample);
  const cv::Rect2d on_canvas = p.canvas & p.picture_to_canvas.bounding_box(whole(size));
  const cv::Rect2d visible =
      sample_to_picture.bounding_box(p.canvas_to_sample.bounding_box(on_canvas) & frame) &
      inverse(p.picture_to_canvas).bounding_box(on_canvas);
  if (!visible.empty()) {
    const cv::Matx23d& m = picture_to_sample.m;
    const double zoom = std::sqrt(std::abs(m(0, 0) * m(1, 1) - m(0, 1) * m(1, 0)));
    const double margin =
        2 / std::min(zoom, 1.0);  // pixels that bilinear interpolation reads beside `visible`
    const int x1 = std::max(0, int(std::floor(visible.x - margin)));
    const int y1 = std::max(0, int(visible.y - margin));
    const int x2 = int(std::min<double>(size.width, std::ceil(visible.x + visible.width + margin)));
    const int y2 = int(std::min<double>(size.height, std::ceil(visible.y + visible.height + margin)));
    const ImageRegion region = pictures.image_region(index, {x1, y1, x2 - x1, y2 - y1}, zoom);
    warp_image(sample.image, region, sample_to_picture.m, inverse(p.canvas_to_sample).m, on_canvas);
  }
  for (const std::vector<Box>* boxes : {&pictures.boxes(index), &pictures.ignored(index)})
    for (const Box& b : *boxes) {
      const cv::Rect2d box_on_canvas =
          p.picture_to_canvas.bounding_box({b.x1, b.y1, b.x2 - b.x1, b.y2 - b.y1}) & p.canvas;
      const cv::Rect2d box = p.canvas_to_sample.bounding_box(box_on_canvas) & frame;
      if (!box_on_canvas.empty() && !box.empty())
        sample.boxes.push_back({box.x, box.y, box.x + box.width, box.y + box.height, b.cls});
    }
}

// Jitters the colours of a part of an image, blurs it, turns it grey and hides a rectangle of it, as drawn.
// part: the image without the border of the letterbox; of a mosaic, all of it. Returns the hidden pixels.
inline cv::Rect2d change_pixels(Image& image, const cv::Rect& part, const std::optional<HsvDraw>& hsv,
                                const ExtraDraw& draw) {
  cv::Mat pixels = image(part);
  if (hsv && (int(hsv->h) || int(hsv->s) || int(hsv->v)))
    for (int y = 0; y < pixels.rows; ++y)
      hsv_jitter(pixels.ptr(y), pixels.cols, float(int(hsv->h)), float(int(hsv->s)), float(int(hsv->v)));
  if (draw.blur > 0)
    cv::GaussianBlur(pixels, pixels, {0, 0}, draw.blur, 0, cv::BORDER_REPLICATE | cv::BORDER_ISOLATED);
  if (draw.grey) {
    cv::Mat grey;
    cv::cvtColor(pixels, grey, cv::COLOR_BGR2GRAY);
    cv::cvtColor(grey, pixels, cv::COLOR_GRAY2BGR);
  }
  const cv::Rect2d& c = draw.cutout;
  const cv::Rect hidden(part.x + int(c.x * part.width), part.y + int(c.y * part.height),
                        int(c.width * part.width), int(c.height * part.height));
  image(hidden).setTo(cv::Scalar::all(border_grey));
  return hidden;
}

}  // namespace augment_detail

// Composes a training sample from its draw. Draws into sample.image, whose size must be the input size, and
// overwrites sample.boxes. Drops boxes of at most one pixel in width or height, and boxes of which cutout
// hides more than 0.7. `pictures` needs these functions:
//   - size(i) -> cv::Size: size of image i; does not read the file
//   - boxes(i) -> const std::vector<Box>&: boxes in pixels of image i
//   - ignored(i) -> const std::vector<Box>&: regions of the class kIgnoredRegion, which become boxes of the
//     sample
//   - image_region(i, part, scale) -> ImageRegion: at least the rectangle `part`, at a scale of at least
//     `scale`
//   - replacement_index(i, error, tries) -> index: replacement for image i after image_region() threw this
//     ImageError; may throw
template <class Pictures>
void compose(const Pictures& pictures, const SampleDraw& draw, Sample& sample) {
  const cv::Size size = sample.image.size();
  const auto flipped = [&](cv::Size area) { return flip(area, draw.flip, draw.extra.flip_vertical); };
  const auto turn_picture = [&](std::size_t index) { return turn(pictures.size(index), draw.extra.turns); };
  const auto fitted = [&](std::size_t index) {
    const cv::Size picture = pictures.size(index);
    return fit_into(draw.extra.turns % 2 ? cv::Size(picture.height, picture.width) : picture, size,
                    /*truncate=*/false);
  };
  const auto place_image = [&](std::size_t index, Sample& into, auto placement) {
    for (std::size_t tries = 1;; ++tries) {
      try {
        return augment_detail::place(pictures, index, placement(index), into);
      } catch (const ImageError& e) {
        index = pictures.replacement_index(index, e, tries);
      }
    }
  };
  sample.image.setTo(cv::Scalar::all(border_grey));
  sample.boxes.clear();

  cv::Rect without_border({0, 0}, size);
  if (!draw.mosaic) {
    // Flip and jitter exclude the grey border, because evaluation has the same border at the same place.
    place_image(draw.index, sample, [&](std::size_t i) {
      const Fit to = fitted(i);
      without_border = {{0, 0}, to.size};
      return Placement{turn_picture(i).then(scale_shift(to.scale, 0, 0)).then(flipped(to.size)), Affine{},
                       augment_detail::whole(size)};
    });
  } else {
    // Four images, each letterboxed to `size`, around the mosaic centre on a canvas of twice the size.
    const auto& [centre, others, affine] = *draw.mosaic;
    const std::array<std::size_t, 4> tiles{draw.index, others[0], others[1], others[2]};
    const Affine canvas_to_sample = Affine{affine_matrix(affine, size)}.then(flipped(size));
    for (std::size_t k = 0; k < 4; ++k) {
      place_image(tiles[k], sample, [&, centre = centre](std::size_t i) {
        const Fit to = fitted(i);
        const int x = k % 2 == 0 ? centre.x - to.size.width : centre.x;
        const int y = k < 2 ? centre.y - to.size.height : centre.y;
        return Placement{turn_picture(i).then(scale_shift(to.scale, x, y)), canvas_to_sample,
                         augment_detail::whole(size * 2)};
      });
    }
  }

  if (draw.mixup) {
    // Blends with a second image: letterboxed, scaled with its border, flipped, cropped at `offset`.
    const MixupDraw& mix_in = *draw.mixup;
    const auto found = std::find_if(mix_in.candidates.begin(), mix_in.candidates.end(),
                                    [&](std::size_t i) { return !pictures.boxes(i).empty(); });
    if (found != mix_in.candidates.end()) {
      const cv::Size zoomed = mixup_size(size, mix_in.scale);
      const Affine canvas_to_sample =
          flip(zoomed, mix_in.flip).then(scale_shift({1, 1}, -mix_in.offset.x, -mix_in.offset.y));
      Sample other{Image(size, border_grey), {}};
      place_image(*found, other, [&](std::size_t i) {
        const Scale fit = fitted(i).scale;
        const Scale scale{fit.x * zoomed.width / size.width, fit.y * zoomed.height / size.height};
        return Placement{turn_picture(i).then(scale_shift(scale, 0, 0)), canvas_to_sample.then(flipped(size)),
                         augment_detail::whole(zoomed)};
      });
      average_images(sample.image, other.image);
      sample.boxes.insert(sample.boxes.end(), other.boxes.begin(), other.boxes.end());
    }
  }

  const cv::Rect2d hidden = augment_detail::change_pixels(sample.image, without_border, draw.hsv, draw.extra);
  const auto lost = [&](const Box& b) {
    const cv::Rect2d box{b.x1, b.y1, b.x2 - b.x1, b.y2 - b.y1};
    return !(box.width > 1 && box.height > 1) || (box & hidden).area() > 0.7 * box.area();
  };
  std::erase_if(sample.boxes, lost);
}

}  // namespace yolox
