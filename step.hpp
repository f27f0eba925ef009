// The gradient of one step: of the whole batch, computed at once or in parts (--accum, or where memory runs
// out).
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "loss.hpp"
#include "base/memory.hpp"
#include "multiscale.hpp"
#include "optim.hpp"
#include "simota.hpp"
#include "run/remarks.hpp"
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
    for (Tensor* l : {&losses.total, &losses.iou, &losses.obj, &losses.cls, &losses.l1}) *l = l->detach();
    all.push_back(losses);
  }
  Losses losses = join(all);
  losses.anomaly = anomaly;
  if (s.ranks > 1) join_ranks(losses, s.sum);
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
  std::vector<Tensor> all;
  for (const Tensor* t : {&l.total, &l.iou, &l.obj, &l.cls, &l.l1, &l.num_fg, &norm})
    all.push_back(t->to(l.total.device(), torch::kDouble));
  const Tensor read = torch::stack(all).cpu();
  const double* v = read.data_ptr<double>();
  return {v[0], v[1], v[2], v[3], v[4], v[5], v[6], double(objects)};
}

// The memory of a step of n images, bytes; infinity where it runs out. base: the size that images are loaded
// in, largest: that of multi-scale. run(body) does the step. Leaves the model as it was.
template <class Run>
double memory_of_step(int64_t n, int64_t parts, YOLOX& model, Optimizer& optimizer, const GradScaler& scaler,
                      const StepSettings& settings, ImageSize base, ImageSize largest, torch::Device device,
                      const Run& run) {
  struct AsBefore {  // whatever happens
    Optimizer& optimizer;
    torch::Device device;
    SavedBuffers statistics;
    ~AsBefore() { optimizer.zero_grad(), statistics.restore(), empty_cache(device); }
  } as_before{optimizer, device, SavedBuffers(*model)};
  // Beside the step: images on their way, three batches in the loader and one being copied.
  const double waiting = device.is_cpu() ? 4.0 * double(n) * base.height * base.width * 3 : 0;
  double bytes = std::numeric_limits<double>::infinity();
  empty_cache(device);
  try {
    Tensor images = torch::full({n, base.height, base.width, 3}, 114, torch::kByte).to(device);
    images = images.permute({0, 3, 1, 2}).to(model->parameters()[0].scalar_type());
    Targets targets{torch::full({n, 20, 4}, base.width / 4.0, device),
                    torch::zeros({n, 20}, torch::TensorOptions(torch::kLong).device(device)),
                    std::vector<int64_t>(n, 20)};
    resize_batch(images, targets, largest);
    run([&] {
      compute_gradients([&](const Tensor& x) { return model(x); }, images, targets, parts, optimizer, scaler,
                        settings);
    });
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    bytes = memory_peak(device) + waiting;
  } catch (const std::exception& e) {
    if (!is_out_of_memory(e)) throw;
  }
  return bytes;
}

}  // namespace yolox
