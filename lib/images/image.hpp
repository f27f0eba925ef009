// SPDX-License-Identifier: Apache-2.0
// Folder images/: decoding of image files, bounding boxes, letterbox, and the pixel loops of augmentation.
// This file: image files to 8-bit BGR images, rotated by their EXIF tag; input size, boxes and letterbox. Of
// a JPEG only the requested region is decoded, at the requested scale. A truncated file is an error, although
// OpenCV returns an image for it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.hpp"

namespace yolox {

// An 8-bit BGR image. Copies share pixels, as copies of cv::Mat do. A plain cv::Mat_<cv::Vec3b> converts
// float images silently, so that an image in 0..1 becomes black. For this type such a conversion does not
// compile, or throws if the source is an untyped cv::Mat.
struct Image : cv::Mat_<cv::Vec3b> {
  using Pixels = cv::Mat_<cv::Vec3b>;
  Image() = default;
  Image(cv::Size extent, uchar grey) : Pixels(extent, cv::Vec3b::all(grey)) {}
  Image(const Pixels& pixels) : Pixels(pixels) {}
  template <class Other>
  Image(const cv::Mat_<Other>&) = delete;
  Image(const cv::Mat& mat) : Pixels(checked(mat)) {}

 private:
  static const cv::Mat& checked(const cv::Mat& mat);
};

// Scale factors of width and height from an image to its resized copy.
using Scale = cv::Point2d;

// A region of an image, possibly at a smaller scale. A position p of the original image (pixel edges:
// 0..width) is at (p - origin) * scale in `image`.
struct ImageRegion {
  Image image;
  Scale scale{1, 1};
  cv::Point2d origin{0, 0};
};

// Error for an image file that is missing, damaged or not an image. The message contains the file name.
struct ImageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <class... Parts>
void check_image(bool ok, const Parts&... parts) {
  if (!ok) throw ImageError(concat(parts...));
}

// Returns the first `limit` bytes of a file. Throws ImageError if the file is missing, empty or unreadable.
std::string read_bytes(const std::string& path, size_t limit = std::string::npos);

// Decodes the region `part` of an image, in pixels after EXIF rotation, at a scale of at least `scale`. The
// result may be larger than `part`, because it consists of whole reduced pixels. expected: size of the image
// when it was checked, or empty if unknown. Throws ImageError, also if the size differs from `expected` or
// memory runs out.
// path: for error messages.
ImageRegion decode_region(std::string_view bytes, const std::string& path, const cv::Rect& part, double scale,
                          cv::Size expected = {});

// Decodes the whole image.
inline Image decode_image(std::string_view bytes, const std::string& path) {
  return decode_region(bytes, path, {0, 0, 1 << 20, 1 << 20}, 1).image;
}

// Range of the values of an image with 16 bits per channel, without the lowest and highest 1 %. Empty (low
// > high) for other images.
struct DeepRange {
  int low = 1 << 16, high = -1;
  // Returns true for values of 14 bits or less, of which 8 bits show at most 64 levels.
  bool is_narrow() const { return low <= high && high > 0 && high - low < 1 << 14; }
};
// Returns the range of a PNG, TIFF, PNM or JPEG 2000 file of 16 bits. Throws ImageError if the pixels are
// neither of 8 nor of 16 bits, which OpenCV decodes as black.
DeepRange deep_range(std::string_view bytes, const std::string& path);

// Returns the size of an image after EXIF rotation: that in the header of a JPEG or PNG with its end marker,
// or of the decoded file, to find truncated ones. deep: set to deep_range(). Throws ImageError.
cv::Size image_size(const std::string& path, DeepRange* deep = nullptr);

// ---- input size, boxes and letterbox

// Padding value: the grey of every pixel that no image covers.
constexpr uchar border_grey = 114;

// Height and width of the network input in pixels.
struct ImageSize {
  int height, width;
};
// Parses "640" (640x640) or "480x640" (height x width). Throws UsageError unless both are multiples of 32,
// from 32 to 8192.
inline ImageSize parse_size(const std::string& text) {
  ImageSize size{0, 0};
  char x = 'x', rest = 0;
  const int n = std::sscanf(text.c_str(), "%d%c%d%c", &size.height, &x, &size.width, &rest);
  if (n == 1) size.width = size.height;
  const bool is_plain = text.find_first_not_of("0123456789x") == std::string::npos;  // sscanf skips blanks
  const auto is_side = [](int side) { return side >= 32 && side <= 8192 && side % 32 == 0; };
  usage_check(is_plain && (n == 1 || n == 3) && x == 'x' && is_side(size.height) && is_side(size.width),
              "--size must be N or HEIGHTxWIDTH, multiples of 32 up to 8192, got '", text, "'");
  return size;
}

// Bounding box in pixels. Coordinates are pixel edges: an image of width W spans 0..W.
struct Box {
  double x1, y1, x2, y2;
  int cls;  // 0..classes-1, or kIgnoredRegion
};
// Class of a region in which objects may be, such as a crowd: no target, and no background either.
constexpr int kIgnoredRegion = -1;

// A detection.
struct ScoredBox {
  Box box;
  double score;
};

// An image with its boxes. The number of boxes is not limited.
struct Sample {
  Image image;
  std::vector<Box> boxes;  // and ignored regions
};

inline bool has_area(const Box& b) { return b.x2 > b.x1 && b.y2 > b.y1; }

// Clips a box, given as x, y (top left corner), w, h, to an image of this size. Returns nothing if the
// clipped box has no area.
inline std::optional<Box> clip_box(double x, double y, double w, double h, int cls, cv::Size size) {
  const Box box{std::max(0.0, x), std::max(0.0, y), std::min<double>(size.width, x + w),
                std::min<double>(size.height, y + h), cls};
  if (!has_area(box)) return {};
  return box;
}

struct Fit {
  cv::Size size;
  Scale scale;  // from the original size to `size`
};

// Returns the largest size with the aspect ratio of the image that fits into `room`. truncate: as official
// YOLOX, truncates the size instead of rounding, and returns the scale before truncation.
inline Fit fit_into(cv::Size picture, cv::Size room, bool truncate) {
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

struct Letterbox {
  Image image;
  Scale scale;  // from the original image to `image`
};

// Letterbox: resizes an image to fit into `size`, places it at the top left, and pads with grey. This is the
// only transform in evaluation. It equals that of official YOLOX, so that AP values are comparable. The
// result shares the pixels of `image` if the image already has this size.
inline Letterbox letterbox(const Image& image, cv::Size size) {
  const Fit to = fit_into(image.size(), size, /*truncate=*/true);
  if (image.size() == size) return {image, to.scale};
  Image canvas(size, border_grey);
  cv::resize(image, canvas(cv::Rect({0, 0}, to.size)), to.size);
  return {canvas, to.scale};
}

}  // namespace yolox
