// SPDX-License-Identifier: Apache-2.0
// Reads the weights of a YOLOX model from an ONNX file of this program or of the official exporter
// (tools/export_onnx.py). The exporter folds each batch norm into its convolution and renames most weights,
// so a convolution is identified by its position in the graph. The convolutions must equal those that
// onnx.hpp would write for one of the model sizes: in order, connections, attributes and weight shapes. Any
// other file is an error.
#pragma once
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/onnx.hpp"

namespace yolox {
namespace onnx_weights_detail {

// Batch norm after a convolution that was not folded. The strings are names of initializers.
struct Norm {
  std::string weight, bias, mean, var;
  double eps;
};

// A convolution of the graph.
struct Conv {
  std::string weight, bias;  // names of initializers; bias is "" if there is none
  // Indices of the convolutions from which the input comes without another convolution in between. The inputs
  // of a Concat are in its order. The inputs of an Add are sorted, because a sum has no order.
  std::vector<size_t> sources;
  std::vector<Norm> norms;
  std::vector<int64_t> settings;  // strides, padding, dilations, groups
};

// Initializers and constants of a graph, by name.
using Constants = std::map<std::string, const onnx::Tensor*>;

// Collects the initializers, the outputs of Constant nodes, and Identity nodes of either.
Constants collect_constants(const onnx::Graph& graph, const std::string& path);

// Returns true if exporters write this operator between the convolutions of a YOLOX. A graph with any other
// operator there is another network.
bool is_yolox_operator(const std::string& op);

// Returns the convolutions that depend on the input, in graph order.
std::vector<Conv> convolutions(const onnx::Graph& graph, const Constants& constants, const std::string& path);

// Adds the entry "yolox" (WeightsInfo) from the ONNX metadata. Adds nothing if this program did not write the
// metadata.
void add_info(GenericDict& top, const onnx::Model& file, const std::string& model);

}  // namespace onnx_weights_detail

// Returns the weights in the form of a checkpoint that read_pth() returns. A folded batch norm becomes one
// that only adds the bias (mean 0, variance 1 - eps), so that the network has the same outputs in evaluation
// mode. Throws if the file is not a network of make_yolox() with a size of model_sizes(). path: for error
// messages.
c10::IValue weights_from_onnx(const onnx::Model& file, const std::string& path);

// Returns the path of a weights file. given: a path; the folder of a run, for its best.pth, or last.pth if
// there is no best.pth; or the name of a model such as yolox-s or s, for the file that weights/get has
// downloaded. Throws if a file of official weights is missing, or if a folder has no checkpoint.
std::string find_weights_file(const std::string& given);

// Reads a weights file: ONNX if the path ends in .onnx, else a .pth checkpoint. given: as for
// find_weights_file().
c10::IValue read_weights(const std::string& given);

}  // namespace yolox
