// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/onnx_weights.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "base/error.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/onnx.hpp"
#include "models.hpp"

namespace yolox {

namespace onnx_weights_detail {

Constants collect_constants(const onnx::Graph& graph, const std::string& path) {
  Constants found;
  for (const auto& t : graph.initializer()) found[t.name()] = &t;
  int64_t edges = 0;
  for (const auto& node : graph.node()) {
    edges += node.input_size() + node.output_size();
    check(edges < 200000, path, " has more than 200000 edges, so it is not a YOLOX; use another file");
    check(node.output_size() > 0, path, ": the node ", node.name(), " has no output; the file is damaged");
    if (node.op_type() == "Constant")
      for (const auto& a : node.attribute())
        if (a.has_t()) found[node.output(0)] = &a.t();
    // The exporter stores equal tensors once and refers to the stored tensor by Identity nodes.
    if (node.op_type() == "Identity" && node.input_size() > 0 && found.count(node.input(0)))
      found[node.output(0)] = found.at(node.input(0));
  }
  return found;
}

bool is_yolox_operator(const std::string& op) {
  static const std::set<std::string> known{
      "Conv",   "BatchNormalization", "Sigmoid", "Mul",      "Add",   "Concat",
      "Resize", "Upsample",           "MaxPool", "Identity", "Slice", "Cast"};
  return known.count(op) > 0;
}

std::vector<Conv> convolutions(const onnx::Graph& graph, const Constants& constants,
                               const std::string& path) {
  struct Origin {               // origin of a value that depends on the input image
    std::vector<size_t> convs;  // as Conv::sources
    std::string odd;            // operator on the path from these convolutions that no YOLOX has, or ""
  };
  std::vector<Conv> convs;
  std::map<std::string, Origin> origins;
  for (const auto& input : graph.input())
    if (!constants.count(input.name())) origins[input.name()];
  for (const auto& node : graph.node()) {
    const std::string& op = node.op_type();
    if (op == "Shape") continue;  // the shape does not depend on the pixels
    Origin from;
    bool of_image = false, with_constant = false;
    for (const auto& input : node.input()) {
      with_constant |= constants.count(input) > 0;
      const auto origin = origins.find(input);
      if (origin == origins.end()) continue;
      of_image = true;
      if (from.odd.empty()) from.odd = origin->second.odd;
      for (const size_t conv : origin->second.convs)
        if (std::find(from.convs.begin(), from.convs.end(), conv) == from.convs.end())
          from.convs.push_back(conv);
    }
    check(op != "Conv" || node.input_size() >= 2, path, ": the convolution ", node.name(), " has no weights");
    if (!of_image) continue;
    // Limits the sources per value. The shortcuts of yolox-x join up to 14 convolutions; the head joins more,
    // but after the last convolution.
    constexpr size_t kMost = 64;
    if (from.convs.size() > kMost && from.odd.empty()) from.odd = op;
    from.convs.resize(std::min(from.convs.size(), kMost));
    if (op == "Add") std::sort(from.convs.begin(), from.convs.end());
    if (!is_yolox_operator(op) && from.odd.empty()) from.odd = op;
    if ((op == "Add" || op == "Mul") && with_constant && from.odd.empty()) from.odd = op + " of a constant";
    if (op == "Conv") {
      check(from.odd.empty(), path, " has the operation ", from.odd,
            " before the convolution with the weights ", node.input(1),
            ", where a YOLOX has none; use an ONNX file of a YOLOX");
      std::vector<int64_t> settings;
      for (const auto& [name, otherwise] :
           {std::pair("strides", Ints{1, 1}), {"pads", Ints{0, 0, 0, 0}}, {"dilations", Ints{1, 1}}}) {
        const Ints values = attribute(node, name, otherwise);
        settings.insert(settings.end(), values.begin(), values.end());
      }
      settings.push_back(attribute(node, "group", 1));
      convs.push_back({node.input(1), node.input_size() > 2 ? node.input(2) : "", from.convs, {}, settings});
      from.convs = {convs.size() - 1};
    }
    if (op == "BatchNormalization") {
      check(from.convs.size() == 1 && node.input_size() == 5, path,
            ": a batch norm does not follow a convolution");
      const auto* epsilon = find_attribute(node, "epsilon");  // default of ONNX: 1e-5
      convs[from.convs[0]].norms.push_back(
          {node.input(1), node.input(2), node.input(3), node.input(4), epsilon ? epsilon->f() : 1e-5});
    }
    for (const auto& output : node.output()) origins[output] = from;
  }
  return convs;
}

void add_info(GenericDict& top, const onnx::Model& file, const std::string& model) {
  std::map<std::string, std::string> text;
  for (const auto& e : file.metadata_props()) text[e.key()] = e.value();
  if (!text.count("channel_order") || !text.count("model")) return;
  WeightsInfo info;
  info.model = model;
  std::istringstream names(text["classes"]);
  for (std::string name; std::getline(names, name);) info.classes.push_back(name);
  std::sscanf(text["size"].c_str(), "%ldx%ld", &info.height, &info.width);
  info.legacy_preproc = text["channel_order"] == pixel_format(true).order;
  top.insert("yolox", to_dict(info));
}

// Inserts the batch norm that follows a convolution, under the prefix `bn`. If the file has no batch norm
// there, it was folded into the convolution, and the inserted batch norm only adds the bias. floats: reads a
// tensor of [C] by name.
static void insert_batch_norm(GenericDict& weights, const std::string& bn, const Conv& conv,
                              const Tensor& bias, const std::function<Tensor(const std::string&)>& floats) {
  const double eps = 1e-3;  // epsilon of the batch norms of this program
  if (conv.norms.empty()) {
    weights.insert(bn + "weight", torch::ones_like(bias));
    weights.insert(bn + "bias", bias);
    weights.insert(bn + "running_mean", torch::zeros_like(bias));
    weights.insert(bn + "running_var", torch::full_like(bias, 1 - eps));
  } else {
    const Norm& n = conv.norms[0];
    weights.insert(bn + "weight", floats(n.weight));
    weights.insert(bn + "bias", floats(n.bias));
    weights.insert(bn + "running_mean", floats(n.mean) - bias);
    weights.insert(bn + "running_var", floats(n.var) + (n.eps - eps));
  }
  weights.insert(bn + "num_batches_tracked", torch::zeros({}, torch::kLong));
}

}  // namespace onnx_weights_detail

c10::IValue weights_from_onnx(const onnx::Model& file, const std::string& path) {
  using namespace onnx_weights_detail;
  const Constants constants = collect_constants(file.graph(), path);
  const auto constant = [&](const std::string& name) -> const onnx::Tensor& {
    check(constants.count(name), path, ": the weights ", name,
          " are computed in the graph (quantised?); export the network in float32");
    return *constants.at(name);
  };
  const auto shape = [&](const onnx::Tensor& t) { return Ints(t.dims().begin(), t.dims().end()); };
  // The shape of the first convolution and the number of convolutions determine the model size. The graph
  // that this program writes for that size, without values, is the reference.
  const auto is_conv = [](const onnx::Node& node) { return node.op_type() == "Conv"; };
  const auto& nodes = file.graph().node();
  const auto first = std::find_if(nodes.begin(), nodes.end(), is_conv);
  const auto count = std::count_if(nodes.begin(), nodes.end(), is_conv);
  check(first != nodes.end(), path, " has no convolutions, so it is not a YOLOX; use another file");
  check(first->input_size() >= 2, path, ": the convolution ", first->name(), " has no weights");
  const Ints stem = shape(constant(first->input(1)));
  std::string name;
  onnx::Model written;
  std::vector<Conv> wanted;
  for (const ModelRow& size : model_sizes()) {
    if (size.make != make_yolox) continue;  // the file must have the convolutions of make_yolox()
    if (stem != Ints{int64_t(size.width * 64), 12, 3, 3} || int64_t(wanted.size()) == count) continue;
    name = size.name;
    YOLOX model = make_model(name, 1);
    written = to_onnx(model, {64, 64}, {}, /*values=*/false);
    wanted = convolutions(written.graph(), collect_constants(written.graph(), name), name);
  }
  check(!name.empty(), path, " begins with a convolution of shape ",
        c10::IntArrayRef(stem).slice(0, std::min<size_t>(8, stem.size())),
        ", which no YOLOX has; use an ONNX file of a YOLOX");
  check(int64_t(wanted.size()) == count, path, " has ", count, " convolutions, ", name, " has ",
        wanted.size(), "; was the architecture of this YOLOX changed?");
  const Constants ours = collect_constants(written.graph(), name);
  const std::vector<Conv> found = convolutions(file.graph(), constants, path);
  check(found.size() == wanted.size(), path,
        " has convolutions that do not depend on the input, so it is not a YOLOX; use another file");
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
                      conv.settings == want.settings && conv.norms.size() <= (norm ? 1 : 0) &&
                      (!names.count(conv.weight) || conv.weight == want.weight);
    check(fits, path, ": convolution ", i, " with the weights ", conv.weight, " ",
          c10::IntArrayRef(shape(stored)), " is not ", want.weight, " ", c10::IntArrayRef(wanted_shape),
          " of ", name, ", or has other connections or attributes; use an unmodified export of this model");
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
    const std::string bn = key.substr(0, key.size() - std::strlen("conv.")) + "bn.";
    insert_batch_norm(weights, bn, conv, bias, floats);
  }
  auto top = empty_dict();
  top.insert("model", weights);
  add_info(top, file, name);
  return top;
}

std::string find_weights_file(const std::string& given) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(given, error)) {
    for (const char* name : {"best.pth", "last.pth"})
      if (fs::exists(fs::path(given) / name, error)) return fs::path(given) / name;
    fail(given, " is a folder without best.pth and last.pth; give a weights file or the folder of a run");
  }
  if (fs::exists(given, error)) return given;
  const std::string folder = YOLOX_SOURCE_DIR "/weights/";
  std::ifstream sums(folder + "SHA256SUMS");  // lines "HASH  FILE" of the official weights
  std::string hash, file, names;
  while (sums >> hash >> file) {
    const std::string name = official_name(file.substr(0, file.find('.')));
    const std::string fetched = folder + file;
    const bool by_name = official_name(given) == name;
    if (by_name && fs::exists(fetched, error)) return fetched;
    check(!by_name && fs::path(given).filename() != file, by_name ? fetched : given,
          " is missing; weights/get ", name, " fetches the official weights");
    names += (names.empty() ? "" : ", ") + name;
  }
  check(fs::path(given).has_extension() || given.find('/') != std::string::npos, "--weights ", given,
        " is neither a file nor an official model (", names, ")");
  return given;
}

c10::IValue read_weights(const std::string& given) {
  const std::string path = find_weights_file(given);
  const std::string end = ".onnx";
  if (path.size() < end.size() || path.compare(path.size() - end.size(), end.size(), end) != 0)
    return read_pth(path);
  return weights_from_onnx(read_onnx(path), path);
}

}  // namespace yolox
