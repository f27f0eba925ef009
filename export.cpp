// SPDX-License-Identifier: Apache-2.0
// ./export: writes a model as ONNX or TorchScript, reads the file again and compares its outputs with the
// outputs of the model.
#include <iostream>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "checkpoint/torchscript.hpp"
#include "data/shapes.hpp"
#include "evaluate.hpp"
#include "tools/onnx_run.hpp"

using namespace yolox;

struct Config : Flags {
  std::string weights =
      flag(weights, "Files", "weights", "", "FILE",
           "checkpoint (ours or official), or name of a model that weights/get has downloaded");
  std::string out = flag(out, "Files", "out", "", "FILE", "output file, such as model.onnx or model.ts");
  std::string format =
      flag(format, "Files", "format", "", "NAME", "onnx or torchscript [from the extension of --out]");
  std::string model = flag(model, "Model", "model", "", "NAME", model_names() + " [from the checkpoint]");
  std::string size =
      flag(size, "Model", "size", "", "N|HxW", "input size in pixels [from the checkpoint or the model]");
  bool dynamic = flag(dynamic, "Graph", "dynamic", false, "",
                      "ONNX with dynamic batch, height and width; TorchScript is always dynamic");
  bool decode = flag(
      decode, "Graph", "decode", true, "",
      "box decoding; without it, boxes are offsets and log sizes in strides, as of the official exporter");
  bool nms = flag(nms, "Graph", "nms", false, "", "include NMS in the exported graph; outputs final boxes");
  double conf = flag(conf, "Graph", "conf", 0.3, "P", "with --nms: minimum score of a detection");
  double nms_iou = flag(nms_iou, "Graph", "nms-iou", 0.45, "IOU", "with --nms: NMS IoU threshold");
  bool fp16 = flag(fp16, "Graph", "fp16", false, "",
                   "weights and computation in float16; input and output stay float32");
  std::string preproc = flag(preproc, "Model", "preproc", "auto", "auto|bgr|imagenet|legacy",
                             "pixel format: bgr = BGR 0..255; imagenet, legacy = RGB, mean/std of ImageNet, "
                             "as in YOLOX 0.1.0; auto = from the checkpoint");
  std::string image =
      flag(image, "Check", "image", "", "FILE", "image for the comparison of file and model [a drawn scene]");
};

// Returns the metadata of the exported file: classes, input size, pixel format, letterbox and output columns.
static Metadata metadata(const WeightsInfo& info, const ExportSettings& s, int classes) {
  const PixelFormat pixels = pixel_format(info.legacy_preproc);
  std::string names;
  for (const auto& name : class_names(info, classes)) names += (names.empty() ? "" : "\n") + name;
  const auto three = [](const std::array<double, 3>& v) { return concat(v[0], " ", v[1], " ", v[2]); };
  Metadata m = {
      {"model", info.model},
      {"classes", names},
      {"num_classes", concat(classes)},
      {"size", concat(s.height, "x", s.width)},
      {"channel_order", pixels.order},
      {"value_range", concat(pixels.range)},
      {"mean", three(pixels.mean)},
      {"std", three(pixels.std)},
      {"letterbox", concat("top left, border ", int(border_grey))},
      {"output", s.nms      ? "image, x1, y1, x2, y2, score, class"
                 : s.decode ? "cx, cy, w, h in pixels, objectness, class scores"
                            : "x, y from the cell and log w, log h in strides, objectness, class scores"},
      {"version", git_revision()}};
  if (s.nms) m.insert(m.end(), {{"conf", concat(s.conf)}, {"nms_iou", concat(s.iou)}});
  return m;
}

// Returns the inputs of the comparison, uint8: the letterboxed image [1, H, W, 3]. With any_size also a batch
// [2, H, W + 32, 3] of the image and its mirror image.
static std::vector<Tensor> comparison_inputs(const Image& image, const ExportSettings& s, bool any_size) {
  const auto view = [&](const Image& picture, int64_t width) {
    const Image boxed = letterbox(picture, {int(width), int(s.height)}).image;
    const Image whole = boxed.isContinuous() ? boxed : Image(boxed.clone());
    return torch::from_blob(whole.data, {1, s.height, width, 3}, torch::kByte).clone();
  };
  std::vector<Tensor> all{view(image, s.width)};
  if (!any_size) return all;
  Image mirrored;
  cv::flip(image, mirrored, 1);
  all.push_back(torch::cat({view(image, s.width + 32), view(mirrored, s.width + 32)}));
  return all;
}

// Returns the expected output of the file without NMS, [B, A, 5 + C].
static Tensor expected_rows(YOLOX& model, const Tensor& images, bool decoded) {
  const Predictions p = model(images);
  if (decoded) return decode(p, images.size(2), images.size(3));
  return torch::cat({p.reg, p.obj.unsqueeze(-1).sigmoid(), p.cls.sigmoid()}, -1);
}

// Returns |a - b|, and 0 where a and b are the same infinity.
static Tensor abs_difference(const Tensor& a, const Tensor& b) {
  return torch::where(a == b, torch::zeros_like(a), (a - b).abs());
}

// Returns the expected output of a file with NMS for `rows` [B, A, 5 + C]: detections [D, 7], columns as in
// the metadata.
static Tensor detections_of(const Tensor& rows, const ExportSettings& s) {
  std::vector<Tensor> all{torch::zeros({0, 7})};
  const auto found = postprocess(rows, s.conf, s.iou);
  for (size_t image = 0; image < found.size(); ++image) {
    const Tensor& d = found[image];
    all.push_back(torch::cat({torch::full({d.size(0), 1}, double(image)), d.slice(1, 0, 4),
                              (d.select(1, 4) * d.select(1, 5)).unsqueeze(1), d.slice(1, 6)},
                             1));
  }
  return torch::cat(all);
}

// Returns detections sorted by image, class and coordinates, because rows of equal score can be in any order.
static Tensor sorted_detections(Tensor rows) {
  for (const int64_t column : {1, 2, 3, 4, 6, 0})
    rows = rows.index_select(0, rows.select(1, column).argsort(/*stable=*/true, 0, /*descending=*/false));
  return rows;
}

// Returns the sum of |a - b|, relative to values of b above 1.
static double relative_sum(const Tensor& a, const Tensor& b) {
  return (abs_difference(a, b) / b.abs().clamp_min(1)).sum().item<double>();
}

// Sets --format from the extension of --out. Throws UsageError if a flag is invalid.
static void check_flags(Config& config) {
  combination_check(!config.out.empty(), "--out FILE is needed");
  if (config.format.empty()) {
    const std::string end = fs::path(config.out).extension().string();
    const bool torchscript = end == ".ts" || end == ".pt" || end == ".torchscript";
    usage_check(
        torchscript || end == ".onnx", "--out ", config.out,
        ": the extension selects the format (.onnx, or .ts, .pt or .torchscript for TorchScript); use one of "
        "these, or give --format");
    config.format = torchscript ? "torchscript" : "onnx";
  }
  usage_check(config.format == "onnx" || config.format == "torchscript",
              "--format must be onnx or torchscript, got '", config.format, "'");
  usage_check(config.decode || !config.nms, "--nms needs decoded boxes; leave --no-decode out");
  for (const std::string name : {"conf", "nms-iou"})
    combination_check(config.nms || !config.was_given(name), "--", name, " needs --nms");
  usage_check(config.conf >= 0 && config.conf <= 1, "--conf must be in 0..1, got ", config.conf);
  usage_check(config.nms_iou > 0 && config.nms_iou <= 1, "--nms-iou must be above 0 and at most 1, got ",
              config.nms_iou);
  protect_inputs("--out", config.out, {config.weights, config.image});
  if (!config.size.empty() || config.was_given("size")) parse_size(config.size);
}

// Computes a model: images -> rows (true) or detections (false).
using Compute = std::function<Tensor(const Tensor& images, bool rows)>;

// Writes the model to a file, and returns what the file computes.
static Compute save_model(const std::string& path, bool onnx, YOLOX& model, const ExportSettings& settings,
                          const Metadata& about) {
  if (onnx) {
    save_onnx(to_onnx(model, settings, about), path);
    return [graph = read_onnx(path)](const Tensor& x, bool rows) {
      return run_onnx(graph, x, rows ? "output" : "detections");
    };
  }
  save_torchscript(to_torchscript(model, settings), about, path);
  return [module = torch::jit::load(path)](const Tensor& x, bool rows) mutable {
    return rows ? module.run_method("rows", x).toTensor() : module.forward({x}).toTensor();
  };
}

static void run(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "exports a model to ONNX or TorchScript",
               "--weights runs/NAME/best.pth --out model.onnx");
  check_flags(config);
  const Image image = config.image.empty() ? Image(draw_shapes(0, 1, 0).image)
                                           : decode_image(read_bytes(config.image), config.image);
  auto loaded = load_model(config.weights, config.model, config.preproc, torch::kCPU);
  if (!loaded.report.empty()) std::cout << printable(loaded.report, /*keep_newlines=*/true) << "\n";
  const ImageSize size = input_size(loaded.info, config.size);
  const bool to_file_onnx = config.format == "onnx", any_size = config.dynamic || !to_file_onnx;
  const ExportSettings settings{size.height, size.width,  any_size,    config.decode,
                                config.nms,  config.fp16, config.conf, config.nms_iou};
  const Metadata about = metadata(loaded.info, settings, loaded.model->num_classes);

  const torch::NoGradGuard no_grad;
  std::vector<Tensor> images, expected;
  for (const Tensor& view : comparison_inputs(image, settings, any_size)) {
    images.push_back(preprocess(view, loaded.info.legacy_preproc));
    expected.push_back(expected_rows(loaded.model, images.back(), config.decode));
  }

  // The file has a temporary name until it has passed the comparison, so that a wrong file never replaces a
  // good one.
  NewFile file(config.out);
  const Compute compute = save_model(file.temporary_path(), to_file_onnx, loaded.model, settings, about);
  // Tolerances for rounding errors through some hundred layers, with 24-bit significands, or 11-bit ones with
  // --fp16. In float16 single boxes can be far off, so the mean error of the boxes is compared.
  const double score_tolerance = config.fp16 ? 0.25 : 1e-3, box_tolerance = config.fp16 ? 0.05 : 1e-3;
  double boxes = 0, mean_of_boxes = 0, scores = 0;
  for (size_t i = 0; i < images.size(); ++i) {
    const Tensor rows = compute(images[i], true), &want = expected[i];
    check(rows.sizes() == want.sizes(), config.out, " has output shape ", rows.sizes(), ", the model ",
          want.sizes(), "; the file is not kept");
    const Tensor box_off = abs_difference(rows.slice(-1, 0, 4), want.slice(-1, 0, 4)),
                 relative = box_off / want.slice(-1, 0, 4).abs().clamp_min(1),
                 score_off = abs_difference(rows.slice(-1, 4), want.slice(-1, 4));
    // a NaN fails these comparisons
    check((config.fp16 ? relative.mean() : relative.max()).item<double>() < box_tolerance &&
              score_off.max().item<double>() < score_tolerance,
          config.out, " differs from the model by up to ", box_off.max().item<double>(), " in boxes and ",
          score_off.max().item<double>(), " in scores; the file is not kept",
          config.fp16 ? " (weights or activations exceed the range of float16: leave --fp16 out)" : "");
    boxes = std::max(boxes, box_off.max().item<double>());
    mean_of_boxes = std::max(mean_of_boxes, box_off.mean().item<double>());
    scores = std::max(scores, score_off.max().item<double>());
    if (!config.nms) continue;
    const Tensor found = compute(images[i], false), expected_detections = detections_of(rows, settings);
    check(found.sizes() == expected_detections.sizes() &&
              relative_sum(sorted_detections(found), sorted_detections(expected_detections)) <
                  1e-3 * double(1 + found.size(0)),
          config.out, ": NMS in the file finds ", found.size(0), " boxes, NMS of the model ",
          expected_detections.size(0), " or different ones; the file is not kept");
  }
  file.commit();

  std::cout
      << printable(config.out) << ": " << printable(loaded.info.model) << ", " << loaded.model->num_classes
      << " classes, input "
      << (any_size ? "[B, 3, H, W] " : concat("[1, 3, ", size.height, ", ", size.width, "] "))
      << (loaded.info.legacy_preproc ? "RGB mean/std" : "BGR 0..255")
      << (config.fp16 ? ", computes in float16" : "") << ", output "
      << (config.nms ? "[D, 7]" : concat("[B, A, ", 5 + loaded.model->num_classes, "]")) << " ("
      << std::find_if(about.begin(), about.end(), [](const auto& e) { return e.first == "output"; })->second
      << ")\nlargest difference from the model on "
      << (config.image.empty() ? "a drawn scene" : printable(config.image)) << ": boxes " << rounded(boxes)
      << (config.decode ? " pixels" : " strides") << " (mean " << rounded(mean_of_boxes) << "), scores "
      << rounded(scores) << "\n";
}

int main(int argc, char** argv) {
  end_program(run_program([&] {
    run(argc, argv);
    check_stdout();
  }));
}
