// SPDX-License-Identifier: Apache-2.0
// One training step: input size, gradient accumulation, and out-of-memory errors.
#include "tensors.hpp"

#include <map>
#include <new>
#include <set>

#include "base/device.hpp"
#include "train_step.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

struct Small : SmallTraining {
  std::shared_ptr<ObservedBackbone> observed;  // of the model
  Small() : SmallTraining({2, 1, 0, 2, 1}, 64) {
    observed = std::make_shared<ObservedBackbone>(model->backbone);
    model->backbone = observed;
  }
  Losses gradients_in(int64_t parts) { return compute(*training, parts, /*use_l1=*/true); }
  // Returns the memory of a trial step. after: called after the gradients.
  double memory(
      int64_t count, int64_t accum, ImageSize largest, const std::function<void()>& after = [] {}) {
    Dtr off;
    const auto compute = [&](Training& t, const Input& input, int64_t parts, bool use_l1, Ranks& ranks) {
      Losses losses = forward_backward(t, input, parts, use_l1, ranks);
      after();
      return losses;
    };
    return TrialStep{*training, compute, {64, 64}, largest, off}(count, accum);
  }
};

bool all_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::ranges::equal(a, b, [](const Tensor& x, const Tensor& y) { return torch::equal(x, y); });
}

std::vector<int> heights(const MultiScale& sizes, int64_t steps) {
  std::vector<int> all;
  for (int64_t i = 0; i < steps; ++i) all.push_back(sizes.size_at(i).height);
  return all;
}

}  // namespace

TEST_CASE("step: unequal parts compute gradient and losses of the whole batch, except for batch norms") {
  Small s;
  s.model->eval();  // otherwise batch norms would compute statistics per part
  for (const bool objects : {true, false}) {
    if (!objects) s.input.targets.counts = {0, 0, 0, 0, 0};
    const Losses whole = s.gradients_in(1);
    const auto want = s.grads();
    const int64_t positives = whole["positives"].item<int64_t>();
    CHECK((objects ? positives >= 4 : positives == 0));
    CHECK(whole["objects"].item<int64_t>() == s.input.targets.total());
    CHECK_FALSE(whole.total.requires_grad());
    for (const int64_t parts : {2, 3, 5}) {
      const Losses in_parts = s.gradients_in(parts);
      CHECK(in_parts.total.item<double>() == doctest::Approx(whole.total.item<double>()).epsilon(1e-5));
      for (const char* count : {"positives", "objects"})
        CHECK(in_parts[count].item<int64_t>() == whole[count].item<int64_t>());
      CHECK(largest_error(s.grads(), want) < 1e-3);
    }
  }
}

TEST_CASE("amp: convolution weights that are cast together give the gradients of autocast, bit for bit") {
  Small s;
  YOLOX model = make_model("yolox-tiny", 3);  // 20 MB, so that its weights are cast in several groups
  REQUIRE(freeze(*model, {"backbone.backbone.stem"}).empty());
  set_training_mode(*model);
  Training t = training_of(model);
  const auto conv = model->backbone->as<YOLOPAFPN>()->lateral_conv0->conv;
  const auto weight = conv->weight;
  const auto observed = std::make_shared<ObservedBackbone>(model->backbone);
  model->backbone = observed;
  const auto grads = [&](at::ScalarType amp, bool cast, int64_t parts) {
    t.amp = amp;
    t.cast_weights = cast ? cast_weights(*model, amp) : nullptr;
    observed->after_forward = [&](const Tensor&) {
      CHECK((conv->weight.scalar_type() == (cast ? amp : torch::kFloat)));
    };
    s.compute(t, parts);
    CHECK(conv->weight.is_same(weight));
    return gradients(t.optimizer.groups);
  };
  // float16 takes minutes on a processor without instructions for it, so that it is tried in one part only.
  for (const auto& [amp, parts] :
       {std::pair(torch::kBFloat16, int64_t{1}), {torch::kBFloat16, 2}, {torch::kHalf, 1}}) {
    CHECK(all_equal(grads(amp, false, parts), grads(amp, true, parts)));
  }
  observed->after_forward = [](const Tensor&) { throw std::runtime_error("out of memory"); };
  CHECK_THROWS(s.compute(t));
  CHECK(conv->weight.is_same(weight));
}

TEST_CASE("step: a rank all-reduces seven numbers, and the losses are those of the whole batch") {
  Small s;
  s.model->eval();
  const Losses whole = s.gradients_in(1);
  // Simulates two ranks with the same images.
  struct TwoRanks {
    std::vector<int64_t> summed;
    void sum(Tensor& t) {
      summed.push_back(t.numel());
      t.mul_(2);
    }
  } ranks;
  Losses l = whole;
  all_reduce(l, ranks);
  CHECK(ranks.summed == std::vector<int64_t>{7});
  for (const char* count : {"positives", "objects"})
    CHECK(l[count].item<int64_t>() == 2 * whole[count].item<int64_t>());
  CHECK(l.total.item<double>() == doctest::Approx(whole.total.item<double>()).epsilon(1e-5));
  CHECK(l["iou"].item<double>() == doctest::Approx(whole["iou"].item<double>()).epsilon(1e-5));
}

TEST_CASE("step: values are averaged over micro-batches and ranks by positives or images; counts are added") {
  const auto losses = [](double value, int64_t positives, int64_t images) {
    Losses l;
    l.images = images;
    l.log("mean", torch::full({}, int64_t(value)));  // of any type, and before the first term
    l.add("iou", torch::full({}, value));
    l.add("distance", torch::full({}, value), 2, Losses::Per::kImage);
    l.log("area", torch::full({}, value), Losses::Per::kImage);
    l.count("positives", torch::full({}, positives));
    return l;
  };
  Losses l = losses(8, 3, 1);
  CHECK(l.total.item<double>() == 24);
  CHECK(l.sum_of(Losses::Per::kPositive).item<double>() == 8);
  CHECK(l.sum_of(Losses::Per::kImage).item<double>() == 16);
  CHECK(l.term_per_image() == "distance");
  l = join({l, losses(0, 1, 3)});  // 3 of 4 positives, 1 of 4 images
  CHECK(to_string(numbers_of(l)) == "mean 6, iou 6, distance 4, area 2, positives 4");
  CHECK(l.total.item<double>() == 10);
  struct OneMoreRank {  // with 4 positives in 12 images
    void sum(Tensor& t) { t.add_(torch::tensor({8.0, 4.0, 0.0, 0.0, 4.0, 12.0}, torch::kDouble)); }
  } ranks;
  all_reduce(l, ranks);
  CHECK(to_string(numbers_of(l)) == "mean 4, iou 3.5, distance 1, area 0.5, positives 8");
  CHECK(l.total.item<double>() == 4.5);  // without the logged values
  CHECK_THROWS(l["old"]);
  CHECK(has(error_of([&] { l.log("iou", l.total); }), "two terms with the name iou"));
  CHECK(has(error_of([&] { l.log("all", torch::zeros({3})); }), "must be a scalar"));
  Losses none;
  CHECK(has(error_of([&] { none.add("distance", torch::zeros({}), 1, Losses::Per::kImage); }),
            "set losses.images before you add the value per image distance"));
}

TEST_CASE("step: with a term per image, the mean gradient of the ranks is that of the whole batch") {
  // Rank 0 has 1 image and 3 positives, rank 1 has 3 images and 1 positive. A term is the mean of w * x.
  const Tensor w = torch::ones({}, torch::kDouble).requires_grad_();
  struct TwoRanks {
    RankInfo info;
    void sum(Tensor& t) { t.fill_(4); }
  } ranks;
  ranks.info.world = 2;
  double mean = 0;
  for (const auto& [images, positives, x] : {std::tuple(1, 3, 5.0), {3, 1, 7.0}}) {
    Losses l;
    l.images = images;
    l.count("positives", torch::full({}, positives, torch::kLong));
    l.add("iou", w * x);
    l.add("distance", w * x, 10, Losses::Per::kImage);
    mean += torch::autograd::grad({loss_of_rank(l, ranks, images / 2.0)}, {w})[0].item<double>() / 2;
  }
  CHECK(mean == doctest::Approx((3 * 5.0 + 7.0) / 4 + 10 * (5.0 + 3 * 7.0) / 4));
}

TEST_CASE("step: after out of memory the step is repeated in parts; statistics are updated only once") {
  Small s;
  Small plain;
  for (auto* of : {&s, &plain}) {
    of->model->eval();
    // Only the first batch norm is in training mode. A failed attempt has already updated its statistics.
    for (const auto& m : of->model->named_modules())
      if (m.key() == "backbone.backbone.stem.conv.bn") m.value()->train();
  }
  int attempts = 0;
  s.observed->after_forward = [&](const Tensor& x) {
    ++attempts;
    if (x.size(0) > 3) throw c10::OutOfMemoryError(c10::SourceLocation{"", "", 0}, "CUDA out of memory");
  };
  Log log("", /*quiet=*/true);
  TrainSteps steps(*s.training, torch::kCPU, log, false, 5, /*clip=*/0);
  const Losses losses = steps(
      {s.input.images.to(torch::kByte).permute({0, 2, 3, 1}), s.input.targets, {}, {}}, {64, 64}, true, 0);
  CHECK(attempts == 3);
  plain.gradients_in(2);
  CHECK(all_equal(s.grads(), plain.grads()));
  const auto a = s.model->named_buffers(), b = plain.model->named_buffers();
  for (const auto& buffer : a) CHECK_MESSAGE(torch::equal(buffer.value(), b[buffer.key()]), buffer.key());
  CHECK(losses.total.item<double>() > 0);
}

TEST_CASE("step: a step out of memory is repeated in more parts; after the second time the number stays") {
  Small s;
  Log log("", /*quiet=*/true);
  TrainSteps steps(*s.training, torch::kCPU, log, false, /*images=*/7);
  steps.micro_batches.parts = 2;
  // Returns the numbers of parts that a step tries. room: smallest number of parts that fits.
  const auto attempts = [&](int64_t room, const char* error = "out of memory") {
    std::string order;
    const auto compute = [&](int64_t parts) {
      order += concat(" ", parts);
      check(parts >= room, error);
      return Losses();
    };
    return error_of([&] { steps.micro_batches.fit({64, 64}, compute); }) + order;
  };
  CHECK(attempts(7) == " 2 4 7");
  CHECK(attempts(1) == " 2");  // After the first retry, a step starts with two parts again.
  CHECK(attempts(3) == " 2 4");
  CHECK(attempts(1) == " 4");
  CHECK_HAS(attempts(8), "even with one image at a time");
  CHECK_HAS(attempts(8), "(out of memory)");  // the original message
  CHECK(attempts(8, "other") == "other 4");
}

TEST_CASE("step: a failed backward keeps no activations of its step in memory") {
  Small s;
  c10::weak_intrusive_ptr<c10::TensorImpl> images{c10::intrusive_ptr<c10::TensorImpl>()};
  // The deepest level is computed first in backward(), while tasks of the other levels are queued.
  s.model->named_parameters()["head.stems.2.conv.weight"].register_hook(
      [](const Tensor&) -> Tensor { throw std::bad_alloc(); });
  s.observed->before = [&](const Tensor& x) {
    const Tensor leaf = x.clone().requires_grad_();  // kept alive by the graph
    images = c10::weak_intrusive_ptr<c10::TensorImpl>(leaf.getIntrusivePtr());
    return leaf;
  };
  CHECK(std::isinf(s.memory(2, 1, {64, 64})));
  CHECK(images.expired());

  Log log("", /*quiet=*/true);
  TrainSteps steps(*s.training, torch::kCPU, log, false, 5);
  const auto fail_once = [&](int64_t parts) {
    if (parts > 1) return Losses();
    CHECK_THROWS(s.gradients_in(1));
    CHECK_FALSE(images.expired());
    throw std::bad_alloc();
  };
  steps.micro_batches.fit({64, 64}, fail_once);
  CHECK(images.expired());
}

TEST_CASE("step: deterministic_max_pool_5x5 has the values and the gradient of max_pool2d") {
  torch::manual_seed(1);
  Tensor x = torch::randn({2, 3, 9, 7}).requires_grad_(), y = x.detach().clone().requires_grad_();
  const Tensor weight = torch::randn({2, 3, 9, 7});
  const Tensor a = torch::max_pool2d(x, 5, 1, 2), b = deterministic_max_pool_5x5(y);
  CHECK(torch::equal(a, b));
  (a * weight).sum().backward();
  (b * weight).sum().backward();
  CHECK(torch::allclose(x.grad(), y.grad(), 1e-6, 1e-6));
}

TEST_CASE("step: the loss is scaled for fp16, and the network runs under autocast") {
  Small s;
  s.model->eval();
  s.gradients_in(1);
  const auto want = at::_foreach_mul(s.grads(), 8);
  s.training->scaler = GradScaler(true, torch::kCPU);
  s.training->scaler.scale.fill_(8);
  bool autocast = true;
  s.observed->after_forward = [&](const Tensor&) { autocast = at::autocast::is_autocast_enabled(at::kCPU); };
  s.gradients_in(1);
  CHECK_FALSE(autocast);
  CHECK(largest_error(s.grads(), want) < 1e-5);
  s.training->amp = torch::kBFloat16;
  const Losses l = s.gradients_in(1);
  CHECK(autocast);
  CHECK_FALSE(l.total.requires_grad());  // the losses are detached
}

TEST_CASE("step: a trial step has the largest input size and a step's micro-batches; errors are thrown") {
  Small s;
  int64_t height = 0, images = 0;  // of the largest input of the network
  s.observed->before = [&](const Tensor& x) {
    height = std::max(height, x.size(2));
    images = std::max(images, x.size(0));
    return x;
  };
  const auto try_out = [&](ImageSize largest, int64_t accum) {
    height = images = 0;
    return error_of([&] { s.memory(4, accum, largest); });
  };
  CHECK(try_out({128, 128}, 1) == "");
  CHECK(height == 128);
  CHECK(images == 4);
  CHECK(try_out({64, 64}, 2) == "");
  CHECK(height == 64);
  CHECK(images == 2);
  CHECK(try_out({100, 100}, 1) != "");
  CHECK_THROWS_AS(s.memory(2, 1, {64, 64}, [] { throw UsageError("too small"); }), UsageError);
  std::vector<Tensor> before;
  for (const Tensor& t : tensors_of(s.model)) before.push_back(t.detach().clone());
  const Tensor random = at::globalContext().defaultGenerator(torch::kCPU).get_state();
  int runs = 0;
  const auto run_out = [&] {
    ++runs;
    throw std::bad_alloc();
  };
  CHECK(std::isinf(s.memory(2, 1, {64, 64}, run_out)));
  CHECK(runs == 1);
  CHECK(s.memory(6, 1, {96, 96}) > 1e6);
  // Weights, statistics, gradients and random numbers are as before.
  CHECK(all_equal(tensors_of(s.model), before));
  for (const auto& p : s.model->parameters()) CHECK_FALSE(p.grad().defined());
  CHECK(torch::equal(random, at::globalContext().defaultGenerator(torch::kCPU).get_state()));
}

TEST_CASE("multi-scale: the size depends on seed and step only, and changes every ten steps") {
  const MultiScale sizes{{640, 640}, 5, 5, 3};
  const auto drawn = heights(sizes, 1000);
  for (int i = 0; i < 10; ++i) CHECK(drawn[i] == 640);
  int changes = 0;
  for (int i = 0; i < 1000; ++i) {
    CHECK(drawn[i] == drawn[i / 10 * 10]);
    if (i) changes += drawn[i] != drawn[i - 1];
  }
  CHECK(changes > 60);
  CHECK(heights({{640, 640}, 5, 5, 3}, 1000) == drawn);
  CHECK(heights({{640, 640}, 5, 5, 4}, 1000) != drawn);
  CHECK(sizes.size_at(500).height == drawn[500]);  // does not depend on earlier calls
  for (int64_t seed = 0; seed < 20; ++seed)
    for (const int h : heights({{640, 640}, 5, 5, seed}, 10)) CHECK(h == 640);
}

TEST_CASE("multi-scale: a small set of equally frequent sizes, for which cuDNN runs its benchmark") {
  const MultiScale sizes{{640, 640}, 5, 5, 0}, small{{416, 416}, 3, 7, 0}, wide{{320, 640}, 3, 7, 0};
  std::map<int, int> counts;
  for (int64_t i = 10; i < 110010; i += 10) ++counts[sizes.size_at(i).height];
  CHECK(counts.size() == 11);
  CHECK(counts.begin()->first == 640 - 160);
  CHECK(counts.rbegin()->first == 640 + 160);
  for (const auto& [height, count] : counts) CHECK(std::abs(count - 1000) < 150);
  CHECK(sizes.largest().height == 800);
  const auto drawn = heights(small, 20000);
  CHECK(std::set<int>(drawn.begin(), drawn.end()).size() == 11);
  CHECK(std::ranges::min(drawn) == 416 - 96);
  CHECK(std::ranges::max(drawn) == 416 + 224);
  CHECK(small.largest().height == 640);
  for (int64_t i = 0; i < 2000; i += 10) CHECK(wide.size_at(i).width == 2 * wide.size_at(i).height);
  CHECK(wide.largest().width == 2 * wide.largest().height);

  auto& torch_settings = at::globalContext();
  use_cudnn_benchmark(true);
  CHECK(torch_settings.benchmarkCuDNN());
  use_cudnn_benchmark(false);
  CHECK_FALSE(torch_settings.benchmarkCuDNN());
  // In a short run, it would take longer than it saves.
  Config config;
  const auto pays = [&](int64_t images, const MultiScale& with) {
    Plan plan{};
    plan.batch = 10;
    plan.iters = images / 10;
    plan.sizes = with;
    return cudnn_benchmark_pays(config, plan);
  };
  const MultiScale one_size{{640, 640}};
  CHECK((pays(300 * 118000, sizes) && pays(1000000, one_size)));
  CHECK_FALSE((pays(1000000, sizes) || pays(60 * 300, one_size)));
  config.dtr = "8";
  CHECK_FALSE(pays(300 * 118000, sizes));
  config.dtr = "off";
  config.deterministic = true;
  CHECK_FALSE(pays(300 * 118000, sizes));
  const Deterministic deterministic;
  CHECK(torch_settings.deterministicCuDNN());
  CHECK(torch_settings.deterministicAlgorithms());
}

TEST_CASE("multi-scale: range 0 keeps --size; small sizes stay large enough for batch norms") {
  const auto smallest = [](const MultiScale& sizes) {
    int side = 10000;
    for (int64_t i = 0; i < 2000; ++i)
      side = std::min({side, sizes.size_at(i).height, sizes.size_at(i).width});
    return side;
  };
  CHECK(smallest({{416, 416}, 0, 0, 1}) == 416);
  CHECK(smallest({{64, 64}, 5, 5, 1}) == 32);
  CHECK(smallest({{64, 64}, 5, 5, 1, 2}) == 64);
  CHECK(smallest({{32, 64}, 0, 0, 1, 2}) == 32);
  CHECK(smallest({{320, 32}, 5, 5, 1}) == 32);
  Config c;
  fill_in(c);
  CHECK(multi_scale(c, {640, 640}, 1).largest().height == 800);
  c.profile = true;  // measures steps of a single size
  CHECK(multi_scale(c, {640, 640}, 1).largest().height == 640);
}

TEST_CASE("multi-scale: images and boxes are resized together") {
  Tensor images = torch::zeros({1, 3, 64, 32});
  images.select(2, 40).fill_(1);
  Targets targets{torch::tensor({{{8.f, 16.f, 4.f, 2.f}}}), torch::zeros({1, 1}, torch::kLong), {1}};
  resize_batch(images, targets, {128, 96});
  CHECK(images.sizes() == c10::IntArrayRef{1, 3, 128, 96});
  CHECK(torch::equal(targets.boxes, torch::tensor({{{24.f, 32.f, 12.f, 4.f}}})));
  CHECK(images.mean({0, 1, 3}).argmax().item<int64_t>() / 2 == 40);
  const Tensor before = images;
  resize_batch(images, targets, {128, 96});
  CHECK(images.is_same(before));
  images = torch::tensor({0.f, 1.f}).view({1, 1, 1, 2});
  resize_batch(images, targets, {1, 4});  // with align_corners off
  CHECK(torch::allclose(images.flatten(), torch::tensor({0.f, 0.25f, 0.75f, 1.f})));
}
