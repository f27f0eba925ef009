// What operations cost on a GPU, which the host does not wait for: measured by marks in the device's queue
// of work, read when the device has long passed them.
#pragma once
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "dtr/record.hpp"

namespace yolox {

// A guess, seconds, by what an operation computes and what it moves. Speeds are those of a large GPU; their
// ratio is what counts.
double guessed_cost(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given,
                    c10::ArrayRef<c10::IValue> results);

// A moment in the device's work.
struct DeviceMark {
  virtual ~DeviceMark() = default;
  virtual bool passed() const = 0;                                    // never waits
  virtual double seconds_since(const DeviceMark& earlier) const = 0;  // of two that have passed
};

// The end of what the current stream has been given so far.
struct StreamMark : DeviceMark {
  explicit StreamMark(c10::DeviceType device);
  bool passed() const override { return event.query(); }
  double seconds_since(const DeviceMark& earlier) const override {
    return 1e-3 * static_cast<const StreamMark&>(earlier).event.elapsedTime(event);
  }
  c10::Event event;
};

// For DtrSettings::cost. An operation costs what it took at least, of the first times that it was done with
// arguments of these shapes. The very first does not count: a kernel may have had to be loaded, or an
// algorithm chosen. Before that is known, a guess.
class DeviceCosts {
 public:
  using Mark = std::function<std::unique_ptr<DeviceMark>()>;
  explicit DeviceCosts(Mark mark) : mark(std::move(mark)) {}

  std::function<double(c10::ArrayRef<c10::IValue>)> operator()(const c10::OperatorHandle& operation,
                                                               c10::ArrayRef<c10::IValue> given);

 private:
  struct Known {
    double seconds = 0;
    int times = 0;
  };
  struct Waiting {
    size_t key;
    std::shared_ptr<DeviceMark> before, after;
  };
  static constexpr int kTimes = 4;

  // What the device has come to, in order.
  void read_passed();
  // Of an operation and the shapes and types that it is given.
  static size_t key_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given);

  Mark mark;
  std::unordered_map<size_t, Known> known;
  std::deque<Waiting> waiting;
};

}  // namespace yolox
