// SPDX-License-Identifier: Apache-2.0
// The functions of the CUDA runtime that this project calls, for the simulated device.
#pragma once
#include <cstdio>
#include <cstring>

#include "simulated_cuda.hpp"

enum cudaError_t { cudaSuccess };
struct cudaDeviceProp {
  char name[256];
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::strcpy(properties->name, "simulated");
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, size, "0000:%02d:00.0", device);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const int64_t limit = simulated_cuda::limit();
  *total = size_t(limit == INT64_MAX ? simulated_cuda::kMemory : limit);
  *free = *total - size_t(simulated_cuda::peak_allocated());
  return cudaSuccess;
}
