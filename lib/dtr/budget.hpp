// SPDX-License-Identifier: Apache-2.0
// The memory budget of --dtr: the given number of bytes, or the free memory of the device (--dtr auto), and
// how used memory is measured on the CPU and on a GPU.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "base/text.hpp"
#include "base/torch.hpp"
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

}  // namespace yolox
