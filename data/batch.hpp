// A batch: images, the boxes in them, and pixels as the network takes them.
//
// B images in a batch, H W height and width of the network's input, G objects in an image.
#pragma once
#include <torch/torch.h>
#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "images/boxes.hpp"

namespace yolox {

using torch::Tensor;

// Ground truth of a batch, padded to the largest number of objects in one image; only the first counts[b]
// rows of image b are used. Class ids must be below the model's number of classes (checked where labels are
// read).
struct Targets {
  Tensor boxes;    // [B, G, 4] float: cx, cy, w, h in pixels of the network's input
  Tensor classes;  // [B, G] int64
  std::vector<int64_t> counts;

  int64_t total() const {
    int64_t n = 0;
    for (const int64_t count : counts) n += count;
    return n;
  }
  Targets slice(int64_t from, int64_t to) const {  // of images
    return {
        boxes.slice(0, from, to), classes.slice(0, from, to), {counts.begin() + from, counts.begin() + to}};
  }
};

// What a batch holds beside the pixels of an image.
struct Item {
  std::vector<Box> boxes;  // in pixels of the image as it is in the batch
  int64_t index = -1;      // of the record; -1: an unreadable image stands here, all grey
  Scale scale{1, 1};       // from the pixels of the original to those of the image
};

struct Batch {
  Tensor images;    // [B, H, W, 3] uint8, BGR; pinned when asked for
  Targets targets;  // in pixels of the images
  std::vector<int64_t> indices;
  std::vector<Scale> scales;
  int64_t first;  // position of the first image
};

// Boxes of a batch as the loss takes them, padded to the largest count.
inline Targets make_targets(const std::vector<std::vector<Box>>& boxes) {
  size_t rows = 0;
  for (const auto& b : boxes) rows = std::max(rows, b.size());
  Targets t{torch::zeros({int64_t(boxes.size()), int64_t(rows), 4}),
            torch::zeros({int64_t(boxes.size()), int64_t(rows)}, torch::kLong),
            {}};
  float* box = t.boxes.data_ptr<float>();
  int64_t* cls = t.classes.data_ptr<int64_t>();
  for (size_t i = 0; i < boxes.size(); ++i) {
    t.counts.push_back(boxes[i].size());
    for (size_t g = 0; g < boxes[i].size(); ++g) {
      const Box& b = boxes[i][g];
      const double row[4] = {(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, b.x2 - b.x1, b.y2 - b.y1};
      std::copy(row, row + 4, box + 4 * (i * rows + g));
      cls[i * rows + g] = b.cls;
    }
  }
  return t;
}

// What a pixel goes through before the network: divided so that 255 becomes `range`, minus mean, over
// deviation, per channel in this order. Means and deviations as in yolox/data/data_augment.py (ValTransform).
struct PixelFormat {
  std::string order;  // "BGR", "RGB"
  double range;
  std::array<double, 3> mean, std;
};

inline PixelFormat pixel_format(bool legacy_preproc) {
  if (legacy_preproc) return {"RGB", 1, {0.485, 0.456, 0.406}, {0.229, 0.224, 0.225}};
  return {"BGR", 255, {0, 0, 0}, {1, 1, 1}};
}

// Images of a batch [B, H, W, 3] uint8 BGR -> what the network takes: [B, 3, H, W] float, in channels-last
// order. legacy: weights of YOLOX 0.1.0 want RGB in 0..1, less ImageNet's mean, by its deviation.
inline Tensor preprocess(const Tensor& images, bool legacy) {
  const Tensor x = images.permute({0, 3, 1, 2}).to(torch::kFloat);
  if (!legacy) return x;
  const auto format = pixel_format(true);
  const auto channel = [&](const std::array<double, 3>& v) {
    return torch::tensor({v[0], v[1], v[2]}, x.options()).view({1, 3, 1, 1});
  };
  return ((x.flip(1) / 255 - channel(format.mean)) / channel(format.std))
      .contiguous(torch::MemoryFormat::ChannelsLast);
}

}  // namespace yolox
