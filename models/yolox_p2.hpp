// SPDX-License-Identifier: Apache-2.0
// Example of a neck and a head of your own: YOLOX with a fourth level of stride 4, for small objects. The new
// level is the last one, so that the official weights of all other layers load by name.
#pragma once
#include <memory>
#include <vector>

#include "yolox.hpp"

namespace yolox {

// YOLOPAFPN with a fourth feature map of stride 4: its output of stride 8, upsampled and joined with the
// features of stride 4 of the backbone.
struct P2PAFPNImpl : YOLOPAFPNImpl {
  P2PAFPNImpl(const ModelSize& size, const CSPDarknet& darknet)
      : YOLOPAFPNImpl(size, darknet.ptr()), darknet(darknet) {
    const int c8 = head_channels(size), c4 = c8 / 2;
    reduce_conv2 = register_module("reduce_conv2", BaseConv(c8, c4, 1));
    C3_p2 = register_module("C3_p2", std::make_shared<CSPLayer>(2 * c4, c4, 1, false, size.depthwise));
    channels.push_back(c4);
  }
  // Returns the feature maps of strides 8, 16, 32 and 4.
  std::vector<Tensor> forward(const Tensor& images) override {
    const Tensor x4 = darknet->dark2(darknet->stem->forward(images));
    const Tensor x8 = darknet->dark3(x4);
    const Tensor x16 = darknet->dark4(x8);
    std::vector<Tensor> features = neck(x8, x16, darknet->dark5(x16));
    features.push_back(C3_p2->forward(torch::cat({twice(reduce_conv2(features[0])), x4}, 1)));
    return features;
  }

  CSPDarknet darknet;
  BaseConv reduce_conv2{nullptr};
  BlockPtr C3_p2;
};
TORCH_MODULE(P2PAFPN);

inline YOLOX make_yolox_p2(const ModelSize& size, int num_classes) {
  const CSPDarknet darknet(size);
  const P2PAFPN backbone(size, darknet);
  const YOLOXHead head(size, num_classes, backbone->channels, std::vector<int>{8, 16, 32, 4});
  return YOLOX(size.name, num_classes, backbone.ptr(), head.ptr());
}

}  // namespace yolox
