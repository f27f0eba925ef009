// Pictures and boxes on their way into training: letterbox, HSV jitter, flip, mosaic, random affine, mixup.
//
// Legend: pictures are BGR, 8 bits a channel (the type Image says so); they become float later, elsewhere.
//         Boxes are x1, y1, x2, y2 in pixels of the picture they belong to; they speak of pixel edges, so
//         that a picture W wide spans 0..W. Sizes are cv::Size, width first.
// Source: YOLOX (arXiv 2107.08430, section 2.1 "strong data augmentation") in the form of its code,
//         data/data_augment.py and data/datasets/mosaicdetection.py; mosaic is from YOLOv4 (arXiv 2004.10934,
//         section 3.3), mixup from Zhang et al. (arXiv 1710.09412).
//
// Numbers are drawn first (draw_...), pixels follow from them: a draw can be written down, changed, replayed.
//   load(index) -> Sample -> mosaic -> random_affine -> mixup -> train_transform -> batch
//
// `official_quirks` brings back, pixel for pixel, what the official code does but hardly meant to do:
//   quirk                                                    otherwise
//   annotations hanging out at the left or top are moved     cut
//   sizes are truncated, so pictures may be resized twice    rounded; boxes follow the sides as rounded
//   affine boxes are up to half a pixel off the picture      pixel edges are mapped, as resize does
//   mixup truncates; black where the picture ends            rounds; grey as everywhere
//   no mixup on a mosaic without boxes                       mixed as any other
//   no jitter, no flip for a picture without boxes           treated as any other
//   all boxes too small: picture and boxes as before         the picture has no boxes
//   boxes without area are carried along                     dropped at once
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <opencv2/core.hpp>
#include <opencv2/core/ocl.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <vector>

#include "error.hpp"

namespace yolox {

// Grey of every pixel that no picture covers.
constexpr uchar border_grey = 114;

// OpenCV's own threads would compete with the workers, each of which already has a core. Call it first in
// main(). (The OpenCL switch holds for the calling thread; others never turn it on as long as they use
// cv::Mat only.)
inline void opencv_single_thread() {
  cv::setNumThreads(0);
  cv::ocl::setUseOpenCL(false);
}

// ---- types ----

// A picture: BGR, uint8; as every cv::Mat a reference, copies share pixels. A plain cv::Mat_<cv::Vec3b>
// accepts float pictures and converts them: one in 0..1 turns black. Here that does not compile, or throws if
// untyped.
struct Image : cv::Mat_<cv::Vec3b> {
  using Pixels = cv::Mat_<cv::Vec3b>;
  Image() = default;
  Image(cv::Size extent, uchar grey) : Pixels(extent, cv::Vec3b::all(grey)) {}
  Image(const Pixels& pixels) : Pixels(pixels) {}
  template <class Other>
  Image(const cv::Mat_<Other>&) = delete;
  Image(const cv::Mat& mat) : Pixels(checked(mat)) {}

 private:
  static const cv::Mat& checked(const cv::Mat& mat) {
    check(!mat.empty(), "picture is empty; was the file read?");
    check(mat.type() == CV_8UC3, "picture is ", cv::typeToString(mat.type()),
          ", augmentation takes CV_8UC3 (8-bit BGR); make it so before, and convert to float after it");
    return mat;
  }
};

struct Box {
  double x1, y1, x2, y2;
  int cls;  // 0..classes-1
};

struct Sample {
  Image image;
  std::vector<Box> boxes;  // as many as there are: nothing here cuts the list
};

struct Scale {
  double x, y;  // from the pixels of a picture to those of its resized copy
};

// ---- random numbers ----

// Numbers that depend on (seed, epoch, index of the sample) and on nothing else: not on the thread, the rank,
// the number of workers or the standard library. The three are hashed to a key; number k is SplitMix64's
// finaliser of key + k * golden (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014).
struct Rng {
  Rng(std::uint64_t seed, std::uint64_t epoch, std::uint64_t index)
      : key(mix((mix((mix(seed + golden) ^ epoch) + golden) ^ index) + golden)) {}

  std::uint64_t next() { return mix(key + ++count * golden); }

  // In [lo, hi). fma rounds once by definition, where the compiler might otherwise choose.
  double uniform(double lo, double hi) {
    return std::fma(hi - lo, static_cast<double>(next() >> 11) * 0x1p-53, lo);
  }

  // In [lo, hi], both included; lo <= hi. The remainder's bias is below 2^-32 for ranges below 2^32.
  std::int64_t randint(std::int64_t lo, std::int64_t hi) {
    return lo + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(hi - lo + 1));
  }

  // True with probability p.
  bool bernoulli(double p) { return uniform(0, 1) < p; }

 private:
  static constexpr std::uint64_t golden = 0x9E3779B97F4A7C15;
  static std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  std::uint64_t key, count = 0;
};

// ---- settings ----

// Defaults: yolox-s to x. nano and tiny: mixup_prob 0, mosaic_scale 0.5 to 1.5; nano also: mosaic_prob 0.5.
struct AugmentConfig {
  double mosaic_prob = 1;        // share of samples made of four pictures; the others are one letterboxed
  double mosaic_scale_lo = 0.1;  // zoom of the mosaic, from ...
  double mosaic_scale_hi = 2;    // ... to
  double degrees = 10;           // rotation of the mosaic, in +-degrees
  double translate = 0.1;        // shift of the mosaic, in +-parts of the network size
  double shear = 2;              // shear of the mosaic along x and along y, in +-degrees
  double mixup_prob = 1;         // share of mosaics mixed with another picture; 0 = off
  double mixup_scale_lo = 0.5;   // zoom of the picture mixed in, from ...
  double mixup_scale_hi = 1.5;   // ... to
  int mixup_tries = 20;          // pictures tried until one has boxes; if none has, the mosaic stays unmixed
  double hsv_prob = 1;           // share of samples with colour jitter
  double hsv_h = 5;        // hue, in +-units of 2 degrees; it, s and v are each left alone half the time
  double hsv_s = 30;       // saturation, in +-levels of 256
  double hsv_v = 30;       // value, in +-levels of 256
  double flip_prob = 0.5;  // share of samples mirrored left to right
  bool official_quirks = false;  // true: the official code's oddities too, see the top of this file
};

// Throws, naming the setting, if a value makes no sense.
inline void check_augment_config(const AugmentConfig& c) {
  const auto in = [](const char* name, double value, double lo, double hi) {
    check(value >= lo && value <= hi, "augmentation: ", name, " is ", value, "; give ", lo, " to ", hi);
  };
  in("mosaic_prob", c.mosaic_prob, 0, 1);
  in("mosaic_scale_lo", c.mosaic_scale_lo, 0.01, 100);
  in("mosaic_scale_hi", c.mosaic_scale_hi, c.mosaic_scale_lo, 100);
  in("degrees", c.degrees, 0, 180);
  in("translate", c.translate, 0, 1);
  in("shear", c.shear, 0, 44);  // at 45 along both axes the picture collapses into a line
  in("mixup_prob", c.mixup_prob, 0, 1);
  in("mixup_scale_lo", c.mixup_scale_lo, 0.01, 100);
  in("mixup_scale_hi", c.mixup_scale_hi, c.mixup_scale_lo, 100);
  in("mixup_tries", c.mixup_tries, 1, 1000);
  in("hsv_prob", c.hsv_prob, 0, 1);
  in("hsv_h", c.hsv_h, 0, 90);
  in("hsv_s", c.hsv_s, 0, 255);
  in("hsv_v", c.hsv_v, 0, 255);
  in("flip_prob", c.flip_prob, 0, 1);
}

// ---- draws ----

struct HsvDraw {
  double h, s, v;  // added to hue (in 2 degrees), saturation and value (of 256), truncated to whole numbers
};

struct AffineDraw {
  double angle;             // degrees, positive turns anticlockwise
  double scale;             // zoom
  double shear_x, shear_y;  // degrees
  double shift_x, shift_y;  // in parts of the output's width and height
};

struct MosaicDraw {
  cv::Point centre;                   // where the four pictures meet, on a canvas of twice the network size
  std::array<std::size_t, 3> others;  // top right, bottom left, bottom right; top left is the sample itself
  AffineDraw affine;
};

struct MixupDraw {
  double scale;      // zoom of the picture mixed in
  bool flip;         // mirror it
  cv::Point offset;  // corner of the part that is used, where it is larger than the network size
  std::vector<std::size_t> candidates;  // the first one that has boxes is taken
};

struct ColourFlipDraw {
  std::optional<HsvDraw> hsv;
  bool flip = false;
};

// All that chance decides about one training sample.
struct SampleDraw {
  std::size_t index;
  std::optional<MosaicDraw> mosaic;
  std::optional<MixupDraw> mixup;  // only ever with mosaic
  ColourFlipDraw colour_flip;
};

inline HsvDraw draw_hsv(Rng& rng, const AugmentConfig& c) {
  const auto gain = [&](double range) {
    const double value = rng.uniform(-range, range);
    return rng.bernoulli(0.5) ? value : 0.0;
  };
  return {gain(c.hsv_h), gain(c.hsv_s), gain(c.hsv_v)};  // in this order: the language says so for braces
}

inline AffineDraw draw_affine(Rng& rng, const AugmentConfig& c) {
  return {rng.uniform(-c.degrees, c.degrees),     rng.uniform(c.mosaic_scale_lo, c.mosaic_scale_hi),
          rng.uniform(-c.shear, c.shear),         rng.uniform(-c.shear, c.shear),
          rng.uniform(-c.translate, c.translate), rng.uniform(-c.translate, c.translate)};
}

// n: number of pictures to choose from; size: of the network.
inline MosaicDraw draw_mosaic(Rng& rng, const AugmentConfig& c, std::size_t n, cv::Size size) {
  MosaicDraw d;
  d.centre.y = static_cast<int>(rng.uniform(0.5 * size.height, 1.5 * size.height));
  d.centre.x = static_cast<int>(rng.uniform(0.5 * size.width, 1.5 * size.width));
  for (auto& i : d.others) i = rng.randint(0, n - 1);
  d.affine = draw_affine(rng, c);
  return d;
}

// The picture mixed in, letterboxed to the network size and zoomed: at least a pixel each way.
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

// Depends on the numbers given and on nothing that the data holds. mosaic_phase: false in the last epochs,
// which see whole pictures only (no mosaic, no mixup).
inline SampleDraw draw_sample(Rng& rng, const AugmentConfig& c, std::size_t n, std::size_t index,
                              cv::Size size, bool mosaic_phase) {
  check(index < n, "sample ", index, " of ", n, " was asked for; is the sampler made for this data set?");
  SampleDraw d{index, {}, {}, {}};
  if (mosaic_phase && rng.bernoulli(c.mosaic_prob)) {
    d.mosaic = draw_mosaic(rng, c, n, size);
    if (rng.bernoulli(c.mixup_prob)) d.mixup = draw_mixup(rng, c, n, size);
  }
  if (rng.bernoulli(c.hsv_prob)) d.colour_flip.hsv = draw_hsv(rng, c);
  d.colour_flip.flip = rng.bernoulli(c.flip_prob);
  return d;
}

// ---- boxes ----

inline bool has_area(const Box& b) { return b.x2 > b.x1 && b.y2 > b.y1; }

inline Box scaled_shifted(const Box& b, Scale scale, double dx = 0, double dy = 0) {
  return {b.x1 * scale.x + dx, b.y1 * scale.y + dy, b.x2 * scale.x + dx, b.y2 * scale.y + dy, b.cls};
}

inline Box mirrored(const Box& b, double width) { return {width - b.x2, b.y1, width - b.x1, b.y2, b.cls}; }

// The part of the box inside a picture of this size; what is outside becomes a line or point on its edge.
inline Box clamped(const Box& b, cv::Size size) {
  const auto x = [&](double v) { return std::clamp(v, 0.0, static_cast<double>(size.width)); };
  const auto y = [&](double v) { return std::clamp(v, 0.0, static_cast<double>(size.height)); };
  return {x(b.x1), y(b.y1), x(b.x2), y(b.y2), b.cls};
}

// Without quirks a box that has lost its area is gone.
inline void add_box(std::vector<Box>& boxes, const Box& box, bool official_quirks) {
  if (official_quirks || has_area(box)) boxes.push_back(box);
}

// An annotation's corner, width and height -> the box inside a picture of this size; nothing if none is left.
// Quirk: width and height count from the corner already cut, and a box without width or height stays.
inline std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size,
                                   bool official_quirks) {
  const double x1 = std::max(0.0, x), y1 = std::max(0.0, y);
  const double x2 = std::min<double>(size.width, (official_quirks ? x1 : x) + std::max(0.0, w));
  const double y2 = std::min<double>(size.height, (official_quirks ? y1 : y) + std::max(0.0, h));
  const Box box{x1, y1, x2, y2, cls};
  if (official_quirks ? x2 < x1 || y2 < y1 : !has_area(box)) return {};
  return box;
}

// ---- pictures ----

// Colour jitter. Hue goes round, saturation and value stop at 0 and 255.
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

// Mirror left to right.
inline Sample flip(const Sample& in) {
  Sample out;
  cv::flip(in.image, out.image, 1);
  for (const Box& b : in.boxes) out.boxes.push_back(mirrored(b, in.image.cols));
  return out;
}

struct Fit {
  cv::Size size;
  Scale scale;  // the factors to it
};
// The largest size with the picture's shape that fits into `room`.
inline Fit fit_into(cv::Size picture, cv::Size room, bool official_quirks) {
  check(!picture.empty(), "picture is empty; was the file read?");
  const double r = std::min(1.0 * room.height / picture.height, 1.0 * room.width / picture.width);
  const auto pixels = [&](int length) {
    const double exact = length * r;
    return std::max(1, static_cast<int>(official_quirks ? exact : std::round(exact)));
  };
  const cv::Size size(pixels(picture.width), pixels(picture.height));
  if (official_quirks) return {size, {r, r}};
  return {size, {1.0 * size.width / picture.width, 1.0 * size.height / picture.height}};
}

// Resized to fit into `room`, boxes with it: what `load` gives below. Shares pixels if nothing is to do.
inline Sample fit(const Sample& in, cv::Size room, bool official_quirks) {
  const Fit to = fit_into(in.image.size(), room, official_quirks);
  Sample out{in.image, {}};
  if (to.size != in.image.size()) cv::resize(in.image, out.image, to.size);
  for (const Box& b : in.boxes) out.boxes.push_back(scaled_shifted(b, to.scale));
  return out;
}

struct Letterbox {
  Image image;
  Scale scale;  // a box found in `image`, divided by this, is a box in the original
};
// Fitted into the top left corner of a grey picture of this size: all that evaluation does to a picture.
// Shares pixels if nothing is to do.
inline Letterbox letterbox(const Image& image, cv::Size size, bool official_quirks) {
  const Fit to = fit_into(image.size(), size, official_quirks);
  if (image.size() == size) return {image, to.scale};
  Image canvas(size, border_grey);
  cv::resize(image, canvas(cv::Rect({0, 0}, to.size)), to.size);
  return {canvas, to.scale};
}

// Four pictures around `centre` on a grey canvas of twice `size`, each fitted into `size` and cut where it
// leaves the canvas. Order: top left, top right, bottom left, bottom right.
inline Sample mosaic(const std::array<Sample, 4>& tiles, cv::Point centre, cv::Size size,
                     bool official_quirks) {
  const cv::Size canvas_size = size * 2;
  Sample out{Image(canvas_size, border_grey), {}};
  for (std::size_t i = 0; i < 4; ++i) {
    const Sample& tile = tiles[i];
    const Fit to = fit_into(tile.image.size(), size, official_quirks);
    const bool left = i % 2 == 0, top = i < 2;
    const cv::Point corner(left ? centre.x - to.size.width : centre.x,
                           top ? centre.y - to.size.height : centre.y);
    const cv::Rect whole(corner, to.size), visible = whole & cv::Rect({0, 0}, canvas_size);
    if (visible == whole) {
      cv::resize(tile.image, out.image(visible), to.size);
    } else {
      const Image resized = fit({tile.image, {}}, size, official_quirks).image;
      resized(visible - corner).copyTo(out.image(visible));
    }
    for (const Box& b : tile.boxes) {
      const Box placed = scaled_shifted(b, to.scale, corner.x, corner.y);
      add_box(out.boxes, clamped(placed, canvas_size), official_quirks);
    }
  }
  return out;
}

// Matrix of random_affine, from positions in the canvas to positions in the output, both in pixel edges.
inline cv::Matx23d affine_matrix(const AffineDraw& d, cv::Size size) {
  const auto radians = [](double degrees) { return degrees * CV_PI / 180; };
  const double a = d.scale * std::cos(radians(d.angle)), b = d.scale * std::sin(radians(d.angle));
  const double shear_x = std::tan(radians(d.shear_x)), shear_y = std::tan(radians(d.shear_y));
  return {a - shear_y * b, b + shear_y * a, d.shift_x * size.width,  //
          shear_x * a - b, shear_x * b + a, d.shift_y * size.height};
}

// Rotation, zoom, shear and shift of a mosaic into a picture of this size; a box becomes the upright box
// around its four turned corners. Rotation and zoom are about the canvas' top left corner, not its centre:
// odd, but the official accuracy was reached so, hence it is no quirk to be switched off.
inline Sample random_affine(const Sample& in, const AffineDraw& draw, cv::Size size, bool official_quirks) {
  const cv::Matx23d m = affine_matrix(draw, size);
  cv::Matx23d pixels = m;  // warpAffine speaks of pixel centres: edge position minus a half
  if (!official_quirks) {
    for (int row : {0, 1}) pixels(row, 2) += 0.5 * (m(row, 0) + m(row, 1)) - 0.5;
  }
  Sample out;
  cv::warpAffine(in.image, out.image, pixels, size, cv::INTER_LINEAR, cv::BORDER_CONSTANT,
                 cv::Scalar::all(border_grey));
  for (const Box& b : in.boxes) {
    const auto x = [&](double px, double py) { return m(0, 0) * px + m(0, 1) * py + m(0, 2); };
    const auto y = [&](double px, double py) { return m(1, 0) * px + m(1, 1) * py + m(1, 2); };
    const auto [x1, x2] = std::minmax({x(b.x1, b.y1), x(b.x2, b.y2), x(b.x1, b.y2), x(b.x2, b.y1)});
    const auto [y1, y2] = std::minmax({y(b.x1, b.y1), y(b.x2, b.y2), y(b.x1, b.y2), y(b.x2, b.y1)});
    add_box(out.boxes, clamped({x1, y1, x2, y2, b.cls}, size), official_quirks);
  }
  return out;
}

// Mean of a sample and another picture, which is letterboxed to the sample's size, zoomed, maybe mirrored,
// and cut at `offset`. All boxes of both. draw.candidates plays no part: the caller has chosen `other`.
inline Sample mixup(const Sample& in, const Sample& other, const MixupDraw& draw, bool official_quirks) {
  const cv::Size size = in.image.size(), zoomed = mixup_size(size, draw.scale);
  const Letterbox boxed = letterbox(other.image, size, official_quirks);
  Image big;
  cv::resize(boxed.image, big, zoomed);
  if (draw.flip) cv::flip(big, big, 1);
  const cv::Rect part = cv::Rect(draw.offset, size) & cv::Rect({0, 0}, zoomed);
  Image overlay(size, official_quirks ? 0 : border_grey);
  big(part).copyTo(overlay(cv::Rect({0, 0}, part.size())));

  const int half = official_quirks ? 0 : 1;
  for (int y = 0; y < size.height; ++y) {
    const uchar* a = in.image.ptr(y);
    uchar* b = overlay.ptr(y);
    for (int i = 0; i < 3 * size.width; ++i) b[i] = static_cast<uchar>((a[i] + b[i] + half) >> 1);
  }

  Sample out{overlay, in.boxes};
  Scale scale{boxed.scale.x * draw.scale, boxed.scale.y * draw.scale};
  if (!official_quirks) {  // `zoomed` is in whole pixels: the factor that was really applied
    scale = {boxed.scale.x * zoomed.width / size.width, boxed.scale.y * zoomed.height / size.height};
  }
  for (const Box& b : other.boxes) {
    Box placed = clamped(scaled_shifted(b, scale), zoomed);
    if (draw.flip) placed = mirrored(placed, zoomed.width);
    const Box cut = clamped(scaled_shifted(placed, {1, 1}, -draw.offset.x, -draw.offset.y), size);
    add_box(out.boxes, cut, official_quirks);
  }
  return out;
}

// Colour jitter, flip, letterbox; then only boxes more than a pixel wide and high stay.
inline Sample train_transform(const Sample& in, const ColourFlipDraw& draw, cv::Size size,
                              bool official_quirks) {
  const auto boxed = [&](const Sample& s) {
    const Letterbox to = letterbox(s.image, size, official_quirks);
    Sample out{to.image, {}};
    for (const Box& b : s.boxes) out.boxes.push_back(scaled_shifted(b, to.scale));
    return out;
  };
  if (official_quirks && in.boxes.empty()) return boxed(in);
  Sample jittered = in;
  if (draw.hsv) jittered.image = hsv(jittered.image, *draw.hsv);
  if (draw.flip) jittered = flip(jittered);
  Sample out = boxed(jittered);
  const auto small = [](const Box& b) { return !(b.x2 - b.x1 > 1 && b.y2 - b.y1 > 1); };
  out.boxes.erase(std::remove_if(out.boxes.begin(), out.boxes.end(), small), out.boxes.end());
  return official_quirks && out.boxes.empty() ? boxed(in) : out;
}

// ---- the whole ----

// A training sample from what was drawn for it: a picture of this size with its boxes.
//   load(index) -> Sample, fitted into `size` (see fit) and not written to here;   has_boxes(index) -> bool
// The picture may share its pixels with what `load` gave.
template <class Load, class HasBoxes>
Sample apply_draw(const Load& load, const HasBoxes& has_boxes, const SampleDraw& draw, cv::Size size,
                  bool official_quirks) {
  Sample sample = load(draw.index);
  if (draw.mosaic) {
    const auto& [centre, others, affine] = *draw.mosaic;
    const std::array<Sample, 4> tiles{sample, load(others[0]), load(others[1]), load(others[2])};
    sample = random_affine(mosaic(tiles, centre, size, official_quirks), affine, size, official_quirks);
  }
  if (draw.mixup && !(official_quirks && sample.boxes.empty())) {
    const auto& tried = draw.mixup->candidates;
    const auto found = std::find_if(tried.begin(), tried.end(), has_boxes);
    if (found != tried.end()) sample = mixup(sample, load(*found), *draw.mixup, official_quirks);
  }
  return train_transform(sample, draw.colour_flip, size, official_quirks);
}

// Both steps. n: number of pictures; index: the one to train on, 0..n-1; rng: Rng(seed, epoch, index).
template <class Load, class HasBoxes>
Sample make_training_sample(const Load& load, const HasBoxes& has_boxes, std::size_t n, std::size_t index,
                            Rng& rng, const AugmentConfig& config, cv::Size size, bool mosaic_phase) {
  const SampleDraw draw = draw_sample(rng, config, n, index, size, mosaic_phase);
  return apply_draw(load, has_boxes, draw, size, config.official_quirks);
}

}  // namespace yolox
