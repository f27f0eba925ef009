// SPDX-License-Identifier: Apache-2.0
// ONNX export (opset 17): the operators that forward() of a model calls, written as ONNX nodes. ./export
// compares the outputs of the ONNX file and the model.
//
// Shapes: B is the batch size, C the number of classes, H and W are the height and width of the input in
// pixels, h and w those of a feature map, A is the number of anchor points (yolox.hpp), D the number of
// detections.
#pragma once
#include <torch/torch.h>

#include <string>
#include <utility>
#include <variant>
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
  bool half = false;   // weights and computation in float16; decoding and NMS stay in float32
  double conf = 0.3, iou = 0.45;  // minimum score and IoU threshold of NMS
};

// Metadata of the exported file (metadata_props): keys and texts.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// ---- graph builder

onnx::Tensor::Type onnx_type(torch::ScalarType type);

using Value = std::string;  // name of a value in the graph
using Ints = std::vector<int64_t>;
using OnnxAttribute =
    std::pair<std::string, std::variant<int64_t, double, Ints, std::string>>;  // attribute: name, value

struct OnnxGraph {
  onnx::Model file;
  ExportSettings settings;

  // Adds a node and returns its first output, which has the name of the node. Further outputs are NAME/1,
  // NAME/2, ...
  Value add(const std::string& op, const std::vector<Value>& inputs, const std::string& name,
            const std::vector<OnnxAttribute>& attributes = {}, int outputs = 1);

  // Adds an initializer.
  Value constant(const std::string& name, const Tensor& tensor);
  Value constant(const std::string& name, const Ints& list) {
    return constant(name, torch::tensor(list, torch::kLong));
  }
  Value scalar(const std::string& name, const torch::Scalar& value);

  // Adds weights as an initializer, in float32 or, with settings.half, in float16. Throws if a value is not
  // finite.
  Value weights(const std::string& name, const Tensor& tensor);
  Value cast(const Value& x, const std::string& name, torch::ScalarType type) {
    return add("Cast", {x}, name, {{"to", int64_t(onnx_type(type))}});
  }

  // Declares a float32 input or output of the graph.
  void describe(bool input, const std::string& name, const std::vector<onnx::Dimension>& dims);
};

// ---- the network, decoding, NMS

// Output of the network before decoding, as Predictions of yolox.hpp, and the strides of its levels.
struct Raw {
  Value reg, obj, cls;
  std::vector<int> strides;
};

// Adds the network: runs model->forward() once, and adds the nodes of each operator that it calls. An edit of
// the model therefore needs no edit here, as long as its operators are known: convolution, batch norm, SiLU,
// ReLU, LeakyReLU, sigmoid, max pooling, nearest upsampling, cat, add, sub, mul, slice, permute, flatten,
// reshape, squeeze. Throws and names the operator otherwise. Batch norms are folded into the convolutions.
Raw add_network(OnnxGraph& g, YOLOX& model, const Value& images);

// Decodes Raw::reg to boxes cx, cy, w, h in pixels, [B, A, 4], as decode_boxes() in yolox.hpp. images: of any
// type, for its size.
Value add_box_decoding(OnnxGraph& g, const Raw& raw, const Value& images);

// Returns [B, A, 5 + C]: box, objectness and class scores in 0..1. A box is cx, cy, w, h in pixels, or
// Predictions::reg of yolox.hpp without settings.decode.
Value add_rows(OnnxGraph& g, const Raw& raw, const Value& images);

// Adds NMS. Converts decoded rows [B, A, 5 + C] to detections [D, 7]: index of the image in the batch, x1,
// y1, x2, y2 in pixels, score (objectness x class score), class. Detections are sorted by image, then by
// descending score. The result equals that of postprocess() in yolox.hpp: each anchor point predicts its best
// class only, and NMS runs per class.
Value add_nms(OnnxGraph& g, const Value& decoded, int64_t classes);

// ---- the file

// Returns the graph of a model in evaluation mode. The input is "images". The output is "output" [B, A, 5 +
// C], or with NMS "detections" [D, 7] (add_nms). Throws if settings.nms is set without settings.decode.
onnx::Model to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata);

// Writes an ONNX file. Throws if the file cannot be written or would exceed 2 GB.
void save_onnx(const onnx::Model& model, const std::string& path);

}  // namespace yolox
