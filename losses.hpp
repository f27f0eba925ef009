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
    kTerm,    // a term of the loss: averaged over micro-batches and ranks
    kLogged,  // averaged likewise, but no part of the loss
    kCount,   // summed over micro-batches and ranks
  };
  // What a value is divided by. The averages over micro-batches and ranks are those of the whole batch then.
  enum class Per {
    kPositive,  // the positives of the batch
    // The images: also a mean over anchor points or pixels, of which all images have the same number. With
    // micro-batches or several ranks, such a term costs a second backward.
    kImage,
  };
  struct Value {
    std::string name;  // column name in the progress line and metrics.csv, and name of the curve
    Kind kind;
    Tensor value;
    Per per = Per::kPositive;
  };
  Tensor total;               // sum of the terms; call backward() on this tensor
  Tensor per_image;           // sum of the terms per image; undefined if there are none
  std::vector<Value> values;  // in the order of add(), log() and count(); terms are weighted
  int64_t images = 0;         // in the batch
  std::string anomaly;        // message of torch's anomaly mode about backward; empty if there is none

  // Adds a term. A new term needs only this call: the progress line, metrics.csv, TensorBoard, report.html
  // and the averages over micro-batches and ranks include all terms.
  void add(const std::string& name, const Tensor& value, double weight = 1, Per per = Per::kPositive) {
    const Tensor term = weight == 1 ? value : weight * value;
    insert({name, Kind::kTerm, term, per});
    total = total.defined() ? total + term : term;
    if (per == Per::kImage) per_image = per_image.defined() ? per_image + term : term;
  }
  // Logs a scalar that is no loss, such as a mean IoU: metrics.csv, TensorBoard and report.html include it.
  // It is averaged over micro-batches and ranks like a term.
  void log(const std::string& name, const Tensor& value, Per per = Per::kPositive) {
    insert({name, Kind::kLogged, value.detach(), per});
  }
  // Counts something in the batch, for the message of a failed step. yolox_loss() counts "positives" and
  // "objects", from which the column positives_per_object is computed.
  void count(const std::string& name, const Tensor& value) { insert({name, Kind::kCount, value}); }
  // Returns the value with this name. Throws std::runtime_error if there is none.
  const Tensor& operator[](const std::string& name) const {
    for (const Value& v : values)
      if (v.name == name) return v.value;
    fail("the loss has no term ", name);
  }
  // Returns the sum of the terms per positive.
  Tensor per_positive() const {
    if (!per_image.defined()) return total;
    Tensor sum = torch::zeros_like(total);
    for (const Value& v : values)
      if (v.kind == Kind::kTerm && v.per == Per::kPositive) sum = sum + v.value;
    return sum;
  }
  // Weight of the terms per positive in a mean over micro-batches or ranks. It makes the mean equal to the
  // losses of the whole batch.
  Tensor weight() const { return (*this)["positives"].clamp_min(1); }
  // Returns [values + 1], float64: counts, the other values times their divisor, and the images. These can be
  // added over micro-batches and ranks.
  Tensor sums() const {
    const auto options = total.options().dtype(torch::kDouble);
    std::vector<Tensor> all;
    for (const Value& v : values) {
      const Tensor value = v.value.to(options);
      all.push_back(v.kind == Kind::kCount ? value
                    : v.per == Per::kImage ? value * images
                                           : value * weight());
    }
    all.push_back(torch::full({}, images, options));
    return torch::stack(all);
  }
  // Sets the values to those of the whole batch. sums: sums() of all its parts, added.
  void set_means(const Tensor& sums) {
    for (size_t k = 0; k < values.size(); ++k)
      if (values[k].kind == Kind::kCount) values[k].value = sums[k].to(values[k].value.scalar_type());
    const auto options = total.options();
    total = torch::zeros_like(total);
    for (size_t k = 0; k < values.size(); ++k) {
      Value& v = values[k];
      if (v.kind == Kind::kCount) continue;
      v.value = (sums[k] / (v.per == Per::kImage ? sums[-1] : weight())).to(options);
      if (v.kind == Kind::kTerm) total = total + v.value;
    }
  }
  // Detaches the losses from the graph, after backward().
  void detach() {
    total = total.detach();
    per_image = Tensor();
    for (Value& v : values) v.value = v.value.detach();
  }

 private:
  void insert(const Value& value) {
    check(value.value.dim() == 0, "the loss term ", value.name, " must be a scalar, but has the shape ",
          value.value.sizes());
    check(value.per == Per::kPositive || images > 0, "set `images` before the value per image ", value.name);
    for (const Value& v : values)
      check(v.name != value.name, "the loss has two terms with the name ", v.name);
    values.push_back(value);
  }
};

// Replaces the losses of this rank by the losses of the whole batch. ranks: sum(tensor) all-reduces in place.
template <class Ranks>
void all_reduce(Losses& losses, Ranks& ranks) {
  Tensor sums = losses.sums();
  ranks.sum(sums);
  losses.set_means(sums);
}

// Returns the losses of a batch, computed from the losses of its micro-batches.
inline Losses join(const std::vector<Losses>& parts) {
  Losses whole = parts[0];
  if (parts.size() == 1) return whole;
  Tensor sums = whole.sums();
  for (size_t i = 1; i < parts.size(); ++i) {
    check(parts[i].values.size() == whole.values.size(),
          "each micro-batch must have the same loss terms and logged values");
    if (whole.anomaly.empty()) whole.anomaly = parts[i].anomaly;
    sums = sums + parts[i].sums();
    whole.images += parts[i].images;
  }
  whole.set_means(sums);
  return whole;
}

}  // namespace yolox
