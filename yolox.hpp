// SPDX-License-Identifier: Apache-2.0
// The YOLOX model: CSPDarknet, PAFPN, the decoupled anchor-free head, decoding and NMS. models.hpp lists the
// sizes. A backbone or head of your own is a file of its own, as models/yolox_pico.hpp is. Method:
// "YOLOX: Exceeding YOLO Series in 2021" (arXiv 2107.08430), section 2. Names, shapes and initialisation
// order of the parameters equal those of the official repository, so that official weights load by name.
//
// B: batch size. C: channels or classes. H, W: height and width in pixels, multiples of 32. A: anchor points,
// one per cell of the strides s of the head (sum of HW/s^2), ordered by level, row, column.
#pragma once
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "base/torch.hpp"
#include "layers/bn_silu.hpp"
#include "layers/nms.hpp"

namespace yolox {

using torch::Tensor;
namespace nn = torch::nn;

// ---- building blocks

// Base class of the building blocks. forward() maps [B, C, H, W] to [B, C', H', W'].
struct Block : nn::Module {
  virtual Tensor forward(Tensor x) = 0;
};
using BlockPtr = std::shared_ptr<Block>;

// Convolution without bias, batch norm, SiLU. The padding keeps H and W at stride 1.
struct BaseConvImpl : Block {
  BaseConvImpl(int in, int out, int kernel, int stride = 1, int groups = 1) {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(in, out, kernel)
                                                  .stride(stride)
                                                  .padding((kernel - 1) / 2)
                                                  .groups(groups)
                                                  .bias(false)));
    bn = register_module("bn", SyncBatchNorm2d(nn::BatchNorm2dOptions(out).eps(1e-3).momentum(0.03)));
  }
  Tensor forward(Tensor x) override {
    return bn ? bn_silu(conv(x), *bn, bn->over) : conv_silu(x, *conv, reordered);
  }

  nn::Conv2d conv{nullptr};
  SyncBatchNorm2d bn{nullptr};  // null after fuse_batch_norms()
  Tensor reordered;             // weights of conv, see conv_silu()
};
TORCH_MODULE(BaseConv);

// Depthwise-separable convolution: a k x k depthwise and a 1x1 pointwise convolution, each with batch norm
// and SiLU.
struct DWConvImpl : Block {
  DWConvImpl(int in, int out, int kernel, int stride) {
    dconv = register_module("dconv", BaseConv(in, in, kernel, stride, in));
    pconv = register_module("pconv", BaseConv(in, out, 1));
  }
  Tensor forward(Tensor x) override { return pconv(dconv(x)); }

  BaseConv dconv{nullptr}, pconv{nullptr};
};

inline BlockPtr make_conv(int in, int out, int kernel, int stride, bool depthwise) {
  if (depthwise) return std::make_shared<DWConvImpl>(in, out, kernel, stride);
  return std::make_shared<BaseConvImpl>(in, out, kernel, stride);
}

// Returns x with twice the height and width (nearest neighbour).
inline Tensor twice(const Tensor& x) {
  return torch::upsample_nearest2d(x, std::nullopt, std::vector<double>{2, 2});
}

// Sequence of blocks, registered as "0", "1", ...
struct SeqImpl : Block {
  explicit SeqImpl(std::vector<BlockPtr> children = {}) {
    for (auto& child : children) push_back(child);
  }
  void push_back(const BlockPtr& block) {
    blocks.push_back(register_module(std::to_string(blocks.size()), block));
  }
  Tensor forward(Tensor x) override {
    for (auto& block : blocks) x = block->forward(x);
    return x;
  }

  std::vector<BlockPtr> blocks;
};
TORCH_MODULE(Seq);

// 1x1 convolution, 3x3 convolution and an optional residual connection.
struct BottleneckImpl : Block {
  BottleneckImpl(int channels, bool shortcut, bool depthwise) : shortcut(shortcut) {
    conv1 = register_module("conv1", BaseConv(channels, channels, 1));
    conv2 = register_module("conv2", make_conv(channels, channels, 3, 1, depthwise));
  }
  Tensor forward(Tensor x) override {
    const Tensor y = conv2->forward(conv1(x));
    return shortcut ? x + y : y;
  }

  bool shortcut;
  BaseConv conv1{nullptr};
  BlockPtr conv2;
};

// Cross-stage partial layer: two 1x1 convolutions make two branches, one of them passes n bottlenecks, and a
// third 1x1 convolution fuses both.
struct CSPLayerImpl : Block {
  CSPLayerImpl(int in, int out, int n, bool shortcut, bool depthwise) {
    const int hidden = out / 2;
    conv1 = register_module("conv1", BaseConv(in, hidden, 1));
    conv2 = register_module("conv2", BaseConv(in, hidden, 1));
    conv3 = register_module("conv3", BaseConv(2 * hidden, out, 1));
    m = register_module("m", Seq());
    for (int i = 0; i < n; ++i) m->push_back(std::make_shared<BottleneckImpl>(hidden, shortcut, depthwise));
  }
  Tensor forward(Tensor x) override {
    const Tensor first = conv1(x), second = conv2(x);
    return conv3(torch::cat({m(first), second}, 1));
  }

  BaseConv conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  Seq m{nullptr};
};
using CSPLayer = CSPLayerImpl;

// Returns max_pool2d(x, 5, 1, 2) with a deterministic backward on a GPU. The CUDA backward of torch's max
// pooling uses atomic additions, whose order differs between runs. This version is several times slower.
inline Tensor deterministic_max_pool_5x5(Tensor x) {
  for (const int64_t dim : {2, 3}) {
    std::vector<int64_t> pad(4, 0);  // left, right, top, bottom
    pad[dim == 3 ? 0 : 2] = pad[dim == 3 ? 1 : 3] = 2;
    const Tensor padded = torch::constant_pad_nd(x, pad, -std::numeric_limits<double>::infinity());
    std::vector<Tensor> shifted;
    for (int64_t k = 0; k < 5; ++k) shifted.push_back(padded.slice(dim, k, k + x.size(dim)));
    x = std::get<0>(torch::stack(shifted).max(0));
  }
  return x;
}

// Spatial pyramid pooling with max-pool windows 5, 9 and 13. Two chained 5x5 poolings equal one 9x9 pooling,
// and three equal one 13x13 pooling. The chain needs fewer operations and returns the same values.
struct SPPBottleneckImpl : Block {
  SPPBottleneckImpl(int in, int out) {
    conv1 = register_module("conv1", BaseConv(in, in / 2, 1));
    conv2 = register_module("conv2", BaseConv(in / 2 * 4, out, 1));
  }
  Tensor forward(Tensor x) override {
    const auto pool5 = [](const Tensor& t) {
      return t.is_cuda() && at::globalContext().deterministicAlgorithms() ? deterministic_max_pool_5x5(t)
                                                                          : torch::max_pool2d(t, 5, 1, 2);
    };
    const Tensor y = conv1(x), y5 = pool5(y), y9 = pool5(y5), y13 = pool5(y9);
    return conv2(torch::cat({y, y5, y9, y13}, 1));
  }

  BaseConv conv1{nullptr}, conv2{nullptr};
};

// Space-to-depth and a 3x3 convolution. Each 2x2 patch of the image becomes one cell of 12 channels.
struct FocusImpl : Block {
  FocusImpl(int in, int out) { conv = register_module("conv", BaseConv(4 * in, out, 3)); }
  Tensor forward(Tensor x) override {  // [B, 3, H, W] -> [B, out, H/2, W/2]
    const auto patch = [&](int row, int column) { return x.slice(2, row, {}, 2).slice(3, column, {}, 2); };
    return conv(torch::cat({patch(0, 0), patch(1, 0), patch(0, 1), patch(1, 1)}, 1));
  }

  BaseConv conv{nullptr};
};

// ---- backbone and neck

// Size of a model: factors of the numbers of bottlenecks and of channels, and whether the convolutions are
// depthwise-separable.
struct ModelSize {
  std::string name;
  double depth, width;
  bool depthwise;
};

// Returns the number of channels of the stem, width * 64, of which the other layers have multiples. Throws
// std::runtime_error if it is not a whole number.
inline int stem_channels(const ModelSize& size) {
  check(size.width > 0 && std::fmod(64 * size.width, 1) == 0, size.name,
        ": the width must be a multiple of 1/64, such as ", std::max(1.0, std::round(64 * size.width)) / 64,
        ", got ", size.width);
  return static_cast<int>(64 * size.width);
}

// Base class of backbones. forward() maps images [B, 3, H, W] to feature maps [B, C_k, H/s, W/s] of the
// strides s of the head, in its order. A neck is a backbone that contains another one.
struct Backbone : nn::Module {
  virtual std::vector<Tensor> forward(const Tensor& images) = 0;
  std::vector<int> channels;  // C_k
};

// Backbone CSPDarknet.
struct CSPDarknetImpl : Backbone {
  explicit CSPDarknetImpl(const ModelSize& size) {
    const int c = stem_channels(size);
    const int n = std::max(static_cast<int>(std::lround(size.depth * 3)), 1);
    const auto stage = [&](int in, int bottlenecks) {
      return Seq(std::vector<BlockPtr>{
          make_conv(in, 2 * in, 3, 2, size.depthwise),
          std::make_shared<CSPLayer>(2 * in, 2 * in, bottlenecks, true, size.depthwise)});
    };
    stem = register_module("stem", std::make_shared<FocusImpl>(3, c));
    dark2 = register_module("dark2", stage(c, n));
    dark3 = register_module("dark3", stage(2 * c, 3 * n));
    dark4 = register_module("dark4", stage(4 * c, 3 * n));
    // Each block is constructed in its own statement, because the construction order decides the random
    // initialisation.
    const auto down = make_conv(8 * c, 16 * c, 3, 2, size.depthwise);
    const auto spp = std::make_shared<SPPBottleneckImpl>(16 * c, 16 * c);
    const auto csp = std::make_shared<CSPLayer>(16 * c, 16 * c, n, false, size.depthwise);
    dark5 = register_module("dark5", Seq(std::vector<BlockPtr>{down, spp, csp}));
    channels = {4 * c, 8 * c, 16 * c};
  }
  // Returns the feature maps of strides 8, 16 and 32.
  std::vector<Tensor> forward(const Tensor& images) override {
    const Tensor x8 = dark3(dark2(stem->forward(images)));
    const Tensor x16 = dark4(x8);
    return {x8, x16, dark5(x16)};
  }

  std::shared_ptr<FocusImpl> stem;
  Seq dark2{nullptr}, dark3{nullptr}, dark4{nullptr}, dark5{nullptr};
};
TORCH_MODULE(CSPDarknet);

// Backbone and path-aggregation feature pyramid (a top-down and a bottom-up path).
struct YOLOPAFPNImpl : Backbone {
  // backbone: returns feature maps of strides 8, 16 and 32.
  YOLOPAFPNImpl(const ModelSize& size, const std::shared_ptr<Backbone>& backbone) {
    const int c0 = 4 * stem_channels(size), c1 = 2 * c0, c2 = 4 * c0;
    const int n = static_cast<int>(std::lround(3 * size.depth));
    const std::vector<int>& in = backbone->channels;
    const auto csp = [&](int from, int to) {
      return std::make_shared<CSPLayer>(from, to, n, false, size.depthwise);
    };
    this->backbone = register_module("backbone", backbone);
    lateral_conv0 = register_module("lateral_conv0", BaseConv(in.at(2), c1, 1));
    C3_p4 = register_module("C3_p4", csp(c1 + in[1], c1));
    reduce_conv1 = register_module("reduce_conv1", BaseConv(c1, c0, 1));
    C3_p3 = register_module("C3_p3", csp(c0 + in[0], c0));
    bu_conv2 = register_module("bu_conv2", make_conv(c0, c0, 3, 2, size.depthwise));
    C3_n3 = register_module("C3_n3", csp(2 * c0, c1));
    bu_conv1 = register_module("bu_conv1", make_conv(c1, c1, 3, 2, size.depthwise));
    C3_n4 = register_module("C3_n4", csp(2 * c1, c2));
    channels = {c0, c1, c2};
  }
  // Returns the feature maps of strides 8, 16 and 32.
  std::vector<Tensor> forward(const Tensor& images) override {
    const std::vector<Tensor> features = backbone->forward(images);
    return neck(features[0], features[1], features[2]);
  }
  // Returns the feature maps of the neck for those of the backbone.
  std::vector<Tensor> neck(const Tensor& x8, const Tensor& x16, const Tensor& x32) {
    const Tensor top = lateral_conv0(x32);                                                  // C1, /32
    const Tensor middle = reduce_conv1(C3_p4->forward(torch::cat({twice(top), x16}, 1)));   // C0, /16
    const Tensor out8 = C3_p3->forward(torch::cat({twice(middle), x8}, 1));                 // C0, /8
    const Tensor out16 = C3_n3->forward(torch::cat({bu_conv2->forward(out8), middle}, 1));  // C1, /16
    const Tensor out32 = C3_n4->forward(torch::cat({bu_conv1->forward(out16), top}, 1));    // C2, /32
    return {out8, out16, out32};
  }

  std::shared_ptr<Backbone> backbone;
  BaseConv lateral_conv0{nullptr}, reduce_conv1{nullptr};
  BlockPtr C3_p4, C3_p3, bu_conv2, C3_n3, bu_conv1, C3_n4;
};
TORCH_MODULE(YOLOPAFPN);

// ---- head and decoding

// Strides of the official models in pixels.
inline const std::vector<int> kStrides = {8, 16, 32};

// Raw output of the network before decoding, one row per anchor point.
struct Predictions {
  Tensor reg;  // [B, A, 4]  offset of the centre from the cell in strides, log of width and height in strides
  Tensor obj;  // [B, A]     objectness logits
  Tensor cls;  // [B, A, C]  class logits
  std::vector<int> strides = kStrides;  // of the levels, in the order of the anchor points
};

// Base class of heads. forward() maps the feature maps of a Backbone to predictions.
struct DetectionHead : nn::Module {
  virtual Predictions forward(const std::vector<Tensor>& features) = 0;
};

// Positions of the anchor points.
struct Anchors {
  Tensor grid;         // [A, 2]  column and row of the cell; integers, without +0.5
  Tensor stride;       // [A]     pixels
  Tensor centre = {};  // [2, A]  x and y of the centre of the cell, pixels
  int64_t levels = 0;  // number of strides
};

// Returns the anchor points of an image of height x width pixels, with dtype and device of `like`.
inline Anchors make_anchors(int64_t height, int64_t width, const torch::TensorOptions& like,
                            const std::vector<int>& level_strides = kStrides) {
  std::vector<Tensor> grids, strides;
  for (const int s : level_strides) {
    const int64_t rows = height / s, columns = width / s;
    const auto yx = torch::meshgrid({torch::arange(rows, like), torch::arange(columns, like)}, "ij");
    grids.push_back(torch::stack({yx[1], yx[0]}, 2).view({-1, 2}));
    strides.push_back(torch::full({rows * columns}, s, like));
  }
  const Tensor grid = torch::cat(grids), stride = torch::cat(strides);
  return {grid, stride, (grid.t() + 0.5) * stride, int64_t(level_strides.size())};
}

// Returns make_anchors(). Keeps the results of the first 64 kinds until the end of the program, because CUDA
// graphs read them at fixed addresses.
inline Anchors anchors_of(int64_t height, int64_t width, const torch::TensorOptions& like,
                          const std::vector<int>& strides) {
  using Key = std::tuple<int64_t, int64_t, c10::ScalarType, std::string, std::vector<int>>;
  const Key key{height, width, c10::typeMetaToScalarType(like.dtype()), like.device().str(), strides};
  // Never destroyed, because CUDA may be gone at the end of the program.
  thread_local auto& kept = *new std::map<Key, Anchors>;
  if (const auto found = kept.find(key); found != kept.end()) return found->second;
  // Plain tensors, although the first caller may be in inference mode or record for --dtr (dispatch key
  // Fake).
  const c10::InferenceMode no_inference_mode(false);
  const c10::impl::ExcludeDispatchKeyGuard no_dtr(c10::DispatchKey::Fake);
  const Anchors anchors = make_anchors(height, width, like.requires_grad(false), strides);
  if (kept.size() < 64) kept.emplace(key, anchors);
  return anchors;
}

// Decodes raw regression [..., A, 4] to boxes (cx, cy, w, h) in pixels. Uses no in-place operation, because
// autograd needs the inputs.
inline Tensor decode_boxes(const Tensor& reg, const Anchors& anchors) {
  const Tensor stride = anchors.stride.unsqueeze(-1);  // [A, 1]
  const auto parts = reg.split(2, -1);
  return torch::cat({parts[0] + anchors.grid, parts[1].exp()}, -1) * stride;
}

// Returns the number of channels inside the head.
inline int head_channels(const ModelSize& size) { return 4 * stem_channels(size); }

// Decoupled head: separate branches for classes and for boxes with objectness, on each level.
struct YOLOXHeadImpl : DetectionHead {
  // channels: of the feature maps. strides: of the feature maps, in pixels.
  YOLOXHeadImpl(const ModelSize& size, int num_classes, const std::vector<int>& channels,
                const std::vector<int>& strides)
      : strides(strides) {
    const int h = head_channels(size);
    // The registration order gives the official key order of the state dict. The construction order below
    // gives the official random initialisation.
    cls_convs = register_module("cls_convs", Seq());
    reg_convs = register_module("reg_convs", Seq());
    cls_preds = register_module("cls_preds", nn::ModuleList());
    reg_preds = register_module("reg_preds", nn::ModuleList());
    obj_preds = register_module("obj_preds", nn::ModuleList());
    stems = register_module("stems", Seq());
    const auto tower = [&] {
      const auto first = make_conv(h, h, 3, 1, size.depthwise),
                 second = make_conv(h, h, 3, 1, size.depthwise);
      return std::make_shared<SeqImpl>(std::vector<BlockPtr>{first, second});
    };
    const auto predictor = [&](int out) { return nn::Conv2d(nn::Conv2dOptions(h, out, 1)); };
    for (const int in : channels) {
      stems->push_back(std::make_shared<BaseConvImpl>(in, h, 1));
      cls_convs->push_back(tower());
      reg_convs->push_back(tower());
      cls_preds->push_back(predictor(num_classes));
      reg_preds->push_back(predictor(4));
      obj_preds->push_back(predictor(1));
    }
    // Sets the bias for an initial probability of 0.01. Otherwise the loss of the many background points
    // dominates the first iterations (focal loss, arXiv 1708.02002, section 3.3).
    torch::NoGradGuard no_grad;
    const double prior = 0.01, bias = -std::log((1 - prior) / prior);
    for (auto* preds : {&cls_preds, &obj_preds})
      for (const auto& pred : **preds) pred->as<nn::Conv2d>()->bias.fill_(bias);
  }
  Predictions forward(const std::vector<Tensor>& features) override {
    std::vector<Tensor> reg, obj, cls;
    const auto rows = [](const Tensor& x) {  // [B, C, h, w] -> [B, hw, C]
      return x.permute({0, 2, 3, 1}).flatten(1, 2);
    };
    for (size_t k = 0; k < features.size(); ++k) {
      const Tensor x = stems->blocks[k]->forward(features[k]);
      cls.push_back(rows(cls_preds[k]->as<nn::Conv2d>()->forward(cls_convs->blocks[k]->forward(x))));
      const Tensor reg_feature = reg_convs->blocks[k]->forward(x);
      reg.push_back(rows(reg_preds[k]->as<nn::Conv2d>()->forward(reg_feature)));
      obj.push_back(rows(obj_preds[k]->as<nn::Conv2d>()->forward(reg_feature)));
    }
    return {torch::cat(reg, 1), torch::cat(obj, 1).squeeze(-1), torch::cat(cls, 1), strides};
  }

  std::vector<int> strides;
  Seq cls_convs{nullptr}, reg_convs{nullptr}, stems{nullptr};
  nn::ModuleList cls_preds{nullptr}, reg_preds{nullptr}, obj_preds{nullptr};
};
TORCH_MODULE(YOLOXHead);

// ---- model

// The whole detector: backbone with neck, and head. make_model() in models.hpp constructs it by name.
struct YOLOXImpl : nn::Module {
  YOLOXImpl(const std::string& name, int num_classes, const std::shared_ptr<Backbone>& backbone,
            const std::shared_ptr<DetectionHead>& head)
      : name(name), num_classes(num_classes) {
    this->backbone = register_module("backbone", backbone);
    this->head = register_module("head", head);
  }
  // images: [B, 3, H, W] float, see preprocess(); H and W multiples of 32. Any memory format works,
  // channels-last is the fastest. Throws std::runtime_error on another shape.
  Predictions forward(const Tensor& images) {
    check(images.dim() == 4 && images.size(1) == 3 && images.size(2) % 32 == 0 && images.size(3) % 32 == 0,
          "the network needs images [B, 3, H, W] with H and W multiples of 32, got ", images.sizes());
    return head->forward(backbone->forward(images));
  }

  std::string name;
  int num_classes;
  std::shared_ptr<Backbone> backbone;
  std::shared_ptr<DetectionHead> head;
};
TORCH_MODULE(YOLOX);

// Returns a YOLOX of this size: CSPDarknet, YOLOPAFPN and the decoupled head, with strides 8, 16 and 32.
inline YOLOX make_yolox(const ModelSize& size, int num_classes) {
  // In this order, because the construction order decides the initialisation.
  const CSPDarknet darknet(size);
  const YOLOPAFPN backbone(size, darknet.ptr());
  const YOLOXHead head(size, num_classes, backbone->channels, kStrides);
  return YOLOX(size.name, num_classes, backbone.ptr(), head.ptr());
}

// Turns on SyncBN in all batch norms of the model. {} turns SyncBN off. Throws std::runtime_error if a batch
// norm is torch's BatchNorm2d, which knows no other ranks.
inline void use_sync_bn(nn::Module& model, const SyncBnCollectives& collectives) {
  const auto over = collectives.sum ? c10::make_intrusive<Collectives>(collectives) : CollectivesPtr();
  size_t others = 0;
  for (const auto& module : model.modules()) {
    if (auto* norm = module->as<SyncBatchNorm2dImpl>())
      norm->over = over;
    else
      others += module->as<nn::BatchNorm2dImpl>() != nullptr;
  }
  check(!over || others == 0, "the model has ", others,
        " batch norms of type BatchNorm2d, where SyncBN does not work; make them SyncBatchNorm2d "
        "(lib/layers/bn_silu.hpp), or give --no-sync-bn");
}

// Converts the weights to channels-last memory format. Images from OpenCV have this format, so that no
// operation has to reorder memory: a training iteration takes 10 to 20 % less time. Names and shapes do not
// change.
inline void to_channels_last(nn::Module& model) {
  for (auto& p : model.parameters())
    if (p.dim() == 4) p.set_data(p.contiguous(torch::MemoryFormat::ChannelsLast));
}

// Returns weight and bias of the convolution that equals a convolution (weight [C, ...], bias [C]) and the
// following batch norm in evaluation mode. In this mode, a batch norm is a factor and an offset per channel.
inline std::pair<Tensor, Tensor> fold_batch_norm(const Tensor& weight, const Tensor& bias,
                                                 const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                                                 const Tensor& var, double eps) {
  const torch::NoGradGuard no_grad;
  const auto exact = [](const Tensor& t) { return t.to(torch::kDouble); };
  const Tensor factor = exact(gamma) / (exact(var) + eps).sqrt();  // [C]
  return {(exact(weight) * factor.view({-1, 1, 1, 1})).to(gamma.dtype()),
          (exact(beta) + (exact(bias) - exact(mean)) * factor).to(gamma.dtype())};
}

// Folds each batch norm, with its running statistics, into the preceding convolution. The output in
// evaluation mode stays the same up to rounding. The fused model is for inference only.
inline void fuse_batch_norms(nn::Module& model) {
  for (const auto& module : model.modules()) {
    auto* block = module->as<BaseConvImpl>();
    if (!block || !block->bn) continue;
    const auto& bn = *block->bn;
    const auto [weight, bias] = fold_batch_norm(block->conv->weight, torch::zeros_like(bn.bias), bn.weight,
                                                bn.bias, bn.running_mean, bn.running_var, bn.options.eps());
    const auto& old = block->conv->options;
    nn::Conv2d conv(nn::Conv2dOptions(old.in_channels(), old.out_channels(), old.kernel_size())
                        .stride(old.stride())
                        .padding(old.padding())
                        .dilation(old.dilation())
                        .groups(old.groups()));
    conv->weight.set_data(weight);
    conv->bias.set_data(bias);
    block->conv = block->replace_module("conv", conv);
    block->unregister_module("bn");
    block->bn = nullptr;
  }
}

// Scales the trained filters of each BaseConv, together with their batch norms. The output in evaluation mode
// stays the same up to rounding. Adam changes a weight by about the learning rate per step, whatever its
// size, but the size of a filter before a batch norm is arbitrary: it depends on the origin of the weights.
// Afterwards a filter is as large as if its batch norm were folded into it, up to a factor of 1.4, because it
// is multiplied by a power of two.
inline void scale_filters(nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& module : model.modules()) {
    auto* block = module->as<BaseConvImpl>();
    if (!block || !block->bn) continue;
    if (!block->conv->weight.requires_grad() || !block->bn->weight.requires_grad()) continue;
    auto& bn = *block->bn;
    const Tensor var = bn.running_var + bn.options.eps(), folded = bn.weight.abs() / var.sqrt();  // [O]
    const Tensor exponent = folded.log2().round();
    // A dead filter, or one so large that its variance would overflow, stays as it is.
    const Tensor factor = torch::where(exponent.abs() <= 20, exponent.exp2(), torch::ones_like(folded));
    const Tensor scaled = bn.running_var * factor.square();
    block->conv->weight.mul_(factor.view({-1, 1, 1, 1}));
    bn.weight.mul_(((scaled + bn.options.eps()) / var).sqrt() / factor);
    bn.running_mean.mul_(factor);
    bn.running_var.copy_(scaled);
  }
}

// Decodes predictions to [B, A, 5 + C]: cx, cy, w, h in pixels of the network input, then objectness and
// class scores in 0..1. height, width: of the network input in pixels. Returns float32, or float64 for
// float64 predictions.
inline Tensor decode(const Predictions& p, int64_t height, int64_t width) {
  const auto dtype = torch::promote_types(p.reg.scalar_type(), torch::kFloat);
  const Tensor boxes =
      decode_boxes(p.reg.to(dtype), anchors_of(height, width, p.reg.options().dtype(dtype), p.strides));
  return torch::cat({boxes, p.obj.to(dtype).sigmoid().unsqueeze(-1), p.cls.to(dtype).sigmoid()}, -1);
}

// Applies the score threshold and NMS to the output of decode(), [B, A, 5 + C]. Returns the detections [N, 7]
// of each image on the CPU: x1, y1, x2, y2 in pixels of the network input (not clipped), objectness, class
// score, class id. The score is objectness x class score; detections are in descending order of score. conf:
// minimum score. nms_threshold: IoU threshold.
inline std::vector<Tensor> postprocess(const Tensor& decoded, double conf, double nms_threshold) {
  torch::NoGradGuard no_grad;
  const auto [class_score, class_id] = decoded.slice(-1, 5).max(-1, /*keepdim=*/true);  // [B, A, 1] each
  const Tensor half = decoded.slice(-1, 2, 4) / 2, centre = decoded.slice(-1, 0, 2);
  const std::vector<Tensor> columns = {centre - half, centre + half, decoded.slice(-1, 4, 5), class_score,
                                       class_id.to(decoded.dtype())};
  const Tensor rows = torch::cat(columns, -1).cpu(),
               keep = rows.select(-1, 4) * rows.select(-1, 5) >= conf;  // [B, A, 7], [B, A]
  std::vector<Tensor> detections(size_t(rows.size(0)));
  at::parallel_for(0, rows.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Tensor d = rows[b].index({keep[b]}).to(torch::kFloat), score = d.select(1, 4) * d.select(1, 5);
      detections[b] = d.index_select(0, nms(d.slice(1, 0, 4), score, d.select(1, 6), nms_threshold));
    }
  });
  return detections;
}

}  // namespace yolox
