// SPDX-License-Identifier: Apache-2.0
// The data loader: worker threads that make batches in the background, and the copy of batches to the device.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/torch.hpp"
#include "data/batch.hpp"

namespace yolox {

// Makes batches in advance and returns them in order, on the device. The worker threads live as long as the
// loader.
// make(position, image) writes the pixels of one sample to `image` ([H, W, 3], uninitialised) and returns the
// Item. Worker threads call it concurrently. Its result must depend on the position only, so that the number
// of threads does not change the batches. If it throws, next() rethrows the exception for that batch.
class Loader {
 public:
  using Make = std::function<Item(int64_t position, Image& image)>;

  // first, end: the positions are first <= position < end. batch: images per batch; the last batch may be
  // smaller. size: width and height of the images in pixels. threads: worker threads; at most as many as
  // images can be in progress. device: of the batches. On a GPU, the next batch is copied from pinned memory,
  // if there is enough, on a side stream while the current batch is used. stride: distance between the first
  // positions of two batches, for a rank that loads its part of a larger batch; 0 means `batch`.
  Loader(Make make, int64_t first, int64_t end, int batch, cv::Size size, int threads, torch::Device device,
         int64_t stride = 0);

  // Returns true if the workers have finished the batch that follows in memory of the host.
  bool ready();

  // Waits for the next batch and returns it. Throws after the last batch, or the exception of make().
  Batch next();

 private:
  static constexpr size_t kAhead = 3;  // unfinished and waiting batches

  // A batch in progress.
  struct PendingBatch {
    Tensor images;
    std::vector<Item> items;
    int64_t first;              // position of the first image
    size_t taken = 0, missing;  // images that a worker has started; images that are not finished
    std::exception_ptr error;   // the first exception of make()
  };

  // A batch whose copy to the device has been started. `copied` is recorded after the copy.
  struct PendingCopy {
    Batch batch;
    c10::Event copied;
  };

  // Appends batches to `pending` until there are kAhead. The caller must hold the mutex, except in the
  // constructor.
  void start_batches();

  // Loop of a worker thread.
  void work(const std::stop_token& stop);

  // Waits for the next batch and returns it in memory of the host.
  Batch next_on_host();

  // Starts the copy of the next batch on the side stream.
  PendingCopy start_copy();

  const Make make;
  int64_t position;
  const int64_t end, stride;
  const int batch;
  const cv::Size size;
  const torch::Device device;
  bool pinned;  // allocate images in pinned memory
  std::optional<PendingCopy> ahead;
  std::mutex mutex;
  std::condition_variable_any has_work;
  std::condition_variable has_batch;
  std::deque<std::shared_ptr<PendingBatch>> pending;
  std::vector<std::jthread> workers;  // last: they use the other members until they are stopped and joined
};

}  // namespace yolox
