// SPDX-License-Identifier: Apache-2.0
// SimOTA label assignment: matches anchor points with objects. Method: "YOLOX" (arXiv 2107.08430), section 2,
// a simplified form of optimal transport assignment ("OTA", arXiv 2103.14259):
//   1. Candidates are the anchor points in the centre region of any object of the image.
//   2. The cost of a pair (object, candidate) is class loss + 3 x (-log IoU), plus 1e6 if the candidate lies
//   outside the centre region of this object.
//   3. Each object selects its k candidates of lowest cost. The dynamic k is the sum of the 10 largest IoUs
//   of the object, truncated, at least 1.
//   4. A candidate that several objects select goes to the object of lowest cost among all objects.
//
// The batch is computed with tensor operations whose shapes are known on the host: without a loop over
// objects and without device synchronisation. Memory is bounded, because pairs are formed in chunks of at
// most max_pairs. The size of the chunks does not change the result.
//
// B: images. G: objects per image (padded). A: anchor points. K: candidate slots per image. C: classes.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "base/device.hpp"
#include "data/batch.hpp"
#include "yolox.hpp"

namespace yolox {

// Result of the label assignment of a batch.
struct Assignment {
  Tensor matched;  // [B, A] int64: row of the matched object in Targets; -1: background
  Tensor iou;      // [B, A] IoU of the predicted box with the matched object; 0 for background
};

constexpr int64_t kTopK = 10;          // maximum number of anchor points per object
constexpr double kCentreRadius = 1.5;  // half side of the square centre region, in strides

// Returns the maximum number of pairs (object, anchor point) in one chunk. A pair takes about 80 bytes. On a
// GPU, 8 % of its memory; larger chunks need fewer kernels.
inline int64_t default_max_pairs(torch::Device device) {
  constexpr int64_t on_cpu = int64_t{1} << 24;
  if (device.is_cpu()) return on_cpu;
  static const auto on_gpu = int64_t(gpu_memory(device) / 1024);  // a process uses a single GPU
  return std::max(on_gpu, on_cpu / 4);
}

// Returns the IoU of boxes (cx, cy, w, h; in the last dimension), elementwise with broadcasting. eps is added
// to the union. Without eps, two boxes of zero area have IoU NaN.
inline Tensor box_iou(const Tensor& a, const Tensor& b, double eps = 0) {
  const auto half_a = a.slice(-1, 2, 4) / 2, half_b = b.slice(-1, 2, 4) / 2;
  const auto centre_a = a.slice(-1, 0, 2), centre_b = b.slice(-1, 0, 2);
  const Tensor low = torch::max(centre_a - half_a, centre_b - half_b);
  const Tensor high = torch::min(centre_a + half_a, centre_b + half_b);
  const Tensor size = (high - low).clamp_min(0);
  const Tensor both = size.select(-1, 0) * size.select(-1, 1);
  const Tensor either = a.select(-1, 2) * a.select(-1, 3) + b.select(-1, 2) * b.select(-1, 3) - both;
  return both / (eps > 0 ? either + eps : either);
}

// Returns true where a point lies inside the centre region of an object (border excluded). All tensors
// broadcast: coordinates of point and object centre, half side `radius` of the region, in pixels. The
// arithmetic follows the order of the official code, so that points on the border are classified equally.
inline Tensor in_centre(const Tensor& point_x, const Tensor& point_y, const Tensor& gt_x, const Tensor& gt_y,
                        const Tensor& radius) {
  return (point_x > gt_x - radius)
      .logical_and_(point_x < gt_x + radius)
      .logical_and_(point_y > gt_y - radius)
      .logical_and_(point_y < gt_y + radius);
}

// Returns the anchor points that lie in the centre region of at least one object, packed into slots in the
// order of the anchor points: [n, K]; A marks an unused slot. x, y, radius: [A] in pixels. gt_x, gt_y: [n,
// rows, 1]. valid: [n, rows]. On each level, a centre region covers at most side x side cells, which bounds
// the number K of slots.
inline Tensor candidate_slots(const Tensor& x, const Tensor& y, const Tensor& radius, const Tensor& gt_x,
                              const Tensor& gt_y, const Tensor& valid, int64_t max_pairs) {
  const int64_t n = valid.size(0), rows = valid.size(1), points = x.size(0);
  const auto index = valid.options().dtype(torch::kLong);
  Tensor candidate = torch::zeros({n, points}, valid.options());
  const int64_t step = std::max<int64_t>(1, max_pairs / (n * points));
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t end = std::min(rows, r + step);
    candidate.logical_or_(in_centre(x, y, gt_x.slice(1, r, end), gt_y.slice(1, r, end), radius)
                              .logical_and_(valid.slice(1, r, end).unsqueeze(2))
                              .any(1));
  }
  const auto side = int64_t(std::ceil(2 * kCentreRadius));
  const int64_t slots = std::min(points, int64_t(std::size(kStrides)) * side * side * rows);
  const Tensor place = torch::where(candidate, candidate.cumsum(1) - 1, slots).clamp_max_(slots);
  return torch::full({n, slots + 1}, points, index)
      .scatter_(1, place, torch::arange(points, index).expand({n, points}))
      .slice(1, 0, slots);
}

// Runs SimOTA on n images of at most `rows` objects each. boxes [n, A, 4] decoded; obj [n, A] and cls [n, A,
// C] logits; gt [n, rows, 4]; gt_class [n, rows]; counts [n]: number of objects.
inline Assignment simota_chunk(const Tensor& boxes, const Tensor& obj, const Tensor& cls,
                               const Anchors& anchors, const Tensor& gt, const Tensor& gt_class,
                               const Tensor& counts, int64_t max_pairs) {
  const int64_t n = boxes.size(0), points = boxes.size(1), rows = gt.size(1);
  const auto index = counts.options();
  const Tensor x = (anchors.grid.select(1, 0) + 0.5) * anchors.stride;  // [A] centre of the cell, pixels
  const Tensor y = (anchors.grid.select(1, 1) + 0.5) * anchors.stride;
  const Tensor radius = anchors.stride * kCentreRadius;
  const Tensor valid = torch::arange(rows, index).unsqueeze(0) < counts.unsqueeze(1);     // [n, rows]
  const Tensor gt_x = gt.select(2, 0).unsqueeze(2), gt_y = gt.select(2, 1).unsqueeze(2);  // [n, rows, 1]

  const Tensor slot = candidate_slots(x, y, radius, gt_x, gt_y, valid, max_pairs);  // [n, K]
  const int64_t slots = slot.size(1);
  const Tensor used = slot < points, point = slot.clamp_max(points - 1);  // [n, K]

  const auto at_slots = [&](const Tensor& t) {  // [n, A, D] -> [n, K, D]
    return t.gather(1, point.unsqueeze(2).expand({n, slots, t.size(2)}));
  };
  const Tensor slot_box = at_slots(boxes);
  const Tensor slot_x = x.index({point}), slot_y = y.index({point}),
               slot_radius = radius.index({point});  // [n, K]
  // The class cost of a pair is the binary cross entropy between sqrt(class score x objectness) and the
  // one-hot class. The sum over classes is computed once per candidate with all targets 0. Each pair then
  // replaces the term of the class of its object.
  const Tensor p = (at_slots(cls).to(torch::kFloat).sigmoid() *
                    obj.gather(1, point).to(torch::kFloat).sigmoid().unsqueeze(2))
                       .sqrt();
  const Tensor absent = -(-p).log1p().clamp_min(-100), present = -p.log().clamp_min(-100);  // [n, K, C]
  const Tensor all_absent = absent.sum(-1, false, torch::kDouble).unsqueeze(1);             // [n, 1, K]
  const Tensor exchange = (present.to(torch::kDouble) - absent).transpose(1, 2);            // [n, C, K]

  // Loops over chunks of objects. Keeps for each candidate the lowest cost with its object, and the objects
  // that selected the candidate.
  const double infinity = std::numeric_limits<double>::infinity();
  Tensor best_cost = torch::full({n, slots}, infinity, index.dtype(torch::kDouble));
  Tensor best_row = torch::full({n, slots}, -1, index), taken_by = best_row.clone(),
         times_taken = torch::zeros_like(best_row);
  const int64_t row_step = std::max<int64_t>(1, max_pairs / (n * slots));
  for (int64_t r = 0; r < rows; r += row_step) {
    const int64_t end = std::min(rows, r + row_step);
    const Tensor row_id = torch::arange(r, end, index).view({1, -1, 1});
    const Tensor pair = valid.slice(1, r, end).unsqueeze(2).logical_and(used.unsqueeze(1));  // [n, g, K]
    const Tensor iou = box_iou(gt.slice(1, r, end).unsqueeze(2), slot_box.unsqueeze(1))
                           .nan_to_num_()
                           .masked_fill_(pair.logical_not(), 0);
    const Tensor own = in_centre(slot_x.unsqueeze(1), slot_y.unsqueeze(1), gt_x.slice(1, r, end),
                                 gt_y.slice(1, r, end), slot_radius.unsqueeze(1));
    const Tensor of_class = gt_class.slice(1, r, end).unsqueeze(2).expand({n, end - r, slots});
    // float64: in float32, adding the penalty of 1e6 would round away the cost differences between candidates
    // outside of the centre region.
    Tensor cost = all_absent + exchange.gather(1, of_class) - 3.0 * (iou + 1e-8).log() +
                  1e6 * own.logical_not().to(torch::kDouble);
    cost = cost.nan_to_num_(infinity, infinity).masked_fill_(pair.logical_not(), infinity);

    const int64_t k = std::min(kTopK, slots);
    const Tensor wanted = std::get<0>(iou.topk(k, 2)).sum(2).to(torch::kLong).clamp_min_(1);  // [n, g]
    const auto [cheap_cost, cheap_slot] = cost.topk(k, 2, /*largest=*/false);                 // [n, g, k]
    const Tensor take = (torch::arange(k, index) < wanted.unsqueeze(2)).logical_and_(cheap_cost < infinity);
    const Tensor taken = torch::zeros_like(pair).scatter_(2, cheap_slot, take);  // [n, g, K]

    times_taken += taken.sum(1);
    taken_by = torch::max(taken_by, std::get<0>(torch::where(taken, row_id, -1).max(1)));
    const auto [chunk_cost, chunk_row] = cost.min(1);
    const Tensor better = chunk_cost < best_cost;
    best_row = torch::where(better, chunk_row + r, best_row);
    best_cost = torch::where(better, chunk_cost, best_cost);
  }
  const Tensor winner = torch::where(times_taken > 1, best_row, taken_by);  // [n, K]
  const Tensor winner_box = gt.gather(1, winner.clamp_min(0).unsqueeze(2).expand({n, slots, 4}));
  const Tensor winner_iou = box_iou(winner_box, slot_box).nan_to_num_().masked_fill_(winner < 0, 0);
  return {torch::full({n, points + 1}, -1, index).scatter_(1, slot, winner).slice(1, 0, points),
          torch::zeros({n, points + 1}, boxes.options()).scatter_(1, slot, winner_iou).slice(1, 0, points)};
}

// Runs SimOTA on a batch, without autograd. boxes: decoded predictions [B, A, 4], float32 or float64;
// otherwise throws std::runtime_error. obj [B, A] and cls [B, A, C]: logits. Call it outside of autocast. An
// image without candidates (no object, or every object centre far from all anchor points) gets only
// background. max_pairs: size of a chunk; 0: default_max_pairs().
inline Assignment simota(const Tensor& boxes, const Tensor& obj, const Tensor& cls, const Anchors& anchors,
                         const Targets& targets, int64_t max_pairs = 0) {
  torch::NoGradGuard no_grad;
  if (max_pairs == 0) max_pairs = default_max_pairs(boxes.device());
  const int64_t batch = boxes.size(0), points = boxes.size(1);
  const auto index = torch::TensorOptions(torch::kLong).device(boxes.device());
  check(boxes.scalar_type() == torch::kFloat || boxes.scalar_type() == torch::kDouble,
        "SimOTA needs float32 or float64 boxes, got ", boxes.scalar_type());
  const Tensor counts = torch::tensor(targets.counts, torch::kLong).to(boxes.device(), /*non_blocking=*/true);
  std::vector<Tensor> matched, iou;
  // A chunk has as many images as max_pairs allows, and is padded to its own largest count.
  for (int64_t b = 0; b < batch;) {
    int64_t end = b, rows = 0;
    for (; end < batch; ++end) {
      const int64_t padded = std::max(rows, targets.counts[end]);
      if (end > b && (end + 1 - b) * padded * points > max_pairs) break;
      rows = padded;
    }
    if (rows == 0) {
      matched.push_back(torch::full({end - b, points}, -1, index));
      iou.push_back(torch::zeros({end - b, points}, boxes.options()));
    } else {
      auto part = simota_chunk(boxes.slice(0, b, end), obj.slice(0, b, end), cls.slice(0, b, end), anchors,
                               targets.boxes.slice(0, b, end).slice(1, 0, rows).to(boxes.scalar_type()),
                               targets.classes.slice(0, b, end).slice(1, 0, rows), counts.slice(0, b, end),
                               max_pairs);
      matched.push_back(part.matched);
      iou.push_back(part.iou);
    }
    b = end;
  }
  return {torch::cat(matched), torch::cat(iou)};
}

}  // namespace yolox
