// SPDX-License-Identifier: Apache-2.0
// The state of the simulated device: counts, streams, memory, pending copies. mutex() protects all of it.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "simulated_cuda.hpp"

namespace simulated_cuda {

// Objects of this library are never destroyed, because tensors may outlive any static object.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// ---- counts
enum class Kind { call, wait, unpinned };
void count(Kind kind, const std::string& what, int64_t times = 1);
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
void join(Clock& into, const Clock& other);
int64_t known(const Clock& clock, int stream);
// Returns the cudaStream_t of a stream, which only our own launches use.
inline void* native_handle(int stream) { return reinterpret_cast<void*>(intptr_t(stream)); }

// ---- memory
struct Graph;
struct Block {
  char* bytes;
  size_t size;
  int stream;           // the stream that was current at the allocation
  int written_by = -1;  // the stream of the last write
  int64_t written_at = 0;
  std::string writer;              // the operator of the last write
  std::map<int, int64_t> read_at;  // stream -> its last read since then
  std::set<int> recorded;          // streams of record_stream()
  std::weak_ptr<Graph> graph;      // the graph that allocated it while it was recorded
};

struct Use {
  Block* block;  // may be null
  bool writes;
};
// Moves the clock of the current stream by one operation, and checks that what the operation uses is ordered
// before it.
void run_on_stream(const std::string& name, const std::vector<Use>& uses);

// Device memory is mapped twice. Tensors have addresses in the first mapping, which nobody may read or write.
// Kernels get the second one, which has the bytes.
class Arena {
 public:
  Arena();
  // Returns a new block for the current stream. Throws c10::OutOfMemoryError beyond the limit.
  Block* allocate(size_t size);
  void free(Block* block);
  Block* block_at(const void* address);  // nullptr if it is not in a block
  template <class Function>
  void for_each(const Function& f) const {
    for (const auto& [bytes, block] : blocks) f(block);
  }
  Block* block_of_bytes(void* bytes) { return blocks.at(static_cast<char*>(bytes)); }
  char* address_of(const char* byte) const { return addresses + (byte - bytes); }
  char* bytes_at(const void* address) const {
    return bytes + (static_cast<const char*>(address) - addresses);
  }
  bool has_bytes(const void* p) const { return p >= bytes && p < bytes + size; }

  int64_t allocated = 0, peak = 0;
  int64_t limit =
      std::getenv("SIMULATED_CUDA_LIMIT") ? std::atoll(std::getenv("SIMULATED_CUDA_LIMIT")) : INT64_MAX;

 private:
  size_t size;
  char *addresses, *bytes;
  std::map<char*, size_t> holes;
  std::map<char*, Block*> blocks;
};
Arena& arena();

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* p);
void free_block(void* block);  // deleter of device memory
void free_bytes(void* bytes);  // deleter of CPU memory that may be in the arena

// While one of these lives, the CPU allocator of torch allocates device memory on this thread.
struct AllocateOnDevice {
  AllocateOnDevice();
  ~AllocateOnDevice();
};

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
  char *to, *from;
  size_t size;
  bool to_device;
  int stream;
  int64_t time;       // of its stream
  uint64_t checksum;  // of the source, when the copy was started; to the device only
};
void start_copy(const Copy& copy);
bool all_done(const Clock& clock);
// Does the copies that `clock` is ordered after.
void do_copies_before(const Clock& clock);
// The same, and counts a wait of the host.
void host_waits_for(const Clock& clock, const std::string& why);
uint64_t checksum(const char* bytes, size_t size);

const at::Generator& default_generator(int device);
at::Generator cpu_generator(const at::Generator& device_generator);
void record_on_stream(const c10::DataPtr& memory, const c10::Stream& stream);

}  // namespace simulated_cuda
