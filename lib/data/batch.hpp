// SPDX-License-Identifier: Apache-2.0
// Folder data/: from annotation files to training batches. The readers of COCO, VOC and YOLO data sets, the
// checks of images and annotations, the image cache, packed data sets, and the data loader. This file: a
// batch of images with its ground truth, the conversion of pixels to the network's input, and multi-scale.
//
// Shapes: B is the batch size, H and W are the height and width of the network's input, G is the largest
// number of objects in an image of the batch.
#pragma once
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "base/random.hpp"
#include "base/torch.hpp"
#include "images/image.hpp"

namespace yolox {

using torch::Tensor;

// Ground truth of a batch, padded to G rows an image. Only the first counts[b] rows of image b are valid.
// Class ids are in 0..classes-1; make_dataset() checks them.
struct Targets {
  Tensor boxes;    // [B, G, 4] float: cx, cy, w, h in pixels of the network's input
  Tensor classes;  // [B, G] int64
  // Number of objects of each image. In a step that is recorded as a CUDA graph, upper bounds of the numbers
  // in descending order (sorted_bounds), because the graph must fit later batches, too.
  std::vector<int64_t> counts;
  Tensor device_counts = {};  // [B] int64, the exact counts on the device of `boxes`; undefined: `counts`
  Tensor ignored = {};        // [B, I, 4] regions in the form of `boxes`, padded with zeros; undefined: none
  bool sorted_bounds = false;

  int64_t total() const { return std::reduce(counts.begin(), counts.end()); }
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
  Tensor images;                  // [B, H, W, 3] uint8, BGR
  Targets targets;                // in pixels of the images
  std::vector<Item> items = {};   // [B]
  const Dataset* data = nullptr;  // of the items
};

// Converts the boxes of each image to the form that the loss uses, padded to the largest count. Boxes of the
// class kIgnoredRegion become `ignored`.
Targets make_targets(const std::vector<Item>& items);

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

// ---- input of a step: pixels as floats, and multi-scale training, a new random input size every ten steps

// The input size of each step. The size depends on (seed, step / 10) only, so that all ranks use the same
// size, also after a resume. A run uses about a dozen sizes. Each new size costs time once, because cuDNN
// selects algorithms and the allocator caches memory per size.
struct MultiScale {
  ImageSize base{0, 0};  // size of the first ten steps, pixels
  // Range of the height around `base`, in units of 32 pixels; 0, 0: fixed size.
  int max_decrease = 0, max_increase = 0;
  int64_t seed = 0;
  int smallest = 1;  // minimum height in units of 32 pixels

  // Returns the size of a step. Official YOLOX uses 5 for `max_decrease` and `max_increase`; nano and tiny
  // use 3 and 7.
  ImageSize size_at(int64_t step) const {
    if (step < 10 || max_decrease + max_increase == 0) return base;
    Rng rng(seed, ~uint64_t{0}, step / 10);
    const int units = base.height / 32;
    return of(int(rng.randint(std::max(smallest, units - max_decrease), units + max_increase)));
  }
  ImageSize largest() const { return of(base.height / 32 + max_increase); }

 private:
  ImageSize of(int units) const {
    return {32 * units, 32 * std::max(1, int(double(units) * base.width / base.height))};
  }
};

// Resizes the images ([B, 3, H, W] float) and the boxes of a batch to another input size.
inline void resize_batch(Tensor& images, Targets& targets, ImageSize size) {
  const int64_t h = images.size(2), w = images.size(3);
  if (h == size.height && w == size.width) return;
  images = torch::upsample_bilinear2d(images, std::vector<int64_t>{size.height, size.width},
                                      /*align_corners=*/false);
  const double sx = double(size.width) / w, sy = double(size.height) / h;
  for (Tensor* b : {&targets.boxes, &targets.ignored})
    if (b->defined())
      *b = torch::stack(
          {b->select(2, 0) * sx, b->select(2, 1) * sy, b->select(2, 2) * sx, b->select(2, 3) * sy}, 2);
}

// Network input of one batch.
struct Input {
  Tensor images;    // [B, 3, H, W] float
  Targets targets;  // in pixels of `images`
};
// Returns the network input of a batch, resized to `size`. legacy: pixel format of YOLOX 0.1.0, see
// preprocess(). type: dtype of the weights.
inline Input make_network_input(const Batch& batch, ImageSize size, bool legacy, at::ScalarType type) {
  RECORD_USER_SCOPE("copy");
  Input input{preprocess(batch.images, legacy).to(type), batch.targets};
  resize_batch(input.images, input.targets, size);
  return input;
}

}  // namespace yolox
