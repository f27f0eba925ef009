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
  static CountingAllocator& get();

  int64_t live() const { return bytes; }
  // The most since the last call of forget_peak().
  int64_t peak() const { return most; }
  void forget_peak() { most = bytes.load(); }

  // Called with the bytes that are about to be allocated, from any thread; null: nobody. It may free memory.
  std::atomic<void (*)(int64_t)> before_allocation{nullptr};

  c10::DataPtr allocate(size_t size) override;
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  CountingAllocator() = default;
  static constexpr size_t kAlignment = 64;
  static void release(void* data);

  std::atomic<int64_t> bytes{0}, most{0};
};

}  // namespace yolox
