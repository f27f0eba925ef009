// SPDX-License-Identifier: Apache-2.0
// Cost of operations on a GPU. The host runs ahead of the GPU, so that events in the stream measure the time.
// The events are read later, when the GPU has passed them, and the host never waits.
#pragma once
#include <c10/core/Event.h>
#include <torch/torch.h>

#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>

namespace yolox {

// Returns an estimate of the duration of an operation in seconds, from its FLOPs (convolutions) and the bytes
// of its arguments and results. The speeds are those of a large GPU. Only the ratio of costs matters.
double estimated_cost(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given,
                      c10::ArrayRef<c10::IValue> results);

// An event in the stream of a device. An interface, so that tests can replace it.
struct DeviceEvent {
  virtual ~DeviceEvent() = default;
  virtual bool passed() const = 0;  // the device has reached it; never waits
  virtual double seconds_since(const DeviceEvent& earlier) const = 0;  // both must have passed
};

// An event that is recorded at the end of the current stream.
struct StreamEvent : DeviceEvent {
  explicit StreamEvent(c10::DeviceType device);
  bool passed() const override { return event.query(); }
  double seconds_since(const DeviceEvent& earlier) const override {
    return 1e-3 * static_cast<const StreamEvent&>(earlier).event.elapsedTime(event);
  }
  c10::Event event;
};

// Implementation of DtrSettings::cost for a GPU. The cost is the shortest duration among the first kTimes
// calls of an operation with the same types and shapes. The first call does not count, because it may load a
// kernel or choose an algorithm. Until a duration is known, the cost is estimated_cost().
class DeviceCosts {
 public:
  using Mark = std::function<std::unique_ptr<DeviceEvent>()>;
  explicit DeviceCosts(Mark mark) : mark(std::move(mark)) {}

  std::function<double(c10::ArrayRef<c10::IValue>)> operator()(const c10::OperatorHandle& operation,
                                                               c10::ArrayRef<c10::IValue> given);

 private:
  struct Measurement {
    double seconds = 0;
    int times = 0;
  };
  struct PendingMeasurement {
    size_t key;
    std::shared_ptr<DeviceEvent> before, after;
  };
  static constexpr int kTimes = 4;

  // Reads the events that the device has passed, in order.
  void read_finished_events();
  // Returns a hash of an operation with the types, shapes and integers of its arguments.
  static size_t key_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given);

  Mark mark;
  std::unordered_map<size_t, Measurement> known;
  std::deque<PendingMeasurement> waiting;
};

}  // namespace yolox
