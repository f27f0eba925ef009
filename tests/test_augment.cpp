// SPDX-License-Identifier: Apache-2.0
// augment.hpp and pixels.hpp: boxes stay on their objects through every augmentation.
//
// Test images are grey and hold boxes that are each filled with one colour. In the augmented sample the
// pixels of that colour must span the box. Because an image is resampled only once, edges are accurate to
// half a pixel.
#include "augment.hpp"

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

SampleDraw alone(std::size_t index, bool flip = false) { return {index, {}, {}, {}, flip}; }

const AffineDraw no_affine{0, 1, 0, 0, 0, 0};

// A mosaic of images 0 to 3 that meet at `centre` on the canvas.
SampleDraw four(cv::Point centre, const AffineDraw& affine = no_affine, bool flip = false) {
  return {0, MosaicDraw{centre, {1, 2, 3}, affine}, {}, {}, flip};
}

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

}  // namespace

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

TEST_CASE("augmentation: parameters stay in their ranges, and each transform has its probability") {
  const AugmentConfig c{.mosaic_prob = 0.7, .mixup_prob = 0.4, .hsv_prob = 0.6, .flip_prob = 0.2};
  AugmentConfig extras;
  extras.vflip_prob = extras.turn_prob = extras.blur_prob = extras.grey_prob = extras.cutout_prob = 1;
  const cv::Size size(96, 64);
  const int n = 4000;
  int mosaics = 0, mixups = 0, jitters = 0, flips = 0, still = 0;
  const auto within = [](double value, double limit) { REQUIRE(std::abs(value) <= limit); };
  for (int i = 0; i < n; ++i) {
    Rng rng(1, 2, i);
    const SampleDraw d = draw_sample(rng, c, 50, i % 50, size, true);
    if (d.mosaic) {
      ++mosaics;
      const auto& [centre, others, a] = *d.mosaic;
      REQUIRE(cv::Rect(48, 32, 96, 64).contains(centre));
      for (auto o : others) REQUIRE(o < 50);
      REQUIRE((a.scale >= 0.1 && a.scale <= 2));
      within(a.angle, 10);
      for (const double shear : {a.shear_x, a.shear_y}) within(shear, 2);
      for (const double shift : {a.shift_x, a.shift_y}) within(shift, 0.1);
    }
    if (d.mixup) {
      ++mixups;
      const cv::Size room = mixup_size(size, d.mixup->scale) - size;
      REQUIRE((d.mosaic && d.mixup->candidates.size() == std::size_t(c.mixup_tries)));
      REQUIRE((d.mixup->offset.x >= 0 && d.mixup->offset.x <= std::max(0, room.width)));
      REQUIRE((d.mixup->offset.y >= 0 && d.mixup->offset.y <= std::max(0, room.height)));
    }
    flips += d.flip;
    if (const auto& h = d.hsv) {
      ++jitters;
      still += h->h == 0;
      within(h->h, 5);
      for (const double gain : {h->s, h->v}) within(gain, 30);
    }
    const ExtraDraw& off = d.extra;
    REQUIRE((!off.flip_vertical && !off.turns && !off.blur && !off.grey && off.cutout.empty()));
    const SampleDraw late = draw_sample(rng, extras, 50, i % 50, size, false);
    const ExtraDraw& e = late.extra;
    REQUIRE((!late.mosaic && !late.mixup));
    REQUIRE((e.flip_vertical && e.turns >= 1 && e.turns <= 3 && e.blur > 0 && e.grey && !e.cutout.empty()));
    REQUIRE((e.cutout & cv::Rect2d(0, 0, 1, 1)) == e.cutout);
  }
  CHECK(mosaics == doctest::Approx(0.7 * n).epsilon(0.05));
  CHECK(mixups == doctest::Approx(0.28 * n).epsilon(0.08));
  CHECK(jitters == doctest::Approx(0.6 * n).epsilon(0.05));
  CHECK(still == doctest::Approx(0.3 * n).epsilon(0.1));
  CHECK(flips == doctest::Approx(0.2 * n).epsilon(0.1));
}

TEST_CASE("augmentation: hue shifts act on BGR") {
  const auto jittered = [](cv::Vec3b pixel, HsvDraw hsv) {
    const MemoryDataset album{{{coloured({8, 8}, pixel), {}}}};
    return composed(album, {0, {}, {}, hsv}, {8, 8}).image(3, 3);
  };
  CHECK(jittered({0, 0, 255}, {60, 0, 0}) == cv::Vec3b(0, 255, 0));         // red + 120 degrees = green
  CHECK(jittered({0, 0, 255}, {-60, 0, 0}) == cv::Vec3b(255, 0, 0));        // red - 120 degrees = blue
  CHECK(jittered({0, 0, 255}, {0, 0, -300}) == cv::Vec3b(0, 0, 0));         // saturates at 0
  CHECK(jittered({0, 0, 200}, {0, 30, 90}) == cv::Vec3b(0, 0, 255));        // saturates at 255
  CHECK(jittered({90, 90, 90}, {0, 0, 10.9}) == cv::Vec3b(100, 100, 100));  // truncated
  CHECK(jittered({90, 90, 90}, {0, 51, 0}) == cv::Vec3b(72, 72, 90));       // hue of grey is 0, as in OpenCV
  CHECK(jittered({90, 90, 90}, {60, 51, 0}) == cv::Vec3b(72, 90, 72));      // and its hue shifts accordingly
}

TEST_CASE("augmentation: HSV jitter equals the exact result") {
  const Image image = noise({333, 61});  // no multiple of 64, the pixels of a call of AVX2
  Rng rng(1, 0, 0);
  Image top(image.rowRange(0, 20));
  for (auto& p : top)  // near grey, where the hue is most sensitive to rounding
    for (int c : {1, 2}) p[c] = cv::saturate_cast<uchar>(p[0] + int(rng.randint(-3, 3)));
  const std::vector<std::array<int, 3>> draws = {{0, 0, 1},   {5, 30, 30},  {-5, -30, -30},
                                                 {90, 0, 0},  {-90, 10, 0}, {60, 5, -5},
                                                 {1, 255, 0}, {0, -255, 0}, {33, -60, 90}};
  for (const auto& [dh, ds, dv] : draws) {
    Image got(image.clone());
    hsv_jitter(got.ptr(), int64_t(got.total()), float(dh), float(ds), float(dv));
    for (std::size_t i = 0; i < image.total(); ++i) {
      const cv::Vec3b p = image(int(i));
      const double b = p[0], g = p[1], r = p[2], value = std::max({b, g, r}),
                   range = value - std::min({b, g, r});
      const double hue = range == 0   ? 0
                         : value == r ? (g - b) / range
                         : value == g ? 2 + (b - r) / range
                                      : 4 + (r - g) / range;
      const double h = std::fmod(hue + dh / 30. + 12, 6), v = std::clamp(value + dv, 0.0, 255.0);
      const double s = std::clamp(255 * range / std::max(value, 1.0) + ds, 0.0, 255.0) / 255;
      for (int c = 0; c < 3; ++c) {  // offsets 5, 3, 1 for R, G, B: see Wikipedia, "HSL and HSV"
        const double k = std::fmod(1 + 2 * c + h, 6);
        const double exact = v - v * s * std::clamp(std::min(k, 4 - k), 0.0, 1.0);
        REQUIRE(std::abs(got(int(i))[c] - exact) < 0.5001);
      }
    }
  }
}

#if defined(__x86_64__)
TEST_CASE("augmentation: rows sampled with SSSE3 are those of the plain version" *
          doctest::skip(!__builtin_cpu_supports("ssse3"))) {
  using namespace pixels_detail;
  const Image image = noise({23, 17});
  Rng rng(3, 0, 0);
  for (int i = 0; i < 20000; ++i) {
    const int n = int(rng.randint(1, 40));
    const int64_t mask =
        std::array{-1ll, ~0xFFFFFFFFll, ~0x3FFFFFFFll, -1ll}[i % 4];  // some at whole or quarter pixels
    // The four neighbours of a position, and one more column to the right, are inside the image.
    const auto position = [&] {
      return Position{int64_t(rng.uniform(0, (image.cols - 2) * 0x1p32 - 1)) & mask,
                      int64_t(rng.uniform(0, (image.rows - 1) * 0x1p32 - 1)) & mask};
    };
    const Position from = position(), to = position(), step{(to.x - from.x) / n, (to.y - from.y) / n};
    std::vector<uchar> plain(3 * n + 8, 7), fast = plain;
    sample_row_plain(image, from, step, plain.data(), n);
    sample_row_ssse3(image, from, step, fast.data(), n);
    REQUIRE(plain == fast);
    REQUIRE(std::count(fast.end() - 8, fast.end(), 7) == 8);
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
    const Image image = noise(size, i);
    const AugmentConfig c{
        .mosaic_scale_lo = 0.2, .mosaic_scale_hi = 4, .degrees = 180, .translate = 1, .shear = 15};
    const Affine to_picture = inverse(Affine{affine_matrix(draw_affine(rng, c), out_size)});
    const cv::Rect2d shown(rng.uniform(-20, 10), rng.uniform(-20, 10), rng.uniform(5, 80),
                           rng.uniform(5, 80));
    Image frame({out_size.width + 2, out_size.height + 2}, 99);
    Image out = frame(cv::Rect({1, 1}, out_size));
    warp_image(out, {image, {1, 1}, {0, 0}}, to_picture.m, to_picture.m, shown);
    for (int y = 0; y < frame.rows; ++y) {
      for (int x = 0; x < frame.cols; ++x) {
        const cv::Point2d p = to_picture(x - 0.5, y - 0.5);
        const bool inside = cv::Rect({1, 1}, out_size).contains({x, y});
        if (!inside || !(p.x >= shown.x && p.x < shown.br().x && p.y >= shown.y && p.y < shown.br().y)) {
          REQUIRE(frame(y, x) == cv::Vec3b::all(99));
          ++left;
          continue;
        }
        const cv::Vec3d away = cv::Vec3d(frame(y, x)) - bilinear_at(image, p.x, p.y);
        // Rounding, and weights in steps of 1/128 and 1/256, times 255.
        REQUIRE(cv::norm(away, cv::NORM_INF) < 4);
        error += away.dot(away) / 3;
        bias += (away[0] + away[1] + away[2]) / 3;
        ++drawn;
      }
    }
  }
  CHECK(drawn > 50000);
  CHECK(left > 100000);
  CHECK(error / double(drawn) < 0.5);
  CHECK(std::abs(bias / double(drawn)) < 0.03);  // rounded, not truncated
}

TEST_CASE(
    "augmentation: flips and quarter turns are exact; the images of a mosaic have no gap and no overlap") {
  const MemoryDataset album{{{noise({48, 48}), {}}}};
  for (int i = 0; i < 16; ++i) {
    SampleDraw draw = alone(0, i & 1);
    draw.extra.flip_vertical = i & 2;
    draw.extra.turns = i / 4;
    cv::Mat expected = album.samples[0].image.clone();
    if (i / 4) cv::rotate(expected, expected, i / 4 - 1);  // cv::ROTATE_90_CLOCKWISE is 0
    if (i & 1) cv::flip(expected, expected, 1);
    if (i & 2) cv::flip(expected, expected, 0);
    CHECK(max_difference(composed(album, draw, {48, 48}).image, expected) == 0);
  }
  MemoryDataset tiles;
  for (int k = 0; k < 4; ++k) tiles.samples.push_back({coloured({64, 64}, colours[k]), {}});
  const Image out = composed(tiles, four({64, 64}, {0, 0.5, 0, 0, 0, 0}), {64, 64}).image;
  for (int y = 0; y < 64; ++y)
    for (int x = 0; x < 64; ++x) REQUIRE(out(y, x) == colours[(x >= 32) + 2 * (y >= 32)]);
}

TEST_CASE("augmentation: flips, turns, scale, shift, mosaic and MixUp keep boxes on their objects") {
  Rng rng(31, 0, 0);
  int compared = 0;
  for (int i = 0; i < 600 / kFewer; ++i) {
    const cv::Size size(32 * rng.randint(2, 6), 32 * rng.randint(2, 6));
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) {
      album.samples.push_back(marked_image(rng, random_size(rng, 40, i % 9 == 2 ? 500 : 150), 2 * k));
      album.regions.push_back(album.samples[k].boxes);  // ignored regions, which move like boxes
      for (Box& b : album.regions[k]) b.cls = kIgnoredRegion;
    }
    album.most_reduced = i % 2 ? 8 : 1;
    const bool flip = i % 4 < 2, mixup = i % 3 == 2;
    SampleDraw draw = alone(0, flip);
    if (i % 3 == 1) {
      const AffineDraw affine{0, rng.uniform(0.2, 2), 0, 0, rng.uniform(-0.3, 0.3), rng.uniform(-0.3, 0.3)};
      draw = four(draw_mosaic(rng, {}, 4, size).centre, affine, flip);
    }
    if (mixup) {
      album.samples[0] = {Image(size, border_grey), {}};
      album.regions[0].clear();
      draw.mixup = draw_mixup(rng, {}, 4, size);
      draw.mixup->candidates = {1};
    }
    draw.extra.turns = int(rng.randint(0, 3));
    draw.extra.flip_vertical = rng.bernoulli(0.5);
    Sample out = composed(album, draw, size);
    const auto regions = std::stable_partition(out.boxes.begin(), out.boxes.end(),
                                               [](const Box& b) { return b.cls != kIgnoredRegion; });
    REQUIRE(regions - out.boxes.begin() == out.boxes.end() - regions);
    for (auto box = out.boxes.begin(); box != regions; ++box) {
      CHECK(max_corner_difference(*box, regions[box - out.boxes.begin()]) == 0);
      CHECK((box->x1 >= 0 && box->y1 >= 0 && box->x2 <= size.width && box->y2 <= size.height));
    }
    out.boxes.erase(regions, out.boxes.end());
    compared += check_marks(out, album.most_reduced == 1 ? 0.53 : 0.59, mixup ? 0.25 : 0.5);
  }
  CHECK(compared > 800 / kFewer);
}

TEST_CASE("augmentation: colour changes leave the border of an image as it is; cutout drops hidden boxes") {
  const Image picture = noise({40, 20}, 5);
  const MemoryDataset album{{{picture, {{0, 0, 10, 10, 1}, {10, 0, 30, 10, 2}}}}};
  const auto with = [&](const auto& change) {
    SampleDraw draw = alone(0);
    change(draw);
    const Sample out = composed(album, draw, {40, 40});
    CHECK(max_difference(Image(out.image(cv::Rect(0, 20, 40, 20))), Image({40, 20}, border_grey)) == 0);
    return out;
  };
  const auto top = [](const Sample& s) { return Image(s.image(cv::Rect(0, 0, 40, 20))); };
  cv::Mat expected, grey, jittered = picture.clone();
  cv::GaussianBlur(picture, expected, {0, 0}, 1.5, 0, cv::BORDER_REPLICATE);
  CHECK(max_difference(top(with([](SampleDraw& d) { d.extra.blur = 1.5; })), expected) == 0);
  cv::cvtColor(picture, grey, cv::COLOR_BGR2GRAY);
  cv::cvtColor(grey, expected, cv::COLOR_GRAY2BGR);
  CHECK(max_difference(top(with([](SampleDraw& d) { d.extra.grey = true; })), expected) == 0);
  hsv_jitter(jittered.ptr(), int64_t(jittered.total()), 5, 30, 30);
  cv::flip(jittered, expected, 1);
  CHECK(max_difference(top(with([](SampleDraw& d) {
                         d.hsv = HsvDraw{5, 30, 30};
                         d.flip = true;
                       })),
                       expected) == 0);

  // Hides 8 x 10 pixels: 0.8 of the first box and nothing of the second one; then 0.6 of the first one.
  for (const auto& [width, left] : {std::pair(0.2, 1u), {0.15, 2u}}) {
    const Sample out = with([&, width = width](SampleDraw& d) { d.extra.cutout = {0, 0, width, 0.5}; });
    CHECK(out.boxes.size() == left);
    cv::Mat hidden = picture.clone();
    hidden(cv::Rect(0, 0, int(width * 40), 10)).setTo(cv::Scalar::all(border_grey));
    CHECK(max_difference(top(out), hidden) == 0);
  }
}

TEST_CASE("augmentation: a rotated or sheared box contains its object and touches it") {
  Rng rng(11, 0, 0);
  int compared = 0;
  for (int i = 0; i < 400 / kFewer; ++i) {
    const cv::Size size(160, 128);
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 60, 400), 2 * k));
    const SampleDraw draw = four({size.width, size.height}, draw_affine(rng, {}), i % 3 == 0);
    const Sample out = composed(album, draw, size);
    for (const Box& b : out.boxes) {
      const auto seen = extent(out.image, b.cls);
      const bool inside = b.x1 > 0 && b.y1 > 0 && b.x2 < size.width && b.y2 < size.height;
      if (!seen || !inside || std::min(b.x2 - b.x1, b.y2 - b.y1) < 4) continue;
      CHECK((seen->x1 >= b.x1 - 0.51 && seen->y1 >= b.y1 - 0.51));
      CHECK((seen->x2 <= b.x2 + 0.51 && seen->y2 <= b.y2 + 0.51));
      CHECK(max_corner_difference(*seen, b) <= 0.9);
      ++compared;
    }
  }
  CHECK(compared > 200 / kFewer);
}

TEST_CASE("augmentation: MixUp takes the first candidate with boxes, scales it, flips, crops, and averages") {
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

  const MemoryDataset plain{{{Image({64, 64}, 101), {}}, {Image({64, 64}, 50), {{0, 0, 64, 64, 3}}}}};
  SampleDraw draw = alone(0);
  draw.mixup = MixupDraw{0.5, false, {0, 0}, {1}};
  const Image out = composed(plain, draw, {64, 64}).image;
  CHECK(out(31, 31) == cv::Vec3b::all(76));   // 75.5 is rounded up
  CHECK(out(31, 32) == cv::Vec3b::all(108));  // (101 + 114) / 2: the border of the second image is grey

  MemoryDataset several{std::vector<Sample>(6, Sample{Image({64, 64}, 200), {}})};
  several.regions = {{}, {}, {{0, 0, 64, 64, kIgnoredRegion}}};  // regions alone do not count
  draw.mixup = MixupDraw{1, false, {0, 0}, {4, 2, 5, 1}};
  CHECK(composed(several, draw, {64, 64}).boxes.empty());  // no candidate has boxes
  several.samples[5].boxes = {{0, 0, 64, 64, 3}};
  const Sample mixed = composed(several, draw, {64, 64});
  REQUIRE(mixed.boxes.size() == 1);
  CHECK(mixed.boxes[0].cls == 3);
}

TEST_CASE("augmentation: only the visible region of each image is read, whatever its size and the draw") {
  Rng rng(18, 0, 0);
  const std::vector<cv::Size> sizes = {{1, 1}, {2000, 1}, {1, 2000}, {2, 2}, {3, 1}, {640, 640}, {700, 500}};
  const AugmentConfig extreme{.mosaic_scale_lo = 0.01, .mosaic_scale_hi = 20, .degrees = 180, .shear = 44};
  int64_t asked = 0, of = 0;
  int not_asked = 0;
  for (int i = 0; i < 120; ++i) {
    const cv::Size size = i % 2 ? cv::Size(96, 64) : cv::Size(32, 96);
    const bool is_extreme = i % 3 == 0;
    MemoryDataset album;
    for (int k = 0; k < 4; ++k) {
      const cv::Size s = is_extreme ? sizes[rng.randint(0, sizes.size() - 1)] : random_size(rng, 1, 300);
      album.samples.push_back({noise(s, 4 * i + k), {{0, 0, double(s.width), double(s.height), k}}});
    }
    album.most_reduced = i % 4 < 2 ? 8 : 1;
    const SampleDraw draw =
        draw_sample(rng, is_extreme ? extreme : AugmentConfig(), 4, i % 4, size, i % 5 > 0);
    const Sample parts = composed(album, draw, size);
    for (const Box& b : parts.boxes)
      REQUIRE((b.x1 >= 0 && b.y1 >= 0 && b.x2 <= size.width && b.y2 <= size.height));
    for (const auto& a : album.asked) {
      asked += is_extreme ? 0 : a.part.area();
      of += is_extreme ? 0 : album.size(a.index).area();
    }
    not_asked += draw.mosaic && album.asked.size() < 4;
    if (!draw.mosaic) {
      const Fit to = fit_into(album.size(i % 4), size, false);
      REQUIRE(album.asked.size() == 1);
      CHECK(album.asked[0].part.size() == album.size(i % 4));
      CHECK(album.asked[0].scale == doctest::Approx(std::sqrt(to.scale.x * to.scale.y)));
    }
    // Reading the whole image gives the same pixels, so the region is never too small. One pixel may differ,
    // because positions are rounded to 2^-32 pixels and are relative to the region.
    album.whole = true;
    const Image wholes = composed(album, draw, size).image;
    int different = 0;
    for (std::size_t p = 0; p < wholes.total(); ++p) different += parts.image(int(p)) != wholes(int(p));
    CHECK(different <= 1);
  }
  CHECK(not_asked > 10);  // images that are not visible in the sample are not read
  CHECK(double(asked) < 0.8 * double(of));
}

TEST_CASE("augmentation: boxes outside or of a pixel or less are removed, others are clipped to the sample") {
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
  const MemoryDataset small{
      {{noise({64, 64}), {{1, 1, 2, 30, 0}, {10, 10, 10.5, 10.5, 1}, {5, 5, 5, 9, 2}, {3, 3, 4.1, 4.1, 3}}}}};
  CHECK(is(composed(small, alone(0), {64, 64}).boxes, {3, 3, 4.1, 4.1, 3}));
}

TEST_CASE("augmentation: an unreadable image is replaced, also by an image of another shape") {
  Rng rng(19, 0, 0);
  const cv::Size size(96, 64);
  MemoryDataset album;
  for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 40, 150), 2 * k));
  album.samples.push_back(marked_image(rng, {150, 40}, 0));
  album.samples.push_back(marked_image(rng, {40, 150}, 0));
  const SampleDraw draw = four({100, 60}, {5, 0.6, 1, -1, 0.1, 0.05}, true);
  SampleDraw others = draw;
  others.mosaic->others = {1, 5, 4};
  MemoryDataset damaged = album;
  damaged.broken = {2, 3};
  damaged.replacements = {5, 4};
  const Sample got = composed(damaged, draw, size), wanted = composed(album, others, size);
  CHECK(max_difference(got.image, wanted.image) == 0);
  REQUIRE(got.boxes.size() == wanted.boxes.size());
  for (std::size_t i = 0; i < got.boxes.size(); ++i)
    CHECK((max_corner_difference(got.boxes[i], wanted.boxes[i]) == 0 &&
           got.boxes[i].cls == wanted.boxes[i].cls));
  CHECK(damaged.replaced == std::vector<std::pair<std::size_t, std::size_t>>{{2, 1}, {3, 1}});
  damaged.broken = {0, 4};
  damaged.replacements = {4};
  damaged.replaced.clear();
  CHECK_THROWS_WITH_AS(composed(damaged, draw, size), "picture 4 is damaged", ImageError);
}

TEST_CASE("letterbox: the image is at the top left and fills one side; in evaluation its size is truncated") {
  Rng rng(16, 0, 0);
  for (int i = 0; i < 2000; ++i) {
    const cv::Size picture = random_size(rng, 1, 2000), room = random_size(rng, 16, 700);
    const Fit once = fit_into(picture, room, false), twice = fit_into(once.size, room, false);
    REQUIRE((once.size.width == room.width || once.size.height == room.height));
    REQUIRE((once.size.width <= room.width && once.size.height <= room.height && !once.size.empty()));
    REQUIRE((twice.size == once.size && twice.scale.x == 1 && twice.scale.y == 1));
    REQUIRE(once.scale.x * picture.width == doctest::Approx(once.size.width));
    REQUIRE_FALSE(fit_into(picture, room, true).size.empty());
  }
  CHECK(fit_into({330, 60}, {416, 416}, false).size == cv::Size(416, 76));
  CHECK(fit_into({330, 60}, {416, 416}, true).size == cv::Size(415, 75));
  CHECK(letterbox(Image({1000, 1}, 9), {64, 64}).image(0, 63) == cv::Vec3b::all(9));
  const Image fits = noise({64, 32});
  CHECK(letterbox(fits, {64, 32}).image.ptr() == fits.ptr());  // not copied
}
