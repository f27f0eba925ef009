// SPDX-License-Identifier: Apache-2.0
#include "data/loader.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "base/timeout.hpp"

namespace yolox {

Loader::Loader(Make make, int64_t first, int64_t end, int batch, cv::Size size, int threads,
               torch::Device device, int64_t stride)
    : make(std::move(make)),
      position(first),
      end(end),
      stride(stride ? stride : batch),
      batch(batch),
      size(size),
      device(device),
      pinned(device.is_cuda()) {
  start_batches();
  for (int64_t n = std::clamp<int64_t>(threads, 1, int64_t(kAhead) * batch); n > 0; --n)
    workers.emplace_back([this](const std::stop_token& stop) { work(stop); });
}

bool Loader::ready() {
  std::lock_guard lock(mutex);
  return !pending.empty() && pending.front()->missing == 0;
}

Batch Loader::next_on_host() {
  std::unique_lock lock(mutex);
  check(!pending.empty(), "next() was called after the last batch of the data loader");
  const auto first = pending.front();
  const WaitsFor data("the data loader");
  has_batch.wait(lock, [&] { return first->missing == 0; });
  pending.pop_front();
  start_batches();
  lock.unlock();
  if (first->error) std::rethrow_exception(first->error);
  return {first->images, make_targets(first->items), std::move(first->items)};
}

void Loader::start_batches() {
  while (pending.size() < kAhead && position < end) {
    const size_t n = std::min<int64_t>(batch, end - position);
    auto p = std::make_shared<PendingBatch>();
    const std::vector<int64_t> shape{int64_t(n), size.height, size.width, 3};
    try {
      p->images = torch::empty(shape, torch::TensorOptions(torch::kByte).pinned_memory(pinned));
    } catch (const c10::Error&) {  // WSL 2 has little pinned memory; without it, copies wait for the device
      if (!pinned) throw;
      pinned = false;
      p->images = torch::empty(shape, torch::kByte);
    }
    p->items.resize(n);
    p->first = position;
    p->missing = n;
    pending.push_back(p);
    position += stride;
    has_work.notify_all();
  }
}

void Loader::work(const std::stop_token& stop) {
  const auto has_free = [](const auto& p) { return p->taken < p->items.size(); };
  const auto any_free = [&] { return std::ranges::any_of(pending, has_free); };
  std::unique_lock lock(mutex);
  while (has_work.wait(lock, stop, any_free) && !stop.stop_requested()) {
    const auto p = *std::ranges::find_if(pending, has_free);
    const size_t slot = p->taken++;
    lock.unlock();
    std::exception_ptr error;
    try {
      const size_t bytes = size_t(size.area()) * 3;
      Image image(cv::Mat(size, CV_8UC3, p->images.data_ptr<uint8_t>() + slot * bytes));
      p->items[slot] = make(p->first + slot, image);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error && !p->error) p->error = error;
    if (--p->missing == 0) has_batch.notify_all();
  }
}

// Returns the tensors of a batch that are on the device.
static std::vector<Tensor*> tensors_of(Batch& batch) {
  Targets& t = batch.targets;
  std::vector<Tensor*> tensors{&batch.images, &t.boxes, &t.classes, &t.device_counts};
  if (t.ignored.defined()) tensors.push_back(&t.ignored);
  return tensors;
}

Batch Loader::next() {
  if (device.is_cpu()) return next_on_host();
  PendingCopy sent = ahead ? std::move(*ahead) : start_copy();
  ahead.reset();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  sent.copied.block(stream);
  for (const Tensor* t : tensors_of(sent.batch))
    if (t->numel() > 0)
      t->record_stream(stream);  // the allocator must not reuse the memory before this stream has finished
  if (ready()) ahead = start_copy();
  return std::move(sent.batch);
}

Loader::PendingCopy Loader::start_copy() {
  // One stream for all loaders, because the memory of a stream is not for others. A process has one device.
  static const c10::Stream side = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  Batch batch = next_on_host();
  const c10::StreamGuard guard(side);
  for (Tensor* t : tensors_of(batch)) {
    if (t->numel() > 0 && pinned && !t->is_pinned()) *t = t->pin_memory();
    *t = t->to(device, /*non_blocking=*/true);
  }
  PendingCopy sent{std::move(batch), c10::Event(device.type())};
  sent.copied.record(side);
  return sent;
}

}  // namespace yolox
