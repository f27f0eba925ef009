// SPDX-License-Identifier: Apache-2.0
// Input of the network in a step: pixels as floats, and multi-scale training, a new random input size every
// ten steps.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/random.hpp"
#include "data/batch.hpp"
#include "images/boxes.hpp"

namespace yolox {

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
  int count() const { return max_decrease + max_increase + 1; }  // of sizes, at most
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
  Tensor images;               // [B, 3, H, W] float
  Targets targets;             // in pixels of `images`
  double images_per_rank = 0;  // see Batch
};
// Returns the network input of a batch, resized to `size`. legacy: pixel format of YOLOX 0.1.0, see
// preprocess(). type: dtype of the weights.
inline Input make_network_input(const Batch& batch, ImageSize size, bool legacy, at::ScalarType type) {
  RECORD_USER_SCOPE("copy");
  Input input{preprocess(batch.images, legacy).to(type), batch.targets, batch.images_per_rank};
  resize_batch(input.images, input.targets, size);
  return input;
}

}  // namespace yolox
