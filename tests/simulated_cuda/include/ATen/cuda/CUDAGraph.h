// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of the simulated device, see graphs.cpp.
#pragma once
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>

namespace simulated_cuda {
struct Graph;
}

namespace at::cuda {

c10::MempoolId_t graph_pool_handle();

class CUDAGraph {
 public:
  CUDAGraph() = default;
  CUDAGraph(const CUDAGraph&) = delete;
  ~CUDAGraph();
  void capture_begin(c10::MempoolId_t pool, cudaStreamCaptureMode mode);
  void capture_end();
  void replay();

 protected:
  std::map<CUDAGeneratorState*, uint64_t> captured_generator_states_;

 private:
  c10::MempoolId_t memory_pool{0, 0};
  bool ended = false;
  std::shared_ptr<simulated_cuda::Graph> graph;
};

}  // namespace at::cuda
