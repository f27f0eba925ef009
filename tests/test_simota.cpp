// SPDX-License-Identifier: Apache-2.0
#include "loss.hpp"
#include "official.hpp"

using namespace yolox;
using torch::Tensor;

namespace {
constexpr int64_t kClasses = 4;

float random_between(float low, float high) { return low + (high - low) * (std::rand() / float(RAND_MAX)); }

struct Scene {  // random predictions over a small image, and their decoded boxes
  Predictions raw;
  Anchors anchors;
  Tensor boxes;
  int64_t height, width;
  explicit Scene(int64_t batch, int64_t height = 128, int64_t width = 160) : height(height), width(width) {
    torch::manual_seed(3);
    anchors = make_anchors(height, width, torch::kFloat);
    const int64_t points = anchors.stride.numel();
    raw = {torch::randn({batch, points, 4}), torch::randn({batch, points}),
           torch::randn({batch, points, kClasses})};
    boxes = decode_boxes(raw.reg, anchors);
  }
  Tensor assign(const Targets& t, int64_t max_pairs = 0) const {
    return simota(boxes, raw.obj, raw.cls, anchors, t, max_pairs);
  }
};

// rows of (class, cx, cy, w, h) per image
Targets targets(const std::vector<std::vector<std::array<float, 5>>>& images) {
  size_t rows = 0;
  for (const auto& i : images) rows = std::max(rows, i.size());
  Targets t{torch::zeros({int64_t(images.size()), int64_t(rows), 4}),
            torch::zeros({int64_t(images.size()), int64_t(rows)}, torch::kLong),
            {}};
  for (size_t b = 0; b < images.size(); ++b) {
    for (size_t g = 0; g < images[b].size(); ++g) {
      t.classes[b][g] = int64_t(images[b][g][0]);
      for (int k = 0; k < 4; ++k) t.boxes[b][g][k] = images[b][g][k + 1];
    }
    t.counts.push_back(images[b].size());
  }
  return t;
}

// Returns `count` random boxes in an image of this size.
std::vector<std::array<float, 5>> random_boxes(int64_t count, float width, float height, float largest) {
  std::vector<std::array<float, 5>> rows;
  for (int64_t i = 0; i < count; ++i)
    rows.push_back({float(i % 4), random_between(0, width), random_between(0, height),
                    random_between(2, largest), random_between(2, largest)});
  return rows;
}

// Computes SimOTA for one image as the paper defines it, in float64. Returns the object of each point, or -1.
Tensor assign_by_definition(const Scene& s, int64_t b, const Targets& t) {
  const int64_t objects = t.counts[b];
  Tensor matched = torch::full({s.anchors.stride.numel()}, -1, torch::kLong);
  if (objects == 0) return matched;
  const Tensor boxes = t.boxes[b].slice(0, 0, objects).to(torch::kDouble),
               stride = s.anchors.stride.unsqueeze(1);
  const Tensor away = ((s.anchors.grid + 0.5) * stride - boxes.slice(1, 0, 2).unsqueeze(1)).abs();
  const Tensor in_centre = (away < kCentreRadius * stride).all(2);  // [objects, points]
  const Tensor points = in_centre.any(0).nonzero().squeeze(1);      // the candidates
  if (points.numel() == 0) return matched;
  const Tensor predicted = s.boxes[b].index_select(0, points).to(torch::kDouble);
  const auto corner = [](const Tensor& box, double side) {
    return box.slice(1, 0, 2) + side * box.slice(1, 2, 4);
  };
  const Tensor both = (torch::min(corner(boxes, 0.5).unsqueeze(1), corner(predicted, 0.5)) -
                       torch::max(corner(boxes, -0.5).unsqueeze(1), corner(predicted, -0.5)))
                          .clamp_min(0)
                          .prod(2);
  const auto area = [](const Tensor& box) { return box.select(1, 2) * box.select(1, 3); };
  const Tensor iou = both / (area(boxes).unsqueeze(1) + area(predicted) - both);
  const auto logits = [&](const Tensor& x) { return x[b].index_select(0, points).to(torch::kDouble); };
  const Tensor probability = (logits(s.raw.cls).sigmoid() * logits(s.raw.obj).sigmoid().unsqueeze(1)).sqrt();
  const Tensor one_hot = torch::one_hot(t.classes[b].slice(0, 0, objects), kClasses).to(torch::kDouble);
  const Tensor class_cost =
      -(one_hot.matmul(probability.log().t()) + (1 - one_hot).matmul((1 - probability).log().t()));
  const Tensor cost =
      class_cost - 3 * (iou + 1e-8).log() + 1e6 * in_centre.index_select(1, points).logical_not();
  Tensor chosen = torch::zeros_like(cost, torch::kBool);
  for (int64_t g = 0; g < objects; ++g) {
    const Tensor best = std::get<0>(iou[g].topk(std::min<int64_t>(10, points.numel())));
    const int64_t k = std::max<int64_t>(1, best.sum().to(torch::kLong).item<int64_t>());
    chosen[g].index_fill_(0, std::get<1>(cost[g].topk(k, 0, /*largest=*/false)), true);
  }
  // A point that several objects choose goes to the one with the smallest cost.
  const Tensor owner = cost.masked_fill(chosen.logical_not(), INFINITY).argmin(0);
  const Tensor smallest = torch::where(chosen.sum(0) > 1, cost.argmin(0), owner);
  return matched.index_copy_(0, points, torch::where(chosen.any(0), smallest, torch::full_like(owner, -1)));
}
}  // namespace

SHARED_TEST("simota: the assignment equals the official one, point by point") {
  torch::NoGradGuard no_grad;
  const auto inputs = fixture("model_nano.pth"), labels = fixture("train_nano.pth");
  for (const std::string size : {"nano", "tiny", "s"}) {
    const auto f = fixture("train_" + size + ".pth");
    for (const auto dtype : {torch::kFloat, torch::kDouble}) {
      auto model = official_model(size, dtype);
      model->train();
      for (const std::string kind : {"sq", "rect"}) {
        const Tensor images = tensor(inputs, kind).to(dtype);
        const auto p = model(images);
        const auto anchors = make_anchors(images.size(2), images.size(3), p.reg.options());
        const auto t = official_targets(tensor(labels, "labels_" + kind).to(dtype));
        const Tensor boxes = decode_boxes(p.reg, anchors);
        const auto a = simota(boxes, p.obj, p.cls, anchors, t);
        for (int64_t b = 0; b < images.size(0); ++b) {
          const std::string key =
              (dtype == torch::kDouble ? "f64_assign_" : "assign_") + kind + "_" + std::to_string(b);
          CAPTURE(size);
          CAPTURE(key);
          if (!f.contains(key + "/fg_mask")) {  // an image without objects, or no float64 fixture
            if (t.counts[b] == 0) CHECK((a[b] < 0).all().item<bool>());
            continue;
          }
          const Tensor fg = a[b] >= 0;
          CHECK(torch::equal(fg, tensor(f, key + "/fg_mask")));
          CHECK(torch::equal(a[b].index({fg}), tensor(f, key + "/gt_inds")));
          if (f.contains(key + "/ious")) {
            const Tensor gt = t.boxes[b].index_select(0, a[b].index({fg}));
            CHECK(relative_error(box_iou(gt, boxes[b].index({fg})), tensor(f, key + "/ious")) < 1e-4);
          }
        }
      }
    }
  }
}

TEST_CASE("simota: the assignment equals the definition") {
  const Scene s(3);
  std::vector<std::vector<std::array<float, 5>>> images(3);
  std::srand(1);
  for (const int count : {1, 5, 40}) {
    for (int b = 0; b < 3; ++b) images[b] = random_boxes(count + b - 1, 160, 128, 80);
    const auto t = targets(images);
    const auto a = s.assign(t);
    for (int64_t b = 0; b < 3; ++b) CHECK(torch::equal(a[b], assign_by_definition(s, b, t)));
  }
}

TEST_CASE("simota: empty images, empty batches and objects out of reach have no positives") {
  const Scene s(2);
  for (const auto& t : {targets({{}, {}}), targets({{{0, 2000, 2000, 10, 10}}, {}})}) {
    const auto a = s.assign(t);
    CHECK((a < 0).all().item<bool>());
    const auto loss = yolox_loss(s.raw, s.height, s.width, t, true);
    CHECK(loss["positives"].item<int64_t>() == 0);
    CHECK(loss["iou"].item<float>() == 0);
    CHECK(std::isfinite(loss.total.item<float>()));
  }
  // A far object takes at most one point of a near object, which keeps the others.
  const auto a = s.assign(targets({{{1, 80, 64, 30, 30}, {0, 2000, 2000, 10, 10}}, {}}));
  CHECK((a[0] == 0).any().item<bool>());
}

TEST_CASE("simota: equal boxes, boxes without area, infinite and NaN predictions cause no crash and no NaN") {
  Scene s(1);
  const auto equal = s.assign(targets({{{2, 70, 60, 30, 40}, {2, 70, 60, 30, 40}}}));
  CHECK((equal == 0).any().item<bool>());  // the first one is assigned all points
  CHECK_FALSE((equal == 1).any().item<bool>());
  const auto tiny = targets({{{0, 20.5, 30.5, 1, 1}, {1, 90, 90, 0, 0}}});
  CHECK((s.assign(tiny) == 0).any().item<bool>());
  CHECK(std::isfinite(yolox_loss(s.raw, s.height, s.width, tiny, true).total.item<float>()));
  s.raw.reg.index_put_({0, torch::indexing::Slice(0, 40)}, 200.f);  // exp overflows
  s.raw.cls.index_put_({0, torch::indexing::Slice(100, 120)}, std::nanf(""));
  s.boxes = decode_boxes(s.raw.reg, s.anchors);
  CHECK((s.assign(targets({{{0, 80, 64, 50, 50}}})) >= 0).any().item<bool>());
}

TEST_CASE("simota: with 3000 boxes in one image, the assignment in chunks equals the one without") {
  const Scene s(2, 256, 256);
  const int64_t points = s.anchors.stride.numel();
  std::srand(5);
  const auto t = targets({random_boxes(3000, 256, 256, 60), {{0, 100, 100, 50, 50}}});
  const int64_t pairs = 2 * 3000 * points;
  const auto whole = s.assign(t, pairs);
  Tensor a;
  for (const int64_t chunks : {2, 40, 600}) {  // chunks of one image, of some rows, of ten rows
    INFO(chunks << " chunks");
    a = s.assign(t, pairs / chunks);
    CHECK(torch::equal(a, whole));
  }
  // Objects of the first and of the last chunk are matched.
  const Tensor fg = (a[0] >= 0).nonzero().squeeze(1);
  CHECK(fg.numel() > 200);
  const Tensor row = a[0].index_select(0, fg);
  CHECK((row > 2900).any().item<bool>());
  CHECK((row < 100).any().item<bool>());
  // The assignment of the second image does not depend on the objects of the first.
  const auto alone =
      Targets{t.boxes.slice(0, 1, 2).slice(1, 0, 1), t.classes.slice(0, 1, 2).slice(1, 0, 1), {1}};
  const auto b = simota(s.boxes.slice(0, 1), s.raw.obj.slice(0, 1), s.raw.cls.slice(0, 1), s.anchors, alone);
  CHECK(torch::equal(a[1], b[0]));
}

TEST_CASE("simota: images with different numbers of objects are assigned as each of them alone") {
  const std::vector<int64_t> counts{2, 90, 0, 100, 40, 0, 5};
  const auto batch = int64_t(counts.size());
  const Scene s(batch, 256, 256);
  std::srand(6);
  std::vector<std::vector<std::array<float, 5>>> images;
  for (const int64_t count : counts) images.push_back(random_boxes(count, 256, 256, 60));
  Targets t = targets(images);
  const Tensor a = s.assign(t);
  for (int64_t b = 0; b < batch; ++b) {
    CAPTURE(b);
    const Tensor alone = simota(s.boxes.slice(0, b, b + 1), s.raw.obj.slice(0, b, b + 1),
                                s.raw.cls.slice(0, b, b + 1), s.anchors, t.slice(b, b + 1));
    CHECK(torch::equal(a[b], alone[0]));
    CHECK((a[b] >= 0).any().item<bool>() == (counts[b] > 0));
  }
  // As in a CUDA graph: the host knows upper bounds of the sorted counts only.
  t.device_counts = torch::tensor(counts, torch::kLong);
  t.counts.assign(counts.size(), 100);
  CHECK(torch::equal(s.assign(t), a));
  std::vector<int64_t> sorted(counts.begin(), counts.end());
  std::ranges::sort(sorted, std::greater());
  t.counts.assign(counts.size(), sorted[1]);
  t.counts[0] = 100;
  CHECK(torch::equal(s.assign(t), a));
  CHECK(t.slice(1, 3).counts == std::vector<int64_t>{sorted[1], sorted[1]});
  t.sorted_bounds = true;
  CHECK(t.slice(1, 3).counts == std::vector<int64_t>{100, 100});  // either image may be the crowded one
  CHECK(t.slice(0, batch).counts == t.counts);
  CHECK(torch::equal(s.assign(t), a));  // no chunk has crowded and other images
  t.sorted_bounds = false;
  t.counts.assign(counts.size(), 100);
  CHECK(torch::equal(s.assign(t, 3 * 100 * s.anchors.stride.numel()), a));  // in chunks of three images
}
