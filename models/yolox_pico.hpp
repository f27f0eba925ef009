// SPDX-License-Identifier: Apache-2.0
// Example of a backbone of your own: yolox-pico, a plain chain of depthwise-separable convolutions with a
// top-down neck and LeakyReLU in the neck. It has about a third of the parameters of yolox-nano.
#pragma once
#include <vector>

#include "yolox.hpp"

namespace yolox {

// Backbone and neck of yolox-pico. All feature maps have the channels of the head.
struct PicoImpl : Backbone {
  explicit PicoImpl(const ModelSize& size) {
    const int c = stem_channels(size), h = head_channels(size);
    stem = register_module("stem", BaseConv(3, c, 3, 2));
    stages = register_module("stages", nn::ModuleList());
    laterals = register_module("laterals", nn::ModuleList());
    for (int in = c; in < 16 * c; in *= 2) {  // strides 4, 8, 16 and 32
      const auto down = make_conv(in, 2 * in, 3, 2, size.depthwise);
      const auto refine = make_conv(2 * in, 2 * in, 3, 1, size.depthwise);
      stages->push_back(Seq(std::vector<BlockPtr>{down, refine}).ptr());
      if (in > c) laterals->push_back(nn::Conv2d(nn::Conv2dOptions(2 * in, h, 1)));
    }
    channels = {h, h, h};
  }
  // Returns the feature maps of strides 8, 16 and 32.
  std::vector<Tensor> forward(const Tensor& images) override {
    Tensor x = stages[0]->as<Seq>()->forward(stem(images));
    std::vector<Tensor> features;
    for (size_t k = 1; k < stages->size(); ++k) {
      x = stages[k]->as<Seq>()->forward(x);
      const Tensor lateral = laterals[k - 1]->as<nn::Conv2d>()->forward(x);
      features.push_back(torch::leaky_relu(lateral, 0.1));
    }
    for (size_t k = features.size() - 1; k > 0; --k)
      features[k - 1] = features[k - 1] + twice(features[k]);  // top-down
    return features;
  }

  BaseConv stem{nullptr};
  nn::ModuleList stages{nullptr}, laterals{nullptr};
};
TORCH_MODULE(Pico);

inline YOLOX make_yolox_pico(const ModelSize& size, int num_classes) {
  const Pico backbone(size);
  const YOLOXHead head(size, num_classes, backbone->channels, kStrides);
  return YOLOX(size.name, num_classes, backbone.ptr(), head.ptr());
}

}  // namespace yolox
