// SPDX-License-Identifier: Apache-2.0
// Casts the weights of convolutions for mixed precision with a few kernels for the whole model. Autocast
// casts each weight by itself, and each gradient back: 180 kernels of a few microseconds for yolox-s.
#pragma once
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/torch.hpp"

namespace yolox {

// Casts gradients to the dtype of the weights, with one kernel for all of them.
struct CastWeightsBackward : torch::autograd::Node {
  // A node with the largest sequence number runs as soon as it is ready. Otherwise autograd would run all
  // convolutions first, and the all-reduce of the gradients could not overlap with them.
  CastWeightsBackward(torch::autograd::edge_list&& weights, at::ScalarType type)
      : Node(std::numeric_limits<uint64_t>::max(), std::move(weights)), type(type) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    const torch::NoGradGuard no_grad;
    torch::autograd::variable_list result(grads.size());
    std::vector<torch::Tensor> from, to;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      result[i] = torch::empty_like(grads[i], grads[i].options().dtype(type));
      from.push_back(grads[i]);
      to.push_back(result[i]);
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
    return result;
  }

  at::ScalarType type;
};

// The trained weights and biases of all nn::Conv2d of a model.
class CastWeights {
 public:
  // model: on its device, with frozen parameters already frozen. It must outlive this object. type: dtype of
  // autocast.
  CastWeights(torch::nn::Module& model, at::ScalarType type) : type(type) {
    // A group is cast as a whole. Groups are small, so that the all-reduce of the gradients of the last
    // layers begins before the first layers are computed.
    constexpr int64_t kGroupBytes = 8 << 20;
    int64_t bytes = kGroupBytes;
    for (const auto& module : model.modules()) {
      auto* conv = module->as<torch::nn::Conv2d>();
      if (!conv) continue;
      for (torch::Tensor* t : {&conv->weight, &conv->bias}) {
        if (!t->defined() || !t->requires_grad()) continue;
        if (bytes >= kGroupBytes) {
          groups.emplace_back();
          bytes = 0;
        }
        groups.back().push_back(t);
        bytes += int64_t(t->nbytes());
      }
    }
  }

  // While a guard lives, the convolutions use weights that are cast. Gradients still go to the parameters.
  class Guard {
   public:
    // casts: null: the guard does nothing.
    explicit Guard(const CastWeights* casts) {
      if (!casts) return;
      std::vector<torch::Tensor> cast;
      for (const auto& group : casts->groups) {
        std::vector<torch::Tensor> from, to;
        for (const torch::Tensor* t : group) {
          from.push_back(t->detach());
          to.push_back(torch::empty_like(from.back(), from.back().options().dtype(casts->type)));
        }
        at::_foreach_copy_(to, from);
        if (torch::GradMode::is_enabled()) {
          torch::autograd::edge_list parameters;
          for (const torch::Tensor* t : group) parameters.push_back(torch::autograd::impl::gradient_edge(*t));
          const auto node = make_node<CastWeightsBackward>(std::move(parameters), from[0].scalar_type());
          for (torch::Tensor& t : to) torch::autograd::set_history(t, node);
        }
        cast.insert(cast.end(), to.begin(), to.end());
      }
      // All casts come before the first replacement, so that an out-of-memory error leaves the model as it
      // was.
      members.reserve(cast.size());
      size_t next = 0;
      for (const auto& group : casts->groups)
        for (torch::Tensor* member : group) {
          members.emplace_back(member, *member);
          *member = cast[next++];
        }
    }
    ~Guard() {
      for (auto& [member, parameter] : members) *member = parameter;
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::vector<std::pair<torch::Tensor*, torch::Tensor>> members;  // of the convolutions, and the parameters
  };

 private:
  at::ScalarType type;
  // Members `weight` and `bias` of convolutions. The module's list of parameters has its own handles, so that
  // replacing a member does not change it.
  std::vector<std::vector<torch::Tensor*>> groups;
};

// Returns the weights to cast in each step, or null without autocast. All convolutions of the model must take
// part in each step.
inline std::shared_ptr<CastWeights> cast_weights(torch::nn::Module& model, at::ScalarType amp) {
  return amp == torch::kFloat || amp == torch::kDouble ? nullptr : std::make_shared<CastWeights>(model, amp);
}

}  // namespace yolox
