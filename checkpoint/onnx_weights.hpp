// Weights out of an ONNX file of a YOLOX, ours or the official exporter's (tools/export_onnx.py). The
// exporter folds each batch norm into its convolution and gives most weights a new name, so a convolution is
// known by its place: the file must have those of one of the sizes of model, in the order, with the
// connections and settings that onnx.hpp would write, and with weights of the same shapes. Anything else is
// an error.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/onnx.hpp"

namespace yolox {
namespace onnx_weights_detail {

// The batch norm behind a convolution, where it was not folded.
struct Norm {
  std::string weight, bias, mean, var;
  double eps;
};

struct Conv {
  std::string weight, bias;  // names; no bias: ""
  // The convolutions whose outputs come to it with no other in between, as they are joined: those of a Concat
  // in its order, those of a sum, where there is none, by number.
  std::vector<size_t> sources;
  std::vector<Norm> norms;
  std::vector<int64_t> settings;  // strides, padding, dilations, groups
};

// Tensors that are part of the file, by name.
using Constants = std::map<std::string, const onnx::Tensor*>;

Constants constants_of(const onnx::Graph& graph, const std::string& path);

// What exporters write between the convolutions of a YOLOX. Any other operation there makes another network.
bool is_of_yolox(const std::string& op);

// The convolutions in the order of the graph.
std::vector<Conv> convolutions(const onnx::Graph& graph, const Constants& constants, const std::string& path);

// The entry of the checkpoint's "yolox" from the metadata; nothing where the file has none of ours.
void add_info(GenericDict& top, const onnx::Model& file, const std::string& model);

}  // namespace onnx_weights_detail

// What read_pth() would give of a checkpoint with these weights, a folded norm being one that only adds the
// bias (mean 0, variance 1 - eps): in evaluation the network is that of the file. Throws, with `path` in the
// message, where the file is not one of the networks of model_sizes().
c10::IValue weights_of_onnx(const onnx::Model& file, const std::string& path);

// Where weights are: the file itself, or for the name of a model, such as yolox-s, what weights/get has
// fetched. Throws where such a file is missing.
std::string weights_file(const std::string& given);

// The contents of a file of weights, which may be called by the name of a model: a checkpoint, or a file that
// ends in .onnx.
c10::IValue read_weights(const std::string& given);

}  // namespace yolox
