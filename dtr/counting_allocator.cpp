// SPDX-License-Identifier: Apache-2.0
#include "dtr/counting_allocator.hpp"

#include <malloc.h>

#include <cstdlib>

#include "base/error.hpp"

namespace yolox {

CountingAllocator& CountingAllocator::get() {
  static CountingAllocator* const one = [] {
    auto* allocator = new CountingAllocator;
    c10::SetCPUAllocator(allocator, /*priority=*/1);
    return allocator;
  }();
  return *one;
}

c10::DataPtr CountingAllocator::allocate(size_t size) {
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

void CountingAllocator::release(void* data) {
  if (!data) return;
  void* block = static_cast<void**>(data)[-1];
  get().bytes -= int64_t(malloc_usable_size(block));
  std::free(block);
}

}  // namespace yolox
