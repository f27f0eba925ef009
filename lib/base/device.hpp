// SPDX-License-Identifier: Apache-2.0
// The device of a run (CPU or GPU): parsing of --device, name, memory, deterministic mode.
#pragma once

#ifdef YOLOX_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include <functional>
#include <string>

#include "base/torch.hpp"

namespace yolox {

// Returns true if --device auto means a GPU: torch can use one. Throws UsageError if the program was built
// for CUDA, and this machine has an NVIDIA driver, but torch cannot use a GPU, so that nobody trains on the
// CPU by mistake. A CUDA_VISIBLE_DEVICES that names no GPU (empty, -1, NoDevFiles) hides the GPUs on purpose.
bool has_gpu();

// Parses "auto" (a GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N". Makes a GPU the current
// device, so that no tensor is allocated on another GPU, and turns TF32 off. Lets the caching allocator use
// expandable segments, which fragment less, unless PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set.
// Throws UsageError if the GPU does not exist. Call it before a GPU is used.
torch::Device parse_device(const std::string& name);

// Returns "cpu" or "cuda:0 (NVIDIA H200)".
std::string device_name(torch::Device device);

// Returns the PCI address of a GPU, such as "0000:3b:00", which MIG slices share; "" for the CPU.
std::string gpu_address(torch::Device device);

// Returns the total memory of a GPU in bytes, 0 for the CPU.
double gpu_memory(torch::Device device);

// Returns the precision for --amp auto: "off" on the CPU, precision_of_gpu() on a GPU.
std::string default_precision(torch::Device device);

// Returns "bf16" for a GPU with bf16 (compute capability 8.0 or newer), else "fp16". Returns "off" for the
// GPUs of compute capability 7.5 without tensor cores (GTX 16xx, MX, T400 to T2000): fp16 is not faster
// there, and convolutions in fp16 are known to return NaN.
std::string precision_of_gpu(int major, int minor, const std::string& name);

// Turns TF32, which has 10 bits of mantissa, on or off for float32 convolutions and matrix products on a GPU.
// torch's default is on for convolutions.
void allow_tf32(bool on);

// Selects deterministic algorithms, so that a run is bit-for-bit reproducible. Where torch has no
// deterministic GPU kernel, the model uses other operations.
void use_deterministic_algorithms();

// on: for each new input size of a convolution, cuDNN times its algorithms and takes the fastest; off: it
// chooses by rules. Timing all convolutions of yolox-s takes 7 seconds per input size. It times the first
// four algorithms of cuDNN's own order instead of ten, because with multi-scale training there are up to 11
// sizes.
void use_cudnn_benchmark(bool on);

// Sets torch's number of threads to the one with which the work is fastest, and returns it. Tries all cores
// that the process may use, half of them and so on, down to one, as long as fewer are not much slower: waking
// threads takes longer than a small network computes. seconds(): does the work and returns its duration. The
// user's own OMP_NUM_THREADS, or cores of OpenMP, are left as they are.
int fastest_threads(const std::function<double()>& seconds);

// Returns the memory that this process uses on the device, in bytes: reserved by torch's caching allocator on
// a GPU, resident in RAM on the CPU.
double memory_used(torch::Device device);
// Bytes that an allocator has allocated: now, and the peak. A peak of 0 means unknown.
struct AllocatedBytes {
  double now, peak = 0;
};
// Returns the bytes that torch's allocator has allocated to tensors: now, and the peak since the last call of
// empty_cache(). Both are 0 on the CPU, where torch does not count.
AllocatedBytes allocated_bytes(torch::Device device);
// Returns the peak of memory_used() since the last call of empty_cache(), in bytes.
double memory_peak(torch::Device device);
// Returns the memory that this process may use in total, in bytes: on a GPU 90 % of (free memory + memory of
// this process), on the CPU free_memory() + resident_bytes().
double memory_budget(torch::Device device);
// Returns cached memory that is not in use to the system and resets the peaks.
void empty_cache(torch::Device device);

}  // namespace yolox
