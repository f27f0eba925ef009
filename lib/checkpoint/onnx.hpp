// SPDX-License-Identifier: Apache-2.0
// ONNX export (opset 17): the operators that forward() of a model calls, written as ONNX nodes. ./export
// compares the outputs of ONNX Runtime and of the model.
//
// Shapes: B is the batch size, C the number of classes, H and W are the height and width of the input in
// pixels, A is the number of anchor points (yolox.hpp), D the number of detections.
#pragma once
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "onnx.pb.h"
#include "yolox.hpp"

namespace yolox {

// Settings of the export to ONNX or TorchScript. The input is always float32 [B, 3, H, W], the output
// float32.
struct ExportSettings {
  int64_t height = 640, width = 640;  // input size in pixels
  bool dynamic = false;               // dynamic batch, height and width; otherwise B = 1 and a fixed size
  bool decode = true;  // false: raw boxes of the network (as tools/export_onnx.py of official YOLOX)
  bool nms = false;    // include NMS: output [D, 7] instead of [B, A, 5 + C]
  double conf = 0.3, iou = 0.45;  // minimum score and IoU threshold of NMS
};

// Metadata of the exported file (metadata_props): keys and texts.
using Metadata = std::vector<std::pair<std::string, std::string>>;

using Ints = std::vector<int64_t>;

// Returns the graph of a model. The input is "images". The output is "output" [B, A, 5 + C]: box, objectness
// and class scores. A box is cx, cy, w, h in pixels, or Predictions::reg of yolox.hpp without
// settings.decode. With NMS, the output is "detections" [D, 7]: index of the image in the batch, x1, y1, x2,
// y2 in pixels, score, class. Changes `model`: sets it to evaluation mode, and its parameters no longer
// require gradients. Throws if settings.nms is set without settings.decode, or if the model uses an operator
// that the export does not know.
onnx::Model to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata);

// Writes an ONNX file. Throws if the file cannot be written or would exceed 2 GB, the limit of protobuf.
void save_onnx(const onnx::Model& model, const std::string& path);

}  // namespace yolox
