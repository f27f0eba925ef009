// The training loss of YOLOX (arXiv 2107.08430, section 2): 5 x IoU loss + objectness + classes (+ L1 in the
// last epochs), each summed over the batch and divided by the number of positive anchor points.
//
// B images, A anchor points, G objects per image, C classes, F rows for positive points (at most 10 per
// object).
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "simota.hpp"

namespace yolox {

// All are scalars on the device of the predictions; reading one on the host waits for the device.
struct Losses {
  Tensor total;  // iou + obj + cls + l1, the one to call backward() on
  Tensor iou;    // already times 5
  Tensor obj;
  Tensor cls;
  Tensor l1;            // 0 unless asked for
  Tensor num_fg;        // positive points in the batch
  std::string anomaly;  // what torch's anomaly mode has found in backward
};

// height, width: of the images, in pixels. Computes in float32 (float64 for float64 predictions) whatever the
// network ran in. Nothing here waits for the device: the positive points are packed into F rows, a number
// that the host knows.
inline Losses yolox_loss(const Predictions& raw, int64_t height, int64_t width, const Targets& targets,
                         bool use_l1) {
  namespace F = torch::nn::functional;
  const auto dtype = torch::promote_types(raw.reg.scalar_type(), torch::kFloat);
  const Tensor reg = raw.reg.to(dtype), obj = raw.obj.to(dtype), cls = raw.cls.to(dtype);
  const int64_t batch = reg.size(0), points = reg.size(1), classes = cls.size(2);
  const Anchors anchors = make_anchors(height, width, reg.options().requires_grad(false));
  Assignment assignment;
  {
    RECORD_USER_SCOPE("assignment");
    assignment = simota(decode_boxes(reg.detach(), anchors), obj.detach(), cls.detach(), anchors, targets);
  }

  const Tensor is_fg = assignment.matched >= 0;  // [B, A]
  const Tensor num_fg = is_fg.sum(), divisor = num_fg.clamp_min(1).to(dtype);
  // The functions that it is for take weights without a gradient: what depends on the predictions, as in
  // focal loss, is multiplied in before the sum, by hand.
  const auto sum = at::Reduction::Sum;
  Losses losses;
  losses.num_fg = num_fg;
  losses.obj = torch::binary_cross_entropy_with_logits(obj, is_fg.to(dtype), {}, {}, sum) / divisor;

  // The positive points, packed: row i < num_fg holds the i-th of them, later rows weigh nothing.
  const auto index = num_fg.options();
  const int64_t rows = std::min(batch * points, kTopK * targets.total());
  const Tensor flat_fg = is_fg.flatten(), place = torch::where(flat_fg, flat_fg.cumsum(0) - 1, rows);
  const Tensor fg = torch::zeros({rows + 1}, index)
                        .scatter_(0, place, torch::arange(batch * points, index))
                        .slice(0, 0, rows);
  const Tensor used = (torch::arange(rows, index) < num_fg).unsqueeze(1);  // [F, 1]

  const Tensor object = fg.div(points, "floor") * targets.boxes.size(1) +
                        assignment.matched.flatten().index_select(0, fg).clamp_min(0);
  const Tensor gt_box = targets.boxes.flatten(0, 1).to(dtype).index_select(0, object);     // [F, 4]
  const Tensor gt_class = targets.classes.flatten().index_select(0, object).unsqueeze(1);  // [F, 1]
  const Tensor fg_iou = assignment.iou.flatten().index_select(0, fg).unsqueeze(1);
  const Tensor point = fg.remainder(points);
  const Anchors cell = {anchors.grid.index_select(0, point), anchors.stride.index_select(0, point)};
  // An unused row must not carry what its point predicts: an infinity there, times no weight, would be NaN.
  const Tensor fg_reg = torch::where(used, reg.flatten(0, 1).index_select(0, fg), 0);  // [F, 4]
  const Tensor box = decode_boxes(fg_reg, cell);
  const Tensor iou = box_iou(box, gt_box, 1e-16);
  losses.iou = 5.0 * torch::where(used.squeeze(1), 1 - iou * iou, 0).sum() / divisor;

  const Tensor cls_target =
      torch::zeros({rows, classes}, reg.options().requires_grad(false)).scatter_(1, gt_class, fg_iou);
  const Tensor fg_cls = torch::where(used, cls.flatten(0, 1).index_select(0, fg), 0);
  losses.cls = torch::binary_cross_entropy_with_logits(fg_cls, cls_target, used.to(dtype), {}, sum) / divisor;

  losses.l1 = torch::zeros_like(losses.iou);
  if (use_l1) {
    const Tensor stride = cell.stride.unsqueeze(1);
    const Tensor target = torch::cat(
        {gt_box.slice(1, 0, 2) / stride - cell.grid, (gt_box.slice(1, 2, 4) / stride + 1e-8).log()}, 1);
    losses.l1 = torch::where(used, (fg_reg - target).abs(), 0).sum() / divisor;
  }
  losses.total = losses.iou + losses.obj + losses.cls + losses.l1;
  return losses;
}

// The losses of a batch from those of each rank's share.
inline void join_ranks(Losses& l, const std::function<void(Tensor&)>& sum) {
  const Tensor weight = l.num_fg.clamp_min(1);
  Tensor all = torch::stack({l.total * weight, l.iou * weight, l.obj * weight, l.cls * weight, l.l1 * weight,
                             l.num_fg.to(l.total.scalar_type())})
                   .to(torch::kDouble);
  sum(all);
  l.num_fg = all[5].to(l.num_fg.scalar_type());
  all = (all / all[5].clamp_min(1)).to(l.total.scalar_type());
  l.total = all[0], l.iou = all[1], l.obj = all[2], l.cls = all[3], l.l1 = all[4];
}

// The losses of a batch from those of its parts. A part is divided by its own positives, a batch by all of
// them.
inline Losses join(const std::vector<Losses>& parts) {
  if (parts.size() == 1) return parts[0];
  Losses whole;
  whole.num_fg = torch::zeros_like(parts[0].num_fg);
  for (const auto& part : parts) whole.num_fg = whole.num_fg + part.num_fg;
  for (Tensor Losses::*loss : {&Losses::total, &Losses::iou, &Losses::obj, &Losses::cls, &Losses::l1}) {
    whole.*loss = torch::zeros_like(parts[0].*loss);
    for (const auto& part : parts) whole.*loss = whole.*loss + part.*loss * part.num_fg.clamp_min(1);
    whole.*loss = whole.*loss / whole.num_fg.clamp_min(1);
  }
  return whole;
}

}  // namespace yolox
