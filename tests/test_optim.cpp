// SPDX-License-Identifier: Apache-2.0
#include "optim.hpp"

#include <torch/nn/modules/normalization.h>
#include <torch/optim.h>

#include <map>

#include "loss.hpp"
#include "models.hpp"
#include "official.hpp"

using namespace yolox;
using torch::Tensor;

namespace {
// Returns torch's optimizer of these groups.
template <class Optim, class Options>
std::unique_ptr<torch::optim::Optimizer> reference_of(const std::vector<ParamGroup>& groups,
                                                      Options options) {
  std::vector<torch::optim::OptimizerParamGroup> all;
  for (const auto& g : groups)
    all.emplace_back(g.params, std::make_unique<Options>(Options(options).weight_decay(g.weight_decay)));
  return std::make_unique<Optim>(all, options);
}
}  // namespace

SHARED_TEST("optim: the three parameter groups contain the official names in the official order") {
  for (const std::string size : {"nano", "tiny", "s"}) {
    const auto f = fixture("steps_" + size + ".pth");
    YOLOX model = make_model("yolox-" + size, 80);
    const auto groups = parameter_groups(*model, 5e-4);
    REQUIRE(groups.size() == 3);
    for (int g = 0; g < 3; ++g) {
      std::vector<std::string> expected;
      for (const c10::IValue& name : f.at(concat("group", g)).toListRef())
        expected.push_back(name.toStringRef());
      CHECK(groups[g].names == expected);
      CHECK(groups[g].weight_decay == f.at("group" + std::to_string(g) + "_weight_decay").toDouble());
    }
  }
}

SHARED_TEST("optim: three SGD steps and EMA in float64 equal the official ones") {
  const auto f = fixture("steps_nano.pth");
  const Tensor images = tensor(fixture("model_nano.pth"), "sq").to(torch::kDouble);
  const auto t = official_targets(tensor(fixture("train_nano.pth"), "labels_sq").to(torch::kDouble));
  auto model = official_model("nano", torch::kDouble), ema = official_model("nano", torch::kDouble);
  model->train();
  Optimizer optimizer("sgd", parameter_groups(*model, 5e-4), false);
  int64_t updates = f.at("ema_start_updates").toInt();
  for (int step = 0; step < 3; ++step) {
    const auto losses = yolox_loss(model(images), images.size(2), images.size(3), t, /*l1=*/step == 2);
    optimizer.zero_grad();
    losses.total.backward();
    optimizer.step(tensor(f, "lrs")[step].item<double>());
    ema_update(ema_tensors(*ema, *model), ema_decay(EmaSchedule(), ++updates));
    CHECK(losses.total.item<double>() ==
          doctest::Approx(tensor(f, concat("f64_loss_step", step))[0].item<double>()).epsilon(1e-10));
    for (const bool of_ema : {false, true}) {
      const Tensor probes = tensor(f, concat(of_ema ? "f64_ema" : "f64_model", "_probe_step", step));
      double worst = 0;
      int64_t i = 0;
      for (const auto& [key, value] : state_dict(of_ema ? *ema : *model))
        worst = std::max(worst, probe_error(probe(key, value), probes[i++], value.numel()));
      CHECK(worst < 1e-10);
    }
  }
  const Tensor momentum = tensor(f, "f64_momentum_probe");
  int64_t i = 0;
  for (size_t g = 0; g < 3; ++g)
    for (size_t k = 0; k < optimizer.groups[g].params.size(); ++k, ++i)
      CHECK(probe_error(probe(optimizer.groups[g].names[k], optimizer.first[g][k]), momentum[i],
                        optimizer.first[g][k].numel()) < 1e-8);
}

SHARED_TEST("optim: learning rate and EMA decay equal the official ones") {
  const auto f = fixture("misc.pth");
  for (int k = 0; k < 3; ++k) {
    const std::string name = "lr" + std::to_string(k);
    const Tensor cfg = tensor(f, name + "_cfg"), iters = tensor(f, name + "_iters"),
                 expected = tensor(f, name + "_yoloxwarmcos");
    const auto v = [&](int i) { return cfg[i].item<double>(); };
    const double per_epoch = v(1);
    const Schedule s{v(0), per_epoch * v(2), per_epoch * v(3), per_epoch * v(5), v(4), v(6)};
    for (int64_t i = 0; i < iters.numel(); ++i)
      CHECK(learning_rate(s, iters[i].item<int64_t>()) ==
            doctest::Approx(expected[i].item<double>()).epsilon(1e-12));
  }
  const Tensor at = tensor(f, "ema_iters"), decay = tensor(f, "ema_decay");
  for (int64_t i = 0; i < at.numel(); ++i)
    CHECK(ema_decay(EmaSchedule(), at[i].item<int64_t>()) ==
          doctest::Approx(decay[i].item<double>()).epsilon(1e-12));
}

TEST_CASE("optim: without a warm-up the learning rate begins at its highest; a flat part keeps it there") {
  CHECK(learning_rate({0.01, 100, 0, 0}, 0) == doctest::Approx(0.01));
  Schedule flat{0.01, 100, 10, 0};
  flat.flat_until = 50;
  for (const auto& [step, lr] : {std::pair(11, 0.01), {49, 0.01}, {75, 0.00525}, {100, 0.0005}})
    CHECK(learning_rate(flat, step) == doctest::Approx(lr));
}

TEST_CASE("optim: SGD, Adam and AdamW equal torch's own optimizers") {
  for (const std::string kind : {"sgd", "adam", "adamw"}) {
    for (const bool fp16 : {false, true}) {
      torch::manual_seed(1);
      const auto net = [] {
        return torch::nn::Sequential(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
      };
      auto a = net(), b = net();
      for (size_t i = 0; i < a->parameters().size(); ++i)
        b->parameters()[i].set_data(a->parameters()[i].clone());
      Optimizer ours(kind, parameter_groups(*a, 0.05), fp16);
      const double eps = fp16 ? 1e-3 : 1e-8;
      const auto groups = parameter_groups(*b, 0.05);
      const auto reference =
          kind == "sgd" ? reference_of<torch::optim::SGD>(
                              groups, torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true))
          : kind == "adam"
              ? reference_of<torch::optim::Adam>(groups, torch::optim::AdamOptions(0.1).eps(eps))
              : reference_of<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.1).eps(eps));
      for (int step = 0; step < 3; ++step) {
        for (size_t k = 0; k < a->parameters().size(); ++k) {
          const Tensor g = torch::randn_like(a->parameters()[k]);
          a->parameters()[k].mutable_grad() = g.clone();
          b->parameters()[k].mutable_grad() = g.clone();
        }
        ours.step(0.1);
        reference->step();
      }
      for (size_t i = 0; i < a->parameters().size(); ++i)
        CHECK_MESSAGE(relative_error(a->parameters()[i], b->parameters()[i]) < 1e-5,
                      kind << " parameter " << i);
    }
  }
  CHECK_THROWS_WITH_AS(Optimizer("lion", {}, false), doctest::Contains("choose sgd"), std::runtime_error);
}

TEST_CASE("optim: weights of every kind of norm have no weight decay") {
  const torch::nn::Sequential model(torch::nn::Conv2d(4, 4, 1), torch::nn::BatchNorm2d(4),
                                    torch::nn::GroupNorm(2, 4), torch::nn::Linear(4, 4));
  const auto groups = parameter_groups(*model, 0.05);
  CHECK(groups[0].names == std::vector<std::string>{"1.weight", "2.weight"});
  CHECK(groups[0].weight_decay == 0);
  CHECK(groups[1].weight_decay == 0.05);
}

TEST_CASE("optim: frozen parameters are in no group and stay unchanged in steps with weight decay") {
  YOLOX model = make_model("yolox-nano", 2);
  for (auto& p : model->backbone->parameters()) p.set_requires_grad(false);
  const Tensor stem = model->named_parameters()["backbone.backbone.stem.conv.conv.weight"];
  const Tensor before = stem.clone();
  Optimizer o("sgd", parameter_groups(*model, 0.5), false);
  size_t n = 0;
  for (const auto& g : o.groups) {
    for (const auto& name : g.names) CHECK(name.rfind("head.", 0) == 0);
    n += g.params.size();
  }
  CHECK(n == model->head->parameters().size());
  for (int i = 0; i < 2; ++i) {
    const auto p = model(torch::rand({1, 3, 64, 64}) * 255);
    o.zero_grad();
    (p.reg.sum() + p.obj.sum() + p.cls.sum()).backward();
    o.step(0.1);
  }
  CHECK(torch::equal(before, stem));
}

TEST_CASE("optim: a parameter without a gradient keeps weight, momentum and step count") {
  for (const std::string kind : {"sgd", "adam", "adamw"}) {
    torch::nn::Linear used(3, 2), idle(3, 2);
    Optimizer o(kind, parameter_groups(*torch::nn::Sequential(used, idle), 0.1), false);
    const auto values = [&](size_t module) {  // of the parameters of a module, and of their state
      std::vector<Tensor> all;
      for (size_t g : {1, 2}) {
        all.push_back(o.groups[g].params[module].detach().clone());
        for (const auto& [_, list] : o.named_state()) all.push_back((*list)[g][module].clone());
      }
      return all;
    };
    const auto step = [&](const torch::nn::Linear& module) {
      o.zero_grad();
      for (const Tensor& p : module->parameters()) p.mutable_grad() = torch::ones_like(p);
      o.step(0.1);
    };
    step(idle);  // so that its momentum is not zero
    const auto before = values(1), of_used = values(0);
    step(used);
    for (size_t i = 0; i < before.size(); ++i) {
      CHECK(torch::equal(values(1)[i], before[i]));
      CHECK_FALSE(torch::equal(values(0)[i], of_used[i]));
    }
  }
}

TEST_CASE("clipping: large gradients are scaled to the norm, small ones stay, and 0 is off") {
  const auto grads = [] {
    return std::vector<Tensor>{torch::full({9}, 4.0), torch::full({16}, 3.0)};
  };  // norm sqrt(144 + 144)
  auto g = grads();
  const Tensor norm = gradient_norm(g);
  CHECK(norm.item<double>() == doctest::Approx(std::sqrt(288.)));
  clip_gradients(g, norm, 1);
  CHECK(gradient_norm(g).item<double>() == doctest::Approx(1).epsilon(1e-5));
  g = grads();
  for (const double limit : {100, 0}) {
    clip_gradients(g, norm, limit);
    CHECK(torch::equal(g[0], torch::full({9}, 4.0)));
  }
}

TEST_CASE(
    "optim: a restored optimizer continues from its saved state, with the learning rate of the latest step") {
  torch::manual_seed(2);
  torch::nn::Linear a(3, 2), b(3, 2);
  for (const char* kind : {"sgd", "adamw"}) {
    Optimizer from(kind, parameter_groups(*a, 0.1), false), to(kind, parameter_groups(*b, 0.1), false);
    a->weight.mutable_grad() = torch::ones_like(a->weight);
    a->bias.mutable_grad() = torch::ones_like(a->bias);
    from.step(0.375);
    load_state_dict(to, state_dict(from), "x.pth");
    CHECK(to.lr == 0.375);
    for (size_t g = 0; g < from.groups.size(); ++g)
      for (size_t i = 0; i < from.first[g].size(); ++i) CHECK(torch::equal(from.first[g][i], to.first[g][i]));
  }
}

TEST_CASE("optim: the gradient scaler unscales before clipping, skips overflows, backs off and grows") {
  GradScaler scaler(true, torch::kCPU);
  const auto finite = [&](const std::vector<Tensor>& g) {
    scaler.unscale(g);
    return scaler.found_inf.item<float>() == 0;
  };
  std::vector<Tensor> grads = {torch::full({3}, 65536.0 * 2)};
  CHECK(finite(grads));
  CHECK(torch::equal(grads[0], torch::full({3}, 2.0)));
  grads[0][1] = std::numeric_limits<float>::infinity();
  CHECK_FALSE(finite(grads));
  scaler.update();
  CHECK(scaler.scale.item<float>() == 32768);
  grads = {torch::ones({3})};
  for (int i = 0; i < 2000; ++i) {
    CHECK(finite(grads));
    scaler.update();
  }
  CHECK(scaler.scale.item<float>() == 65536);
  GradScaler off(false, torch::kCPU);
  CHECK(off.scaled(torch::full({}, 3.0)).item<float>() == 3);
}

TEST_CASE("optim: AutocastGuard ends autocast with its scope and clears the cached casts of weights") {
  torch::nn::Linear l(4, 4);
  const auto type = [&] { return l(torch::ones({1, 4})).scalar_type(); };
  {
    const AutocastGuard guard(torch::kCPU, torch::kBFloat16);
    CHECK((type() == torch::kBFloat16));
  }
  CHECK((type() == torch::kFloat));
  for (const Tensor& p : l->parameters()) torch::nn::init::zeros_(p);
  const AutocastGuard guard(torch::kCPU, torch::kBFloat16);
  CHECK(l(torch::ones({1, 4})).abs().sum().item<float>() == 0);
  const AutocastGuard off(torch::kCPU, torch::kFloat);
  CHECK((type() == torch::kFloat));
}

TEST_CASE("optim: a skipped step changes no weight, no momentum, no step count and no EMA") {
  for (const std::string kind : {"sgd", "adam", "adamw"}) {
    INFO(kind);
    torch::nn::Linear model(3, 2), ema(3, 2);
    Optimizer optimizer(kind, parameter_groups(*model, 5e-4), false);
    const EmaTensors pairs = ema_tensors(*ema, *model);
    StepGuard guard;
    // Returns the number of tensors that a step changes.
    const auto changed = [&](double loss, double gradient) {
      std::vector<Tensor> all = optimizer.state(), before;
      for (const auto& m : {model, ema})
        for (const Tensor& p : m->parameters()) all.push_back(p.detach());
      for (const Tensor& t : all) before.push_back(t.clone());
      for (const Tensor& p : model->parameters()) p.mutable_grad() = torch::full_like(p, gradient);
      const std::vector<Tensor> grads = gradients(optimizer.groups);
      const Tensor norm = gradient_norm(grads);
      clip_gradients(grads, norm, 10);
      const Tensor skip = guard.skip(torch::tensor(float(loss)), norm);
      optimizer.step(0.1, skip);
      ema_update(pairs, 0.9, skip);
      size_t n = 0;
      for (size_t i = 0; i < all.size(); ++i) n += !torch::equal(all[i], before[i]);
      return n;
    };
    const double infinity = std::numeric_limits<double>::infinity();
    const size_t all = kind == "sgd" ? 6 : 10;
    CHECK(changed(1, 0.5) == all);
    CHECK(changed(1, infinity) == 0);
    CHECK(changed(1, std::nan("")) == 0);
    CHECK(changed(1, 0.5) == all);
    CHECK(changed(infinity, 0.5) == 0);
    CHECK(changed(1, 0.5) == 0);  // all steps after a loss that is not finite
  }
}

TEST_CASE("EMA: frozen parameters and the statistics of their batch norms are not updated, the others are") {
  const auto net = [] {
    return torch::nn::Sequential(torch::nn::Conv2d(3, 4, 1), torch::nn::BatchNorm2d(4),
                                 torch::nn::Conv2d(4, 4, 1), torch::nn::BatchNorm2d(4));
  };
  torch::nn::Sequential source = net(), target = net();
  CHECK(freeze(*source, {"0.", "1."}) == "");
  CHECK(freeze(*source, {"0.", "4."}) == "4.");
  set_training_mode(*source);
  source->forward(torch::randn({2, 3, 4, 4}) + 1);
  std::map<std::string, Tensor> now, before;
  for (const auto& entries : {target->named_parameters(), target->named_buffers()})
    for (const auto& e : entries) {
      now[e.key()] = e.value();
      before[e.key()] = e.value().detach().clone();
    }
  ema_update(ema_tensors(*target, *source), 0.7);
  for (const char* name : {"0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var"})
    CHECK_MESSAGE(torch::equal(now[name], before[name]), name);
  for (const char* name : {"2.weight", "2.bias", "3.running_mean", "3.running_var"})
    CHECK_FALSE_MESSAGE(torch::equal(now[name], before[name]), name);
  CHECK(torch::equal(source->named_buffers()["1.running_mean"], torch::zeros({4})));
}
