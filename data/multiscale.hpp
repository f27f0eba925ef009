// Multi-scale training: another input size every ten steps.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/flags.hpp"
#include "base/random.hpp"
#include "data/batch.hpp"

namespace yolox {

// The size of each step, drawn from (seed, step / 10) alone: it is the same on every rank and after a resume.
// There are a dozen of them, so that what is chosen for each size (cuDNN's algorithms, cached memory) is
// chosen a dozen times in a run.
struct MultiScale {
  ImageSize base{0, 0};    // of the first ten steps
  int less = 0, more = 0;  // how far the height goes from there, in units of 32 pixels; both 0: base always
  int64_t seed = 0;
  int smallest = 1;  // height in units of 32 pixels

  // Official YOLOX draws from five less to five more, for nano and tiny from three less to seven more.
  ImageSize at(int64_t step) const {
    if (step < 10 || less + more == 0) return base;
    Rng rng(seed, ~uint64_t{0}, step / 10);
    const int units = base.height / 32;
    return of(int(rng.randint(std::max(smallest, units - less), units + more)));
  }
  ImageSize largest() const { return of(base.height / 32 + more); }

 private:
  ImageSize of(int units) const {
    return {32 * units, 32 * std::max(1, int(double(units) * base.width / base.height))};
  }
};

// Images and boxes of a batch to another input size.
inline void resize_batch(Tensor& images, Targets& targets, ImageSize size) {
  const int64_t h = images.size(2), w = images.size(3);
  if (h == size.height && w == size.width) return;
  images = torch::upsample_bilinear2d(images, std::vector<int64_t>{size.height, size.width},
                                      /*align_corners=*/false);
  const double sx = double(size.width) / w, sy = double(size.height) / h;
  const Tensor& b = targets.boxes;
  targets.boxes =
      torch::stack({b.select(2, 0) * sx, b.select(2, 1) * sy, b.select(2, 2) * sx, b.select(2, 3) * sy}, 2);
}

}  // namespace yolox
