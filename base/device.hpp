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
inline torch::Device parse_device(const std::string& name) {
  if (name == "auto") return parse_device(torch::cuda::is_available() ? "cuda" : "cpu");
  if (name == "cpu") return torch::kCPU;
  const std::string number = name == "cuda" ? "0" : name.rfind("cuda:", 0) == 0 ? name.substr(5) : "";
  usage_check(
      !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos,
      "--device takes auto, cpu, cuda or cuda:N, got '", name, "'");
  usage_check(torch::cuda::is_available(), "--device ", name,
              ": no GPU is usable by this build; see nvidia-smi, and ./setup.sh builds for the GPU where the "
              "CUDA toolkit is; or use --device cpu");
  const int index = std::atoi(number.c_str());
  usage_check(index < int(torch::cuda::device_count()), "--device ", name, ": there are ",
              int(torch::cuda::device_count()), " GPUs");
#ifdef YOLOX_CUDA
  c10::cuda::set_device(c10::DeviceIndex(index));
#endif
  return torch::Device(torch::kCUDA, c10::DeviceIndex(index));
}

// "cpu", "cuda:0 (NVIDIA H200)"
inline std::string device_name(torch::Device device) {
#ifdef YOLOX_CUDA
  cudaDeviceProp properties;
  if (device.is_cuda() && cudaGetDeviceProperties(&properties, device.index()) == cudaSuccess)
    return concat(device.str(), " (", properties.name, ")");
#endif
  return device.str();
}

// Where a GPU sits in its machine, "0000:1B:00.0"; empty for the CPU.
inline std::string gpu_address(torch::Device device) {
#ifdef YOLOX_CUDA
  char text[32] = "";
  if (device.is_cuda() && cudaDeviceGetPCIBusId(text, sizeof text, device.index()) == cudaSuccess)
    return text;
#endif
  (void)device;
  return "";
}

// With determinism: the same bytes each time; what of torch has no such version on a GPU, the model computes
// in another way. Without: cuDNN tries its algorithms for each input size it has not met, unless memory is
// short (--dtr): that takes much of it, and an algorithm that was tried with more does not fit later.
inline void set_determinism(bool on, bool memory_is_short) {
  at::globalContext().setBenchmarkCuDNN(!on && !memory_is_short);
  if (!on) return;
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicCuDNN(true);
}

// Memory of the device that this process has taken; on the CPU what is in RAM, bytes.
inline double memory_taken(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda())
    return double(c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).reserved_bytes[0].current);
#endif
  (void)device;
  return resident_bytes();
}
// What torch has given out of that to tensors, the most since the last call of empty_cache(); 0 on the CPU,
// where torch does not count.
inline GivenOut given_out(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    const auto bytes = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0];
    return {double(bytes.current), double(bytes.peak)};
  }
#endif
  (void)device;
  return {0, 0};
}
// The most that this process has taken since then.
inline double memory_peak(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda())
    return double(c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).reserved_bytes[0].peak);
#endif
  (void)device;
  return peak_bytes();
}
// What this process may take in all, with what it has: 90 % of what others leave.
inline double memory_budget(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);  // of the current device
    return 0.9 * (double(free) + memory_taken(device));
  }
#endif
  (void)device;
  return free_memory() + resident_bytes();  // the former leaves out a tenth
}
// What a report of a crash says of the current GPU; empty where none is used.
inline std::string memory_report() {
#ifdef YOLOX_CUDA
  try {
    if (!torch::cuda::is_available() || !c10::cuda::CUDACachingAllocator::get()->initialized()) return "";
    const torch::Device device(torch::kCUDA, c10::cuda::current_device());
    return concat(device_name(device), ": ", memory_taken(device) / 1e9, " GB taken, ",
                  memory_peak(device) / 1e9, " GB at most");
  } catch (const std::exception&) {  // the GPU is what failed
  }
#endif
  return "";
}
// Gives back what is cached and not used, and begins to look for a peak anew.
inline void empty_cache(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
  }
#endif
  if (device.is_cpu()) give_back_freed_memory(), forget_peak();
}

}  // namespace yolox
