// The model as an ONNX file (opset 17), written from its modules: each block has a function here that writes
// the nodes which its forward() stands for. Who changes a block in yolox.hpp changes its function here;
// ./export compares the file with the model at once.
//
// B batch, C classes, H W height and width of the input in pixels, h w of a feature map, A anchor points
// (yolox.hpp), D detections.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.hpp"
#include "onnx.pb.h"
#include "yolox.hpp"

namespace yolox {

// What is asked of an exported file, ONNX or TorchScript. Its input is always float32 [B, 3, H, W] and its
// output float32.
struct ExportSettings {
  int64_t height = 640, width = 640;
  bool dynamic = false;  // any batch and any multiples of 32; else one image of this size
  bool decode = true;    // false: boxes as the network has them (as tools/export_onnx.py of official YOLOX)
  bool nms = false;      // output [D, 7] instead of [B, A, 5 + C]
  bool half = false;     // weights and computing in float16; decoding and NMS stay in float32
  double conf = 0.3, iou = 0.45;  // of NMS: lowest score kept, overlap above which the weaker box goes
};

// What whoever runs the file must know: key, text.
using Metadata = std::vector<std::pair<std::string, std::string>>;

// ---- tensors of the format

// In float32, float16, float64 or int64; throws where the values are of another type or not in the file,
// whose name is for the message.
Tensor to_torch(const onnx::Tensor& t, const std::string& path);

// The setting of a node, or what it is when it is left out.
const onnx::Attribute* find_attribute(const onnx::Node& node, const std::string& name);
int64_t attribute(const onnx::Node& node, const std::string& name, int64_t otherwise);
std::vector<int64_t> attribute(const onnx::Node& node, const std::string& name,
                               const std::vector<int64_t>& otherwise);

onnx::Tensor::Type onnx_type(torch::ScalarType type);

// ---- a graph that grows node by node

using Value = std::string;  // a value in the graph, by its name
using Ints = std::vector<int64_t>;
using Setting = std::pair<std::string, std::variant<int64_t, Ints, std::string>>;

struct OnnxGraph {
  onnx::Model file;
  ExportSettings settings;
  bool values = true;  // false: weights have a shape only (for reading: onnx_weights.hpp)

  // The operation's first output, named as the node; the next are NAME/1 and so on.
  Value add(const std::string& op, const std::vector<Value>& inputs, const std::string& name,
            const std::vector<Setting>& attributes = {}, int outputs = 1);

  // Values that are part of the file.
  Value constant(const std::string& name, const Tensor& tensor);
  Value constant(const std::string& name, const Ints& list) {
    return constant(name, torch::tensor(list, torch::kLong));
  }
  Value scalar(const std::string& name, const torch::Scalar& value);

  // Weights, in the type that the file computes in.
  Value weights(const std::string& name, const Tensor& tensor);
  Value cast(const Value& x, const std::string& name, torch::ScalarType type) {
    return add("Cast", {x}, name, {{"to", int64_t(onnx_type(type))}});
  }

  // Says what a value is to whoever opens the file.
  void describe(bool input, const std::string& name, const std::vector<onnx::Dimension>& dims);
};

// ---- blocks: each gives its output for its input x; `name` is that of the module, as in the checkpoint

// A convolution; `weight` and `bias` take the place of its own.
Value add_conv(OnnxGraph& g, const std::string& name, nn::Conv2dImpl& conv, const Tensor& weight,
               const Tensor& bias, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, BaseConvImpl& m, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, Block& block, const Value& x);

inline Value add_nodes(OnnxGraph& g, const std::string& name, DWConvImpl& m, const Value& x) {
  return add_nodes(g, name + ".pconv", *m.pconv, add_nodes(g, name + ".dconv", *m.dconv, x));
}

Value add_nodes(OnnxGraph& g, const std::string& name, SeqImpl& m, Value x);

Value add_nodes(OnnxGraph& g, const std::string& name, BottleneckImpl& m, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, CSPLayerImpl& m, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, SPPBottleneckImpl& m, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, FocusImpl& m, const Value& x);

Value add_nodes(OnnxGraph& g, const std::string& name, Block& block, const Value& x);

// Features of kStrides.
std::vector<Value> add_nodes(OnnxGraph& g, const std::string& name, PAFPNImpl& m, const Value& images);

// ---- head, decoding, NMS

// Regression [B, 4, h, w] of a level -> boxes cx, cy, w, h in pixels [B, 4, h, w]: decode_boxes() of
// yolox.hpp.
Value add_boxes(OnnxGraph& g, const std::string& name, const Value& reg, int stride);

// [B, A, 5 + C]: boxes, objectness and class scores in 0..1. Boxes are cx, cy, w, h in pixels, or without
// decoding as Predictions::reg of yolox.hpp has them.
Value add_nodes(OnnxGraph& g, const std::string& name, HeadImpl& m, const std::vector<Value>& features);

// Decoded rows [B, A, 5 + C] -> detections [D, 7]: image of the batch, x1, y1, x2, y2 in pixels, score
// (objectness x class score), class; image after image, best score first. The same boxes as postprocess() of
// yolox.hpp: an anchor point speaks for its best class only, and boxes suppress boxes of their class.
Value add_nms(OnnxGraph& g, const Value& decoded, int64_t classes);

// ---- the file

// The graph of a model in evaluation. Input "images"; output "output" [B, A, 5 + C], or with NMS "detections"
// [D, 7] (add_nms). values: false leaves the weights' values out.
onnx::Model to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata,
                    bool values = true);

// Throws where there is no room, or no way to write there.
void save_onnx(const onnx::Model& model, const std::string& path);

onnx::Model read_onnx(const std::string& path);

}  // namespace yolox
