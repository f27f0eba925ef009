// Counts the bytes that torch has taken on the CPU, to the byte and at every moment, and lets somebody make
// room before each allocation. All of torch's own memory comes by here: tensors, and the scratch memory of
// oneDNN. What OpenCV and the standard library take does not.
//
// Blocks are aligned here and not by posix_memalign(): that of glibc does not take a block again that was
// freed, even for one of the same size, since it looks for more than it will use. Where results are dropped
// and computed again, a process took three times the memory that way.
#pragma once
#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "base/error.hpp"

namespace yolox {

class CountingAllocator final : public c10::Allocator {
 public:
  // Installed by the first call, for the rest of the process: tensors outlive everything. What was allocated
  // before is not counted.
  static CountingAllocator& get() {
    static CountingAllocator* const one = [] {
      auto* allocator = new CountingAllocator;
      c10::SetCPUAllocator(allocator, /*priority=*/1);
      return allocator;
    }();
    return *one;
  }

  int64_t live() const { return bytes; }
  // The most since the last call of forget_peak().
  int64_t peak() const { return most; }
  void forget_peak() { most = bytes.load(); }

  // Called with the bytes that are about to be allocated, from any thread; null: nobody. It may free memory.
  std::atomic<void (*)(int64_t)> before_allocation{nullptr};

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &release, c10::kCPU};
    // A little more is taken; large blocks are whole pages.
    if (const auto make_room = before_allocation.load(std::memory_order_relaxed))
      make_room(int64_t(size) + (size < 65536 ? 128 : 8192));
    void* block = std::malloc(size + sizeof(void*) + kAlignment);
    check(block, "can't allocate memory: ", size, " bytes are wanted");
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

}  // namespace yolox
