// SPDX-License-Identifier: Apache-2.0
// The training loss of YOLOX (arXiv 2107.08430, section 2): 5 x IoU loss + objectness loss + class loss, and
// L1 loss in the last epochs. Each term is summed over the batch and divided by the number of positives.
//
// A positive is an anchor point that SimOTA matches with an object.
// B: images. A: anchor points. G: objects per image. C: classes. F: rows for positives, at most 10 per
// object.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>

#include "losses.hpp"
#include "simota.hpp"

namespace yolox {

// Weights of the loss terms.
constexpr double kIouWeight = 5;
constexpr double kObjWeight = 1;
constexpr double kClsWeight = 1;
constexpr double kL1Weight = 1;

// Returns [B, A]: true for an anchor point in at least one of the regions, [B, I, 4] as cx, cy, w, h.
inline Tensor is_within(const Anchors& anchors, const Tensor& regions) {
  const Tensor point = anchors.centre.t().unsqueeze(1);  // [A, 1, 2]
  Tensor within;
  for (const Tensor& some : regions.split(32, 1)) {                        // [B, 32, 4], to save memory
    const Tensor away = (point - some.slice(2, 0, 2).unsqueeze(1)).abs();  // [B, A, 32, 2]
    const Tensor in_some = (away < some.slice(2, 2, 4).unsqueeze(1) / 2).all(3).any(2);
    within = within.defined() ? within.logical_or(in_some) : in_some;
  }
  return within;
}

// Computes the loss of a batch. height, width: of the network input in pixels. class_weights: [C], weight of
// the class loss of positives of each class; undefined: 1. Computes in float32, or in
// float64 for float64 predictions, also when the network runs under autocast. Does not synchronise with the
// device, because positives are packed into F rows, a number that the host knows.
inline Losses yolox_loss(const Predictions& raw, int64_t height, int64_t width, const Targets& targets,
                         bool use_l1, const Tensor& class_weights = {}) {
  RECORD_USER_SCOPE("loss");
  const auto dtype = torch::promote_types(raw.reg.scalar_type(), torch::kFloat);
  const Tensor reg = raw.reg.to(dtype), obj = raw.obj.to(dtype), cls = raw.cls.to(dtype);
  const int64_t batch = reg.size(0), points = reg.size(1), classes = cls.size(2);
  const Anchors anchors = anchors_of(height, width, reg.options(), raw.strides);
  Tensor matched;  // [B, A]
  {
    RECORD_USER_SCOPE("assignment");
    matched = simota(decode_boxes(reg.detach(), anchors), obj.detach(), cls.detach(), anchors, targets);
  }

  const Tensor is_fg = matched >= 0, flat_fg = is_fg.flatten();  // [B, A], [B x A]
  const Tensor number = flat_fg.cumsum(0);                       // of a positive, from 1
  const Tensor num_fg = number[-1], divisor = num_fg.clamp_min(1).to(dtype);
  // The weight argument of binary_cross_entropy_with_logits gets no gradient. A weight that depends on the
  // predictions, as in focal loss, must be multiplied before the sum.
  const auto sum = at::Reduction::Sum;
  Losses losses;
  losses.images = batch;
  losses.count("positives", num_fg);
  losses.count("objects", targets.counts_on(num_fg.device()).sum());
  // Points in ignored regions are neither objects nor background.
  Tensor obj_weight;
  if (targets.ignored.defined())
    obj_weight = is_fg.logical_or(is_within(anchors, targets.ignored).logical_not()).to(dtype);
  const Tensor obj_loss =
      torch::binary_cross_entropy_with_logits(obj, is_fg.to(dtype), obj_weight, {}, sum) / divisor;

  // Packed positives: row i < num_fg holds the i-th positive; the other rows are unused and have weight 0.
  const auto index = num_fg.options();
  const int64_t rows = std::min(batch * points, kTopK * targets.total());
  const Tensor fg = torch::zeros({rows + 1}, index)  // row 0 takes all points that are no positives
                        .scatter_(0, number * flat_fg, torch::arange(batch * points, index))
                        .slice(0, 1);
  const Tensor used = (torch::arange(rows, index) < num_fg).unsqueeze(1);  // [F, 1]

  const Tensor object =
      fg.div(points, "floor") * targets.boxes.size(1) + matched.flatten().index_select(0, fg).clamp_min(0);
  const Tensor gt_box = targets.boxes.flatten(0, 1).to(dtype).index_select(0, object);     // [F, 4]
  const Tensor gt_class = targets.classes.flatten().index_select(0, object).unsqueeze(1);  // [F, 1]
  const Tensor point = fg.remainder(points);
  const Anchors cell = {anchors.grid.index_select(0, point), anchors.stride.index_select(0, point)};
  // Zeroes the unused rows, because inf * 0 would be NaN.
  const Tensor fg_reg = torch::where(used, reg.flatten(0, 1).index_select(0, fg), 0);  // [F, 4]
  const Tensor box = decode_boxes(fg_reg, cell);
  const Tensor iou = box_iou(box, gt_box, 1e-16);
  const Tensor iou_loss = torch::where(used.squeeze(1), 1 - iou * iou, 0).sum() / divisor;

  // The target of the class score is the IoU, also with another box loss.
  const Tensor cls_target = torch::zeros({rows, classes}, reg.options().requires_grad(false))
                                .scatter_(1, gt_class, iou.detach().unsqueeze(1));
  const Tensor fg_cls = torch::where(used, cls.flatten(0, 1).index_select(0, fg), 0);
  Tensor cls_weight = used.to(dtype);  // [F, 1]
  if (class_weights.defined())
    cls_weight = cls_weight * class_weights.to(dtype).index_select(0, gt_class.flatten()).unsqueeze(1);
  const Tensor cls_loss =
      torch::binary_cross_entropy_with_logits(fg_cls, cls_target, cls_weight, {}, sum) / divisor;

  Tensor l1_loss = torch::zeros_like(iou_loss);
  if (use_l1) {
    const Tensor stride = cell.stride.unsqueeze(1);
    const Tensor target = torch::cat(
        {gt_box.slice(1, 0, 2) / stride - cell.grid, (gt_box.slice(1, 2, 4) / stride + 1e-8).log()}, 1);
    l1_loss = torch::where(used, (fg_reg - target).abs(), 0).sum() / divisor;
  }
  losses.add("iou", iou_loss, kIouWeight);
  losses.add("obj", obj_loss, kObjWeight);
  losses.add("cls", cls_loss, kClsWeight);
  losses.add("l1", l1_loss, kL1Weight);
  return losses;
}

// Returns [4]: the losses per positive of a batch of the evaluation, times its positives; the positives; the
// losses per image, times the images; the images. For a mean over all batches and ranks. Without L1, so that
// all epochs of a run are comparable.
inline Tensor validation_loss(const Predictions& predictions, ImageSize size, const Targets& targets) {
  const Losses losses = yolox_loss(predictions, size.height, size.width, targets, /*use_l1=*/false);
  const Tensor per_positive = losses.per_positive(), images = torch::full_like(per_positive, losses.images);
  return torch::stack({per_positive * losses.weight().to(per_positive), losses["positives"].to(per_positive),
                       losses.per_image.defined() ? losses.per_image * images : 0 * images, images});
}

}  // namespace yolox
