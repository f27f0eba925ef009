// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/onnx.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/new_file.hpp"

namespace yolox {

Tensor to_torch(const onnx::Tensor& t, const std::string& path) {
  const std::string name = concat(path, ": ", t.name());
  check(t.data_location() == 0, name,
        " is stored in another file (external data); export the network to one file");
  const torch::IntArrayRef shape(t.dims().data(), t.dims_size());
  const auto copy = [&](const auto& values, torch::ScalarType type) {
    const int64_t bytes = int64_t(values.size()) * int64_t(sizeof *values.data());
    int64_t wanted = int64_t(c10::elementSize(type));
    for (const int64_t side :
         shape) {  // -1 for a negative side, or a side so large that the product overflows
      const bool possible = wanted >= 0 && side >= 0 && side <= INT32_MAX && wanted <= INT32_MAX;
      wanted = possible ? wanted * side : -1;
    }
    check(wanted == bytes && shape.size() <= 8, name, " has the shape ",
          shape.slice(0, std::min<size_t>(8, shape.size())), " and ", bytes,
          " bytes of values; the file is damaged");
    Tensor out = torch::empty(shape, type);
    if (bytes) std::memcpy(out.data_ptr(), values.data(), bytes);
    return out;
  };
  switch (t.data_type()) {
    case onnx::Tensor::FLOAT:
      return t.has_raw_data() ? copy(t.raw_data(), torch::kFloat) : copy(t.float_data(), torch::kFloat);
    case onnx::Tensor::DOUBLE:
      return t.has_raw_data() ? copy(t.raw_data(), torch::kDouble) : copy(t.double_data(), torch::kDouble);
    case onnx::Tensor::INT64:
      return t.has_raw_data() ? copy(t.raw_data(), torch::kLong) : copy(t.int64_data(), torch::kLong);
    case onnx::Tensor::FLOAT16: return copy(t.raw_data(), torch::kHalf);
    case onnx::Tensor::BFLOAT16: return copy(t.raw_data(), torch::kBFloat16);
  }
  fail(name, " has values of ONNX type ", t.data_type(),
       "; supported are float32, float16, bfloat16, float64 and int64");
}

const onnx::Attribute* find_attribute(const onnx::Node& node, const std::string& name) {
  for (const auto& a : node.attribute())
    if (a.name() == name) return &a;
  return nullptr;
}

int64_t attribute(const onnx::Node& node, const std::string& name, int64_t otherwise) {
  const auto* a = find_attribute(node, name);
  return a ? a->i() : otherwise;
}

std::vector<int64_t> attribute(const onnx::Node& node, const std::string& name,
                               const std::vector<int64_t>& otherwise) {
  const auto* a = find_attribute(node, name);
  return a ? std::vector<int64_t>(a->ints().begin(), a->ints().end()) : otherwise;
}

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
  if (with_values) t.set_raw_data(flat.data_ptr(), flat.nbytes());
  return name;
}

Value OnnxGraph::scalar(const std::string& name, const torch::Scalar& value) {
  return constant(name, torch::scalar_tensor(value, value.isIntegral(false) ? torch::kLong : torch::kFloat));
}

Value OnnxGraph::weights(const std::string& name, const Tensor& tensor) {
  const Tensor t = tensor.detach().to(torch::kCPU, settings.half ? torch::kHalf : torch::kFloat);
  check(!with_values || t.isfinite().all().item<bool>(), name, " has values that are not finite",
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

Value add_conv(OnnxGraph& g, const std::string& name, nn::Conv2dImpl& conv, const Tensor& weight,
               const Tensor& bias, const Value& x) {
  const auto& o = conv.options;
  const int64_t pad = (o.kernel_size()->at(0) - 1) / 2;
  return g.add("Conv", {x, g.weights(name + ".weight", weight), g.weights(name + ".bias", bias)}, name,
               {{"kernel_shape", Ints(o.kernel_size()->begin(), o.kernel_size()->end())},
                {"strides", Ints(o.stride()->begin(), o.stride()->end())},
                {"pads", Ints{pad, pad, pad, pad}},
                {"group", o.groups()}});
}

Value add_nodes(OnnxGraph& g, const std::string& name, BaseConvImpl& m, const Value& x) {
  const auto [weight, bias] = fused_parameters(m);
  const Value y = add_conv(g, name + ".conv", *m.conv, weight, bias, x);
  return g.add("Mul", {y, g.add("Sigmoid", {y}, name + ".sigmoid")}, name + ".silu");
}

Value add_nodes(OnnxGraph& g, const std::string& name, SeqImpl& m, Value x) {
  for (size_t i = 0; i < m.blocks.size(); ++i) x = add_nodes(g, concat(name, ".", i), *m.blocks[i], x);
  return x;
}

Value add_nodes(OnnxGraph& g, const std::string& name, BottleneckImpl& m, const Value& x) {
  const Value y = add_nodes(g, name + ".conv2", *m.conv2, add_nodes(g, name + ".conv1", *m.conv1, x));
  return m.shortcut ? g.add("Add", {y, x}, name + ".add") : y;
}

Value add_nodes(OnnxGraph& g, const std::string& name, CSPLayerImpl& m, const Value& x) {
  const Value first = add_nodes(g, name + ".conv1", *m.conv1, x),
              second = add_nodes(g, name + ".conv2", *m.conv2, x);
  const Value both =
      g.add("Concat", {add_nodes(g, name + ".m", *m.m, first), second}, name + ".cat", {{"axis", 1}});
  return add_nodes(g, name + ".conv3", *m.conv3, both);
}

Value add_nodes(OnnxGraph& g, const std::string& name, SPPBottleneckImpl& m, const Value& x) {
  std::vector<Value> pooled{add_nodes(g, name + ".conv1", *m.conv1, x)};
  for (const char* window : {"5", "9", "13"})
    pooled.push_back(
        g.add("MaxPool", {pooled.back()}, concat(name, ".max", window),
              {{"kernel_shape", Ints{5, 5}}, {"strides", Ints{1, 1}}, {"pads", Ints{2, 2, 2, 2}}}));
  return add_nodes(g, name + ".conv2", *m.conv2, g.add("Concat", pooled, name + ".cat", {{"axis", 1}}));
}

Value add_nodes(OnnxGraph& g, const std::string& name, FocusImpl& m, const Value& x) {
  constexpr int64_t kEnd = std::numeric_limits<int64_t>::max();
  const Value end = g.constant(name + ".end", Ints{kEnd, kEnd}),
              axes = g.constant(name + ".axes", Ints{2, 3}), step = g.constant(name + ".step", Ints{2, 2});
  std::vector<Value> patches;
  for (const auto& [row, column] : {std::pair{0, 0}, {1, 0}, {0, 1}, {1, 1}}) {
    const std::string patch = concat(name, ".patch", row, column);
    patches.push_back(
        g.add("Slice", {x, g.constant(patch + ".start", Ints{row, column}), end, axes, step}, patch));
  }
  return add_nodes(g, name + ".conv", *m.conv, g.add("Concat", patches, name + ".cat", {{"axis", 1}}));
}

Value add_nodes(OnnxGraph& g, const std::string& name, Block& block, const Value& x) {
  if (auto* m = dynamic_cast<BaseConvImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<DWConvImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<SeqImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<BottleneckImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<CSPLayerImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<SPPBottleneckImpl*>(&block)) return add_nodes(g, name, *m, x);
  if (auto* m = dynamic_cast<FocusImpl*>(&block)) return add_nodes(g, name, *m, x);
  fail(name, " is a block that checkpoint/onnx.cpp does not support; add its nodes there");
}

std::vector<Value> add_nodes(OnnxGraph& g, const std::string& name, PAFPNImpl& m, const Value& images) {
  const std::string dark = name + ".backbone";
  const Value scales = g.constant(name + ".up", torch::tensor({1.f, 1.f, 2.f, 2.f}));
  const auto joined = [&](const Value& a, const Value& b) {
    return g.add("Concat", {a, b}, a + ".cat", {{"axis", 1}});
  };
  const auto up = [&](const Value& x) {
    return g.add(
        "Resize", {x, "", scales}, x + ".up",
        {{"mode", "nearest"}, {"coordinate_transformation_mode", "asymmetric"}, {"nearest_mode", "floor"}});
  };
  const auto block = [&](const char* child, Block& b, const Value& x) {
    return add_nodes(g, concat(name, ".", child), b, x);
  };
  CSPDarknetImpl& d = *m.backbone;
  const Value x4 = add_nodes(g, dark + ".dark2", *d.dark2, add_nodes(g, dark + ".stem", *d.stem, images));
  const Value x8 = add_nodes(g, dark + ".dark3", *d.dark3, x4),
              x16 = add_nodes(g, dark + ".dark4", *d.dark4, x8),
              x32 = add_nodes(g, dark + ".dark5", *d.dark5, x16);
  const Value top = block("lateral_conv0", *m.lateral_conv0, x32);
  const Value middle = block("reduce_conv1", *m.reduce_conv1, block("C3_p4", *m.C3_p4, joined(up(top), x16)));
  const Value out8 = block("C3_p3", *m.C3_p3, joined(up(middle), x8));
  const Value out16 = block("C3_n3", *m.C3_n3, joined(block("bu_conv2", *m.bu_conv2, out8), middle));
  const Value out32 = block("C3_n4", *m.C3_n4, joined(block("bu_conv1", *m.bu_conv1, out16), top));
  return {out8, out16, out32};
}

Value add_box_decoding(OnnxGraph& g, const std::string& name, const Value& reg, int stride) {
  const auto& s = g.settings;
  const auto cells = [&](const char* axis, int64_t dim, int64_t n, const Ints& shape) {  // 0, 1, ...
    const std::string of = concat(name, ".", axis);
    if (!s.dynamic) return g.constant(of, torch::arange(n, torch::kFloat).view(shape));
    const Value size = g.add("Shape", {reg}, of + ".shape");
    const Value count = g.add("Gather", {size, g.scalar(of + ".dim", dim)}, of + ".count");
    const Value range =
        g.add("Range", {g.scalar(of + ".first", int64_t{0}), count, g.scalar(of + ".step", int64_t{1})},
              of + ".range");
    return g.add("Reshape", {g.cast(range, of + ".float", torch::kFloat), g.constant(of + ".as", shape)}, of);
  };
  const Value columns = cells("columns", 3, s.width / stride, {1, 1, 1, -1}),
              rows = cells("rows", 2, s.height / stride, {1, 1, -1, 1});
  const Value x =
      g.add("Split", {reg, g.constant(name + ".parts", Ints{1, 1, 2})}, name + ".split", {{"axis", 1}}, 3);
  const Value y = x + "/1", wh = x + "/2";
  const Value in_strides = g.add("Concat",
                                 {g.add("Add", {x, columns}, name + ".x"),
                                  g.add("Add", {y, rows}, name + ".y"), g.add("Exp", {wh}, name + ".exp")},
                                 name + ".cells", {{"axis", 1}});
  return g.add("Mul", {in_strides, g.scalar(name + ".stride", double(stride))}, name + ".pixels");
}

Value add_nodes(OnnxGraph& g, const std::string& name, HeadImpl& m, const std::vector<Value>& features) {
  std::vector<Value> levels;
  for (size_t k = 0; k < features.size(); ++k) {
    const auto of = [&](const char* child) { return concat(name, ".", child, ".", k); };
    const auto predict = [&](const char* child, nn::ModuleList& preds, const Value& x) {
      auto& conv = *preds[k]->as<nn::Conv2d>();
      const Value y = add_conv(g, of(child), conv, conv.weight, conv.bias, x);
      return g.settings.half ? g.cast(y, of(child) + ".float", torch::kFloat) : y;
    };
    const Value x = add_nodes(g, of("stems"), *m.stems->blocks[k], features[k]);
    const Value cls =
        predict("cls_preds", m.cls_preds, add_nodes(g, of("cls_convs"), *m.cls_convs->blocks[k], x));
    const Value feature = add_nodes(g, of("reg_convs"), *m.reg_convs->blocks[k], x);
    const Value reg = predict("reg_preds", m.reg_preds, feature),
                obj = predict("obj_preds", m.obj_preds, feature);
    const Value row = g.add("Concat",
                            {g.settings.decode ? add_box_decoding(g, of("boxes"), reg, kStrides[k]) : reg,
                             g.add("Sigmoid", {obj}, of("obj")), g.add("Sigmoid", {cls}, of("cls"))},
                            of("level"), {{"axis", 1}});
    const int64_t rows = 5 + m.cls_preds[0]->as<nn::Conv2d>()->options.out_channels();
    levels.push_back(g.add("Reshape", {row, g.constant(of("level.as"), Ints{0, rows, -1})}, of("flat")));
  }
  const Value all = g.add("Concat", levels, name + ".cat", {{"axis", 2}});
  return g.add("Transpose", {all}, "output", {{"perm", Ints{0, 2, 1}}});
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

onnx::Model to_onnx(YOLOX& model, const ExportSettings& settings, const Metadata& metadata, bool values) {
  check(settings.decode || !settings.nms, "NMS needs decoded boxes");
  OnnxGraph g{{}, settings, values};
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
  int64_t anchors = 0;
  for (const int stride : kStrides) anchors += (s.height / stride) * (s.width / stride);
  g.describe(true, "images",
             {s.dynamic ? any("batch") : fixed(1), fixed(3), s.dynamic ? any("height") : fixed(s.height),
              s.dynamic ? any("width") : fixed(s.width)});
  if (s.nms)
    g.describe(false, "detections", {any("detections"), fixed(7)});
  else
    g.describe(false, "output",
               {s.dynamic ? any("batch") : fixed(1), s.dynamic ? any("anchors") : fixed(anchors),
                fixed(5 + model->num_classes)});
  const Value images = s.half ? g.cast("images", "images.half", torch::kHalf) : "images";
  const Value output = add_nodes(g, "head", *model->head, add_nodes(g, "backbone", *model->backbone, images));
  if (s.nms) add_nms(g, output, model->num_classes);
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

onnx::Model read_onnx(const std::string& path) {
  check(!is_irregular_file(path), path, " is not a regular file; use the .onnx file");
  std::ifstream in(path, std::ios::binary);
  check(bool(in), "cannot read ", path, "; check the path");
  onnx::Model model;
  check(model.ParseFromIstream(&in) && model.has_graph(), path,
        " is not an ONNX file, or is cut off; export or download the file again");
  return model;
}

}  // namespace yolox
