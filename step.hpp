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

#include "data/batch.hpp"
#include "data/multiscale.hpp"
#include "ddp.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "run/numbers.hpp"
#include "yolox.hpp"

namespace yolox {

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

// Makes a step that of all ranks: `reduction` averages the gradients, the losses are those of the whole
// batch, and with sync_bn so are the statistics of the model's batch norms.
inline void train_over(Ranks& ranks, Reduction& reduction, StepSettings& s, nn::Module& model, bool sync_bn) {
  if (ranks.alone()) return;
  s.ranks = ranks.place.world;
  s.sum = [&](Tensor& x) { ranks.sum(x); };
  s.before_backward = [&](const std::vector<Tensor>& outputs) { reduction.before_backward(outputs); };
  if (sync_bn) use_sync_bn(model, s.sum);
}

// What the network gets of a batch: float images [B, 3, H, W] of this size, and the boxes in them. legacy: of
// YOLOX 0.1.0, see preprocess(). type: that of the weights.
struct Input {
  Tensor images;
  Targets targets;
};
inline Input network_input(const Batch& batch, ImageSize size, bool legacy, at::ScalarType type) {
  RECORD_USER_SCOPE("copy");
  Input input{preprocess(batch.images, legacy).to(type), batch.targets};
  resize_batch(input.images, input.targets, size);
  return input;
}

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
