// SPDX-License-Identifier: Apache-2.0
// Convolution followed by SiLU, for models whose batch norms are folded into their convolutions.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/torch.h>

#include <optional>

namespace yolox {

// Calls an operator of oneDNN in LibTorch that has no C++ function.
inline torch::Tensor call_mkldnn(const char* name, torch::jit::Stack arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments.at(0).toTensor();
}

// Returns silu(conv(x)). x: [B, C, H, W]. conv has a bias and zero padding. Without gradients, in float32 on
// the CPU, it is one operation of oneDNN. Its weights are reordered for the size of the first x and kept in
// `reordered`, so that conv must not change afterwards, and two threads must not share it. For an x of
// another size, oneDNN reorders them in each call.
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
