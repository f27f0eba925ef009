// SPDX-License-Identifier: Apache-2.0
#include "dtr/budget.hpp"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "dtr/record.hpp"

namespace yolox {

double AutomaticBudget::next(double live, double free, int64_t out_of_memory) {
  if (out_of_memory > 0) {
    share *= 0.95;
    steps_since_oom = 0;
  } else if (++steps_since_oom % 100 == 0)
    share = std::min(1.0, 1.02 * share);
  const double all = share * (live + std::max(0.0, free));
  return budget = budget == 0 || all < budget ? all : budget + 0.1 * (all - budget);
}

double estimated_cost(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given,
                      c10::ArrayRef<c10::IValue> results) {
  double bytes = 0;
  std::vector<torch::Tensor> in, out;
  for (const auto& [values, tensors] : {std::pair(given, &in), std::pair(results, &out)})
    for (const auto& value : values)
      dtr_detail::each_tensor(value, [&, all = tensors](const torch::Tensor& t) {
        if (t.defined()) {
          bytes += double(t.numel()) * double(t.element_size());
          all->push_back(t);
        }
      });
  const std::string& name = operation.schema().name();
  double operations = 0;
  if (name == "aten::convolution" && in.size() >= 2 && !out.empty())  // input, weight
    operations = 2.0 * double(out[0].numel()) * double(in[1].numel()) / double(in[1].size(0));
  if (name == "aten::convolution_backward" && in.size() >= 3)  // gradient, input, weight
    operations = 4.0 * double(in[0].numel()) * double(in[2].numel()) / double(in[2].size(0));
  return 5e-6 + bytes / 2e12 + operations / 5e13;
}

namespace {

// An event that is recorded at the end of the current stream.
struct StreamEvent : DeviceEvent {
  explicit StreamEvent(c10::DeviceType device) : event(device, c10::EventFlag::BACKEND_DEFAULT) {
    const c10::impl::VirtualGuardImpl guard(device);
    event.record(guard.getStream(guard.getDevice()));
  }
  bool passed() const override { return event.query(); }
  double seconds_since(const DeviceEvent& earlier) const override {
    return 1e-3 * static_cast<const StreamEvent&>(earlier).event.elapsedTime(event);
  }
  c10::Event event;
};

}  // namespace

std::function<double(c10::ArrayRef<c10::IValue>)> DeviceCosts::operator()(
    const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given) {
  read_finished_events();
  const size_t key = key_of(operation, given);
  if (const auto found = known.find(key); found != known.end() && found->second.times >= kTimes)
    return [seconds = found->second.seconds](auto) { return seconds; };
  std::shared_ptr<DeviceEvent> before = mark();
  return [=, this, &operation](c10::ArrayRef<c10::IValue> results) {
    waiting.push_back({key, before, mark()});
    const auto found = known.find(key);
    return found == known.end() || found->second.times < 2 ? estimated_cost(operation, given, results)
                                                           : found->second.seconds;
  };
}

void DeviceCosts::read_finished_events() {
  while (!waiting.empty() && waiting.front().after->passed()) {
    const PendingMeasurement& w = waiting.front();
    const double seconds = w.after->seconds_since(*w.before);
    if (known.size() > 100000) known.clear();  // bounds the memory if shapes change all the time
    Measurement& one = known[w.key];
    if (++one.times == 2 || seconds < one.seconds) one.seconds = seconds;
    waiting.pop_front();
  }
}

size_t DeviceCosts::key_of(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> given) {
  size_t key = size_t(&operation.schema());
  const auto add = [&](int64_t x) { key = c10::hash_combine(key, size_t(x)); };
  for (const auto& value : given) {
    if (value.isInt()) add(value.toInt());
    if (value.isIntList())
      for (const int64_t i : value.toIntVector()) add(i);
    dtr_detail::each_tensor(value, [&](const torch::Tensor& t) {
      if (!t.defined()) return add(-1);
      add(int64_t(t.scalar_type()));
      for (const int64_t size : t.sizes()) add(size);
      for (const int64_t stride : t.strides()) add(stride);
    });
  }
  return key;
}

DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here) {
  DtrSettings s;
  if (bytes == 0) return s;
  if (device.is_cuda()) {
    s.used = [device] { return allocated_bytes(device); };
    s.device = device.type();
    const auto costs =
        std::make_shared<DeviceCosts>([device] { return std::make_unique<StreamEvent>(device.type()); });
    s.cost = [costs](const auto& operation, auto given) { return (*costs)(operation, given); };
    s.min_size = 1 << 20;  // the allocator has separate pools for smaller blocks
  }
  if (std::isfinite(bytes)) {
    s.budget = bytes;
    return s;
  }
  const auto budget = std::make_shared<AutomaticBudget>();
  s.automatic = [budget, device, ranks_here](double live, int64_t out_of_memory) {
    const double free = device.is_cpu() ? free_memory() / ranks_here : memory_budget(device) - live;
    return budget->next(live, free, out_of_memory);
  };
  return s;
}

}  // namespace yolox
