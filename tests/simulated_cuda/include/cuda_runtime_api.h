// SPDX-License-Identifier: Apache-2.0
// The functions of the CUDA runtime that this project calls, for the simulated device.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simulated_cuda.hpp"

enum cudaError_t { cudaSuccess };
struct cudaDeviceProp {
  char name[256];
  int major, minor;  // compute capability
  int pciDomainID, pciBusID, pciDeviceID;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {"simulated", 8, 0, 0, device, 0};
  return cudaSuccess;
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const int64_t limit = simulated_cuda::limit();
  *total = size_t(limit == INT64_MAX ? simulated_cuda::kMemory : limit);
  *free = *total - size_t(simulated_cuda::peak_allocated());
  return cudaSuccess;
}
