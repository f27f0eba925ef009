// SPDX-License-Identifier: Apache-2.0
// augment.hpp and pixels.hpp: boxes stay on their objects through every augmentation.
//
// Test images are grey and hold boxes that are each filled with one colour. In the augmented sample the
// pixels of that colour must span the box. Because an image is resampled only once, edges are accurate to
// half a pixel.
#include "augment.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <type_traits>

#include "album.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

Sample composed(const MemoryDataset& album, const SampleDraw& draw, cv::Size size) {
  Sample sample{Image(size, 0), {}};
  compose(album, draw, sample);
  return sample;
}

SampleDraw alone(std::size_t index, bool flip = false) { return {index, {}, {}, {{}, flip}}; }

const AffineDraw no_affine{0, 1, 0, 0, 0, 0};

// A mosaic of images 0 to 3 that meet at `centre` on the canvas.
SampleDraw four(cv::Point centre, const AffineDraw& affine = no_affine, bool flip = false) {
  return {0, MosaicDraw{centre, {1, 2, 3}, affine}, {}, {{}, flip}};
}

// An image between two inaccessible memory pages: an access before its first or after its last byte is a
// segmentation fault.
struct Fenced {
  std::size_t page = std::size_t(sysconf(_SC_PAGESIZE)), length;
  uchar* memory;
  Image image;
  Fenced(cv::Size size, bool at_end, std::uint64_t seed = 0) {
    const std::size_t bytes = 3 * std::size_t(size.area());
    length = (bytes + page - 1) / page * page;
    memory = static_cast<uchar*>(
        mmap(nullptr, length + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(memory != MAP_FAILED);
    image = cv::Mat(size, CV_8UC3, memory + page + (at_end ? length - bytes : 0));
    noise(size, seed).copyTo(image);
    mprotect(memory, page, PROT_NONE);
    mprotect(memory + page + length, page, PROT_NONE);
  }
  Fenced(const Fenced&) = delete;
  ~Fenced() { munmap(memory, length + 2 * page); }
};

// Bilinear interpolation in double precision. (0, 0) is the corner of the first pixel, not its centre. The
// border is replicated.
cv::Vec3d bilinear_at(const Image& image, double x, double y) {
  x = std::clamp(x - 0.5, 0.0, image.cols - 1.0);
  y = std::clamp(y - 0.5, 0.0, image.rows - 1.0);
  const int l = int(x), t = int(y), r = std::min(l + 1, image.cols - 1), b = std::min(t + 1, image.rows - 1);
  const auto at = [&](int row, int column) { return cv::Vec3d(image(row, column)); };
  return (at(t, l) * (l + 1 - x) + at(t, r) * (x - l)) * (t + 1 - y) +
         (at(b, l) * (l + 1 - x) + at(b, r) * (x - l)) * (y - t);
}

// A random affine map with rotation, scale, shear, flip and translation, roughly from `from` to `to`.
Affine random_map(Rng& rng, cv::Size from, cv::Size to) {
  const double angle = rng.uniform(-3.2, 3.2), zoom = std::exp(rng.uniform(-1.5, 1.5)),
               shear = rng.uniform(-0.3, 0.3);
  const Affine turned{{zoom * std::cos(angle), zoom * std::sin(angle), 0,  //
                       zoom * (shear - std::sin(angle)), zoom * std::cos(angle), 0}};
  return scale_shift({rng.bernoulli(0.5) ? 1.0 : -1.0, 1}, -from.width / 2.0, -from.height / 2.0)
      .then(turned)
      .then(scale_shift({1, 1}, to.width * rng.uniform(0.2, 0.8), to.height * rng.uniform(0.2, 0.8)));
}

}  // namespace

// ---- types and settings ----

TEST_CASE("augmentation: the types of transforms accept and return uint8 images only") {
  static_assert(!std::is_constructible_v<Image, cv::Mat_<cv::Vec3f>>);
  static_assert(!std::is_convertible_v<cv::Mat_<cv::Vec3f>, Image>);
  static_assert(!std::is_assignable_v<Image&, cv::Mat_<cv::Vec3f>>);
  static_assert(!std::is_constructible_v<Image, cv::Mat_<uchar>>);
  static_assert(std::is_same_v<decltype(Sample::image), Image> &&
                std::is_same_v<decltype(ImageRegion::image), Image> &&
                std::is_same_v<decltype(Letterbox::image), Image>);
  static_assert(
      std::is_invocable_v<decltype(warp_image), Image&, ImageRegion, cv::Matx23d, cv::Matx23d, cv::Rect2d> &&
      !std::is_invocable_v<decltype(warp_image), cv::Mat_<cv::Vec3f>&, ImageRegion, cv::Matx23d, cv::Matx23d,
                           cv::Rect2d>);
  static_assert(!std::is_invocable_v<decltype(letterbox), cv::Mat_<cv::Vec3f>, cv::Size>);
  CHECK_THROWS_WITH_AS(Image(cv::Mat(2, 2, CV_32FC3)), doctest::Contains("the image is CV_32FC3"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(Image(cv::Mat(2, 2, CV_8UC1)), doctest::Contains("CV_8UC1"), std::runtime_error);
  CHECK_THROWS_WITH_AS(Image(cv::Mat{}), doctest::Contains("empty"), std::runtime_error);
  CHECK_THROWS_WITH_AS(letterbox(Image(), {32, 32}), doctest::Contains("empty"), std::runtime_error);
  Image image;
  CHECK_THROWS_AS((image = cv::Mat(2, 2, CV_32FC3)), std::runtime_error);
  CHECK(Image(cv::Mat(2, 3, CV_8UC3)).size() == cv::Size(3, 2));
}

// ---- random numbers ----

TEST_CASE("Rng: values equal golden values from an independent Python implementation") {
  const auto golden = [](Rng rng, std::vector<std::uint64_t> values) {
    for (auto v : values) CHECK(rng.next() == v);
  };
  golden(Rng(0, 0, 0), {0x2130748aaac80268, 0x0cc78fb979ce5090, 0x0ab9aa3dafba6b4ac});
  golden(Rng(1, 2, 3), {0x12588d809dce88a7, 0x0dd034ea7d44e8739, 0x5b70c9b40c7440b6});
  golden(Rng(~0ull, 5, 117265), {0x5fba0ac8e2ac29c9, 0x011fc8f371c05812, 0x31e70c5736622571});
  Rng rng(0, 0, 0);
  CHECK(rng.uniform(0, 1) == double(0x2130748aaac80268 >> 11) / double(1ull << 53));
  CHECK(rng.randint(0, 9) == 0x0cc78fb979ce5090 % 10);
}

TEST_CASE(
    "augmentation: parameters stay in their ranges, and each transform has the configured probability") {
  AugmentConfig c;
  c.mosaic_prob = 0.7;
  c.mixup_prob = 0.4;
  c.hsv_prob = 0.6;
  c.flip_prob = 0.2;
  const cv::Size size(96, 64);
  const int n = 4000;
  int mosaics = 0, mixups = 0, jitters = 0, flips = 0, still = 0;
  double angle_lo = 0, angle_hi = 0;
  for (int i = 0; i < n; ++i) {
    Rng rng(1, 2, i);
    const SampleDraw d = draw_sample(rng, c, 50, i % 50, size, true);
    REQUIRE(d.index == std::size_t(i % 50));
    if (d.mosaic) {
      ++mosaics;
      const auto& [centre, others, a] = *d.mosaic;
      REQUIRE(cv::Rect(48, 32, 96, 64).contains(centre));
      for (auto o : others) REQUIRE(o < 50);
      REQUIRE((std::abs(a.angle) <= 10 && a.scale >= 0.1 && a.scale <= 2 && std::abs(a.shear_x) <= 2));
      REQUIRE((std::abs(a.shear_y) <= 2 && std::abs(a.shift_x) <= 0.1 && std::abs(a.shift_y) <= 0.1));
      angle_lo = std::min(angle_lo, a.angle);
      angle_hi = std::max(angle_hi, a.angle);
    }
    if (d.mixup) {
      ++mixups;
      REQUIRE(d.mosaic);
      const cv::Size zoomed = mixup_size(size, d.mixup->scale);
      REQUIRE(d.mixup->candidates.size() == std::size_t(c.mixup_tries));
      REQUIRE((d.mixup->offset.x >= 0 && d.mixup->offset.x <= std::max(0, zoomed.width - size.width)));
      REQUIRE((d.mixup->offset.y >= 0 && d.mixup->offset.y <= std::max(0, zoomed.height - size.height)));
    }
    flips += d.colour_flip.flip;
    if (const auto& h = d.colour_flip.hsv) {
      ++jitters;
      still += h->h == 0;
      REQUIRE((std::abs(h->h) <= 5 && std::abs(h->s) <= 30 && std::abs(h->v) <= 30));
    }
    Rng again(1, 2, i);
    const SampleDraw late = draw_sample(again, c, 50, i % 50, size, false);
    REQUIRE((!late.mosaic && !late.mixup));
  }
  CHECK(mosaics == doctest::Approx(0.7 * n).epsilon(0.05));
  CHECK(mixups == doctest::Approx(0.28 * n).epsilon(0.08));
  CHECK(jitters == doctest::Approx(0.6 * n).epsilon(0.05));
  CHECK(still == doctest::Approx(0.3 * n).epsilon(0.1));
  CHECK(flips == doctest::Approx(0.2 * n).epsilon(0.1));
  CHECK((angle_lo < -9.8 && angle_hi > 9.8));
  Rng rng(0, 0, 0);
  CHECK_THROWS_WITH(draw_sample(rng, c, 50, 50, size, true),
                    doctest::Contains("sample index 50 is out of range: the data set has 50 images"));
}

// ---- colour ----

TEST_CASE("augmentation: hue shifts act on BGR") {
  const auto jittered = [](cv::Vec3b pixel, HsvDraw hsv) {
    const MemoryDataset album{{{coloured({8, 8}, pixel), {}}}};
    return composed(album, {0, {}, {}, {hsv, false}}, {8, 8}).image(3, 3);
  };
  CHECK(jittered({0, 0, 255}, {60, 0, 0}) == cv::Vec3b(0, 255, 0));   // red + 120 degrees = green
  CHECK(jittered({0, 0, 255}, {-60, 0, 0}) == cv::Vec3b(255, 0, 0));  // red - 120 degrees = blue
  CHECK(jittered({255, 0, 0}, {60, 0, 0}) == cv::Vec3b(0, 0, 255));   // blue + 120 degrees = red
  CHECK(jittered({0, 0, 255}, {90, 0, 0}) == cv::Vec3b(255, 255, 0));
  CHECK(jittered({0, 0, 255}, {-90, 0, 0}) == cv::Vec3b(255, 255, 0));  // -180 degrees = 180 degrees
  CHECK(jittered({0, 0, 255}, {0, 0, -300}) == cv::Vec3b(0, 0, 0));     // saturates at 0
  CHECK(jittered({0, 0, 200}, {0, 30, 90}) == cv::Vec3b(0, 0, 255));    // saturates at 255
  CHECK(jittered({10, 20, 200}, {0, -255, 0}) == cv::Vec3b(200, 200, 200));
  CHECK(jittered({90, 90, 90}, {0, 0, 10.9}) == cv::Vec3b(100, 100, 100));  // truncated
  CHECK(jittered({90, 90, 90}, {0.9, -0.9, 0.9}) == cv::Vec3b(90, 90, 90));
  CHECK(jittered({90, 90, 90}, {0, 51, 0}) == cv::Vec3b(72, 72, 90));   // hue of grey is 0, as in OpenCV
  CHECK(jittered({90, 90, 90}, {60, 51, 0}) == cv::Vec3b(72, 90, 72));  // and its hue shifts accordingly
}

TEST_CASE(
    "augmentation: HSV jitter equals the exact result, rounded, and OpenCV's up to its hue resolution") {
  Image image = noise({640, 60});
  Rng rng(1, 0, 0);
  Image top(image.rowRange(0, 20));
  for (auto& p : top)  // near grey, where the hue is most sensitive to rounding
    for (int c : {1, 2}) p[c] = cv::saturate_cast<uchar>(p[0] + int(rng.randint(-3, 3)));
  const std::vector<HsvDraw> draws = {{0, 0, 1},   {5, 30, 30}, {-5, -30, -30}, {90, 0, 0},  {-90, 10, 0},
                                      {60, 5, -5}, {1, 255, 0}, {0, -255, 0},   {0, 0, 255}, {33, -60, 90}};
  for (const HsvDraw& d : draws) {
    Image got(image.clone());
    hsv_jitter(got.ptr(), got.total(), float(d.h), float(d.s), float(d.v));
    int off = 0;
    for (int y = 0; y < image.rows; ++y) {
      for (int x = 0; x < image.cols; ++x) {
        const cv::Vec3b p = image(y, x);
        const double b = p[0], g = p[1], r = p[2], most = std::max({b, g, r}),
                     range = most - std::min({b, g, r});
        double h = range == 0  ? 0
                   : most == r ? (g - b) / range
                   : most == g ? 2 + (b - r) / range
                               : 4 + (r - g) / range;
        h = std::fmod(h + d.h / 30 + 12, 6);
        const double s = std::clamp(255 * range / std::max(most, 1.0) + d.s, 0.0, 255.0) / 255;
        const double v = std::clamp(most + d.v, 0.0, 255.0);
        for (int c = 0; c < 3; ++c) {  // offsets 5, 3, 1 for R, G, B: see Wikipedia, "HSL and HSV"
          const double k = std::fmod((c == 0 ? 1 : c == 1 ? 3 : 5) + h, 6);
          const double exact = v - v * s * std::clamp(std::min(k, 4 - k), 0.0, 1.0);
          const double error = std::abs(got(y, x)[c] - exact);
          REQUIRE(error < 0.501);
          off += error > 0.5001;
        }
      }
    }
    CHECK(off == 0);
    const Image theirs = official::hsv(image, d);
    CHECK(max_difference(got, theirs) <= 6);
    CHECK(cv::norm(got, theirs, cv::NORM_L1) / double(3 * got.total()) < 1);
  }
}

TEST_CASE(
    "augmentation: HSV jitter of n pixels equals the first n of a longer row and writes no other byte") {
  const Image image = noise({300, 1});
  Image whole(image.clone());
  hsv_jitter(whole.ptr(), 300, 7, -20, 15);
  for (int count : {0, 1, 2, 63, 64, 65, 127, 128, 200, 299}) {
    Image part(image.clone());
    hsv_jitter(part.ptr(), count, 7, -20, 15);
    CHECK(std::memcmp(part.ptr(), whole.ptr(), 3 * count) == 0);
    CHECK(std::memcmp(part.ptr() + 3 * count, image.ptr() + 3 * count, 3 * (300 - count)) == 0);
  }
  Fenced fenced({77, 1}, true);
  hsv_jitter(fenced.image.ptr(), 77, 1, 2, 3);
}

TEST_CASE("augmentation: the average of two images rounds halves up") {
  Image a({256, 256}, 0), b({256, 256}, 0);
  for (int y = 0; y < 256; ++y)
    for (int x = 0; x < 256; ++x) {
      a(y, x) = cv::Vec3b::all(uchar(x));
      b(y, x) = cv::Vec3b::all(uchar(y));
    }
  const Image before(b.clone());
  average_images(a, b);
  for (int y = 0; y < 256; ++y)
    for (int x = 0; x < 256; ++x) REQUIRE(a(y, x) == cv::Vec3b::all(uchar((x + y + 1) / 2)));
  CHECK(max_difference(b, before) == 0);
}

// ---- drawing ----

#if defined(__x86_64__)
TEST_CASE("augmentation: rows sampled with SSSE3 equal the plain version bit for bit" *
          doctest::skip(!__builtin_cpu_supports("ssse3"))) {
  using namespace pixels_detail;
  const Fenced fenced({23, 17}, true);
  const Image& image = fenced.image;
  Rng rng(3, 0, 0);
  for (int i = 0; i < 20000; ++i) {
    // A row from one position to another. Both have their four neighbours and one more column to the right
    // inside the image.
    const int n = int(rng.randint(1, 40)), whole = i % 4;  // some positions at whole or quarter pixels
    const auto position = [&](int pixels) {
      const int64_t p = int64_t(rng.uniform(0, double(pixels) * 0x1p32 - 1));
      return whole == 1 ? p & ~0xFFFFFFFFll : whole == 2 ? p & ~0x3FFFFFFFll : p;
    };
    const Position from{position(image.cols - 2), position(image.rows - 1)};
    const Position to{position(image.cols - 2), position(image.rows - 1)};
    const Position step{(to.x - from.x) / n, (to.y - from.y) / n};
    std::vector<uchar> plain(3 * n + 8, 7), fast(3 * n + 8, 7);
    sample_row_plain(image, from, step, plain.data(), n);
    sample_row_ssse3(image, from, step, fast.data(), n);
    REQUIRE(plain == fast);
    for (int k = 0; k < 8; ++k) REQUIRE(fast[3 * n + k] == 7);
  }
}
#endif

TEST_CASE("augmentation: warping equals exact bilinear sampling, and writes only the pixels that are shown") {
  Rng rng(4, 0, 0);
  int64_t drawn = 0, left = 0;
  double error = 0, bias = 0;
  for (int i = 0; i < 500; ++i) {
    // Samples inside the image, at its edges and entirely outside it. Images start at 1x1 pixel.
    const cv::Size size = random_size(rng, 1, i % 3 ? 60 : 5), out_size = random_size(rng, 1, 60);
    const Fenced fenced(size, i % 2, i);
    const Affine to_out = random_map(rng, size, out_size), to_picture = to_out.inverse();
    const cv::Rect2d shown(rng.uniform(-20, 10), rng.uniform(-20, 10), rng.uniform(5, 80),
                           rng.uniform(5, 80));
    Image frame({out_size.width + 2, out_size.height + 2}, 99);
    Image out = frame(cv::Rect({1, 1}, out_size));
    warp_image(out, {fenced.image, {1, 1}, {0, 0}}, to_picture.m, to_picture.m, shown);
    for (int y = 0; y < frame.rows; ++y) {
      for (int x = 0; x < frame.cols; ++x) {
        const cv::Point2d p = to_picture(x - 0.5, y - 0.5);
        const bool inside = cv::Rect({1, 1}, out_size).contains({x, y});
        if (!inside || !(p.x >= shown.x && p.x < shown.br().x && p.y >= shown.y && p.y < shown.br().y)) {
          REQUIRE(frame(y, x) == cv::Vec3b::all(99));
          ++left;
          continue;
        }
        const cv::Vec3d away = cv::Vec3d(frame(y, x)) - bilinear_at(fenced.image, p.x, p.y);
        // Rounding, and weights in steps of 1/128 and 1/256, times 255.
        REQUIRE(cv::norm(away, cv::NORM_INF) < 4);
        error += away.dot(away) / 3;
        bias += (away[0] + away[1] + away[2]) / 3;
        ++drawn;
      }
    }
  }
  CHECK(drawn > 100000);
  CHECK(left > 100000);
  CHECK(error / double(drawn) < 0.5);
  CHECK(std::abs(bias / double(drawn)) < 0.03);  // rounded, not truncated
}

TEST_CASE("augmentation: warping from a crop, also a downscaled one, equals warping from the whole image") {
  Rng rng(6, 0, 0);
  MemoryDataset album{{{smooth({400, 300}), {}}}};
  for (int i = 0; i < 60; ++i) {
    const cv::Rect part(int(rng.randint(0, 150)), int(rng.randint(0, 100)), int(rng.randint(40, 200)),
                        int(rng.randint(40, 200)));
    const Affine to_out = scale_shift({0.4, 0.4}, -0.4 * part.x, -0.4 * part.y);
    const Affine to_picture = to_out.inverse();
    const cv::Rect2d shown(part.x + 5, part.y + 5, part.width - 10, part.height - 10);
    Image all({80, 80}, 0), cut({80, 80}, 0), small({80, 80}, 0);
    warp_image(all, {album.samples[0].image, {1, 1}, {0, 0}}, to_picture.m, to_picture.m, shown);
    album.most_reduced = 1;
    warp_image(cut, album.image_region(0, part, 0.4), to_picture.m, to_picture.m, shown);
    CHECK(max_difference(all, cut) == 0);
    album.most_reduced = 2;
    warp_image(small, album.image_region(0, part, 0.4), to_picture.m, to_picture.m, shown);
    CHECK(max_difference(all, small) <= 6);
    CHECK(cv::norm(all, small, cv::NORM_L1) / double(3 * part.area() * 0.16) <
          0.7);  // off by half a pixel: 2
  }
}

// ---- geometry ----

TEST_CASE("augmentation: a single image keeps boxes on their objects, also flipped") {
  Rng rng(8, 0, 0);
  int compared = 0;
  for (int i = 0; i < 300 / kFewer; ++i) {
    const cv::Size size(32 * rng.randint(2, 6), 32 * rng.randint(2, 6));
    MemoryDataset album{{marked_image(rng, random_size(rng, 40, i % 3 ? 150 : 700), 2 * (i % 4))}};
    album.most_reduced = i % 2 ? 8 : 1;
    CHECK(check_marks(album.samples[0], 0) == 2);
    const bool flip = i % 4 < 2;
    const Sample out = composed(album, alone(0, flip), size);
    compared += check_marks(out, album.most_reduced == 1 ? 0.51 : 0.59);
    const Fit to = fit_into(album.size(0), size, false);
    REQUIRE(out.boxes.size() == 2);
    for (int b : {0, 1}) {  // the exact coordinates; a flip mirrors the image within its own width, so that
                            // it stays at the top left
      const Box &was = album.samples[0].boxes[b], &is = out.boxes[b];
      const double x1 = was.x1 * to.scale.x, x2 = was.x2 * to.scale.x;
      CHECK(max_corner_difference(is, {flip ? to.size.width - x2 : x1, was.y1 * to.scale.y,
                                       flip ? to.size.width - x1 : x2, was.y2 * to.scale.y, 0}) < 1e-9);
      CHECK(is.cls == was.cls);
    }
  }
  CHECK(compared > 550 / kFewer);
}

TEST_CASE("augmentation: the border beside a single image stays grey under HSV jitter and flip") {
  Rng rng(22, 0, 0);
  for (int i = 0; i < 50; ++i) {
    const cv::Size size(96, 64), picture = random_size(rng, 1, 200);
    const MemoryDataset album{{{coloured(picture, {200, 10, 30}), {}}}};
    const Image out = composed(album, {0, {}, {}, {HsvDraw{5, 30, 30}, i % 2 == 0}}, size).image;
    Image expected(size, border_grey);
    Image colour = coloured({1, 1}, {200, 10, 30});
    hsv_jitter(colour.ptr(), 1, 5, 30, 30);
    expected(cv::Rect({0, 0}, fit_into(picture, size, false).size)).setTo(colour(0, 0));
    CHECK(max_difference(out, expected) == 0);
  }
  // In a mosaic, jitter changes the border together with the images.
  const MemoryDataset album{std::vector<Sample>(4, Sample{Image({9, 9}, 50), {}})};
  SampleDraw draw = four({32, 32}, {0, 0.25, 0, 0, 0, 0});
  draw.colour_flip.hsv = HsvDraw{0, 0, 10};
  CHECK(composed(album, draw, {64, 64}).image(60, 60) == cv::Vec3b::all(border_grey + 10));
}

TEST_CASE("augmentation: an image of the sample's size is copied or flipped exactly, without interpolation") {
  const MemoryDataset album{{{noise({64, 48}), {}}}};
  CHECK(max_difference(composed(album, alone(0), {64, 48}).image, album.samples[0].image) == 0);
  Image mirrored;
  cv::flip(album.samples[0].image, mirrored, 1);
  CHECK(max_difference(composed(album, alone(0, true), {64, 48}).image, mirrored) == 0);
}

TEST_CASE("augmentation: vertical flips and quarter turns are exact, and keep boxes on their objects") {
  const MemoryDataset square{{{noise({48, 48}), {}}}};
  for (const auto& [turns, code] :
       {std::pair(1, cv::ROTATE_90_CLOCKWISE), {2, cv::ROTATE_180}, {3, cv::ROTATE_90_COUNTERCLOCKWISE}}) {
    SampleDraw draw = alone(0);
    draw.extra.turns = turns;
    cv::Mat expected;
    cv::rotate(square.samples[0].image, expected, code);
    CHECK(max_difference(composed(square, draw, {48, 48}).image, expected) == 0);
    draw.extra.flip_vertical = true;
    cv::flip(expected, expected, 0);
    CHECK(max_difference(composed(square, draw, {48, 48}).image, expected) == 0);
  }
  Rng rng(31, 0, 0);
  int compared = 0;
  for (int i = 0; i < 300 / kFewer; ++i) {
    const cv::Size size(32 * rng.randint(2, 6), 32 * rng.randint(2, 6));
    MemoryDataset album;
    for (int k = 0; k < 4; ++k)
      album.samples.push_back(marked_image(rng, random_size(rng, 40, i % 9 == 2 ? 500 : 150), 2 * k));
    album.most_reduced = i % 2 ? 8 : 1;
    SampleDraw draw = alone(0, i % 4 < 2);
    if (i % 3 == 1) draw = four(draw_mosaic(rng, {}, 4, size).centre, no_affine, i % 4 < 2);
    if (i % 3 == 2) {
      album.samples[0] = {Image(size, border_grey), {}};
      draw.mixup = draw_mixup(rng, {}, 4, size);
      draw.mixup->candidates = {1};
    }
    draw.extra.turns = int(rng.randint(0, 3));
    draw.extra.flip_vertical = rng.bernoulli(0.5);
    compared += check_marks(composed(album, draw, size), album.most_reduced == 1 ? 0.51 : 0.59,
                            i % 3 == 2 ? 0.25 : 0.5);
  }
  CHECK(compared > 400 / kFewer);
}

TEST_CASE("augmentation: blur and grey change the image but not its border; cutout drops hidden boxes") {
  const Image picture = noise({40, 20}, 5);
  const MemoryDataset album{{{picture, {{0, 0, 10, 10, 1}, {10, 0, 30, 10, 2}}}}};
  const auto with = [&](const auto& change) {
    SampleDraw draw = alone(0);
    change(draw.extra);
    const Sample out = composed(album, draw, {40, 40});
    CHECK(max_difference(Image(out.image(cv::Rect(0, 20, 40, 20))), Image({40, 20}, border_grey)) == 0);
    return out;
  };
  const auto top = [](const Sample& s) { return Image(s.image(cv::Rect(0, 0, 40, 20))); };
  cv::Mat expected, grey;
  cv::GaussianBlur(picture, expected, {0, 0}, 1.5, 0, cv::BORDER_REPLICATE);
  CHECK(max_difference(top(with([](ExtraDraw& d) { d.blur = 1.5; })), expected) == 0);
  cv::cvtColor(picture, grey, cv::COLOR_BGR2GRAY);
  cv::cvtColor(grey, expected, cv::COLOR_GRAY2BGR);
  CHECK(max_difference(top(with([](ExtraDraw& d) { d.grey = true; })), expected) == 0);

  // Hides 8 x 10 pixels: 0.8 of the first box and nothing of the second one; then 0.6 of the first one.
  for (const auto& [width, left] : {std::pair(0.2, 1u), {0.15, 2u}}) {
    const Sample out = with([&, width = width](ExtraDraw& d) { d.cutout = {0, 0, width, 0.5}; });
    CHECK(out.boxes.size() == left);
    cv::Mat hidden = picture.clone();
    hidden(cv::Rect(0, 0, int(width * 40), 10)).setTo(cv::Scalar::all(border_grey));
    CHECK(max_difference(top(out), hidden) == 0);
  }

  AugmentConfig config;
  Rng rng(32, 0, 0);
  for (int i = 0; i < 100; ++i) {
    const ExtraDraw d = draw_sample(rng, config, 1, 0, {64, 64}, true).extra;
    CHECK((!d.flip_vertical && d.turns == 0 && d.blur == 0 && !d.grey && d.cutout.empty()));
  }
  config.vflip_prob = config.turn_prob = config.blur_prob = config.grey_prob = config.cutout_prob = 1;
  for (int i = 0; i < 100; ++i) {
    const ExtraDraw d = draw_sample(rng, config, 1, 0, {64, 64}, true).extra;
    CHECK((d.flip_vertical && d.turns >= 1 && d.turns <= 3 && d.blur > 0 && d.grey));
    CHECK((d.cutout & cv::Rect2d(0, 0, 1, 1)) == d.cutout);
    CHECK(d.cutout.area() > 0);
  }
}

TEST_CASE("augmentation: ignored regions move with their image") {
  MemoryDataset album{{{noise({64, 64}), {{4, 6, 24, 26, 2}}},
                       {noise({64, 64}), {}},
                       {noise({64, 64}), {}},
                       {noise({64, 64}), {{8, 8, 40, 40, 1}}}}};
  album.regions = {{{4, 6, 24, 26, kIgnoredRegion}}, {}, {}, {{8, 8, 40, 40, kIgnoredRegion}}};
  SampleDraw mixed = alone(0, true);
  mixed.mixup = MixupDraw{0.8, true, {0, 0}, {3}};
  SampleDraw turned = alone(0);
  turned.extra.turns = 1;
  for (const SampleDraw& draw :
       {alone(0), alone(0, true), four({40, 30}, {10, 0.9, 2, -2, 0.1, 0}), mixed, turned}) {
    const Sample out = composed(album, draw, {64, 64});
    std::vector<Box> objects, regions;
    for (const Box& b : out.boxes) (b.cls == kIgnoredRegion ? regions : objects).push_back(b);
    REQUIRE(objects.size() == regions.size());
    CHECK(!objects.empty());
    for (size_t i = 0; i < objects.size(); ++i) CHECK(max_corner_difference(objects[i], regions[i]) == 0);
  }
  // An image with regions alone is no partner of MixUp.
  album.samples[3].boxes.clear();
  CHECK(composed(album, mixed, {64, 64}).boxes.size() == 2);
}

TEST_CASE("augmentation: scale and translation keep boxes on their objects") {
  Rng rng(10, 0, 0);
  int compared = 0;
  for (int i = 0; i < 400; ++i) {
    const cv::Size size(32 * rng.randint(3, 5), 32 * rng.randint(3, 5));
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 40, 400), 2 * k));
    album.most_reduced = i % 2 ? 8 : 1;
    const AffineDraw affine{0, rng.uniform(0.2, 2), 0, 0, rng.uniform(-0.3, 0.3), rng.uniform(-0.3, 0.3)};
    const SampleDraw draw = four(draw_mosaic(rng, {}, 4, size).centre, affine, i % 4 < 2);
    const Sample out = composed(album, draw, size);
    for (const Box& b : out.boxes) {
      CHECK((b.x1 >= 0 && b.y1 >= 0 && b.x2 <= size.width && b.y2 <= size.height));
      CHECK((b.x2 - b.x1 > 1 && b.y2 - b.y1 > 1));
    }
    compared += check_marks(out, album.most_reduced == 1 ? 0.51 : 0.59);
  }
  CHECK(compared > 700);
}

TEST_CASE("augmentation: a rotated or sheared box contains its object and touches it") {
  Rng rng(11, 0, 0);
  int compared = 0;
  for (int i = 0; i < 400 / kFewer; ++i) {
    const cv::Size size(160, 128);
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 60, 400), 2 * k));
    album.most_reduced = i % 2 ? 8 : 1;
    AugmentConfig c;
    if (i % 4 == 0) {
      c.degrees = 180;
      c.shear = 20;
    }
    const SampleDraw draw = four({size.width, size.height}, draw_affine(rng, c), i % 3 == 0);
    const Sample out = composed(album, draw, size);
    for (const Box& b : out.boxes) {
      const auto seen = extent(out.image, b.cls);
      if (!seen || std::min(b.x2 - b.x1, b.y2 - b.y1) < 4) continue;
      const double slack = album.most_reduced == 1 ? 0.51 : 0.59;
      CHECK((seen->x1 >= b.x1 - slack && seen->y1 >= b.y1 - slack));
      CHECK((seen->x2 <= b.x2 + slack && seen->y2 <= b.y2 + slack));
      const bool inside = b.x1 > 0 && b.y1 > 0 && b.x2 < size.width && b.y2 < size.height;
      if (!inside || c.degrees > 10)
        continue;  // a strongly rotated box has pointed corners, which pixels do not resolve
      CHECK(max_corner_difference(*seen, b) <= 0.9);
      ++compared;
    }
  }
  CHECK(compared > 200 / kFewer);
}

TEST_CASE("augmentation: rotation is about the canvas corner, as in official training") {
  const cv::Matx23d m = affine_matrix({90, 1, 0, 0, 0, 0}, {64, 64});
  CHECK(m(0, 2) == 0);
  CHECK(m(1, 2) == 0);
  CHECK(m(0, 1) == doctest::Approx(1));   // down becomes right
  CHECK(m(1, 0) == doctest::Approx(-1));  // right becomes up: the rotation is counter-clockwise
}

TEST_CASE("augmentation: tiles of a mosaic meet without gap or overlap under any affine map") {
  Rng rng(12, 0, 0);
  int tiles = 0, grey = 0;
  for (int i = 0; i < 200; ++i) {
    const cv::Size size(32 * rng.randint(1, 4), 32 * rng.randint(1, 4));
    MemoryDataset album;  // each image fills its tile
    for (int k = 0; k < 4; ++k) {
      const int larger = int(rng.randint(1, 3));
      album.samples.push_back({coloured(size * larger, colours[k]), {}});
    }
    AffineDraw affine = draw_affine(rng, {});
    if (i % 4 == 0)
      affine = {90.0 * (i / 4 % 4), i % 8 ? 0.5 : 0.25, 0, 0, 0.5, 0.5};  // edges on pixel centres
    const cv::Point centre = draw_mosaic(rng, {}, 4, size).centre;
    const bool flip = i % 3 == 0;
    const Image out = composed(album, four(centre, affine, flip), size).image;
    const Affine canvas_of_sample =
        Affine{affine_matrix(affine, size)}.then(flip ? mirror(size.width) : Affine{}).inverse();
    const cv::Rect2d covered =
        cv::Rect2d(0, 0, 2 * size.width, 2 * size.height) &
        cv::Rect2d(centre.x - size.width, centre.y - size.height, 2 * size.width, 2 * size.height);
    for (int y = 0; y < size.height; ++y) {
      for (int x = 0; x < size.width; ++x) {
        const cv::Point2d p = canvas_of_sample(x + 0.5, y + 0.5);
        const auto close = [&](double at, double edge) { return std::abs(at - edge) < 1e-9; };
        if (close(p.x, covered.x) || close(p.x, covered.br().x) || close(p.y, covered.y) ||
            close(p.y, covered.br().y))
          continue;
        if (!covered.contains(p)) {
          REQUIRE(out(y, x) == cv::Vec3b::all(border_grey));
          ++grey;
          continue;
        }
        // A pixel on the edge between two tiles may have the colour of either.
        const int k = (p.x >= centre.x) + 2 * (p.y >= centre.y);
        const bool on_edge = close(p.x, centre.x) || close(p.y, centre.y);
        const auto begin = colours.begin();
        REQUIRE((on_edge ? std::find(begin, begin + 4, out(y, x)) != begin + 4 : out(y, x) == colours[k]));
        ++tiles;
      }
    }
  }
  CHECK(tiles > 200000);
  CHECK(grey > 100000);
}

TEST_CASE(
    "augmentation: MixUp scales to whole pixels, flips the image with its border and crops at the offset") {
  const MemoryDataset album{
      {{Image({64, 64}, border_grey), {}}, {Image({32, 16}, 0), {{4, 2, 20, 12, 1}}}}};  // 64x32
  const auto box = [&](double scale, bool mirrored, cv::Point offset, bool flip = false) {
    SampleDraw draw = alone(0, flip);
    draw.mixup = MixupDraw{scale, mirrored, offset, {1}};
    const Sample out = composed(album, draw, {64, 64});
    REQUIRE(out.boxes.size() == 1);
    return out.boxes[0];
  };
  const double f = 2 * 51.0 / 64;  // the width 0.8 * 64 = 51.2 is truncated to 51
  CHECK(max_corner_difference(box(0.8, false, {0, 0}), {4 * f, 2 * f, 20 * f, 12 * f, 1}) < 1e-9);
  CHECK(max_corner_difference(box(0.8, true, {0, 0}), {51 - 20 * f, 2 * f, 51 - 4 * f, 12 * f, 1}) < 1e-9);
  CHECK(max_corner_difference(box(0.8, true, {0, 0}, true), {13 + 4 * f, 2 * f, 13 + 20 * f, 12 * f, 1}) <
        1e-9);
  CHECK(max_corner_difference(box(1.5, false, {10, 5}), {12 - 10, 6 - 5, 60 - 10, 36 - 5, 1}) < 1e-9);
  CHECK(max_corner_difference(box(1.5, true, {10, 5}), {96 - 60 - 10, 6 - 5, 64, 36 - 5, 1}) < 1e-9);
}

TEST_CASE(
    "augmentation: mosaic, MixUp, HSV jitter and flip together equal the transforms applied one by one") {
  Rng rng(14, 0, 0);
  for (int i = 0; i < 60; ++i) {
    const cv::Size size(32 * rng.randint(2, 5), 32 * rng.randint(2, 5));
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 40, 300), 2 * k));
    album.samples.push_back({Image({7, 5}, border_grey), {}});
    album.most_reduced = i % 2 ? 8 : 1;
    const SampleDraw draw = draw_sample(rng, {}, 4, i % 4, size, true);
    REQUIRE((draw.mosaic && draw.mixup && draw.colour_flip.hsv));
    SampleDraw mosaic = draw, mixed = draw, other = alone(4, draw.colour_flip.flip);
    mosaic.mixup = {};
    mosaic.colour_flip.hsv = {};
    mixed.colour_flip.hsv = {};
    other.mixup = draw.mixup;
    const Sample a = composed(album, mosaic, size), b = composed(album, other, size);
    const Sample ab = composed(album, mixed, size), all = composed(album, draw, size);
    std::vector<Box> boxes = a.boxes;
    boxes.insert(boxes.end(), b.boxes.begin(), b.boxes.end());
    REQUIRE(all.boxes.size() == boxes.size());
    for (std::size_t k = 0; k < boxes.size(); ++k) {
      CHECK(max_corner_difference(all.boxes[k], boxes[k]) == 0);
      CHECK(all.boxes[k].cls == boxes[k].cls);
    }
    // b is the mean of the second image and grey, so the result is equal up to rounding.
    for (int y = 0; y < size.height; ++y)
      for (int x = 0; x < size.width; ++x)
        for (int c = 0; c < 3; ++c)
          REQUIRE(std::abs(2 * ab.image(y, x)[c] - (a.image(y, x)[c] + 2 * b.image(y, x)[c] - border_grey)) <=
                  2);
    Image jittered(ab.image.clone());
    const HsvDraw& hsv = *draw.colour_flip.hsv;
    hsv_jitter(jittered.ptr(), jittered.total(), float(int(hsv.h)), float(int(hsv.s)), float(int(hsv.v)));
    CHECK(max_difference(all.image, jittered) == 0);
  }
}

TEST_CASE(
    "augmentation: a resized image fills one side, keeps its size when resized again, and has at least a "
    "pixel") {
  Rng rng(16, 0, 0);
  for (int i = 0; i < 2000; ++i) {
    const cv::Size picture = random_size(rng, 1, 2000), room = random_size(rng, 16, 700);
    const Fit once = fit_into(picture, room, false), twice = fit_into(once.size, room, false);
    REQUIRE((once.size.width == room.width || once.size.height == room.height));
    REQUIRE((once.size.width <= room.width && once.size.height <= room.height && !once.size.empty()));
    REQUIRE(twice.size == once.size);
    REQUIRE((twice.scale.x == 1 && twice.scale.y == 1));
    REQUIRE(once.scale.x * picture.width == doctest::Approx(once.size.width));
    const cv::Size cut = fit_into(picture, room, true).size;
    REQUIRE((!cut.empty() && cut.width <= room.width && cut.height <= room.height));
  }
  CHECK(fit_into({330, 60}, {416, 416}, false).size == cv::Size(416, 76));
  CHECK(fit_into({330, 60}, {416, 416}, true).size == cv::Size(415, 75));
}

TEST_CASE("augmentation: images of extreme sizes and aspect ratios give valid samples") {
  Rng rng(17, 0, 0);
  const std::vector<cv::Size> sizes = {{1, 1}, {2000, 1},    {1, 2000},   {2, 2},
                                       {3, 1}, {1280, 1280}, {1300, 900}, {3, 3}};
  for (int i = 0; i < 400; ++i) {
    const cv::Size size = i % 2 ? cv::Size(64, 64) : cv::Size(96, 32);
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) {
      const cv::Size s = sizes[rng.randint(0, sizes.size() - 1)];
      album.samples.push_back({coloured(s, colours[k]), {{0, 0, double(s.width), double(s.height), k}}});
    }
    album.most_reduced = i % 3 ? 32 : 1;
    AugmentConfig c;
    c.mosaic_scale_lo = 0.01;
    c.mosaic_scale_hi = 20;
    c.degrees = 180;
    c.shear = 44;
    c.mosaic_prob = 0.8;
    c.mixup_prob = 0.3;
    SampleDraw draw = draw_sample(rng, c, 4, i % 4, size, true);
    draw.colour_flip.hsv = {};
    const Sample out = composed(album, draw, size);
    for (const Box& b : out.boxes)
      REQUIRE((b.x1 >= 0 && b.y1 >= 0 && b.x2 <= size.width && b.y2 <= size.height));
    if (draw.mosaic && !draw.mixup) {  // only the colours of the images and grey
      for (const cv::Vec3b& p : out.image)
        REQUIRE((p == cv::Vec3b::all(border_grey) ||
                 std::find(colours.begin(), colours.begin() + 4, p) != colours.begin() + 4));
    }
    if (draw.mosaic) continue;
    // A single image of one colour: its area has that colour, and the box encloses that area.
    const cv::Size fitted = fit_into(album.size(i % 4), size, false).size;
    Image expected(size, border_grey);
    expected(cv::Rect({0, 0}, fitted)).setTo(colours[i % 4]);
    CHECK(max_difference(out.image, expected) == 0);
    const bool stays = fitted.width > 1 && fitted.height > 1;
    REQUIRE(out.boxes.size() == std::size_t(stays));
    if (stays)
      CHECK(max_corner_difference(out.boxes[0], {0, 0, double(fitted.width), double(fitted.height), 0}) <
            1e-9);
  }
}

// ---- regions that are read ----

TEST_CASE("augmentation: only the visible region of each image is read, at the scale that it is shown at") {
  Rng rng(18, 0, 0);
  int64_t asked = 0, of = 0;
  int not_asked = 0;
  for (int i = 0; i < 150; ++i) {
    const cv::Size size(96, 64);
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) album.samples.push_back({noise(random_size(rng, 1, 300), 4 * i + k), {}});
    album.samples[3].boxes = {{0, 0, 1, 1, 0}};
    album.most_reduced = i % 2 ? 8 : 1;
    const SampleDraw draw = draw_sample(rng, {}, 4, i % 4, size, i % 5 > 0);
    const Image parts = composed(album, draw, size).image;
    for (const auto& a : album.asked) {
      asked += a.part.area();
      of += album.size(a.index).area();
    }
    not_asked += draw.mosaic && album.asked.size() < 4;
    if (!draw.mosaic) {
      REQUIRE(album.asked.size() == 1);
      const Fit to = fit_into(album.size(i % 4), size, false);
      CHECK(album.asked[0].part.size() == album.size(i % 4));
      CHECK(album.asked[0].scale == doctest::Approx(std::sqrt(to.scale.x * to.scale.y)));
    }
    // Reading the whole image gives the same pixels, so the region is never too small. One pixel may differ,
    // because positions are rounded to 2^-32 pixels and are relative to the region.
    album.whole = true;
    const Image wholes = composed(album, draw, size).image;
    int different = 0;
    for (std::size_t p = 0; p < parts.total(); ++p) different += parts(int(p)) != wholes(int(p));
    CHECK(different <= 1);
  }
  CHECK(not_asked > 10);  // images that are not visible in the sample are not read
  CHECK(double(asked) < 0.8 * double(of));

  // The canvas is enlarged twice and shows the lower right quarter of the first tile. The region has a margin
  // of two pixels.
  const MemoryDataset album{std::vector<Sample>(4, Sample{noise({128, 128}), {}})};
  for (bool flip : {false, true}) {
    album.asked.clear();
    composed(album, four({64, 64}, {0, 2, 0, 0, -1, -1}, flip), {64, 64});
    REQUIRE(album.asked.size() == 1);
    CHECK(album.asked[0].part == cv::Rect(62, 62, 66, 66));
    CHECK(album.asked[0].scale == doctest::Approx(1));
  }
}

// ---- missing images and boxes ----

TEST_CASE("augmentation: boxes of a pixel or less are removed, and the image stays augmented") {
  const MemoryDataset album{
      {{noise({64, 64}), {{1, 1, 2, 30, 0}, {10, 10, 10.5, 10.5, 1}, {5, 5, 5, 9, 2}, {3, 3, 4.1, 4.1, 3}}}}};
  const Sample out = composed(album, {0, {}, {}, {HsvDraw{5, 30, 30}, true}}, {64, 64});
  REQUIRE(out.boxes.size() == 1);
  CHECK(out.boxes[0].cls == 3);
  CHECK(max_difference(out.image, album.samples[0].image) > 0);
}

TEST_CASE("augmentation: boxes outside the sample are removed, boxes across its border are clipped") {
  const Sample s{noise({64, 64}), {{0, 0, 8, 8, 0}, {56, 56, 64, 64, 1}}};
  const Sample empty{s.image, {}};
  const MemoryDataset album{{s, empty, empty, empty}};
  const auto is = [](const std::vector<Box>& boxes, const Box& b) {
    return boxes.size() == 1 && boxes[0].cls == b.cls && max_corner_difference(boxes[0], b) < 1e-9;
  };
  // Only the lower right corner of the first tile is on the canvas. In the second case the canvas clips the
  // box, because the whole canvas is visible in the sample.
  CHECK(is(composed(album, four({16, 16}), {64, 64}).boxes, {8, 8, 16, 16, 1}));
  CHECK(is(composed(album, four({16, 16}, {0, 0.5, 0, 0, 0.25, 0.25}), {64, 64}).boxes, {20, 20, 24, 24, 1}));
  CHECK(is(composed(album, four({12, 12}, {0, 1, 0, 0, -0.1, -0.1}), {64, 64}).boxes, {0, 0, 5.6, 5.6, 1}));
  const MemoryDataset mixed{{empty, s}};
  SampleDraw draw = alone(0);
  draw.mixup = MixupDraw{1.5, false, {30, 30}, {1}};
  CHECK(is(composed(mixed, draw, {64, 64}).boxes, {54, 54, 64, 64, 1}));
}

TEST_CASE("augmentation: MixUp rounds, and its border is grey") {
  const MemoryDataset album{{{Image({64, 64}, 101), {}}, {Image({64, 64}, 50), {{0, 0, 64, 64, 3}}}}};
  SampleDraw draw = alone(0);
  draw.mixup = MixupDraw{0.5, false, {0, 0}, {1}};
  const Sample out = composed(album, draw, {64, 64});
  CHECK(out.image(0, 0) == cv::Vec3b::all(76));     // 75.5
  CHECK(out.image(31, 31) == cv::Vec3b::all(76));   // the last pixel of the second image
  CHECK(out.image(31, 32) == cv::Vec3b::all(108));  // (101 + 114) / 2
  CHECK(out.image(63, 63) == cv::Vec3b::all(108));
  REQUIRE(out.boxes.size() == 1);
  CHECK(max_corner_difference(out.boxes[0], {0, 0, 32, 32, 3}) < 1e-9);
}

TEST_CASE("augmentation: the search for a MixUp image with boxes is limited") {
  const cv::Size size(64, 64);
  MemoryDataset album{std::vector<Sample>(6, Sample{Image(size, 200), {}})};
  AugmentConfig c;
  c.mixup_tries = 7;
  Rng rng(0, 0, 1);
  const SampleDraw drawn = draw_sample(rng, c, 6, 1, size, true);
  REQUIRE(drawn.mixup);
  CHECK(drawn.mixup->candidates.size() == 7);
  CHECK(composed(album, drawn, size).boxes.empty());
  CHECK(album.asked.size() <= 4);  // no MixUp image is read
  // The first candidate with boxes is used, even if the mosaic has no boxes.
  album.samples[5].boxes = {{0, 0, 64, 64, 3}};
  SampleDraw draw = four({64, 64}, {0, 0.5, 0, 0, 0, 0});
  draw.mixup = MixupDraw{1, false, {0, 0}, {4, 2, 5, 1}};
  album.asked.clear();
  const Sample out = composed(album, draw, size);
  REQUIRE(out.boxes.size() == 1);
  CHECK(out.boxes[0].cls == 3);
  std::set<std::size_t> read;
  for (const auto& a : album.asked) read.insert(a.index);
  CHECK(read == std::set<std::size_t>{0, 1, 2, 3, 5});
}

TEST_CASE("augmentation: an unreadable image is replaced, also by an image of another shape") {
  Rng rng(19, 0, 0);
  const cv::Size size(96, 64);
  MemoryDataset album;
  for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 40, 150), 2 * k));
  album.samples.push_back(marked_image(rng, {150, 40}, 0));
  album.samples.push_back(marked_image(rng, {40, 150}, 0));
  SampleDraw draw = four({100, 60}, {5, 0.6, 1, -1, 0.1, 0.05}, true);
  draw.mixup = MixupDraw{0.8, true, {0, 0}, {1}};
  draw.colour_flip.hsv = HsvDraw{3, 20, -20};
  using Indices = std::vector<std::size_t>;
  using Tries = std::vector<std::pair<std::size_t, std::size_t>>;
  // Checks that `asked` of an album with broken images equals `meant` of the intact album.
  const auto same = [&](const SampleDraw& asked, const SampleDraw& meant, const std::set<std::size_t>& broken,
                        const Indices& replacements, const Tries& tries) {
    MemoryDataset damaged = album;
    damaged.broken = broken;
    damaged.replacements = replacements;
    const Sample a = composed(damaged, asked, size), b = composed(album, meant, size);
    CHECK(max_difference(a.image, b.image) == 0);
    REQUIRE(a.boxes.size() == b.boxes.size());
    for (std::size_t i = 0; i < a.boxes.size(); ++i)
      CHECK(max_corner_difference(a.boxes[i], b.boxes[i]) == 0);
    CHECK(damaged.replaced == tries);
  };
  SampleDraw first = draw, others = draw, mixed = draw, mixed_meant = draw;
  first.index = 5;
  same(draw, first, {0, 4}, {4, 5}, {{0, 1}, {4, 2}});
  others.mosaic->others = {1, 5, 4};
  same(draw, others, {2, 3}, {5, 4}, {{2, 1}, {3, 1}});  // each tile has its own count of attempts
  mixed.mixup->candidates = {4};
  mixed_meant.mixup->candidates = {5};
  same(mixed, mixed_meant, {4}, {5}, {{4, 1}});
  same(alone(0), alone(4), {0}, {4}, {{0, 1}});
  album.broken = {0, 4};
  album.replacements = {4};
  CHECK_THROWS_WITH_AS(composed(album, draw, size), "picture 4 is damaged", ImageError);
}

TEST_CASE("augmentation: an error other than ImageError is rethrown") {
  struct Failing : MemoryDataset {
    ImageRegion image_region(std::size_t, const cv::Rect&, double) const { fail("out of disk"); }
  } album;
  album.samples = {{Image({8, 8}, 0), {}}};
  Sample sample{Image({8, 8}, 0), {}};
  CHECK_THROWS_WITH_AS(compose(album, alone(0), sample), "out of disk", std::runtime_error);
}

TEST_CASE(
    "augmentation: a sample depends only on seed, epoch and index, not on the thread or reused memory") {
  const cv::Size size(64, 96);
  MemoryDataset album;
  Rng rng(20, 0, 0);
  std::vector<Image> before;
  for (int i = 0; i < 5; ++i) {
    album.samples.push_back({noise(random_size(rng, 20, 120), i), {{2, 2, 18, 18, i}}});
    before.emplace_back(album.samples[i].image.clone());
  }
  const auto make = [&](std::uint64_t epoch, std::size_t i, Sample& sample) {
    Rng own(1, epoch, i);
    compose(album, draw_sample(own, {}, 5, i % 5, size, i % 3 > 0), sample);
  };
  const int n = 24;
  std::vector<Sample> single(n), threaded(n);
  for (auto* samples : {&single, &threaded})
    for (Sample& s : *samples) s.image = Image(size, 0);
  for (int i = 0; i < n; ++i) make(0, i, single[i]);
  call_in_threads(n, [&](int i) { make(0, i, threaded[i]); });
  int changed = 0;
  Sample used{Image(size, 0), {{1, 2, 3, 4, 5}}};
  const uchar* memory = used.image.ptr();
  const auto equal = [](const Sample& a, const Sample& b) {
    bool same = max_difference(a.image, b.image) == 0 && a.boxes.size() == b.boxes.size();
    for (std::size_t k = 0; same && k < a.boxes.size(); ++k)
      same = max_corner_difference(a.boxes[k], b.boxes[k]) == 0;
    return same;
  };
  for (int i = 0; i < n; ++i) {
    CHECK(equal(single[i], threaded[i]));
    make(0, i, used);
    CHECK(equal(single[i], used));
    CHECK(used.image.ptr() == memory);  // the caller's memory, which may be part of a batch
    make(1, i, used);
    changed += max_difference(single[i].image, used.image) > 0;
  }
  CHECK(changed == n);
  for (int i = 0; i < 5; ++i) CHECK(max_difference(album.samples[i].image, before[i]) == 0);
}

TEST_CASE("augmentation: no pixel outside the sample is written") {
  Rng rng(21, 0, 0);
  MemoryDataset album;
  for (int k = 0; k < 4; ++k)
    album.samples.push_back({noise(random_size(rng, 20, 200), k), {{0, 0, 20, 20, k}}});
  for (int i = 0; i < 50; ++i) {
    Image batch({96 + 2, 64 + 2}, 77);
    Sample sample{Image(batch(cv::Rect(1, 1, 96, 64))), {}};
    compose(album, draw_sample(rng, {}, 4, 0, {96, 64}, i % 4 > 0), sample);
    sample.image.setTo(cv::Scalar::all(77));
    CHECK(max_difference(batch, Image(batch.size(), 77)) == 0);
  }
}

// ---- preprocessing of evaluation ----

TEST_CASE(
    "letterbox: the image is at the top left, its size is truncated, and an image that fits is not copied") {
  const Letterbox thin = letterbox(Image({1000, 1}, 9), {64, 64});
  CHECK(thin.image(0, 63) == cv::Vec3b(9, 9, 9));
  CHECK(thin.image(1, 0) == cv::Vec3b::all(114));
  const Letterbox wide = letterbox(Image({330, 60}, 9), {416, 416});
  CHECK(wide.image(74, 414) == cv::Vec3b::all(9));
  CHECK(wide.image(75, 0) == cv::Vec3b::all(114));
  CHECK(wide.image(0, 415) == cv::Vec3b::all(114));
  CHECK(wide.scale.x == 416.0 / 330);
  CHECK(wide.scale.y == 416.0 / 330);
  const Image fits = noise({64, 32});
  CHECK(letterbox(fits, {64, 32}).image.ptr() == fits.ptr());
}
