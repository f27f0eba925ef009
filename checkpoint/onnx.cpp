// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/onnx.hpp"

#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <tuple>

#include "base/error.hpp"
#include "checkpoint/load.hpp"

namespace yolox {

onnx::Tensor::Type onnx_type(torch::ScalarType type) {
  if (type == torch::kHalf) return onnx::Tensor::FLOAT16;
  return type == torch::kLong ? onnx::Tensor::INT64 : onnx::Tensor::FLOAT;
}

Value OnnxGraph::add(const std::string& op, const std::vector<Value>& inputs, const std::string& name,
                     const std::vector<OnnxAttribute>& attributes, int outputs) {
  auto& node = *file.mutable_graph()->add_node();
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
    } else if (const auto* s = std::get_if<std::string>(&value)) {
      a.set_s(*s);
      a.set_type(onnx::Attribute::STRING);
    } else {
      a.mutable_ints()->Assign(std::get<Ints>(value).begin(), std::get<Ints>(value).end());
      a.set_type(onnx::Attribute::INTS);
    }
  }
  return name;
}

Value OnnxGraph::constant(const std::string& name, const Tensor& tensor) {
  auto& t = *file.mutable_graph()->add_initializer();
  t.set_name(name);
  t.set_data_type(onnx_type(tensor.scalar_type()));
  t.mutable_dims()->Assign(tensor.sizes().begin(), tensor.sizes().end());
  const Tensor flat = tensor.contiguous();
  t.set_raw_data(flat.data_ptr(), flat.nbytes());
  return name;
}

Value OnnxGraph::scalar(const std::string& name, const torch::Scalar& value) {
  return constant(name, torch::scalar_tensor(value, value.isIntegral(false) ? torch::kLong : torch::kFloat));
}

Value OnnxGraph::weights(const std::string& name, const Tensor& tensor) {
  const Tensor t = tensor.detach().to(torch::kCPU, settings.half ? torch::kHalf : torch::kFloat);
  check(t.isfinite().all().item<bool>(), name, " has values that are not finite",
        settings.half ? " in float16; leave --fp16 out" : "; use other weights");
  return constant(name, t);
}

void OnnxGraph::describe(bool input, const std::string& name, const std::vector<onnx::Dimension>& dims) {
  auto& info = *(input ? file.mutable_graph()->add_input() : file.mutable_graph()->add_output());
  info.set_name(name);
  auto& type = *info.mutable_type()->mutable_tensor_type();
  type.set_elem_type(onnx::Tensor::FLOAT);
  for (const auto& dim : dims) *type.mutable_shape()->add_dim() = dim;
}

namespace {

namespace jit = torch::jit;

// Writes the operators of a traced network as ONNX nodes, one after the other.
class TraceWriter {
 public:
  TraceWriter(OnnxGraph& graph, const nn::Module& model) : g(graph) {
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
  OnnxGraph& g;
  std::map<const void*, std::string> names;   // of parameters and buffers, by address
  std::map<const jit::Value*, Value> values;  // tensors of the trace
  std::map<std::string, int> used;            // names of nodes
  std::map<std::string, Value> written;       // initializers by name

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

  // Returns a name that no node has yet.
  std::string unique(const std::string& name) {
    const int before = used[name]++;
    return before ? concat(name, ".", before + 1) : name;
  }
  // Returns a name for a node: the module that contains all inputs, and the operator. For example, "a.b.conv"
  // and "silu" give "a.b.silu".
  std::string name_after(const std::vector<Value>& inputs, const std::string& op) {
    std::string module = inputs[0];
    for (const Value& x : inputs)
      module.resize(
          size_t(std::mismatch(module.begin(), module.end(), x.begin(), x.end()).first - module.begin()));
    const size_t dot = module.rfind('.');
    return unique(dot == std::string::npos ? op : module.substr(0, dot + 1) + op);
  }
  std::string name_after(const Value& x, const std::string& op) {
    return name_after(std::vector<Value>{x}, op);
  }
  // Returns the initializer with the values of a tensor.
  Value initializer(const std::string& name, const Tensor& tensor) {
    if (!written.count(name)) written[name] = g.weights(name, tensor);
    return written[name];
  }
  std::string name_of(const Tensor& constant) {
    const auto name = names.find(constant.data_ptr());
    return name == names.end() ? unique("constant") : name->second;
  }
  // Returns a tensor argument: a value that was computed before, a parameter, or a number.
  Value tensor(const jit::Value* value) {
    const auto found = values.find(value);
    if (found != values.end()) return found->second;
    const auto constant = jit::toIValue(value);
    check(constant && (constant->isTensor() || constant->isScalar()),
          "the model computes a value that ONNX export does not support. ", kRemedy);
    if (constant->isScalar())
      return initializer(unique("number"), torch::scalar_tensor(constant->toScalar()));
    return initializer(name_of(constant->toTensor()), constant->toTensor());
  }
  std::vector<Value> tensors(const jit::Value* list) {
    std::vector<Value> all;
    for (const jit::Value* value : list->node()->inputs()) all.push_back(tensor(value));
    return all;
  }

  void write(const jit::Node& node);
  void write_convolution(const jit::Node& node);
  Value pool(const std::string& op, const jit::Node& node, const Value& x, size_t ceil_mode);
  Value reshape(const Value& x, const Ints& shape) {
    const std::string name = name_after(x, "reshape");
    return g.add("Reshape", {x, g.constant(name + ".shape", shape)}, name);
  }

  inline static const std::string kRemedy =
      "Add the operator in checkpoint/onnx.cpp, or export to TorchScript (--format torchscript), which "
      "supports all operators";
};

// Folds a batch norm in evaluation mode that alone uses the output of the convolution.
void TraceWriter::write_convolution(const jit::Node& node) {
  check(!constant_of(node, 6).toBool(), "the model has a transposed convolution. ", kRemedy);
  Tensor weight = constant_of(node, 1).toTensor();
  const c10::IValue given_bias = constant_of(node, 2);
  std::string name = name_of(weight);
  name = name.substr(0, name.rfind(".weight"));
  Tensor bias =
      given_bias.isTensor() ? given_bias.toTensor() : torch::zeros({weight.size(0)}, weight.options());
  const jit::Value* out = node.output();
  const auto& uses = out->uses();
  if (uses.size() == 1 && uses[0].user->kind().toQualString() == std::string("aten::batch_norm")) {
    const jit::Node& norm = *uses[0].user;
    const auto of = [&](size_t i) { return constant_of(norm, i).toTensor(); };
    std::tie(weight, bias) =
        fold_batch_norm(weight, bias, of(1), of(2), of(3), of(4), constant_of(norm, 7).toDouble());
    out = norm.output();
  }
  const Ints pads = pair(node, 4);
  values[out] =
      g.add("Conv",
            {tensor(node.input(0)), initializer(name + ".weight", weight), initializer(name + ".bias", bias)},
            unique(name),
            {{"kernel_shape", Ints{weight.size(2), weight.size(3)}},
             {"strides", pair(node, 3)},
             {"pads", Ints{pads[0], pads[1], pads[0], pads[1]}},
             {"dilations", pair(node, 5)},
             {"group", integer(node, 8)}});
}

// ceil_mode: position of this argument, which follows kernel size, stride, padding (and dilation).
Value TraceWriter::pool(const std::string& op, const jit::Node& node, const Value& x, size_t ceil_mode) {
  const Ints kernel = pair(node, 1), pads = pair(node, 3);
  Ints strides = pair(node, 2);
  if (strides.empty()) strides = kernel;
  return g.add(op, {x}, name_after(x, "pool"),
               {{"kernel_shape", kernel},
                {"strides", strides},
                {"pads", Ints{pads[0], pads[1], pads[0], pads[1]}},
                {"ceil_mode", int64_t(constant_of(node, ceil_mode).toBool())}});
}

void TraceWriter::write(const jit::Node& node) {
  std::string op = node.kind().toQualString();
  if (op.back() == '_') op.pop_back();  // in-place operators
  if (op == "aten::_convolution") return write_convolution(node);
  const jit::Value* out = node.output();
  if (values.count(out)) return;  // a folded batch norm
  Value& to = values[out];
  if (op == "aten::cat") {
    const std::vector<Value> parts = tensors(node.input(0));
    to = g.add("Concat", parts, name_after(parts, "cat"), {{"axis", dim_of(node, 1, out)}});
    return;
  }
  const jit::Value* input = node.input(0);
  const Value x = tensor(input);
  const auto rank = [&] { return int64_t(shape_of(input).size()); };
  if (op == "aten::silu") {
    to = g.add("Mul", {x, g.add("Sigmoid", {x}, name_after(x, "sigmoid"))}, name_after(x, "silu"));
  } else if (op == "aten::sigmoid") {
    to = g.add("Sigmoid", {x}, name_after(x, "sigmoid"));
  } else if (op == "aten::relu") {
    to = g.add("Relu", {x}, name_after(x, "relu"));
  } else if (op == "aten::leaky_relu") {
    to = g.add("LeakyRelu", {x}, name_after(x, "leaky_relu"), {{"alpha", constant_of(node, 1).toDouble()}});
  } else if (op == "aten::batch_norm") {
    to =
        g.add("BatchNormalization",
              {x, tensor(node.input(1)), tensor(node.input(2)), tensor(node.input(3)), tensor(node.input(4))},
              name_after(x, "bn"), {{"epsilon", constant_of(node, 7).toDouble()}});
  } else if (op == "aten::max_pool2d" && pair(node, 4) == Ints{1, 1}) {
    to = pool("MaxPool", node, x, 5);
  } else if (op == "aten::upsample_nearest2d") {
    const Ints from = shape_of(input), size = shape_of(out);
    const std::string name = name_after(x, "up");
    const Tensor scales =
        torch::tensor({1.0, 1.0, double(size[2]) / double(from[2]), double(size[3]) / double(from[3])});
    to = g.add(
        "Resize", {x, "", g.constant(name + ".scales", scales.to(torch::kFloat))}, name,
        {{"mode", "nearest"}, {"coordinate_transformation_mode", "asymmetric"}, {"nearest_mode", "floor"}});
  } else if (op == "aten::add" || op == "aten::sub") {
    check(constant_of(node, 2).toScalar().toDouble() == 1, "the model adds with a factor (alpha). ", kRemedy);
    const Value y = tensor(node.input(1));
    to = g.add(op == "aten::add" ? "Add" : "Sub", {x, y}, name_after({x, y}, op.substr(6)));
  } else if (op == "aten::mul") {
    const Value y = tensor(node.input(1));
    to = g.add("Mul", {x, y}, name_after({x, y}, "mul"));
  } else if (op == "aten::slice") {
    const std::string name = name_after(x, "slice");
    const auto end = constant_of(node, 3), start = constant_of(node, 2);
    const auto list = [&](const char* what, int64_t value) { return g.constant(name + what, Ints{value}); };
    to = g.add("Slice",
               {x, list(".start", start.isNone() ? 0 : start.toInt()),
                list(".end", end.isNone() ? std::numeric_limits<int64_t>::max() : end.toInt()),
                list(".axis", dim_of(node, 1, input)), list(".step", integer(node, 4))},
               name);
  } else if (op == "aten::permute") {
    to = g.add("Transpose", {x}, name_after(x, "permute"), {{"perm", integers(node, 1)}});
  } else if (op == "aten::flatten") {
    // 0: as in the input; -1: computed. A dimension behind the flattened ones is a number of channels.
    const Ints shape = shape_of(input);
    const int64_t first = dim_of(node, 1, input), last = dim_of(node, 2, input);
    Ints flat(first, 0);
    flat.push_back(-1);
    flat.insert(flat.end(), shape.begin() + last + 1, shape.end());
    to = reshape(x, flat);
  } else if (op == "aten::view" || op == "aten::reshape") {
    to = reshape(x, integers(node, 1));
  } else if (op == "aten::squeeze" || op == "aten::unsqueeze") {
    const std::string name = name_after(x, op.substr(6));
    const int64_t dim = integer(node, 1), dims = rank() + (op == "aten::unsqueeze" ? 1 : 0);
    to = g.add(op == "aten::squeeze" ? "Squeeze" : "Unsqueeze",
               {x, g.constant(name + ".axis", Ints{dim < 0 ? dim + dims : dim})}, name);
  } else if (op == "aten::contiguous" || op == "aten::detach" || op == "aten::dropout") {
    to = x;
  } else {
    fail("the model uses the operator ", op, ", which ONNX export does not support. ", kRemedy);
  }
}

// Sets parameters to requires_grad = false, which the tracer needs, and restores them at the end.
struct WithoutGradients {
  explicit WithoutGradients(nn::Module& model) {
    for (auto& p : model.parameters())
      if (p.requires_grad()) changed.push_back(p.set_requires_grad(false));
  }
  ~WithoutGradients() {
    for (auto& p : changed) p.set_requires_grad(true);
  }
  WithoutGradients(const WithoutGradients&) = delete;
  WithoutGradients& operator=(const WithoutGradients&) = delete;

 private:
  std::vector<Tensor> changed;
};

}  // namespace

Raw add_network(OnnxGraph& g, YOLOX& model, const Value& images) {
  const torch::NoGradGuard no_grad;
  const EvalGuard evaluation(*model);
  const WithoutGradients without_gradients(*model);
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
  const std::vector<Value> outputs = TraceWriter(g, *model).write(*state->graph, images);
  const auto single = [&](const Value& x, const char* name) {
    return g.settings.half ? g.cast(x, name, torch::kFloat) : x;
  };
  raw.reg = single(outputs[0], "reg");
  raw.obj = single(outputs[1], "obj");
  raw.cls = single(outputs[2], "cls");
  return raw;
}

Value add_box_decoding(OnnxGraph& g, const Raw& raw, const Value& images) {
  const auto& s = g.settings;
  const auto ints = [&](const std::string& name, const Ints& list) {
    return g.constant("decode." + name, list);
  };
  Value grid, stride;
  if (!s.dynamic) {
    const Anchors anchors = make_anchors(s.height, s.width, torch::kFloat, raw.strides);
    grid = g.constant("decode.grid", anchors.grid.unsqueeze(0));
    stride = g.constant("decode.stride", anchors.stride.view({1, -1, 1}));
  } else {
    const Value size = g.add("Shape", {images}, "decode.size");
    std::vector<Value> grids, strides;
    for (const int step : raw.strides) {
      const std::string level = concat("decode.", step);
      const auto of_level = [&](const char* name) { return concat(level, ".", name); };
      const auto count = [&](const char* name, int64_t dim) {  // rows or columns of cells
        const std::string of = of_level(name);
        const Value pixels = g.add("Gather", {size, g.scalar(of + ".dim", dim)}, of + ".pixels");
        return g.add("Div", {pixels, g.scalar(of + ".stride", int64_t(step))}, of);
      };
      const Value rows = count("rows", 2), columns = count("columns", 3);
      const auto as_list = [&](const Value& x) {
        return g.add("Reshape", {x, ints(x + ".one", {1})}, x + ".list");
      };
      const Value cells =
          g.add("Concat", {as_list(rows), as_list(columns)}, of_level("cells"), {{"axis", 0}});
      const auto positions = [&](const char* name, const Value& n, const Ints& shape) {  // [cells, 1]
        const std::string of = of_level(name);
        const Value range =
            g.add("Range", {g.scalar(of + ".first", int64_t{0}), n, g.scalar(of + ".step", int64_t{1})},
                  of + ".range");
        const Value line = g.add("Reshape", {range, g.constant(of + ".shape", shape)}, of + ".line");
        const Value all = g.add("Expand", {line, cells}, of + ".all");
        return g.add("Reshape",
                     {g.cast(all, of + ".float", torch::kFloat), g.constant(of + ".flat", Ints{1, -1, 1})},
                     of);
      };
      const Value x = positions("x", columns, {1, -1}), y = positions("y", rows, {-1, 1});
      grids.push_back(g.add("Concat", {x, y}, of_level("grid"), {{"axis", 2}}));
      const Value zeros = g.add("Mul", {x, g.scalar(of_level("zero"), 0.0)}, of_level("zeros"));
      strides.push_back(
          g.add("Add", {zeros, g.scalar(of_level("pixels"), double(step))}, of_level("strides")));
    }
    grid = g.add("Concat", grids, "decode.grid", {{"axis", 1}});
    stride = g.add("Concat", strides, "decode.stride", {{"axis", 1}});
  }
  const Value xy = g.add("Split", {raw.reg, ints("parts", {2, 2})}, "decode.split", {{"axis", 2}}, 2);
  const Value in_strides =
      g.add("Concat", {g.add("Add", {xy, grid}, "decode.xy"), g.add("Exp", {xy + "/1"}, "decode.wh")},
            "decode.cells_of_boxes", {{"axis", 2}});
  return g.add("Mul", {in_strides, stride}, "decode.boxes");
}

Value add_rows(OnnxGraph& g, const Raw& raw, const Value& images) {
  const Value boxes = g.settings.decode ? add_box_decoding(g, raw, images) : raw.reg;
  const Value obj =
      g.add("Unsqueeze", {g.add("Sigmoid", {raw.obj}, "scores.obj"), g.constant("scores.axis", Ints{2})},
            "scores.obj.column");
  return g.add("Concat", {boxes, obj, g.add("Sigmoid", {raw.cls}, "scores.cls")}, "output", {{"axis", 2}});
}

Value add_nms(OnnxGraph& g, const Value& decoded, int64_t classes) {
  const auto& s = g.settings;
  const auto name = [](const char* what) { return concat("nms.", what); };
  const auto ints = [&](const char* what, const Ints& list) { return g.constant(name(what), list); };
  const Value boxes =
      g.add("Split", {decoded, ints("parts", {4, 1, classes})}, name("split"), {{"axis", 2}}, 3);
  const Value obj = boxes + "/1", cls = boxes + "/2";
  const Value best = g.add("ReduceMax", {cls}, name("best"), {{"axes", Ints{2}}, {"keepdims", 1}});
  const Value score = g.add("Mul", {obj, best}, name("score"));  // [B, A, 1]
  // [B, C, A]: the score for the best class of each anchor point, 0 for all other classes
  const Value which = g.add("ArgMax", {cls}, name("class"), {{"axis", 2}, {"keepdims", 0}});
  const Value one_hot = g.add(
      "OneHot",
      {which, g.scalar(name("classes"), classes), g.constant(name("off_on"), torch::tensor({0.f, 1.f}))},
      name("one_hot"), {{"axis", 1}});
  const Value scores =
      g.add("Mul", {one_hot, g.add("Transpose", {score}, name("score.t"), {{"perm", Ints{0, 2, 1}}})},
            name("scores"));
  const auto count = [&](const Value& x, const char* what) {  // [1]: number of rows of x
    const Value shape = g.add("Shape", {x}, concat(name(what), ".shape"));
    const Value dim = g.constant(concat(name(what), ".dim"), Ints{x == boxes ? 1 : 0});
    return g.add("Gather", {shape, dim}, name(what));
  };
  // NonMaxSuppression keeps scores > threshold, postprocess() keeps scores >= threshold.
  const float conf = s.conf > 0 ? std::nextafter(float(s.conf), 0.f) : 0.f;
  const auto threshold = [&](const char* what, float value) {
    return g.constant(name(what), torch::tensor({value}));
  };
  const Value chosen =
      g.add("NonMaxSuppression",
            {boxes, scores, count(boxes, "most"), threshold("iou", float(s.iou)), threshold("conf", conf)},
            name("chosen"), {{"center_point_box", 1}});  // [D, 3]: image, class, anchor point

  const Value parts = ints("two_two", {2, 2});
  const Value centre = g.add("Split", {boxes, parts}, name("centre"), {{"axis", 2}}, 2);
  const Value half = g.add("Mul", {centre + "/1", g.scalar(name("0.5"), 0.5)}, name("half"));
  const Value rows =
      g.add("Concat",
            {g.add("Sub", {centre, half}, name("x1y1")), g.add("Add", {centre, half}, name("x2y2")), score},
            name("rows"), {{"axis", 2}});  // [B, A, 5]
  const Value where = g.add("Gather", {chosen, ints("image_anchor", {0, 2})}, name("where"), {{"axis", 1}});
  const Value numbers = g.cast(chosen, name("numbers"), torch::kFloat);
  const auto column = [&](const char* what, int64_t index) {  // [D, 1]
    return g.add("Gather", {numbers, ints(concat(what, ".index").c_str(), {index})}, name(what),
                 {{"axis", 1}});
  };
  const Value found =
      g.add("Concat", {column("image", 0), g.add("GatherND", {rows, where}, name("boxes")), column("cls", 1)},
            name("found"), {{"axis", 1}});
  // Sort by score, then by image. TopK is stable, so the second sort keeps the order by score within an
  // image.
  const Value n = count(found, "n");
  const auto sorted = [&](const Value& x, int64_t by, bool largest, const std::string& out) {
    const std::string key = concat("nms.by", by);
    const Value values = g.add("Gather", {x, g.scalar(key + ".index", by)}, key, {{"axis", 1}});
    const Value order = g.add("TopK", {values, n}, key + ".top", {{"largest", int64_t(largest)}}, 2) + "/1";
    return g.add("Gather", {x, order}, out);
  };
  return sorted(sorted(found, 5, true, "nms.by_score"), 0, false, "detections");
}

onnx::Model to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata) {
  check(settings.decode || !settings.nms, "NMS needs decoded boxes");
  OnnxGraph g{{}, settings};
  g.file.set_ir_version(8);  // the IR version of ONNX 1.12, which introduced opset 17
  g.file.set_producer_name("yolox_cpp");
  g.file.add_opset_import()->set_version(17);
  g.file.mutable_opset_import(0)->set_domain("");
  for (const auto& [key, value] : metadata) {
    auto& entry = *g.file.add_metadata_props();
    entry.set_key(key);
    entry.set_value(value);
  }
  g.file.mutable_graph()->set_name(model->name);
  const auto fixed = [](int64_t n) {
    onnx::Dimension dim;
    dim.set_value(n);
    return dim;
  };
  const auto any = [](const char* name) {
    onnx::Dimension dim;
    dim.set_param(name);
    return dim;
  };
  const auto& s = settings;
  const Value images = s.half ? g.cast("images", "images.half", torch::kHalf) : "images";
  const Raw raw = add_network(g, model, images);
  const Value output = add_rows(g, raw, "images");
  if (s.nms) add_nms(g, output, model->num_classes);
  int64_t anchors = 0;
  for (const int stride : raw.strides) anchors += (s.height / stride) * (s.width / stride);
  g.describe(true, "images",
             {s.dynamic ? any("batch") : fixed(1), fixed(3), s.dynamic ? any("height") : fixed(s.height),
              s.dynamic ? any("width") : fixed(s.width)});
  if (s.nms)
    g.describe(false, "detections", {any("detections"), fixed(7)});
  else
    g.describe(false, "output",
               {s.dynamic ? any("batch") : fixed(1), s.dynamic ? any("anchors") : fixed(anchors),
                fixed(5 + model->num_classes)});
  return std::move(g.file);
}

void save_onnx(const onnx::Model& model, const std::string& path) {
  check(model.ByteSizeLong() < (size_t{1} << 31) - 1, path,
        ": an ONNX file is limited to 2 GB, the model has ", model.ByteSizeLong(),
        " bytes; --fp16 halves the size");
  std::ofstream out(path, std::ios::binary);
  check(model.SerializeToOstream(&out) && out.flush(), "cannot write ", path,
        "; check folder, permissions and disk space");
}

}  // namespace yolox
