// SPDX-License-Identifier: Apache-2.0
// Exported files in ONNX Runtime and in Python's torch (run_export.py), and reading weights from ONNX files.
#include "programs.hpp"

#include <torch/script.h>

#include "checkpoint/folded_norms.hpp"
#include "models.hpp"
#include "run/state.hpp"
#include "tools/onnx_run.hpp"
#include "tools/torchscript.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Returns a Python that has the modules of run_export.py, or "" if none is found.
const std::string& python_for_export() {
  static const std::string found = python_with("onnxruntime, cv2");
  return found;
}
#define ONNXRUNTIME_TEST(name) TEST_CASE(name* doctest::skip(python_for_export().empty()))

void run_python(const TempDir& dir, const std::string& arguments) {
  const Outcome o =
      shell(dir, concat("'", python_for_export(), "' " YOLOX_SOURCE_DIR "/tests/run_export.py ", arguments));
  REQUIRE_MESSAGE(o.code == 0, arguments << "\n" << o.out << o.err);
}

// Runs an exported file on each batch. Returns the outputs as tensors [rows, columns].
std::vector<Tensor> outputs_in_python(const TempDir& dir, const std::string& file,
                                      const std::vector<Tensor>& batches, int64_t columns) {
  std::string jobs;
  const auto name = [](size_t i, const char* end) { return concat("batch", i, ".", end); };
  for (size_t i = 0; i < batches.size(); ++i) {
    const Tensor x = batches[i].contiguous();
    write_text(dir / name(i, "in"), std::string(static_cast<const char*>(x.data_ptr()), x.nbytes()));
    jobs += concat(" ", name(i, "in"), ":", x.size(0), ",", x.size(2), ",", x.size(3), ":", name(i, "out"));
  }
  run_python(dir, concat("tensors ", file, jobs));
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < batches.size(); ++i) {
    const std::string bytes = contents(dir / name(i, "out"));
    Tensor y = torch::empty({int64_t(bytes.size() / 4)});
    std::memcpy(y.data_ptr(), bytes.data(), bytes.size());
    outputs.push_back(y.view({-1, columns}));
  }
  return outputs;
}

// Returns a model in evaluation mode whose batch norms are not the identity.
YOLOX random_model(const std::string& name, int classes) {
  torch::manual_seed(3);
  YOLOX model = make_model(name, classes);
  const torch::NoGradGuard no_grad;
  for (const auto& m : model->modules()) {
    if (auto* bn = m->as<nn::BatchNorm2d>()) {
      bn->weight.uniform_(1, 2);
      bn->bias.normal_(0, 0.3);
      bn->running_mean.normal_(0, 0.3);
      bn->running_var.uniform_(0.5, 1.5);
    }
  }
  // These biases give high and low scores, all classes, and overlapping boxes.
  auto& head = *model->head->as<YOLOXHead>();
  for (const auto& pred : *head.reg_preds) pred->as<nn::Conv2d>()->bias.slice(0, 2, 4).fill_(1.2);
  for (auto* preds : {&head.cls_preds, &head.obj_preds})
    for (const auto& pred : **preds) pred->as<nn::Conv2d>()->bias.normal_(0, 1);
  model->eval();
  return model;
}

Tensor decoded(YOLOX& model, const Tensor& x) {
  const torch::NoGradGuard no_grad;
  return decode(model(x), x.size(2), x.size(3));
}
// Returns the maximum of |got - want| / max(1, |want|).
double max_error(const Tensor& got, const Tensor& want) {
  const Tensor w = want.reshape(got.sizes());
  return ((got - w).abs() / w.abs().clamp_min(1)).max().item<double>();
}
// Returns the same for detections [D, 7], in any order, because nearly equal scores may swap places.
double max_detection_error(const Tensor& got, const Tensor& want) {
  if (want.size(0) == 0) return 0;
  const Tensor w = want.unsqueeze(1), apart = (got.unsqueeze(0) - w).abs() / w.abs().clamp_min(1);
  const Tensor worse = (got.slice(0, 1).select(1, 0) < got.slice(0, 0, -1).select(1, 0)) |
                       ((got.slice(0, 1).select(1, 0) == got.slice(0, 0, -1).select(1, 0)) &
                        (got.slice(0, 1).select(1, 5) > got.slice(0, 0, -1).select(1, 5)));
  CHECK_FALSE(worse.any().item<bool>());  // sorted by image, then by descending score
  return std::get<0>(apart.amax(2).min(1)).max().item<double>();
}
// Returns the detections of postprocess() in the format of an exported file, [D, 7].
Tensor detections_of(const Tensor& rows, double conf, double iou) {
  std::vector<Tensor> all{torch::zeros({0, 7})};
  const auto found = postprocess(rows, conf, iou);
  for (size_t b = 0; b < found.size(); ++b)
    all.push_back(
        torch::cat({torch::full({found[b].size(0), 1}, double(b)), found[b].slice(1, 0, 4),
                    (found[b].select(1, 4) * found[b].select(1, 5)).unsqueeze(1), found[b].slice(1, 6)},
                   1));
  return torch::cat(all);
}

Tensor random_images(int64_t batch, int64_t height, int64_t width) {
  return torch::rand({batch, 3, height, width}) * 255;
}

}  // namespace

ONNXRUNTIME_TEST("onnx: ONNX Runtime computes the outputs of the model, for all six model sizes" *
                 starts_programs) {
  TempDir dir;
  for (const std::string name : {"yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x"}) {
    CAPTURE(name);
    YOLOX model = random_model(name, 3);
    save_onnx(to_onnx(model, {64, 96}, {}), dir / "m.onnx");
    const Tensor x = random_images(1, 64, 96), want = decoded(model, x);
    CHECK(want.slice(-1, 4).std().item<double>() > 0.05);
    CHECK(max_error(outputs_in_python(dir, "m.onnx", {x}, 8)[0], want) < 1e-3);
  }
}

TEST_CASE(
    "onnx: files of all export options compute the outputs of the model, for several batch and input sizes" *
    starts_programs) {
  TempDir dir;
  YOLOX model = random_model("yolox-nano", 4);
  const std::vector<Tensor> batches{random_images(1, 64, 64), random_images(3, 96, 160)};
  const auto check_all = [&](const char* file, const ExportSettings& s, double bar,
                             const std::function<Tensor(const Tensor&)>& want) {
    CAPTURE(file);
    save_onnx(to_onnx(model, s, {}), dir / file);
    const onnx::Model again = read_onnx(dir / file);
    const std::vector<Tensor> inputs(batches.begin(), s.dynamic ? batches.end() : batches.begin() + 1);
    std::vector<std::vector<Tensor>> outputs(1);
    for (const Tensor& x : inputs) outputs[0].push_back(run_onnx(again, x, s.nms ? "detections" : "output"));
    if (!python_for_export().empty()) outputs.push_back(outputs_in_python(dir, file, inputs, s.nms ? 7 : 9));
    for (const auto& by : outputs)
      for (size_t i = 0; i < inputs.size(); ++i) {
        const Tensor expected = want(inputs[i]);
        REQUIRE(by[i].numel() == expected.numel());
        CHECK((s.nms ? max_detection_error(by[i], expected) : max_error(by[i], expected)) < bar);
      }
  };
  const auto rows = [&](const Tensor& x) { return decoded(model, x); };
  const auto raw = [&](const Tensor& x) {
    const torch::NoGradGuard no_grad;
    const Predictions p = model(x);
    return torch::cat({p.reg, p.obj.unsqueeze(-1).sigmoid(), p.cls.sigmoid()}, -1);
  };
  ExportSettings s{64, 64};
  s.decode = false;
  check_all("raw.onnx", s, 1e-3, raw);
  s.dynamic = true;
  check_all("raw_any.onnx", s, 1e-3, raw);
  s.decode = true;
  check_all("any.onnx", s, 1e-3, rows);
  s.half = true;
  check_all("half.onnx", s, 0.2, rows);
  CHECK(fs::file_size(dir / "half.onnx") < 0.6 * double(fs::file_size(dir / "any.onnx")));
  s.half = false;
  s.nms = true;
  // Some, all and none of the scores reach the threshold. Boxes of the same class overlap.
  for (const double conf : {0.45, 0.0, 1.0}) {
    s.conf = conf;
    s.iou = 0.3;
    const Tensor expected = detections_of(rows(batches[1]), s.conf, s.iou);
    CHECK((expected.size(0) > 20) == (conf < 1));
    CHECK(expected.size(0) < 3 * 315 * 2 / 3);
    check_all("nms.onnx", s, 1e-3, [&](const Tensor& x) { return detections_of(rows(x), s.conf, s.iou); });
  }
  s.dynamic = false;
  s.conf = 0.3;
  check_all("nms_one.onnx", s, 1e-3, [&](const Tensor& x) { return detections_of(rows(x), s.conf, s.iou); });
}

TEST_CASE("torchscript: any batch and input size; NMS in the graph equals postprocess()") {
  YOLOX model = random_model("yolox-nano", 4);
  ExportSettings s;
  s.nms = true;
  s.conf = 0;
  s.iou = 0.1;  // so that boxes of different classes overlap too
  std::vector<Tensor> batches{random_images(1, 64, 64), random_images(3, 96, 160)}, rows;
  for (const Tensor& x : batches) rows.push_back(decoded(model, x));
  auto module = to_torchscript(model, s);
  for (size_t i = 0; i < batches.size(); ++i) {
    CHECK(max_error(module.run_method("rows", batches[i]).toTensor(), rows[i]) < 1e-5);
    const Tensor found = module.forward({batches[i]}).toTensor(),
                 want = detections_of(rows[i], s.conf, s.iou);
    REQUIRE(found.sizes() == want.sizes());
    CHECK(want.size(0) < rows[i].size(0) * rows[i].size(1));
    int64_t of_any_class = 0;
    for (const Tensor& d : postprocess(rows[i], s.conf, s.iou, /*agnostic=*/true)) of_any_class += d.size(0);
    CHECK(want.size(0) > of_any_class);
    CHECK(max_detection_error(found, want) < 1e-5);
  }
  CHECK(module.forward({torch::full({1, 3, 32, 32}, NAN)}).toTensor().sizes() == c10::IntArrayRef{0, 7});
}

// ---- reading weights from ONNX files

TEST_CASE("onnx weights: weights are read from our own export, under any tensor names") {
  TempDir dir;
  for (const std::string name : {"yolox-nano", "yolox-m"}) {
    CAPTURE(name);
    YOLOX model = random_model(name, 4);
    const Tensor x = random_images(1, 64, 64), want = decoded(model, x);
    ExportSettings s;
    s.dynamic = s.nms = true;
    const Metadata about = {
        {"model", name}, {"classes", "a\nb\nc\nd"}, {"size", "96x64"}, {"channel_order", "RGB"}};
    onnx::Model file = to_onnx(model, s, about);
    save_onnx(file, dir / "named.onnx");
    auto loaded = load_model(dir / "named.onnx", "", "auto", torch::kCPU);
    CHECK(loaded.info.model == name);
    CHECK(loaded.info.classes == std::vector<std::string>{"a", "b", "c", "d"});
    CHECK(loaded.info.height == 96);
    CHECK(loaded.info.width == 64);
    CHECK(loaded.info.legacy_preproc);
    CHECK(loaded.report == "");
    CHECK(max_error(decoded(loaded.model, x), want) < 1e-3);

    // As other exporters write it: numbered names, a shared tensor behind Identity, no metadata.
    auto& graph = *file.mutable_graph();
    std::map<std::string, std::string> names;
    for (auto& t : *graph.mutable_initializer()) {
      names[t.name()] = concat("onnx::Conv_", names.size());
      t.set_name(names[t.name()]);
    }
    for (auto& node : *graph.mutable_node())
      for (auto& input : *node.mutable_input())
        if (names.count(input)) input = names[input];
    for (auto& node : *graph.mutable_node()) {
      if (node.op_type() != "Conv") continue;
      onnx::Node once;
      once.set_op_type("Identity");
      once.add_input(node.input(2));
      once.add_output("stored once");
      node.set_input(2, once.output(0));
      *graph.add_node() = once;
      break;
    }
    file.clear_metadata_props();
    save_onnx(file, dir / "numbered.onnx");
    loaded = load_model(dir / "numbered.onnx", "", "auto", torch::kCPU);
    CHECK(loaded.info.classes.empty());
    CHECK_FALSE(loaded.info.legacy_preproc);
    CHECK(max_error(decoded(loaded.model, x), want) < 1e-3);
  }
}

namespace {

onnx::Node& node_of(onnx::Model& file, const std::string& name) {
  for (auto& node : *file.mutable_graph()->mutable_node())
    if (node.name() == name) return node;
  throw std::runtime_error("no node " + name);
}
onnx::Tensor& tensor_of(onnx::Model& file, const std::string& name) {
  for (auto& t : *file.mutable_graph()->mutable_initializer())
    if (t.name() == name) return t;
  throw std::runtime_error("no tensor " + name);
}

}  // namespace

TEST_CASE("onnx weights: unfolded batch norms, float16 and float_data are read") {
  YOLOX model = random_model("yolox-nano", 2);
  const auto plain = to_onnx(model, {}, {});
  const auto wanted = find_weights(weights_from_onnx(plain, "plain"), "plain");
  const std::string base = "backbone.backbone.dark2.0.dconv.";
  auto file = plain;

  // a BatchNormalization node after the convolution, with another epsilon
  auto& graph = *file.mutable_graph();
  const int64_t c = 16;
  const Tensor gamma = torch::rand({c}) + 1, beta = torch::rand({c}), mean = torch::rand({c}),
               var = torch::rand({c}) + 1;
  const auto add = [&](const char* name, const Tensor& t) {
    auto& to = *graph.add_initializer();
    to.set_name(name);
    to.set_data_type(onnx::Tensor::FLOAT);
    to.add_dims(c);
    for (int64_t i = 0; i < c; ++i) to.add_float_data(t[i].item<float>());
  };
  add("gamma", gamma);
  add("beta", beta);
  add("mean", mean);
  add("var", var);
  node_of(file, base + "conv").set_output(0, "before");
  auto* norm = graph.add_node();
  norm->set_op_type("BatchNormalization");
  for (const char* input : {"before", "gamma", "beta", "mean", "var"}) norm->add_input(input);
  norm->add_output(base + "conv");
  auto& eps = *norm->add_attribute();
  eps.set_name("epsilon");
  eps.set_f(0.01f);
  eps.set_type(onnx::Attribute::FLOAT);
  int at = 0;
  while (graph.node(at).name() != base + "conv") ++at;
  for (int i = graph.node_size() - 1; i > at + 1; --i) graph.mutable_node()->SwapElements(i, i - 1);
  const auto read = find_weights(weights_from_onnx(file, "f"), "f");
  const auto entry = [&](const auto& dict, const std::string& key) { return dict.at(key).toTensor(); };
  CHECK(torch::equal(entry(read, base + "conv.weight"), entry(wanted, base + "conv.weight")));
  // The convolution has a bias too: BN(x + bias).
  const Tensor x = torch::rand({c}), bias = entry(wanted, base + "bn.bias");
  const Tensor in_file = (x + bias - mean) / (var + 0.01).sqrt() * gamma + beta;
  const Tensor ours = (x - entry(read, base + "bn.running_mean")) /
                          (entry(read, base + "bn.running_var") + 1e-3).sqrt() *
                          entry(read, base + "bn.weight") +
                      entry(read, base + "bn.bias");
  CHECK(torch::allclose(in_file, ours, 1e-5, 1e-6));

  // A folded batch norm only adds the bias. Without a bias it is exactly the identity.
  nn::BatchNorm2d bn(nn::BatchNorm2dOptions(c).eps(1e-3));
  bn->eval();
  bn->running_var.copy_(entry(wanted, base + "bn.running_var"));
  const Tensor image = torch::randn({1, c, 4, 4});
  CHECK(torch::equal(bn(image), image));

  ExportSettings half;
  half.half = true;
  const auto rounded_weights = find_weights(weights_from_onnx(to_onnx(model, half, {}), "h"), "h");
  for (const auto& e : wanted)
    CHECK(torch::allclose(entry(rounded_weights, e.key().toStringRef()), e.value().toTensor(), 1e-3, 1e-4));
}

TEST_CASE("onnx weights: a file whose weights cannot be matched is refused with the reason") {
  TempDir dir;
  YOLOX model = random_model("yolox-nano", 2);
  const auto plain = to_onnx(model, {}, {});
  const auto refused = [&](const std::string& what, const std::function<void(onnx::Model&)>& change) {
    CAPTURE(what);
    onnx::Model file = plain;
    change(file);
    const std::string error = error_of([&] { weights_from_onnx(file, "bad.onnx"); });
    CHECK_MESSAGE(has(error, what), error);
    CHECK(has(error, "bad.onnx"));
  };
  const std::string csp = "backbone.backbone.dark3.1.", first = "backbone.backbone.stem.conv.conv";
  // Two convolutions of the same shape in the wrong order are detected by their connections.
  refused("other connections",
          [&](auto& f) { node_of(f, csp + "conv3.conv").set_input(0, csp + "conv2.silu"); });
  refused("use an unmodified export", [&](auto& f) {  // weight names swapped
    node_of(f, csp + "conv1.conv").set_input(1, csp + "conv2.conv.weight");
    node_of(f, csp + "conv2.conv").set_input(1, csp + "conv1.conv.weight");
  });
  refused("which no YOLOX has", [&](auto& f) { tensor_of(f, first + ".weight").set_dims(0, 17); });
  refused("convolutions, yolox-nano has 113",
          [&](auto& f) { node_of(f, csp + "conv1.conv").set_op_type("Gemm"); });
  refused("LeakyRelu", [&](auto& f) { node_of(f, csp + "conv1.sigmoid").set_op_type("LeakyRelu"); });
  refused("quantised", [&](auto& f) { tensor_of(f, csp + "conv1.conv.weight").set_name("elsewhere"); });
  refused("no convolutions", [&](auto& f) { f.mutable_graph()->clear_node(); });
  refused("use an unmodified export",
          [&](auto& f) { tensor_of(f, csp + "conv2.conv.weight").set_dims(1, 1); });
  // Swapped inputs of a Concat: the same convolutions, but other weights.
  refused("other connections", [&](auto& f) { node_of(f, csp + "cat").mutable_input()->SwapElements(0, 1); });
  // Other attributes: the same shapes, but another network.
  const auto set = [&](onnx::Model& f, const std::string& node, const char* setting, int64_t value) {
    for (auto& a : *node_of(f, node).mutable_attribute())
      if (a.name() == setting) a.has_i() ? a.set_i(value) : a.set_ints(0, value);
  };
  refused("other connections or attributes", [&](auto& f) { set(f, first, "strides", 2); });
  refused("other connections or attributes", [&](auto& f) { set(f, first, "pads", 0); });
  refused("other connections or attributes",
          [&](auto& f) { set(f, csp + "m.0.conv2.dconv.conv", "group", 1); });
  refused("other connections or attributes", [&](auto& f) { set(f, first, "dilations", 2); });
  refused("HardSwish", [&](auto& f) { node_of(f, csp + "conv1.silu").set_op_type("HardSwish"); });
  refused("Mul of a constant",
          [&](auto& f) { node_of(f, csp + "conv1.silu").set_input(1, csp + "conv1.conv.bias"); });
  // Any operation is accepted after the last convolution, because decoding and NMS differ between exporters.
  onnx::Model other_end = plain;
  node_of(other_end, "output").set_op_type("Loop");
  CHECK(error_of([&] { weights_from_onnx(other_end, "good.onnx"); }) == "");
  // Damaged and hostile files: nodes without inputs or outputs, and huge counts.
  refused("has no output", [&](auto& f) { node_of(f, csp + "conv1.conv").clear_output(); });
  refused("has no weights", [&](auto& f) { node_of(f, csp + "conv1.conv").clear_input(); });
  refused("has no weights", [&](auto& f) {
    node_of(f, first).mutable_input()->RemoveLast();
    node_of(f, first).mutable_input()->RemoveLast();
  });
  refused("do not depend on the input", [&](auto& f) { f.mutable_graph()->clear_input(); });
  refused("more than 200000 edges", [&](auto& f) {
    auto& cat = node_of(f, csp + "cat");
    for (int i = 0; i < 300000; ++i) cat.add_input(csp + "conv2.silu");
  });
  // Each Add sums all earlier outputs, so that the last one would depend on every convolution.
  refused("Add before the convolution", [&](auto& f) {
    onnx::Graph graph = f.graph();
    graph.clear_node();
    std::string sum = "images";
    for (const auto& node : f.graph().node()) {
      auto& copy = *graph.add_node() = node;
      if (node.op_type() != "Conv") continue;
      copy.set_input(0, sum);
      auto& add = *graph.add_node();
      add.set_op_type("Add");
      add.add_input(sum);
      add.add_input(node.output(0));
      add.add_output(sum = node.name() + ".sum");
    }
    *f.mutable_graph() = graph;
  });
  // Damages one tensor. The message must contain its name.
  const auto damaged = [&](const char* what, const std::function<void(onnx::Tensor&)>& change) {
    onnx::Model file = plain;
    change(tensor_of(file, csp + "conv1.conv.weight"));
    const std::string error = error_of([&] { weights_from_onnx(file, "bad.onnx"); });
    CHECK_MESSAGE((has(error, what) && has(error, csp + "conv1.conv.weight") && has(error, "bad.onnx")),
                  error);
  };
  damaged("external data", [](auto& t) { t.set_data_location(1); });
  damaged("bytes of values", [](auto& t) { t.mutable_raw_data()->resize(8); });
  damaged("ONNX type 3", [](auto& t) { t.set_data_type(3); });
  // Invalid shapes: negative, overflowing, too many dimensions.
  onnx::Tensor odd;
  odd.set_name("odd");
  odd.set_data_type(onnx::Tensor::FLOAT);
  odd.set_raw_data("");
  for (const Ints& sides :
       {Ints{-1, 0}, Ints{0, -1}, Ints{int64_t{1} << 32, 0}, Ints{int64_t{1} << 31, 1 << 30, 4},
        Ints{-(int64_t{1} << 31), int64_t{1} << 31, int64_t{1} << 31}, Ints(9, 0)}) {
    odd.mutable_dims()->Assign(sides.begin(), sides.end());
    CHECK_MESSAGE(has(error_of([&] { to_torch(odd, "bad.onnx"); }), "bad.onnx: odd has the shape"),
                  c10::IntArrayRef(sides));
  }

  save_onnx(plain, dir / "whole.onnx");
  const std::string bytes = contents(dir / "whole.onnx");
  write_text(dir / "cut.onnx", bytes.substr(0, bytes.size() / 2));
  write_text(dir / "empty.onnx");
  write_text(dir / "text.onnx", "these are words, not weights");
  for (const std::string name : {"cut.onnx", "empty.onnx", "text.onnx", "absent.onnx"}) {
    const std::string error = error_of([&] { read_weights(dir / name); });
    CHECK_MESSAGE(has(error, name), error);
    CHECK(has(error, name == "absent.onnx" ? "check the path" : "is not an ONNX file, or is cut off"));
  }
}

SHARED_TEST("onnx weights: the network from the official file computes the recorded output") {
  for (const std::string name : {"yolox_nano_v011_bgr255", "yolox_nano_v010_legacy_rgbnorm"}) {
    auto loaded = load_model(shared("data/weights/" + name + ".onnx"), "", "auto", torch::kCPU);
    CHECK(loaded.info.model == "yolox-nano");
    CHECK(loaded.model->num_classes == 80);
    if (name != "yolox_nano_v011_bgr255") continue;
    const auto floats = [](const std::string& path, const Ints& shape) {
      const std::string npy = contents(shared("data/weights/" + path));
      Tensor t = torch::empty(shape);
      std::memcpy(t.data_ptr(), npy.data() + npy.size() - t.nbytes(), t.nbytes());
      return t;
    };
    const Tensor x = floats("dog_input_1x3x416x416_f32.npy", {1, 3, 416, 416});
    const torch::NoGradGuard no_grad;
    const Predictions p = loaded.model(x);
    const Tensor out = torch::cat({p.reg, p.obj.unsqueeze(-1).sigmoid(), p.cls.sigmoid()}, -1);
    CHECK(max_error(out, floats("dog_output_onnx_3549x85_f32.npy", {1, 3549, 85})) < 2e-4);
  }
}

TEST_CASE("onnx weights: folded batch norms get statistics before training; the output stays the same") {
  const Dataset data = shapes_dataset(0, 0, 24);
  YOLOX source = random_model("yolox-nano", 2), model = make_model("yolox-nano", 2);
  ExportSettings s;
  s.dynamic = true;
  load_state_dict(*model, find_weights(weights_from_onnx(to_onnx(source, s, {}), "f"), "f"), "f");
  model->eval();
  Tensor images = torch::empty({16, 64, 64, 3}, torch::kByte);
  for (int64_t i = 0; i < 16; ++i) {
    const Image boxed = letterbox(read_image(data, i), {64, 64}).image;
    std::memcpy(images[i].data_ptr(), boxed.data, size_t(images[i].numel()));
  }
  const Tensor x = preprocess(images, false), want = decoded(source, x);
  const auto in_training = [&] {  // with batch statistics, here of nearly the same images
    YOLOX other = make_model("yolox-nano", 2);
    load_state_dict(*other, to_dict(state_dict(*model)), "copy");
    other->train();
    return (decoded(other, x) - want).slice(-1, 4).abs().mean().item<double>();
  };
  CHECK(max_error(decoded(model, x), want) < 1e-3);
  const double before = in_training();
  CHECK(restore_folded_norms(model, data, {64, 64}, false, 1, 16) == 16);
  CHECK(max_error(decoded(model, x), want) < 1e-3);
  CHECK(in_training() < 1e-3);
  CHECK(before > 0.02);
  CHECK(restore_folded_norms(model, data, {64, 64}, false, 1) == 0);
  CHECK(restore_folded_norms(source, data, {64, 64}, false, 1) == 0);
}

TEST_CASE("onnx weights: eval, demo and train start from an ONNX file" * starts_programs) {
  const TempDir& dir = trained().dir;
  succeed(dir, "export", "--weights a/best.pth --out start.onnx --dynamic");
  succeed(dir, "eval", "--data data --weights a/best.pth --bs 2 --conf 0 --nms 0.9 --json p.json");
  succeed(dir, "eval", "--data data --weights start.onnx --bs 2 --conf 0 --nms 0.9 --json o.json");
  CHECK(json_number(dir / "p.json", "AP") > 0);
  CHECK(json_number(dir / "o.json", "AP") ==
        doctest::Approx(json_number(dir / "p.json", "AP")).epsilon(1e-3));
  CHECK(has(succeed(dir, "demo", "--source shapes --max-images 1 --weights start.onnx --save o"),
            "o/shapes_1"));
  const std::string log =
      succeed(dir, "train", kTrain + "--weights start.onnx --out from_onnx --max-iters 1");
  CHECK(has(log, "loaded 642 of 642 tensors"));
  CHECK(has(log, "computed new statistics from 8 images"));
}

// ---- the program

TEST_CASE("export: the metadata of an ONNX file describes the model and its input" * starts_programs) {
  const TempDir& dir = trained().dir;
  const std::string printed = succeed(dir, "export", "--weights a/last.pth --out model.onnx");
  CHECK(has(printed,
            "model.onnx: yolox-nano, 7 classes, input [1, 3, 64, 64] BGR 0..255, output [B, A, 12] (cx"));
  CHECK(has(printed, "largest difference from the model on a drawn scene: boxes "));
  const onnx::Model file = read_onnx(dir / "model.onnx");
  std::map<std::string, std::string> about;
  for (const auto& e : file.metadata_props()) about[e.key()] = e.value();
  CHECK(has(about["classes"], "circle\nring\n"));
  CHECK(about["size"] == "64x64");
  CHECK(about["channel_order"] == "BGR");
  CHECK(about["value_range"] == "255");
  CHECK(about["letterbox"] == "top left, border 114");
  CHECK(about["model"] == "yolox-nano");
  CHECK(about["version"] == git_revision());
  CHECK(file.graph().input(0).name() == "images");
  CHECK(file.opset_import(0).version() == 17);
  succeed(dir, "export",
          "--weights a/last.pth --out nms.onnx --nms --fp16 --dynamic --conf 0 --image '" +
              (dir / "data/train/shapes_1.png") + "'");
  CHECK(read_onnx(dir / "nms.onnx").graph().output(0).name() == "detections");
}

TEST_CASE("export: bad flags and files are refused" * starts_programs) {
  const TempDir& dir = trained().dir;
  const auto refused = [&](const std::string& arguments, int code, const std::string& what) {
    const Outcome o = run(dir, "export", "--weights a/last.pth " + arguments);
    CHECK_MESSAGE(o.code == code, arguments << "\n" << o.out << o.err);
    CHECK_MESSAGE(has(o.err, what), o.err);
    CHECK(lines_of(o.err).size() == (has(o.err, "\nusage: ") ? 2 : 1));
  };
  refused("--out m.onnx --nms --no-decode", 2, "--no-decode");
  refused("--out m.onnx --conf 0.5", 2, "--conf needs --nms");
  refused("--out m.onnx --nms --conf 2", 2, "--conf must be in 0..1");
  refused("--out m.onnx --nms --nms-iou 0", 2, "--nms-iou");
  for (const char* name : {"m.trt", "m.engine", "m"})
    refused(concat("--out ", name), 2, concat("--out ", name, ": the extension selects the format"));
  refused("--out m.onnx --image absent.jpg", 1, "absent.jpg");
  refused("--out nowhere/m.onnx", 1, "nowhere/m.onnx");
  refused("--out /dev/full/m.onnx", 1, "/dev/full/m.onnx");
  // weights above the largest float16
  auto file = read_pth(dir / "a/last.pth").toGenericDict();
  find_weights(file, "a").at("backbone.lateral_conv0.bn.bias").toTensor().fill_(1e5);
  write_pth(dir / "large.pth", file);
  const Outcome o = run(dir, "export", "--weights large.pth --out large.onnx --fp16");
  CHECK(o.code == 1);
  CHECK(has(o.err, "leave --fp16 out"));
}

TEST_CASE("export: a file that differs from the model is not kept; an existing file stays" *
          starts_programs) {
  const TempDir& dir = trained().dir;
  // The weights fit in float16, but the activations overflow.
  auto file = read_pth(dir / "a/last.pth").toGenericDict();
  find_weights(file, "a").at("backbone.lateral_conv0.bn.bias").toTensor().fill_(6e4);
  write_pth(dir / "overflowing.pth", file);
  for (const std::string name : {"kept.onnx", "kept.ts"}) {
    write_text(dir / name, "a good one");
    const Outcome o = run(dir, "export", "--weights overflowing.pth --fp16 --out " + name);
    CHECK(o.code == 1);
    CHECK_MESSAGE(has(o.err, name + " differs from the model"), o.err);
    CHECK(lines_of(o.err).size() == 1);
    CHECK(contents(dir / name) == "a good one");
    const Outcome full = run_with_full_disk(dir, "export", "--weights a/last.pth --out " + name, 1000);
    CHECK(full.code == 1);
    CHECK_MESSAGE(has(full.err, "disk space"), full.err);
    CHECK(lines_of(full.err).size() == 1);
    CHECK(contents(dir / name) == "a good one");
    succeed(dir, "export", "--weights a/last.pth --out " + name);
    CHECK(fs::file_size(dir / name) > 1000000);
  }
  for (const auto& entry : fs::directory_iterator(dir.path))
    CHECK_FALSE(has(entry.path().filename().string(), ".tmp"));
}

// ---- boxes and AP of exported files

namespace {

// Detections by image, in descending order of score.
std::map<int64_t, std::vector<Detection>> by_image(const std::string& path) {
  std::map<int64_t, std::vector<Detection>> images;
  for (const Detection& d : read_detections(path)) images[d.image_id].push_back(d);
  for (auto& [id, list] : images)
    std::stable_sort(list.begin(), list.end(),
                     [](const auto& a, const auto& b) { return a.score > b.score; });
  return images;
}
// Returns the fraction of the boxes of `a` with at least this score that `b` contains too. Two boxes match if
// their class is equal and their score and coordinates are nearly equal.
double shared_boxes(const std::string& a, const std::string& b, double score) {
  const auto in_b = by_image(b);
  int64_t all = 0, same = 0;
  for (const auto& [id, list] : by_image(a))
    for (const Detection& d : list) {
      if (d.score < score) break;
      ++all;
      const auto close = [&](double x, double y) { return std::abs(x - y) < 0.1 + 1e-3 * (d.w + d.h); };
      if (in_b.count(id))
        same += std::any_of(in_b.at(id).begin(), in_b.at(id).end(), [&](const Detection& e) {
          return e.category_id == d.category_id && std::abs(e.score - d.score) < 1e-3 && close(e.x, d.x) &&
                 close(e.y, d.y) && close(e.w, d.w) && close(e.h, d.h);
        });
    }
  CHECK(all > 100);
  return double(same) / double(all);
}

}  // namespace

TEST_CASE(
    "export: ONNX Runtime and TorchScript in Python reach the AP of eval, with the boxes of eval and demo" *
    doctest::skip(!shared_exists() || python_for_export().empty()) * starts_programs) {
  TempDir dir;
  const std::string weights = " --weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "' ",
                    folder = shared("data/coco_val2017_union"),
                    truth = folder + "/annotations/instances_val2017_union.json";
  succeed(dir, "eval", "--data '" + folder + "' --save-dt here.json --json here_ap.json" + weights);
  const double ap = json_number(dir / "here_ap.json", "AP");
  CHECK(std::abs(ap - 0.2839) < 5e-4);
  std::vector<std::string> flags{"--out m.onnx"};
  if (!python_with("onnxruntime, cv2, torch").empty()) flags.push_back("--out m.ts");
  for (const std::string& f : flags) {
    CAPTURE(f);
    const std::string file = f.substr(6, f.find(' ', 6) - 6);
    succeed(dir, "export", f + weights);
    run_python(dir, concat("detect ", file, " '", truth, "' '", folder, "/val2017' there.json 0.01 0.65"));
    succeed(dir, "eval", "--gt '" + truth + "' --dt there.json --json there_ap.json");
    MESSAGE(file << ": AP " << json_number(dir / "there_ap.json", "AP") << ", eval " << ap);
    CHECK(std::abs(json_number(dir / "there_ap.json", "AP") - ap) < 5e-4);
    CHECK(shared_boxes(dir / "here.json", dir / "there.json", 0.1) > 0.995);
    CHECK(shared_boxes(dir / "there.json", dir / "here.json", 0.1) > 0.995);
  }
  // With default settings demo draws the detections of a file with NMS.
  fs::create_directories(dir / "one");
  fs::copy(shared("data/weights/dog.jpg"), dir / "one/dog.jpg");
  CocoDataset dog = read_coco(truth);
  dog.images.resize(1);
  dog.images[0].file_name = "dog.jpg";
  dog.annotations.clear();
  write_coco(dir / "dog.json", dog);
  succeed(dir, "export", "--out nms.onnx --nms --image one/dog.jpg" + weights);
  run_python(dir, "detect nms.onnx dog.json one dog_boxes.json 0 0");
  std::map<std::string, int> counts;
  for (const Detection& d : read_detections(dir / "dog_boxes.json"))
    for (const auto& c : dog.categories)
      if (c.id == d.category_id) ++counts[c.name];
  std::string want = "drawn/dog.jpg:";
  for (const auto& [name, count] : counts) want += concat(want.back() == ':' ? " " : ", ", count, " ", name);
  CHECK(counts.at("dog") == 1);
  CHECK(lines_of(succeed(dir, "demo", "--source one --save drawn" + weights))[0] == want);
}
