// SPDX-License-Identifier: Apache-2.0
// Exported files in ONNX Runtime (check_onnx.py) and in Python's torch (run_export.py).
#include "programs.hpp"

#include <torch/script.h>

#include "checkpoint/onnx.hpp"
#include "models.hpp"
#include "onnx.pb.h"
#include "run/saving.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Returns a Python that has the modules of run_export.py, or "" if none is found.
const std::string& python_for_export() {
  static const std::string found = cached_python_with("onnxruntime, cv2");
  return found;
}

void run_python(const TempDir& dir, const std::string& arguments) {
  const Outcome o = shell(dir, concat(python_for_export(), " " YOLOX_SOURCE_DIR "/", arguments));
  REQUIRE_MESSAGE(o.code == 0, arguments << "\n" << o.out << o.err);
}

onnx::Model read_onnx(const std::string& path) {
  onnx::Model model;
  REQUIRE(model.ParseFromString(contents(path)));
  return model;
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

PROGRAM_TEST(
    "export: each file has the outputs of the model, for all six sizes and all options; without ONNX Runtime "
    "it "
    "says how to check it" *
    doctest::skip(python_for_export().empty())) {
  TempDir dir;
  const auto check_export = [&](const std::string& name, const std::string& flags) {
    auto file = empty_dict();
    file.insert("model", to_dict(state_dict(*random_model(name, 4))));
    write_pth(dir / "m.pth", file);
    const std::string said = succeed(dir, "export", "--weights m.pth --size 64x96 --out m.onnx " + flags);
    CHECK_MESSAGE(has(said, "checked against the model on a drawn scene: max difference boxes "), said);
  };
  for (const char* size : {"nano", "tiny", "s", "m", "l", "x"}) check_export(concat("yolox-", size), "");
  // With NMS, some, all and none of the scores reach the threshold.
  for (const char* flags : {"--no-decode", "--no-decode --dynamic", "--dynamic",
                            "--nms --conf 0.45 --nms-iou 0.3", "--nms --dynamic --conf 0.45 --nms-iou 0.3",
                            "--nms --dynamic --conf 0", "--nms --conf 1", "--out m.ts --conf 0 --nms"})
    check_export("yolox-nano", flags);
  const Outcome without = shell(dir, "PYTHON=none $YOLOX_PROGRAMS/export --weights m.pth --out m.onnx");
  CHECK(without.code == 0);
  CHECK(has(without.out, "\nnot checked: no Python with onnxruntime; type pip install onnxruntime"));
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
  CHECK_FALSE(
      has(module.get_method("network").graph()->toString(), "aten::slice"));  // ncnn has none with steps
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

// ---- the program

PROGRAM_TEST("export: the metadata of a file describes the model and its input; boxes are decoded") {
  const TempDir& dir = trained().dir;
  succeed(dir, "export", "--weights a/last.pth --out model.ts");
  torch::jit::ExtraFilesMap extra{{"classes", ""}, {"channel_order", ""}};
  torch::jit::load(dir / "model.ts", torch::kCPU, extra);
  CHECK(has(extra["classes"], "circle\nring\n"));
  CHECK(extra["channel_order"] == "BGR");
  const std::string printed = succeed(dir, "export", "--weights a/last.pth --out model.onnx");
  CHECK(has(printed,
            "model.onnx: yolox-nano, 7 classes, input [1, 3, 64, 64] BGR 0..255, output [B, A, 12] (cx"));
  const onnx::Model file = read_onnx(dir / "model.onnx");
  std::map<std::string, std::string> about;
  for (const auto& e : file.metadata_props()) about[e.key()] = e.value();
  CHECK(has(about["classes"], "circle\nring\n"));
  for (const auto& [key, value] : {std::pair("size", "64x64"),
                                   {"channel_order", "BGR"},
                                   {"value_range", "255"},
                                   {"letterbox", "top left, border 114"},
                                   {"version", git_revision()}})
    CHECK(about[key] == value);
  CHECK(file.graph().input(0).name() == "images");
  CHECK(file.opset_import(0).version() == 17);
  for (const auto& node : file.graph().node()) CHECK(node.op_type() != "Slice");
}

PROGRAM_TEST("export: bad flags and files are refused") {
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
  for (const char* name : {"m.trt", "m.engine", "m"})
    refused(concat("--out ", name), 2, concat("--out ", name, ": the extension selects the format"));
  refused("--out nowhere/m.onnx", 1, "nowhere/m.onnx");
  refused("--out /dev/full/m.onnx", 1, "/dev/full/m.onnx");
  refused("--out m.onnx --format onnx", 2, "--format is gone: the extension of --out selects the format");
}

PROGRAM_TEST("export: a file that differs from the model is not kept; an existing file stays") {
  const TempDir& dir = trained().dir;
  // Activations overflow, so that the output of the TorchScript file is NaN.
  auto file = read_pth(dir / "a/last.pth").toGenericDict();
  find_weights(file, "a").at("backbone.lateral_conv0.bn.weight").toTensor().fill_(3e38);
  write_pth(dir / "overflowing.pth", file);
  // Stands for an ONNX Runtime that computes something else: 84 rows of 12 zeros.
  write_text(dir / "python", "#!/bin/sh\n[ \"$1\" = -c ] || head -c 4032 /dev/zero >\"$5\"\n");
  fs::permissions(dir / "python", fs::perms::owner_all);
  for (const auto& [name, weights] :
       {std::pair<std::string, std::string>("kept.onnx", "a/last.pth"), {"kept.ts", "overflowing.pth"}}) {
    write_text(dir / name, "a good one");
    const Outcome o =
        shell(dir, concat("PYTHON=./python $YOLOX_PROGRAMS/export --weights ", weights, " --out ", name));
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
  }
  for (const auto& entry : fs::directory_iterator(dir.path))
    CHECK_FALSE(has(entry.path().filename().string(), ".tmp"));
}

PROGRAM_TEST("export: ONNX Runtime and TorchScript in Python reach the AP of eval" *
             doctest::skip(!shared_exists() || python_for_export().empty())) {
  TempDir dir;
  const std::string weights = " --weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "' ",
                    folder = shared("data/coco_val2017_union"),
                    truth = folder + "/annotations/instances_val2017_union.json";
  succeed(dir, "eval", "--data '" + folder + "' --json here_ap.json" + weights);
  const double ap = json_number(dir / "here_ap.json", "AP");
  CHECK(std::abs(ap - 0.2839) < 5e-4);
  std::vector<std::string> flags{"--out m.onnx"};
  if (!cached_python_with("onnxruntime, cv2, torch").empty()) flags.push_back("--out m.ts");
  for (const std::string& f : flags) {
    CAPTURE(f);
    const std::string file = f.substr(6);
    succeed(dir, "export", f + " --nms --conf 0.01 --nms-iou 0.65" + weights);
    run_python(dir, concat("tests/run_export.py ", file, " '", truth, "' '", folder, "/val2017' there.json"));
    succeed(dir, "eval", "--gt '" + truth + "' --dt there.json --json there_ap.json");
    MESSAGE(file << ": AP " << json_number(dir / "there_ap.json", "AP") << ", eval " << ap);
    CHECK(std::abs(json_number(dir / "there_ap.json", "AP") - ap) < 5e-4);
  }
}
