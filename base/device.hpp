// SPDX-License-Identifier: Apache-2.0
// The device of a run (CPU or GPU): parsing of --device, name, memory, deterministic mode.
#pragma once
#include <torch/torch.h>

#ifdef YOLOX_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include <string>

#include "base/memory.hpp"

namespace yolox {

// Parses "auto" (a GPU if torch can use one, else the CPU), "cpu", "cuda" or "cuda:N". Makes a GPU the
// current device, so that no tensor is allocated on another GPU. Throws UsageError if the GPU does not exist.
torch::Device parse_device(const std::string& name);

// Returns "cpu" or "cuda:0 (NVIDIA H200)".
std::string device_name(torch::Device device);

// Returns the PCI bus ID of a GPU, such as "0000:1B:00.0", or "" for the CPU.
std::string gpu_address(torch::Device device);

// on: selects deterministic algorithms, so that a run is bit-for-bit reproducible. Where torch has no
// deterministic GPU kernel, the model uses other operations.
// off: enables cuDNN benchmark mode, which tries all algorithms for each new input size, unless
// `memory_is_short` (--dtr). A benchmark needs much memory, and an algorithm that was chosen while more
// memory was free may not fit later.
void set_determinism(bool on, bool memory_is_short);

// Returns the memory that this process uses on the device, in bytes: reserved by torch's caching allocator on
// a GPU, resident in RAM on the CPU.
double memory_used(torch::Device device);
// Returns the bytes that torch's allocator has allocated to tensors: now, and the peak since the last call of
// empty_cache(). Both are 0 on the CPU, where torch does not count.
AllocatedBytes allocated_bytes(torch::Device device);
// Returns the peak of memory_used() since the last call of empty_cache(), in bytes.
double memory_peak(torch::Device device);
// Returns the memory that this process may use in total, in bytes: 90 % of the free memory plus its own on a
// GPU, free_memory() plus its own on the CPU.
double memory_budget(torch::Device device);
// Returns one line about the memory of the current GPU for crash.txt, or "" if no GPU is in use.
std::string memory_report();
// Returns cached memory that is not in use to the system and resets the peaks.
void empty_cache(torch::Device device);

}  // namespace yolox
