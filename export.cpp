// SPDX-License-Identifier: Apache-2.0
// ./export: writes a model as ONNX or TorchScript, runs the file and compares its outputs with the outputs of
// the model.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/onnx.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"
#include "evaluate.hpp"

using namespace yolox;

struct Config : ModelFlags {
  std::string out =
      flag(out, "Graph", "out", "", "FILE", "output file: .onnx; .ts, .pt or .torchscript for TorchScript");
  bool dynamic = flag(dynamic, "Graph", "dynamic", false, "",
                      "ONNX with dynamic batch, height and width; TorchScript is always dynamic");
  bool decode = flag(
      decode, "Graph", "decode", true, "",
      "box decoding; without it, boxes are offsets and log sizes in strides, as of the official exporter");
  bool nms = flag(nms, "Graph", "nms", false, "", "ONNX: NMS in the graph; outputs final boxes");
  double conf =
      flag(conf, "Graph", "conf", 0.3, "P", "with --nms: minimum score of a detection", between(0, 1));
  double nms_iou =
      flag(nms_iou, "Graph", "nms-iou", 0.45, "IOU", "with --nms: NMS IoU threshold", between(1e-6, 1));
};

// Returns the metadata of the exported file: classes, input size, pixel format, letterbox and output columns.
static Metadata metadata(const WeightsInfo& info, const ExportSettings& s, int classes) {
  const PixelFormat pixels = pixel_format(info.legacy_preproc);
  Metadata m = {
      {"model", info.model},
      {"classes", c10::Join("\n", class_names(info, classes))},
      {"num_classes", concat(classes)},
      {"size", concat(s.height, "x", s.width)},
      {"channel_order", pixels.order},
      {"value_range", concat(pixels.range)},
      {"mean", c10::Join(" ", pixels.mean)},
      {"std", c10::Join(" ", pixels.std)},
      {"letterbox", concat("top left, border ", int(border_grey))},
      {"output", s.nms      ? "image, x1, y1, x2, y2, score, class"
                 : s.decode ? "cx, cy, w, h in pixels, objectness, class scores"
                            : "x, y from the cell and log w, log h in strides, objectness, class scores"},
      {"version", git_revision()}};
  if (s.nms) m.insert(m.end(), {{"conf", concat(s.conf)}, {"nms_iou", concat(s.iou)}});
  return m;
}

// Returns the input of the comparison, uint8: a letterboxed drawn scene, [1, H, W, 3], or for a file of any
// size a batch of two scenes, [2, H, W + 32, 3].
static Tensor comparison_input(const ExportSettings& s) {
  const int64_t width = s.dynamic ? s.width + 32 : s.width;
  const auto view = [&](int64_t scene) {
    const Image boxed = letterbox(draw_shapes(0, 1, scene).image, {int(width), int(s.height)}).image;
    return torch::from_blob(boxed.clone().data, {1, s.height, width, 3}, torch::kByte).clone();
  };
  return s.dynamic ? torch::cat({view(0), view(1)}) : view(0);
}

// Returns the expected output of the file without NMS, [B, A, 5 + C].
static Tensor expected_rows(YOLOX& model, const Tensor& images, bool decoded) {
  const Predictions p = model(images);
  if (decoded) return decode(p, images.size(2), images.size(3));
  return torch::cat({p.reg, p.obj.unsqueeze(-1).sigmoid(), p.cls.sigmoid()}, -1);
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

// Throws UsageError if a flag is invalid.
static void check_flags(const Config& config) {
  combination_check(!config.out.empty(), "--out FILE is needed");
  usage_check(has_extension(config.out, {".onnx", ".ts", ".pt", ".torchscript"}), "--out ", config.out,
              ": the extension selects the format: .onnx, or .ts, .pt or .torchscript for TorchScript");
  config.check_values();
  usage_check(config.decode || !config.nms, "--nms needs decoded boxes; leave --no-decode out");
  usage_check(!config.nms || has_extension(config.out, {".onnx"}), "--nms is for ONNX, not for ", config.out);
  for (const std::string name : {"conf", "nms-iou"})
    combination_check(config.nms || !config.was_given(name), "--", name, " needs --nms");
  protect_inputs("--out", config.out, {find_weights_file(config.weights)});
}

static const std::string kCheck = YOLOX_SOURCE_DIR "/tools/check_onnx.py";

// Runs an ONNX file with ONNX Runtime, see tools/check_onnx.py. Returns the output, [N, columns].
static Tensor run_onnx(const std::string& python, const std::string& file, const Tensor& images,
                       int64_t columns) {
  std::string folder = (fs::temp_directory_path() / "yolox-export-XXXXXX").string();
  check(mkdtemp(folder.data()), folder, ": cannot be created: ", std::strerror(errno));
  const Tensor x = images.contiguous();
  std::ofstream(folder + "/in", std::ios::binary).write(static_cast<const char*>(x.data_ptr()), x.nbytes());
  const int status =
      std::system(concat(python, " ", shell_word(kCheck), " ", shell_word(file), " ",
                         shell_word(folder + "/in"), " ", x.size(0), ",3,", x.size(2), ",", x.size(3), " ",
                         shell_word(folder + "/out"), " >", shell_word(folder + "/log"), " 2>&1")
                      .c_str());
  std::string log;
  read_all(folder + "/log", log);
  std::ifstream out(folder + "/out", std::ios::binary);  // empty without detections
  const std::string bytes{std::istreambuf_iterator<char>(out), {}};
  fs::remove_all(folder);
  check(status == 0, "ONNX Runtime cannot run ", file, ": ",
        trimmed(log).substr(trimmed(log).rfind('\n') + 1), "; another Python: PYTHON=...");
  const Tensor output = torch::empty({int64_t(bytes.size()) / 4 / columns, columns});
  std::memcpy(output.data_ptr(), bytes.data(), output.nbytes());
  return output;
}

// Returns the rows of `found` in the order of `expected`: of each row the one that differs least, because
// detections of nearly equal scores can be in any order.
static Tensor in_order_of(const Tensor& expected, const Tensor& found) {
  std::vector<Tensor> rows;
  for (const Tensor& row : expected.unbind())
    rows.push_back(found[((found - row).abs() / row.abs().clamp_min(1)).amax(1).argmin()]);
  return rows.empty() ? found : torch::stack(rows);
}

// Compares the output of a file with the expected one, both [N, columns]. Returns the differences of boxes
// and scores for the log. Throws if the outputs differ by more than rounding errors through some hundred
// layers.
static std::string compared(const Tensor& output, const Tensor& expected, const ExportSettings& s,
                            const std::string& file) {
  constexpr double kTolerance = 1e-3;  // relative to values above 1
  check(output.sizes() == expected.sizes(), file, " has an output of ", output.sizes(), ", the model of ",
        expected.sizes(), "; the file is not kept");
  double boxes = 0, scores = 0;
  if (output.numel() > 0) {
    const Tensor found = s.nms ? in_order_of(expected, output) : output;
    // 0 where both are the same infinity
    const Tensor off = torch::where(found == expected, 0, (found - expected).abs());
    const int64_t first = s.nms ? 1 : 0;  // detections begin with the image
    boxes = off.slice(1, first, first + 4).max().item<double>();
    scores = off.slice(1, first + 4).max().item<double>();
    // a NaN fails this comparison
    check((off / expected.abs().clamp_min(1)).max().item<double>() < kTolerance, file,
          " differs from the model by up to ", boxes, " in boxes and ", scores,
          " in scores; the file is not kept");
  }
  return concat("boxes ", rounded(boxes), s.decode ? " pixels" : " strides", ", scores ", rounded(scores));
}

static void run(int argc, char** argv) {
  Config config;
  config.parse(argc, argv, "exports a model to ONNX or TorchScript",
               "--weights runs/NAME/best.pth --out model.onnx");
  check_flags(config);
  auto loaded = load_model(config.weights, config.model, config.preproc, torch::kCPU);
  if (!loaded.report.empty()) std::cout << printable(loaded.report, /*keep_newlines=*/true) << "\n";
  const ImageSize size = input_size(loaded.info, config.size);
  const bool is_onnx = has_extension(config.out, {".onnx"}), any_size = config.dynamic || !is_onnx;
  const ExportSettings settings{size.height, size.width,  any_size,      config.decode,
                                config.nms,  config.conf, config.nms_iou};
  const Metadata about = metadata(loaded.info, settings, loaded.model->num_classes);

  const torch::NoGradGuard no_grad;
  const Tensor images = preprocess(comparison_input(settings), loaded.info.legacy_preproc),
               rows = expected_rows(loaded.model, images, config.decode),
               expected = config.nms ? detections_of(rows, settings) : rows.flatten(0, 1);

  // The file has a temporary name until it has passed the comparison, so that a wrong file never replaces a
  // good one.
  NewFile file(config.out);
  const std::string& path = file.temporary_path();
  std::string difference;  // empty: not checked
  file.write(is_onnx ? to_onnx(loaded.model, settings, about)
                     : torchscript_file(to_torchscript(loaded.model, settings), about));
  file.flush();
  const std::string python = is_onnx && fs::exists(kCheck) ? python_with("numpy, onnxruntime") : "";
  if (!is_onnx)
    difference = compared(torch::jit::load(path).forward({images}).toTensor().flatten(0, 1), expected,
                          settings, config.out);
  else if (!python.empty())
    difference = compared(run_onnx(python, path, images, expected.size(1)), expected, settings, config.out);
  file.commit();

  const auto output = std::ranges::find(about, "output", [](const auto& entry) { return entry.first; });
  std::cout << printable(concat(config.out, ": ", loaded.info.model))
            << concat(", ", loaded.model->num_classes, " classes, input ",
                      any_size ? "[B, 3, H, W] " : concat("[1, 3, ", size.height, ", ", size.width, "] "),
                      loaded.info.legacy_preproc ? "RGB mean/std" : "BGR 0..255", ", output ",
                      config.nms ? "[D, 7]" : concat("[B, A, ", 5 + loaded.model->num_classes, "]"), " (",
                      output->second, ")\n")
            << (difference.empty()
                    ? "not checked: no Python with onnxruntime; see docs/export.md"
                    : "checked against the model on a drawn scene: max difference " + difference)
            << "\n";
}

int main(int argc, char** argv) {
  end_program(run_program([&] {
    run(argc, argv);
    check_stdout();
  }));
}
