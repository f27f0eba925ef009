// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of the simulated device, see graphs.cpp.
#pragma once
#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <memory>

namespace simulated_cuda {
struct Graph;
}

namespace at::cuda {

c10::MempoolId_t graph_pool_handle();

class CUDAGraph {
 public:
  void capture_begin(c10::MempoolId_t pool, cudaStreamCaptureMode mode);
  void capture_end();
  void replay();

 private:
  std::shared_ptr<simulated_cuda::Graph> graph;
};

}  // namespace at::cuda
