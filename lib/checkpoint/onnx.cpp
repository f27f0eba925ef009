// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/onnx.hpp"

#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>

#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <variant>

#include "base/text.hpp"
#include "onnx.pb.h"

namespace yolox {

namespace {

// Focus after merge_focus().
struct StridedStem : FocusImpl {
  explicit StridedStem(const FocusImpl& focus) : FocusImpl(focus) {}
  Tensor forward(Tensor x) override { return conv(x); }
};

// Replaces the Focus of a CSPDarknet by one 6x6 convolution.
void merge_focus(YOLOX& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& module : model->modules()) {
    auto* backbone = module->as<CSPDarknetImpl>();
    if (!backbone || std::dynamic_pointer_cast<StridedStem>(backbone->stem)) continue;
    // [out, column in the patch, row in the patch, colour, row, column] of 3x3 cells
    nn::Conv2d& conv = backbone->stem->conv->conv;
    const Tensor cells = conv->weight.reshape({-1, 2, 2, 3, 3, 3});
    conv->weight.set_data(cells.permute({0, 3, 4, 2, 5, 1}).reshape({-1, 3, 6, 6}));
    conv->options.stride(2).padding(2);
    backbone->stem = std::make_shared<StridedStem>(*backbone->stem);
  }
}

namespace jit = torch::jit;

using Ints = std::vector<int64_t>;
using Value = std::string;  // name of a value in the graph
using Attribute = std::pair<std::string, std::variant<int64_t, double, Ints, std::string>>;  // name, value

struct GraphBuilder {
  ExportSettings settings;
  onnx::Model file = {};

  // Adds a node and returns its first output, which has the name of the node. Further outputs are NAME/1,
  // NAME/2, ... name: "" for a name such as Add_7.
  Value add(const std::string& op, const std::vector<Value>& inputs,
            const std::vector<Attribute>& attributes = {}, int outputs = 1, Value name = "") {
    auto& graph = *file.mutable_graph();
    if (name.empty()) name = concat(op, "_", graph.node_size());
    auto& node = *graph.add_node();
    node.set_op_type(op);
    node.set_name(name);
    node.add_output(name);
    for (int i = 1; i < outputs; ++i) node.add_output(concat(name, "/", i));
    for (const auto& input : inputs) node.add_input(input);
    for (const auto& [key, value] : attributes) {
      auto& a = *node.add_attribute();
      a.set_name(key);
      if (const auto* i = std::get_if<int64_t>(&value)) {
        a.set_i(*i);
        a.set_type(onnx::Attribute::INT);
      } else if (const auto* f = std::get_if<double>(&value)) {
        a.set_f(float(*f));
        a.set_type(onnx::Attribute::FLOAT);
      } else if (const auto* text = std::get_if<std::string>(&value)) {
        a.set_s(*text);
        a.set_type(onnx::Attribute::STRING);
      } else {
        a.mutable_ints()->Assign(std::get<Ints>(value).begin(), std::get<Ints>(value).end());
        a.set_type(onnx::Attribute::INTS);
      }
    }
    return name;
  }

  // Adds an initializer. name: "" for a name such as constant_7.
  Value constant(const Tensor& tensor, Value name = "") {
    auto& graph = *file.mutable_graph();
    if (name.empty()) name = concat("constant_", graph.initializer_size());
    auto& t = *graph.add_initializer();
    t.set_name(name);
    t.set_data_type(tensor.scalar_type() == torch::kLong ? onnx::Tensor::INT64 : onnx::Tensor::FLOAT);
    t.mutable_dims()->Assign(tensor.sizes().begin(), tensor.sizes().end());
    const Tensor flat = tensor.contiguous();
    t.set_raw_data(flat.data_ptr(), flat.nbytes());
    return name;
  }
  Value ints(const Ints& list) { return constant(torch::tensor(list, torch::kLong)); }
  Value floats(const std::vector<float>& list) { return constant(torch::tensor(list)); }
  Value index(int64_t number) { return constant(torch::scalar_tensor(number, torch::kLong)); }

  Value to_float(const Value& x) { return add("Cast", {x}, {{"to", int64_t{onnx::Tensor::FLOAT}}}); }
};

// Writes the operators of a traced network as ONNX nodes, one after the other.
class TraceWriter {
 public:
  TraceWriter(GraphBuilder& graph, const nn::Module& model) : g(graph) {
    for (const auto& p : model.named_parameters()) names[p.value().data_ptr()] = p.key();
    for (const auto& b : model.named_buffers()) names[b.value().data_ptr()] = b.key();
  }

  // Returns the outputs of the network. images: value of the network input.
  std::vector<Value> write(const jit::Graph& trace, const Value& images) {
    values[trace.inputs()[0]] = images;
    for (const jit::Node* node : trace.nodes())
      if (node->kind() != c10::prim::Constant && node->kind() != c10::prim::ListConstruct) write(*node);
    std::vector<Value> outputs;
    for (const jit::Value* output : trace.outputs()) outputs.push_back(values.at(output));
    return outputs;
  }

 private:
  GraphBuilder& g;
  std::map<const void*, std::string> names;   // of parameters and buffers, by address
  std::map<const jit::Value*, Value> values;  // tensors of the trace
  std::set<Value> written;                    // parameters and buffers

  // Returns a constant argument of an operator. A list is a list of constants. Throws if the argument
  // depends on the input.
  static c10::IValue constant_of(const jit::Node& node, size_t argument) {
    const jit::Value* value = node.input(argument);
    if (auto constant = jit::toIValue(value)) return *constant;
    c10::impl::GenericList list(c10::AnyType::get());
    check(value->node()->kind() == c10::prim::ListConstruct, "the model computes an argument of ",
          node.kind().toQualString(), "; ONNX export needs a constant. ", kRemedy);
    for (size_t i = 0; i < value->node()->inputs().size(); ++i)
      list.push_back(constant_of(*value->node(), i));
    return list;
  }
  static int64_t integer(const jit::Node& node, size_t argument) {
    return constant_of(node, argument).toInt();
  }
  static Ints integers(const jit::Node& node, size_t argument) {
    Ints list;
    const c10::IValue constant = constant_of(node, argument);
    for (const c10::IValue& v : constant.toListRef()) list.push_back(v.toInt());
    return list;
  }
  // Returns a list for height and width, which may be given as one integer.
  static Ints pair(const jit::Node& node, size_t argument) {
    Ints list = integers(node, argument);
    if (list.size() == 1) list.push_back(list[0]);
    return list;
  }
  static Ints shape_of(const jit::Value* value) {
    return *value->type()->expectRef<c10::TensorType>().sizes().concrete_sizes();
  }
  // Returns the argument `dim` of a tensor, counted from 0.
  static int64_t dim_of(const jit::Node& node, size_t argument, const jit::Value* tensor) {
    const int64_t dim = integer(node, argument);
    return dim < 0 ? dim + int64_t(shape_of(tensor).size()) : dim;
  }

  // Returns a tensor argument: a value that was computed before, or an initializer in float32. Parameters and
  // buffers are written once, with their names.
  Value tensor(const jit::Value* value) {
    const auto found = values.find(value);
    if (found != values.end()) return found->second;
    const auto constant = jit::toIValue(value);
    check(constant && (constant->isTensor() || constant->isScalar()),
          "the model computes a value that ONNX export does not support. ", kRemedy);
    const Tensor given =
        constant->isTensor() ? constant->toTensor() : torch::scalar_tensor(constant->toScalar());
    const auto named = names.find(given.data_ptr());
    const Value name = named == names.end() ? "" : named->second;
    if (!name.empty() && !written.insert(name).second) return name;
    return g.constant(given.detach().to(torch::kCPU, torch::kFloat), name);
  }
  std::vector<Value> tensors(const jit::Value* list) {
    std::vector<Value> all;
    for (const jit::Value* value : list->node()->inputs()) all.push_back(tensor(value));
    return all;
  }

  void write(const jit::Node& node);
  inline static const std::string kRemedy =
      "Add the operator in lib/checkpoint/onnx.cpp, or export to TorchScript (--out model.ts)";
};

void TraceWriter::write(const jit::Node& node) {
  std::string op = node.kind().toQualString();
  if (op.back() == '_') op.pop_back();  // in-place operators
  const jit::Value* out = node.output();
  Value& to = values[out];
  if (op == "aten::cat") {
    to = g.add("Concat", tensors(node.input(0)), {{"axis", dim_of(node, 1, out)}});
    return;
  }
  const jit::Value* input = node.input(0);
  const Value x = tensor(input);
  if (op == "aten::_convolution") {
    check(!constant_of(node, 6).toBool(), "the model has a transposed convolution. ", kRemedy);
    std::vector<Value> inputs{x, tensor(node.input(1))};
    if (!constant_of(node, 2).isNone()) inputs.push_back(tensor(node.input(2)));  // the bias
    const Tensor weight = constant_of(node, 1).toTensor();
    const Ints pads = pair(node, 4);
    to = g.add("Conv", inputs,
               {{"kernel_shape", Ints{weight.size(2), weight.size(3)}},
                {"strides", pair(node, 3)},
                {"pads", Ints{pads[0], pads[1], pads[0], pads[1]}},
                {"dilations", pair(node, 5)},
                {"group", integer(node, 8)}});
  } else if (op == "aten::silu") {
    to = g.add("Mul", {x, g.add("Sigmoid", {x})});
  } else if (op == "aten::sigmoid" || op == "aten::relu") {
    to = g.add(op == "aten::relu" ? "Relu" : "Sigmoid", {x});
  } else if (op == "aten::leaky_relu") {
    to = g.add("LeakyRelu", {x}, {{"alpha", constant_of(node, 1).toDouble()}});
  } else if (op == "aten::batch_norm") {
    const std::vector<Value> inputs{x, tensor(node.input(1)), tensor(node.input(2)), tensor(node.input(3)),
                                    tensor(node.input(4))};
    to = g.add("BatchNormalization", inputs, {{"epsilon", constant_of(node, 7).toDouble()}});
  } else if (op == "aten::max_pool2d" && pair(node, 4) == Ints{1, 1}) {
    const Ints kernel = pair(node, 1), strides = pair(node, 2), pads = pair(node, 3);
    to = g.add("MaxPool", {x},
               {{"kernel_shape", kernel},
                {"strides", strides.empty() ? kernel : strides},
                {"pads", Ints{pads[0], pads[1], pads[0], pads[1]}},
                {"ceil_mode", int64_t(constant_of(node, 5).toBool())}});
  } else if (op == "aten::upsample_nearest2d") {
    const Ints from = shape_of(input), size = shape_of(out);
    const float up = float(size[2]) / float(from[2]), across = float(size[3]) / float(from[3]);
    to = g.add(
        "Resize", {x, "", g.floats({1, 1, up, across})},
        {{"mode", "nearest"}, {"coordinate_transformation_mode", "asymmetric"}, {"nearest_mode", "floor"}});
  } else if (op == "aten::add" || op == "aten::sub") {
    check(constant_of(node, 2).toScalar().toDouble() == 1, "the model adds with a factor (alpha). ", kRemedy);
    to = g.add(op == "aten::add" ? "Add" : "Sub", {x, tensor(node.input(1))});
  } else if (op == "aten::mul") {
    to = g.add("Mul", {x, tensor(node.input(1))});
  } else if (op == "aten::slice") {
    const auto start = constant_of(node, 2), end = constant_of(node, 3);
    const int64_t first = start.isNone() ? 0 : start.toInt();
    const int64_t last = end.isNone() ? std::numeric_limits<int64_t>::max() : end.toInt();
    to = g.add("Slice", {x, g.ints({first}), g.ints({last}), g.ints({dim_of(node, 1, input)}),
                         g.ints({integer(node, 4)})});
  } else if (op == "aten::permute") {
    to = g.add("Transpose", {x}, {{"perm", integers(node, 1)}});
  } else if (op == "aten::flatten") {
    // 0: as in the input; -1: computed. A dimension behind the flattened ones is a number of channels.
    const Ints shape = shape_of(input);
    const int64_t first = dim_of(node, 1, input), last = dim_of(node, 2, input);
    Ints flat(first, 0);
    flat.push_back(-1);
    flat.insert(flat.end(), shape.begin() + last + 1, shape.end());
    to = g.add("Reshape", {x, g.ints(flat)});
  } else if (op == "aten::view" || op == "aten::reshape") {
    to = g.add("Reshape", {x, g.ints(integers(node, 1))});
  } else if (op == "aten::squeeze") {
    to = g.add("Squeeze", {x, g.ints({dim_of(node, 1, input)})});
  } else if (op == "aten::unsqueeze") {
    to = g.add("Unsqueeze", {x, g.ints({dim_of(node, 1, out)})});
  } else if (op == "aten::contiguous" || op == "aten::detach" || op == "aten::dropout") {
    to = x;
  } else {
    fail("the model uses the operator ", op, ", which ONNX export does not support. ", kRemedy);
  }
}

// Output of the network before decoding, as Predictions of yolox.hpp, and the strides of its levels.
struct Raw {
  Value reg, obj, cls;
  std::vector<int> strides;
};

// Adds the network: runs model->forward() once, and adds the nodes of each operator that it calls. An edit of
// the model therefore needs no edit here, as long as its operators are known. Throws and names the operator
// otherwise.
Raw add_network(GraphBuilder& g, YOLOX& model) {
  const c10::AutoGradMode no_mkldnn(true);  // conv_silu() calls operators of oneDNN only without gradients
  model->eval();
  for (auto& p : model->parameters()) p.set_requires_grad(false);  // the trace has them as constants
  const Tensor weight = model->parameters()[0];
  // A network for a fixed size is traced with this size, because its code may depend on it.
  const Tensor example = torch::zeros(
      {1, 3, g.settings.dynamic ? 64 : g.settings.height, g.settings.dynamic ? 96 : g.settings.width},
      weight.options());
  Raw raw;
  const auto [state, _] = jit::tracer::trace(
      {example},
      [&](jit::Stack inputs) {
        const Predictions p = model(inputs[0].toTensor());
        raw.strides = p.strides;
        return jit::Stack{p.reg, p.obj, p.cls};
      },
      [](const torch::autograd::Variable&) { return ""; });
  const std::vector<Value> outputs = TraceWriter(g, *model).write(*state->graph, "images");
  raw.reg = outputs[0];
  raw.obj = outputs[1];
  raw.cls = outputs[2];
  return raw;
}

// Decodes Raw::reg to boxes cx, cy, w, h in pixels, [B, A, 4], as decode_boxes() in yolox.hpp.
Value add_box_decoding(GraphBuilder& g, const Raw& raw) {
  const auto& s = g.settings;
  Value grid, stride;
  if (!s.dynamic) {
    const Anchors anchors = make_anchors(s.height, s.width, torch::kFloat, raw.strides);
    grid = g.constant(anchors.grid.unsqueeze(0));
    stride = g.constant(anchors.stride.view({1, -1, 1}));
  } else {
    const Value size = g.add("Gather", {g.add("Shape", {"images"}), g.ints({2, 3})});
    std::vector<Value> grids, strides;
    for (const int step : raw.strides) {
      const Value cells = g.add("Div", {size, g.index(step)});  // rows, columns
      // The positions of all cells along a dimension of `cells`, [1, rows * columns, 1].
      const auto positions = [&](int64_t dim, const Ints& shape) {
        const Value count = g.add("Gather", {cells, g.index(dim)});
        const Value line = g.add("Reshape", {g.add("Range", {g.index(0), count, g.index(1)}), g.ints(shape)});
        const Value all = g.to_float(g.add("Expand", {line, cells}));
        return g.add("Reshape", {all, g.ints({1, -1, 1})});
      };
      const Value x = positions(1, {1, -1}), y = positions(0, {-1, 1});
      grids.push_back(g.add("Concat", {x, y}, {{"axis", 2}}));
      const Value pixels = g.constant(torch::full({1, 1, 1}, float(step)));
      strides.push_back(g.add("Expand", {pixels, g.add("Shape", {x})}));
    }
    grid = g.add("Concat", grids, {{"axis", 1}});
    stride = g.add("Concat", strides, {{"axis", 1}});
  }
  const Value offset = g.add("Split", {raw.reg, g.ints({2, 2})}, {{"axis", 2}}, 2), log_size = offset + "/1";
  const Value centre = g.add("Add", {offset, grid});
  const Value in_strides = g.add("Concat", {centre, g.add("Exp", {log_size})}, {{"axis", 2}});
  return g.add("Mul", {in_strides, stride});
}

// Returns [B, A, 5 + C]: box, objectness and class scores in 0..1. A box is cx, cy, w, h in pixels, or
// Predictions::reg of yolox.hpp without settings.decode.
Value add_rows(GraphBuilder& g, const Raw& raw) {
  const Value boxes = g.settings.decode ? add_box_decoding(g, raw) : raw.reg;
  const Value obj = g.add("Unsqueeze", {g.add("Sigmoid", {raw.obj}), g.ints({2})});
  return g.add("Concat", {boxes, obj, g.add("Sigmoid", {raw.cls})}, {{"axis", 2}}, 1, "output");
}

// Adds NMS. Converts decoded rows [B, A, 5 + C] to detections [D, 7]: index of the image in the batch, x1,
// y1, x2, y2 in pixels, score (objectness x class score), class. Detections are sorted by image, then by
// descending score. The result equals that of postprocess() in yolox.hpp: each anchor point predicts its best
// class only, and NMS runs per class.
void add_nms(GraphBuilder& g, const Value& decoded, int64_t classes) {
  const auto& s = g.settings;
  const Value boxes = g.add("Split", {decoded, g.ints({4, 1, classes})}, {{"axis", 2}}, 3);
  const Value obj = boxes + "/1", cls = boxes + "/2";
  const Value best = g.add("ReduceMax", {cls}, {{"axes", Ints{2}}, {"keepdims", 1}});
  const Value score = g.add("Mul", {obj, best});  // [B, A, 1]
  // [B, C, A]: the score for the best class of each anchor point, 0 for all other classes
  const Value which = g.add("ArgMax", {cls}, {{"axis", 2}, {"keepdims", 0}});
  const Value one_hot = g.add("OneHot", {which, g.index(classes), g.floats({0, 1})}, {{"axis", 1}});
  const Value scores = g.add("Mul", {one_hot, g.add("Transpose", {score}, {{"perm", Ints{0, 2, 1}}})});
  const auto count = [&](const Value& x, int64_t dim) {  // [1]
    return g.add("Gather", {g.add("Shape", {x}), g.ints({dim})});
  };
  // NonMaxSuppression keeps scores > threshold, postprocess() keeps scores >= threshold.
  const float conf = s.conf > 0 ? std::nextafter(float(s.conf), 0.f) : 0.f;
  const Value chosen =
      g.add("NonMaxSuppression", {boxes, scores, count(boxes, 1), g.floats({float(s.iou)}), g.floats({conf})},
            {{"center_point_box", 1}});  // [D, 3]: image, class, anchor point

  const Value centre = g.add("Split", {boxes, g.ints({2, 2})}, {{"axis", 2}}, 2);
  const Value half = g.add("Mul", {centre + "/1", g.floats({0.5f})});
  const Value rows = g.add("Concat", {g.add("Sub", {centre, half}), g.add("Add", {centre, half}), score},
                           {{"axis", 2}});  // [B, A, 5]
  const Value where = g.add("Gather", {chosen, g.ints({0, 2})}, {{"axis", 1}});
  const Value numbers = g.to_float(chosen);
  const auto column = [&](int64_t index) {  // [D, 1]
    return g.add("Gather", {numbers, g.ints({index})}, {{"axis", 1}});
  };
  const Value found =
      g.add("Concat", {column(0), g.add("GatherND", {rows, where}), column(1)}, {{"axis", 1}});
  // Sort by score, then by image. TopK is stable, so the second sort keeps the order by score within an
  // image.
  const Value n = count(found, 0);
  const auto sorted = [&](const Value& x, int64_t by, int64_t largest, const Value& name) {
    const Value key = g.add("Gather", {x, g.index(by)}, {{"axis", 1}});
    const Value order = g.add("TopK", {key, n}, {{"largest", largest}}, 2) + "/1";
    return g.add("Gather", {x, order}, {}, 1, name);
  };
  sorted(sorted(found, 5, 1, ""), 0, 0, "detections");
}

// Sizes, and the names of dimensions of any size.
using Dims = std::vector<std::variant<int64_t, const char*>>;

// Declares a float32 input or output of the graph.
void declare(onnx::ValueInfo& value, const std::string& name, const Dims& dims) {
  value.set_name(name);
  auto& type = *value.mutable_type()->mutable_tensor_type();
  type.set_elem_type(onnx::Tensor::FLOAT);
  for (const auto& dim : dims) {
    auto& added = *type.mutable_shape()->add_dim();
    if (const auto* size = std::get_if<int64_t>(&dim))
      added.set_value(*size);
    else
      added.set_param(std::get<const char*>(dim));
  }
}

}  // namespace

std::string to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata) {
  merge_focus(model);
  fuse_batch_norms(*model);
  GraphBuilder g{settings};
  g.file.set_ir_version(8);  // the IR version of ONNX 1.12, which introduced opset 17
  g.file.set_producer_name("yolox_cpp");
  g.file.add_opset_import()->set_version(17);
  g.file.mutable_opset_import(0)->set_domain("");
  for (const auto& [key, value] : metadata) {
    auto& entry = *g.file.add_metadata_props();
    entry.set_key(key);
    entry.set_value(value);
  }
  auto& graph = *g.file.mutable_graph();
  graph.set_name(model->name);
  const auto& s = settings;
  const Raw raw = add_network(g, model);
  const Value rows = add_rows(g, raw);
  if (s.nms) add_nms(g, rows, model->num_classes);
  const int64_t columns = 5 + model->num_classes,
                anchors = make_anchors(s.height, s.width, torch::kFloat, raw.strides).stride.size(0);
  declare(*graph.add_input(), "images",
          s.dynamic ? Dims{"batch", 3, "height", "width"} : Dims{1, 3, s.height, s.width});
  if (s.nms)
    declare(*graph.add_output(), "detections", {"detections", 7});
  else
    declare(*graph.add_output(), "output",
            s.dynamic ? Dims{"batch", "anchors", columns} : Dims{1, anchors, columns});
  std::string file;
  check(g.file.SerializeToString(&file), "the ONNX file would exceed 2 GB");
  return file;
}

// ---- TorchScript. The network is traced. Decoding is source, because it depends on the image size, which a
// trace would fix.

torch::jit::Module to_torchscript(YOLOX& model, const ExportSettings& settings) {
  const torch::NoGradGuard no_grad;
  merge_focus(model);
  for (auto& p : model->parameters()) p.set_requires_grad(false);  // the trace stores them as constants
  model->to(torch::kFloat);
  std::vector<int> strides;
  torch::jit::Module module("YOLOX");
  const auto [state, outputs] = torch::jit::tracer::trace(
      {torch::zeros({2, 3, 64, 64})},
      [&](torch::jit::Stack inputs) {
        const Predictions p = model(inputs[0].toTensor());
        strides = p.strides;
        // [B, A, 5 + C]: boxes, objectness logit, class logits
        return torch::jit::Stack{torch::cat({p.reg, p.obj.unsqueeze(-1), p.cls}, -1)};
      },
      [](const torch::autograd::Variable&) { return ""; }, /*strict=*/true, /*force_outplace=*/false, &module,
      {"images"});
  module.type()->addMethod(module._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(*module.type()->name(), "network"), state->graph));

  if (settings.decode)
    module.define(concat(R"(
def forward(self, images):
  raw = self.network(images)
  cells : List[Tensor] = []
  strides : List[Tensor] = []
  for s in )",
                         c10::ArrayRef<int>(strides), R"(:
    rows = images.size(2) // s
    columns = images.size(3) // s
    x = torch.arange(columns, device=raw.device).expand([rows, columns])
    y = torch.arange(rows, device=raw.device).unsqueeze(1).expand([rows, columns])
    cells.append(torch.stack([x, y], 2).view([-1, 2]))
    strides.append(torch.full([rows * columns, 1], float(s), device=raw.device))
  stride = torch.cat(strides)
  centre = (raw[:, :, 0:2] + torch.cat(cells)) * stride
  return torch.cat([centre, torch.exp(raw[:, :, 2:4]) * stride, torch.sigmoid(raw[:, :, 4:])], 2)
)"));
  else
    module.define(R"(
def forward(self, images):
  raw = self.network(images)
  return torch.cat([raw[:, :, 0:4], torch.sigmoid(raw[:, :, 4:])], 2)
)");
  return module;
}

std::string torchscript_file(const torch::jit::Module& module, const Metadata& metadata) {
  torch::jit::ExtraFilesMap extra;
  for (const auto& [key, text] : metadata) extra[key] = text;
  std::ostringstream bytes;
  module.save(bytes, extra);
  return bytes.str();
}

}  // namespace yolox
