// Training batches: an endless stream that is loaded, augmented and copied to the device ahead of its use.
#pragma once
#include <torch/torch.h>

#include <memory>

#include "config.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"

namespace yolox {

class Batches {
 public:
  // rank: of this process, which gets its share of each batch. head, heads: a model of several heads trains
  // them in turn, each on a data set of its own, so that step k of this head is step k * heads + head of the
  // run. `data` must outlive this object.
  Batches(const Dataset& data, const Config& config, const Plan& plan, int rank, ImageSize size,
          torch::Device device, int64_t head = 0, int64_t heads = 1);
  ~Batches();
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Starts loading at a step, counted from 0. Batches that are on their way are dropped.
  void start(int64_t step);
  // Returns the next batch, on the device.
  Batch next();
  // Returns the seconds that next() has waited since the last call.
  double take_waiting_time();

 private:
  struct Stream;
  std::unique_ptr<Stream> stream;
};

}  // namespace yolox
