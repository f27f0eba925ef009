// SPDX-License-Identifier: Apache-2.0
// The items that the data loader produces, for training and for evaluation. Training batches: an endless
// stream whose next batches are loaded, augmented and copied to the device in the background.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "base/error.hpp"
#include "base/program.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "data/loader.hpp"

namespace yolox {

// Returns the permutation of n images for one epoch (from 0). Depends only on (seed, epoch), not on
// the number of threads or ranks.
inline std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t epoch) {
  Rng rng(seed, epoch, ~uint64_t{0});
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  shuffle(order, rng);
  return order;
}

// Returns the n images of one epoch. repeats: factor of each image, see repeat_factors(); image i is in the
// epoch in proportion to its factor, and images with a factor of 1 may be left out. Empty: permutation().
inline std::vector<int64_t> epoch_order(int64_t n, uint64_t seed, uint64_t epoch,
                                        const std::vector<double>& repeats) {
  if (repeats.empty()) return permutation(n, seed, epoch);
  Rng rng(seed, epoch, ~uint64_t{1});
  std::vector<int64_t> all;
  for (int64_t i = 0; i < n; ++i) {
    const double whole = std::floor(repeats[i]);
    all.insert(all.end(), int64_t(whole) + rng.bernoulli(repeats[i] - whole), i);
  }
  shuffle(all, rng);
  all.resize(n);
  return all;
}

// Returns a function that makes the training items: an endless stream, in which each epoch is a new
// permutation, or with `repeats` an epoch_order(). A batch may span two epochs, so that every batch is full.
// augmented: apply augmentation; otherwise letterbox only. mosaic_at(position): true if mosaic and MixUp are
// on at this position of the stream. An unreadable image is added to data.problems and replaced by the next
// image. The function may be called from several threads.
inline Loader::Make training_items(const Dataset& data, uint64_t seed, const AugmentConfig& augment,
                                   bool augmented, std::function<bool(int64_t)> mosaic_at,
                                   std::vector<double> repeats = {}) {
  struct Permutations {  // orders of the two latest epochs, because a batch may span both
    std::mutex mutex;
    std::map<int64_t, std::vector<int64_t>> of_epoch;
  };
  const auto orders = std::make_shared<Permutations>();
  const int64_t n = data.records.size();
  return [=, &data](int64_t position, Image& image) {
    const int64_t epoch = position / n;
    int64_t index;
    {
      std::lock_guard lock(orders->mutex);
      auto& order = orders->of_epoch[epoch];
      if (order.empty()) order = epoch_order(n, seed, epoch, repeats);
      index = order[position % n];
      while (orders->of_epoch.size() > 2) orders->of_epoch.erase(orders->of_epoch.begin());
    }
    SampleDraw draw{size_t(index), {}, {}, {}};
    if (augmented) {
      Rng rng(seed, epoch, repeats.empty() ? index : n + position % n);  // repeats differ
      draw = draw_sample(rng, augment, n, index, image.size(), mosaic_at(position));
    }
    Sample sample{image, {}};
    try {
      compose(data, draw, sample);
    } catch (const cv::Exception& e) {
      fail(data.records[index].file, ", or an image beside it in a mosaic: ", e.what());
    } catch (const std::bad_alloc&) {
      fail(data.records[index].file, ", or an image beside it in a mosaic: out of memory");
    }
    check(sample.image.data == image.data,
          "compose() must draw into sample.image, not replace it; copy the pixels: "
          "result.copyTo(sample.image)");
    return Item{std::move(sample.boxes), index};
  };
}

// Returns a function that makes the evaluation items: the images in order of the records, letterboxed, with
// their boxes. An unreadable image is added to data.problems and gets index -1. In a strict data set, the
// function throws ImageError instead.
inline Loader::Make evaluation_items(const Dataset& data) {
  return [&data](int64_t position, Image& image) {
    try {
      const auto boxed = letterbox(read_image(data, position), image.size());
      boxed.image.copyTo(image);
      Item item{data.boxes(position), position, boxed.scale};
      item.boxes.insert(item.boxes.end(), data.ignored(position).begin(), data.ignored(position).end());
      for (Box& b : item.boxes)
        b = {b.x1 * boxed.scale.x, b.y1 * boxed.scale.y, b.x2 * boxed.scale.x, b.y2 * boxed.scale.y, b.cls};
      return item;
    } catch (const ImageError& e) {
      if (data.strict) throw;
      data.problems->add("image cannot be used", e.what());
      image.setTo(cv::Scalar::all(border_grey));
      return Item{};
    }
  };
}

// Wraps `make` and checks each box of its items (--debug). The wrapper throws std::runtime_error, with the
// name of the image, if a box lies outside of the image, has an unknown class or no area.
inline Loader::Make checked_items(Loader::Make make, const Dataset& data) {
  return [make = std::move(make), &data](int64_t position, Image& image) {
    Item item = make(position, image);
    const double rounding = 1e-6;
    for (const Box& b : item.boxes)
      check(b.cls >= kIgnoredRegion && b.cls < int(data.classes.size()) && b.x1 >= -rounding &&
                b.y1 >= -rounding && b.x2 <= image.cols + rounding && b.y2 <= image.rows + rounding &&
                has_area(b),
            data.name_of(item.index), ", augmented: box ", b.x1, " ", b.y1, " ", b.x2, " ", b.y2,
            " of class ", b.cls, " is invalid: the image is ", image.cols, "x", image.rows,
            ", the data set has ", data.classes.size(), " classes");
    return item;
  };
}

// Returns the image names of a batch, for messages.
inline std::string image_names(const Batch& batch, const Dataset& data) {
  std::vector<std::string> names;
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  return listed(names, 64);
}

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
          int64_t head = 0, int64_t heads = 1)
      : settings(settings),
        from(settings.batch * rank / settings.ranks),
        to(settings.batch * (rank + 1) / settings.ranks),
        size(size.width, size.height),
        device(device) {
    const auto mosaic_at = [=, batch = settings.batch, until = settings.mosaic_iters](int64_t position) {
      return position / batch * heads + head < until;
    };
    items = training_items(data, settings.seed + head, settings.augment, settings.augmented, mosaic_at,
                           repeat_factors(data, settings.repeat_rare));
    if (settings.check_boxes) items = checked_items(items, data);
  }
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;

  // Starts loading at a step, counted from 0. Discards the batches that were loaded in advance.
  void start(int64_t step) {
    batches.reset();
    loader.reset();
    loader.emplace(items, step * settings.batch + from, settings.iters * settings.batch, int(to - from), size,
                   settings.workers, device.is_cuda(), /*stride=*/settings.batch);
    batches.emplace(*loader, device);
  }

  // Returns the next batch, on the device. Throws the exception of a worker thread that failed.
  Batch next() {
    RECORD_USER_SCOPE("data");
    const double start = now();
    Batch batch = batches->next();
    waited += now() - start;
    return batch;
  }

  // Returns the seconds spent in next() since the last call of this function.
  double reset_waiting_time() { return std::exchange(waited, 0.0); }

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
