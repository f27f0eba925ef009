// Weights out of an ONNX file of a YOLOX, ours or the official exporter's (tools/export_onnx.py). The
// exporter folds each batch norm into its convolution and gives most weights a new name, so a convolution is
// known by its place: the file must have those of one of the six sizes, in the order and with the connections
// that onnx.hpp would write, and with weights of the same shapes. Anything else is an error.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint.hpp"
#include "error.hpp"
#include "onnx.hpp"

namespace yolox {
namespace onnx_weights_detail {

// The batch norm behind a convolution, where it was not folded.
struct Norm {
  std::string weight, bias, mean, var;
  double eps;
};

struct Conv {
  std::string weight, bias;  // names; no bias: ""
  std::set<size_t> sources;  // the convolutions whose outputs come to it with no other in between
  std::vector<Norm> norms;
};

// Tensors that are part of the file, by name.
using Constants = std::map<std::string, const onnx::Tensor*>;

inline Constants constants_of(const onnx::Graph& graph) {
  Constants found;
  for (const auto& t : graph.initializer()) found[t.name()] = &t;
  for (const auto& node : graph.node()) {
    if (node.output_size() == 0) continue;
    if (node.op_type() == "Constant")
      for (const auto& a : node.attribute())
        if (a.has_t()) found[node.output(0)] = &a.t();
    // Equal tensors are stored once; the others then are an Identity of it.
    if (node.op_type() == "Identity" && node.input_size() > 0 && found.count(node.input(0)))
      found[node.output(0)] = found.at(node.input(0));
  }
  return found;
}

// The convolutions in the order of the graph.
inline std::vector<Conv> convolutions(const onnx::Graph& graph, const std::string& path) {
  std::vector<Conv> convs;
  std::map<std::string, std::set<size_t>> sources;  // of each value
  for (const auto& node : graph.node()) {
    const std::string& op = node.op_type();
    check(op != "Relu" && op != "LeakyRelu", path, " has the activation ", op,
          "; the network here has SiLU, so its weights are of no use");
    if (op == "Shape") continue;  // depends on no values
    std::set<size_t> from;
    for (const auto& input : node.input()) from.insert(sources[input].begin(), sources[input].end());
    if (op == "Conv" && node.input_size() >= 2) {
      convs.push_back({node.input(1), node.input_size() > 2 ? node.input(2) : "", from, {}});
      from = {convs.size() - 1};
    }
    if (op == "BatchNormalization") {
      check(from.size() == 1 && node.input_size() == 5, path, ": a batch norm does not follow a convolution");
      double eps = 1e-5;  // what ONNX says where the file does not
      for (const auto& a : node.attribute())
        if (a.name() == "epsilon") eps = a.f();
      convs[*from.begin()].norms.push_back({node.input(1), node.input(2), node.input(3), node.input(4), eps});
    }
    for (const auto& output : node.output()) sources[output] = from;
  }
  return convs;
}

// The entry of the checkpoint's "yolox" from the metadata; nothing where the file has none of ours.
inline void add_info(GenericDict& top, const onnx::Model& file) {
  std::map<std::string, std::string> text;
  for (const auto& e : file.metadata_props()) text[e.key()] = e.value();
  if (!text.count("channel_order") || !text.count("model")) return;
  WeightsInfo info;
  info.model = text["model"];
  std::istringstream names(text["classes"]);
  for (std::string name; std::getline(names, name);) info.classes.push_back(name);
  std::sscanf(text["size"].c_str(), "%ldx%ld", &info.height, &info.width);
  info.legacy_preproc = text["channel_order"] == pixel_format(true).order;
  top.insert("yolox", to_dict(info));
}

}  // namespace onnx_weights_detail

// What read_pth() would give of a checkpoint with these weights, a folded norm being one that only adds the
// bias (mean 0, variance 1 - eps): in evaluation the network is that of the file. Throws, with `path` in the
// message, where the file is not one of the six networks.
inline c10::IValue weights_of_onnx(const onnx::Model& file, const std::string& path) {
  using namespace onnx_weights_detail;
  const Constants constants = constants_of(file.graph());
  const std::vector<Conv> found = convolutions(file.graph(), path);
  const auto constant = [&](const std::string& name) -> const onnx::Tensor& {
    check(constants.count(name), path, ": the weights ", name,
          " are computed in the graph (quantised?); export the network in float32");
    return *constants.at(name);
  };
  const auto shape = [&](const onnx::Tensor& t) { return Ints(t.dims().begin(), t.dims().end()); };
  check(!found.empty(), path, " has no convolutions; it is no YOLOX");

  // The size of model is that of its first convolution; its graph without values is what to compare with.
  const Ints stem = shape(constant(found[0].weight));
  std::string name;
  for (const std::string size : {"yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x"})
    if (stem == Ints{int64_t(model_size(size).width * 64), 12, 3, 3}) name = size;
  check(!name.empty(), path, " begins with a convolution of shape ", c10::IntArrayRef(stem),
        ", as none of the YOLOX sizes does");
  YOLOX model(name, 1);
  const onnx::Model written = to_onnx(model, {}, {}, /*values=*/false);
  const Constants ours = constants_of(written.graph());
  const std::vector<Conv> wanted = convolutions(written.graph(), name);
  check(found.size() == wanted.size(), path, " has ", found.size(), " convolutions, ", name, " has ",
        wanted.size(), "; is it a YOLOX whose architecture was changed?");
  std::set<std::string> names;
  for (const Conv& conv : wanted) names.insert(conv.weight);

  auto weights = empty_dict();
  for (size_t i = 0; i < found.size(); ++i) {
    const Conv &conv = found[i], &want = wanted[i];
    const onnx::Tensor& stored = constant(conv.weight);
    Ints wanted_shape = shape(*ours.at(want.weight));
    const std::string key = want.weight.substr(0, want.weight.size() - std::strlen("weight"));
    const bool classes = key.rfind("head.cls_preds.", 0) == 0, norm = key.find("_preds.") == key.npos;
    if (classes && stored.dims_size() == 4) wanted_shape[0] = stored.dims(0);
    const bool fits = shape(stored) == wanted_shape && conv.sources == want.sources &&
                      conv.norms.size() <= (norm ? 1 : 0) &&
                      (!names.count(conv.weight) || conv.weight == want.weight);
    check(fits, path, ": convolution ", i, " with the weights ", conv.weight, " ",
          c10::IntArrayRef(shape(stored)), " is not ", want.weight, " ", c10::IntArrayRef(wanted_shape),
          " of ", name, ", or not connected as it; the weights cannot be told apart");
    const int64_t channels = wanted_shape[0];
    const auto floats = [&](const std::string& name) {
      const Tensor t = to_torch(constant(name), path).to(torch::kFloat);
      check(t.sizes() == c10::IntArrayRef{channels}, path, ": ", name, " has the shape ", t.sizes(),
            ", not [", channels, "]");
      return t;
    };
    weights.insert(want.weight, to_torch(stored, path).to(torch::kFloat));
    const Tensor bias = conv.bias.empty() ? torch::zeros({channels}) : floats(conv.bias);
    if (!norm) {
      weights.insert(key + "bias", bias);
      continue;
    }
    const double eps = 1e-3;  // of the norms here
    const std::string bn = key.substr(0, key.size() - std::strlen("conv.")) + "bn.";
    if (conv.norms.empty()) {
      weights.insert(bn + "weight", torch::ones({channels})), weights.insert(bn + "bias", bias);
      weights.insert(bn + "running_mean", torch::zeros({channels}));
      weights.insert(bn + "running_var", torch::full({channels}, 1 - eps));
    } else {
      const Norm& n = conv.norms[0];
      weights.insert(bn + "weight", floats(n.weight)), weights.insert(bn + "bias", floats(n.bias));
      weights.insert(bn + "running_mean", floats(n.mean) - bias);
      weights.insert(bn + "running_var", floats(n.var) + (n.eps - eps));
    }
    weights.insert(bn + "num_batches_tracked", torch::zeros({}, torch::kLong));
  }
  auto top = empty_dict();
  top.insert("model", weights);
  add_info(top, file);
  return top;
}

// The contents of a file of weights: a checkpoint, or a file that ends in .onnx.
inline c10::IValue read_weights(const std::string& path) {
  const std::string end = ".onnx";
  if (path.size() < end.size() || path.compare(path.size() - end.size(), end.size(), end) != 0)
    return read_pth(path);
  return weights_of_onnx(read_onnx(path), path);
}

}  // namespace yolox
