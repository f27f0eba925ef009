// SPDX-License-Identifier: Apache-2.0
// Folder data/: from annotation files to training batches. The readers of COCO, VOC and YOLO data sets, the
// checks of images and annotations, the image cache, packed data sets, the data loader and multi-scale. This
// file: a batch of images with its ground truth, and the conversion of pixels to the network's input.
//
// Shapes: B is the batch size, H and W are the height and width of the network's input, G is the largest
// number of objects in an image of the batch.
#pragma once
#include <torch/torch.h>
#include <array>
#include <cstdint>
#include <vector>

#include "images/boxes.hpp"

namespace yolox {

using torch::Tensor;

// Ground truth of a batch, padded to G rows an image. Only the first counts[b] rows of image b are valid.
// Class ids are in 0..classes-1; make_dataset() checks them.
struct Targets {
  Tensor boxes;    // [B, G, 4] float: cx, cy, w, h in pixels of the network's input
  Tensor classes;  // [B, G] int64
  // Number of objects of each image. In a step that is recorded as a CUDA graph, an upper bound, because the
  // graph must fit later batches, too.
  std::vector<int64_t> counts;
  Tensor device_counts = {};  // [B] int64, the exact counts on the device of `boxes`; undefined: `counts`
  Tensor ignored = {};        // [B, I, 4] regions in the form of `boxes`, padded with zeros; undefined: none

  // Sum of `counts`.
  int64_t total() const;
  // Returns the exact number of objects of each image, [B] int64.
  Tensor counts_on(torch::Device device) const;
  Targets slice(int64_t from, int64_t to) const;
};

// Everything about one image of a batch except its pixels.
struct Item {
  std::vector<Box> boxes;  // in pixels of the image of the batch; also of the class kIgnoredRegion
  int64_t index = -1;      // index of the record in the data set; -1 if the image is unreadable and grey
  Scale scale{1, 1};       // from pixels of the original image to pixels of the image of the batch
};

struct Dataset;

struct Batch {
  Tensor images;                 // [B, H, W, 3] uint8, BGR; in pinned memory if the loader has `pinned`
  Targets targets;               // in pixels of the images
  std::vector<int64_t> indices;  // [B] Item::index
  std::vector<Scale> scales;     // [B] Item::scale
  // In a batch for training: the data set of `indices`, and the mean number of images of the ranks.
  const Dataset* data = nullptr;
  double images_per_rank = 0;
};

// Converts the boxes of each image to the form that the loss uses, padded to the largest count. Boxes of the
// class kIgnoredRegion become `ignored`.
Targets make_targets(const std::vector<std::vector<Box>>& boxes);

// Normalisation of pixels before the network: (pixel / 255 * range - mean) / std, with the channels in
// `order`. Means and standard deviations are those of yolox/data/data_augment.py (ValTransform).
struct PixelFormat {
  std::string order;  // "BGR" or "RGB"
  double range;
  std::array<double, 3> mean, std;  // by channel, in `order`
};

PixelFormat pixel_format(bool legacy_preproc);

// Converts the images of a batch, [B, H, W, 3] uint8 BGR, to the network's input: [B, 3, H, W] float in
// channels-last memory format. legacy: the format of YOLOX 0.1.0 (RGB in 0..1, normalised with the mean and
// standard deviation of ImageNet); otherwise BGR in 0..255.
Tensor preprocess(const Tensor& images, bool legacy);

}  // namespace yolox
