// SPDX-License-Identifier: Apache-2.0
// Optimisation: parameter groups, SGD, Adam and AdamW, gradient clipping, learning rate schedule, EMA, and
// mixed precision (autocast and gradient scaler).
#pragma once
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "base/torch.hpp"
#include "checkpoint/checkpoint.hpp"

namespace yolox {

using torch::Tensor;

// ---- parameter groups

// Parameters with a common weight decay.
struct ParamGroup {
  std::vector<std::string> names;
  std::vector<Tensor> params;
  double weight_decay;
};

// Returns three groups in the official order: weights of norms, weights of convolutions, biases (including
// those of norms). Only weights of convolutions, which have two or more dimensions, have weight decay; those
// of norms have one dimension. Parameters without requires_grad are in no group, because weight decay and
// momentum would change a frozen parameter.
inline std::vector<ParamGroup> parameter_groups(const torch::nn::Module& model, double weight_decay) {
  ParamGroup norm{{}, {}, 0}, conv{{}, {}, weight_decay}, bias{{}, {}, 0};
  for (const auto& module : model.named_modules()) {
    for (auto& p : module.value()->named_parameters(/*recurse=*/false)) {
      if (!p->requires_grad()) continue;
      ParamGroup& group = p.key() == "bias" ? bias : p->dim() <= 1 ? norm : conv;
      group.names.push_back(module.key().empty() ? p.key() : module.key() + "." + p.key());
      group.params.push_back(p.value());
    }
  }
  return {norm, conv, bias};
}

// Freezes the parameters whose names begin with one of the prefixes. "backbone" means the backbone inside
// YOLOPAFPN, "stem" the first block of the backbone, "neck" the rest of YOLOPAFPN. Without YOLOPAFPN,
// "backbone" means all before the head, and there is no neck. Returns the first prefix that matches no
// parameter, or an empty string if all prefixes match.
inline std::string freeze(torch::nn::Module& model, const std::vector<std::string>& prefixes) {
  auto parameters = model.named_parameters();
  std::string backbone = "backbone.";
  for (const auto& p : parameters)
    if (p.key().rfind("backbone.backbone.", 0) == 0) backbone = "backbone.backbone.";
  for (const auto& prefix : prefixes) {
    bool found = false;
    for (auto& p : parameters) {
      const bool in_backbone = p.key().rfind(backbone, 0) == 0;
      const bool hit = prefix == "backbone" ? in_backbone
                       : prefix == "stem"   ? p.key().rfind(backbone + "stem.", 0) == 0
                       : prefix == "neck"   ? p.key().rfind("backbone.", 0) == 0 && !in_backbone
                                            : p.key().rfind(prefix, 0) == 0;
      if (hit) {
        p.value().set_requires_grad(false);
        found = true;
      }
    }
    if (!found) return prefix;
  }
  return "";
}

// Sets training mode. Frozen batch norms stay in evaluation mode, so that their running statistics do not
// change.
inline void set_training_mode(torch::nn::Module& model) {
  model.train();
  for (const auto& module : model.modules())
    if (const auto* norm = module->as<torch::nn::BatchNorm2d>(); norm && !norm->weight.requires_grad())
      module->eval();
}

// Returns the parameters with requires_grad, in registration order.
inline std::vector<Tensor> trainable_parameters(const torch::nn::Module& model) {
  std::vector<Tensor> parameters;
  for (const Tensor& p : model.parameters())
    if (p.requires_grad()) parameters.push_back(p);
  return parameters;
}

// Returns the defined gradients of all groups.
inline std::vector<Tensor> gradients(const std::vector<ParamGroup>& groups) {
  std::vector<Tensor> grads;
  for (const auto& group : groups)
    for (const auto& p : group.params)
      if (p.grad().defined()) grads.push_back(p.grad());
  return grads;
}

// ---- optimizers

// A number that changes from step to step. tensor: the same number as a scalar on the device, which a CUDA
// graph reads in each replay (see StepGraphs). Undefined without graphs.
struct StepScalar {
  StepScalar(double value = 0, const Tensor& tensor = {}) : value(value), tensor(tensor) {}
  double value;
  Tensor tensor;
};

// SGD with Nesterov momentum, Adam (arXiv 1412.6980) or AdamW (arXiv 1711.05101). Uses torch's fused kernels,
// one call per group. The state has the layout of torch.optim, so that checkpoints are compatible with the
// official code. A new kind needs an entry in the constructor, named_state(), step(), default_lr() and
// default_weight_decay().
struct Optimizer {
  std::string kind;  // "sgd", "adam" or "adamw"
  std::vector<ParamGroup> groups;
  double momentum = 0.9, beta1 = 0.9, beta2 = 0.999;
  double eps;                               // of Adam: 1e-8, or 1e-3 with fp16, where 1e-8 is too small
  double lr = 0;                            // learning rate of the latest iteration
  std::vector<std::vector<Tensor>> first;   // per group and parameter: momentum buffer; Adam: exp_avg
  std::vector<std::vector<Tensor>> second;  // Adam: exp_avg_sq; empty for SGD
  std::vector<std::vector<Tensor>> steps;   // Adam: step counts; empty for SGD

  // Throws std::runtime_error if `kind` is unknown.
  Optimizer(const std::string& kind, std::vector<ParamGroup> parameter_groups, bool fp16)
      : kind(kind), groups(std::move(parameter_groups)), eps(fp16 ? 1e-3 : 1e-8) {
    check(kind == "sgd" || kind == "adam" || kind == "adamw", "optimizer ", kind,
          " is unknown; choose sgd, adam or adamw");
    for (const auto& group : groups) {
      first.emplace_back();
      second.emplace_back();
      steps.emplace_back();
      for (const auto& p : group.params) {
        first.back().push_back(
            torch::zeros_like(p).detach());  // the fused kernels need the same strides as p
        if (!has_second_moments()) continue;
        second.back().push_back(torch::zeros_like(p).detach());
        steps.back().push_back(torch::zeros({}, p.options().dtype(torch::kFloat).requires_grad(false)));
      }
    }
  }

  bool has_second_moments() const { return kind != "sgd"; }
  // Returns the lists of the state under the names that torch.optim gives to their tensors.
  std::vector<std::pair<const char*, const std::vector<std::vector<Tensor>>*>> named_state() const {
    if (!has_second_moments()) return {{"momentum_buffer", &first}};
    return {{"step", &steps}, {"exp_avg", &first}, {"exp_avg_sq", &second}};
  }
  // Returns all tensors of the optimizer state.
  std::vector<Tensor> state() const {
    std::vector<Tensor> all;
    for (const auto& [name, list] : named_state())
      for (const auto& group : *list) all.insert(all.end(), group.begin(), group.end());
    return all;
  }

  void zero_grad() {
    for (auto& group : groups)
      for (auto& p : group.params) p.mutable_grad() = Tensor();
  }

  // Updates the parameters with this learning rate. A parameter without a gradient does not change. skip: a
  // scalar on the device, see StepGuard; 1: nothing changes, also no momentum and no step count.
  void step(const StepScalar& learning_rate, const std::optional<Tensor>& skip = {}) {
    RECORD_USER_SCOPE("optimizer");
    torch::NoGradGuard no_grad;
    lr = learning_rate.value;
    const Tensor rate =
        learning_rate.tensor.defined() ? learning_rate.tensor : torch::scalar_tensor(lr, torch::kDouble);
    for (size_t g = 0; g < groups.size(); ++g) {
      const double decay = groups[g].weight_decay;
      std::vector<Tensor> params, grads, m, v, counts;  // of the parameters with a gradient
      for (size_t i = 0; i < groups[g].params.size(); ++i) {
        const Tensor& p = groups[g].params[i];
        if (!p.grad().defined()) continue;
        params.push_back(p);
        grads.push_back(p.grad());
        m.push_back(first[g][i]);
        if (!has_second_moments()) continue;
        v.push_back(second[g][i]);
        counts.push_back(steps[g][i]);
      }
      if (params.empty()) continue;
      if (kind == "sgd") {
        at::_fused_sgd_(params, grads, m, decay, momentum, rate, /*dampening=*/0, /*nesterov=*/true,
                        /*maximize=*/false, /*is_first_step=*/false, /*grad_scale=*/{}, skip);
        continue;
      }
      at::_foreach_add_(counts, skip ? 1 - *skip : torch::ones({}, params[0].options().dtype(torch::kFloat)));
      if (kind == "adam")
        at::_fused_adam_(params, grads, m, v, /*max_exp_avg_sqs=*/{}, counts, rate, beta1, beta2, decay, eps,
                         /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, skip);
      else
        at::_fused_adamw_(params, grads, m, v, /*max_exp_avg_sqs=*/{}, counts, rate, beta1, beta2, decay, eps,
                          /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, skip);
    }
  }
};

// Returns the optimizer state in the form of torch.optim's state_dict. Parameters are numbered through all
// groups, as in official checkpoints.
inline GenericDict state_dict(const Optimizer& o) {
  auto state = empty_dict();
  auto groups = empty_list();
  int64_t n = 0;
  for (size_t g = 0; g < o.groups.size(); ++g) {
    auto ids = empty_list();
    for (size_t i = 0; i < o.groups[g].params.size(); ++i, ++n) {
      auto entry = empty_dict();
      for (const auto& [name, list] : o.named_state()) entry.insert(name, (*list)[g][i]);
      state.insert(n, entry);
      ids.push_back(n);
    }
    auto group = empty_dict();
    group.insert("lr", o.lr);
    group.insert("weight_decay", o.groups[g].weight_decay);
    if (o.kind == "sgd") {
      group.insert("momentum", o.momentum);
      group.insert("dampening", int64_t{0});
      group.insert("nesterov", true);
    } else {
      group.insert("eps", o.eps);
    }
    group.insert("params", ids);
    groups.push_back(group);
  }
  auto dict = empty_dict();
  dict.insert("state", state);
  dict.insert("param_groups", groups);
  return dict;
}

// Loads a state in the form of state_dict(). path: file name for error messages. Throws std::runtime_error,
// with the name of the parameter, if the state belongs to another kind of optimizer or to other parameters.
inline void load_state_dict(Optimizer& o, const GenericDict& dict, const std::string& path) {
  torch::NoGradGuard no_grad;
  check(dict.contains("state") && dict.at("state").isGenericDict(), path, ": the optimizer has no state");
  const auto state = dict.at("state").toGenericDict();
  o.lr = dict.at("param_groups").toListRef()[0].toGenericDict().at("lr").toDouble();
  int64_t n = 0;
  for (size_t g = 0; g < o.groups.size(); ++g) {
    for (size_t i = 0; i < o.groups[g].params.size(); ++i, ++n) {
      const std::string where = concat(path, ": optimizer state of ", o.groups[g].names[i]);
      check(state.contains(n) && state.at(n).isGenericDict(), where,
            " is missing; was it trained with --optimizer ", o.kind, "?");
      const auto entry = state.at(n).toGenericDict();
      for (const auto& [name, list] : o.named_state()) {
        check(entry.contains(name) && entry.at(name).isTensor(), where, " has no ", name,
              "; was it trained with --optimizer ", o.kind, "?");
        const Tensor t = entry.at(name).toTensor(), into = (*list)[g][i];
        check(t.sizes() == into.sizes(), where, " has shape ", t.sizes(), ", the model needs ", into.sizes(),
              "; start a new run from its weights, with --weights");
        into.copy_(t);
      }
    }
  }
}

// Multiplies the gradients by `factor`, a scalar tensor, in place.
inline void scale_gradients(const std::vector<Tensor>& grads, const Tensor& factor) {
  torch::NoGradGuard no_grad;
  if (!grads.empty()) at::_foreach_mul_(grads, factor.to(grads[0].scalar_type()));
}

// Returns the global gradient norm, a scalar on the device.
inline Tensor gradient_norm(const std::vector<Tensor>& grads) {
  torch::NoGradGuard no_grad;
  return grads.empty() ? torch::zeros({}) : torch::stack(at::_foreach_norm(grads, 2)).norm();
}

// Clips the gradients to the global norm max_norm; 0: no clipping. norm: their gradient_norm().
inline void clip_gradients(const std::vector<Tensor>& grads, const Tensor& norm, double max_norm) {
  torch::NoGradGuard no_grad;
  if (max_norm > 0 && !grads.empty()) at::_foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp_max(1.0));
}

// ---- learning rate

// Returns the default learning rate for a batch of this size. That of SGD is proportional to the batch size
// (arXiv 1706.02677), as in the official recipe. That of Adam and AdamW is proportional to its square root
// (arXiv 2205.10287), because Adam divides the gradient by its root mean square.
inline double default_lr(const std::string& optimizer, int64_t batch) {
  const double batches_of_64 = double(batch) / 64;
  return optimizer == "sgd" ? 0.01 * batches_of_64 : 0.0056 * std::sqrt(batches_of_64);
}
// Returns the default weight decay. AdamW does not divide it by the root mean square of the gradient.
inline double default_weight_decay(const std::string& optimizer) {
  return optimizer == "adamw" ? 0.05 : 5e-4;
}

// Settings of the learning rate schedule. Lengths are in steps.
struct Schedule {
  double lr;        // highest learning rate, for the whole batch
  double iters;     // of all epochs, without --max-iters
  double warmup;    // of the warm-up
  double constant;  // of the final phase, whose learning rate is lr * min_ratio
  double warmup_lr = 0, min_ratio = 0.05;
  double flat_until = 0;  // the learning rate stays at its highest value until this step
};

// Returns the learning rate of iteration i, counted from 0: quadratic warm-up, the highest value, cosine
// decay, and the constant lr * min_ratio. As in the official code, the first iteration of the warm-up has
// warmup_lr.
inline double learning_rate(const Schedule& s, int64_t i) {
  const double begin = std::max(s.warmup, s.flat_until), floor = s.lr * s.min_ratio;
  if (s.warmup > 0 && i <= s.warmup) return (s.lr - s.warmup_lr) * std::pow(i / s.warmup, 2) + s.warmup_lr;
  if (i < begin) return s.lr;
  if (i >= s.iters - s.constant) return floor;
  return floor + 0.5 * (s.lr - floor) * (1 + std::cos(M_PI * (i - begin) / (s.iters - begin - s.constant)));
}

// ---- EMA

// Settings of the EMA. The defaults are those of the official recipe.
struct EmaSchedule {
  double decay = 0.9998;  // 0: no EMA
  double tau = 2000;      // updates after which the decay has reached 63 % of `decay`
};

// Returns the EMA decay of update u: decay x (1 - exp(-u / tau)). The decay is small in the first updates,
// so that the EMA follows the weights quickly.
inline double ema_decay(const EmaSchedule& s, int64_t update) {
  return s.decay * (1 - std::exp(-double(update) / s.tau));
}

// Returns the EMA of a run of `iters` steps. It averages over a fifteenth of a run of up to 750 steps, in
// which the weights still change quickly, and over twice that share from 1500 steps on, against over-fitting.
// From 37,500 steps on it is the official EMA, whose average over 5000 steps a shorter run would never reach.
inline EmaSchedule ema_of_run(double iters) {
  const EmaSchedule official;
  const double steps = iters / 15 * std::clamp(iters / 750, 1.0, 2.0);
  return {std::clamp(1 - 1 / steps, 0.5, official.decay), std::min(official.tau, iters / 10)};
}

// Returns the momentum of the batch norms in a run of `iters` steps, whose running statistics average over a
// twentieth of the run, but at least over two steps. In runs of 667 steps and more it is the official one,
// which averages over 33 steps. In a shorter run, these statistics would lag behind the weights at its end.
inline double norm_momentum_of_run(double iters) { return std::clamp(20 / iters, 0.03, 0.5); }

// Sets the momentum of all batch norms.
inline void set_norm_momentum(torch::nn::Module& model, double momentum) {
  for (const auto& module : model.modules())
    if (auto* norm = module->as<torch::nn::BatchNorm2dImpl>()) norm->options.momentum(momentum);
}

// The tensors that the EMA averages: floating-point parameters and buffers. Frozen parameters, the buffers of
// frozen modules and integer buffers do not change.
struct EmaTensors {
  std::vector<Tensor> target, source;
};
inline EmaTensors ema_tensors(const torch::nn::Module& target, const torch::nn::Module& source) {
  EmaTensors pairs;
  const auto add = [&](const Tensor& t, const Tensor& s) {
    if (t.is_floating_point()) {
      pairs.target.push_back(t.detach());
      pairs.source.push_back(s.detach());
    }
  };
  const auto target_modules = target.modules();
  const auto source_modules = source.modules();
  for (size_t m = 0; m < target_modules.size(); ++m) {
    const auto params = source_modules[m]->parameters(/*recurse=*/false),
               averages = target_modules[m]->parameters(false);
    bool trained = params.empty();
    for (size_t i = 0; i < params.size(); ++i)
      if (params[i].requires_grad()) {
        add(averages[i], params[i]);
        trained = true;
      }
    const auto buffers = source_modules[m]->buffers(/*recurse=*/false),
               smooth = target_modules[m]->buffers(false);
    for (size_t i = 0; trained && i < buffers.size(); ++i) add(smooth[i], buffers[i]);
  }
  return pairs;
}

// Updates the EMA: target = d x target + (1 - d) x source. d.tensor: float64. skip: a scalar on the device,
// see StepGuard; 1: nothing changes.
inline void ema_update(const EmaTensors& pairs, const StepScalar& d, const Tensor& skip = {}) {
  if (pairs.target.empty()) return;
  RECORD_USER_SCOPE("EMA");
  torch::NoGradGuard no_grad;
  if (!skip.defined() || skip.is_cpu()) {
    if (!skip.defined() || skip.item<double>() == 0)
      at::_foreach_lerp_(pairs.target, pairs.source, 1 - d.value);
    return;
  }
  // _foreach_lerp_ takes no weight on the device. The weight is (1 - d) x (1 - skip).
  const std::vector<Tensor> change = at::_foreach_sub(pairs.source, pairs.target);
  const Tensor weight =
      d.tensor.defined() ? (1 - d.tensor) * (1 - skip) : at::rsub(skip, 1 - d.value, 1 - d.value);
  at::_foreach_mul_(change, weight.to(change[0].scalar_type()));
  at::_foreach_add_(pairs.target, change);
}

// ---- steps that are not finite

// Decides on the device whether a step is skipped, so that the host does not wait for it. A step is skipped
// if a gradient is not finite, as happens now and then in fp16. After a loss that is not finite, this step
// and all later ones are skipped: the host reads the loss some steps later, and saves the weights of this
// step.
class StepGuard {
 public:
  // Returns a scalar on the device of the loss: 1 if this step must be skipped, else 0.
  Tensor skip(const Tensor& loss, const Tensor& gradient_norm) {
    const torch::NoGradGuard no_grad;
    if (!sum.defined()) sum = torch::zeros_like(loss);
    sum.add_(loss, 0);  // stays 0, or becomes NaN and stays NaN
    return sum.add(gradient_norm, 0).ne(0).to(torch::kFloat);
  }

 private:
  Tensor sum;
};

// ---- mixed precision

// Enables autocast for the lifetime of the guard. torch has no such guard in C++. dtype float32 disables
// autocast.
struct AutocastGuard {
  AutocastGuard(torch::DeviceType device, at::ScalarType dtype)
      : device(device),
        was_enabled(at::autocast::is_autocast_enabled(device)),
        was_dtype(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, dtype != torch::kFloat);
    if (dtype != torch::kFloat) at::autocast::set_autocast_dtype(device, dtype);
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0)
      at::autocast::clear_cache();  // the cached casts of weights are stale after the next update
    at::autocast::set_autocast_enabled(device, was_enabled);
    at::autocast::set_autocast_dtype(device, was_dtype);
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  torch::DeviceType device;
  bool was_enabled;
  at::ScalarType was_dtype;
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

// Gradient scaler for fp16. Scales the loss so that small gradients do not underflow. Halves the scale when a
// gradient overflows, doubles it after 2000 iterations without overflow ("Mixed Precision Training", arXiv
// 1710.03740, section 3.2). If disabled, the scale is 1.
struct GradScaler {
  bool enabled;
  Tensor scale, growth_tracker, found_inf;

  GradScaler(bool enabled, torch::Device device)
      : enabled(enabled),
        scale(torch::full({}, enabled ? 65536.0 : 1.0, torch::TensorOptions(torch::kFloat).device(device))),
        growth_tracker(torch::zeros({}, torch::TensorOptions(torch::kInt).device(device))),
        found_inf(torch::zeros({}, torch::TensorOptions(torch::kFloat).device(device))) {}

  Tensor scaled(const Tensor& loss) const { return enabled ? loss * scale : loss; }

  // Divides the gradients by the scale and records for update() if any of them is not finite. Does not
  // synchronise with the device: read gradient_norm() to know if a gradient is not finite.
  void unscale(const std::vector<Tensor>& grads) {
    if (!enabled || grads.empty()) return;
    found_inf.zero_();
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf,
                                                   scale.to(torch::kDouble).reciprocal().to(torch::kFloat));
  }

  // Updates the scale. Call it once per iteration, after unscale().
  void update() {
    if (enabled) at::_amp_update_scale_(scale, growth_tracker, found_inf, 2.0, 0.5, 2000);
  }
};

}  // namespace yolox
