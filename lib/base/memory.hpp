// SPDX-License-Identifier: Apache-2.0
// Memory: free memory of the machine, memory of this process, and out-of-memory errors.
#pragma once

#include <exception>
#include <fstream>
#include <string>

namespace yolox {

// ---- the machine

// Returns the bytes that may still be allocated: the available memory minus a margin of 10 % of all memory.
// Respects the limits of the process's control group (versions 1 and 2) and of its parents, as in a container
// or a job. proc, cgroup: for tests.
double free_memory(const std::string& proc = "/proc", const std::string& cgroup = "/sys/fs/cgroup");

// ---- this process

// Returns the resident memory of this process in bytes. Pages of mapped files and of shared memory are not
// counted, because the kernel reclaims those of files when memory runs out.
double resident_bytes();

// Returns the peak resident memory of this process since the last call of reset_peak(), in bytes. Mapped
// files and shared memory are included.
double peak_bytes();
// Resets peak_bytes().
inline void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// Makes malloc keep freed memory for the next step instead of returning it to the system, because a page
// fault for each 4 kB costs up to a quarter of a step on the CPU. If the address space is limited (ulimit
// -v), returns large blocks at once, because kept ones do not fit every request. Call it before the first
// large allocation.
void keep_freed_memory();
// Returns the freed memory to the system once.
void return_freed_memory();

// ---- out of memory

// Returns true if `e` means that memory ran out, in torch, cuDNN, cuBLAS, CUDA, oneDNN or operator new.
bool is_out_of_memory(const std::exception& e);

}  // namespace yolox
