// SPDX-License-Identifier: Apache-2.0
// The memory budget of --dtr: the given number of bytes, or the free memory of the device (--dtr auto), and
// how used memory and the cost of operations are measured on the CPU and on a GPU.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "dtr/dtr.hpp"

namespace yolox {

// A CPU allocator for torch that counts the allocated bytes exactly and calls a hook before each allocation.
// torch allocates all its memory here, that of tensors and the scratch memory of oneDNN. OpenCV and the C++
// standard library do not.
//
// The allocator aligns blocks itself, because posix_memalign() of glibc searches for a block that is larger
// than needed and therefore does not reuse a freed block of the same size. With eviction and
// rematerialisation a process needed three times the memory that way.
class CountingAllocator final : public c10::Allocator {
 public:
  // Returns the allocator. The first call installs it for the rest of the process, because a tensor must be
  // freed by the allocator that has allocated it. Memory allocated before is not counted.
  static CountingAllocator& get() {
    static CountingAllocator* const one = [] {
      auto* allocator = new CountingAllocator;
      c10::SetCPUAllocator(allocator, /*priority=*/1);
      return allocator;
    }();
    return *one;
  }

  int64_t live() const { return bytes; }  // bytes allocated now
  // Returns the maximum of live() since the last call of reset_peak().
  int64_t peak() const { return most; }
  void reset_peak() { most = bytes.load(); }

  // Called before each allocation with its size in bytes, on the allocating thread; may free memory. Null: no
  // hook.
  std::atomic<void (*)(int64_t)> before_allocation{nullptr};

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::kCPU};
    // malloc allocates slightly more; it rounds large blocks up to whole pages.
    if (const auto make_room = before_allocation.load(std::memory_order_relaxed))
      make_room(int64_t(size) + (size < 65536 ? 128 : 8192));
    void* block = std::malloc(size + sizeof(void*) + kAlignment);
    check(block, "can't allocate memory: ", size, " bytes requested");
    const int64_t now = bytes += int64_t(malloc_usable_size(block));
    for (int64_t before = most; now > before && !most.compare_exchange_weak(before, now);) continue;
    const uintptr_t first = uintptr_t(block) + sizeof(void*) + kAlignment - 1;
    void** data = reinterpret_cast<void**>(first / kAlignment * kAlignment);
    data[-1] = block;
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  CountingAllocator() = default;
  static constexpr size_t kAlignment = 64;
  static void release(void* data) {
    if (!data) return;
    void* block = static_cast<void**>(data)[-1];
    get().bytes -= int64_t(malloc_usable_size(block));
    std::free(block);
  }

  std::atomic<int64_t> bytes{0}, most{0};
};

// The budget of --dtr auto. It follows the memory that other programs leave free. It falls at once, and rises
// by 10 % of the difference per step, because a program that has freed memory may soon need it again.
class AutomaticBudget {
 public:
  // Returns the budget of the next step in bytes. live: bytes that the device's allocator has allocated.
  // free: bytes that are free on the device, minus a margin. out_of_memory: number of out-of-memory errors in
  // the previous step. These happen because of fragmentation, or because another program allocates at the
  // same time. After one, the budget is 5 % lower, and rises by 2 % after each 100 steps without one.
  double next(double live, double free, int64_t out_of_memory);

 private:
  double budget = 0, share = 1;
  int64_t steps_since_oom = 0;
};

// Returns an estimate of the duration of an operation in seconds, from its FLOPs (convolutions) and the bytes
// of its arguments and results. The speeds are those of a large GPU. Only the ratio of costs matters.
double estimated_cost(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given,
                      c10::ArrayRef<c10::IValue> results);

// An event in the stream of a device. An interface, so that tests can replace it.
struct DeviceEvent {
  virtual ~DeviceEvent() = default;
  virtual bool passed() const = 0;  // the device has reached it; never waits
  virtual double seconds_since(const DeviceEvent& earlier) const = 0;  // both must have passed
};

// Implementation of DtrSettings::cost for a GPU. The host runs ahead of the GPU, so that events in the stream
// measure the time. The events are read later, when the GPU has passed them, and the host never waits. The
// cost is the shortest duration among the first kTimes calls of an operation with the same types and shapes.
// The first call does not count, because it may load a kernel or choose an algorithm. Until a duration is
// known, the cost is estimated_cost().
class DeviceCosts {
 public:
  using Mark = std::function<std::unique_ptr<DeviceEvent>()>;
  explicit DeviceCosts(Mark mark) : mark(std::move(mark)) {}

  std::function<double(c10::ArrayRef<c10::IValue>)> operator()(const c10::OperatorHandle& operation,
                                                               c10::ArrayRef<c10::IValue> given);

 private:
  struct Measurement {
    double seconds = 0;
    int times = 0;
  };
  struct PendingMeasurement {
    size_t key;
    std::shared_ptr<DeviceEvent> before, after;
  };
  static constexpr int kTimes = 4;

  // Reads the events that the device has passed, in order.
  void read_finished_events();
  // Returns a hash of an operation with the types, shapes and integers of its arguments.
  static size_t key_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given);

  Mark mark;
  std::unordered_map<size_t, Measurement> known;
  std::deque<PendingMeasurement> waiting;
};

// Returns the settings for --dtr. bytes: the budget; infinity: automatic; 0: DTR is off. ranks_here: number
// of ranks that share the memory of this machine.
DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here);

}  // namespace yolox
