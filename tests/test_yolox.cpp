// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/load.hpp"
#include "official.hpp"

#include <thread>

using namespace yolox;
using torch::Tensor;

namespace {
const std::vector<std::string> kSizes = {"nano", "tiny", "s", "m", "l", "x"};
}

TEST_CASE("yolox: parameter counts of the six sizes") {
  const std::vector<int64_t> counts = {912159, 5055855, 8968255, 25326495, 54208895, 99071455};
  for (size_t i = 0; i < kSizes.size(); ++i) {
    YOLOX model = make_model("yolox-" + kSizes[i], 80);
    int64_t n = 0;
    for (const auto& p : model->parameters()) n += p.numel();
    CHECK(n == counts[i]);
  }
}

SHARED_TEST("yolox: names, shapes, order and initial values equal the official ones") {
  for (const auto& size : kSizes) {
    torch::manual_seed(0);
    YOLOX model = make_model("yolox-" + size, 80);
    std::ifstream file(shared("fixtures/state_keys_" + size + ".txt"));
    std::string line;
    size_t i = 0;
    const auto all = state_dict(*model);
    while (std::getline(file, line)) {
      if (line.empty() || line[0] == '#') continue;
      std::istringstream in(line);
      std::string key, shape, kind, hash, first_formula, last_formula, bar;
      double first, last;
      in >> key >> shape >> kind >> hash >> first_formula >> last_formula >> bar >> first >> last;
      REQUIRE(i < all.size());
      const auto& [name, t] = all[i++];
      std::string dims;
      for (const int64_t d : t.sizes()) dims += (dims.empty() ? "" : "x") + std::to_string(d);
      REQUIRE(name == key);
      REQUIRE((dims.empty() ? "scalar" : dims) == shape);
      const auto flat = t.detach().to(torch::kDouble).contiguous().flatten();
      CHECK(flat[0].item<double>() == doctest::Approx(first).epsilon(1e-6));
      CHECK(flat[-1].item<double>() == doctest::Approx(last).epsilon(1e-6));
    }
    CHECK(i == all.size());
  }
}

SHARED_TEST(
    "yolox: the output in evaluation mode equals the official one, for all model sizes, square and wide "
    "images") {
  torch::NoGradGuard no_grad;
  const auto inputs = fixture("model_nano.pth");
  for (const auto& size : kSizes) {
    const auto expected = fixture("model_" + size + ".pth");
    auto model = official_model(size);
    auto precise = official_model(size, torch::kDouble);
    model->eval();
    precise->eval();
    for (const std::string kind : {"sq", "rect"}) {
      const Tensor images = tensor(inputs, kind).slice(0, 0, 2).to(torch::kFloat);
      const Tensor out = decode(model(images), images.size(2), images.size(3));
      const Tensor exact = decode(precise(images.to(torch::kDouble)), images.size(2), images.size(3));
      const double bar = rounding_tolerance(out, exact);
      CHECK(bar < 2e-2);
      CHECK(probe_error(probe("eval_" + kind, out), tensor(expected, "eval_" + kind + "_probe"),
                        out.numel()) < bar);
      if (out.sizes() ==
          tensor(expected, "eval_" + kind).sizes())  // fixtures of the large sizes contain samples only
        CHECK(relative_error(out, tensor(expected, "eval_" + kind)) < bar);
    }
  }
}

SHARED_TEST("yolox: the official nano computes the output that its official ONNX file computes for a photo") {
  torch::NoGradGuard no_grad;
  const auto floats = [](const std::string& path, const std::vector<int64_t>& shape) {
    const std::string npy = contents(shared("data/weights/" + path));
    Tensor t = torch::empty(shape);
    std::memcpy(t.data_ptr(), npy.data() + npy.size() - t.nbytes(), t.nbytes());
    return t;
  };
  auto loaded = load_model(shared("data/weights/yolox_nano_coco_v011_rebuilt.pth"), "", "auto", torch::kCPU);
  CHECK(loaded.info.model == "yolox-nano");
  CHECK(loaded.model->num_classes == 80);
  const auto p = loaded.model(floats("dog_input_1x3x416x416_f32.npy", {1, 3, 416, 416}));
  const Tensor out = torch::cat({p.reg, p.obj.unsqueeze(-1).sigmoid(), p.cls.sigmoid()}, -1);
  const Tensor want = floats("dog_output_onnx_3549x85_f32.npy", {1, 3549, 85});
  CHECK(((out - want).abs() / want.abs().clamp_min(1)).max().item<double>() < 2e-4);
}

SHARED_TEST("yolox: detections after NMS equal the official ones") {
  const auto compare = [](const Tensor& got, const Tensor& expected) {
    REQUIRE(got.sizes() == expected.sizes());
    // The official sort is unstable, so that the order of equal scores is arbitrary. Compares in a fixed
    // order.
    const auto sorted = [](Tensor d) {
      for (const int column : {0, 1}) d = d.index_select(0, d.select(1, column).argsort(true, 0, false));
      return d.index_select(0, (d.select(1, 4) * d.select(1, 5)).argsort(true, 0, true));
    };
    CHECK(torch::equal(sorted(got), sorted(expected)));
    const Tensor score = got.select(1, 4) * got.select(1, 5);
    CHECK((score.slice(0, 1) <= score.slice(0, 0, -1)).all().item<bool>());
  };
  for (const std::string size : {"nano", "tiny", "s"}) {
    const auto f = fixture("model_" + size + ".pth");
    for (const std::string kind : {"sq", "rect"})
      for (const std::string conf : {"0.01", "0.001", "0.05"}) {
        const auto d = postprocess(tensor(f, "eval_" + kind), std::stod(conf), 0.65);
        for (int image = 0; image < 2; ++image) {
          const std::string key = "det_" + kind + "_" + conf + "_class_" + std::to_string(image);
          CAPTURE(size);
          CAPTURE(key);
          if (f.contains(key)) compare(d[image], tensor(f, key));
        }
      }
  }
  const auto f = fixture("misc.pth");
  for (const std::string n : {"300", "3000"})
    for (const auto& [conf, iou] : {std::pair{"0.01", "0.65"}, {"0.25", "0.45"}}) {
      const auto d = postprocess(tensor(f, "nms" + n + "_pred"), std::stod(conf), std::stod(iou));
      for (int image = 0; image < 2; ++image) {
        const std::string key = "nms" + n + "_" + conf + "_" + iou + "_class_" + std::to_string(image);
        CAPTURE(key);
        compare(d[image], tensor(f, key));
      }
    }
}

TEST_CASE(
    "yolox: anchor points that are made in inference mode can be used in training, and stay where they are") {
  std::thread([] {  // the anchor points are those of the thread
    const auto anchors = [](int64_t height) { return anchors_of(height, 32, torch::kFloat, kStrides); };
    const Tensor first = [&] {
      const torch::InferenceMode inference;
      return anchors(64).stride;
    }();
    for (int64_t i = 3; i < 103; ++i) anchors(32 * i);
    CHECK(anchors(64).stride.is_same(first));
    const Tensor x = torch::ones_like(first).requires_grad_();
    (x * first).sum().backward();
    CHECK(torch::equal(x.grad(), first));
  })
      .join();
}

TEST_CASE("yolox: NMS of a small example: overlap, classes, and no detection") {
  // Three overlapping boxes of classes 0, 0 and 1, the first two with IoU 0.6. The score of the fourth is too
  // low.
  const auto row = [](float cx, float cy, float w, float h, float obj, int cls) {
    std::vector<float> values{cx, cy, w, h, obj, 0, 0, 0};
    values[5 + cls] = 1;
    return torch::tensor(values);
  };
  const Tensor out = torch::stack({row(50, 50, 40, 40, .8, 0), row(60, 50, 40, 40, .9, 0),
                                   row(55, 50, 40, 40, .7, 1), row(9, 9, 4, 4, .001, 2)})
                         .unsqueeze(0);
  CHECK(postprocess(out, 0.01, 0.65)[0].size(0) == 3);
  const Tensor d = postprocess(out, 0.01, 0.5)[0];
  REQUIRE(d.size(0) == 2);
  CHECK(d[0][0].item<float>() == 40);
  CHECK(d[0][4].item<float>() == doctest::Approx(.9));
  CHECK(d[1][6].item<float>() == 1);
  CHECK(postprocess(out, 0.99, 0.5)[0].sizes() == torch::IntArrayRef({0, 7}));
}

TEST_CASE(
    "yolox: any number of classes and any input size divisible by 32; other sizes are refused by name") {
  YOLOX model = make_model("yolox-nano", 3);
  model->eval();
  torch::NoGradGuard no_grad;
  CHECK(decode(model(torch::zeros({1, 3, 64, 160})), 64, 160).sizes() ==
        torch::IntArrayRef({1, 8 * 20 + 4 * 10 + 2 * 5, 8}));
  CHECK_THROWS_WITH_AS(model(torch::zeros({1, 3, 60, 160})), doctest::Contains("multiples of 32"),
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(make_model("yolov5", 3), doctest::Contains("choose yolox-nano"), UsageError);
  CHECK_THROWS_WITH_AS(make_model("yolox-s", 0), doctest::Contains("at least one class"), std::runtime_error);
  CHECK(error_of([&] {
          make_yolox({"yolox-micro", 0.33, 0.2, true}, 3);
        }) == "yolox-micro: the width must be a multiple of 1/64, such as 0.203125, got 0.2");
}

TEST_CASE(
    "yolox: scaled filters have a size that does not depend on the given one, and the output stays the "
    "same") {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  const Tensor images = torch::randint(0, 256, {2, 3, 64, 64}).to(torch::kFloat);
  const auto make = [&](double factor) {  // the same function with filters of another size
    torch::manual_seed(1);
    YOLOX model = make_model("yolox-nano", 3);
    model->train();
    for (int i = 0; i < 30; ++i) model(images);  // sets the running statistics
    model->eval();
    for (const auto& module : model->named_modules()) {
      auto* block = module.value()->as<BaseConvImpl>();
      if (!block) continue;
      auto& bn = *block->bn;
      bn.weight.mul_((factor * factor * bn.running_var + bn.options.eps()).sqrt() /
                     (factor * (bn.running_var + bn.options.eps()).sqrt()));
      block->conv->weight.mul_(factor);
      bn.running_mean.mul_(factor);
      bn.running_var.mul_(factor * factor);
    }
    return model;
  };
  YOLOX a = make(1), b = make(8);
  const Tensor output = a(images).reg.clone();
  CHECK(relative_error(b(images).reg, output) < 1e-3);
  for (YOLOX& model : {std::ref(a), std::ref(b)}) {
    scale_filters(*model);
    CHECK(relative_error(model(images).reg, output) < 1e-3);
  }
  const auto of_a = a->named_parameters(), of_b = b->named_parameters();
  for (const auto& p : of_a) CHECK_MESSAGE(relative_error(of_b[p.key()], p.value()) < 1e-3, p.key());

  // A frozen filter stays as it is, and so does one that is dead.
  YOLOX c = make(8);
  const auto of_c = c->named_parameters();
  const Tensor frozen = of_c["backbone.backbone.stem.conv.conv.weight"];
  Tensor gamma = of_c["backbone.backbone.dark2.0.dconv.bn.weight"];
  frozen.set_requires_grad(false);
  gamma[1].fill_(0);
  const Tensor before = frozen.clone();
  scale_filters(*c);
  CHECK(torch::equal(frozen, before));
  CHECK(gamma[1].item<float>() == 0);
}

TEST_CASE("yolox: fuse_batch_norms removes all batch norms and keeps the output") {
  for (const std::string name : {"yolox-nano", "yolox-tiny"}) {
    torch::manual_seed(0);
    const torch::NoGradGuard no_grad;
    YOLOX model = make_model(name, 3);
    model->train();
    for (int i = 0; i < 3; ++i) model(torch::rand({2, 3, 64, 64}) * 255);  // sets the running statistics
    model->eval();
    to_channels_last(*model);
    const Tensor images = torch::rand({2, 3, 96, 64}) * 255;
    const Tensor before = decode(model(images), 96, 64);
    for (int times = 0; times < 2; ++times) {  // a second call changes nothing
      fuse_batch_norms(*model);
      for (const auto& m : model->modules()) CHECK(m->as<nn::BatchNorm2d>() == nullptr);
      CHECK(torch::allclose(decode(model(images), 96, 64), before, 1e-3, 1e-3));
    }
  }
}

TEST_CASE("yolox: convolution and SiLU in one operation equal the two, for every size, stride and group") {
  torch::manual_seed(0);
  for (const int groups : {1, 16})
    for (const int stride : {1, 2}) {
      nn::Conv2d conv(nn::Conv2dOptions(16, 32, 3).padding(1).stride(stride).groups(groups));
      Tensor reordered;
      for (const int64_t size : {13, 40, 20}) {
        const Tensor x = torch::randn({2, 16, size, size + 3}).contiguous(torch::MemoryFormat::ChannelsLast);
        const Tensor two = torch::silu(conv(x));
        CHECK(torch::equal(conv_silu(x, *conv, reordered), two));  // with gradients: the two operations
        const torch::NoGradGuard no_grad;
        CHECK(torch::allclose(conv_silu(x, *conv, reordered), two, 1e-5, 1e-5));
        CHECK(reordered.defined());
      }
    }
}

// README.md promises that the model can be copied to another project.
PROGRAM_TEST("yolox: yolox.hpp, lib/layers and lib/base compile in a project that has only LibTorch" *
             doctest::skip(std::system("command -v g++ >/dev/null 2>&1") != 0)) {
  const TempDir dir;
  std::filesystem::copy(YOLOX_SOURCE_DIR "/yolox.hpp", dir / "yolox.hpp");
  for (const std::string folder : {"layers", "base"})
    std::filesystem::copy(YOLOX_SOURCE_DIR "/lib/" + folder, dir / folder);
  write_text(dir / "main.cpp", R"(#include "layers/bn_silu.cpp"
#include "yolox.hpp"
int main() {
  yolox::YOLOX model = yolox::make_yolox({"yolox-nano", 0.33, 0.25, true}, 3);
  model->eval();
  return yolox::decode(model(torch::zeros({1, 3, 64, 64})), 64, 64).size(1) == 84 ? 0 : 1;
}
)");
  const std::string command = "cd '" + dir.path.string() +
                              "' && g++ -std=c++20 -fsyntax-only -I. -isystem " YOLOX_TORCH_ROOT
                              "/include -isystem " YOLOX_TORCH_ROOT
                              "/include/torch/csrc/api/include main.cpp >errors 2>&1";
  CHECK_MESSAGE(std::system(command.c_str()) == 0, contents(dir / "errors"));
}
