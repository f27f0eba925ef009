// Memory: how much there is, how much a run takes, which errors mean that there is no more, and the largest
// batch that fits.
#pragma once
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// ---- of the machine

// Bytes of memory that may still be taken: what is available, less a margin of 10 % of all memory.
// The limits of a container or job (control groups, versions 2 and 1, and those above) count as its memory.
double free_memory(const std::string& proc = "/proc", const std::string& cgroup = "/sys/fs/cgroup");

// ---- of this process

// Memory of this process that is in RAM, bytes; without the pages of files that it has mapped, which make
// room when memory runs out.
double resident_bytes();

// The most memory that this process has had in RAM since the last call of forget_peak(), bytes.
double peak_bytes();
inline void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// What is freed stays with the process, for the next step: to give it back to the system and to take it anew
// costs a page fault for each 4 kB, some percent of a step. Not where memory may run out: what is kept does
// not fit all that is asked for. Call it first.
void keep_freed_memory();
// But for once.
void give_back_freed_memory();

// What an allocator has given out, bytes: now, and the most so far; 0: that is not known.
struct GivenOut {
  double now, most = 0;
};

// ---- where it ends

// torch on a GPU, torch on the CPU, the libraries of a GPU, and everybody else.
bool is_out_of_memory(const std::exception& e);

}  // namespace yolox
