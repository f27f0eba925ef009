// SPDX-License-Identifier: Apache-2.0
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <cstring>

#include "state.hpp"

namespace simulated_cuda {

std::recursive_mutex& mutex() {
  static auto* one = new std::recursive_mutex;
  return *one;
}

// ---- device memory

Arena& arena() {
  static auto* one = new Arena;
  return *one;
}

Arena::Arena() : size(size_t(4 * kMemory)) {
  const auto map = [&](int protection) {
    void* p = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "the simulated device cannot reserve ", size, " bytes of addresses");
    return static_cast<char*>(p);
  };
  addresses = map(PROT_NONE);
  bytes = map(PROT_READ | PROT_WRITE);
  holes[bytes] = size;
}

static bool refuses_expandable_segments = false, refuses_pinned_memory = false;

Block* Arena::allocate(size_t wanted) {
  TORCH_CHECK(!refuses_expandable_segments ||
                  !c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(),
              "CUDA driver error: operation not supported");
  const size_t rounded = (wanted + 511) / 512 * 512;
  if (allocated + int64_t(rounded) > limit)
    C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", wanted,
                                               " bytes of the simulated device; its limit is ", limit,
                                               " bytes, of which ", allocated, " are allocated"));
  auto hole = holes.begin();
  while (hole != holes.end() && hole->second < rounded) ++hole;
  TORCH_CHECK(hole != holes.end(), "CUDA out of memory: no addresses left on the simulated device");
  char* at = hole->first;
  const size_t left = hole->second - rounded;
  holes.erase(hole);
  if (left > 0) holes[at + rounded] = left;
  allocated += int64_t(rounded);
  peak = std::max(peak, allocated);
  auto* block = new Block;
  block->bytes = at;
  block->size = rounded;
  block->stream = current_stream();
  note_allocation(block);
  return blocks[at] = block;
}

void Arena::free(Block* block) {
  allocated -= int64_t(block->size);
  blocks.erase(block->bytes);
  auto hole = holes.emplace(block->bytes, block->size).first;
  if (const auto next = std::next(hole); next != holes.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes.erase(next);
  }
  if (hole != holes.begin()) {
    if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
      before->second += hole->second;
      holes.erase(hole);
    }
  }
  delete block;
}

Block* Arena::block_at(const void* address) {
  if (address < addresses || address >= addresses + size) return nullptr;
  auto at = blocks.upper_bound(bytes_at(address));
  if (at == blocks.begin()) return nullptr;
  --at;
  return bytes_at(address) < at->first + at->second->size ? at->second : nullptr;
}

// ---- pending copies

static std::list<Copy>& copies() {
  static auto* all = new std::list<Copy>;
  return *all;
}
static std::map<char*, size_t>& pinned_blocks() {
  static auto* all = new std::map<char*, size_t>;
  return *all;
}
// Pinned memory that was freed while a copy from or to it was pending.
static std::set<char*>& freed_pinned() {
  static auto* all = new std::set<char*>;
  return *all;
}

static bool within(const char* p, const char* block, size_t size) { return p >= block && p < block + size; }

static void free_unused_pinned() {
  auto& blocks = pinned_blocks();
  auto& freed = freed_pinned();
  for (auto at = freed.begin(); at != freed.end();) {
    bool used = false;
    for (const Copy& c : copies()) used |= within(c.to_device ? c.from : c.to, *at, blocks[*at]);
    if (used) {
      ++at;
      continue;
    }
    std::free(*at);
    blocks.erase(*at);
    at = freed.erase(at);
  }
}

uint64_t checksum(const char* bytes, size_t size) {  // FNV-1a over words
  uint64_t hash = 1469598103934665603ull;
  while (size > 0) {
    uint64_t word = 0;
    const size_t n = std::min(size, sizeof word);
    std::memcpy(&word, bytes, n);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 29;
    bytes += n;
    size -= n;
  }
  return hash;
}

template <class Which>
static void do_copies(const Which& which) {
  auto& all = copies();
  for (auto c = all.begin(); c != all.end();) {
    if (!which(*c)) {
      ++c;
      continue;
    }
    if (c->to_device && checksum(c->from, c->size) != c->checksum)
      report_error(c10::str("pinned memory was written before an asynchronous copy of ", c->size,
                            " bytes from it was done"));
    std::memcpy(c->to, c->from, c->size);
    c = all.erase(c);
  }
  free_unused_pinned();
}

void start_copy(const Copy& copy) { copies().push_back(copy); }

bool all_done(const Clock& clock) {
  for (const Copy& c : copies())
    if (c.time <= known(clock, c.stream)) return false;
  return true;
}

void do_copies_before(const Clock& clock) {
  if (!copies().empty()) do_copies([&](const Copy& c) { return c.time <= known(clock, c.stream); });
}

void host_waits_for(const Clock& clock, const std::string& why) {
  const Lock lock(mutex());
  refuse_in_recording(why);
  do_copies_before(clock);
  count(Kind::wait, why);
}

int64_t pending_copies() {
  const Lock lock(mutex());
  return int64_t(copies().size());
}

// ---- allocators

void free_block(void* context) {
  if (!context) return;
  const Lock lock(mutex());
  auto* block = static_cast<Block*>(context);
  if (keeps(block)) return;
  if (!block->recorded.empty()) throw_if_failed();  // the caching allocator records events
  do_copies([&](const Copy& c) { return within(c.to_device ? c.to : c.from, block->bytes, block->size); });
  const Clock& own = clock_of(block->stream);
  const auto check = [&](int stream, int64_t time) {
    if (stream >= 0 && stream != block->stream && time > known(own, stream) && !block->recorded.count(stream))
      report_error(c10::str("memory of stream ", block->stream, " (", block->size, " bytes, written by ",
                            block->writer, ") is freed while stream ", stream,
                            " may still use it: record_stream() is missing"));
  };
  check(block->written_by, block->written_at);
  for (const auto& [stream, time] : block->read_at) check(stream, time);
  arena().free(block);
}

namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(c10::kCUDA, c10::DeviceIndex(current_device()));
    if (size == 0) return {nullptr, nullptr, &free_block, device};
    const Lock lock(mutex());
    Block* block = arena().allocate(size);
    std::memset(block->bytes, 0xFF, size);  // NaN shows reads of uninitialised memory
    return {arena().address_of(block->bytes), block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(arena().bytes_at(to), arena().bytes_at(from), size);
  }
};

thread_local int on_device = 0;

// The allocator of torch for the CPU, or the arena while a kernel of the simulated device runs.
// raw_allocate() needs a data pointer that equals the context, so the deleter looks the block up.
struct CpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (on_device == 0 || size == 0) return plain->allocate(size);
    const Lock lock(mutex());
    char* p = arena().allocate(size)->bytes;
    return {p, p, &free_bytes, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_bytes; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  c10::Allocator* const plain = c10::GetDefaultCPUAllocator();
};

void free_pinned(void* p) {
  if (!p) return;
  const Lock lock(mutex());
  freed_pinned().insert(static_cast<char*>(p));
  free_unused_pinned();
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    TORCH_CHECK(!refuses_pinned_memory, "CUDA error: out of memory");
    char* p = static_cast<char*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096));
    TORCH_CHECK(p, "cannot allocate ", size, " bytes of pinned memory");
    const Lock lock(mutex());
    pinned_blocks()[p] = size;
    return {p, p, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

void free_bytes(void* p) {
  if (!arena().has_bytes(p)) return c10::GetDefaultCPUAllocator()->raw_deleter()(p);
  const Lock lock(mutex());
  free_block(arena().block_of_bytes(p));
}

AllocateOnDevice::AllocateOnDevice() { ++on_device; }
AllocateOnDevice::~AllocateOnDevice() { --on_device; }

c10::Allocator* device_allocator() {
  static auto* one = new DeviceAllocator;
  return one;
}
c10::Allocator* pinned_allocator() {
  static auto* one = new PinnedAllocator;
  return one;
}

bool is_pinned(const void* p) {
  const Lock lock(mutex());
  const auto& blocks = pinned_blocks();
  auto at = blocks.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (at == blocks.begin()) return false;
  --at;
  return within(static_cast<const char*>(p), at->first, at->second);
}

[[maybe_unused]] static const bool memory_installed = [] {
  static auto* cpu = new CpuAllocator;
  c10::SetAllocator(c10::kCUDA, device_allocator());
  c10::SetCPUAllocator(cpu);
  return true;
}();

void refuse_expandable_segments(bool on) {
  const Lock lock(mutex());
  refuses_expandable_segments = on;
}

void refuse_pinned_memory(bool on) {
  const Lock lock(mutex());
  refuses_pinned_memory = on;
}

int64_t allocated() {
  const Lock lock(mutex());
  return arena().allocated;
}
int64_t peak_allocated() {
  const Lock lock(mutex());
  return arena().peak;
}
void reset_peak() {
  const Lock lock(mutex());
  arena().peak = arena().allocated;
}
void set_limit(int64_t bytes) {
  const Lock lock(mutex());
  arena().limit = bytes;
}
int64_t limit() {
  const Lock lock(mutex());
  return arena().limit;
}

}  // namespace simulated_cuda
