// What depends on the device that a run is on: its name, its memory, its determinism.
#pragma once
#include <torch/torch.h>

#ifdef YOLOX_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "base/error.hpp"
#include "base/flags.hpp"
#include "base/memory.hpp"

namespace yolox {

// "auto" (a GPU when there is one), "cpu", "cuda" or "cuda:1". A GPU becomes the current one: nothing is to
// land on another.
torch::Device parse_device(const std::string& name);

// "cpu", "cuda:0 (NVIDIA H200)"
std::string device_name(torch::Device device);

// Where a GPU sits in its machine, "0000:1B:00.0"; empty for the CPU.
std::string gpu_address(torch::Device device);

// With determinism: the same bytes each time; what of torch has no such version on a GPU, the model computes
// in another way. Without: cuDNN tries its algorithms for each input size it has not met, unless memory is
// short (--dtr): that takes much of it, and an algorithm that was tried with more does not fit later.
void set_determinism(bool on, bool memory_is_short);

// Memory of the device that this process has taken; on the CPU what is in RAM, bytes.
double memory_taken(torch::Device device);
// What torch has given out of that to tensors, the most since the last call of empty_cache(); 0 on the CPU,
// where torch does not count.
GivenOut given_out(torch::Device device);
// The most that this process has taken since then.
double memory_peak(torch::Device device);
// What this process may take in all, with what it has: 90 % of what others leave.
double memory_budget(torch::Device device);
// What a report of a crash says of the current GPU; empty where none is used.
std::string memory_report();
// Gives back what is cached and not used, and begins to look for a peak anew.
void empty_cache(torch::Device device);

}  // namespace yolox
