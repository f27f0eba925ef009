// SPDX-License-Identifier: Apache-2.0
// Random input of a step, for the benchmarks.
#pragma once

#include <vector>

#include "base/torch.hpp"
#include "data/batch.hpp"

namespace yolox {

// Returns images of size x size pixels, each with this number of boxes of 80 classes.
inline Batch random_batch(int64_t images, int64_t size, int64_t objects, torch::Device device) {
  const torch::Tensor r = torch::rand({images, objects, 4});
  return {
      torch::randint(256, {images, size, size, 3}, torch::kByte).to(device),
      {torch::cat({r.slice(2, 0, 2) * size, 10 + r.slice(2, 2, 4) * size / 3}, 2).to(device),
       torch::randint(80, {images, objects}, torch::kLong).to(device), std::vector<int64_t>(images, objects),
       torch::full({images}, objects, torch::TensorOptions(torch::kLong).device(device))},
      std::vector<Item>(images)};
}
inline Input random_input(int64_t images, int64_t size, int64_t objects, torch::Device device) {
  const Batch batch = random_batch(images, size, objects, device);
  return make_network_input(batch, {int(size), int(size)}, /*legacy=*/false, torch::kFloat);
}

}  // namespace yolox
