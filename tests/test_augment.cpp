// augment.hpp: equal to the official code where that is asked for, and right where it is not.
//
// Two kinds of proof. Against fixtures: the recorded random numbers of the official pipeline give its pixels
// and boxes. Against geometry: pictures hold boxes of one colour each on grey, and after any transform the
// pixels of that colour still span the box.
#include "tensors.hpp"
//
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>

#include "augment.hpp"

using namespace yolox;

namespace {

const std::vector<cv::Vec3b> colours = {{255, 0, 0},   {0, 255, 0},   {0, 0, 255}, {255, 255, 0},
                                        {255, 0, 255}, {0, 255, 255}, {0, 0, 0},   {255, 255, 255}};

// Grey picture with two solid boxes; their classes are their colours.
Sample marked(Rng& rng, cv::Size size, int cls) {
  Sample s{Image(size, border_grey), {}};
  for (int half : {0, 1}) {  // one in the left half, one in the right half, never touching
    const int left = half * size.width / 2 + 2, right = left + size.width / 2 - 4;
    const int x1 = static_cast<int>(rng.randint(left, right - 12)),
              x2 = static_cast<int>(rng.randint(x1 + 10, right));
    const int y1 = static_cast<int>(rng.randint(0, size.height - 12));
    const int y2 = static_cast<int>(rng.randint(y1 + 10, size.height));
    s.image(cv::Rect({x1, y1}, cv::Point(x2, y2))).setTo(colours[cls + half]);
    s.boxes.push_back({double(x1), double(y1), double(x2), double(y2), cls + half});
  }
  return s;
}

// The box around all pixels that are at least `least` of the way from grey to the colour.
std::optional<Box> extent(const Image& image, int cls, double least) {
  const cv::Vec3d to = cv::Vec3d(colours[cls]) - cv::Vec3d::all(border_grey);
  Box box{1e9, 1e9, -1e9, -1e9, cls};
  for (int y = 0; y < image.rows; ++y) {
    for (int x = 0; x < image.cols; ++x) {
      const cv::Vec3d d = cv::Vec3d(image(y, x)) - cv::Vec3d::all(border_grey);
      const double t = d.dot(to) / to.dot(to);
      if (t < least || cv::norm(d - t * to) > 12) continue;
      box = {std::min(box.x1, double(x)), std::min(box.y1, double(y)), std::max(box.x2, x + 1.0),
             std::max(box.y2, y + 1.0), cls};
    }
  }
  return box.x2 > 0 ? std::optional<Box>(box) : std::nullopt;
}

double gap(const Box& a, const Box& b) {
  return std::max(
      {std::abs(a.x1 - b.x1), std::abs(a.y1 - b.y1), std::abs(a.x2 - b.x2), std::abs(a.y2 - b.y2)});
}

// Every box spans its colour to `tolerance` pixels, and every colour that is more than a speck has its box.
// Returns how many boxes were compared.
int check_marks(const Sample& s, double tolerance, double least = 0.5) {
  std::map<int, Box> boxes;
  for (const Box& b : s.boxes) CHECK(boxes.emplace(b.cls, b).second);
  int compared = 0;
  for (int cls = 0; cls < int(colours.size()); ++cls) {
    const auto seen = extent(s.image, cls, least);
    const auto box = boxes.find(cls);
    if (box == boxes.end()) {
      CHECK_MESSAGE((!seen || std::min(seen->x2 - seen->x1, seen->y2 - seen->y1) <= 2), "colour without box");
    } else if (std::min(box->second.x2 - box->second.x1, box->second.y2 - box->second.y1) > 3) {
      REQUIRE(seen);
      const Box& b = box->second;
      const auto text = [](const Box& x) { return concat(x.x1, " ", x.y1, " ", x.x2, " ", x.y2); };
      CHECK_MESSAGE(gap(*seen, b) <= tolerance, "box " << text(b) << ", pixels " << text(*seen));
      ++compared;
    }
  }
  return compared;
}

cv::Size random_size(Rng& rng, int lo, int hi) {
  return {static_cast<int>(rng.randint(lo, hi)), static_cast<int>(rng.randint(lo, hi))};
}

Image noise(cv::Size size, std::uint64_t seed = 0) {
  Image image(size, 0);
  Rng rng(seed, 0, 0);
  for (auto& p : image)
    p = {uchar(rng.randint(0, 255)), uchar(rng.randint(0, 255)), uchar(rng.randint(0, 255))};
  return image;
}

int max_difference(const Image& a, const Image& b) {
  REQUIRE(a.size() == b.size());
  return static_cast<int>(cv::norm(a, b, cv::NORM_INF));
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
    CHECK(gap(boxes[i], want[i]) < 1e-9);
  }
}

// Labels as the network gets them: [L, 5] class, cx, cy, w, h in float32, zeros after the last one.
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

// The official pipeline's random numbers in the order of its calls.
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
    if (at == draws.size()) return {};  // a picture without boxes: nothing was drawn
    take("random");                     // below hsv_prob, which is 1
    double h = 5 * take("np.uniform"), s = 30 * take("np.uniform"), v = 30 * take("np.uniform");
    h *= take("np.randint"), s *= take("np.randint"), v *= take("np.randint");
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

// ---- types and settings ----

TEST_CASE("a4 transforms are typed uint8") {
  static_assert(!std::is_constructible_v<Image, cv::Mat_<cv::Vec3f>>);
  static_assert(!std::is_convertible_v<cv::Mat_<cv::Vec3f>, Image>);
  static_assert(!std::is_assignable_v<Image&, cv::Mat_<cv::Vec3f>>);
  static_assert(!std::is_constructible_v<Image, cv::Mat_<uchar>>);
  static_assert(std::is_same_v<decltype(hsv(Image(), HsvDraw())), Image>);
  static_assert(std::is_same_v<decltype(Sample::image), Image> &&
                std::is_same_v<decltype(Letterbox::image), Image>);
  CHECK_THROWS_WITH_AS(Image(cv::Mat(2, 2, CV_32FC3)), doctest::Contains("picture is CV_32FC3"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(Image(cv::Mat(2, 2, CV_8UC1)), doctest::Contains("CV_8UC1"), std::runtime_error);
  CHECK_THROWS_WITH_AS(Image(cv::Mat()), doctest::Contains("empty"), std::runtime_error);
  CHECK_THROWS_WITH_AS(letterbox(Image(), {32, 32}, false), doctest::Contains("empty"), std::runtime_error);
  Image image;
  CHECK_THROWS_AS((image = cv::Mat(2, 2, CV_32FC3)), std::runtime_error);
  CHECK(Image(cv::Mat(2, 3, CV_8UC3)).size() == cv::Size(3, 2));
  const Sample out = train_transform({noise({40, 30}), {}}, {HsvDraw{1, 2, 3}, true}, {64, 64}, false);
  CHECK(out.image.type() == CV_8UC3);
}

TEST_CASE("a7 OpenCV runs no threads and no OpenCL of its own") {
  std::set<std::thread::id> ids;  // of the threads that take part in loops of OpenCV's
  const auto loop = [&] {
    std::mutex mutex;
    const auto body = [&](const cv::Range&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    };
    cv::parallel_for_({0, 32}, body, 32);
  };
  cv::setNumThreads(2);
  loop();  // so that OpenCV's pool is awake; on a busy machine it may still take no part
  opencv_single_thread();
  ids.clear();
  for (int i = 0; i < 3; ++i) loop();
  CHECK(ids == std::set<std::thread::id>{std::this_thread::get_id()});
  CHECK(!cv::ocl::useOpenCL());
}

TEST_CASE("settings out of range are named") {
  CHECK_NOTHROW(check_augment_config({}));
  const auto error = [](auto change, const char* name) {
    AugmentConfig c;
    change(c);
    CHECK_THROWS_WITH_AS(check_augment_config(c), doctest::Contains(name), std::runtime_error);
  };
  error([](auto& c) { c.flip_prob = 1.5; }, "flip_prob is 1.5; give 0 to 1");
  error([](auto& c) { c.mosaic_scale_lo = 0; }, "mosaic_scale_lo");
  error([](auto& c) { c.mosaic_scale_hi = 0.05; }, "mosaic_scale_hi");
  error([](auto& c) { c.shear = 45; }, "shear");
  error([](auto& c) { c.hsv_prob = std::nan(""); }, "hsv_prob");
  error([](auto& c) { c.mixup_tries = 0; }, "mixup_tries");
}

// ---- random numbers ----

TEST_CASE("Rng: golden values, computed apart from this code in Python") {
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

TEST_CASE("Rng: uniform, both ends included, and neighbours are strangers") {
  Rng rng(7, 0, 0);
  double sum = 0, squares = 0;
  std::vector<int> bins(10), faces(6);
  int heads = 0;
  const int n = 60000;
  for (int i = 0; i < n; ++i) {
    const double u = rng.uniform(-2, 3);
    REQUIRE((u >= -2 && u < 3));
    sum += u, squares += u * u, ++bins[int((u + 2) * 2)];
    const auto face = rng.randint(-3, 2);
    REQUIRE((face >= -3 && face <= 2));
    ++faces[face + 3];
    heads += rng.bernoulli(0.3);
  }
  CHECK(sum / n == doctest::Approx(0.5).epsilon(0.05));
  CHECK(squares / n - 0.25 == doctest::Approx(25.0 / 12).epsilon(0.03));
  for (int b : bins) CHECK(b == doctest::Approx(n / 10).epsilon(0.06));
  for (int f : faces) CHECK(f == doctest::Approx(n / 6).epsilon(0.06));
  CHECK(heads == doctest::Approx(0.3 * n).epsilon(0.04));

  // First numbers over neighbouring samples, epochs and seeds: no two equal, no correlation.
  std::set<std::uint64_t> firsts;
  std::vector<double> u;
  for (int seed = 0; seed < 20; ++seed) {
    for (int epoch = 0; epoch < 20; ++epoch) {
      for (int i = 0; i < 20; ++i) {
        firsts.insert(Rng(seed, epoch, i).next());
        u.push_back(Rng(seed, epoch, i).uniform(-1, 1));
      }
    }
  }
  CHECK(firsts.size() == 8000);
  for (int lag : {1, 20, 400}) {
    double product = 0;
    for (std::size_t i = lag; i < u.size(); ++i) product += u[i] * u[i - lag];
    CHECK(std::abs(product / double(u.size() - lag)) < 0.02);
  }
}

TEST_CASE("draws stay in their ranges, and share of each is as set") {
  AugmentConfig c;
  c.mosaic_prob = 0.7, c.mixup_prob = 0.4, c.hsv_prob = 0.6, c.flip_prob = 0.2;
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
      angle_lo = std::min(angle_lo, a.angle), angle_hi = std::max(angle_hi, a.angle);
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
      ++jitters, still += h->h == 0;
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
  CHECK_THROWS_WITH(draw_sample(rng, c, 50, 50, size, true), doctest::Contains("sample 50 of 50"));
}

// ---- colour ----

TEST_CASE("a1 hue shifts act on BGR") {
  const auto jitter = [](cv::Vec3b pixel, HsvDraw d) {
    Image image({8, 8}, 0);
    image.setTo(pixel);
    return hsv(image, d)(3, 3);
  };
  CHECK(jitter({0, 0, 255}, {60, 0, 0}) == cv::Vec3b(0, 255, 0));   // red + 120 degrees = green
  CHECK(jitter({0, 0, 255}, {-60, 0, 0}) == cv::Vec3b(255, 0, 0));  // red - 120 degrees = blue
  CHECK(jitter({255, 0, 0}, {60, 0, 0}) == cv::Vec3b(0, 0, 255));   // blue + 120 degrees = red, past 180
  CHECK(jitter({0, 0, 255}, {0, 0, -300}) == cv::Vec3b(0, 0, 0));   // stops at 0 ...
  CHECK(jitter({0, 0, 200}, {0, 30, 90}) == cv::Vec3b(0, 0, 255));  // ... and at 255
  CHECK(jitter({90, 90, 90}, {0, 0, 10.9}) == cv::Vec3b(100, 100, 100));  // truncated
}

TEST_CASE("hsv leaves its input alone") {
  const Image image = noise({33, 17}), before = Image(image.clone());
  CHECK(max_difference(hsv(image, {5, 30, -30}), image) > 20);
  CHECK(max_difference(image, before) == 0);
}

// ---- boxes ----

TEST_CASE("annotations are cut at the border, not moved") {
  const cv::Size size(100, 50);
  const auto is = [](const std::optional<Box>& b, double x1, double y1, double x2, double y2) {
    return b && b->x1 == x1 && b->y1 == y1 && b->x2 == x2 && b->y2 == y2 && b->cls == 4;
  };
  CHECK(is(clip_box(-5, -3, 20, 10, 4, size, false), 0, 0, 15, 7));
  CHECK(is(clip_box(90, 40, 30, 30, 4, size, false), 90, 40, 100, 50));
  CHECK(is(clip_box(1.5, 2.25, 10, 20, 4, size, false), 1.5, 2.25, 11.5, 22.25));
  CHECK(!clip_box(-50, 0, 20, 10, 4, size, false));  // wholly outside, at each side
  CHECK(!clip_box(0, -50, 20, 10, 4, size, false));
  CHECK(!clip_box(100, 0, 20, 10, 4, size, false));
  CHECK(!clip_box(0, 60, 20, 10, 4, size, false));
  CHECK(!clip_box(10, 10, 0, 5, 4, size, false));
  CHECK(!clip_box(10, 10, 5, -5, 4, size, false));
  CHECK(is(clip_box(-5, -3, 20, 10, 4, size, true), 0, 0, 20, 10));  // the quirk
  CHECK(is(clip_box(-50, 0, 20, 10, 4, size, true), 0, 0, 20, 10));
  CHECK(is(clip_box(10, 10, 0, 5, 4, size, true), 10, 10, 10, 15));
  CHECK(!clip_box(100.5, 0, 20, 10, 4, size, true));
}

TEST_CASE("no cap on labels") {
  Sample crowd{noise({64, 64}), {}};
  for (int i = 0; i < 3000; ++i)
    crowd.boxes.push_back({i % 30 * 2.0, i / 100 * 2.0, i % 30 * 2.0 + 4, i / 100 * 2.0 + 4, i});
  CHECK(train_transform(crowd, {HsvDraw{1, 1, 1}, true}, {64, 64}, false).boxes.size() == 3000);
  const Sample four = mosaic({crowd, crowd, crowd, crowd}, {64, 64}, {64, 64}, false);
  CHECK(four.boxes.size() == 12000);
  const Sample turned = random_affine(four, {0, 0.5, 0, 0, 0, 0}, {64, 64}, false);
  CHECK(mixup(turned, crowd, {1, false, {0, 0}, {}}, false).boxes.size() == 15000);
}

// ---- geometry ----

TEST_CASE("flip, fit and letterbox keep boxes on their pixels") {
  Rng rng(3, 0, 0);
  for (int i = 0; i < 200; ++i) {
    const Sample s = marked(rng, random_size(rng, 40, 150), 2 * (i % 4));
    CHECK(check_marks(s, 0) == 2);
    CHECK(check_marks(flip(s), 0) == 2);
    const cv::Size room(32 * rng.randint(2, 6), 32 * rng.randint(2, 6));
    const Sample fitted = fit(s, room, false);
    check_marks(fitted, 0.75);
    CHECK((fitted.image.cols == room.width || fitted.image.rows == room.height));
    check_marks(train_transform(s, {{}, i % 2 == 0}, room, false), 0.75);
    check_marks(train_transform(s, {{}, i % 2 == 0}, room, true), 1.5);
  }
}

TEST_CASE("mosaic keeps boxes on their pixels") {
  Rng rng(4, 0, 0);
  int compared = 0;
  for (int i = 0; i < 100; ++i) {
    const cv::Size size(32 * rng.randint(2, 4), 32 * rng.randint(2, 4));
    std::array<Sample, 4> tiles;
    for (int k = 0; k < 4; ++k) {
      tiles[k] = marked(rng, random_size(rng, 40, 150), 2 * k);
      if (i % 2) tiles[k] = fit(tiles[k], size, false);  // as the loader does
    }
    const MosaicDraw d = draw_mosaic(rng, {}, 4, size);
    const Sample out = mosaic(tiles, d.centre, size, false);
    CHECK(out.image.size() == size * 2);
    compared += check_marks(out, 1);
  }
  CHECK(compared > 400);
}

TEST_CASE("affine keeps boxes on their pixels") {
  Rng rng(5, 0, 0);
  int compared = 0;
  for (int i = 0; i < 300; ++i) {
    const cv::Size size(160, 128);
    const Sample s = marked(rng, size * 2, 2 * (i % 4));
    const AffineDraw d{0, rng.uniform(0.1, 2), 0, 0, rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1)};
    compared += check_marks(random_affine(s, d, size, false), 0.6);  // half a pixel, and 1/32 in warpAffine
    check_marks(random_affine(s, d, size, true), 1.1);
  }
  CHECK(compared > 200);
}

TEST_CASE("a turned or sheared box contains its pixels and touches them") {
  Rng rng(6, 0, 0);
  int compared = 0;
  for (int i = 0; i < 300; ++i) {
    const cv::Size size(160, 128);
    const Sample s = marked(rng, size * 2, 2 * (i % 4));
    const Sample out = random_affine(s, draw_affine(rng, {}), size, false);
    for (const Box& b : out.boxes) {
      const bool inside = b.x1 > 0 && b.y1 > 0 && b.x2 < size.width && b.y2 < size.height;
      const auto seen = extent(out.image, b.cls, 0.5);
      if (!seen || std::min(b.x2 - b.x1, b.y2 - b.y1) < 4) continue;
      CHECK((seen->x1 >= b.x1 - 0.6 && seen->y1 >= b.y1 - 0.6 && seen->x2 <= b.x2 + 0.6 &&
             seen->y2 <= b.y2 + 0.6));
      if (!inside) continue;
      CHECK(gap(*seen, b) <= 1.6);
      ++compared;
    }
  }
  CHECK(compared > 80);
}

TEST_CASE("rotation is about the canvas corner, as in official training") {
  const cv::Matx23d m = affine_matrix({90, 1, 0, 0, 0, 0}, {64, 64});
  CHECK(m(0, 2) == 0);
  CHECK(m(1, 2) == 0);
  CHECK(m(0, 1) == doctest::Approx(1));   // down becomes right,
  CHECK(m(1, 0) == doctest::Approx(-1));  // right becomes up: anticlockwise
}

TEST_CASE("mixup keeps boxes on their pixels") {
  Rng rng(8, 0, 0);
  int compared = 0;
  for (int i = 0; i < 200; ++i) {
    const cv::Size size(32 * rng.randint(2, 5), 32 * rng.randint(2, 5));
    const Sample base{Image(size, border_grey), {}};
    const Sample other = fit(marked(rng, random_size(rng, 40, 150), 2 * (i % 4)), size, false);
    MixupDraw d = draw_mixup(rng, {}, 4, size);
    compared += check_marks(mixup(base, other, d, false), 1.05, 0.25);
  }
  CHECK(compared > 150);
}

TEST_CASE("whole training samples keep boxes on their pixels") {
  Rng rng(9, 0, 0);
  AugmentConfig c;
  c.degrees = c.shear = c.hsv_prob = c.mixup_prob = 0;
  int compared = 0;
  for (int i = 0; i < 150; ++i) {
    const cv::Size size(32 * rng.randint(3, 5), 32 * rng.randint(3, 5));
    std::vector<Sample> data;
    for (int k = 0; k < 4; ++k)
      data.push_back(fit(marked(rng, random_size(rng, 40, 150), 2 * k), size, false));
    SampleDraw d = draw_sample(rng, c, 4, i % 4, size, i % 5 > 0);
    if (d.mosaic) d.mosaic->others = {std::size_t(i + 1) % 4, std::size_t(i + 2) % 4, std::size_t(i + 3) % 4};
    const auto load = [&](std::size_t k) { return data[k]; };
    const Sample out = apply_draw(
        load, [](std::size_t) { return true; }, d, size, false);
    CHECK(out.image.size() == size);
    for (const Box& b : out.boxes) {
      CHECK((b.x1 >= 0 && b.y1 >= 0 && b.x2 <= size.width && b.y2 <= size.height));
      CHECK((b.x2 - b.x1 > 1 && b.y2 - b.y1 > 1));
    }
    compared +=
        check_marks(out, 1.75);  // two resizings, the second of which may double the first one's pixel
  }
  CHECK(compared > 200);
}

TEST_CASE("sizes are rounded: full on one side, never resized twice, at least a pixel") {
  Rng rng(10, 0, 0);
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
  const Letterbox thin = letterbox(Image({1000, 1}, 9), {64, 64}, false);
  CHECK(thin.image(0, 63) == cv::Vec3b(9, 9, 9));
  CHECK(thin.image(1, 0) == cv::Vec3b::all(114));
}

// ---- what is right where the official code is not ----

TEST_CASE("pictures without boxes are jittered and flipped too") {
  const Sample background{noise({64, 64}), {}};
  const ColourFlipDraw d{HsvDraw{5, 30, 30}, true};
  const Sample out = train_transform(background, d, {64, 64}, false);
  CHECK(out.boxes.empty());
  CHECK(max_difference(out.image, flip({hsv(background.image, *d.hsv), {}}).image) == 0);
  CHECK(max_difference(train_transform(background, d, {64, 64}, true).image, background.image) == 0);
}

TEST_CASE("boxes of a pixel or less go, the picture stays augmented") {
  const Sample s{noise({64, 64}), {{1, 1, 2, 30, 0}, {10, 10, 10.5, 10.5, 1}, {5, 5, 5, 9, 2}}};
  const ColourFlipDraw d{HsvDraw{5, 30, 30}, true};
  const Sample out = train_transform(s, d, {64, 64}, false);
  CHECK(out.boxes.empty());
  CHECK(max_difference(out.image, s.image) > 0);
  const Sample quirk = train_transform(s, d, {64, 64}, true);
  CHECK(quirk.boxes.size() == 3);
  CHECK(max_difference(quirk.image, s.image) == 0);
}

TEST_CASE("boxes that leave the picture go at once") {
  const Sample s{noise({64, 64}), {{0, 0, 8, 8, 0}, {56, 56, 64, 64, 1}}};
  for (bool quirks : {false, true}) {
    // centre (16, 16): of the first tile only its lower right corner is on the canvas
    CHECK(mosaic({s, {s.image, {}}, {s.image, {}}, {s.image, {}}}, {16, 16}, {64, 64}, quirks).boxes.size() ==
          1 + quirks);
    CHECK(random_affine(s, {0, 1, 0, 0, 0, 0}, {32, 32}, quirks).boxes.size() == 1 + quirks);
    CHECK(mixup({s.image, {}}, s, {1.5, false, {30, 30}, {}}, quirks).boxes.size() == 1 + quirks);
  }
}

TEST_CASE("mixup rounds, and is grey where the other picture ends") {
  const Sample base{Image({64, 64}, 101), {}}, other{Image({64, 64}, 50), {{0, 0, 64, 64, 3}}};
  const Sample out = mixup(base, other, {0.5, false, {0, 0}, {}}, false);
  CHECK(out.image(0, 0) == cv::Vec3b::all(76));     // 75.5
  CHECK(out.image(63, 63) == cv::Vec3b::all(108));  // (101 + 114) / 2
  const Sample quirk = mixup(base, other, {0.5, false, {0, 0}, {}}, true);
  CHECK(quirk.image(0, 0) == cv::Vec3b::all(75));
  CHECK(quirk.image(63, 63) == cv::Vec3b::all(50));
  CHECK(base.image(0, 0) == cv::Vec3b::all(101));
}

TEST_CASE("the search for a picture to mix in ends") {
  const cv::Size size(64, 64);
  std::vector<Sample> data(6, Sample{Image(size, 200), {}});
  std::set<std::size_t> loaded;
  int asked = 0;
  const auto load = [&](std::size_t i) { return loaded.insert(i), data[i]; };
  const auto has_boxes = [&](std::size_t i) { return ++asked, !data[i].boxes.empty(); };
  AugmentConfig c;
  c.mixup_tries = 7;
  for (bool quirks : {false, true}) {
    c.official_quirks = quirks;
    asked = 0;
    Rng rng(0, 0, 1);
    CHECK(make_training_sample(load, has_boxes, 6, 1, rng, c, size, true).boxes.empty());
    CHECK(asked == (quirks ? 0 : 7));
  }
  // With one that has boxes among the candidates, that one is taken, even for a mosaic without boxes.
  data[5].boxes = {{0, 0, 64, 64, 3}};
  SampleDraw d{
      0, MosaicDraw{{64, 64}, {1, 2, 3}, {0, 1, 0, 0, 0, 0}}, MixupDraw{1, false, {0, 0}, {4, 2, 5, 1}}, {}};
  loaded.clear(), asked = 0;
  const Sample out = apply_draw(load, has_boxes, d, size, false);
  REQUIRE(out.boxes.size() == 1);
  CHECK(out.boxes[0].cls == 3);
  CHECK(loaded == std::set<std::size_t>{0, 1, 2, 3, 5});
  CHECK(asked == 3);
  CHECK(apply_draw(load, has_boxes, d, size, true).boxes.empty());  // quirk: no mixup on an empty mosaic
}

TEST_CASE("same seed, epoch and index: same sample in any thread; loaded pictures are not written to") {
  const cv::Size size(64, 96);
  std::vector<Sample> data, before;
  Rng rng(11, 0, 0);
  for (int i = 0; i < 5; ++i) {
    Sample s = fit({noise(random_size(rng, 20, 120), i), {{2, 2, 18, 18, i}}}, size, false);
    before.push_back({Image(s.image.clone()), s.boxes});
    data.push_back(std::move(s));
  }
  const auto load = [&](std::size_t i) { return data[i]; };
  const auto has_boxes = [&](std::size_t i) { return !data[i].boxes.empty(); };
  const auto make = [&](std::uint64_t epoch, std::size_t i) {
    Rng own(1, epoch, i);
    return make_training_sample(load, has_boxes, 5, i % 5, own, {}, size, i % 3 > 0);
  };
  const int n = 24;
  std::vector<Sample> alone, threaded(n);
  for (int i = 0; i < n; ++i) alone.push_back(make(0, i));
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int i = n - 1 - t; i >= 0; i -= 3) threaded[i] = make(0, i);
    });
  }
  for (auto& t : threads) t.join();
  int changed = 0;
  for (int i = 0; i < n; ++i) {
    CHECK(max_difference(alone[i].image, threaded[i].image) == 0);
    REQUIRE(alone[i].boxes.size() == threaded[i].boxes.size());
    for (std::size_t b = 0; b < alone[i].boxes.size(); ++b)
      CHECK(gap(alone[i].boxes[b], threaded[i].boxes[b]) == 0);
    changed += max_difference(alone[i].image, make(1, i).image) > 0;
  }
  CHECK(changed == n);
  for (int i = 0; i < 5; ++i) CHECK(max_difference(data[i].image, before[i].image) == 0);
}

// ---- equal to the official code ----

SHARED_TEST("official letterbox, pixel for pixel") {
  const auto d = fixture("aug_cv46.pth");
  for (int i = 0; i < number(d, "letterbox_count"); ++i) {
    const std::string name = "letterbox" + std::to_string(i);
    const Image want = to_image(tensor(d, name + "_out"));
    const Letterbox got = letterbox(to_image(tensor(d, name + "_in")), want.size(), true);
    CHECK_MESSAGE(max_difference(got.image, want) == 0, name);
    CHECK(got.scale.x == number(d, name + "_r"));
    CHECK(got.scale.y == number(d, name + "_r"));
  }
}

SHARED_TEST("official HSV, to one level in the last columns") {
  const auto d = fixture("aug_cv46.pth");
  const Image in = to_image(tensor(d, "hsv_in"));
  for (int i = 0; i < 5; ++i) {
    const std::string name = "hsv" + std::to_string(i);
    const auto draws = tensor(d, name + "_draws");
    const auto g = (draws[0] * torch::tensor({5.0, 30.0, 30.0}, torch::kDouble) * draws[1]).contiguous();
    const double* gain = g.data_ptr<double>();
    const Image got = hsv(in, {gain[0], gain[1], gain[2]}), want = to_image(tensor(d, name + "_out"));
    const int whole = in.cols / 32 * 32;
    CHECK(max_difference(got.colRange(0, whole), want.colRange(0, whole)) == 0);
    CHECK(max_difference(got, want) <= 1);
  }
}

SHARED_TEST("official affine, pixel for pixel") {
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
    const Sample got = random_affine(in, draw, want.size(), true);
    CHECK_MESSAGE(max_difference(got.image, want) == 0, name);
    check_boxes(got.boxes, tensor(d, name + "_boxes"));
  }
}

SHARED_TEST("official TrainTransform; no cap on labels where it has one") {
  const auto d = fixture("aug_cv46.pth");
  const Image in = to_image(tensor(d, "tt_in"));
  for (int i = 0; i < 5; ++i) {
    const std::string name = "tt" + std::to_string(i);
    const Sample sample{in, to_boxes(tensor(d, name + "_boxes"))};
    const Image want = to_image(tensor(d, name + "_out"));
    Tape tape(d, name);
    const ColourFlipDraw draw = tape.colour_flip();
    const Sample got = train_transform(sample, draw, want.size(), true);
    CHECK_MESSAGE(max_difference(got.image, want) <= 1, name);
    check_labels(got.boxes, tensor(d, name + "_labels"));
    if (i == 4) CHECK(got.boxes.size() > 120);
    if (i == 2) CHECK(got.boxes.size() == 2);  // the quirk: undone
    if (i == 2) CHECK(train_transform(sample, draw, want.size(), false).boxes.empty());
  }
}

SHARED_TEST("official mosaic, affine, mixup and the whole, stage by stage") {
  const auto d = fixture("aug_cv46.pth");
  std::vector<Sample> data;
  for (int i = 0; i < 8; ++i) {
    const std::string name = "ds" + std::to_string(i);
    data.push_back({to_image(tensor(d, name + "_img")), to_boxes(tensor(d, name + "_labels"))});
  }
  const auto has_boxes = [&](std::size_t i) { return !data[i].boxes.empty(); };
  int mosaics = 0, mixups = 0;
  for (int i = 0; i < number(d, "mosaic_count"); ++i) {
    const std::string name = "mosaic" + std::to_string(i);
    CAPTURE(name);
    const auto hw = d.at(name + "_size").toListRef();
    const cv::Size size(int(hw[1].toInt()), int(hw[0].toInt()));
    const auto load = [&](std::size_t k) { return fit(data[k], size, true); };
    Tape tape(d, name);
    SampleDraw draw{std::size_t(number(d, name + "_index")), {}, {}, {}};
    if (number(d, name + "_enable_mosaic") && tape.take("random") < number(d, name + "_mosaic_prob")) {
      ++mosaics;
      MosaicDraw m;
      m.centre.y = int(tape.take("uniform")), m.centre.x = int(tape.take("uniform"));
      for (auto& other : m.others) other = std::size_t(tape.take("randint"));
      m.affine = tape.affine();
      draw.mosaic = m;
      const Sample canvas = mosaic(
          {load(draw.index), load(m.others[0]), load(m.others[1]), load(m.others[2])}, m.centre, size, true);
      if (d.contains(name + "_canvas"))
        CHECK(max_difference(canvas.image, to_image(tensor(d, name + "_canvas"))) == 0);
      check_boxes(canvas.boxes, tensor(d, name + "_canvas_labels"));
      const Sample turned = random_affine(canvas, m.affine, size, true);
      CHECK(max_difference(turned.image, to_image(tensor(d, name + "_affine"))) == 0);
      check_boxes(turned.boxes, tensor(d, name + "_affine_labels"));
      if (number(d, name + "_enable_mixup")) {
        ++mixups;
        tape.take("random");  // below mixup_prob, which is 1
        MixupDraw x{tape.take("uniform"), tape.take("uniform") > 0.5, {}, {}};
        do x.candidates.push_back(std::size_t(tape.take("randint")));
        while (!has_boxes(x.candidates.back()));
        const cv::Size zoomed = mixup_size(size, x.scale);
        if (zoomed.height > size.height) x.offset.y = int(tape.take("randint"));
        if (zoomed.width > size.width) x.offset.x = int(tape.take("randint"));
        draw.mixup = x;
        const Sample mixed = mixup(turned, load(x.candidates.back()), x, true);
        CHECK(max_difference(mixed.image, to_image(tensor(d, name + "_mixup"))) == 0);
        check_boxes(mixed.boxes, tensor(d, name + "_mixup_labels"));
      }
    }
    draw.colour_flip = tape.colour_flip();
    CHECK(tape.at == tape.draws.size());
    const Sample out = apply_draw(load, has_boxes, draw, size, true);
    CHECK(max_difference(out.image, to_image(tensor(d, name + "_out"))) <= 1);
    check_labels(out.boxes, tensor(d, name + "_labels"));
  }
  CHECK(mosaics == 10);
  CHECK(mixups == 8);
}

SHARED_TEST("official annotation parsing") {
  const auto d = fixture("aug_cv46.pth");
  struct Annotation {  // fixtures/coco_parse, without crowds and areas of 0; class = place of the id in {1,
                       // 18, 90}
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
      if (const auto box = clip_box(a.x, a.y, a.w, a.h, a.cls, size, true)) {
        boxes.push_back(scaled_shifted(*box, to.scale));
      }
    }
    check_boxes(boxes, tensor(d, "coco" + std::to_string(i) + "_labels"));
    const auto info = tensor(d, "coco" + std::to_string(i) + "_info");  // h, w, resized h, w
    CHECK(to.size == cv::Size(info[3].item<int>(), info[2].item<int>()));
  }
}
