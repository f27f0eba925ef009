// SPDX-License-Identifier: Apache-2.0
// image.hpp: decoding equals cv::imread, a decoded region equals that part of the whole image, and damaged
// files are errors.
#include "images/image.hpp"

#include <fcntl.h>

#include <array>
#include <cstdio>
#include <map>
#include <random>
// libjpeg's headers need <cstdio> before them.
#include <jpeglib.h>

#include "common.hpp"

using namespace yolox;

namespace {

const cv::Rect everything(0, 0, 1 << 20, 1 << 20);

struct Dice {
  std::mt19937 engine;
  explicit Dice(unsigned seed) : engine(seed) {}
  int operator()(int lo, int hi) { return lo + int(engine() % unsigned(hi - lo + 1)); }
};

cv::Size random_size(Dice& dice, int most) {
  if (dice(0, 2) == 0) most = 24;  // a few blocks, each at an edge
  const int width = dice(1, most);
  return {width, dice(1, most)};
}

cv::Rect random_part(Dice& dice, cv::Size size) {
  const int x = dice(0, size.width - 1), y = dice(0, size.height - 1);
  const bool small = dice(0, 1) == 0;
  const int width = dice(1, size.width - x), height = dice(1, size.height - y);
  return small ? cv::Rect(x, y, std::min(width, 9), std::min(height, 9)) : cv::Rect(x, y, width, height);
}

// Returns noise over patches of colour. All pixels differ from their neighbours, most of all in chroma.
Image painted(Dice& dice, cv::Size size) {
  cv::Mat patches(std::max(1, size.height / 6), std::max(1, size.width / 6), CV_8UC3), image;
  cv::RNG rng(dice.engine());
  rng.fill(patches, cv::RNG::UNIFORM, 0, 256);
  cv::resize(patches, image, size, 0, 0, cv::INTER_CUBIC);
  cv::Mat noise(size, CV_8UC3);
  rng.fill(noise, cv::RNG::UNIFORM, 0, 40);
  image += noise;
  return image;
}

// ---- image files ----

enum Way { baseline, restarts, progressive, grey, cmyk };
using Sampling = std::array<cv::Size, 3>;  // sampling factors of luma and both chromas

std::string jpeg(const cv::Mat& bgr, Way way = baseline,
                 const Sampling& sampling = {{{2, 2}, {1, 1}, {1, 1}}}) {
  cv::Mat image = bgr;
  if (way == grey) cv::cvtColor(bgr, image, cv::COLOR_BGR2GRAY);
  if (way == cmyk) cv::cvtColor(bgr, image, cv::COLOR_BGR2BGRA);
  jpeg_error_mgr errors;
  jpeg_compress_struct info;
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* out = nullptr;
  unsigned long length = 0;
  jpeg_mem_dest(&info, &out, &length);
  info.image_width = JDIMENSION(image.cols);
  info.image_height = JDIMENSION(image.rows);
  info.input_components = image.channels();
  info.in_color_space = way == grey ? JCS_GRAYSCALE : way == cmyk ? JCS_CMYK : JCS_EXT_BGR;
  jpeg_set_defaults(&info);
  if (way == cmyk) jpeg_set_colorspace(&info, JCS_YCCK);
  jpeg_set_quality(&info, 85, TRUE);
  for (int i = 0; i < std::min(3, info.num_components); ++i) {
    info.comp_info[i].h_samp_factor = sampling[i].width;
    info.comp_info[i].v_samp_factor = sampling[i].height;
  }
  if (way == progressive) jpeg_simple_progression(&info);
  if (way == restarts) info.restart_interval = 5;
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    unsigned char* row = image.ptr(int(info.next_scanline));
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  const std::string bytes(reinterpret_cast<char*>(out), length);
  jpeg_destroy_compress(&info);
  std::free(out);
  return bytes;
}

std::string encoded(const std::string& extension, const cv::Mat& image,
                    const std::vector<int>& settings = {}) {
  std::vector<uchar> bytes;
  REQUIRE(cv::imencode(extension, image, bytes, settings));
  return {bytes.begin(), bytes.end()};
}

const std::vector<int> kLossless = {cv::IMWRITE_WEBP_QUALITY, 101};

std::string number(uint64_t value, int bytes, bool little) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += char(value >> 8 * (little ? i : bytes - 1 - i));
  return text;
}

// Returns EXIF data with one entry, the orientation.
std::string exif(int orientation, bool little) {
  std::string tiff = little ? "II" : "MM";
  tiff += number(42, 2, little) + number(8, 4, little) + number(1, 2, little);
  tiff += number(0x0112, 2, little) + number(3, 2, little) + number(1, 4, little);
  return tiff + number(orientation, 2, little) + number(0, 2, little) + number(0, 4, little);
}
std::string segment(const std::string& jpeg_bytes, const std::string& app1) {
  return jpeg_bytes.substr(0, 2) + "\xFF\xE1" + number(app1.size() + 2, 2, false) + app1 +
         jpeg_bytes.substr(2);
}
std::string with_exif(const std::string& jpeg_bytes, const std::string& tiff) {
  return segment(jpeg_bytes, std::string("Exif\0\0", 6) + tiff);
}

// Inserts a chunk into a PNG, after IHDR if `first`, otherwise before IEND.
std::string with_chunk(const std::string& png, const std::string& kind, const std::string& data, bool first) {
  uint32_t crc = ~0u;
  for (const char c : kind + data) {
    crc ^= uint8_t(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  const size_t at = first ? 33 : png.size() - 12;
  return png.substr(0, at) + number(data.size(), 4, false) + kind + data + number(~crc, 4, false) +
         png.substr(at);
}

// Returns a WebP with EXIF data, which some programs write without the head of a JPEG's.
std::string webp_with_exif(const Image& image, const std::string& tiff, bool head) {
  const auto chunk = [](const std::string& name, const std::string& payload) {
    return name + number(payload.size(), 4, true) + payload + std::string(payload.size() % 2, '\0');
  };
  const std::string size = number(image.cols - 1, 3, true) + number(image.rows - 1, 3, true);
  const std::string chunks = "WEBP" + chunk("VP8X", std::string("\x08\0\0\0", 4) + size) +
                             encoded(".webp", image, kLossless).substr(12) +
                             chunk("EXIF", (head ? std::string("Exif\0\0", 6) : "") + tiff);
  return "RIFF" + number(chunks.size(), 4, true) + chunks;
}

// Returns an uncompressed TIFF whose directory has an orientation.
std::string turned_tiff(const Image& image, int orientation) {
  const auto bytes = uint32_t(image.total() * 3), head = 8 + 2 + 10 * 12 + 4u;
  const std::pair<int, uint32_t> entries[] = {
      {256, image.cols}, {257, image.rows},  {258, head}, {259, 1},          {262, 2},
      {273, head + 6},   {274, orientation}, {277, 3},    {278, image.rows}, {279, bytes}};
  std::string text = "II" + number(42, 2, true) + number(8, 4, true) + number(10, 2, true);
  for (const auto& [tag, value] : entries)
    text += number(tag, 2, true) + number(tag == 258 ? 3 : 4, 2, true) + number(tag == 258 ? 3 : 1, 4, true) +
            number(value, 4, true);
  text += number(0, 4, true) + std::string("\x08\0\x08\0\x08\0", 6);
  for (const cv::Vec3b& p : image) text += {char(p[2]), char(p[1]), char(p[0])};
  return text;
}

struct ImageFile : TempDir {  // a file whose content is replaced by each call
  std::string path;
  explicit ImageFile(const std::string& name) : path(*this / name) {}
  const std::string& operator()(const std::string& bytes) const {
    write_text(path, bytes);
    return path;
  }
};

// Redirects stderr, where the image libraries report damaged files, to /dev/null.
struct Quiet {
  int before = dup(2);
  Quiet() {
    const int null = open("/dev/null", O_WRONLY);
    dup2(null, 2);
    close(null);
  }
  ~Quiet() {
    dup2(before, 2);
    close(before);
  }
};

// ---- comparisons ----

bool same(const cv::Mat& a, const cv::Mat& b) {
  return a.size() == b.size() && a.type() == b.type() && cv::norm(a, b, cv::NORM_INF) == 0;
}
cv::Mat by_opencv(const std::string& bytes, int flags = cv::IMREAD_COLOR) {
  return cv::imdecode(cv::Mat(1, int(bytes.size()), CV_8U, const_cast<char*>(bytes.data())), flags);
}

// Decodes random regions at scale 1/reduction. Each must equal that part of the whole image at the same
// scale, contain the requested region, and be hardly larger.
void check_parts(const std::string& bytes, Dice& dice, int reduction, int parts) {
  const ImageRegion whole = decode_region(bytes, "whole", everything, 1.0 / reduction);
  const cv::Size size = decode_image(bytes, "whole").size();
  CAPTURE(reduction);
  CAPTURE(size);
  for (int i = 0; i < parts; ++i) {
    const cv::Rect part = random_part(dice, size);
    CAPTURE(part);
    const ImageRegion piece = decode_region(bytes, "part", part, 1.0 / reduction);
    const Image& image = piece.image;
    const cv::Point2d from = (piece.origin - whole.origin) * (1.0 / reduction);
    const cv::Rect place(cv::Point(from), image.size());
    REQUIRE((piece.scale.x == 1.0 / reduction && piece.scale.y == 1.0 / reduction));
    REQUIRE((place.x == from.x && place.y == from.y));
    REQUIRE((place & cv::Rect({0, 0}, whole.image.size())) == place);
    CHECK(same(image, whole.image(place)));
    const cv::Rect2d got(piece.origin, cv::Size2d(image.size()) * double(reduction));
    CHECK((got.x <= part.x && got.y <= part.y && got.br().x >= part.br().x && got.br().y >= part.br().y));
    CHECK((got.width < part.width + 2 * reduction && got.height < part.height + 2 * reduction));
  }
}

void check_file(const std::string& path) {
  const cv::Mat expected = cv::imread(path, cv::IMREAD_COLOR);
  REQUIRE(!expected.empty());
  CHECK(same(decode_image(read_bytes(path), path), expected));
  CHECK(image_size(path) == expected.size());
}

// Returns the message of the ImageError that is thrown, or "". Other exceptions are passed on.
template <class Work>
std::string image_error(const Work& work) {
  try {
    work();
  } catch (const ImageError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("image: the usual kinds of JPEG decode as in OpenCV; a region equals that part of the image") {
  Dice dice(1);
  for (const cv::Size luma : {cv::Size(2, 2), {1, 1}, {2, 1}, {1, 2}}) {
    const Sampling sampling = {luma, {1, 1}, {1, 1}};
    for (int way = baseline; way <= grey; ++way) {
      CAPTURE(way);
      CAPTURE(luma);
      for (int i = 0; i < 3; ++i) {
        const std::string bytes = jpeg(painted(dice, random_size(dice, i ? 160 : 300)), Way(way), sampling);
        CHECK(same(decode_image(bytes, "whole"), by_opencv(bytes)));
        for (int reduction : {1, 2, 4, 8}) check_parts(bytes, dice, reduction, 4);
      }
    }
  }
}

TEST_CASE("image: origin and scale of a region map its pixels to the upright image") {
  Image slope({203, 101}, 0);  // the colour encodes the position of a pixel's centre
  for (int y = 0; y < slope.rows; ++y)
    for (int x = 0; x < slope.cols; ++x) slope(y, x) = {uchar(20 + x), uchar(20 + 2 * y), 128};
  const std::string plain = encoded(".jpg", slope, {cv::IMWRITE_JPEG_QUALITY, 100});
  Dice dice(5);
  for (int orientation = 0; orientation <= 8; ++orientation) {  // 0: a PNG
    const std::string bytes =
        orientation ? with_exif(plain, exif(orientation, true)) : encoded(".png", slope);
    const cv::Mat_<cv::Vec3d> upright(decode_image(bytes, "whole"));
    for (const double scale : {1.0, 0.6, 0.3, 0.125, 0.04}) {
      for (int i = 0; i < 100; ++i) {
        const ImageRegion piece = decode_region(bytes, "part", random_part(dice, upright.size()), scale);
        CHECK((piece.scale.x >= scale && piece.scale.y >= scale));
        const int x = dice(0, piece.image.cols - 1), y = dice(0, piece.image.rows - 1);
        const cv::Point2d centre(piece.origin.x + (x + 0.5) / piece.scale.x,
                                 piece.origin.y + (y + 0.5) / piece.scale.y);
        const cv::Rect2d inner(0.5 / scale, 0.5 / scale, upright.cols - 1 / scale, upright.rows - 1 / scale);
        if (!inner.contains(centre)) continue;  // the last reduced pixel may extend beyond the edge
        const cv::Vec3d colour =
            (upright(int(centre.y), int(centre.x)) + upright(int(centre.y - 0.5), int(centre.x - 0.5))) / 2;
        REQUIRE(cv::norm(cv::Vec3d(piece.image(y, x)) - colour, cv::NORM_INF) <= 3.5);
      }
    }
  }
}

TEST_CASE("image: the orientation of JPEG, PNG, WebP and TIFF is applied, in regions too") {
  const ImageFile file("turned");
  Dice dice(6);
  for (const cv::Size size : {cv::Size(77, 50), cv::Size(40, 64), cv::Size(61, 1)}) {
    const Image image = painted(dice, size);
    const std::string png = encoded(".png", image);
    for (int orientation = 0; orientation <= 9; ++orientation) {  // 0 and 9 are invalid
      for (const bool little : {false, true}) {
        CAPTURE(orientation);
        const std::string tiff = exif(orientation, little),
                          turned = with_chunk(png, "eXIf", tiff, /*first=*/little);
        const cv::Mat upright = by_opencv(turned);
        const std::string photo = with_exif(jpeg(image, little ? baseline : progressive), tiff);
        check_file(file(photo));
        CHECK(image_size(file.path) == upright.size());
        for (int reduction : {1, 2, 4, 8}) check_parts(photo, dice, reduction, 3);
        check_file(file(with_exif(jpeg(image, cmyk), tiff)));
        check_file(file(turned));
        CHECK((upright.cols == size.height) == (orientation >= 5 && orientation <= 8));
        const std::string webp = webp_with_exif(image, tiff, /*head=*/little);
        CHECK(same(decode_image(webp, "webp"), upright));
        CHECK(image_size(file(webp)) == upright.size());
        if (orientation < 1 || orientation > 8) continue;
        const std::string scan = turned_tiff(image, orientation);
        CHECK(same(decode_image(scan, "tiff"), upright));
        CHECK(image_size(file(scan)) == upright.size());
      }
    }
    // OpenCV reads only the first APP1 segment, which may be XMP. image_size() must read the second one.
    file(segment(with_exif(jpeg(image), exif(8, true)), "http://ns.adobe.com/xap/1.0/"));
    CHECK(image_size(file.path) == cv::Size(size.height, size.width));
    CHECK(decode_image(read_bytes(file.path), file.path).size() == image_size(file.path));
  }
}

TEST_CASE("image: BMP, TIFF, WebP and PNG are read in colour, grey, 16 bits and with alpha") {
  const Quiet quiet;
  const ImageFile file("picture");
  Dice dice(15);
  const Image image = painted(dice, {90, 61});
  cv::Mat grey, alpha, grey_image;
  cv::cvtColor(image, grey, cv::COLOR_BGR2GRAY);
  cv::cvtColor(grey, grey_image, cv::COLOR_GRAY2BGR);
  cv::cvtColor(image, alpha, cv::COLOR_BGR2BGRA);
  const std::vector<std::tuple<std::string, cv::Mat, bool>> pictures = {
      {".bmp", image, false},  {".bmp", grey, false}, {".tiff", image, false}, {".tiff", image, true},
      {".tif", grey, false},   {".tif", grey, true},  {".tiff", alpha, false}, {".webp", image, false},
      {".webp", alpha, false}, {".png", grey, true}};
  for (const auto& [extension, picture, deep] : pictures) {  // deep: 16 bits
    const std::string kind = extension + " " + cv::typeToString(picture.type());
    INFO(kind);
    cv::Mat in;
    picture.convertTo(in, deep ? CV_16U : CV_8U, deep ? 257 : 1);
    const std::string bytes = encoded(extension, in, extension == ".webp" ? kLossless : std::vector<int>());
    CHECK(same(decode_image(bytes, "picture"), in.channels() == 1 ? grey_image : cv::Mat(image)));
    CHECK(image_size(file(bytes)) == image.size());
    const ImageRegion half = decode_region(bytes, "picture", {70, 40, 10, 10}, 0.5);
    CHECK((half.image.size() == cv::Size(45, 31) && half.scale.x == 0.5));
    for (const double part : {0.1, 0.5, 0.95}) {
      const std::string cut = bytes.substr(0, size_t(double(bytes.size()) * part));
      CHECK(has(image_error([&] { decode_image(cut, "cut file"); }), "cut file"));
      CHECK(has(image_error([&] { image_size(file(cut)); }), file.path));
    }
  }
  // A JPEG that OpenCV decodes is not read in parts either.
  CHECK(decode_region(jpeg(image, cmyk), "cmyk", {70, 40, 10, 10}, 0.5).image.size() == cv::Size(45, 31));
}

SHARED_TEST("image: photos and odd files are read as in cv::imread, or are errors that name the file") {
  Dice dice(3);
  for (const auto& entry : std::filesystem::directory_iterator(shared("data/coco128_json/train2017"))) {
    check_file(entry.path());
    check_parts(read_bytes(entry.path()), dice, 1 << dice(0, 3), 4);
  }
  const std::map<std::string, std::string> refused = {{"anim.gif", "cannot be read as an image"},
                                                      {"random_bytes.jpg", "cannot be read as an image"},
                                                      {"text.jpg", "cannot be read as an image"},
                                                      {"truncated.png", "cut off"},
                                                      {"truncated_half.jpg", "cut off"},
                                                      {"truncated_header.jpg", "cannot be decoded"},
                                                      {"zero_byte.jpg", "is empty"}};
  size_t files = 0, errors = 0;
  for (const auto& entry : std::filesystem::directory_iterator(shared("data/odd_images"))) {
    const std::string path = entry.path();
    CAPTURE(path);
    ++files;
    const auto expected = refused.find(entry.path().filename());
    if (expected == refused.end()) {
      check_file(path);
      continue;
    }
    ++errors;
    for (const std::string& error : {image_error([&] { decode_image(read_bytes(path), path); }),
                                     image_error([&] { image_size(path); })}) {
      CHECK(has(error, path));
      CHECK(has(error, expected->second));
    }
  }
  CHECK(files == 26);
  CHECK(errors == refused.size());
}

TEST_CASE("image: a missing file, a few bytes, a huge size and an image smaller than annotated are errors") {
  const Quiet quiet;
  for (const std::string head : {"RIFF", "RIFF\1\2\3", "\xFF\xD8\xFF", "\x89PNG", "II*", "BM", "GIF8"})
    CHECK(has(image_error([&] { decode_image(head, "a.jpg"); }), "a.jpg"));
  const ImageFile file("small.png");
  CHECK(has(image_error([&] { read_bytes(file.path); }), file.path + " cannot be opened"));
  CHECK(has(image_error([&] { image_size(file.path.substr(0, file.path.size() - 10)); }),
            "is not a regular file"));
  Dice dice(9);
  const Image image = painted(dice, {20, 10});
  std::string png = encoded(".png", image), photo = jpeg(image), four = jpeg(image, cmyk);
  for (const std::string& bytes : {png, photo, with_exif(photo, exif(6, true))}) {
    CHECK_HAS(image_error([&] {
                decode_region(bytes, "a.jpg", {20, 10, 5, 5}, 1);
              }),
              "smaller than its annotation says");
    CHECK(!decode_region(bytes, "a.jpg", {5, 5, 50, 50}, 1).image.empty());  // partly inside of the image
  }
  CHECK(read_bytes(file("abcdef"), 4) == "abcd");
  png.replace(16, 8, number(65535, 4, false) + number(65535, 4, false));
  for (std::string* bytes : {&photo, &four})
    bytes->replace(bytes->find("\xFF\xC0") + 5, 4, number(65500, 2, false) + number(65500, 2, false));
  for (const std::string& bytes : {photo, four, png}) {
    CHECK(has(image_error([&] { image_size(file(bytes)); }), file.path));
    CHECK(has(image_error([&] { decode_image(bytes, "large"); }), "large"));
  }
}

TEST_CASE("image: a truncated file is an error, wherever the cut is; bytes after the end are ignored") {
  const Quiet quiet;
  const ImageFile file("cut");
  Dice dice(11);
  const Image image = painted(dice, {40, 24});
  const std::string preview = jpeg(painted(dice, {16, 12}));  // contains an end marker
  for (const std::string& bytes :
       {jpeg(image), jpeg(image, restarts), jpeg(image, progressive), jpeg(image, grey), jpeg(image, cmyk),
        with_exif(jpeg(image), exif(6, true) + preview),
        with_exif(jpeg(image, cmyk), exif(6, true) + preview), encoded(".png", image)}) {
    check_file(file(bytes + std::string(100, '\0')));
    for (size_t length = bytes.size() - 1; length > 0; --length) {
      std::filesystem::resize_file(file.path, length);
      CAPTURE(length);
      REQUIRE(has(image_error([&] { image_size(file.path); }), file.path));
      REQUIRE(has(image_error([&] { decode_image(read_bytes(file.path), file.path); }), file.path));
    }
  }
  // Regions above the cut can be decoded.
  const std::string bytes = jpeg(painted(dice, {200, 160})), cut = bytes.substr(0, bytes.size() / 2);
  const cv::Rect top(30, 0, 100, 40), below(30, 100, 100, 40);
  CHECK(same(decode_region(cut, "cut", top, 1).image, decode_region(bytes, "whole", top, 1).image));
  CHECK_HAS(image_error([&] { decode_region(cut, "cut.jpg", below, 1); }), "cut.jpg cannot be decoded");
}

TEST_CASE("image: an image that does not fit in memory is an ImageError without OpenCV's text" *
          not_sanitized) {
  Dice dice(13);
  for (const Way way : {baseline, cmyk}) {  // decoded by libjpeg, and by OpenCV
    std::string bytes = jpeg(painted(dice, {64, 48}), way);
    bytes.replace(bytes.find("\xFF\xC0") + 5, 4, number(30000, 2, false) + number(30000, 2, false));
    const std::string error = in_child([&] {
      std::ifstream statm("/proc/self/statm");
      rlim_t pages[6];  // the last: of data
      for (rlim_t& n : pages) statm >> n;
      const rlimit few{pages[5] * 4096 + (400 << 20), RLIM_INFINITY};  // the image takes 2.7 GB
      setrlimit(RLIMIT_DATA, &few);
      return image_error([&] { decode_image(bytes, "large.jpg"); });
    });
    CHECK_HAS(error, "large.jpg cannot be decoded: ");
    CHECK_HAS(error, "; free memory, give fewer --workers");
    CHECK_FALSE(has(error, "OpenCV"));
  }
}

TEST_CASE("programs: lack of memory in OpenCV and in operator new is printed in plain words") {
  const auto printed = [](const std::string& what) {
    return output_of(std::cerr, [&] { print_error(what); });
  };
  CHECK(printed(
            "a.jpg: OpenCV(4.6.0) ./modules/core/src/alloc.cpp:73: error: (-4:Insufficient memory) Failed to "
            "allocate 99 bytes in function 'OutOfMemoryError'\n") ==
        "error: a.jpg: out of memory (Failed to allocate 99 bytes); give a smaller --bs or --size, or fewer "
        "--workers\n");
  CHECK(has(printed(std::bad_alloc().what()), "out of memory; give a smaller --bs"));
  CHECK(printed("no file") == "error: no file\n");
}

TEST_CASE("image: a damaged file gives an image or an ImageError, nothing else") {
  const Quiet quiet;
  const ImageFile file("damaged");
  Dice dice(14);
  const Image image = painted(dice, {40, 24});
  std::vector<std::string> whole{encoded(".png", image), webp_with_exif(image, exif(6, true), true),
                                 with_exif(jpeg(image, grey), exif(6, true))};
  for (const Way way : {baseline, progressive, restarts, cmyk}) whole.push_back(jpeg(image, way));
  int pictures = 0, errors = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = whole[i % whole.size()];
    const int last = int(bytes.size()) - 1;
    const int header = std::min(last, 700), from = i % 3 == 0 ? header : 0, to = i % 3 == 1 ? header : last;
    for (int k = dice(1, 4); k > 0; --k) bytes[dice(from, to)] = char(dice(0, 255));
    if (i % 11 == 0) bytes.resize(dice(1, last));
    const std::string error = image_error([&] {
      const cv::Size size = i % 50 ? image.size() : image_size(file(bytes));
      const cv::Rect part = i % 2 ? everything : random_part(dice, image.size());
      const Image got = decode_region(bytes, "damaged file", part, 1.0 / dice(1, 9)).image;
      CHECK((!size.empty() && !got.empty()));
    });
    error.empty() ? ++pictures : ++errors;
    if (!error.empty()) CHECK((has(error, "damaged file") || has(error, file.path)));
  }
  CHECK(pictures > 400);
  CHECK(errors > 200);
}
