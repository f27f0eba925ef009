// SPDX-License-Identifier: Apache-2.0
#include "loss.hpp"
#include "official.hpp"

using namespace yolox;
using torch::Tensor;

namespace {
Tensor as_row(const Losses& l, const Targets& t) {  // in the column order of the fixtures
  const double objects = std::max<int64_t>(t.total(), 1),
               fg = std::max<int64_t>(l["positives"].item<int64_t>(), 1);
  return torch::tensor({l.total.item<double>(), l["iou"].item<double>(), l["l1"].item<double>(),
                        l["obj"].item<double>(), l["cls"].item<double>(), fg / objects},
                       torch::kDouble);
}
}  // namespace

SHARED_TEST("loss: losses with and without L1, and gradients, equal the official ones") {
  const auto inputs = fixture("model_nano.pth"), label_file = fixture("train_nano.pth");
  for (const std::string size : {"nano", "tiny", "s"}) {
    const auto f = fixture("train_" + size + ".pth");
    const auto names = f.at("param_names").toList();
    auto model = official_model(size);
    model->train();
    for (const std::string kind : {"sq", "rect", "empty"}) {
      for (const bool l1 : {false, true}) {
        const std::string key = kind + "_l1" + (l1 ? "1" : "0");
        CAPTURE(size);
        CAPTURE(key);
        model->zero_grad();
        const Tensor images =
            (kind == "empty" ? tensor(inputs, "sq").slice(0, 0, 2) : tensor(inputs, kind)).to(torch::kFloat);
        const Tensor labels =
            kind == "empty" ? torch::zeros({2, 120, 5}) : tensor(label_file, "labels_" + kind);
        const auto t = official_targets(labels);
        const auto losses = yolox_loss(model(images), images.size(2), images.size(3), t, l1);
        const Tensor expected = tensor(f, "loss_" + key);
        CHECK(((as_row(losses, t) - expected).abs() <= 1e-5 * expected.abs()).all().item<bool>());
        if (kind == "empty") continue;
        losses.total.backward();
        const auto grads = model->named_parameters();
        const Tensor probes = tensor(f, "grad_probe_" + key);
        double worst = 0;
        for (size_t i = 0; i < names.size(); ++i) {
          const std::string name = names.get(i).toStringRef();
          worst =
              std::max(worst, probe_error(probe(name, grads[name].grad()), probes[i], grads[name].numel()));
          if (f.contains("grad_l1" + std::string(l1 ? "1/" : "0/") + name) && kind == "sq")
            CHECK(relative_error(grads[name].grad(),
                                 tensor(f, "grad_l1" + std::string(l1 ? "1/" : "0/") + name)) < 5e-4);
        }
        CHECK(worst < 5e-4);
      }
    }
  }
}

TEST_CASE("loss: a perfect prediction has no box loss; losses are divided by the positives of the batch") {
  const auto anchors = make_anchors(64, 64, torch::kFloat);
  const int64_t points = anchors.stride.numel();
  const Targets t{torch::tensor({{{20.f, 20.f, 16.f, 24.f}}}), torch::tensor({{int64_t(1)}}), {1}};
  Tensor reg = torch::cat({(t.boxes[0].slice(1, 0, 2) / anchors.stride.unsqueeze(1) - anchors.grid),
                           (t.boxes[0].slice(1, 2, 4) / anchors.stride.unsqueeze(1)).log()},
                          1)
                   .unsqueeze(0);
  const Predictions p{reg.set_requires_grad(true), torch::zeros({1, points}), torch::zeros({1, points, 2})};
  const auto l = yolox_loss(p, 64, 64, t, true);
  CHECK(l["iou"].item<float>() == doctest::Approx(0).epsilon(1e-4));
  CHECK(l["l1"].item<float>() < 1e-4);
  CHECK(l["positives"].item<int64_t>() == 10);  // ten IoUs of 1
  CHECK(l["obj"].item<float>() == doctest::Approx(points * std::log(2.) / 10).epsilon(1e-5));
}

TEST_CASE("loss: passes autograd's anomaly mode; computes float16 and bfloat16 predictions in float32") {
  torch::autograd::AnomalyMode::set_enabled(true);
  const int64_t points = make_anchors(96, 96, torch::kFloat).stride.numel();
  const Targets t{torch::tensor({{{40.f, 40.f, 30.f, 30.f}}}), torch::tensor({{int64_t(0)}}), {1}};
  for (const auto dtype : {torch::kDouble, torch::kFloat, torch::kHalf, torch::kBFloat16}) {
    const Predictions p{torch::zeros({1, points, 4}, dtype).set_requires_grad(true),
                        torch::zeros({1, points}, dtype), torch::zeros({1, points, 3}, dtype)};
    const auto l = yolox_loss(p, 96, 96, t, true);
    CHECK((l.total.scalar_type() == (dtype == torch::kDouble ? torch::kDouble : torch::kFloat)));
    l.total.backward();
    CHECK(torch::isfinite(p.reg.grad()).all().item<bool>());
    CHECK(p.reg.grad().abs().sum().item<float>() > 0);
  }
  torch::autograd::AnomalyMode::set_enabled(false);
}

TEST_CASE("loss: class weights multiply the class loss of the positives of their class, and no other term") {
  torch::manual_seed(4);
  const int64_t points = make_anchors(96, 96, torch::kFloat).stride.numel();
  const auto of = [&](int64_t first, int64_t second, const Tensor& weights) {
    torch::manual_seed(5);
    const Predictions p{torch::randn({1, points, 4}) * 0.1, torch::randn({1, points}),
                        torch::randn({1, points, 3}).set_requires_grad(true)};
    const Targets t{torch::tensor({{{20.f, 20.f, 30.f, 30.f}, {70.f, 70.f, 30.f, 30.f}}}),
                    torch::tensor({{first, second}}),
                    {2}};
    const Losses losses = yolox_loss(p, 96, 96, t, true, weights);
    losses.total.backward();
    return std::pair(losses, p.cls.grad().clone());
  };
  const auto [plain, gradient] = of(0, 2, {});
  const auto [weighted, weighted_gradient] = of(0, 2, torch::tensor({2.f, 100.f, 2.f}));
  CHECK(weighted["cls"].item<float>() == doctest::Approx(2 * plain["cls"].item<float>()));
  CHECK(torch::allclose(weighted_gradient, 2 * gradient));
  for (const char* same : {"iou", "obj", "l1"})
    CHECK(weighted[same].item<float>() == plain[same].item<float>());
  // The weight is that of the class of each positive: without class 0, the loss of the other object remains.
  const auto [second, of_second] = of(0, 2, torch::tensor({0.f, 1.f, 1.f}));
  const auto [first, of_first] = of(0, 2, torch::tensor({1.f, 1.f, 0.f}));
  CHECK(first["cls"].item<float>() > 0);
  CHECK(second["cls"].item<float>() > 0);
  CHECK(first["cls"].item<float>() + second["cls"].item<float>() ==
        doctest::Approx(plain["cls"].item<float>()));
}

TEST_CASE("loss: points in ignored regions are no background, and positives there count as before") {
  const Anchors anchors = make_anchors(96, 96, torch::kFloat);
  const int64_t points = anchors.stride.numel();
  torch::manual_seed(6);
  const Tensor reg = torch::randn({2, points, 4}) * 0.1, cls = torch::randn({2, points, 3}),
               logits = torch::randn({2, points});
  const auto of = [&](const Tensor& ignored) {
    Tensor obj = logits.clone().set_requires_grad(true);
    Targets t{torch::tensor({{{20.f, 20.f, 30.f, 30.f}}, {{70.f, 70.f, 30.f, 30.f}}}),
              torch::tensor({{int64_t(0)}, {int64_t(1)}}),
              {1, 1}};
    t.ignored = ignored;
    const Losses losses = yolox_loss({reg, obj, cls}, 96, 96, t, true);
    losses.total.backward();
    return std::pair(losses, obj.grad());
  };
  const auto [plain, before] = of({});
  const auto [padded, same] = of(torch::zeros({2, 3, 4}));
  CHECK(padded.total.item<float>() == plain.total.item<float>());
  CHECK(torch::equal(same, before));
  // The region of the second image covers its object and more; the first image has the padding only.
  const Tensor region = torch::tensor({{{0.f, 0.f, 0.f, 0.f}}, {{60.f, 60.f, 60.f, 60.f}}}),
               regions = torch::cat({torch::zeros({2, 35, 4}), region}, 1);  // they are tested 32 at a time
  const auto [ignoring, after] = of(regions);
  for (const char* name : {"iou", "cls", "l1"})
    CHECK(ignoring[name].item<float>() == plain[name].item<float>());
  CHECK(torch::equal(after[0], before[0]));
  const Tensor inside = ((anchors.centre > 30) & (anchors.centre < 90)).all(0), positive = before[1] < 0;
  CHECK(torch::equal(after[1], before[1].masked_fill(inside & ~positive, 0)));
  CHECK((inside & ~positive).sum().item<int64_t>() > 20);
  CHECK((inside & positive).any().item<bool>());
}

TEST_CASE("loss: an infinite prediction at a negative point gives no NaN in the gradient") {
  const int64_t points = make_anchors(96, 96, torch::kFloat).stride.numel();
  auto reg = torch::zeros({1, points, 4});
  reg[0][0].fill_(120);  // exp overflows at the first point, and unused rows select point 0
  auto cls = torch::zeros({1, points, 3});
  cls[0][0].fill_(std::numeric_limits<float>::infinity());
  const Predictions p{reg.set_requires_grad(true), torch::zeros({1, points}), cls};
  const Targets t{torch::tensor({{{80.f, 80.f, 10.f, 10.f}}}), torch::tensor({{int64_t(0)}}), {1}};
  const auto l = yolox_loss(p, 96, 96, t, true);
  l.total.backward();
  CHECK(std::isfinite(l.total.item<float>()));
  CHECK(torch::isfinite(p.reg.grad()).all().item<bool>());
}
