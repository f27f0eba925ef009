// The gradient of one step: of the whole batch, computed at once or in parts (--accum, or where memory runs
// out).
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/memory.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "data/batch.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "simota.hpp"
#include "yolox.hpp"

namespace yolox {

// ---- the numbers of a step

// The numbers of one step, or the means of several.
struct StepNumbers {
  double total = 0;                                   // loss
  std::vector<std::pair<std::string, double>> terms;  // of the loss, in the order of Losses::terms
  double positives = 0;                               // positive anchor points
  double norm = 0;                                    // of the gradient, before clipping
  double objects = 0;                                 // boxes of the ground truth

  bool finite() const { return std::isfinite(total) && std::isfinite(norm); }
  double per_object() const { return positives / std::max(objects, 1e-9); }
};

// "iou 2.1, obj 1.3, cls 0.9, l1 0, gradient norm 12"
inline std::string to_string(const StepNumbers& n) {
  std::string text;
  for (const auto& [name, value] : n.terms) text += concat(name, " ", value, ", ");
  return concat(text, "gradient norm ", n.norm);
}

// Means over steps.
struct Means {
  StepNumbers sums;
  int64_t steps = 0;

  void add(const StepNumbers& n) {
    if (sums.terms.empty())
      for (const auto& [name, _] : n.terms) sums.terms.emplace_back(name, 0);
    for (size_t k = 0; k < n.terms.size(); ++k) sums.terms[k].second += n.terms[k].second;
    sums.total += n.total;
    sums.positives += n.positives;
    sums.norm += n.norm;
    sums.objects += n.objects;
    ++steps;
  }
  // The means since the last call; NaN after no step.
  StepNumbers take() {
    StepNumbers means = std::exchange(sums, {});
    const auto n = double(std::exchange(steps, 0));
    for (auto& [_, value] : means.terms) value /= n;
    means.total /= n;
    means.positives /= n;
    means.norm /= n;
    means.objects /= n;
    return means;
  }
};

// Why a run cannot go on after this step; empty: it can. A gradient that is not finite is nothing but
// skipped, mixed precision makes some; `skipped` counts how many in a row.
inline std::string why_to_stop(const StepNumbers& n, int64_t& skipped) {
  skipped = n.finite() ? 0 : skipped + 1;
  if (!std::isfinite(n.total)) return "the loss is not finite";
  return skipped == 20 ? "the gradient was not finite 20 times in a row" : "";
}

// ---- multi-scale: every ten steps another input size

// The size of each step, drawn from (seed, step / 10) alone: it is the same on every rank and after a resume.
// There are a dozen of them, so that what is chosen for each size (cuDNN's algorithms, cached memory) is
// chosen a dozen times in a run.
struct MultiScale {
  ImageSize base;  // of the first ten steps
  int less, more;  // how far the height goes from there, in units of 32 pixels; both 0: base always
  int64_t seed;
  int smallest = 1;  // height in units of 32 pixels

  // Official YOLOX draws from five less to five more, for nano and tiny from three less to seven more.
  ImageSize at(int64_t step) const {
    if (step < 10 || less + more == 0) return base;
    Rng rng(seed, ~uint64_t{0}, step / 10);
    const int units = base.height / 32;
    return of(int(rng.randint(std::max(smallest, units - less), units + more)));
  }
  ImageSize largest() const { return of(base.height / 32 + more); }

 private:
  ImageSize of(int units) const {
    return {32 * units, 32 * std::max(1, int(double(units) * base.width / base.height))};
  }
};

// Images and boxes of a batch to another input size.
inline void resize_batch(Tensor& images, Targets& targets, ImageSize size) {
  const int64_t h = images.size(2), w = images.size(3);
  if (h == size.height && w == size.width) return;
  images = torch::upsample_bilinear2d(images, std::vector<int64_t>{size.height, size.width},
                                      /*align_corners=*/false);
  const double sx = double(size.width) / w, sy = double(size.height) / h;
  const Tensor& b = targets.boxes;
  targets.boxes =
      torch::stack({b.select(2, 0) * sx, b.select(2, 1) * sy, b.select(2, 2) * sx, b.select(2, 3) * sy}, 2);
}

// ---- the gradient

// Does a part of a step under the name that it has in --profile.
template <class Part>
auto marked(const char* name, const Part& part) {
  RECORD_USER_SCOPE(name);
  return part();
}

struct StepSettings {
  torch::DeviceType device;
  at::ScalarType amp = torch::kFloat;  // of autocast; float32: none
  bool use_l1 = false;
  // Several ranks, each with its share of the batch:
  int ranks = 1;
  std::function<void(Tensor&)> sum = {};  // over all of them
  // Called before the last backward(), with what the loss was computed from; after it the gradients are the
  // mean over the ranks.
  std::function<void(const std::vector<Tensor>&)> before_backward = {};
};

// A backward() that has failed leaves what it had yet to do in autograd's queue of this thread, and with it
// the memory of the whole step, until the next backward() finds it.
inline void forget_backward() { torch::zeros({1}, torch::requires_grad()).sum().backward(); }

// Sets the gradients of the optimizer's parameters to that of the batch's loss times the scaler's scale, and
// gives the losses, detached. forward(images [b, 3, H, W]) -> Predictions. Parts, and ranks, have the
// gradient and the losses of the whole batch, but for batch norms, which see a part at a time.
template <class Forward>
Losses compute_gradients(const Forward& forward, const Tensor& images, const Targets& targets, int64_t parts,
                         Optimizer& optimizer, const GradScaler& scaler, const StepSettings& s) {
  optimizer.zero_grad();
  // Each part is divided by its own positives: weighted by them, the parts add up to the gradient of the
  // batch. The guess, the same on all ranks, keeps the weights near 1, for fp16.
  const int64_t n = images.size(0);
  const double guess = 16.0 * double(n);
  const bool weighted = parts * s.ranks > 1;
  std::vector<Losses> all;
  std::string anomaly;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = n * part / parts, to = n * (part + 1) / parts;
    const Predictions predictions = marked("forward", [&] {
      const AutocastGuard autocast(s.device, s.amp);
      return forward(images.slice(0, from, to));
    });
    Losses losses = marked("loss", [&] {
      return yolox_loss(predictions, images.size(2), images.size(3), targets.slice(from, to), s.use_l1);
    });
    const Tensor loss = weighted ? losses.total * losses.num_fg.clamp_min(1) / guess : losses.total;
    marked("backward", [&] {
      try {
        if (s.before_backward && part == parts - 1) s.before_backward({loss});
        scaler.scaled(loss).backward();
      } catch (const std::exception& e) {
        forget_backward();
        const std::string what = e.what();  // of --debug; other ranks would wait for this one's gradients
        if (what.find("returned nan values") == std::string::npos || s.ranks > 1) throw;
        anomaly = what.substr(0, what.find('\n'));
      }
    });
    losses.total = losses.total.detach();
    for (auto& term : losses.terms) term.value = term.value.detach();
    all.push_back(losses);
  }
  Losses losses = join(all);
  losses.anomaly = anomaly;
  if (s.ranks > 1) all_reduce(losses, s.sum);
  if (weighted)
    scale_gradients(gradients(optimizer.groups),
                    losses.num_fg.clamp_min(1).to(torch::kFloat).reciprocal() * (guess * s.ranks));
  return losses;
}

// The statistics of batch norms as they are, to be put back when a step is done again: an attempt that ran
// out of memory half-way has moved some of them.
struct SavedBuffers {
  explicit SavedBuffers(const torch::nn::Module& model) : live(model.buffers()) {
    for (const Tensor& t : live) saved.push_back(t.clone());
  }
  void save() { copy(saved, live); }
  void restore() { copy(live, saved); }

 private:
  static void copy(std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    torch::NoGradGuard no_grad;
    at::_foreach_copy_(to, from);
  }
  std::vector<Tensor> live, saved;
};

// Reads what a step has computed. Waits for the device.
inline StepNumbers numbers_of(const Losses& l, const Tensor& norm, int64_t objects) {
  std::vector<Tensor> all{l.total, l.num_fg, norm};
  for (const auto& term : l.terms) all.push_back(term.value);
  for (Tensor& t : all) t = t.to(l.total.device(), torch::kDouble);
  const Tensor read = torch::stack(all).cpu();
  const double* v = read.data_ptr<double>();
  StepNumbers numbers{v[0], {}, v[1], v[2], double(objects)};
  for (size_t k = 0; k < l.terms.size(); ++k) numbers.terms.emplace_back(l.terms[k].name, v[3 + k]);
  return numbers;
}

}  // namespace yolox
