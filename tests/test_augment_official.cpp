// SPDX-License-Identifier: Apache-2.0
// augment_official.hpp equals the official code pixel for pixel, including each of its quirks.
//
// The fixtures hold random numbers recorded from the official pipeline, and its images and boxes for them.
#include "tensors.hpp"
//
#include <type_traits>

#include "album.hpp"
#include "augment_official.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

Sample composed(const MemoryDataset& album, const SampleDraw& draw, cv::Size size) {
  Sample sample{Image(size, 0), {}};
  official::compose(album, draw, sample);
  return sample;
}

// ---- fixtures ----

Image to_image(const torch::Tensor& t) {  // [H, W, 3] or [3, H, W], uint8
  const auto hwc = (t.size(2) == 3 ? t : t.permute({1, 2, 0})).contiguous();
  return cv::Mat(hwc.size(0), hwc.size(1), CV_8UC3, hwc.data_ptr()).clone();
}

std::vector<Box> to_boxes(const torch::Tensor& t) {  // [N, 5] x1, y1, x2, y2, class
  std::vector<Box> boxes;
  const auto d = t.to(torch::kDouble).contiguous();
  for (int i = 0; i < d.size(0); ++i) {
    const double* r = d.data_ptr<double>() + 5 * i;
    boxes.push_back({r[0], r[1], r[2], r[3], int(r[4])});
  }
  return boxes;
}

void check_boxes(const std::vector<Box>& boxes, const torch::Tensor& expected) {
  const auto want = to_boxes(expected);
  REQUIRE(boxes.size() == want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    CHECK(boxes[i].cls == want[i].cls);
    CHECK(max_corner_difference(boxes[i], want[i]) < 1e-9);
  }
}

// Compares boxes with the labels of the network: [L, 5] class, cx, cy, w, h in float32, padded with zeros.
void check_labels(const std::vector<Box>& boxes, const torch::Tensor& expected) {
  auto got = torch::zeros_like(expected);
  for (int i = 0; i < std::min<int>(boxes.size(), expected.size(0)); ++i) {
    const Box& b = boxes[i];
    const double row[] = {double(b.cls), (b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, b.x2 - b.x1, b.y2 - b.y1};
    for (int k = 0; k < 5; ++k) got[i][k] = row[k];
  }
  CHECK((got - expected).abs().max().item<float>() < 2e-5f);
}

double number(const c10::impl::GenericDict& d, const std::string& key) {
  const auto v = d.at(key);
  return v.isInt() ? double(v.toInt()) : v.toDouble();
}

// Random numbers recorded from the official pipeline, in the order of its calls.
struct Tape {
  std::vector<double> draws;
  std::vector<std::string> kinds;
  std::size_t at = 0;
  Tape(const c10::impl::GenericDict& d, const std::string& name) {
    const auto t = tensor(d, name + "_draws");
    draws.assign(t.data_ptr<double>(), t.data_ptr<double>() + t.numel());
    for (const c10::IValue& kind : d.at(name + "_kinds").toList()) kinds.push_back(kind.toStringRef());
  }
  bool next_is(const std::string& kind) const { return at < kinds.size() && kinds[at] == kind; }
  double take(const std::string& kind) {
    REQUIRE(next_is(kind));
    return draws[at++];
  }
  ColourFlipDraw colour_flip() {
    if (at == draws.size()) return {};  // an image without boxes: no number was drawn
    take("random");                     // always below hsv_prob, which is 1
    double h = 5 * take("np.uniform"), s = 30 * take("np.uniform"), v = 30 * take("np.uniform");
    h *= take("np.randint");
    s *= take("np.randint");
    v *= take("np.randint");
    return {HsvDraw{h, s, v}, take("random") < 0.5};
  }
  AffineDraw affine() {
    AffineDraw d;
    for (double* v : {&d.angle, &d.scale, &d.shear_x, &d.shear_y, &d.shift_x, &d.shift_y})
      *v = take("uniform");
    return d;
  }
};

}  // namespace

// ---- single stages ----

TEST_CASE("official: hue shifts act on BGR") {
  const auto jitter = [](cv::Vec3b pixel, HsvDraw d) {
    return official::hsv(coloured({8, 8}, pixel), d)(3, 3);
  };
  CHECK(jitter({0, 0, 255}, {60, 0, 0}) == cv::Vec3b(0, 255, 0));         // red + 120 degrees = green
  CHECK(jitter({0, 0, 255}, {-60, 0, 0}) == cv::Vec3b(255, 0, 0));        // red - 120 degrees = blue
  CHECK(jitter({255, 0, 0}, {60, 0, 0}) == cv::Vec3b(0, 0, 255));         // blue + 120 degrees = red
  CHECK(jitter({0, 0, 255}, {0, 0, -300}) == cv::Vec3b(0, 0, 0));         // saturates at 0
  CHECK(jitter({0, 0, 200}, {0, 30, 90}) == cv::Vec3b(0, 0, 255));        // saturates at 255
  CHECK(jitter({90, 90, 90}, {0, 0, 10.9}) == cv::Vec3b(100, 100, 100));  // truncated
}

TEST_CASE("official: the types of the stages accept uint8 images only, and the input stays unchanged") {
  static_assert(std::is_same_v<decltype(official::hsv(Image(), HsvDraw())), Image>);
  static_assert(!std::is_invocable_v<decltype(official::hsv), cv::Mat_<cv::Vec3f>, HsvDraw>);
  const Sample in{noise({33, 17}), {{1, 2, 30, 15, 0}}};
  const Image before(in.image.clone());
  CHECK(max_difference(official::hsv(in.image, {5, 30, -30}), in.image) > 20);
  const ColourFlipDraw draw{HsvDraw{1, 2, 3}, true};
  CHECK(official::train_transform(in, draw, {64, 64}).image.type() == CV_8UC3);
  official::mosaic({in, in, in, in}, {30, 30}, {32, 32});
  official::random_affine(in, {5, 1, 1, 1, 0, 0}, {20, 20});
  official::mixup(in, in, {0.7, true, {0, 0}, {}});
  CHECK(max_difference(in.image, before) == 0);
}

TEST_CASE("official: boxes stay on their objects within 1.5 pixels") {
  Rng rng(3, 0, 0);
  int compared = 0;
  for (int i = 0; i < 150; ++i) {
    const Sample s = marked_image(rng, random_size(rng, 40, 150), 2 * (i % 4));
    CHECK(check_marks(official::flip(s), 0) == 2);
    const cv::Size room(32 * rng.randint(2, 6), 32 * rng.randint(2, 6));
    compared += check_marks(official::train_transform(s, {{}, i % 2 == 0}, room), 1.5);

    const cv::Size size(32 * rng.randint(2, 4), 32 * rng.randint(2, 4));
    std::array<Sample, 4> tiles;
    for (int k = 0; k < 4; ++k) tiles[k] = marked_image(rng, random_size(rng, 40, 150), 2 * k);
    const Sample four = official::mosaic(tiles, draw_mosaic(rng, {}, 4, size).centre, size);
    CHECK(four.image.size() == size * 2);
    compared += check_marks(four, 1.5);

    const Sample canvas = marked_image(rng, {320, 256}, 2 * (i % 4));
    const AffineDraw d{0, rng.uniform(0.1, 2), 0, 0, rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1)};
    compared += check_marks(official::random_affine(canvas, d, {160, 128}), 1.1);
  }
  CHECK(compared > 900);
}

TEST_CASE("official: the number of labels is not limited") {
  Sample crowd{noise({64, 64}), {}};
  for (int i = 0; i < 3000; ++i)
    crowd.boxes.push_back({i % 30 * 2.0, i / 100 * 2.0, i % 30 * 2.0 + 4, i / 100 * 2.0 + 4, i});
  const MemoryDataset album{{crowd, crowd, crowd, crowd}};
  SampleDraw draw{
      0, MosaicDraw{{64, 64}, {1, 2, 3}, {0, 0.5, 0, 0, 0, 0}}, MixupDraw{1, false, {0, 0}, {1}}, {}};
  CHECK(composed(album, draw, {64, 64}).boxes.size() == 15000);
}

// ---- quirks ----

TEST_CASE("official quirk: sizes are truncated, so that images may be resized twice") {
  const Sample once = official::fit({Image({330, 60}, 9), {{0, 0, 330, 60, 1}}}, {416, 416});
  CHECK(once.image.size() == cv::Size(415, 75));
  CHECK(max_corner_difference(once.boxes[0], {0, 0, 416, 60 * 416.0 / 330, 1}) <
        1e-9);  // boxes are scaled by the ratio before truncation
  CHECK(official::fit(once, {416, 416}).image.size() == cv::Size(416, 75));
  const Image fits = noise({64, 32});
  CHECK(official::fit({fits, {}}, {64, 64}).image.ptr() == fits.ptr());
}

TEST_CASE("official quirk: images without boxes are neither jittered nor flipped") {
  const Sample background{noise({64, 64}), {}};
  const ColourFlipDraw d{HsvDraw{5, 30, 30}, true};
  CHECK(max_difference(official::train_transform(background, d, {64, 64}).image, background.image) == 0);
  const MemoryDataset album{{background}};
  CHECK(max_difference(composed(album, {0, {}, {}, d}, {64, 64}).image, background.image) == 0);
}

TEST_CASE("official quirk: an image whose boxes are all a pixel or less is not augmented and keeps them") {
  const Sample s{noise({64, 64}), {{1, 1, 2, 30, 0}, {10, 10, 10.5, 10.5, 1}, {5, 5, 5, 9, 2}}};
  const ColourFlipDraw d{HsvDraw{5, 30, 30}, true};
  const Sample out = official::train_transform(s, d, {64, 64});
  CHECK(out.boxes.size() == 3);
  CHECK(max_difference(out.image, s.image) == 0);
  Sample more = s;
  more.boxes.push_back({0, 0, 9, 9, 3});
  CHECK(official::train_transform(more, d, {64, 64}).boxes.size() == 1);
}

TEST_CASE("official quirk: boxes outside the image are kept with zero width or height") {
  const Sample s{noise({64, 64}), {{0, 0, 8, 8, 0}, {56, 56, 64, 64, 1}}}, empty{s.image, {}};
  // With the centre at (16, 16), only the lower right corner of the first tile is on the canvas.
  CHECK(official::mosaic({s, empty, empty, empty}, {16, 16}, {64, 64}).boxes.size() == 2);
  CHECK(official::random_affine(s, {0, 1, 0, 0, 0, 0}, {32, 32}).boxes.size() == 2);
  CHECK(official::mixup(empty, s, {1.5, false, {30, 30}, {}}).boxes.size() == 2);
}

TEST_CASE(
    "official quirk: a box that crosses the left or top edge is moved, and boxes without area are kept") {
  const cv::Size size(100, 50);
  const auto is = [](const std::optional<Box>& b, double x1, double y1, double x2, double y2) {
    return b && max_corner_difference(*b, {x1, y1, x2, y2, b->cls}) < 1e-12;
  };
  CHECK(is(official::clip_box(-5, -3, 20, 10, 4, size), 0, 0, 20, 10));
  CHECK(is(official::clip_box(-50, 0, 20, 10, 4, size), 0, 0, 20, 10));
  CHECK(is(official::clip_box(10, 10, 0, 5, 4, size), 10, 10, 10, 15));
  CHECK(!official::clip_box(100.5, 0, 20, 10, 4, size));
}

TEST_CASE("official quirk: MixUp truncates, and its border is black") {
  const Sample base{Image({64, 64}, 101), {}}, other{Image({64, 64}, 50), {{0, 0, 64, 64, 3}}};
  const Sample out = official::mixup(base, other, {0.5, false, {0, 0}, {}});
  CHECK(out.image(0, 0) == cv::Vec3b::all(75));
  CHECK(out.image(63, 63) == cv::Vec3b::all(50));
  CHECK(base.image(0, 0) == cv::Vec3b::all(101));
}

TEST_CASE(
    "official quirk: a mosaic without boxes gets no MixUp; otherwise the search for an image is limited") {
  const cv::Size size(64, 64);
  MemoryDataset album{std::vector<Sample>(6, Sample{Image(size, 200), {}})};
  album.samples[5].boxes = {{0, 0, 64, 64, 3}};
  SampleDraw draw{
      0, MosaicDraw{{64, 64}, {1, 2, 3}, {0, 1, 0, 0, 0, 0}}, MixupDraw{1, false, {0, 0}, {4, 2, 5, 1}}, {}};
  CHECK(composed(album, draw, size).boxes.empty());
  CHECK(album.asked.size() == 4);
  album.samples[0].boxes = {{0, 0, 64, 64, 1}};
  CHECK(composed(album, draw, size).boxes.size() == 2);
  draw.mixup->candidates = {4, 2, 4};
  CHECK(composed(album, draw, size).boxes.size() == 1);
}

// ---- the whole pipeline ----

TEST_CASE("official: images resized in advance, as in a cache, give the same sample") {
  struct Cached : MemoryDataset {
    cv::Size network;
    ImageRegion image_region(std::size_t i, const cv::Rect&, double) const {
      const double r = fit_into(size(i), network, true).scale.x;
      return {official::fit({samples[i].image, {}}, network).image, {r, r}, {0, 0}};
    }
  } cached;
  Rng rng(4, 0, 0);
  for (int i = 0; i < 20; ++i) {
    cached.network = {32 * int(rng.randint(2, 5)), 32 * int(rng.randint(2, 5))};
    cached.samples.clear();
    while (cached.samples.size() < 4) {
      const cv::Size own = random_size(rng, 40, 250), fitted = fit_into(own, cached.network, true).size;
      const bool full = fitted.width == cached.network.width || fitted.height == cached.network.height;
      // If truncated on both sides, the image would be resized a second time.
      if (full && cached.samples.size() % 2) continue;
      cached.samples.push_back(marked_image(rng, own, 2 * int(cached.samples.size())));
    }
    const SampleDraw draw = draw_sample(rng, {}, 4, i % 4, cached.network, i % 3 > 0);
    // Reads through MemoryDataset::image_region().
    const Sample direct = composed(cached, draw, cached.network);
    Sample out{Image(cached.network, 0), {}};
    official::compose(cached, draw, out);
    CHECK(max_difference(out.image, direct.image) == 0);
    REQUIRE(out.boxes.size() == direct.boxes.size());
    for (std::size_t b = 0; b < out.boxes.size(); ++b)
      CHECK(max_corner_difference(out.boxes[b], direct.boxes[b]) < 1e-9);
  }
}

TEST_CASE("official: an unreadable image is replaced") {
  Rng rng(5, 0, 0);
  MemoryDataset album;
  for (int k = 0; k < 4; ++k) album.samples.push_back(marked_image(rng, random_size(rng, 40, 150), 2 * k));
  SampleDraw draw{
      0, MosaicDraw{{60, 70}, {1, 2, 3}, {5, 0.8, 1, 1, 0, 0}}, MixupDraw{1, true, {0, 0}, {1}}, {}};
  SampleDraw meant = draw;
  meant.index = 3;
  meant.mosaic->others[1] = 1;
  const Sample expected = composed(album, meant, {64, 64});
  album.broken = {0, 2};
  album.replacements = {2, 3, 1};
  const Sample out = composed(album, draw, {64, 64});
  CHECK(max_difference(out.image, expected.image) == 0);
  CHECK(out.boxes.size() == expected.boxes.size());
  CHECK(album.replaced == std::vector<std::pair<std::size_t, std::size_t>>{{0, 1}, {2, 2}, {2, 1}});
  CHECK_THROWS_WITH_AS(composed(album, draw, {64, 64}), "picture 0 is damaged", ImageError);
}

TEST_CASE(
    "official: a sample depends only on its draw, is written to the caller's memory, and source images stay "
    "unchanged") {
  const cv::Size size(64, 96);
  MemoryDataset album;
  Rng rng(6, 0, 0);
  std::vector<Image> before;
  for (int i = 0; i < 5; ++i) {
    // Image 0 needs no resizing and has no boxes, so that a view of its pixels could be returned by mistake.
    const cv::Size own = i == 0 ? size : random_size(rng, 20, 120);
    album.samples.push_back({noise(own, i), {}});
    if (i) album.samples[i].boxes = {{2, 2, 18, 18, i}};
    before.emplace_back(album.samples[i].image.clone());
  }
  const auto make = [&](std::uint64_t epoch, std::size_t i, Sample& sample) {
    Rng own(1, epoch, i);
    official::compose(album, draw_sample(own, {}, 5, i % 5, size, i % 3 > 0), sample);
  };
  const int n = 24;
  std::vector<Sample> alone(n), threaded(n);
  std::vector<const uchar*> memory;
  for (auto* samples : {&alone, &threaded}) {
    for (Sample& s : *samples) {
      s.image = Image(size, 0);
      memory.push_back(s.image.ptr());
    }
  }
  for (int i = 0; i < n; ++i) make(0, i, alone[i]);
  call_in_threads(n, [&](int i) { make(0, i, threaded[i]); });
  int changed = 0;
  Sample other{Image(size, 0), {{1, 2, 3, 4, 5}}};
  for (int i = 0; i < n; ++i) {
    CHECK(max_difference(alone[i].image, threaded[i].image) == 0);
    REQUIRE(alone[i].boxes.size() == threaded[i].boxes.size());
    for (std::size_t b = 0; b < alone[i].boxes.size(); ++b)
      CHECK(max_corner_difference(alone[i].boxes[b], threaded[i].boxes[b]) == 0);
    CHECK((alone[i].image.ptr() == memory[i] && threaded[i].image.ptr() == memory[n + i]));
    make(1, i, other);
    changed += max_difference(alone[i].image, other.image) > 0;
  }
  CHECK(changed >= n - 2);  // all except the single image without boxes, which is not augmented
  for (int i = 0; i < 5; ++i) CHECK(max_difference(album.samples[i].image, before[i]) == 0);
}

// ---- comparison with the official code ----

SHARED_TEST("official letterbox is reproduced pixel for pixel") {
  const auto d = fixture("aug_cv46.pth");
  for (int i = 0; i < number(d, "letterbox_count"); ++i) {
    const std::string name = "letterbox" + std::to_string(i);
    const Image want = to_image(tensor(d, name + "_out"));
    const Letterbox got = letterbox(to_image(tensor(d, name + "_in")), want.size());
    CHECK_MESSAGE(max_difference(got.image, want) == 0, name);
    CHECK(got.scale.x == number(d, name + "_r"));
    CHECK(got.scale.y == number(d, name + "_r"));
  }
}

SHARED_TEST("official HSV jitter is reproduced, within one level in the last columns") {
  const auto d = fixture("aug_cv46.pth");
  const Image in = to_image(tensor(d, "hsv_in"));
  for (int i = 0; i < 5; ++i) {
    const std::string name = "hsv" + std::to_string(i);
    const auto draws = tensor(d, name + "_draws");
    const auto g = (draws[0] * torch::tensor({5.0, 30.0, 30.0}, torch::kDouble) * draws[1]).contiguous();
    const double* gain = g.data_ptr<double>();
    const Image got = official::hsv(in, {gain[0], gain[1], gain[2]}),
                want = to_image(tensor(d, name + "_out"));
    const int whole = in.cols / 32 * 32;
    CHECK(max_difference(got.colRange(0, whole), want.colRange(0, whole)) == 0);
    CHECK(max_difference(got, want) <= 1);
  }
}

SHARED_TEST("official affine is reproduced pixel for pixel") {
  const auto d = fixture("aug_cv46.pth");
  const Sample in{to_image(tensor(d, "affine_in")), to_boxes(tensor(d, "affine_boxes"))};
  for (int i = 0; d.contains("affine" + std::to_string(i) + "_draws"); ++i) {
    const std::string name = "affine" + std::to_string(i);
    const auto draws = tensor(d, name + "_draws").contiguous();
    const double* v = draws.data_ptr<double>();
    const AffineDraw draw{v[0], v[1], v[2], v[3], v[4], v[5]};
    const Image want = to_image(tensor(d, name + "_out"));
    const auto m = affine_matrix(draw, want.size());
    const auto expected = tensor(d, name + "_M").contiguous();
    for (int k = 0; k < 6; ++k) CHECK(std::abs(m.val[k] - expected.data_ptr<double>()[k]) < 1e-14 * 256);
    const Sample got = official::random_affine(in, draw, want.size());
    CHECK_MESSAGE(max_difference(got.image, want) == 0, name);
    check_boxes(got.boxes, tensor(d, name + "_boxes"));
  }
}

SHARED_TEST("official TrainTransform is reproduced, without its limit of labels") {
  const auto d = fixture("aug_cv46.pth");
  const Image in = to_image(tensor(d, "tt_in"));
  for (int i = 0; i < 5; ++i) {
    const std::string name = "tt" + std::to_string(i);
    const Sample sample{in, to_boxes(tensor(d, name + "_boxes"))};
    const Image want = to_image(tensor(d, name + "_out"));
    Tape tape(d, name);
    const ColourFlipDraw draw = tape.colour_flip();
    const Sample got = official::train_transform(sample, draw, want.size());
    CHECK_MESSAGE(max_difference(got.image, want) <= 1, name);
    check_labels(got.boxes, tensor(d, name + "_labels"));
    if (i == 4) CHECK(got.boxes.size() > 120);
    if (i == 2) CHECK(got.boxes.size() == 2);  // quirk: the augmentation is undone
  }
}

SHARED_TEST("official mosaic, affine, MixUp and whole samples are reproduced") {
  const auto d = fixture("aug_cv46.pth");
  MemoryDataset album;
  for (int i = 0; i < 8; ++i) {
    const std::string name = "ds" + std::to_string(i);
    album.samples.push_back({to_image(tensor(d, name + "_img")), to_boxes(tensor(d, name + "_labels"))});
  }
  int mosaics = 0, mixups = 0;
  for (int i = 0; i < number(d, "mosaic_count"); ++i) {
    const std::string name = "mosaic" + std::to_string(i);
    CAPTURE(name);
    const auto hw = d.at(name + "_size").toListRef();
    const cv::Size size(int(hw[1].toInt()), int(hw[0].toInt()));
    const auto load = [&](std::size_t k) { return official::fit(album.samples[k], size); };
    Tape tape(d, name);
    SampleDraw draw{std::size_t(number(d, name + "_index")), {}, {}, {}};
    if (number(d, name + "_enable_mosaic") && tape.take("random") < number(d, name + "_mosaic_prob")) {
      ++mosaics;
      MosaicDraw m;
      m.centre.y = int(tape.take("uniform"));
      m.centre.x = int(tape.take("uniform"));
      for (auto& other : m.others) other = std::size_t(tape.take("randint"));
      m.affine = tape.affine();
      draw.mosaic = m;
      const Sample canvas = official::mosaic(
          {load(draw.index), load(m.others[0]), load(m.others[1]), load(m.others[2])}, m.centre, size);
      if (d.contains(name + "_canvas"))
        CHECK(max_difference(canvas.image, to_image(tensor(d, name + "_canvas"))) == 0);
      check_boxes(canvas.boxes, tensor(d, name + "_canvas_labels"));
      const Sample turned = official::random_affine(canvas, m.affine, size);
      CHECK(max_difference(turned.image, to_image(tensor(d, name + "_affine"))) == 0);
      check_boxes(turned.boxes, tensor(d, name + "_affine_labels"));
      if (number(d, name + "_enable_mixup")) {
        ++mixups;
        tape.take("random");  // always below mixup_prob, which is 1
        MixupDraw x{tape.take("uniform"), tape.take("uniform") > 0.5, {}, {}};
        do x.candidates.push_back(std::size_t(tape.take("randint")));
        while (album.boxes(x.candidates.back()).empty());
        const cv::Size zoomed = mixup_size(size, x.scale);
        if (zoomed.height > size.height) x.offset.y = int(tape.take("randint"));
        if (zoomed.width > size.width) x.offset.x = int(tape.take("randint"));
        draw.mixup = x;
        const Sample mixed = official::mixup(turned, load(x.candidates.back()), x);
        CHECK(max_difference(mixed.image, to_image(tensor(d, name + "_mixup"))) == 0);
        check_boxes(mixed.boxes, tensor(d, name + "_mixup_labels"));
      }
    }
    draw.colour_flip = tape.colour_flip();
    CHECK(tape.at == tape.draws.size());
    const Sample out = composed(album, draw, size);
    CHECK(max_difference(out.image, to_image(tensor(d, name + "_out"))) <= 1);
    check_labels(out.boxes, tensor(d, name + "_labels"));
  }
  CHECK(mosaics == 10);
  CHECK(mixups == 8);
}

SHARED_TEST("official annotation parsing is reproduced") {
  const auto d = fixture("aug_cv46.pth");
  struct Annotation {  // fixtures/coco_parse without crowds and areas of 0; cls is the index of the category
                       // id in {1, 18, 90}
    double x, y, w, h;
    int cls;
  };
  const std::vector<std::pair<cv::Size, std::vector<Annotation>>> pictures = {
      {{100, 50}, {{-5, -3, 20, 10, 1}, {90, 40, 30, 30, 0}, {10, 10, 0, 5, 2}, {20, 20, 5, 5, 1}}},
      {{33, 77}, {{1.5, 2.25, 10.125, 20.75, 1}, {40, 5, 10, 10, 2}, {10, 80, 5, 5, 0}, {5, 5, -3, 4, 0}}},
      {{640, 480}, {{100.01, 200.02, 300.03, 100.04, 2}}}};
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    const auto& [size, annotations] = pictures[i];
    const Fit to = fit_into(size, {416, 416}, true);
    std::vector<Box> boxes;
    for (const auto& a : annotations) {
      if (const auto box = official::clip_box(a.x, a.y, a.w, a.h, a.cls, size)) {
        boxes.push_back(official::scaled_shifted(*box, to.scale));
      }
    }
    check_boxes(boxes, tensor(d, "coco" + std::to_string(i) + "_labels"));
    const auto info = tensor(d, "coco" + std::to_string(i) + "_info");  // h, w, resized h, w
    CHECK(to.size == cv::Size(info[3].item<int>(), info[2].item<int>()));
  }
}
