// SPDX-License-Identifier: Apache-2.0
// Exported files in ONNX Runtime (check_onnx.py) and in Python's torch (run_export.py).
#include "programs.hpp"

#include <torch/script.h>

#include "checkpoint/onnx.hpp"
#include "data/shapes.hpp"
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

}  // namespace

PROGRAM_TEST("export: each file has the outputs of the model, for all six sizes and all options") {
  TempDir dir;
  const auto check_export = [&](const std::string& name, const std::string& flags) {
    auto file = empty_dict();
    file.insert("model", to_dict(state_dict(*random_model(name, 4))));
    write_pth(dir / "m.pth", file);
    const std::string said = succeed(dir, "export", "--weights m.pth --size 64x96 --out m.onnx " + flags);
    CHECK_HAS(said, "checked against the model on a drawn scene: max difference boxes ");
  };
  // With NMS, some, all and none of the scores reach the threshold.
  std::vector<std::string> all{"--out m.ts", "--out m.ts --no-decode"};
  if (!python_for_export().empty()) {
    for (const char* size : {"tiny", "s", "m", "l", "x"}) check_export(concat("yolox-", size), "");
    all.insert(all.end(),
               {"", "--no-decode", "--no-decode --dynamic", "--dynamic", "--nms --conf 0.45 --nms-iou 0.3",
                "--nms --dynamic --conf 0.45 --nms-iou 0.3", "--nms --dynamic --conf 0", "--nms --conf 1"});
  }
  for (const std::string& flags : all) check_export("yolox-nano", flags);
  const Outcome without = shell(dir, "PYTHON=none $YOLOX_PROGRAMS/export --weights m.pth --out m.onnx");
  CHECK(without.code == 0);
  CHECK_HAS(without.out, "\nnot checked: no Python with onnxruntime; see docs/export.md");
}

PROGRAM_TEST("export: the metadata of a file describes the model and its input; boxes are decoded") {
  const TempDir& dir = trained().dir;
  succeed(dir, "export", "--weights a/last.pth --out model.ts");
  torch::jit::ExtraFilesMap extra{{"classes", ""}, {"channel_order", ""}};
  torch::jit::load(dir / "model.ts", torch::kCPU, extra);
  CHECK(has(extra["classes"], "circle\ntriangle\n"));
  CHECK(extra["channel_order"] == "BGR");
  const std::string printed = succeed(dir, "export", "--weights a/last.pth --out model.onnx");
  CHECK(has(printed,
            "model.onnx: yolox-nano, 4 classes, input [1, 3, 64, 64] BGR 0..255, output [B, A, 9] (cx"));
  onnx::Model file;
  REQUIRE(file.ParseFromString(contents(dir / "model.onnx")));
  std::map<std::string, std::string> about;
  for (const auto& e : file.metadata_props()) about[e.key()] = e.value();
  CHECK(has(about["classes"], "circle\ntriangle\n"));
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
    check_refusal(dir, "export", "--weights a/last.pth " + arguments, code, what);
  };
  refused("--out m.onnx --nms --no-decode", 2, "--no-decode");
  refused("--out m.ts --nms", 2, "--nms is for ONNX");
  refused("--out m.onnx --conf 0.5", 2, "--conf needs --nms");
  refused("--out m.onnx --nms --conf 2", 2, "--conf must be in 0..1");
  for (const char* name : {"m.trt", "m.engine", "m"})
    refused(concat("--out ", name), 2, concat("--out ", name, ": the extension selects the format"));
  refused("--out nowhere/m.onnx", 1, "nowhere/m.onnx");
  refused("--out /dev/full/m.onnx", 1, "/dev/full/m.onnx");
}

PROGRAM_TEST("export: a file that differs from the model is not kept; an existing file stays") {
  const TempDir& dir = trained().dir;
  // Activations overflow, so that the output of the TorchScript file is NaN.
  auto file = read_pth(dir / "a/last.pth").toGenericDict();
  find_weights(file, "a").at("backbone.lateral_conv0.bn.weight").toTensor().fill_(3e38);
  write_pth(dir / "overflowing.pth", file);
  // Stands for an ONNX Runtime that computes something else: 84 rows of zeros.
  const size_t bytes = 84 * (5 + shapes_classes().size()) * sizeof(float);
  write_text(dir / "python", concat("#!/bin/sh\n[ \"$1\" = -c ] || head -c ", bytes, " /dev/zero >\"$5\"\n"));
  fs::permissions(dir / "python", fs::perms::owner_all);
  for (const auto& [name, weights] :
       {std::pair<std::string, std::string>("kept.onnx", "a/last.pth"), {"kept.ts", "overflowing.pth"}}) {
    write_text(dir / name, "a good one");
    const Outcome o =
        shell(dir, concat("PYTHON=./python $YOLOX_PROGRAMS/export --weights ", weights, " --out ", name));
    CHECK(o.code == 1);
    CHECK_HAS(o.err, name + " differs from the model");
    CHECK(lines_of(o.err).size() == 1);
    CHECK(contents(dir / name) == "a good one");
    const Outcome full = run_with_full_disk(dir, "export", "--weights a/last.pth --out " + name, 1000);
    CHECK(full.code == 1);
    CHECK_HAS(full.err, "disk space");
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
  std::vector<std::string> flags{"--out m.onnx --nms --conf 0.01 --nms-iou 0.65"};
  if (!cached_python_with("onnxruntime, cv2, torch").empty()) flags.push_back("--out m.ts");
  for (const std::string& f : flags) {
    CAPTURE(f);
    const std::string file = f.substr(6, f.find(' ', 6) - 6);
    succeed(dir, "export", f + weights);
    const Outcome o = shell(dir, concat(python_for_export(), " " YOLOX_SOURCE_DIR "/tests/run_export.py ",
                                        file, " '", truth, "' '", folder, "/val2017' there.json"));
    REQUIRE_MESSAGE(o.code == 0, o.err);
    succeed(dir, "eval", "--gt '" + truth + "' --dt there.json --json there_ap.json");
    MESSAGE(file << ": AP " << json_number(dir / "there_ap.json", "AP") << ", eval " << ap);
    CHECK(std::abs(json_number(dir / "there_ap.json", "AP") - ap) < 5e-4);
  }
}
