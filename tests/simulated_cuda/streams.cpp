// SPDX-License-Identifier: Apache-2.0
// Counts, streams and events, and what torch asks CUDA for without being linked with it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstdlib>

#include "state.hpp"

namespace simulated_cuda {

using c10::Device;
using c10::DeviceIndex;
using c10::kCUDA;
using c10::Stream;

// ---- counts

struct Counts {
  int64_t calls = 0;
  std::vector<std::string> waits, errors;
};
static Counts& counts() {
  static auto* one = new Counts;
  return *one;
}

void count_call() {
  const Lock lock(mutex());
  ++counts().calls;
}
void host_waits_for(const std::string& why) {
  const Lock lock(mutex());
  refuse_in_recording(why);
  counts().waits.push_back(why);
}
void report_error(const std::string& what) {
  const Lock lock(mutex());
  if (counts().errors.size() < 1000) counts().errors.push_back(what);
}
int64_t operator_calls() { return counts().calls; }
std::vector<std::string> host_waits() { return counts().waits; }
std::vector<std::string> errors() { return std::exchange(counts().errors, {}); }
void reset_counts() {
  counts().calls = 0;
  counts().waits.clear();
}

static std::atomic<const char*> failed{nullptr};
static bool hangs = false;

void fail_from_now_on(const char* error) { failed = error; }
void hang() { hangs = true; }
void throw_if_failed() { TORCH_CHECK(!failed, failed.load()); }

// ---- streams

static thread_local DeviceIndex device_now = 0;
static thread_local std::map<int, int> stream_now;  // device -> stream of that device

static int device_count() {
  static const char* const text = std::getenv("SIMULATED_CUDA_DEVICES");
  return text ? std::atoi(text) : 1;
}
int current_device() { return device_now; }
int current_stream() { return device_now * kStreams + stream_now[device_now]; }

Clock& clock_of(int stream) {
  static auto* clocks = new std::map<int, Clock>;
  return (*clocks)[stream];
}
static void join(Clock& into, const Clock& other) {
  for (const auto& [stream, time] : other) into[stream] = std::max(into[stream], time);
}
int64_t known(const Clock& clock, int stream) {
  const auto at = clock.find(stream);
  return at == clock.end() ? 0 : at->second;
}

void run_on_stream(const std::string& name, const std::vector<Use>& uses) {
  if (recording()) return;  // it runs in the replays
  const Lock lock(mutex());
  const int stream = current_stream();
  Clock& clock = clock_of(stream);
  const int64_t time = ++clock[stream];
  for (const Use& use : uses) {
    Block* b = use.block;
    if (!b) continue;
    const auto check = [&](int other, int64_t at, const char* did) {
      if (other >= 0 && other != stream && at > known(clock, other))
        report_error(c10::str(name, " on stream ", stream, use.writes ? " writes" : " reads", " what stream ",
                              other, did, " (", b->writer, ") without waiting for it"));
    };
    check(b->written_by, b->written_at, " wrote");
    if (!use.writes) {
      b->read_at[stream] = time;
      continue;
    }
    for (const auto& [other, at] : b->read_at) check(other, at, " reads");
    b->read_at.clear();
    b->written_by = stream;
    b->written_at = time;
    b->writer = name;
  }
}

namespace {

int number_of(const Stream& s) { return int(s.device_index()) * kStreams + int(s.id()); }
int index_of(Device d) { return d.index() < 0 ? device_now : d.index(); }
Stream stream_of(int device, int id) {
  return Stream(Stream::UNSAFE, Device(kCUDA, DeviceIndex(device)), id);
}

struct Event {
  int stream;
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return Device(kCUDA, device_now); }
  Device exchangeDevice(Device d) const override {
    const Device before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.is_cuda() && d.index() < device_count(), "the simulated machine has no ", d);
    if (d.index() >= 0) device_now = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) device_now = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }

  Stream getStream(Device d) const override { return stream_of(index_of(d), stream_now[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream_of(index_of(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    static std::atomic<int> next{0};
    return stream_of(index_of(d), 1 + next++ % (kStreams - 1));
  }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    stream_now[s.device_index()] = int(s.id());
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return native_handle(number_of(s)); }
  void synchronizeDevice(DeviceIndex device) const override {
    throw_if_failed();
    const Lock lock(mutex());
    const int index = device < 0 ? device_now : device;
    host_waits_for("synchronisation of the device");
    for (int i = 0; i < kStreams; ++i) do_copies_before(clock_of(index * kStreams + i));
  }

  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    throw_if_failed();
    const Lock lock(mutex());
    if (!*event) *event = new Event;
    Clock& clock = clock_of(number_of(s));
    ++clock[number_of(s)];
    *static_cast<Event*>(*event) = {number_of(s), clock};
  }
  void block(void* event, const Stream& s) const override {
    throw_if_failed();
    const Lock lock(mutex());
    if (event) join(clock_of(number_of(s)), static_cast<Event*>(event)->clock);
  }
  // A query that finds the event not done counts as a wait, because the host asks again.
  bool queryEvent(void* event) const override {
    const Lock lock(mutex());
    if (!event || (all_done(static_cast<Event*>(event)->clock) && !hangs)) return true;
    if (!hangs) synchronizeEvent(event);
    return false;
  }
  void synchronizeEvent(void* event) const override {
    throw_if_failed();
    if (!event) return;
    refuse_in_recording("synchronisation of an event");
    const Lock lock(mutex());
    const auto* e = static_cast<Event*>(event);
    // If the stream has later work, the GPU stays busy while the host waits.
    if (known(clock_of(e->stream), e->stream) <= known(e->clock, e->stream))
      host_waits_for("synchronisation of an event");
    do_copies_before(e->clock);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& s) const override {
    record_on_stream(memory, s);
  }
};
const Guard& guard() {
  static auto* one = new Guard;
  return *one;
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return device_now; }
  // Random numbers of the device are those of the CPU.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  long versionCuDNN() const override { return 0; }  // there is no cuDNN; the default throws
  long versionRuntimeCuDNN() const override { return 0; }
  std::string showConfig() const override { return "simulated CUDA"; }
  void deviceSynchronize(DeviceIndex i) const override { guard().synchronizeDevice(i); }
};

}  // namespace

void record_on_stream(const c10::DataPtr& memory, const Stream& stream) {
  const Lock lock(mutex());
  if (Block* b = block_at(memory.get())) b->recorded.insert(number_of(stream));
}

[[maybe_unused]] static const bool hooks_installed = [] {
  c10::impl::registerDeviceGuard(kCUDA, &guard());
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](const at::CUDAHooksArgs&) {
    return std::unique_ptr<at::CUDAHooksInterface>(std::make_unique<Hooks>());
  });
  return true;
}();

}  // namespace simulated_cuda
