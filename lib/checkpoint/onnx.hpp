// SPDX-License-Identifier: Apache-2.0
// Export to ONNX (opset 17), as nodes for the operators that forward() of a model calls, and to TorchScript.
// ./export compares the outputs of the file and of the model.
//
// Shapes: B is the batch size, C the number of classes, H and W are the height and width of the input in
// pixels, A is the number of anchor points (yolox.hpp), D the number of detections.
#pragma once
#include <torch/script.h>

#include <string>
#include <utility>
#include <vector>

#include "yolox.hpp"

namespace yolox {

// Settings of the export to ONNX or TorchScript. The input is always float32 [B, 3, H, W], the output
// float32.
struct ExportSettings {
  int64_t height = 640, width = 640;  // input size in pixels
  bool dynamic = false;               // dynamic batch, height and width; otherwise B = 1 and a fixed size
  bool decode = true;  // false: raw boxes of the network (as tools/export_onnx.py of official YOLOX)
  bool nms = false;    // ONNX, with decode: include NMS: output [D, 7] instead of [B, A, 5 + C]
  double conf = 0.3, iou = 0.45;  // minimum score and IoU threshold of NMS
};

// Metadata of the exported file (metadata_props): keys and texts.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// Returns the bytes of an ONNX file. The input is "images". The output is "output" [B, A, 5 + C]: box,
// objectness and class scores. A box is cx, cy, w, h in pixels, or Predictions::reg of yolox.hpp without
// settings.decode. With NMS, the output is "detections" [D, 7]: index of the image in the batch, x1, y1, x2,
// y2 in pixels, score, class. Changes `model`: batch norms are folded into the convolutions, and the Focus
// becomes one 6x6 convolution of stride 2 that computes the same, because ncnn has no slices with a step. It
// can be evaluated and exported afterwards, not trained or saved. Throws if the model uses an operator that
// the export does not know, or if the file would exceed 2 GB, the limit of protobuf.
std::string to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata);

// Returns the model as a TorchScript module, which torch.jit.load in Python and torch::jit::load in C++ load
// without this repository. Input: images float32 [B, 3, H, W], any B, H and W multiples of 32. Output: that
// of to_onnx(); settings.nms must be false. Changes the Focus of `model` as to_onnx() does.
torch::jit::Module to_torchscript(YOLOX& model, const ExportSettings& settings);

// Returns the bytes of a TorchScript file. Each metadata entry is an extra file that has the key as its name.
std::string torchscript_file(const torch::jit::Module& module, const Metadata& metadata);

}  // namespace yolox
