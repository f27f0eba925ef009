// Pictures from files: whole and upright, 8 bits, BGR, or an error that names the file. Of a JPEG only the
// part that is asked for is decoded, at the size it is asked for. OpenCV returns a picture for a JPEG that
// was cut off; here that is an error.
#pragma once
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
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
  static const cv::Mat& checked(const cv::Mat& mat);
};

struct Scale {
  double x, y;  // from the pixels of a picture to those of its resized copy
};

// A part of a picture, perhaps reduced: position p in the picture (pixel edges: it spans 0..width) is
// (p - origin) * scale in `image`.
struct Piece {
  Image image;
  Scale scale{1, 1};
  cv::Point2d origin{0, 0};
};

// A picture that is missing, damaged or no picture. The text names the file.
struct ImageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
template <class... Parts>
void check_image(bool ok, const Parts&... parts) {
  if (!ok) throw ImageError(concat(parts...));
}

namespace image_detail {

// A header that claims more is damaged or hostile. OpenCV's limit too.
inline bool is_size(int64_t width, int64_t height) {
  return width > 0 && height > 0 && width * height <= 1 << 30;
}

inline bool is_jpeg(std::string_view bytes) { return bytes.substr(0, 3) == "\xFF\xD8\xFF"; }
inline bool is_png(std::string_view bytes) { return bytes.substr(0, 8) == "\x89PNG\r\n\x1A\n"; }

// EXIF orientation (1..8) of the payload of an APP1 marker, 1 where it has none. EXIF 2.3, section 4.6.
int exif_orientation(std::string_view app1);

// From 5 on height and width change places, before the flips.
inline bool transposed(int orientation) { return orientation >= 5; }
inline bool flipped_x(int o) { return o == 2 || o == 3 || o == 6 || o == 7; }
inline bool flipped_y(int o) { return o == 3 || o == 4 || o == 7 || o == 8; }
void turn_upright(cv::Mat& image, int orientation);

// Errors of libjpeg, and its warning that the file ends too early: it would go on with grey. They end in
// longjmp: between setjmp and it no object with a destructor may be born.
struct JpegErrors : jpeg_error_mgr {
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX] = "";

  JpegErrors();
};

struct Decompress : jpeg_decompress_struct {  // destroyed also where OpenCV throws
  explicit Decompress(JpegErrors& errors);
  ~Decompress() { jpeg_destroy_decompress(this); }
};

struct Jpeg {
  // out
  int width = 0, height = 0, orientation = 1;  // as stored, not yet turned
  bool four_channels = false;                  // CMYK or YCCK: left to OpenCV
  cv::Rect decoded;                            // the part in `pixels`, in reduced pixels, as stored
  // in
  int reduction = 1;  // 1, 2, 4 or 8
  cv::Rect part;      // wanted, in pixels as stored; empty: the header only
  cv::Mat pixels;     // out; on the way in it may have memory to use

  cv::Size upright() const {
    return transposed(orientation) ? cv::Size(height, width) : cv::Size(width, height);
  }
};

// True where libjpeg-turbo (2.1.5) gives a part other bits than the whole has: a progressive file without its
// last scans, whose blocks are smoothed by what lies two blocks beside them; and a component that is both
// decoded at a larger scale than the others and enlarged after it, as chroma of a quarter of the width is.
bool only_whole(const jpeg_decompress_struct& info);

// Fills `jpeg`; an error comes back as text. What is decoded of a part has the same bits as in the whole: its
// borders, where the smoothing of the chroma has no neighbour, are decoded but not among `decoded`.
std::string read_jpeg(std::string_view bytes, Jpeg& jpeg);

// Whether a PNG or JPEG has its end mark, a JPEG after its last scan: what it holds of EXIF has one too.
bool has_end(std::string_view bytes);

// Any format that OpenCV knows.
Image decode_other(std::string_view bytes, const std::string& path);

}  // namespace image_detail

// The bytes of a file, the first `limit` of them.
std::string read_bytes(const std::string& path, size_t limit = std::string::npos);

// `part` of a picture (in its pixels) with at least `scale` of its resolution, upright as its EXIF tag says.
// What comes back is made of whole reduced pixels and may be larger than the part. expected: the size that it
// had before; empty: not known.
Piece decode_piece(std::string_view bytes, const std::string& path, const cv::Rect& part, double scale,
                   cv::Size expected = {});

// The whole picture.
inline Image decode_image(std::string_view bytes, const std::string& path) {
  return decode_piece(bytes, path, {0, 0, 1 << 20, 1 << 20}, 1).image;
}

namespace image_detail {

uint32_t big_endian(const char* bytes);

// Size of a PNG that is whole up to its end mark and has no EXIF tag, by which OpenCV would turn it; else an
// empty size.
cv::Size png_size(const std::string& path);

}  // namespace image_detail

// Width and height of the upright picture, from the header where that tells (JPEG, PNG), else by decoding. A
// file that was cut off is found here too: a whole JPEG or PNG ends in its mark, and what does not is
// decoded.
cv::Size image_size(const std::string& path);

}  // namespace yolox
