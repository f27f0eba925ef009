// SPDX-License-Identifier: Apache-2.0
// The items that the data loader produces, for training and for evaluation.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "base/error.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "data/loader.hpp"

namespace yolox {

// Returns the permutation of n images for one epoch (`pass`, from 0). Depends only on (seed, pass), not on
// the number of threads or ranks.
inline std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t pass) {
  Rng rng(seed, pass, ~uint64_t{0});
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  shuffle(order, rng);
  return order;
}

// Returns the n images of one epoch. repeats: factor of each image, see repeat_factors(); image i is in the
// epoch in proportion to its factor, and images with a factor of 1 may be left out. Empty: permutation().
inline std::vector<int64_t> epoch_order(int64_t n, uint64_t seed, uint64_t pass,
                                        const std::vector<double>& repeats) {
  if (repeats.empty()) return permutation(n, seed, pass);
  Rng rng(seed, pass, ~uint64_t{1});
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
    std::map<int64_t, std::vector<int64_t>> of_pass;
  };
  const auto orders = std::make_shared<Permutations>();
  const int64_t n = data.records.size();
  return [=, &data](int64_t position, Image& image) {
    const int64_t pass = position / n;
    int64_t index;
    {
      std::lock_guard lock(orders->mutex);
      auto& order = orders->of_pass[pass];
      if (order.empty()) order = epoch_order(n, seed, pass, repeats);
      index = order[position % n];
      while (orders->of_pass.size() > 2) orders->of_pass.erase(orders->of_pass.begin());
    }
    SampleDraw draw{size_t(index), {}, {}, {}};
    if (augmented) {
      Rng rng(seed, pass, repeats.empty() ? index : n + position % n);  // repeats differ
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
    check(sample.image.data == image.data, "compose() must draw into the image of the sample");
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

}  // namespace yolox
