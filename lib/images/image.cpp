// SPDX-License-Identifier: Apache-2.0
#include "images/image.hpp"

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <filesystem>
#include <fstream>
// libjpeg's headers need <cstdio> before them.
#include <jerror.h>
#include <jpeglib.h>

namespace yolox {

const cv::Mat& Image::checked(const cv::Mat& mat) {
  check(!mat.empty(), "the image is empty; was the file read?");
  check(mat.type() == CV_8UC3, "the image is ", cv::typeToString(mat.type()),
        ", but augmentation needs CV_8UC3 (8-bit BGR); convert the image before augmentation, and to float "
        "after it");
  return mat;
}

static bool is_png(std::string_view bytes) { return bytes.substr(0, 8) == "\x89PNG\r\n\x1A\n"; }
static bool is_jpeg(std::string_view bytes) { return bytes.substr(0, 3) == "\xFF\xD8\xFF"; }

// Returns true if a size from a file header is plausible: at most 2^30 pixels, the limit of OpenCV. A larger
// size means a damaged or malicious file.
static bool is_size(int64_t width, int64_t height) {
  return width > 0 && height > 0 && width * height <= 1 << 30;
}

// Orientations 5..8 transpose the image before the flips.
static bool transposed(int orientation) { return orientation >= 5; }
static bool flipped_x(int o) { return o == 2 || o == 3 || o == 6 || o == 7; }
static bool flipped_y(int o) { return o == 3 || o == 4 || o == 7 || o == 8; }

// Returns the unsigned number of n bytes at a position, or 0 beyond the end.
static uint32_t number_at(std::string_view bytes, size_t at, size_t n, bool little = false) {
  uint32_t v = 0;
  if (at + n > bytes.size()) return v;
  for (size_t i = 0; i < n; ++i) v |= uint32_t(uint8_t(bytes[at + i])) << 8 * (little ? i : n - 1 - i);
  return v;
}

// Returns the orientation (1..8) in EXIF data, whose head some WebP files lack, or 1 if it has none.
// EXIF 2.3, section 4.6.
static int exif_orientation(std::string_view exif) {
  const std::string_view tiff = exif.substr(exif.starts_with(std::string_view("Exif\0\0", 6)) ? 6 : 0);
  const auto number = [&](size_t at, size_t n) { return number_at(tiff, at, n, tiff.starts_with("II")); };
  if (number(2, 2) != 42) return 1;
  const size_t directory = number(4, 4), entries = number(directory, 2);
  for (size_t entry = directory + 2, i = 0; i < entries && entry + 12 <= tiff.size(); ++i, entry += 12) {
    const uint32_t value = number(entry + 8, 2);
    if (number(entry, 2) == 0x0112) return value >= 1 && value <= 8 ? int(value) : 1;
  }
  return 1;
}

static void apply_orientation(cv::Mat& image, int orientation) {
  if (transposed(orientation)) cv::transpose(image, image);
  if (flipped_x(orientation)) cv::flip(image, image, 1);
  if (flipped_y(orientation)) cv::flip(image, image, 0);
}

namespace {

// A JPEG file. Errors call longjmp, so no object with a destructor may be constructed between setjmp and a
// call of libjpeg.
struct Jpeg : jpeg_decompress_struct {
  const std::string& path;
  jpeg_error_mgr errors;
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX] = "";
  int orientation = 1;  // of EXIF

  // Reads the header. Throws ImageError.
  Jpeg(std::string_view bytes, const std::string& path) : jpeg_decompress_struct{}, path(path) {
    err = jpeg_std_error(&errors);
    client_data = this;
    errors.error_exit = [](j_common_ptr info) {
      auto& self = *static_cast<Jpeg*>(info->client_data);
      self.errors.format_message(info, self.text);
      std::longjmp(self.back, 1);
    };
    // A premature end is an error, because libjpeg would fill the rest of the image with grey.
    errors.emit_message = [](j_common_ptr info, int level) {
      auto& self = *static_cast<Jpeg*>(info->client_data);
      if (level >= 0 || self.errors.msg_code != JWRN_JPEG_EOF) return;
      std::snprintf(self.text, sizeof self.text, "the file is cut off");
      std::longjmp(self.back, 1);
    };
    if (setjmp(back)) throw_error();
    jpeg_create_decompress(this);
    jpeg_mem_src(this, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    jpeg_save_markers(this, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(this, TRUE);
    for (auto m = marker_list; m && orientation == 1; m = m->next)
      orientation = exif_orientation({reinterpret_cast<const char*>(m->data), size_t(m->data_length)});
  }
  Jpeg(const Jpeg&) = delete;
  ~Jpeg() { jpeg_destroy_decompress(this); }

  [[noreturn]] void throw_error() {
    jpeg_destroy_decompress(this);  // here too, because a constructor that throws is not followed by ~Jpeg()
    throw ImageError(concat(path, " cannot be decoded: ", text));
  }

  // Returns the size after EXIF rotation.
  cv::Size upright() const {
    const int w = int(image_width), h = int(image_height);
    check_image(is_size(w, h), path, " cannot be decoded: the header says ", w, "x", h,
                ", more than 2^30 pixels");
    return transposed(orientation) ? cv::Size(h, w) : cv::Size(w, h);
  }

  // Decodes the region `part`, in pixels before EXIF rotation, at the scale 1 / r (r: 1, 2, 4 or 8). Returns
  // the region that `pixels` shows, in reduced pixels. A border around it is decoded too and then cut off,
  // because chroma upsampling at the border needs neighbours. A region has the same bits as in the whole
  // image, except in a progressive file without its last scans, and with chroma at a quarter of the width.
  cv::Rect decode(const cv::Rect& part, int r, cv::Mat& pixels) {
    constexpr int kBorder = 16;  // chroma smoothing reads at most one neighbouring block of 16 pixels
    if (setjmp(back)) throw_error();
    out_color_space = JCS_EXT_BGR;
    scale_num = 1;
    scale_denom = unsigned(r);
    jpeg_start_decompress(this);
    const int width = int(output_width), height = int(output_height);
    const int x0 = part.x / r, x1 = std::min(width, (part.x + part.width + r - 1) / r);
    const int y0 = part.y / r, y1 = std::min(height, (part.y + part.height + r - 1) / r);
    JDIMENSION left = JDIMENSION(std::max(0, x0 - kBorder));
    JDIMENSION columns = JDIMENSION(std::min(width, x1 + kBorder)) - left;
    if (int(columns) < width) jpeg_crop_scanline(this, &left, &columns);
    const int first = std::max(0, y0 - kBorder);
    if (first > 0) jpeg_skip_scanlines(this, JDIMENSION(first));
    pixels.create(y1 - first, int(columns), CV_8UC3);
    for (int y = first; y < y1;) {
      unsigned char* row = pixels.ptr(y - first);
      y += int(jpeg_read_scanlines(this, &row, 1));
    }
    if (output_scanline == output_height) jpeg_finish_decompress(this);
    const cv::Rect decoded(x0, y0, x1 - x0, y1 - y0);
    pixels = pixels(decoded - cv::Point(int(left), first));
    return decoded;
  }
};

}  // namespace

// Returns true if a PNG or JPEG contains its end marker. In a JPEG the marker must follow the last scan,
// because the thumbnail in the EXIF data has an end marker, too.
static bool has_end_marker(std::string_view bytes) {
  const size_t end = bytes.rfind("IEND");
  if (is_png(bytes)) return end != std::string_view::npos && end + 8 <= bytes.size();
  return !is_jpeg(bytes) || bytes.find("\xFF\xD9", bytes.rfind("\xFF\xDA")) != std::string_view::npos;
}

// Remedies if memory runs out.
constexpr const char* kMemory = "; free memory, give fewer --workers, or make the image smaller";

// Decodes any format that OpenCV supports. Throws ImageError.
static Image decode_with_opencv(std::string_view bytes, const std::string& path) {
  check_image(has_end_marker(bytes), path, " cannot be decoded: the file is cut off");
  // OpenCV before 5 does not rotate a WebP by its EXIF tag.
  const bool webp = bytes.size() >= 12 && bytes.substr(0, 4) == "RIFF" && bytes.substr(8, 4) == "WEBP";
  const int flags = webp ? cv::IMREAD_COLOR | cv::IMREAD_IGNORE_ORIENTATION : cv::IMREAD_COLOR;
  cv::Mat image = cv::imdecode(cv::Mat(1, int(bytes.size()), CV_8U, const_cast<char*>(bytes.data())), flags);
  check_image(!image.empty(), path, " cannot be read as an image");
  int orientation = 1;
  for (size_t at = 0; webp && orientation == 1 && (at = bytes.find("EXIF", at)) < bytes.size() - 8; ++at)
    orientation = exif_orientation(bytes.substr(at + 8));  // after the name and the length of the chunk
  apply_orientation(image, orientation);
  return image;
}

std::string read_bytes(const std::string& path, size_t limit) {
  std::error_code unknown;
  const auto status = std::filesystem::status(path, unknown);  // a pipe would be waited for
  check_image(!exists(status) || is_regular_file(status), path, " is not a regular file");
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  check_image(file.good(), path, " cannot be opened");
  const std::streamoff size = file.tellg();
  check_image(size > 0, path, " is empty");
  std::string bytes(std::min(size_t(size), limit), '\0');
  file.seekg(0);
  check_image(bool(file.read(bytes.data(), std::streamsize(bytes.size()))), path, " cannot be read");
  return bytes;
}

ImageRegion decode_region(std::string_view bytes, const std::string& path, const cv::Rect& part, double scale,
                          cv::Size expected) try {
  int reduction = 1;
  while (reduction < 1 << 12 && scale * reduction <= 0.5) reduction *= 2;
  const auto inside = [&](cv::Size size) {
    check_image(expected.empty() || size == expected, path, " is ", size.width, "x", size.height,
                ", expected ", expected.width, "x", expected.height);
    const cv::Rect cut = part & cv::Rect({0, 0}, size);
    check_image(!cut.empty(), path, " is ", size.width, "x", size.height,
                ", smaller than its annotation says");
    return cut;
  };
  ImageRegion piece;
  if (is_jpeg(bytes)) {
    Jpeg jpeg(bytes, path);
    const cv::Size upright = jpeg.upright();
    if (jpeg.num_components != 4) {  // OpenCV decodes CMYK and YCCK
      const int o = jpeg.orientation, r = std::min(reduction, 8);
      const auto flip = [&](cv::Rect rect) {
        if (flipped_x(o)) rect.x = upright.width - rect.x - rect.width;
        if (flipped_y(o)) rect.y = upright.height - rect.y - rect.height;
        return rect;
      };
      const auto transpose = [&](const cv::Rect& rect) {
        return transposed(o) ? cv::Rect(rect.y, rect.x, rect.height, rect.width) : rect;
      };
      cv::Rect wanted = inside(upright);
      if (reduction > 8)
        wanted = {{0, 0}, upright};  // the further reduction must have the same pixel grid for every part
      cv::Mat pixels;
      const cv::Rect decoded = jpeg.decode(transpose(flip(wanted)), r, pixels);
      // In upright pixels; may exceed the image.
      const cv::Rect got = flip(transpose({decoded.tl() * r, decoded.size() * r}));
      apply_orientation(pixels, o);
      piece = {pixels, {1.0 / r, 1.0 / r}, got.tl()};
      reduction /= r;
    }
  }
  if (piece.image.empty()) {
    piece.image = decode_with_opencv(bytes, path);
    inside(piece.image.size());
  }
  if (reduction > 1) {
    const cv::Size from = piece.image.size(),
                   to((from.width + reduction - 1) / reduction, (from.height + reduction - 1) / reduction);
    Image small;
    cv::resize(piece.image, small, to, 0, 0, cv::INTER_AREA);
    piece.image = small;
    piece.scale.x *= 1.0 * to.width / from.width;
    piece.scale.y *= 1.0 * to.height / from.height;
  }
  return piece;
} catch (const cv::Exception& e) {
  throw ImageError(concat(path, " cannot be decoded: ", e.err, e.code == cv::Error::StsNoMem ? kMemory : ""));
} catch (const std::bad_alloc&) {
  throw ImageError(concat(path, " cannot be decoded: out of memory", kMemory));
}

DeepRange deep_range(std::string_view bytes, const std::string& path) {
  const std::string_view head = bytes.substr(0, 2);
  const bool pnm = bytes.size() > 2 && head[0] == 'P' && head[1] >= '2' && head[1] <= '6';
  const bool jpeg2000 = bytes.substr(0, 8).find("jP  ") == 4, png = is_png(bytes) && bytes.size() > 24;
  if (!pnm && !jpeg2000 && head != "II" && head != "MM" && !(png && bytes[24] == 16)) return {};
  cv::Mat image, channel;
  try {
    image = cv::imdecode(cv::Mat(1, int(bytes.size()), CV_8U, const_cast<char*>(bytes.data())),
                         cv::IMREAD_UNCHANGED);
  } catch (const cv::Exception&) {}  // reported when the image is decoded
  if (image.empty() || image.depth() == CV_8U) return {};
  check_image(image.depth() == CV_16U, path, " has pixels of the type ", cv::typeToString(image.type()),
              ", which cannot be read; convert it to 8 bits");
  std::vector<int64_t> counts(1 << 16);
  const int colours = std::min(3, image.channels());  // without alpha
  for (int c = 0; c < colours; ++c) {
    cv::extractChannel(image, channel, c);
    for (const uint16_t value : cv::Mat_<uint16_t>(channel)) ++counts[value];
  }
  const int64_t few = int64_t(image.total()) * colours / 100;
  DeepRange range{0, (1 << 16) - 1};
  for (int64_t left = few - counts[range.low]; left >= 0; left -= counts[range.low]) ++range.low;
  for (int64_t left = few - counts[range.high]; left >= 0; left -= counts[range.high]) --range.high;
  return range;
}

cv::Size image_size(const std::string& path, DeepRange* deep) {
  const auto ends = [&] {
    std::ifstream file(path, std::ios::binary);
    char tail[2];
    return file.seekg(-2, std::ios::end) && file.read(tail, 2) && tail[0] == '\xFF' && tail[1] == '\xD9';
  };
  for (const size_t limit : {size_t(1) << 12, size_t(1) << 17}) {  // EXIF with a thumbnail needs up to 64 KB
    const std::string head = read_bytes(path, limit);
    if (!is_jpeg(head) || !ends()) break;
    try {
      return Jpeg(head, path).upright();
    } catch (const ImageError&) {}  // the header is longer, or damaged
  }
  const std::string bytes = read_bytes(path);
  if (deep) *deep = deep_range(bytes, path);
  // OpenCV rotates a PNG that has an EXIF tag.
  if (bytes.size() > 24 && is_png(bytes) && has_end_marker(bytes) &&
      bytes.find("eXIf") == std::string::npos) {
    const int64_t width = number_at(bytes, 16, 4), height = number_at(bytes, 20, 4);
    if (is_size(width, height)) return {int(width), int(height)};
  }
  return decode_image(bytes, path).size();
}

}  // namespace yolox
