// SPDX-License-Identifier: Apache-2.0
// The training loss of YOLOX (arXiv 2107.08430, section 2): 5 x IoU loss + objectness loss + class loss, and
// L1 loss in the last epochs. Each term is summed over the batch and divided by the number of positives.
// yolox_loss() computes it. Losses holds the terms, and joins those of micro-batches and ranks to those of
// the whole batch.
//
// A positive is an anchor point that SimOTA matches with an object.
// B: images. A: anchor points. I: ignored regions per image. C: classes. F: rows for positives, at most 10
// per object. Predictions (yolox.hpp): reg [B, A, 4], obj [B, A] and cls [B, A, C], which are logits.
// Targets: data/batch.hpp. box_iou(): simota.hpp.
#pragma once
#include <ATen/record_function.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "base/torch.hpp"
#include "simota.hpp"

namespace yolox {

// The loss of a batch and its terms. All tensors are scalars on the device of the predictions. Reading a
// value on the host synchronises with the device.
struct Losses {
  enum class Kind {
    kTerm,    // a term of the loss: averaged over micro-batches and ranks
    kLogged,  // averaged likewise, but no part of the loss
    kCount,   // summed over micro-batches and ranks
  };
  // What a value is divided by. With it, means over micro-batches and ranks equal those of the whole batch.
  enum class Per {
    kPositive,  // the positives of the batch
    // The images: also a mean over anchor points or pixels, of which all images have the same number. A batch
    // with such a term cannot be divided into micro-batches.
    kImage,
  };
  struct Value {
    std::string name;  // column of metrics.csv, and of a term also of the progress line
    Kind kind;
    Tensor value;
    Per per = Per::kPositive;
  };
  Tensor total;               // sum of the terms; call backward() on this tensor
  std::vector<Value> values;  // in the order of add(), log() and count(); terms are weighted
  int64_t images = 0;         // in the batch

  // Adds a term. A new term needs only this call: the progress line, metrics.csv, TensorBoard, report.html
  // and the averages over micro-batches and ranks include all terms.
  void add(const std::string& name, const Tensor& value, double weight = 1, Per per = Per::kPositive) {
    const Tensor term = weight == 1 ? value : weight * value;
    insert({name, Kind::kTerm, term, per});
    total = total.defined() ? total + term : term;
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
  // Returns the sum of the terms with this divisor.
  Tensor sum_of(Per per) const {
    Tensor sum = torch::zeros_like(total);
    for (const Value& v : values)
      if (v.kind == Kind::kTerm && v.per == per) sum = sum + v.value;
    return sum;
  }
  // Returns the name of the first term per image, or "".
  std::string term_per_image() const {
    for (const Value& v : values)
      if (v.kind == Kind::kTerm && v.per == Per::kImage) return v.name;
    return "";
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
    for (Value& v : values) v.value = v.value.detach();
  }

 private:
  void insert(const Value& value) {
    check(value.value.dim() == 0, "the loss term ", value.name, " must be a scalar, but has the shape ",
          value.value.sizes());
    check(value.per == Per::kPositive || images > 0, "set losses.images before you add the value per image ",
          value.name);
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

// Throws if there are terms per image and several micro-batches, which would weight them by their positives.
inline void check_micro_batches(const Losses& losses, int64_t parts) {
  const std::string term = losses.term_per_image();
  check(term.empty() || parts == 1, "the loss term ", term,
        " is per image (Losses::Per::kImage), and cannot be computed in ", parts,
        " micro-batches; give --accum 1, and a smaller --bs or --size if memory runs out");
}

// Returns the loss of this rank for terms per image: each rank weights them by its images, and the other
// terms by its positives, so that the mean gradient of the ranks is that of the whole batch. ranks:
// sum(tensor) all-reduces in place. share: images of this rank over their mean.
template <class Ranks>
Tensor loss_of_rank(const Losses& losses, Ranks& ranks, double share) {
  Tensor positives = losses["positives"].to(torch::kDouble, /*non_blocking=*/false, /*copy=*/true);
  ranks.sum(positives);
  const Tensor weight = losses.weight() * double(ranks.info.world) / positives.clamp_min(1);
  return losses.sum_of(Losses::Per::kPositive) * weight.to(losses.total.scalar_type()) +
         losses.sum_of(Losses::Per::kImage) * share;
}

// Returns the losses of a batch, computed from the losses of its micro-batches.
inline Losses join(const std::vector<Losses>& parts) {
  Losses whole = parts[0];
  if (parts.size() == 1) return whole;
  Tensor sums = whole.sums();
  for (size_t i = 1; i < parts.size(); ++i) {
    check(parts[i].values.size() == whole.values.size(),
          "each micro-batch must have the same loss terms and logged values");
    sums = sums + parts[i].sums();
    whole.images += parts[i].images;
  }
  whole.set_means(sums);
  return whole;
}

// ---- the loss of YOLOX

// Weights of the loss terms.
constexpr double kIouWeight = 5;
constexpr double kObjWeight = 1;
constexpr double kClsWeight = 1;
constexpr double kL1Weight = 1;

// Returns [B, A]: true for an anchor point in at least one of the regions, [B, I, 4] as cx, cy, w, h.
inline Tensor is_within(const Anchors& anchors, const Tensor& regions) {
  const Tensor point = anchors.centre.t().unsqueeze(1);  // [A, 1, 2]
  Tensor within;
  for (const Tensor& some : regions.split(32, 1)) {                        // [B, 32, 4], to save memory
    const Tensor away = (point - some.slice(2, 0, 2).unsqueeze(1)).abs();  // [B, A, 32, 2]
    const Tensor in_some = (away < some.slice(2, 2, 4).unsqueeze(1) / 2).all(3).any(2);
    within = within.defined() ? within.logical_or(in_some) : in_some;
  }
  return within;
}

// Computes the loss of a batch. height, width: of the network input in pixels. class_weights: [C], weight of
// the class loss of positives of each class; undefined: 1. Computes in float32, or in
// float64 for float64 predictions, also when the network runs under autocast. Does not synchronise with the
// device, because positives are packed into F rows, a number that the host knows.
inline Losses yolox_loss(const Predictions& raw, int64_t height, int64_t width, const Targets& targets,
                         bool use_l1, const Tensor& class_weights = {}) {
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
  losses.images = batch;
  losses.count("positives", num_fg);
  losses.count("objects", targets.counts_on(num_fg.device()).sum());
  // Points in ignored regions are neither objects nor background.
  Tensor obj_weight;
  if (targets.ignored.defined())
    obj_weight = is_fg.logical_or(is_within(anchors, targets.ignored).logical_not()).to(dtype);
  const Tensor obj_loss =
      torch::binary_cross_entropy_with_logits(obj, is_fg.to(dtype), obj_weight, {}, sum) / divisor;

  // Packed positives: row i < num_fg holds the i-th positive; the other rows are unused and have weight 0.
  const auto index = num_fg.options();
  const int64_t rows = std::min(batch * points, kTopK * targets.total());
  const Tensor fg = torch::zeros({rows + 1}, index)  // row 0 takes all points that are no positives
                        .scatter_(0, number * flat_fg, torch::arange(batch * points, index))
                        .slice(0, 1);
  const Tensor used = (torch::arange(rows, index) < num_fg).unsqueeze(1);  // [F, 1]

  const Tensor object =
      fg.div(points, "floor") * targets.boxes.size(1) + matched.flatten().index_select(0, fg).clamp_min(0);
  const Tensor gt_box = targets.boxes.flatten(0, 1).to(dtype).index_select(0, object);  // [F, 4] cx, cy, w, h
  const Tensor gt_class = targets.classes.flatten().index_select(0, object).unsqueeze(1);  // [F, 1]
  const Tensor point = fg.remainder(points);
  const Anchors cell = {anchors.grid.index_select(0, point), anchors.stride.index_select(0, point)};
  // Zeroes the unused rows, because inf * 0 would be NaN.
  const Tensor fg_reg = torch::where(used, reg.flatten(0, 1).index_select(0, fg), 0);  // [F, 4] raw
  const Tensor box = decode_boxes(fg_reg, cell);  // cx, cy, w, h in pixels, as gt_box
  const Tensor iou = box_iou(box, gt_box, 1e-16);
  const Tensor iou_loss = torch::where(used.squeeze(1), 1 - iou * iou, 0).sum() / divisor;

  // The target of the class score is the IoU, also with another box loss.
  const Tensor cls_target = torch::zeros({rows, classes}, reg.options().requires_grad(false))
                                .scatter_(1, gt_class, iou.detach().unsqueeze(1));
  const Tensor fg_cls = torch::where(used, cls.flatten(0, 1).index_select(0, fg), 0);
  Tensor cls_weight = used.to(dtype);  // [F, 1]
  if (class_weights.defined())
    cls_weight = cls_weight * class_weights.to(dtype).index_select(0, gt_class.flatten()).unsqueeze(1);
  const Tensor cls_loss =
      torch::binary_cross_entropy_with_logits(fg_cls, cls_target, cls_weight, {}, sum) / divisor;

  Tensor l1_loss = torch::zeros_like(iou_loss);
  if (use_l1) {
    const Tensor stride = cell.stride.unsqueeze(1);
    const Tensor target = torch::cat(
        {gt_box.slice(1, 0, 2) / stride - cell.grid, (gt_box.slice(1, 2, 4) / stride + 1e-8).log()}, 1);
    l1_loss = torch::where(used, (fg_reg - target).abs(), 0).sum() / divisor;
  }
  losses.add("iou", iou_loss, kIouWeight);
  losses.add("obj", obj_loss, kObjWeight);
  losses.add("cls", cls_loss, kClsWeight);
  losses.add("l1", l1_loss, kL1Weight);
  return losses;
}

// Returns [4], to be added over all batches and ranks: sum of the losses per positive, positives, sum of the
// losses per image, images. Without L1, so that all epochs of a run are comparable.
inline Tensor validation_loss(const Predictions& predictions, ImageSize size, const Targets& targets) {
  const Losses losses = yolox_loss(predictions, size.height, size.width, targets, /*use_l1=*/false);
  const Tensor per_positive = losses.sum_of(Losses::Per::kPositive),
               per_image = losses.sum_of(Losses::Per::kImage),
               images = torch::full_like(per_positive, losses.images);
  return torch::stack({per_positive * losses.weight().to(per_positive), losses["positives"].to(per_positive),
                       per_image * images, images});
}

}  // namespace yolox
