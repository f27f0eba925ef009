// SPDX-License-Identifier: Apache-2.0
// A CPU allocator for torch that counts the allocated bytes exactly and calls a hook before each allocation.
// torch allocates all its memory here, that of tensors and the scratch memory of oneDNN. OpenCV and the C++
// standard library do not.
//
// The allocator aligns blocks itself, because posix_memalign() of glibc searches for a block that is larger
// than needed and therefore does not reuse a freed block of the same size. With eviction and
// rematerialisation a process needed three times the memory that way.
#pragma once
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace yolox {

class CountingAllocator final : public c10::Allocator {
 public:
  // Returns the allocator. The first call installs it for the rest of the process, because a tensor must be
  // freed by the allocator that has allocated it. Memory allocated before is not counted.
  static CountingAllocator& get();

  int64_t live() const { return bytes; }  // bytes allocated now
  // Returns the maximum of live() since the last call of reset_peak().
  int64_t peak() const { return most; }
  void reset_peak() { most = bytes.load(); }

  // Called before each allocation with its size in bytes, on the allocating thread; may free memory. Null: no
  // hook.
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
