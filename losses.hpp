// SPDX-License-Identifier: Apache-2.0
// The values of a loss: terms, logged values and counts, and how those of micro-batches and ranks become
// those of the whole batch.
#pragma once
#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace yolox {

using torch::Tensor;

// The loss of a batch and its terms. All tensors are scalars on the device of the predictions. Reading a
// value on the host synchronises with the device.
struct Losses {
  enum class Kind {
    kTerm,    // a term of the loss: averaged over micro-batches and ranks, weighted by positives
    kLogged,  // averaged likewise, but no part of the loss
    kCount,   // summed over micro-batches and ranks
  };
  struct Value {
    std::string name;  // column name in the progress line and metrics.csv, and name of the curve
    Kind kind;
    Tensor value;
  };
  Tensor total;               // sum of the terms; call backward() on this tensor
  std::vector<Value> values;  // in the order of add(), log() and count(); terms are weighted
  std::string anomaly;        // message of torch's anomaly mode about backward; empty if there is none

  // Adds a term. A new term needs only this call: the progress line, metrics.csv, TensorBoard, report.html
  // and the averages over micro-batches and ranks include all terms. These averages are weighted by
  // positives, which is exact for a term that is divided by the positives. That of another term, such as a
  // mean over all anchors, deviates a little with --accum or several ranks.
  void add(const std::string& name, const Tensor& value, double weight = 1) {
    const Tensor term = weight == 1 ? value : weight * value;
    insert(name, Kind::kTerm, term);
    total = total.defined() ? total + term : term;
  }
  // Logs a scalar that is no loss, such as a mean IoU: metrics.csv, TensorBoard and report.html include it.
  // It is averaged over micro-batches and ranks like a term.
  void log(const std::string& name, const Tensor& value) { insert(name, Kind::kLogged, value.detach()); }
  // Counts something in the batch, for the message of a failed step. yolox_loss() counts "positives" and
  // "objects", from which the column positives_per_object is computed.
  void count(const std::string& name, const Tensor& value) { insert(name, Kind::kCount, value); }
  // Returns the value with this name. Throws std::runtime_error if there is none.
  const Tensor& operator[](const std::string& name) const {
    for (const Value& v : values)
      if (v.name == name) return v.value;
    fail("the loss has no term ", name);
  }
  // Weight of these losses in a mean over micro-batches or ranks, because each term is divided by the
  // positives. It makes the mean equal to the losses of the whole batch.
  Tensor weight() const { return (*this)["positives"].clamp_min(1); }
  // Detaches the losses from the graph, after backward().
  void detach() {
    total = total.detach();
    for (Value& v : values) v.value = v.value.detach();
  }

 private:
  void insert(const std::string& name, Kind kind, const Tensor& value) {
    check(value.dim() == 0, "the loss term ", name, " must be a scalar, but has the shape ", value.sizes());
    for (const Value& v : values) check(v.name != name, "the loss has two terms with the name ", name);
    values.push_back({name, kind, value});
  }
};

// Replaces the losses of this rank by the losses of the whole batch. ranks: sum(tensor) all-reduces in place.
template <class Ranks>
void all_reduce(Losses& losses, Ranks& ranks) {
  const Tensor weight = losses.weight();
  const auto options = losses.total.options();
  std::vector<Tensor> weighted{losses.total * weight};
  for (const auto& v : losses.values) {
    const Tensor value = v.value.to(options);
    weighted.push_back(v.kind == Losses::Kind::kCount ? value : value * weight);
  }
  Tensor sums = torch::stack(weighted).to(torch::kDouble);
  ranks.sum(sums);
  int64_t k = 0;
  for (auto& v : losses.values)
    if (++k; v.kind == Losses::Kind::kCount) v.value = sums[k].to(v.value.scalar_type());
  const Tensor means = (sums / losses.weight()).to(options);
  losses.total = means[0];
  k = 0;
  for (auto& v : losses.values)
    if (++k; v.kind != Losses::Kind::kCount) v.value = means[k];
}

// Returns the losses of a batch, computed from the losses of its micro-batches.
inline Losses join(const std::vector<Losses>& parts) {
  if (parts.size() == 1) return parts[0];
  Losses whole = parts[0];
  for (const auto& part : parts) {
    check(part.values.size() == whole.values.size(),
          "each micro-batch must have the same loss terms and logged values");
    if (whole.anomaly.empty()) whole.anomaly = part.anomaly;
  }
  const auto sum = [&](const auto& value_of) {
    Tensor sum = value_of(parts[0]);
    for (size_t i = 1; i < parts.size(); ++i) sum = sum + value_of(parts[i]);
    return sum;
  };
  for (size_t k = 0; k < whole.values.size(); ++k)
    whole.values[k].value = sum([&](const Losses& part) {
      const auto& v = part.values[k];
      return v.kind == Losses::Kind::kCount ? v.value : v.value * part.weight();
    });
  const Tensor positives = whole.weight();
  whole.total = sum([](const Losses& part) { return part.total * part.weight(); }) / positives;
  for (auto& v : whole.values)
    if (v.kind != Losses::Kind::kCount) v.value = v.value / positives;
  return whole;
}

}  // namespace yolox
