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
// single objects and without device synchronisation. Pairs are formed in chunks of images with similar
// numbers of objects. Memory is bounded, because a chunk has at most max_pairs. The chunks do not change the
// result.
//
// B: images. A: anchor points. K: candidate slots per image. C: classes. n: images of a chunk, rows: objects
// of each (padded), g: objects of a part of the rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "base/device.hpp"
#include "base/torch.hpp"
#include "data/batch.hpp"
#include "yolox.hpp"

namespace yolox {

constexpr int64_t kTopK = 10;          // maximum number of anchor points per object
constexpr double kCentreRadius = 1.5;  // half side of the square centre region, in strides

// Returns the maximum number of pairs (object, anchor point) in one chunk. A pair takes about 80 bytes. The
// pairs take 1.3 GB on the CPU, and 8 % of the memory of a GPU, because larger chunks need fewer kernels.
inline int64_t default_max_pairs(torch::Device device) {
  constexpr int64_t on_cpu = int64_t{1} << 24;
  if (device.is_cpu()) return on_cpu;
  static const auto on_gpu = int64_t(gpu_memory(device) / 1024);  // a process uses a single GPU
  return std::max(on_gpu, on_cpu / 4);
}

// Returns the maximum number of candidates of an image with `rows` objects: on each level, a centre region
// covers at most side x side cells.
inline int64_t max_candidates(int64_t rows, int64_t points, int64_t levels) {
  const auto side = int64_t(std::ceil(2 * kCentreRadius));
  return std::min(points, levels * side * side * rows);
}

// Returns width x height of sizes [..., 2].
inline Tensor area(const Tensor& size) {
  const auto sides = size.unbind(-1);
  return sides[0] * sides[1];
}

// Returns the IoU of boxes (cx, cy, w, h; in the last dimension), elementwise with broadcasting. eps is added
// to the union. Without eps, two boxes of zero area have IoU NaN.
inline Tensor box_iou(const Tensor& a, const Tensor& b, double eps = 0) {
  // The gradient of split() and unbind() is one operation, that of slice() and select() two for each part.
  const auto parts_a = a.split(2, -1), parts_b = b.split(2, -1);
  const auto edge = [](const std::vector<Tensor>& box, double half) { return box[0].add(box[1], half); };
  const Tensor low = torch::max(edge(parts_a, -0.5), edge(parts_b, -0.5));
  const Tensor high = torch::min(edge(parts_a, 0.5), edge(parts_b, 0.5));
  const Tensor both = area((high - low).clamp_min(0));
  const Tensor either = area(parts_a[1]) + area(parts_b[1]) - both;
  return both / (eps > 0 ? either + eps : either);
}

// Returns true where a point lies inside the centre region of an object (border excluded). point [2, ...] and
// gt [2, ...]: x and y of point and object centre; radius: half side of the region; in pixels. All broadcast.
// The arithmetic follows the order of the official code, so that points on the border are classified equally.
inline Tensor in_centre(const Tensor& point, const Tensor& gt, const Tensor& radius) {
  const auto within = (point > gt - radius).logical_and_(point < gt + radius).unbind(0);
  return within[0].logical_and(within[1]);
}

// Returns the anchor points that lie in the centre region of at least one object, packed into slots in the
// order of the anchor points: [n, K]; A marks an unused slot. centre [2, A] and radius [A] of the points in
// pixels. gt_centre: [2, n, rows, 1]. valid: [n, rows].
inline Tensor candidate_slots(const Tensor& centre, const Tensor& radius, const Tensor& gt_centre,
                              const Tensor& valid, int64_t levels, int64_t max_pairs) {
  const int64_t n = valid.size(0), rows = valid.size(1), points = radius.size(0);
  const auto index = valid.options().dtype(torch::kLong);
  Tensor candidate = torch::zeros({n, points}, valid.options());
  const int64_t step = std::max<int64_t>(1, max_pairs / (n * points));
  for (int64_t r = 0; r < rows; r += step) {
    const int64_t end = std::min(rows, r + step);
    candidate.logical_or_(in_centre(centre.view({2, 1, 1, points}), gt_centre.slice(2, r, end), radius)
                              .logical_and_(valid.slice(1, r, end).unsqueeze(2))
                              .any(1));
  }
  const int64_t slots = max_candidates(rows, points, levels);
  const Tensor place = torch::where(candidate, candidate.cumsum(1) - 1, slots).clamp_max_(slots);
  return torch::full({n, slots + 1}, points, index)
      .scatter_(1, place, torch::arange(points, index).expand({n, points}))
      .slice(1, 0, slots);
}

// Runs SimOTA on n images. rows: largest number of their objects, at least 1. boxes [n, A, 4] decoded; obj
// [n, A] and cls [n, A, C] logits; gt [n, rows, 4]; gt_class [n, rows]; counts [n]: number of objects.
// Returns [n, A].
inline Tensor simota_chunk(const Tensor& boxes, const Tensor& obj, const Tensor& cls, const Anchors& anchors,
                           const Tensor& gt, const Tensor& gt_class, const Tensor& counts,
                           int64_t max_pairs) {
  const int64_t n = boxes.size(0), points = boxes.size(1), rows = gt.size(1);
  const auto index = counts.options();
  const Tensor radius = anchors.stride * kCentreRadius;
  const Tensor valid = torch::arange(rows, index).unsqueeze(0) < counts.unsqueeze(1);  // [n, rows]
  const Tensor gt_centre = gt.slice(2, 0, 2).permute({2, 0, 1}).unsqueeze(3);          // [2, n, rows, 1]

  const Tensor slot =
      candidate_slots(anchors.centre, radius, gt_centre, valid, anchors.levels, max_pairs);  // [n, K]
  const int64_t slots = slot.size(1);
  const Tensor used = slot < points, point = slot.clamp_max(points - 1);  // [n, K]

  const auto at_slots = [&](const Tensor& t) {  // [n, A, D] -> [n, K, D]
    return t.gather(1, point.unsqueeze(2).expand({n, slots, t.size(2)}));
  };
  const Tensor slot_box = at_slots(boxes);
  const Tensor slot_centre = anchors.centre.index({torch::indexing::Slice(), point}).unsqueeze(2);
  const Tensor slot_radius = radius.index({point}).unsqueeze(1);  // [n, 1, K]; slot_centre: [2, n, 1, K]
  // The class cost of a pair is the binary cross entropy between sqrt(class score x objectness) and the
  // one-hot class. The sum over classes is computed once per candidate with all targets 0. Each pair then
  // replaces the term of the class of its object.
  const Tensor p = (at_slots(cls).to(torch::kFloat).sigmoid() *
                    obj.gather(1, point).to(torch::kFloat).sigmoid().unsqueeze(2))
                       .sqrt();
  const Tensor absent = (-p).log1p().clamp_min(-100), present = p.log().clamp_min(-100);  // -cost, [n, K, C]
  const Tensor all_absent = absent.sum(-1).unsqueeze(1);                                  // [n, 1, K]
  const Tensor exchange = (absent - present).transpose(1, 2);                             // [n, C, K]

  // Loops over chunks of objects. Keeps for each candidate [n, K] the lowest cost with its object, and how
  // many objects selected the candidate, with the last of them.
  const float infinity = std::numeric_limits<float>::infinity();
  Tensor best_cost, best_gt, n_matches, last_match;
  const int64_t row_step = std::max<int64_t>(1, max_pairs / (n * slots));
  for (int64_t r = 0; r < rows; r += row_step) {
    const int64_t end = std::min(rows, r + row_step);
    const Tensor row_id = torch::arange(r, end, index).view({1, -1, 1});
    const Tensor no_pair =
        valid.slice(1, r, end).unsqueeze(2).logical_and(used.unsqueeze(1)).logical_not_();  // [n, g, K]
    const Tensor iou = box_iou(gt.slice(1, r, end).unsqueeze(2), slot_box.unsqueeze(1))
                           .nan_to_num_()
                           .masked_fill_(no_pair, 0);
    const Tensor centred = in_centre(slot_centre, gt_centre.slice(2, r, end), slot_radius);
    const Tensor of_class = gt_class.slice(1, r, end).unsqueeze(2).expand({n, end - r, slots});
    Tensor cost = (exchange.gather(1, of_class) - all_absent).sub_((iou.to(torch::kFloat) + 1e-8).log_(), 3);
    // Adding the penalty of 1e6 would round away the differences between costs. Instead, the costs inside of
    // the centre region become negative, in the same order.
    cost = torch::where(centred, (-1 - cost).reciprocal_(), cost);
    cost.nan_to_num_(infinity, infinity).masked_fill_(no_pair, infinity);

    const int64_t k = std::min(kTopK, slots);
    const Tensor dynamic_k = std::get<0>(iou.topk(k, 2)).sum(2).to(torch::kLong).clamp_min_(1);  // [n, g]
    const auto [topk_cost, topk_slot] = cost.topk(k, 2, /*largest=*/false);                      // [n, g, k]
    const Tensor selected =
        (torch::arange(k, index) < dynamic_k.unsqueeze(2)).logical_and_(topk_cost < infinity);
    const Tensor matching = torch::zeros_like(no_pair).scatter_(2, topk_slot, selected);  // [n, g, K]

    const Tensor matches_here = matching.sum(1), last_match_here = torch::where(matching, row_id, -1).amax(1);
    const auto [cost_here, best_gt_here] = cost.min(1);
    if (r == 0) {
      n_matches = matches_here;
      last_match = last_match_here;
      best_gt = best_gt_here;
      best_cost = cost_here;
      continue;
    }
    n_matches += matches_here;
    last_match = torch::max(last_match, last_match_here);
    const Tensor better = cost_here < best_cost;
    best_gt = torch::where(better, best_gt_here + r, best_gt);
    best_cost = torch::where(better, cost_here, best_cost);
  }
  const Tensor matched = torch::where(n_matches > 1, best_gt, last_match);  // [n, K]
  return torch::full({n, points + 1}, -1, index).scatter_(1, slot, matched).slice(1, 0, points);
}

// Runs SimOTA on a batch, without autograd. Returns [B, A] int64: the row of the matched object in Targets;
// -1: background. boxes: decoded predictions [B, A, 4], float32 or float64; otherwise throws
// std::runtime_error. obj [B, A] and cls [B, A, C]: logits. Call it outside of autocast. An image without
// candidates (no object, or every object centre far from all anchor points) gets only background. max_pairs:
// size of a chunk; 0: default_max_pairs().
inline Tensor simota(const Tensor& boxes, const Tensor& obj, const Tensor& cls, const Anchors& anchors,
                     const Targets& targets, int64_t max_pairs = 0) {
  torch::NoGradGuard no_grad;
  if (max_pairs == 0) max_pairs = default_max_pairs(boxes.device());
  const int64_t batch = boxes.size(0), points = boxes.size(1);
  const auto index = torch::TensorOptions(torch::kLong).device(boxes.device());
  check(boxes.scalar_type() == torch::kFloat || boxes.scalar_type() == torch::kDouble,
        "SimOTA needs float32 or float64 boxes, got ", boxes.scalar_type());
  const Tensor counts = targets.counts_on(boxes.device());
  // A chunk is padded to its largest count. It ends where its padding would cost more than another chunk.
  const int64_t most_padding = boxes.is_cpu() ? int64_t{1} << 14 : int64_t{1} << 22;
  const auto pairs = [&](int64_t rows) { return rows * max_candidates(rows, points, anchors.levels); };
  std::vector<int64_t> sorted = targets.counts, ends;
  std::ranges::sort(sorted, std::greater());
  for (int64_t end = 0; end < batch; ends.push_back(end)) {
    const int64_t begin = end, rows = sorted[begin];
    for (int64_t padding = 0; ++end < batch;) {
      padding += pairs(rows) - pairs(sorted[end]);
      if (targets.sorted_bounds && sorted[end] < rows) break;  // the few crowded images of a CUDA graph
      if (padding > most_padding || (end + 1 - begin) * rows * points > max_pairs) break;
    }
  }
  Tensor order;  // undefined: a single chunk
  if (ends.size() > 1) order = counts.argsort(/*stable=*/true, 0, /*descending=*/true);
  std::vector<Tensor> matched;
  int64_t begin = 0;
  for (const int64_t end : ends) {
    const auto images = [&](const Tensor& t) {
      return order.defined() ? t.index_select(0, order.slice(0, begin, end)) : t;
    };
    const int64_t rows = sorted[begin];
    if (rows == 0) {
      matched.push_back(torch::full({end - begin, points}, -1, index));
    } else {
      matched.push_back(simota_chunk(images(boxes), images(obj), images(cls), anchors,
                                     images(targets.boxes.slice(1, 0, rows)).to(boxes.scalar_type()),
                                     images(targets.classes.slice(1, 0, rows)), images(counts), max_pairs));
    }
    begin = end;
  }
  if (!order.defined()) return matched[0];
  return torch::empty({batch, points}, index).index_copy_(0, order, torch::cat(matched));
}

}  // namespace yolox
