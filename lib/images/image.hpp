// SPDX-License-Identifier: Apache-2.0
// Folder images/: decoding of image files, bounding boxes, letterbox, and the pixel loops of augmentation.
// This file: image files to 8-bit BGR images, rotated by their EXIF tag. Of a JPEG only the requested region
// is decoded, at the requested scale. A truncated file is an error, although OpenCV returns an image for it.
#pragma once
#include <cstdint>
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/error.hpp"

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
struct Scale {
  double x, y;
};

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

namespace image_detail {

// Returns true if a size from a file header is plausible: at most 2^30 pixels, the limit of OpenCV. A larger
// size means a damaged or malicious file.
inline bool is_size(int64_t width, int64_t height) {
  return width > 0 && height > 0 && width * height <= 1 << 30;
}

inline bool is_jpeg(std::string_view bytes) { return bytes.substr(0, 3) == "\xFF\xD8\xFF"; }

// Returns the EXIF orientation (1..8) in the payload of an APP1 marker, or 1 if the payload has none. EXIF
// 2.3, section 4.6.
int exif_orientation(std::string_view app1);

// Returns the EXIF orientation (1..8) of a WebP file, or 1 if it has none.
int webp_orientation(std::string_view bytes);

void apply_orientation(cv::Mat& image, int orientation);

}  // namespace image_detail

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

// Returns the size of an image after EXIF rotation. Takes it from the header of a JPEG or PNG that has its
// end marker, and decodes any other file, so that a truncated file is found. Throws ImageError.
cv::Size image_size(const std::string& path);

}  // namespace yolox
