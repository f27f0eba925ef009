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
         int64_t stride = 0, size_t ahead = 3);
  ~Loader() { end_workers(); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  bool done();
  // next() would not wait.
  bool ready();

  Batch next();

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

  void end_workers();

  // Starts batches until enough are on their way. Called with the lock held.
  void plan();

  void work();

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

  Batch next();

 private:
  struct Sent {
    Batch batch;
    c10::Event copied;
  };
  Sent send(Batch batch);

  Loader& loader;
  const torch::Device device;
  std::optional<Sent> ahead;
  std::optional<c10::Stream> side;
};

}  // namespace yolox
