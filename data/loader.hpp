// A loader whose threads live as long as it does, and the way to the device.
//
// B images in a batch, H W height and width of the network's input.
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
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/threads.hpp"
#include "data/batch.hpp"

namespace yolox {

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

}  // namespace yolox
