// From data sets to batches: samples for training and evaluation, a loader whose threads live as long as it
// does, and the way to the device.
//
// B images in a batch, H W height and width of the network's input, G objects in an image.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "data/augment_official.hpp"
#include "checkpoint/checkpoint.hpp"
#include "data/dataset.hpp"
#include "base/error.hpp"
#include "simota.hpp"
#include "data/packed.hpp"
#include "base/threads.hpp"

namespace yolox {

// ---- batches

// What a batch holds beside the pixels of an image.
struct Item {
  std::vector<Box> boxes;  // in pixels of the image as it is in the batch
  int64_t index = -1;      // of the record; -1: an unreadable image stands here, all grey
  Scale scale{1, 1};       // from the pixels of the original to those of the image
};

struct Batch {
  Tensor images;    // [B, H, W, 3] uint8, BGR; pinned when asked for
  Targets targets;  // in pixels of the images
  std::vector<int64_t> indices;
  std::vector<Scale> scales;
  int64_t first;  // position of the first image
};

// Boxes of a batch as the loss takes them, padded to the largest count.
inline Targets make_targets(const std::vector<std::vector<Box>>& boxes) {
  size_t rows = 0;
  for (const auto& b : boxes) rows = std::max(rows, b.size());
  Targets t{torch::zeros({int64_t(boxes.size()), int64_t(rows), 4}),
            torch::zeros({int64_t(boxes.size()), int64_t(rows)}, torch::kLong),
            {}};
  float* box = t.boxes.data_ptr<float>();
  int64_t* cls = t.classes.data_ptr<int64_t>();
  for (size_t i = 0; i < boxes.size(); ++i) {
    t.counts.push_back(boxes[i].size());
    for (size_t g = 0; g < boxes[i].size(); ++g) {
      const Box& b = boxes[i][g];
      const double row[4] = {(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, b.x2 - b.x1, b.y2 - b.y1};
      std::copy(row, row + 4, box + 4 * (i * rows + g));
      cls[i * rows + g] = b.cls;
    }
  }
  return t;
}

// Makes batches ahead of their use, in order, by threads that live as long as the loader. `make` draws the
// image of a position into the batch (H x W, what is there before is of no value) and gives the rest;
// positions run from `first` to `end`, `batch` at a time, the last batch may be smaller. What an item holds
// may depend on its position alone: then the number of threads changes nothing. An exception in a thread
// comes out of the next() that would have given its batch.
class Loader {
 public:
  using Make = std::function<Item(int64_t position, Image& image)>;

  // stride: positions from the beginning of a batch to that of the next, where this loader has its share of a
  // larger batch; 0: they follow one another. ahead: batches in the making or waiting.
  Loader(Make make, int64_t first, int64_t end, int batch, cv::Size size, int threads, bool pinned,
         int64_t stride = 0, size_t ahead = 3)
      : make(std::move(make)),
        position(first),
        end(end),
        stride(stride ? stride : batch),
        ahead(ahead),
        batch(batch),
        size(size),
        pinned(pinned) {
    plan();
    start_workers(
        workers, std::max(1, threads), [this] { work(); }, [this] { end_workers(); });
  }
  ~Loader() { end_workers(); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  bool done() {
    std::lock_guard lock(mutex);
    return pending.empty() && position >= end;
  }
  // next() would not wait.
  bool ready() {
    std::lock_guard lock(mutex);
    return !pending.empty() && pending.front()->missing == 0;
  }

  Batch next() {
    std::unique_lock lock(mutex);
    plan();
    check(!pending.empty(), "the loader is at its end");
    const auto first = pending.front();
    has_batch.wait(lock, [&] { return first->missing == 0; });
    pending.pop_front();
    plan();
    lock.unlock();
    has_work.notify_all();
    if (first->error) std::rethrow_exception(first->error);
    Batch out{first->images, make_targets(first->boxes), first->indices, first->scales, first->first};
    return out;
  }

 private:
  struct Pending {
    Tensor images;
    std::vector<std::vector<Box>> boxes;
    std::vector<int64_t> indices;
    std::vector<Scale> scales;
    int64_t first;
    size_t taken = 0, missing;
    std::exception_ptr error;
  };

  void end_workers() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    has_work.notify_all();
    for (auto& w : workers) w.join();
  }

  // Starts batches until enough are on their way. Called with the lock held.
  void plan() {
    while (pending.size() < ahead && position < end) {
      const size_t n = std::min<int64_t>(batch, end - position);
      auto p = std::make_shared<Pending>();
      p->images = torch::empty({int64_t(n), size.height, size.width, 3},
                               torch::TensorOptions(torch::kByte).pinned_memory(pinned));
      p->boxes.resize(n), p->indices.resize(n), p->scales.resize(n);
      p->first = position, p->missing = n;
      pending.push_back(p);
      position += stride;
      has_work.notify_all();
    }
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      const auto free = std::find_if(pending.begin(), pending.end(),
                                     [](const auto& p) { return p->taken < p->boxes.size(); });
      if (stop) return;
      if (free == pending.end()) {
        has_work.wait(lock);
        continue;
      }
      const auto p = *free;
      const size_t slot = p->taken++;
      lock.unlock();
      std::exception_ptr error;
      try {
        const size_t bytes = size_t(size.area()) * 3;
        Image image(cv::Mat(size, CV_8UC3, p->images.data_ptr<uint8_t>() + slot * bytes));
        Item item = make(p->first + slot, image);
        p->boxes[slot] = std::move(item.boxes), p->indices[slot] = item.index, p->scales[slot] = item.scale;
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !p->error) p->error = error;
      if (--p->missing == 0) has_batch.notify_all();
    }
  }

  const Make make;
  int64_t position;
  const int64_t end, stride;
  const size_t ahead;
  const int batch;
  const cv::Size size;
  const bool pinned;
  std::mutex mutex;
  std::condition_variable has_work, has_batch;
  std::deque<std::shared_ptr<Pending>> pending;
  bool stop = false;
  std::vector<std::thread> workers;
};

// The order of the images in one pass over n of them: drawn from (seed, pass) alone.
inline std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t pass) {
  Rng rng(seed, pass, ~uint64_t{0});
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[rng.randint(0, i)]);
  return order;
}

// Items for training: an endless stream of passes over the data, each in an order of its own; batches are
// always full and run on from one pass into the next. mosaic_at(position) says if mosaic and mixup are on
// there. An image that cannot be used is noted, and the next one takes its place.
inline Loader::Make training_items(const Dataset& data, uint64_t seed, const AugmentConfig& augment,
                                   bool augmented, std::function<bool(int64_t)> mosaic_at) {
  struct Orders {  // of the two latest passes: batches at a seam need both
    std::mutex mutex;
    std::map<int64_t, std::vector<int64_t>> of_pass;
  };
  const auto orders = std::make_shared<Orders>();
  const int64_t n = data.records.size();
  return [=, &data](int64_t position, Image& image) {
    const int64_t pass = position / n;
    int64_t index;
    {
      std::lock_guard lock(orders->mutex);
      auto& order = orders->of_pass[pass];
      if (order.empty()) order = permutation(n, seed, pass);
      index = order[position % n];
      while (orders->of_pass.size() > 2) orders->of_pass.erase(orders->of_pass.begin());
    }
    SampleDraw draw{size_t(index), {}, {}, {}};
    if (augmented) {
      Rng rng(seed, pass, index);
      draw = draw_sample(rng, augment, n, index, image.size(), mosaic_at(position));
    }
    Sample sample{image, {}};
    try {
      if (augment.official_quirks)
        official::compose(data, draw, sample);
      else
        compose(data, draw, sample);
    } catch (const cv::Exception& e) {
      fail(data.records[index].file, ", or an image beside it in a mosaic: ", e.what());
    } catch (const std::bad_alloc&) {
      fail(data.records[index].file, ", or an image beside it in a mosaic: out of memory");
    }
    return Item{std::move(sample.boxes), index};
  };
}

// Items for evaluation: record by record, letterboxed. An image that cannot be used is noted and has index
// -1; of a strict data set it is an error.
inline Loader::Make evaluation_items(const Dataset& data) {
  return [&data](int64_t position, Image& image) {
    try {
      const auto boxed = letterbox(read_image(data, position), image.size());
      boxed.image.copyTo(image);
      return Item{{}, position, boxed.scale};
    } catch (const ImageError& e) {
      if (data.strict) throw;
      data.problems->add("image cannot be used", e.what());
      image.setTo(cv::Scalar::all(border_grey));
      return Item{};
    }
  };
}

// The same items, but each box is looked at before a device sees it (--debug). Throws naming the image.
// empty: boxes without an area are as they should be; official augmentation leaves some.
inline Loader::Make checked_items(Loader::Make make, const Dataset& data, bool empty) {
  return [make = std::move(make), &data, empty](int64_t position, Image& image) {
    Item item = make(position, image);
    const double rounding = 1e-6;
    for (const Box& b : item.boxes)
      check(b.cls >= 0 && b.cls < int(data.classes.size()) && b.x1 >= -rounding && b.y1 >= -rounding &&
                b.x2 <= image.cols + rounding && b.y2 <= image.rows + rounding &&
                (empty || (b.x2 > b.x1 && b.y2 > b.y1)),
            data.name_of(item.index), ", augmented: box ", b.x1, " ", b.y1, " ", b.x2, " ", b.y2,
            " of class ", b.cls, " is not inside ", image.cols, "x", image.rows, " or not of ",
            data.classes.size(), " classes");
    return item;
  };
}

// The images of a batch, for messages.
inline std::string names_in(const Batch& batch, const Dataset& data) {
  std::vector<std::string> names;
  for (const int64_t i : batch.indices) names.push_back(data.name_of(i));
  return listed(names, 64);
}

// ---- to the device

// Batches of a loader on the device. With a GPU, the next batch is on its way, on a stream of its own, while
// the current one is computed with.
class DeviceLoader {
 public:
  DeviceLoader(Loader& loader, torch::Device device) : loader(loader), device(device) {}

  Batch next() {
    if (device.is_cpu()) return loader.next();
    Sent sent = ahead ? std::move(*ahead) : send(loader.next());
    ahead.reset();
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    sent.copied.block(stream);
    for (const Tensor& t : {sent.batch.images, sent.batch.targets.boxes, sent.batch.targets.classes})
      if (t.numel() > 0)
        t.record_stream(stream);  // its memory is not given to others before this stream is done
    if (loader.ready()) ahead = send(loader.next());
    return std::move(sent.batch);
  }

 private:
  struct Sent {
    Batch batch;
    c10::Event copied;
  };
  Sent send(Batch batch) {
    if (!side) side = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    const c10::StreamGuard guard(*side);
    const auto copy = [&](Tensor& t) {
      if (t.numel() > 0 && !t.is_pinned()) t = t.pin_memory();
      t = t.to(device, /*non_blocking=*/true);
    };
    copy(batch.images), copy(batch.targets.boxes), copy(batch.targets.classes);
    Sent sent{std::move(batch), c10::Event(device.type())};
    sent.copied.record(*side);
    return sent;
  }

  Loader& loader;
  const torch::Device device;
  std::optional<Sent> ahead;
  std::optional<c10::Stream> side;
};

// Images of a batch [B, H, W, 3] uint8 BGR -> what the network takes: [B, 3, H, W] float, in channels-last
// order. legacy: weights of YOLOX 0.1.0 want RGB in 0..1, less ImageNet's mean, by its deviation.
inline Tensor preprocess(const Tensor& images, bool legacy) {
  const Tensor x = images.permute({0, 3, 1, 2}).to(torch::kFloat);
  if (!legacy) return x;
  const auto format = pixel_format(true);
  const auto channel = [&](const std::array<double, 3>& v) {
    return torch::tensor({v[0], v[1], v[2]}, x.options()).view({1, 3, 1, 1});
  };
  return ((x.flip(1) / 255 - channel(format.mean)) / channel(format.std))
      .contiguous(torch::MemoryFormat::ChannelsLast);
}

}  // namespace yolox
