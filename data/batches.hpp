// SPDX-License-Identifier: Apache-2.0
// Training batches: an endless stream whose next batches are loaded, augmented and copied to the device in
// the background.
#pragma once
#include <torch/torch.h>

#include <optional>

#include "augment.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "data/loader.hpp"

namespace yolox {

// What the stream of batches depends on, besides the data set.
struct BatchSettings {
  AugmentConfig augment;
  bool augmented, check_boxes;  // augment the images; check the boxes before they are copied to the device
  int64_t seed;
  int workers;
  double repeat_rare;           // see repeat_factors()
  int64_t batch, ranks;         // total batch size; its shares differ by at most one image between ranks
  int64_t iters, mosaic_iters;  // of the run; the first mosaic_iters iterations have mosaic and MixUp
};

// Stream of training batches of one rank. Not thread-safe.
class Batches {
 public:
  // rank: rank of this process; the stream contains only the images of this rank in each batch. head, heads:
  // a multi-task model trains its heads in turn, each on its own data set. Step k of this head is step k *
  // heads + head of the run. `data` must outlive this object.
  Batches(const Dataset& data, const BatchSettings& settings, int rank, ImageSize size, torch::Device device,
          int64_t head = 0, int64_t heads = 1);
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Starts loading at a step, counted from 0. Discards the batches that were loaded in advance.
  void start(int64_t step);
  // Returns the next batch, on the device. Throws the exception of a worker thread that failed.
  Batch next();
  // Returns the seconds spent in next() since the last call of this function.
  double reset_waiting_time();

 private:
  Loader::Make items;
  const BatchSettings settings;
  const int64_t from, to;  // share of this rank in a batch
  const cv::Size size;
  const torch::Device device;
  std::optional<Loader> loader;
  std::optional<DeviceLoader> batches;
  double waited = 0;  // seconds
};

}  // namespace yolox
