// SPDX-License-Identifier: Apache-2.0
// A simulated CUDA device, for tests on machines without a GPU. A program that is linked with this library
// and with libtorch_cpu, but not with libtorch_cuda, sees one GPU (SIMULATED_CUDA_DEVICES=N: N GPUs). Kernels
// of the CPU run on it. It counts and checks what only a GPU would show:
//   - operator calls and synchronisations with the device;
//   - memory of one stream that another stream uses without an event or record_stream();
//   - asynchronous copies, which are done as late as a device may do them;
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

// Since the last reset_counts(): the number of operators that started a kernel or a copy, and the reasons why
// the host waited for the device.
int64_t operator_calls();
std::vector<std::string> host_waits();
void reset_counts();

// Returns the errors in the use of streams that were found since the last call.
std::vector<std::string> errors();

// Adds work to the graph that is being recorded. Returns false if there is none.
bool record_only(std::function<void()> work);
// Returns true if a graph exists.
bool has_graphs();

// Returns a CPU tensor on the bytes of a device tensor, after the work of the current stream.
at::Tensor host_view(const at::Tensor& t);

// The memory that a device reports, in bytes. Allocations are limited only after set_limit(). allocated() and
// peak_allocated() count all devices together.
constexpr int64_t kMemory = int64_t{16} << 30;
int64_t allocated();
int64_t peak_allocated();
void reset_peak();
// An allocation beyond the limit fails as on a GPU: "CUDA out of memory". SIMULATED_CUDA_LIMIT=1:5000 is
// the first limit of rank 1.
void set_limit(int64_t bytes);
int64_t limit();

// on: allocations of pinned memory throw, as on a machine that has little of it.
void refuse_pinned_memory(bool on);

// From now on the device fails as a GPU after a kernel with an error: every call throws the same error, also
// the deleters of memory that several streams used.
void fail_from_now_on(const char* error);

// From now on no event is reached, as on a GPU that hangs.
void hang();

}  // namespace simulated_cuda
