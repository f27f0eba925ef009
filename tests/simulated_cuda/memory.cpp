// SPDX-License-Identifier: Apache-2.0
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "state.hpp"

namespace simulated_cuda {

std::recursive_mutex& mutex() {
  static auto* one = new std::recursive_mutex;
  return *one;
}

static int64_t bytes_now = 0, bytes_at_most = 0;
static int64_t bytes_limit = [] {
  const char *limit = std::getenv("SIMULATED_CUDA_LIMIT"), *rank = std::getenv("LOCAL_RANK");
  const bool of_this = limit && rank && std::atoi(limit) == std::atoi(rank);
  return of_this ? std::atoll(std::strchr(limit, ':') + 1) : INT64_MAX;
}();
static bool refuses_pinned_memory = false;

static bool within(const char* p, const char* block, size_t size) { return p >= block && p < block + size; }

// ---- pending copies

static std::vector<Copy>& copies() {
  static auto* all = new std::vector<Copy>;
  return *all;
}

template <class Which>
static void do_copies(const Which& which) {
  std::erase_if(copies(), [&](const Copy& c) {
    const bool now = which(c);
    if (now) std::memcpy(c.to, c.from, c.size);
    return now;
  });
}
static void do_copies_of(const char* memory, size_t size) {
  do_copies([&](const Copy& c) { return within(c.to, memory, size) || within(c.from, memory, size); });
}

void start_copy(const Copy& copy) { copies().push_back(copy); }

bool all_done(const Clock& clock) {
  for (const Copy& c : copies())
    if (c.time <= known(clock, c.stream)) return false;
  return true;
}

void do_copies_before(const Clock& clock) {
  const Lock lock(mutex());
  do_copies([&](const Copy& c) { return c.time <= known(clock, c.stream); });
}

// ---- device memory

std::map<char*, Block*>& blocks() {
  static auto* all = new std::map<char*, Block*>;
  return *all;
}

c10::DataPtr to_device(c10::DataPtr memory, size_t size) {
  const c10::Device device(c10::kCUDA, c10::DeviceIndex(current_device()));
  if (!memory || size == 0) return {nullptr, nullptr, &free_block, device};
  const Lock lock(mutex());
  if (bytes_now + int64_t(size) > bytes_limit)
    C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", size,
                                               " bytes of the simulated device; its limit is ", bytes_limit,
                                               " bytes, of which ", bytes_now, " are allocated"));
  bytes_now += int64_t(size);
  bytes_at_most = std::max(bytes_at_most, bytes_now);
  auto* block = new Block{std::move(memory), size, current_stream()};
  if (!recording()) {
    block->written_by = block->stream;
    block->written_at = known(clock_of(block->stream), block->stream);
  }
  note_allocation(block);
  blocks()[block->bytes()] = block;
  return {block->bytes() + kDeviceOffset, block, &free_block, device};
}

Block* block_at(const void* address) {
  if (uintptr_t(address) < kDeviceOffset) return nullptr;
  const char* bytes = bytes_at(address);
  auto at = blocks().upper_bound(const_cast<char*>(bytes));
  if (at == blocks().begin()) return nullptr;
  --at;
  return within(bytes, at->first, at->second->size) ? at->second : nullptr;
}

void erase(Block* block) {
  bytes_now -= int64_t(block->size);
  blocks().erase(block->bytes());
  delete block;
}

void free_block(void* context) {
  if (!context) return;
  const Lock lock(mutex());
  auto* block = static_cast<Block*>(context);
  if (keeps(block)) return;
  if (!block->recorded.empty()) throw_if_failed();  // the caching allocator records events
  do_copies_of(block->bytes(), block->size);
  const Clock& own = clock_of(block->stream);
  const auto check = [&](int stream, int64_t time) {
    if (stream >= 0 && stream != block->stream && time > known(own, stream) && !block->recorded.count(stream))
      report_error(c10::str("memory of stream ", block->stream, " (", block->size, " bytes, written by ",
                            block->writer, ") is freed while stream ", stream,
                            " may still use it: record_stream() is missing"));
  };
  check(block->written_by, block->written_at);
  for (const auto& [stream, time] : block->read_at) check(stream, time);
  erase(block);
}

// ---- allocators

namespace {

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr memory = c10::GetDefaultCPUAllocator()->allocate(size);
    if (size > 0) std::memset(memory.get(), 0xFF, size);  // NaN shows reads of uninitialised memory
    return to_device(std::move(memory), size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(bytes_at(to), bytes_at(from), size);
  }
};

std::map<char*, size_t>& pinned_blocks() {
  static auto* all = new std::map<char*, size_t>;
  return *all;
}

void free_pinned(void* p) {
  if (!p) return;
  const Lock lock(mutex());
  const auto at = pinned_blocks().find(static_cast<char*>(p));
  do_copies_of(at->first, at->second);
  pinned_blocks().erase(at);
  std::free(p);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(!refuses_pinned_memory, "CUDA error: out of memory");
    void* p = size > 0 ? std::aligned_alloc(4096, (size + 4095) / 4096 * 4096) : nullptr;
    const Lock lock(mutex());
    if (p) pinned_blocks()[static_cast<char*>(p)] = size;
    return {p, p, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

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
  const auto& all = pinned_blocks();
  auto at = all.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (at == all.begin()) return false;
  --at;
  return within(static_cast<const char*>(p), at->first, at->second);
}

[[maybe_unused]] static const bool memory_installed = [] {
  c10::SetAllocator(c10::kCUDA, device_allocator());
  return true;
}();

void refuse_pinned_memory(bool on) { refuses_pinned_memory = on; }
int64_t allocated() { return bytes_now; }
int64_t peak_allocated() { return bytes_at_most; }
void reset_peak() { bytes_at_most = bytes_now; }
void set_limit(int64_t bytes) { bytes_limit = bytes; }
int64_t limit() { return bytes_limit; }

}  // namespace simulated_cuda
