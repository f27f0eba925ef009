// SPDX-License-Identifier: Apache-2.0
// The state of the simulated device: counts, streams, memory, pending copies. mutex() protects all of it.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "simulated_cuda.hpp"

namespace simulated_cuda {

// Objects of this library are never destroyed, because tensors may outlive any static object.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

void count_call();
void report_error(const std::string& what);
void throw_if_failed();  // after fail_from_now_on()

// ---- streams. A stream has a number: 64 per device, of which the first is the default stream.
//
// Kernels run synchronously on the host, in the order in which they are launched. Vector clocks record the
// order that a GPU would guarantee: each stream counts its operations, and an event carries the counts that
// it is ordered after.
constexpr int kStreams = 64;
using Clock = std::map<int, int64_t>;  // stream number -> operations of that stream known to be done

int current_device();
int current_stream();
Clock& clock_of(int stream);
int64_t known(const Clock& clock, int stream);
// Returns the cudaStream_t of a stream, which only our own launches use.
inline void* native_handle(int stream) { return reinterpret_cast<void*>(intptr_t(stream)); }

// ---- memory. The address of a byte on the device is that on the host plus an offset. No processor lets a
// program use such an address. Kernels get the address on the host.
constexpr uintptr_t kDeviceOffset = uintptr_t{1} << 54;
inline char* bytes_at(const void* address) {
  return reinterpret_cast<char*>(uintptr_t(address) - kDeviceOffset);
}

struct Graph;
struct Block {
  c10::DataPtr memory;  // on the host
  size_t size;
  int stream;           // the stream that was current at the allocation
  int written_by = -1;  // the stream of the last write, at first of the allocation
  int64_t written_at = 0;
  std::string writer = "allocation";  // the operator of the last write
  std::map<int, int64_t> read_at;     // stream -> its last read since then
  std::set<int> recorded;             // streams of record_stream()
  std::weak_ptr<Graph> graph;         // the graph that allocated it while it was recorded

  char* bytes() const { return static_cast<char*>(memory.get()); }
};
std::map<char*, Block*>& blocks();  // by address on the host

// Turns memory of the host into a new block of the current stream. Throws c10::OutOfMemoryError beyond the
// limit.
c10::DataPtr to_device(c10::DataPtr memory, size_t size);
Block* block_at(const void* address);  // of the device; nullptr if it is not in a block
void erase(Block* block);

struct Use {
  Block* block;  // may be null
  bool writes;
};
// Moves the clock of the current stream by one operation, and checks that what the operation uses is ordered
// before it.
void run_on_stream(const std::string& name, const std::vector<Use>& uses);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* p);
void free_block(void* block);  // deleter of device memory
void record_on_stream(const c10::DataPtr& memory, const c10::Stream& stream);

// ---- CUDA graphs, see graphs.cpp

// Returns true if work of this thread goes into a graph that is being recorded.
bool recording();
// Throws, and makes the recorded graph useless, if work of this thread goes into a graph: the host cannot
// wait for work that does not run.
void refuse_in_recording(const std::string& what);
void note_allocation(Block* block);
// Returns true if the memory of a block that is freed stays with its graph.
bool keeps(Block* block);

// ---- asynchronous copies between pinned memory and the device
struct Copy {
  char *to, *from;  // on the host
  size_t size;
  int stream;
  int64_t time;  // of its stream
};
void start_copy(const Copy& copy);
bool all_done(const Clock& clock);
// Does the copies that `clock` is ordered after.
void do_copies_before(const Clock& clock);
// Counts a wait of the host, which is impossible while a graph is recorded.
void host_waits_for(const std::string& why);

}  // namespace simulated_cuda
