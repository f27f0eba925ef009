// SPDX-License-Identifier: Apache-2.0
#include "base/cuda_graph.hpp"

#include <atomic>
#include <exception>

#include "base/error.hpp"

#ifdef YOLOX_CUDA
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#endif

namespace yolox {

static std::atomic<bool> in_record{false};

bool CudaGraph::recording() { return in_record; }

#ifdef YOLOX_CUDA

struct CudaGraph::Implementation {
  at::cuda::CUDAGraph graph;
};

namespace {

struct Recording {
  Recording() { in_record = true; }
  ~Recording() { in_record = false; }
};

// The stream of all recordings. The default stream cannot be recorded.
c10::Stream recording_stream(torch::Device device) {
  static const c10::Stream stream = c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(device);
  return stream;
}

c10::MempoolId_t pool() {
  static const c10::MempoolId_t id = at::cuda::graph_pool_handle();
  return id;
}

}  // namespace

CudaGraph::CudaGraph(torch::Device device, const std::function<void()>& record)
    : implementation(new Implementation) {
  // The memory of a step without a graph is returned to the driver, because the graph needs as much once
  // more.
  c10::cuda::CUDACachingAllocator::emptyCache();
  const c10::StreamGuard on(recording_stream(device));
  // Thread-local: other threads, such as those of the loader, may allocate and copy meanwhile.
  std::exception_ptr error;
  try {
    implementation->graph.capture_begin(pool(), cudaStreamCaptureModeThreadLocal);
    const Recording recording;
    record();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    implementation->graph.capture_end();
  } catch (...) {
    if (!error) error = std::current_exception();
    // torch leaves its allocator in the state of a recording, in which it frees no memory that two streams
    // have used. It also keeps a pointer to the graph, which therefore is not destroyed.
    implementation.release();
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), pool());
      c10::cuda::CUDACachingAllocator::releasePool(device.index(), pool());
    } catch (...) {}     // it has ended
    cudaGetLastError();  // forgets the error, so that the next call does not report it
  }
  if (error) std::rethrow_exception(error);
}

void CudaGraph::replay() { implementation->graph.replay(); }

#else

struct CudaGraph::Implementation {};

CudaGraph::CudaGraph(torch::Device, const std::function<void()>&) {
  fail("a program that was built without CUDA has no CUDA graphs");
}

void CudaGraph::replay() {}

#endif

CudaGraph::~CudaGraph() = default;

}  // namespace yolox
