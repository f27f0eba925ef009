// SPDX-License-Identifier: Apache-2.0
// Folder images/: decoding of image files, bounding boxes, letterbox, and the pixel loops of augmentation.
// This file: image files to 8-bit BGR images, rotated by their EXIF tag. Of a JPEG only the requested region
// is decoded, at the requested scale. A truncated file is an error, although OpenCV returns an image for it.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <opencv2/core.hpp>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>
// libjpeg's headers need <cstdio> before them.
#include <jerror.h>
#include <jpeglib.h>

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
inline bool is_png(std::string_view bytes) { return bytes.substr(0, 8) == "\x89PNG\r\n\x1A\n"; }

// Returns the EXIF orientation (1..8) in the payload of an APP1 marker, or 1 if the payload has none. EXIF
// 2.3, section 4.6.
int exif_orientation(std::string_view app1);

// Returns the EXIF orientation (1..8) of a WebP file, or 1 if it has none.
int webp_orientation(std::string_view bytes);

// Orientations 5..8 transpose the image before the flips.
inline bool transposed(int orientation) { return orientation >= 5; }
inline bool flipped_x(int o) { return o == 2 || o == 3 || o == 6 || o == 7; }
inline bool flipped_y(int o) { return o == 3 || o == 4 || o == 7 || o == 8; }
void apply_orientation(cv::Mat& image, int orientation);

// Error manager of libjpeg. Treats the warning about a premature end of file as an error, because libjpeg
// would fill the rest of the image with grey. Errors call longjmp, so no object with a destructor may be
// constructed between setjmp and a call of libjpeg.
struct JpegErrors : jpeg_error_mgr {
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX] = "";

  JpegErrors();
};

struct Decompress : jpeg_decompress_struct {  // the destructor also runs if OpenCV throws
  explicit Decompress(JpegErrors& errors);
  ~Decompress() { jpeg_destroy_decompress(this); }
};

// Input and output of read_jpeg(). "Stored" means before EXIF rotation.
struct Jpeg {
  // output
  int width = 0, height = 0, orientation = 1;  // stored size in pixels; EXIF orientation
  bool four_channels = false;                  // true for CMYK or YCCK, which OpenCV decodes
  cv::Rect decoded;                            // region in `pixels`, in reduced stored pixels
  // input
  int reduction = 1;  // 1, 2, 4 or 8
  cv::Rect part;      // requested region in stored pixels; empty: read the header only
  cv::Mat pixels;     // output; its memory is reused if the size fits

  cv::Size upright() const {
    return transposed(orientation) ? cv::Size(height, width) : cv::Size(width, height);
  }
};

// Returns true if the whole image must be decoded, because libjpeg-turbo (2.1.5) decodes a region to
// different bits than the same region of the whole image. This happens in two cases. First, in a progressive
// file without its last scans, libjpeg smooths each block with blocks up to two blocks away. Second, a
// component can be decoded at a larger scale than the others and upsampled afterwards, for example chroma at
// a quarter of the width.
bool needs_full_decode(const jpeg_decompress_struct& info);

// Decodes the header, and the region jpeg.part if requested. Returns an error message, or "" on success. A
// region has the same bits as in the whole image. A border around the region is decoded too and then cut off,
// because chroma upsampling at the border needs neighbours.
std::string read_jpeg(std::string_view bytes, Jpeg& jpeg);

// Returns true if a PNG or JPEG contains its end marker. In a JPEG the marker must follow the last scan,
// because the thumbnail in the EXIF data has an end marker, too.
bool has_end_marker(std::string_view bytes);

// Decodes any format that OpenCV supports. Throws ImageError.
Image decode_with_opencv(std::string_view bytes, const std::string& path);

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

namespace image_detail {

uint32_t big_endian(const char* bytes);

// Returns the size of a complete PNG (with its end marker) from its header. Returns an empty size if the file
// is truncated or has an EXIF tag, because OpenCV rotates such an image.
cv::Size png_size(const std::string& path);

}  // namespace image_detail

// Returns the size of an image after EXIF rotation. Reads only the header of a JPEG or PNG that ends with its
// end marker, and decodes any other file, so that a truncated file is found. Throws ImageError.
cv::Size image_size(const std::string& path);

}  // namespace yolox
