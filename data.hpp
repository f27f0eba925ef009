// SPDX-License-Identifier: Apache-2.0
// The items that the data loader produces, for training and for evaluation. Batches: the stream of training
// batches, whose next ones are loaded, augmented and copied to the device in the background. Data sets are
// read by formats.hpp and lib/data/.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "base/torch.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "data/loader.hpp"

namespace yolox {

// Returns the order of the n images in one epoch (from 0), a permutation that depends only on (seed, epoch),
// not on the number of threads or ranks.
inline std::vector<int64_t> epoch_order(int64_t n, uint64_t seed, uint64_t epoch) {
  Rng rng(seed, epoch, ~uint64_t{0});
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), int64_t(0));
  shuffle(order, rng);
  return order;
}

// Throws std::runtime_error, with the name of the image, if a box of an item lies outside of the image, has
// an unknown class or no area (--debug).
inline void check_boxes(const Item& item, const Image& image, const Dataset& data) {
  const double rounding = 1e-6;
  for (const Box& b : item.boxes)
    check(b.cls >= kIgnoredRegion && b.cls < int(data.classes.size()) && b.x1 >= -rounding &&
              b.y1 >= -rounding && b.x2 <= image.cols + rounding && b.y2 <= image.rows + rounding &&
              has_area(b),
          data.name_of(item.index), ", augmented: box ", b.x1, " ", b.y1, " ", b.x2, " ", b.y2, " of class ",
          b.cls, " is invalid: the image is ", image.cols, "x", image.rows, ", the data set has ",
          data.classes.size(), " classes");
}

// The order of the training images: an endless stream, in which each epoch is a new epoch_order(). Several
// threads may call index_at().
class TrainingOrder {
 public:
  TrainingOrder(int64_t n, uint64_t seed) : n(n), seed(seed) {}

  // Returns the index of the image at a position of the stream, from 0.
  int64_t index_at(int64_t position) {
    std::lock_guard lock(mutex);
    const int64_t epoch = position / n;
    std::vector<int64_t>& order = epochs[epoch];
    if (order.empty()) order = epoch_order(n, seed, epoch);
    const int64_t index = order[position % n];
    while (epochs.size() > 2) epochs.erase(epochs.begin());
    return index;
  }

 private:
  const int64_t n;
  const uint64_t seed;
  std::mutex mutex;
  std::map<int64_t, std::vector<int64_t>> epochs;  // the latest two, because a batch may span them
};

// Settings of the stream of batches.
struct BatchSettings {
  AugmentConfig augment = {};
  bool augmented = true;     // false: letterbox only
  bool check_boxes = false;  // check the boxes before they are copied to the device
  int64_t seed = 0;
  int workers = 1;
  int64_t batch = 1, ranks = 1;  // total batch size; its shares differ by at most one image between ranks
  int64_t iters = 0, mosaic_iters = 0;  // of the run; the first mosaic_iters have mosaic and MixUp
};

// Makes the training items. A batch may span two epochs, so that every batch is full. An unreadable image is
// added to data.problems and replaced by the next image. Several threads may call it; copies share the order.
struct TrainingItems {
  const Dataset& data;
  BatchSettings s;
  std::shared_ptr<TrainingOrder> order =
      std::make_shared<TrainingOrder>(int64_t(data.records.size()), uint64_t(s.seed));

  Item operator()(int64_t position, Image& image) const {
    const int64_t n = data.records.size(), index = order->index_at(position);
    SampleDraw draw{size_t(index), {}, {}};
    if (s.augmented) {
      Rng rng(uint64_t(s.seed), /*epoch=*/position / n, index);
      draw = draw_sample(rng, s.augment, n, index, image.size(), position < s.mosaic_iters * s.batch);
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
    const Item item{std::move(sample.boxes), index};
    if (s.check_boxes) check_boxes(item, image, data);
    return item;
  }
};

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

// Stream of training batches of one rank. Not thread-safe.
class Batches {
 public:
  // rank: rank of this process; the stream contains only the images of this rank in each batch. first: step
  // that the stream begins with, counted from 0. `data` must outlive this object.
  Batches(const Dataset& data, const BatchSettings& s, int rank, ImageSize size, torch::Device device,
          int64_t first)
      : loader(TrainingItems{data, s}, first * s.batch + share_begin(s, rank), s.iters * s.batch,
               int(share_begin(s, rank + 1) - share_begin(s, rank)), {size.width, size.height}, s.workers,
               device, /*stride=*/s.batch),
        data(data) {}

  // Returns the next batch, on the device. Throws the exception of a worker thread that failed.
  Batch next() {
    RECORD_USER_SCOPE("data");
    const double start = now();
    Batch batch = loader.next();
    waited += now() - start;
    batch.data = &data;
    return batch;
  }

  // Returns the seconds spent in next() since the last call of this function.
  double reset_waiting_time() { return std::exchange(waited, 0.0); }

 private:
  // Returns the position in a batch at which the share of a rank begins.
  static int64_t share_begin(const BatchSettings& s, int rank) { return s.batch * rank / s.ranks; }

  Loader loader;
  const Dataset& data;
  double waited = 0;  // seconds
};

}  // namespace yolox
