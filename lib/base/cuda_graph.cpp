// SPDX-License-Identifier: Apache-2.0
#include "base/cuda_graph.hpp"

#include <atomic>
#include <exception>

#include "base/text.hpp"
#include "base/torch.hpp"

#ifdef YOLOX_CUDA
#include <ATen/core/CachingHostAllocator.h>
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

// Returns the memory pool of the graphs that exist. A pool whose graphs are all destroyed cannot be used
// again.
using Pool = std::shared_ptr<const c10::MempoolId_t>;
Pool pool() {
  static std::weak_ptr<const c10::MempoolId_t> newest;
  Pool pool = newest.lock();
  if (!pool) newest = pool = std::make_shared<const c10::MempoolId_t>(at::cuda::graph_pool_handle());
  return pool;
}

// Returns false if f() throws.
template <class Function>
bool succeeds(const Function& f) {
  try {
    f();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

struct CudaGraph::Implementation {
  Pool memory = pool();
  at::cuda::CUDAGraph graph;

  // After a recording that torch could not end: ends it for the allocators of torch, which otherwise free no
  // memory that two streams have used. Returns true if an allocator still has a pointer to the graph.
  bool end_recording(torch::Device device) {
    const c10::MempoolId_t id = *memory;
    const auto index = device.index();
    namespace allocator = c10::cuda::CUDACachingAllocator;
    const bool on_device = succeeds([&] { allocator::endAllocateToPool(index, id); });
    if (on_device) succeeds([&] { allocator::releasePool(index, id); });
    bool on_host = false;
#if YOLOX_TORCH_AT_LEAST(11)
    at::HostAllocator* host = at::getHostAllocator(at::kCUDA);
    on_host = host && succeeds([&] { host->end_allocate_to_pool(id); });
    if (on_host) succeeds([&] { host->release_pool(id); });
#endif
    cudaGetLastError();  // forgets the error, so that the next call does not report it
    return on_device || on_host;
  }
};

CudaGraph::CudaGraph(torch::Device device, const std::function<void()>& record)
    : implementation(new Implementation) {
  // The memory of a step without a graph is returned to the driver, because the graph needs as much once
  // more.
  c10::cuda::CUDACachingAllocator::emptyCache();
  const c10::StreamGuard on(recording_stream(device));
  std::exception_ptr error;
  try {
    // Thread-local: other threads, such as those of the loader, may allocate and copy meanwhile.
    implementation->graph.capture_begin(*implementation->memory, cudaStreamCaptureModeThreadLocal);
    const Recording recording;
    record();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    implementation->graph.capture_end();
  } catch (...) {
    if (!error) error = std::current_exception();
    if (implementation->end_recording(device)) {
      implementation->memory.reset();
      (void)implementation.release();  // not destroyed, because torch may still call it
    }
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
