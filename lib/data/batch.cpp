// SPDX-License-Identifier: Apache-2.0
#include "data/batch.hpp"

#include <algorithm>

namespace yolox {

Tensor Targets::counts_on(torch::Device device) const {
  return device_counts.defined() ? device_counts : torch::tensor(counts, torch::kLong).to(device);
}

Targets Targets::slice(int64_t from, int64_t to) const {
  if (from == 0 && to == int64_t(counts.size())) return *this;
  std::vector<int64_t> here(counts.begin() + from, counts.begin() + to);
  if (sorted_bounds) here.assign(here.size(), std::ranges::max(counts));  // the bound of any image
  return {boxes.slice(0, from, to), classes.slice(0, from, to), here,
          device_counts.defined() ? device_counts.slice(0, from, to) : Tensor(),
          ignored.defined() ? ignored.slice(0, from, to) : Tensor()};
}

Targets make_targets(const std::vector<Item>& items) {
  const int64_t n = int64_t(items.size());
  int64_t rows = 0, ignored_rows = 0;
  Targets t;
  for (const Item& item : items) {
    const int64_t ignored = std::ranges::count(item.boxes, kIgnoredRegion, &Box::cls);
    t.counts.push_back(int64_t(item.boxes.size()) - ignored);
    rows = std::max(rows, t.counts.back());
    ignored_rows = std::max(ignored_rows, ignored);
  }
  t.boxes = torch::zeros({n, rows, 4});
  t.classes = torch::zeros({n, rows}, torch::kLong);
  if (ignored_rows > 0) t.ignored = torch::zeros({n, ignored_rows, 4});
  for (int64_t i = 0; i < n; ++i) {
    int64_t g = 0, k = 0;
    for (const Box& b : items[i].boxes) {
      const bool is_ignored = b.cls == kIgnoredRegion;
      const double row[4] = {(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, b.x2 - b.x1, b.y2 - b.y1};
      float* to = is_ignored ? t.ignored.data_ptr<float>() + 4 * (i * ignored_rows + k++)
                             : t.boxes.data_ptr<float>() + 4 * (i * rows + g);
      std::copy(row, row + 4, to);
      if (!is_ignored) t.classes.data_ptr<int64_t>()[i * rows + g++] = b.cls;
    }
  }
  t.device_counts = torch::tensor(t.counts, torch::kLong);
  return t;
}

PixelFormat pixel_format(bool legacy_preproc) {
  if (legacy_preproc) return {"RGB", 1, {0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}};
  return {"BGR", 255, {0, 0, 0}, {1, 1, 1}};
}

Tensor preprocess(const Tensor& images, bool legacy) {
  const Tensor x = images.permute({0, 3, 1, 2}).to(torch::kFloat);
  if (!legacy) return x;
  const auto format = pixel_format(true);
  std::vector<Tensor> channels;
  for (size_t c = 0; c < 3; ++c) {
    // On the device, because a copy from the host would wait for it.
    const Tensor std = torch::full({}, format.std[c], x.options());
    channels.push_back((x.select(1, 2 - int64_t(c)) / 255 - format.mean[c]) / std);
  }
  return torch::stack(channels, 1).contiguous(torch::MemoryFormat::ChannelsLast);
}

}  // namespace yolox
