// SPDX-License-Identifier: Apache-2.0
// Recomputes the weights with which the fixtures were made, and the checksums of tensors in the fixtures
// ("probes"). The README of the fixtures has the formulas.
#pragma once
#include "checkpoint/checkpoint.hpp"
#include "models.hpp"
#include "simota.hpp"
#include "tensors.hpp"

inline uint64_t fnv1a64(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (const unsigned char c : text) h = (h ^ c) * 0x100000001B3ull;
  return h;
}
// Returns n numbers in -1..1.
inline torch::Tensor signed_units(const std::string& name, int64_t n) {
  auto t = torch::empty({n}, torch::kDouble);
  double* const values = t.data_ptr<double>();
  const uint64_t seed = fnv1a64(name);
  for (int64_t i = 0; i < n; ++i) {
    uint64_t z = seed + uint64_t(i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    values[i] = double(z >> 40) * 0x1p-24 * 2 - 1;
  }
  return t;
}

// Returns the probe of a tensor, float64 [3]: sum, L2 norm, and dot product with a fixed random vector.
inline torch::Tensor probe(const std::string& name, const torch::Tensor& t) {
  const auto flat = t.detach().to(torch::kDouble).contiguous().flatten();
  return torch::stack({flat.sum(), flat.norm(), flat.dot(signed_units("probe/" + name, flat.numel()))});
}
// Returns an estimate of the relative error of a tensor with probe `a` against a tensor with probe `b`.
inline double probe_error(const torch::Tensor& a, const torch::Tensor& b, int64_t numel) {
  const auto d = (a - b).abs();
  const double norm = std::max(b[1].item<double>(), 1e-12),
               root = std::sqrt(double(std::max<int64_t>(numel, 1)));
  return std::max({d[0].item<double>() / root, d[1].item<double>(), d[2].item<double>()}) / norm;
}

// Returns the model of the fixtures. size: nano, tiny, ... It has 80 classes, the weights of the formula, and
// the running statistics in bn_<size>.pth.
inline yolox::YOLOX official_model(const std::string& size, torch::ScalarType dtype = torch::kFloat) {
  yolox::YOLOX model = yolox::make_model("yolox-" + size, 80);
  const auto statistics = fixture("bn_" + size + ".pth");
  torch::NoGradGuard no_grad;
  for (auto& [key, t] : yolox::state_dict(*model)) {
    if (key.ends_with("num_batches_tracked")) {
      t.fill_(7);
    } else if (key.ends_with("running_mean") || key.ends_with("running_var")) {
      t.copy_(tensor(statistics, key));
    } else {
      auto v = signed_units(key, t.numel()).view(t.sizes());
      if (t.dim() == 4) {
        v *= std::sqrt(2.0 / (t.numel() / t.size(0))) * (has(key, "_preds.") ? 0.25
                                                         : key == "backbone.backbone.stem.conv.conv.weight"
                                                             ? 0x1p-7
                                                             : 1);
      } else if (key.ends_with("bn.weight")) {
        v = 1 + 0.25 * v;
      } else if (key.ends_with("bn.bias")) {
        v = 0.25 * v;
      } else {
        v = 0.5 * v - (has(key, "cls_preds") ? 3 : has(key, "obj_preds") ? 1 : 0);
        if (has(key, "reg_preds")) v.slice(0, 2) += 0.75;
      }
      t.copy_(v.to(torch::kFloat));
    }
  }
  // Only floating-point tensors change their type, as in Python. LibTorch's to() casts integer counters too.
  for (auto& p : model->parameters()) p.set_data(p.to(dtype));
  for (auto& b : model->buffers())
    if (b.is_floating_point()) b.set_data(b.to(dtype));
  torch::set_num_threads(1);  // as for the fixtures, because rounding depends on the number of threads
  return model;
}

// Converts labels of the official code to Targets. labels [B, N, 5]: class, cx, cy, w, h, padded with rows of
// zeros. The official code counts the rows with a sum above 0, and uses that many rows from the start.
inline yolox::Targets official_targets(const torch::Tensor& labels) {
  const auto counts = (labels.sum(2) > 0).sum(1);
  const int64_t rows = counts.max().item<int64_t>();
  return {labels.slice(1, 0, rows).slice(2, 1, 5), labels.slice(1, 0, rows).select(2, 0).to(torch::kLong),
          std::vector<int64_t>(counts.data_ptr<int64_t>(), counts.data_ptr<int64_t>() + counts.numel())};
}
