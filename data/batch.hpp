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

  int64_t total() const;
  Targets slice(int64_t from, int64_t to) const;
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
Targets make_targets(const std::vector<std::vector<Box>>& boxes);

// What a pixel goes through before the network: divided so that 255 becomes `range`, minus mean, over
// deviation, per channel in this order. Means and deviations as in yolox/data/data_augment.py (ValTransform).
struct PixelFormat {
  std::string order;  // "BGR", "RGB"
  double range;
  std::array<double, 3> mean, std;
};

PixelFormat pixel_format(bool legacy_preproc);

// Images of a batch [B, H, W, 3] uint8 BGR -> what the network takes: [B, 3, H, W] float, in channels-last
// order. legacy: weights of YOLOX 0.1.0 want RGB in 0..1, less ImageNet's mean, by its deviation.
Tensor preprocess(const Tensor& images, bool legacy);

}  // namespace yolox
