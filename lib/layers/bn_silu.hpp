// SPDX-License-Identifier: Apache-2.0
// Batch norm with optional SyncBN, alone and followed by SiLU; convolution followed by SiLU.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <functional>
#include <optional>
#include <utility>

#include "base/torch.hpp"

namespace yolox {

// The collectives of SyncBN.
struct SyncBnCollectives {
  // All-reduces a tensor (sum) in place.
  std::function<void(torch::Tensor&)> sum = {};
  // All-gathers x [n]. Returns [world size, n]. Called for tensors on a GPU only.
  std::function<torch::Tensor(const torch::Tensor&)> gather = {};
};

// SyncBnCollectives as a custom class of torch, so that operators accept it as an argument.
struct Collectives : torch::CustomClassHolder {
  explicit Collectives(SyncBnCollectives functions) : functions(std::move(functions)) {}
  const SyncBnCollectives functions;
};
// Null: no SyncBN.
using CollectivesPtr = c10::intrusive_ptr<Collectives>;

// A batch norm that use_sync_bn() can synchronise: in training mode, its statistics are those of all ranks.
struct SyncBatchNorm2dImpl : torch::nn::BatchNorm2dImpl {
  explicit SyncBatchNorm2dImpl(const torch::nn::BatchNorm2dOptions& options) : BatchNorm2dImpl(options) {}
  torch::Tensor forward(const torch::Tensor& x);  // x: [B, C, H, W]

  CollectivesPtr over;  // the ranks; null: no SyncBN
};
TORCH_MODULE(SyncBatchNorm2d);

// Returns silu(bn(x)). x: [B, C, H, W]. Updates the running statistics in training mode. over: all-reduce for
// SyncBN in training mode; null: no SyncBN.
torch::Tensor bn_silu(const torch::Tensor& x, torch::nn::BatchNorm2dImpl& bn,
                      const CollectivesPtr& over = {});

// Returns true if this program contains the CUDA kernels of bn_silu(), see YOLOX_FUSED_NORM in
// CMakeLists.txt.
bool has_fused_norm();

// Selects the CUDA kernels of bn_silu() for this process. They are off at first. Affects later calls of
// bn_silu() in training mode on a GPU, for channels-last tensors of float32, float16 or bfloat16. Not to be
// called while another thread calls bn_silu(). Throws c10::Error if the program does not contain the kernels.
void use_fused_norm(bool on);

// Calls an operator of oneDNN in LibTorch that has no C++ function.
inline torch::Tensor call_mkldnn(const char* name, torch::jit::Stack arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments.at(0).toTensor();
}

// Returns silu(conv(x)), for models whose batch norms are folded into their convolutions. x: [B, C, H, W].
// conv has a bias and zero padding. Without gradients, in float32 on the CPU, it is one operation of oneDNN.
// Its weights are reordered for the size of the first x and kept in `reordered`, so that conv must not change
// afterwards, and two threads must not share it. For an x of another size, oneDNN reorders them in each call.
inline torch::Tensor conv_silu(const torch::Tensor& x, const torch::nn::Conv2dImpl& conv,
                               torch::Tensor& reordered) {
  const auto plain = [](const torch::Tensor& t) { return t.is_cpu() && t.scalar_type() == torch::kFloat; };
  const at::IntArrayRef padding = std::get<torch::ExpandingArray<2>>(conv.options.padding());
  const at::IntArrayRef stride = conv.options.stride();
  const at::IntArrayRef dilation = conv.options.dilation();
  const int64_t groups = conv.options.groups();
  if (torch::GradMode::is_enabled() || !plain(x) || !plain(conv.weight) || !at::globalContext().hasMKLDNN() ||
      !at::globalContext().userEnabledMkldnn())
    return torch::silu(torch::conv2d(x, conv.weight, conv.bias, stride, padding, dilation, groups));
  if (!reordered.defined())
    reordered = call_mkldnn("mkldnn::_reorder_convolution_weight",
                            {conv.weight.detach(), padding, stride, dilation, groups, x.sizes()});
  return call_mkldnn("mkldnn::_convolution_pointwise",
                     {x, reordered, conv.bias, padding, stride, dilation, groups, "swish",
                      c10::List<std::optional<at::Scalar>>(), ""});
}

}  // namespace yolox
