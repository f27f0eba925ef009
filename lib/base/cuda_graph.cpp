// SPDX-License-Identifier: Apache-2.0
#include "base/cuda_graph.hpp"

#include <atomic>
#include <exception>
#include <memory>

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

bool is_recording_cuda_graph() { return in_record; }

#ifdef YOLOX_CUDA

// Returns the memory pool of the graphs that exist. A pool whose graphs are all destroyed cannot be used
// again.
using Pool = std::shared_ptr<const c10::MempoolId_t>;
static Pool pool() {
  static std::weak_ptr<const c10::MempoolId_t> newest;
  Pool pool = newest.lock();
  if (!pool) newest = pool = std::make_shared<const c10::MempoolId_t>(at::cuda::graph_pool_handle());
  return pool;
}

// Returns false if f() throws.
template <class Function>
static bool succeeds(const Function& f) {
  try {
    f();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// After a recording that torch could not end: ends it for the allocators of torch, which otherwise free no
// memory that two streams have used. Returns true if an allocator still has a pointer to the graph.
static bool end_recording(torch::Device device, const c10::MempoolId_t& id) {
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

CudaGraph record_cuda_graph(torch::Device device, const std::function<void()>& record) {
  // The memory of a step without a graph is returned to the driver, because the graph needs as much once
  // more.
  c10::cuda::CUDACachingAllocator::emptyCache();
  // The default stream cannot be recorded.
  static const c10::Stream stream = c10::impl::VirtualGuardImpl(torch::kCUDA).getStreamFromGlobalPool(device);
  const c10::StreamGuard on(stream);
  const Pool memory = pool();
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  std::exception_ptr error;
  try {
    // Thread-local: other threads, such as those of the loader, may allocate and copy meanwhile.
    graph->capture_begin(*memory, cudaStreamCaptureModeThreadLocal);
    in_record = true;
    record();
  } catch (...) {
    error = std::current_exception();
  }
  in_record = false;
  try {
    graph->capture_end();
  } catch (...) {
    if (!error) error = std::current_exception();
    // Not destroyed, because torch may still call it.
    if (end_recording(device, *memory)) (void)new std::shared_ptr(graph);
  }
  if (error) std::rethrow_exception(error);
  return [memory, graph] { graph->replay(); };
}

#else

CudaGraph record_cuda_graph(torch::Device, const std::function<void()>&) {
  fail("a program that was built without CUDA has no CUDA graphs");
}

#endif

}  // namespace yolox
