// SPDX-License-Identifier: Apache-2.0
// NMS: of one image on the host, and of a whole batch on a GPU.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/torch.hpp"

namespace yolox {

using torch::Tensor;

// Runs greedy NMS per class on the CPU. boxes [N, 4] float32 (x1, y1, x2, y2), scores [N], classes [N].
// threshold: IoU threshold. Returns the indices of the kept boxes in descending order of score; equal scores
// keep their order.
inline Tensor nms(const Tensor& boxes, const Tensor& scores, const Tensor& classes, double threshold) {
  const Tensor order = scores.argsort(/*stable=*/true, 0, /*descending=*/true);
  const Tensor b = boxes.index_select(0, order).t().contiguous();  // [4, N]
  const Tensor c = classes.index_select(0, order).to(torch::kLong).contiguous();
  const int64_t n = order.numel();
  const float *x1 = b.data_ptr<float>(), *y1 = x1 + n, *x2 = y1 + n, *y2 = x2 + n;
  const int64_t* cls = c.data_ptr<int64_t>();
  struct Kept {
    float x1, y1, x2, y2, area;
  };
  std::unordered_map<int64_t, std::vector<Kept>> kept_of_class;
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < n; ++i) {
    const Kept box{x1[i], y1[i], x2[i], y2[i], (x2[i] - x1[i]) * (y2[i] - y1[i])};
    std::vector<Kept>& same = kept_of_class[cls[i]];
    const bool suppressed = std::any_of(same.begin(), same.end(), [&](const Kept& k) {
      const float w = std::max(0.f, std::min(k.x2, box.x2) - std::max(k.x1, box.x1));
      const float h = std::max(0.f, std::min(k.y2, box.y2) - std::max(k.y1, box.y1));
      const float both = w * h;
      return both / (k.area + box.area - both) > threshold;
    });
    if (suppressed) continue;
    same.push_back(box);
    kept.push_back(i);
  }
  return order.index_select(0, torch::tensor(kept, torch::kLong));
}

// NMS of several images at once, without reading a result on the host. rows: [B, K, 7] as in postprocess(),
// in descending order of score. valid: [B, K] bool, false for rows that do not count. Returns the rows that
// nms() keeps, [B, K] bool, and for which images this is certain, [B] bool.
//
// A box is kept if no kept box before it suppresses it. Each round applies this rule to all boxes at once.
// The first k boxes of a chain, in which each suppresses the next, are right after k rounds, so a round that
// changes nothing ends the search.
inline std::pair<Tensor, Tensor> batched_nms(const Tensor& rows, const Tensor& valid, double threshold) {
  constexpr int kRounds = 16;
  const auto pairs = [&](int64_t column) {  // [B, K, 1] and [B, 1, K]
    const Tensor values = rows.select(-1, column);
    return std::pair(values.unsqueeze(2), values.unsqueeze(1));
  };
  const auto [x1, other_x1] = pairs(0);
  const auto [y1, other_y1] = pairs(1);
  const auto [x2, other_x2] = pairs(2);
  const auto [y2, other_y2] = pairs(3);
  const auto [cls, other_cls] = pairs(6);
  const Tensor both = (torch::minimum(x2, other_x2) - torch::maximum(x1, other_x1)).clamp_min_(0) *
                      (torch::minimum(y2, other_y2) - torch::maximum(y1, other_y1)).clamp_min_(0);
  const Tensor either = (x2 - x1) * (y2 - y1) + (other_x2 - other_x1) * (other_y2 - other_y1) - both;
  // [B, K, K]: the first box comes before the second.
  const Tensor suppresses = (both / either > threshold).triu_(1).logical_and_(cls == other_cls);
  Tensor kept = valid, before;
  for (int round = 0; round < kRounds; ++round) {
    before = kept;
    kept = valid.logical_and((suppresses.logical_and(kept.unsqueeze(2))).any(1).logical_not_());
  }
  return {kept, (kept == before).all(1)};
}

// NMS on a GPU. rows: [B, A, 7] as in postprocess(). keep: [B, A] bool, the rows above the score threshold.
// Returns the detections of each image on the CPU. Waits once for all images, and once more for each image
// with more than 1024 rows to keep, or with a long chain of boxes that suppress each other; on_host() then
// runs for these images, on several threads.
inline std::vector<Tensor> nms_on_gpu(const Tensor& rows, const Tensor& keep, double threshold,
                                      const std::function<Tensor(const Tensor&, const Tensor&)>& on_host) {
  constexpr int64_t kMost = 1024, kImagesAtOnce = 16;  // [16, 1024, 1024] float32 is 67 MB
  const int64_t most = std::min(kMost, rows.size(1));
  std::vector<Tensor> parts;
  for (int64_t from = 0; from < rows.size(0); from += kImagesAtOnce) {
    const Tensor all = rows.slice(0, from, from + kImagesAtOnce).to(torch::kFloat);
    const Tensor wanted = keep.slice(0, from, from + kImagesAtOnce);
    const Tensor scores = (all.select(-1, 4) * all.select(-1, 5)).masked_fill(wanted.logical_not(), -1);
    const Tensor order = scores.argsort(/*stable=*/true, 1, /*descending=*/true).slice(1, 0, most);  // [B, K]
    const Tensor best = all.gather(1, order.unsqueeze(-1).expand({-1, -1, 7}));
    const auto [kept, certain] = batched_nms(best, wanted.gather(1, order), threshold);
    const Tensor solved = certain.logical_and(wanted.sum(1) <= most).unsqueeze(1);
    parts.push_back(
        torch::cat({best, torch::where(solved, kept.to(torch::kFloat), -1.0f).unsqueeze(-1)}, -1));
  }
  const Tensor found = torch::cat(parts).cpu();  // [B, K, 8]; the last column is 1: kept, 0: not, -1: unknown
  std::vector<Tensor> detections;
  std::vector<int64_t> unsolved;
  for (int64_t b = 0; b < rows.size(0); ++b) {
    const Tensor kept = found[b].select(1, 7);
    const bool solved = most == 0 || kept[0].item<float>() >= 0;
    if (!solved) unsolved.push_back(b);
    detections.push_back(solved ? found[b].index({kept > 0}).slice(1, 0, 7) : rows[b].cpu());
  }
  const auto is_unsolved = torch::tensor(unsolved, torch::kLong).to(keep.device());
  const Tensor kept = keep.index_select(0, is_unsolved).cpu();
  at::parallel_for(0, int64_t(unsolved.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) detections[unsolved[i]] = on_host(detections[unsolved[i]], kept[i]);
  });
  return detections;
}

}  // namespace yolox
