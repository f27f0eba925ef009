// SPDX-License-Identifier: Apache-2.0
// The caching allocator of the simulated device: the peak of allocated memory is the reserved memory,
// because a caching allocator keeps freed blocks.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include "simulated_cuda.hpp"

namespace c10::cuda::CUDACachingAllocator {

struct CUDAAllocator {
  bool initialized() { return true; }
};
inline CUDAAllocator* get() {
  static CUDAAllocator one;
  return &one;
}
inline CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) {
  CachingDeviceAllocator::DeviceStats stats;
  stats.allocated_bytes[0].current = simulated_cuda::allocated();
  stats.allocated_bytes[0].peak = simulated_cuda::peak_allocated();
  stats.reserved_bytes[0].current = simulated_cuda::peak_allocated();
  stats.reserved_bytes[0].peak = simulated_cuda::peak_allocated();
  return stats;
}
inline void emptyCache() { simulated_cuda::reset_peak(); }
inline void endAllocateToPool(DeviceIndex, MempoolId_t) {}
inline void releasePool(DeviceIndex, MempoolId_t) {}
inline void resetPeakStats(DeviceIndex) { simulated_cuda::reset_peak(); }
inline void setMemoryFraction(double fraction, DeviceIndex) {
  simulated_cuda::set_limit(fraction >= 1 ? INT64_MAX : int64_t(fraction * double(simulated_cuda::kMemory)));
}

}  // namespace c10::cuda::CUDACachingAllocator
