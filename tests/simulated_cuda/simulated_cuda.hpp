// SPDX-License-Identifier: Apache-2.0
// A simulated CUDA device, for tests on machines without a GPU. A program that is linked with this library
// and with libtorch_cpu, but not with libtorch_cuda, sees one GPU (SIMULATED_CUDA_DEVICES=N: N GPUs). Kernels
// of the CPU run on it. It counts and checks what only a GPU would show:
//   - operator calls and synchronisations with the device, by phase of the step (the innermost
//   RECORD_USER_SCOPE);
//   - memory of one stream that another stream uses without an event or record_stream();
//   - pinned memory that is written before an asynchronous copy from it is done;
//   - the host that dereferences device memory: SIGSEGV.
//
// What it does not show: time, races inside of a kernel, numerical results of CUDA kernels, cuDNN, the number
// of kernels that one operator starts. Not to be loaded together with libtorch_cuda.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace simulated_cuda {

struct Count {
  std::string phase;  // "other" outside of all phases
  std::string what;   // the operator, or the reason of the wait
  int64_t times;
};
// Since the last reset_counts():
std::vector<Count> operator_calls();   // operators that start a kernel or a copy
std::vector<Count> host_waits();       // the host waits for the device
std::vector<Count> unpinned_copies();  // asynchronous copies from memory that is not pinned
void reset_counts();
int64_t sum(const std::vector<Count>& counts);

// Returns the errors that were found since the last call.
std::vector<std::string> errors();

// Adds work to the graph that is being recorded. Returns false if there is none.
bool record_only(std::function<void()> work);

// Returns a CPU tensor on the bytes of a device tensor, after the work of the current stream.
at::Tensor host_view(const at::Tensor& t);

// The number of asynchronous copies that are not done yet. They are done as late as a device may do them.
int64_t pending_copies();

// Returns the number of devices: SIMULATED_CUDA_DEVICES, 1 by default.
int device_count();

// The memory that a device reports, in bytes. Allocations are limited only after set_limit(). allocated() and
// peak_allocated() count all devices together.
constexpr int64_t kMemory = int64_t{16} << 30;
int64_t allocated();
int64_t peak_allocated();
void reset_peak();
// An allocation beyond the limit fails as on a GPU: "CUDA out of memory". At first it is SIMULATED_CUDA_LIMIT
// bytes, or none.
void set_limit(int64_t bytes);
int64_t limit();

// on: an allocation with expandable segments throws, as on a GPU that cannot map memory in parts.
void refuse_expandable_segments(bool on);

// on: allocations of pinned memory throw, as on a machine that has little of it.
void refuse_pinned_memory(bool on);

// The memory pools of CUDA graphs, by the second part of their id. As in torch, a pool is used by the graphs
// that were begun in it, and cannot be used again after the last one is released. A recording that has failed
// must be ended and released.
void begin_allocate_to_pool(uint64_t id);
void end_allocate_to_pool(uint64_t id);
void release_pool(uint64_t id);

// Returns true if a graph exists.
bool has_graphs();

// From now on the device fails as a GPU after a kernel with an error: every call throws the same error, also
// the deleters of memory that several streams used.
void fail_from_now_on(const char* error = "CUDA error: device-side assert triggered");

// on: no event is reached, as on a GPU that hangs.
void hang(bool on);

}  // namespace simulated_cuda
