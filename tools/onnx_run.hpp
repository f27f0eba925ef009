// SPDX-License-Identifier: Apache-2.0
// Interpreter of ONNX graphs. Computes each node with torch, as https://onnx.ai/onnx/operators defines the
// operation. ./export runs the file that it wrote in this interpreter, to compare the file with the model.
// Therefore only the operations and types that onnx.hpp writes are implemented, and speed does not matter.
#pragma once
#include <torch/torch.h>

#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/onnx.hpp"

namespace yolox {

namespace onnx_run_detail {

// Returns an attribute of a node. Its values are 0 and empty if the node does not have it.
inline const onnx::Attribute& attribute(const onnx::Node& node, const std::string& name) {
  for (const auto& a : node.attribute())
    if (a.name() == name) return a;
  return onnx::Attribute::default_instance();
}

inline Ints ints(const onnx::Node& node, const std::string& name) {
  const auto& list = attribute(node, name).ints();
  return {list.begin(), list.end()};
}

inline torch::ScalarType torch_type(int64_t type) {
  if (type == onnx::Tensor::FLOAT16) return torch::kHalf;
  return type == onnx::Tensor::INT64 ? torch::kLong : torch::kFloat;
}

// Converts an initializer.
inline Tensor to_torch(const onnx::Tensor& t) {
  Tensor out = torch::empty(torch::IntArrayRef(t.dims().data(), t.dims_size()), torch_type(t.data_type()));
  check(out.nbytes() == t.raw_data().size(), "the ONNX tensor ", t.name(), " has ", t.raw_data().size(),
        " bytes instead of ", out.nbytes());
  std::memcpy(out.data_ptr(), t.raw_data().data(), out.nbytes());
  return out;
}

inline Ints list_of(const Tensor& t) {
  const Tensor flat = t.contiguous().flatten();
  return {flat.data_ptr<int64_t>(), flat.data_ptr<int64_t>() + flat.numel()};
}

// NonMaxSuppression: boxes [B, A, 4] (cx, cy, w, h), scores [B, C, A] -> int64 [D, 3]: image, class, box.
// Keeps up to `most` boxes of each image and class.
inline Tensor non_max_suppression(const Tensor& boxes, const Tensor& scores, int64_t most, double iou,
                                  double conf) {
  std::vector<Tensor> chosen{torch::empty({0, 3}, torch::kLong)};
  const Tensor half = boxes.slice(2, 2, 4) / 2, centre = boxes.slice(2, 0, 2);
  const Tensor corners = torch::cat({centre - half, centre + half}, 2);
  for (int64_t b = 0; b < scores.size(0); ++b)
    for (int64_t c = 0; c < scores.size(1); ++c) {
      const Tensor above = (scores[b][c] > conf).nonzero().squeeze(1);
      if (above.numel() == 0) continue;
      const Tensor kept =
          above
              .index_select(0, nms(corners[b].index_select(0, above), scores[b][c].index_select(0, above),
                                   torch::zeros_like(above), iou))
              .slice(0, 0, most);
      chosen.push_back(torch::stack({torch::full_like(kept, b), torch::full_like(kept, c), kept}, 1));
    }
  return torch::cat(chosen);
}

// Gather. The shape of the indices replaces the axis.
inline Tensor gather(const Tensor& x, const Tensor& indices, int64_t axis) {
  Ints shape = x.sizes().vec();
  shape.erase(shape.begin() + axis);
  shape.insert(shape.begin() + axis, indices.sizes().begin(), indices.sizes().end());
  return x.index_select(axis, indices.flatten()).reshape(shape);
}

// Returns the outputs of a node. An optional input that is absent is an undefined tensor. Throws if the
// operation is not implemented. Each operation is a branch of its own. Dimensions are counted from 0.
inline std::vector<Tensor> compute(const onnx::Node& node, const std::vector<Tensor>& in) {
  const std::string& op = node.op_type();
  const int64_t axis = attribute(node, "axis").i();
  if (op == "Add") return {in[0] + in[1]};
  if (op == "Sub") return {in[0] - in[1]};
  if (op == "Mul") return {in[0] * in[1]};
  if (op == "Div") return {in[0].div(in[1], "floor")};  // of sizes
  if (op == "Expand") return {in[0].expand(list_of(in[1]))};
  if (op == "Unsqueeze") return {in[0].unsqueeze(list_of(in[1])[0])};
  if (op == "Squeeze") return {in[0].squeeze(list_of(in[1])[0])};
  if (op == "Relu") return {in[0].relu()};
  if (op == "LeakyRelu") return {torch::leaky_relu(in[0], attribute(node, "alpha").f())};
  if (op == "BatchNormalization")
    return {torch::batch_norm(in[0], in[1], in[2], in[3], in[4], /*training=*/false, 0,
                              attribute(node, "epsilon").f(), /*cudnn_enabled=*/false)};
  if (op == "Exp") return {in[0].exp()};
  if (op == "Sigmoid") return {in[0].sigmoid()};
  if (op == "Concat") return {torch::cat(in, axis)};
  if (op == "Transpose") return {in[0].permute(ints(node, "perm"))};
  if (op == "Shape") return {torch::tensor(in[0].sizes().vec(), torch::kLong)};
  if (op == "GatherND") return {in[0].index({in[1].select(1, 0), in[1].select(1, 1)})};
  if (op == "ReduceMax") return {in[0].amax(ints(node, "axes"), attribute(node, "keepdims").i() != 0)};
  if (op == "ArgMax") return {in[0].argmax(axis, attribute(node, "keepdims").i() != 0)};
  if (op == "Range")
    return {torch::arange(in[0].item<int64_t>(), in[1].item<int64_t>(), in[2].item<int64_t>(), torch::kLong)};
  if (op == "Cast") return {in[0].to(torch_type(attribute(node, "to").i()))};
  if (op == "Conv" || op == "MaxPool") {
    const Ints pads = ints(node, "pads"), before = {pads[0], pads[1]}, strides = ints(node, "strides");
    if (op == "Conv")
      return {torch::conv2d(in[0], in[1], in[2], strides, before, ints(node, "dilations"),
                            attribute(node, "group").i())};
    return {torch::max_pool2d(in[0], ints(node, "kernel_shape"), strides, before, 1,
                              attribute(node, "ceil_mode").i() != 0)};
  }
  if (op == "Resize") {
    const Tensor scales = in[2].to(torch::kDouble);
    return {torch::upsample_nearest2d(
        in[0], std::nullopt, std::vector<double>{scales[2].item<double>(), scales[3].item<double>()})};
  }
  if (op == "Slice") {  // inputs: data, start, end, dimension, step
    return {in[0].slice(list_of(in[3])[0], list_of(in[1])[0], list_of(in[2])[0], list_of(in[4])[0])};
  }
  if (op == "Split") return in[0].split_with_sizes(list_of(in[1]), axis);
  if (op == "Reshape") {
    Ints shape = list_of(in[1]);
    for (size_t i = 0; i < shape.size(); ++i)
      if (shape[i] == 0) shape[i] = in[0].size(int64_t(i));
    return {in[0].reshape(shape)};
  }
  if (op == "Gather") return {gather(in[0], in[1], axis)};
  if (op == "OneHot") {  // inputs: indices, depth, [off value, on value]
    const Tensor hot = torch::one_hot(in[0], in[1].item<int64_t>()).to(in[2].scalar_type());
    return {(in[2][0] + hot * (in[2][1] - in[2][0])).movedim(-1, axis)};
  }
  if (op == "TopK") {  // of a list
    const auto [values, order] =
        in[0].sort(/*stable=*/true, 0, /*descending=*/attribute(node, "largest").i() != 0);
    const int64_t k = in[1].item<int64_t>();
    return {values.slice(0, 0, k), order.slice(0, 0, k)};
  }
  if (op == "NonMaxSuppression")
    return {
        non_max_suppression(in[0], in[1], in[2].item<int64_t>(), in[3].item<float>(), in[4].item<float>())};
  fail("the ONNX operation ", op, " of node ", node.name(),
       " is not implemented; add it to tools/onnx_run.hpp");
}

}  // namespace onnx_run_detail

// Reads an ONNX file. Throws if the file cannot be read or is not an ONNX file.
inline onnx::Model read_onnx(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  onnx::Model model;
  check(model.ParseFromIstream(&in) && model.has_graph(), "cannot read ", path, " as an ONNX file");
  return model;
}

// Runs the graph on images [B, 3, H, W]. Returns the value named `output`, which can be an intermediate
// value. Throws if the graph has no such value.
inline Tensor run_onnx(const onnx::Model& model, const Tensor& images, const std::string& output) {
  const torch::InferenceMode inference;
  const auto& graph = model.graph();
  std::map<std::string, Tensor> values{{"", {}}, {graph.input(0).name(), images}};
  for (const auto& t : graph.initializer()) values[t.name()] = onnx_run_detail::to_torch(t);
  std::map<std::string, int> uses;  // a value is freed after its last use
  for (const auto& node : graph.node())
    for (const auto& name : node.input()) ++uses[name];
  for (const auto& node : graph.node()) {
    if (values.count(output)) break;
    std::vector<Tensor> in;
    for (const auto& name : node.input()) {
      check(values.count(name), "node ", node.name(), " reads ", name, ", which no earlier node computes");
      in.push_back(values.at(name));
      if (!name.empty() && --uses[name] == 0) values.erase(name);
    }
    const auto out = onnx_run_detail::compute(node, in);
    for (int i = 0; i < node.output_size(); ++i) values[node.output(i)] = out.at(i);
  }
  check(values.count(output), "the ONNX graph has no value ", output);
  return values.at(output);
}

}  // namespace yolox
