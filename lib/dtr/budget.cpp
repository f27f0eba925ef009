// SPDX-License-Identifier: Apache-2.0
#include "dtr/budget.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
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
  for (const auto& values : {given, results})
    for (const auto& value : values)
      dtr_detail::each_tensor(value, [&](const torch::Tensor& t) {
        if (t.defined()) bytes += double(t.numel()) * double(t.element_size());
      });
  // Multiplications and additions of a convolution with this output and weight.
  const auto operations = [](const torch::Tensor& output, const torch::Tensor& weight) {
    return 2.0 * double(output.numel()) * double(weight.numel()) / double(weight.size(0));
  };
  const std::string& name = operation.schema().name();
  double flops = 0;
  if (name == "aten::convolution") flops = operations(results[0].toTensor(), given[1].toTensor());
  if (name == "aten::convolution_backward") flops = 2 * operations(given[0].toTensor(), given[2].toTensor());
  return 5e-6 + bytes / 2e12 + flops / 5e13;
}

DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here) {
  DtrSettings s;
  if (bytes == 0) return s;
  if (device.is_cuda()) {
    s.used = [device] { return allocated_bytes(device); };
    s.device = device.type();
    s.cost = estimated_cost;
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
