// SPDX-License-Identifier: Apache-2.0
#include "base/device.hpp"

#include <ATen/native/ConvUtils.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

#include "base/memory.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"

namespace yolox {

// What CUDA says about a GPU.
struct Gpu {
  std::string name, address;  // PCI
  int major = 0, minor = 0;   // compute capability
};

// Returns an empty Gpu for the CPU.
static Gpu gpu_of([[maybe_unused]] torch::Device device) {
#ifdef YOLOX_CUDA
  cudaDeviceProp p;
  if (!device.is_cuda() || cudaGetDeviceProperties(&p, device.index()) != cudaSuccess) return {};
  const std::string address =
      formatted("%04x:%02x:%02x", unsigned(p.pciDomainID), unsigned(p.pciBusID), unsigned(p.pciDeviceID));
  return {p.name, address, p.major, p.minor};
#else
  return {};
#endif
}

// Returns the free and the total bytes of the current GPU, or 0, 0 if `device` is the CPU.
static std::pair<double, double> memory_of_gpu([[maybe_unused]] torch::Device device) {
  size_t free = 0, total = 0;
#ifdef YOLOX_CUDA
  if (device.is_cuda()) cudaMemGetInfo(&free, &total);
#endif
  return {double(free), double(total)};
}

bool has_gpu() {
  if (torch::cuda::is_available()) return true;
#ifdef YOLOX_CUDA
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool hidden = visible && (*visible == 0 || *visible == '-');  // "" or -1
  usage_check(hidden || !std::filesystem::exists("/proc/driver/nvidia/version"),
              "torch cannot use the GPU of this machine; see docs/install.md, or give --device cpu");
#endif
  return false;
}

torch::Device parse_device(const std::string& name) {
  if (name == "auto") return parse_device(has_gpu() ? "cuda" : "cpu");
  if (name == "cpu") return torch::kCPU;
  int index = 0, read = 0;
  usage_check(name == "cuda" || (std::sscanf(name.c_str(), "cuda:%3d%n", &index, &read) == 1 && index >= 0 &&
                                 size_t(read) == name.size()),
              "--device must be auto, cpu, cuda or cuda:N, got '", name, "'");
  usage_check(has_gpu(), "--device ", name, ": this build cannot use a GPU; see docs/install.md");
  usage_check(index < int(torch::cuda::device_count()), "--device ", name, ": there are ",
              int(torch::cuda::device_count()), " GPUs");
  const torch::Device device(torch::kCUDA, c10::DeviceIndex(index));
  c10::impl::VirtualGuardImpl(torch::kCUDA).setDevice(device);
  // The driver of WSL 2 fails to map memory, at once or only later.
  std::string kernel;
  std::getline(std::ifstream("/proc/sys/kernel/osrelease"), kernel);
  const bool expands = !std::getenv("PYTORCH_ALLOC_CONF") && !std::getenv("PYTORCH_CUDA_ALLOC_CONF") &&
                       kernel.find("microsoft") == std::string::npos;
  if (expands) c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  for (const bool is_last : {!expands, true}) try {
      torch::ones({1 << 20}, device);
      break;
    } catch (const c10::OutOfMemoryError&) {  // the GPU is full; whoever needs memory will report it
      break;
    } catch (const c10::Error& e) {
      usage_check(std::string(e.what()).find("no kernel image") == std::string::npos, "--device ", name,
                  ": this LibTorch has no kernels for ", device_name(device), "; see docs/install.md");
      if (is_last) throw;
      // Some virtual GPUs cannot map memory in parts.
      c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
    }
  allow_tf32(false);
  return device;
}

std::string device_name(torch::Device device) {
  const Gpu gpu = gpu_of(device);
  return gpu.name.empty() ? device.str() : concat(device.str(), " (", gpu.name, ")");
}

std::string gpu_address(torch::Device device) { return gpu_of(device).address; }

double gpu_memory(torch::Device device) { return memory_of_gpu(device).second; }

std::string default_precision(torch::Device device) {
  const Gpu gpu = gpu_of(device);
  return gpu.name.empty() ? "off" : precision_of_gpu(gpu.major, gpu.minor, gpu.name);
}

std::string precision_of_gpu(int major, int minor, const std::string& name) {
  if (major >= 8) return "bf16";
  if (major == 7 && minor == 5) {
    for (const char* without : {"1630", "1650", "1660", "MX450", "MX550", "T400", "T500", "T550", "T600",
                                "T1000", "T1200", "T2000"})
      if ((name + ' ').find(concat(' ', without, ' ')) != std::string::npos) return "off";
  }
  return "fp16";
}

void allow_tf32(bool on) {
  at::globalContext().setAllowTF32CuDNN(on);
  at::globalContext().setAllowTF32CuBLAS(on);
}

void use_cudnn_benchmark(bool on) {
  at::globalContext().setBenchmarkCuDNN(on);
  at::globalContext().setBenchmarkLimitCuDNN(4);
  // Otherwise each new convolution returns all cached memory to the driver.
  at::native::_cudnn_set_conv_benchmark_empty_cache(false);
}

void use_deterministic_algorithms() {
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicCuDNN(true);
  // Every new tensor would be filled with NaN. The code reads no uninitialised memory, so this changes no
  // result.
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

int fastest_threads(const std::function<double()>& seconds) {
  int best = torch::get_num_threads();
  for (const char* name : {"OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"})
    if (std::getenv(name)) return best;
  double least = std::numeric_limits<double>::infinity();
  for (int n = std::min(usable_cores(), best); n > 0; n /= 2) {
    torch::set_num_threads(n);
    seconds();  // prepares the kernels for this number
    double time = seconds();
    if (time < 1) time = std::min(time, seconds());  // a short one may be disturbed
    if (time > 1.3 * least) break;
    if (time < 1.05 * least) best = n;  // of equal ones the smaller number
    least = std::min(least, time);
  }
  torch::set_num_threads(best);
  return best;
}

// Returns the bytes in blocks of torch's allocator on a GPU, and of them those that tensors have. 0 on the
// CPU.
static std::pair<AllocatedBytes, AllocatedBytes> bytes_on_gpu([[maybe_unused]] torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    const auto &all = stats.reserved_bytes[0], &used = stats.allocated_bytes[0];
    return {{double(all.current), double(all.peak)}, {double(used.current), double(used.peak)}};
  }
#endif
  return {};
}

double memory_used(torch::Device device) {
  return device.is_cuda() ? bytes_on_gpu(device).first.now : resident_bytes();
}
double memory_peak(torch::Device device) {
  return device.is_cuda() ? bytes_on_gpu(device).first.peak : peak_bytes();
}
AllocatedBytes allocated_bytes(torch::Device device) { return bytes_on_gpu(device).second; }

double memory_budget(torch::Device device) {
  if (device.is_cuda()) return 0.9 * (memory_of_gpu(device).first + memory_used(device));
  return free_memory() + resident_bytes();  // free_memory() has subtracted its margin of 10 % already
}

void empty_cache(torch::Device device) {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
  }
#endif
  if (device.is_cpu()) {
    return_freed_memory();
    reset_peak();
  }
}

}  // namespace yolox
