// SPDX-License-Identifier: Apache-2.0
// Gradient computation of one iteration: over the whole batch at once, or accumulated over micro-batches
// (--accum, or when memory runs out).
#pragma once
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/batch.hpp"
#include "data/multiscale.hpp"
#include "ddp.hpp"
#include "layers/cast_weights.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "run/numbers.hpp"
#include "run/step_record.hpp"
#include "yolox.hpp"

namespace yolox {

// Runs part() under this name in the --profile trace.
template <class Part>
auto profiled(const char* name, const Part& part) {
  RECORD_USER_SCOPE(name);
  return part();
}

// Settings of compute_gradients().
struct StepSettings {
  torch::DeviceType device;
  at::ScalarType amp = torch::kFloat;  // dtype of autocast; float32: no autocast
  bool use_l1 = false;
  // With several ranks:
  int ranks = 1;
  std::function<void(Tensor&)> sum = {};  // all-reduces a tensor in place
  // Called with the loss before the last backward(), which then averages the gradients over the ranks.
  std::function<void(const std::vector<Tensor>&)> before_backward = {};
  std::shared_ptr<CastWeights> cast_weights = {};  // null: autocast casts each weight by itself
};

// Frees the memory of a failed backward(). After a backward() that threw, autograd keeps the unfinished
// tasks, and the activations that they hold, until the next backward() on this thread. An empty backward() on
// the CPU and one on the device free them.
inline void free_failed_backward(torch::Device device) {
  try {
    for (const torch::Device where : {torch::Device(torch::kCPU), device})
      torch::zeros({1}, torch::TensorOptions(where).requires_grad(true)).sum().backward();
  } catch (const std::exception&) {  // a GPU that has failed fails here, too; the first error is reported
  }
}

// Computes gradients of the scaled batch loss into `param.grad()` and returns the detached losses.
// forward(images [b, 3, H, W]) returns Predictions. parts: number of micro-batches. Gradients and losses are
// those of the whole batch over all ranks. Only the batch norm statistics differ, because they are computed
// per micro-batch.
template <class Forward>
Losses compute_gradients(const Forward& forward, const Tensor& images, const Targets& targets, int64_t parts,
                         Optimizer& optimizer, const GradScaler& scaler, const StepSettings& s) {
  optimizer.zero_grad();
  // The loss of a micro-batch is normalised by the positives of that micro-batch. Weighting each micro-batch
  // by its positives makes the sum of gradients equal to the gradient of the whole batch.
  // `expected_positives` is the same on all ranks. It keeps these weights near 1, because fp16 gradients
  // overflow otherwise.
  const int64_t n = images.size(0);
  const double expected_positives = 16.0 * double(n);
  const bool weighted = parts * s.ranks > 1;
  std::vector<Losses> all;
  std::string anomaly;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = n * part / parts, to = n * (part + 1) / parts;
    const Predictions predictions = profiled("forward", [&] {
      const AutocastGuard autocast(s.device, s.amp);
      const CastWeights::Guard cast(s.cast_weights.get());
      return forward(images.slice(0, from, to));
    });
    Losses losses = profiled("loss", [&] {
      return yolox_loss(predictions, images.size(2), images.size(3), targets.slice(from, to), s.use_l1);
    });
    const Tensor loss =
        weighted ? losses.total * losses.num_fg.clamp_min(1) / expected_positives : losses.total;
    profiled("backward", [&] {
      try {
        if (s.before_backward && part == parts - 1) s.before_backward({loss});
        scaler.scaled(loss).backward();
      } catch (const std::exception& e) {
        free_failed_backward(images.device());
        // With --debug, anomaly mode throws at a NaN. With several ranks the error ends the run, because the
        // other ranks would wait for the gradients of this rank.
        const std::string what = e.what();
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
    scale_gradients(gradients(optimizer.groups), losses.num_fg.clamp_min(1).to(torch::kFloat).reciprocal() *
                                                     (expected_positives * s.ranks));
  return losses;
}

// Returns the weights to cast in each step, or null without autocast. All convolutions of the model must take
// part in each step.
inline std::shared_ptr<CastWeights> cast_weights(nn::Module& model, at::ScalarType amp) {
  return amp == torch::kFloat || amp == torch::kDouble ? nullptr : std::make_shared<CastWeights>(model, amp);
}

// Sets up distributed training: `reduction` averages gradients over the ranks, losses are summed over the
// ranks, and sync_bn turns on SyncBN. Does nothing with a single rank.
inline void set_up_ddp(Ranks& ranks, GradientReducer& reduction, StepSettings& s, nn::Module& model,
                       bool sync_bn) {
  if (ranks.alone()) return;
  s.ranks = ranks.info.world;
  s.sum = [&](Tensor& x) { ranks.sum(x); };
  s.before_backward = [&](const std::vector<Tensor>& outputs) { reduction.before_backward(outputs); };
  if (sync_bn) use_sync_bn(model, ranks.sync_bn_collectives());
}

// Network input of one batch.
struct Input {
  Tensor images;    // [B, 3, H, W] float
  Targets targets;  // in pixels of `images`
};
// Returns the network input of a batch, resized to `size`. legacy: pixel format of YOLOX 0.1.0, see
// preprocess(). type: dtype of the weights.
inline Input make_network_input(const Batch& batch, ImageSize size, bool legacy, at::ScalarType type) {
  RECORD_USER_SCOPE("copy");
  Input input{preprocess(batch.images, legacy).to(type), batch.targets};
  resize_batch(input.images, input.targets, size);
  return input;
}

// Losses and gradient norm of a step on their way to the host.
class PendingNumbers {
 public:
  // Starts the copy. objects: number of objects in the batch.
  PendingNumbers(const Losses& l, const Tensor& norm, double objects) : objects(objects) {
    const auto type = l.total.scalar_type();  // float32 is exact for up to 16 million positives
    std::vector<Tensor> all{l.total, l.num_fg.to(type), norm.to(l.total.device(), type)};
    for (const auto& term : l.terms) {
      all.push_back(term.value);
      terms.push_back(term.name);
    }
    values = torch::stack(all).to(torch::kCPU, /*non_blocking=*/true);  // to pinned memory
    if (!l.total.is_cuda()) return;
    copied.emplace(torch::kCUDA);
    copied->record(c10::impl::VirtualGuardImpl(torch::kCUDA).getStream(l.total.device()));
  }
  // Waits for the copy and returns the numbers.
  StepNumbers read() const {
    if (copied) copied->synchronize();
    const Tensor read = values.to(torch::kDouble);
    const double* v = read.data_ptr<double>();
    StepNumbers numbers{v[0], {}, v[1], v[2], objects};
    for (size_t k = 0; k < terms.size(); ++k) numbers.terms.emplace_back(terms[k], v[3 + k]);
    return numbers;
  }

 private:
  double objects;
  std::vector<std::string> terms;
  Tensor values;
  std::optional<c10::Event> copied;
};

// Returns the numbers of a step. Synchronises with the device.
inline StepNumbers step_numbers(const Losses& l, const Tensor& norm, double objects) {
  return PendingNumbers(l, norm, objects).read();
}

// On a GPU, the numbers of a step are read while the next step runs, so that the GPU never waits for the
// host.
class UnreadSteps {
 public:
  void add(StepRecord record, PendingNumbers numbers) {
    steps.emplace_back(std::move(record), std::move(numbers));
  }
  // Returns the oldest step with its numbers. Returns nothing if all steps are read, or, unless `all`, if
  // only the latest step is unread and its numbers are on a GPU.
  std::optional<StepRecord> next(bool all) {
    if (steps.empty() || (steps.size() == 1 && !all && steps[0].first.batch.images.is_cuda())) return {};
    auto [record, numbers] = std::move(steps.front());
    steps.pop_front();
    record.numbers = numbers.read();
    return std::move(record);
  }
  // Forgets all steps, because training goes back to a checkpoint.
  void reset() {
    steps.clear();
    guard.reset();
  }

  StepGuard guard;

 private:
  std::deque<std::pair<StepRecord, PendingNumbers>> steps;
};

}  // namespace yolox
