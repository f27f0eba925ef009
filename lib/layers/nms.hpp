// SPDX-License-Identifier: Apache-2.0
// NMS of one image.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_map>
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

}  // namespace yolox
