// SPDX-License-Identifier: Apache-2.0
// The training loss of YOLOX (arXiv 2107.08430, section 2): 5 x IoU loss + objectness loss + class loss, and
// L1 loss in the last epochs. Each term is summed over the batch and divided by the number of positives.
//
// A positive is an anchor point that SimOTA matches with an object.
// B: images. A: anchor points. G: objects per image. C: classes. F: rows for positives, at most 10 per
// object.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "simota.hpp"

namespace yolox {

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
  // Counts something in the batch. yolox_loss() counts "positives" and "objects".
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

// Weights of the loss terms.
constexpr double kIouWeight = 5;
constexpr double kObjWeight = 1;
constexpr double kClsWeight = 1;
constexpr double kL1Weight = 1;

// Computes the loss of a batch. height, width: of the network input in pixels. Computes in float32, or in
// float64 for float64 predictions, also when the network runs under autocast. Does not synchronise with the
// device, because positives are packed into F rows, a number that the host knows.
inline Losses yolox_loss(const Predictions& raw, int64_t height, int64_t width, const Targets& targets,
                         bool use_l1) {
  RECORD_USER_SCOPE("loss");
  const auto dtype = torch::promote_types(raw.reg.scalar_type(), torch::kFloat);
  const Tensor reg = raw.reg.to(dtype), obj = raw.obj.to(dtype), cls = raw.cls.to(dtype);
  const int64_t batch = reg.size(0), points = reg.size(1), classes = cls.size(2);
  const Anchors anchors = anchors_of(height, width, reg.options(), raw.strides);
  Tensor matched;  // [B, A]
  {
    RECORD_USER_SCOPE("assignment");
    matched = simota(decode_boxes(reg.detach(), anchors), obj.detach(), cls.detach(), anchors, targets);
  }

  const Tensor is_fg = matched >= 0, flat_fg = is_fg.flatten();  // [B, A], [B x A]
  const Tensor number = flat_fg.cumsum(0);                       // of a positive, from 1
  const Tensor num_fg = number[-1], divisor = num_fg.clamp_min(1).to(dtype);
  // The weight argument of binary_cross_entropy_with_logits gets no gradient. A weight that depends on the
  // predictions, as in focal loss, must be multiplied before the sum.
  const auto sum = at::Reduction::Sum;
  Losses losses;
  losses.count("positives", num_fg);
  losses.count("objects", targets.counts_on(num_fg.device()).sum());
  const Tensor obj_loss =
      torch::binary_cross_entropy_with_logits(obj, is_fg.to(dtype), {}, {}, sum) / divisor;

  // Packed positives: row i < num_fg holds the i-th positive; the other rows are unused and have weight 0.
  const auto index = num_fg.options();
  const int64_t rows = std::min(batch * points, kTopK * targets.total());
  const Tensor fg = torch::zeros({rows + 1}, index)  // row 0 takes all points that are no positives
                        .scatter_(0, number * flat_fg, torch::arange(batch * points, index))
                        .slice(0, 1);
  const Tensor used = (torch::arange(rows, index) < num_fg).unsqueeze(1);  // [F, 1]

  const Tensor object =
      fg.div(points, "floor") * targets.boxes.size(1) + matched.flatten().index_select(0, fg).clamp_min(0);
  const Tensor gt_box = targets.boxes.flatten(0, 1).to(dtype).index_select(0, object);     // [F, 4]
  const Tensor gt_class = targets.classes.flatten().index_select(0, object).unsqueeze(1);  // [F, 1]
  const Tensor point = fg.remainder(points);
  const Anchors cell = {anchors.grid.index_select(0, point), anchors.stride.index_select(0, point)};
  // Zeroes the unused rows, because inf * 0 would be NaN.
  const Tensor fg_reg = torch::where(used, reg.flatten(0, 1).index_select(0, fg), 0);  // [F, 4]
  const Tensor box = decode_boxes(fg_reg, cell);
  const Tensor iou = box_iou(box, gt_box, 1e-16);
  const Tensor iou_loss = kIouWeight * torch::where(used.squeeze(1), 1 - iou * iou, 0).sum() / divisor;

  // The target of the class score is the IoU.
  const Tensor cls_target = torch::zeros({rows, classes}, reg.options().requires_grad(false))
                                .scatter_(1, gt_class, iou.detach().unsqueeze(1));
  const Tensor fg_cls = torch::where(used, cls.flatten(0, 1).index_select(0, fg), 0);
  const Tensor cls_loss =
      torch::binary_cross_entropy_with_logits(fg_cls, cls_target, used.to(dtype), {}, sum) / divisor;

  Tensor l1_loss = torch::zeros_like(iou_loss);
  if (use_l1) {
    const Tensor stride = cell.stride.unsqueeze(1);
    const Tensor target = torch::cat(
        {gt_box.slice(1, 0, 2) / stride - cell.grid, (gt_box.slice(1, 2, 4) / stride + 1e-8).log()}, 1);
    l1_loss = torch::where(used, (fg_reg - target).abs(), 0).sum() / divisor;
  }
  losses.add("iou", iou_loss);
  losses.add("obj", obj_loss, kObjWeight);
  losses.add("cls", cls_loss, kClsWeight);
  losses.add("l1", l1_loss, kL1Weight);
  return losses;
}

// Returns [2]: the loss of a batch of the evaluation times its number of positives, and this number, for a
// mean over all batches and ranks. Without L1, so that all epochs of a run are comparable.
inline Tensor validation_loss(const Predictions& predictions, ImageSize size, const Targets& targets) {
  const Losses losses = yolox_loss(predictions, size.height, size.width, targets, /*use_l1=*/false);
  const Tensor weight = losses.weight().to(losses.total.scalar_type());
  return torch::stack({losses.total * weight, weight});
}

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
  int64_t next = 1;
  for (auto& v : losses.values) {
    const Tensor sum = sums[next++];
    v.value = v.kind == Losses::Kind::kCount ? sum.to(v.value.scalar_type()) : sum;
  }
  const Tensor positives = losses.weight();
  losses.total = (sums[0] / positives).to(options);
  for (auto& v : losses.values)
    if (v.kind != Losses::Kind::kCount) v.value = (v.value / positives).to(options);
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
