// SPDX-License-Identifier: Apache-2.0
#include "base/device.hpp"

#include <ATen/native/ConvUtils.h>
#include <c10/core/AllocatorConfig.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.hpp"

namespace yolox {

// What CUDA says about a GPU.
struct Gpu {
  std::string name, uuid, pci_address;
  int major = 0, minor = 0;  // compute capability
};

// Returns nothing for the CPU.
static std::optional<Gpu> gpu_of([[maybe_unused]] torch::Device device) {
#ifdef YOLOX_CUDA
  cudaDeviceProp p;
  if (!device.is_cuda() || cudaGetDeviceProperties(&p, device.index()) != cudaSuccess) return {};
  std::string uuid = "GPU-";
  for (const char byte : p.uuid.bytes) uuid += formatted("%02x", unsigned(byte) & 255);
  const std::string address =
      formatted("%04x:%02x:%02x", unsigned(p.pciDomainID), unsigned(p.pciBusID), unsigned(p.pciDeviceID));
  return Gpu{p.name, uuid, address, p.major, p.minor};
#else
  return {};
#endif
}

// Bytes of the current GPU. Both are 0 if `device` is the CPU.
struct GpuMemory {
  double free = 0, total = 0;
};
static GpuMemory memory_of_gpu([[maybe_unused]] torch::Device device) {
#ifdef YOLOX_CUDA
  size_t free = 0, total = 0;
  if (device.is_cuda() && cudaMemGetInfo(&free, &total) == cudaSuccess) return {double(free), double(total)};
#endif
  return {};
}

bool has_gpu() {
  if (torch::cuda::is_available()) return true;
#ifdef YOLOX_CUDA
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool hidden = visible && (*visible == 0 || *visible == '-');  // "" or -1
  usage_check(hidden || !std::filesystem::exists("/proc/driver/nvidia/version"),
              "this machine has an NVIDIA driver, but no GPU can be used: the driver is too old for this "
              "build, or the container was started without --gpus all; see docs/install.md, or give --device "
              "cpu to use the CPU");
#endif
  return false;
}

torch::Device parse_device(const std::string& name) {
  if (name == "auto") return parse_device(has_gpu() ? "cuda" : "cpu");
  if (name == "cpu") return torch::kCPU;
  const std::string number = name == "cuda" ? "0" : name.rfind("cuda:", 0) == 0 ? name.substr(5) : "";
  usage_check(
      !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos,
      "--device must be auto, cpu, cuda or cuda:N, got '", name, "'",
      !name.empty() && name.find_first_not_of("0123456789") == std::string::npos
          ? concat("; write cuda:", name)
          : "");
  usage_check(
      has_gpu(), "--device ", name,
      ": this build cannot use a GPU; check nvidia-smi and run ./setup.sh again, or use --device cpu");
  const int index = std::atoi(number.c_str());
  usage_check(index < int(torch::cuda::device_count()), "--device ", name, ": there are ",
              int(torch::cuda::device_count()), " GPUs");
#ifdef YOLOX_CUDA
  c10::cuda::set_device(c10::DeviceIndex(index));
#endif
  use_expandable_segments();
  const torch::Device device(torch::kCUDA, c10::DeviceIndex(index));
  try {
    torch::ones({1}, device);
  } catch (const c10::OutOfMemoryError&) {  // the GPU is full; whoever needs memory will report it
  } catch (const c10::Error& e) {
    const auto gpu = gpu_of(device).value_or(Gpu());
    usage_check(std::string(e.what()).find("no kernel image") == std::string::npos, "--device ", name,
                ": this LibTorch has no kernels for ", device_name(device), "; run YOLOX_CARD=", gpu.major,
                ".", gpu.minor, " ./setup.sh, which installs another one, or use --device cpu");
    throw;
  }
  allow_tf32(false);
  return device;
}

void use_expandable_segments() {
#ifdef YOLOX_CUDA
  if (std::getenv("PYTORCH_ALLOC_CONF") || std::getenv("PYTORCH_CUDA_ALLOC_CONF")) return;
  // The driver of WSL 2 fails to map memory, at once or only later.
  std::string kernel;
  std::getline(std::ifstream("/proc/sys/kernel/osrelease"), kernel);
  if (kernel.find("microsoft") != std::string::npos) return;
  c10::CachingAllocator::setAllocatorSettings("expandable_segments:True");
  try {
    torch::empty({1 << 22}, torch::TensorOptions(torch::kByte).device(torch::kCUDA));
  } catch (const c10::OutOfMemoryError&) {  // the GPU is full; whoever needs memory will report it
  } catch (const c10::Error&) {
    c10::CachingAllocator::setAllocatorSettings("expandable_segments:False");
    torch::empty({1 << 22}, torch::TensorOptions(torch::kByte).device(torch::kCUDA));  // throws other errors
  }
#endif
}

std::string device_name(torch::Device device) {
  const auto gpu = gpu_of(device);
  return gpu ? concat(device.str(), " (", gpu->name, ")") : device.str();
}

std::string gpu_uuid(torch::Device device) { return gpu_of(device).value_or(Gpu()).uuid; }

std::string gpu_pci_address(torch::Device device) { return gpu_of(device).value_or(Gpu()).pci_address; }

double gpu_memory(torch::Device device) { return memory_of_gpu(device).total; }

std::string memory_of_others(torch::Device device) {
  const auto [free, total] = memory_of_gpu(device);
  if (total == 0) return "";
  // CUDA and its libraries use up to about 2 GB in this process.
  const double held = total - free - memory_used(device);
  if (held < std::max(3e9, 0.05 * total)) return "";
  return concat("other processes hold ", short_bytes(held), " of the GPU's ", short_bytes(total),
                "; nvidia-smi lists them");
}

std::string hardware_name([[maybe_unused]] torch::Device device) {
  std::string name = "CPU";
#ifdef YOLOX_CUDA
  int driver = 0;
  if (const auto gpu = gpu_of(device)) {
    cudaDriverGetVersion(&driver);
    name = concat(gpu->name, ", driver for CUDA ", driver / 1000, ".", driver % 1000 / 10);
  }
#endif
  return concat(name, ", ", torch::get_num_threads(), torch::get_num_threads() == 1 ? " thread" : " threads");
}

std::string default_precision(torch::Device device) {
  const auto gpu = gpu_of(device);
  return gpu ? precision_of_gpu(gpu->major, gpu->minor, gpu->name) : "off";
}

std::string precision_of_gpu(int major, int minor, const std::string& name) {
  if (major >= 8) return "bf16";
  if (major == 7 && minor == 5) {
    std::istringstream words(name);
    for (std::string word; words >> word;)
      for (const char* without : {"1630", "1650", "1660", "MX450", "MX550", "T400", "T500", "T550", "T600",
                                  "T1000", "T1200", "T2000"})
        if (word == without) return "off";
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
  if (device.is_cuda()) return 0.9 * (memory_of_gpu(device).free + memory_used(device));
  return free_memory() + resident_bytes();  // free_memory() has subtracted its margin of 10 % already
}

std::string memory_report() {
  std::string text = concat("process: ", short_bytes(resident_bytes()), ", peak ", short_bytes(peak_bytes()));
#ifdef YOLOX_CUDA
  try {
    if (!torch::cuda::is_available() || !c10::cuda::CUDACachingAllocator::get()->initialized()) return text;
    const torch::Device device(torch::kCUDA, c10::cuda::current_device());
    text += concat("\n", device_name(device), ": ", short_bytes(memory_used(device)), " reserved, peak ",
                   short_bytes(memory_peak(device)));
  } catch (const std::exception&) {  // the GPU may be the cause of the crash
  }
#endif
  return text;
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
