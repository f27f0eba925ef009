// SPDX-License-Identifier: Apache-2.0
// Export to TorchScript. torch.jit.load in Python and torch::jit::load in C++ load the file without this
// repository. The network is traced. Decoding and NMS are TorchScript source, because they depend on the
// image size and on the number of detections, which a trace would fix.
//
// B batch, C classes, H W height and width of the input in pixels, A anchor points, D detections.
#pragma once
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/script.h>

#include <fstream>
#include <sstream>
#include <string>

#include "checkpoint/onnx.hpp"
#include "yolox.hpp"

namespace yolox {

// Returns a TorchScript expression of type float that equals `value` exactly.
inline std::string script_number(double value) { return formatted("float('%.17g')", value); }

// Returns the source of forward() with NMS.
inline std::string forward_with_nms(const ExportSettings& settings) {
  return concat(R"(
def forward(self, images):
  rows = self.rows(images)
  found : List[Tensor] = []
  for image in range(rows.size(0)):
    best, cls = torch.max(rows[image, :, 5:], 1)
    score = rows[image, :, 4] * best
    keep = torch.nonzero(score >= )",
                script_number(settings.conf), R"().squeeze(1)
    order = keep[torch.argsort(score[keep], stable=True, dim=0, descending=True)]
    half = rows[image, :, 2:4] / 2
    corners = torch.cat([rows[image, :, 0:2] - half, rows[image, :, 0:2] + half], 1)
    while order.numel() > 0:
      first = order[0]
      others = order[1:]
      a = corners[first]
      b = corners[others]
      found.append(torch.cat([torch.full([1], float(image), device=rows.device), a,
                              torch.stack([score[first], torch.to(cls[first], rows)])]))
      sides = torch.clamp(torch.minimum(a[2:], b[:, 2:]) - torch.maximum(a[:2], b[:, :2]), min=0)
      both = sides[:, 0] * sides[:, 1]
      area_a = (a[2] - a[0]) * (a[3] - a[1])
      area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
      dead = (both / (area_a + area_b - both) > )",
                script_number(settings.iou), R"() & (cls[others] == cls[first])
      order = others[torch.logical_not(dead)]
  if len(found) == 0:
    return torch.zeros([0, 7], device=rows.device)
  return torch.stack(found)
)");
}

// Returns the model as a TorchScript module. Input of its methods: images float32 [B, 3, H, W], any B, H and
// W multiples of 32. forward() has the output that ExportSettings (onnx.hpp) describes. rows() has the output
// before NMS. Changes `model`: its parameters no longer require gradients.
inline torch::jit::Module to_torchscript(YOLOX& model, const ExportSettings& settings) {
  const torch::NoGradGuard no_grad;
  for (auto& p : model->parameters()) p.set_requires_grad(false);  // the trace stores them as constants
  model->to(torch::kFloat);
  // raw output [B, A, 5 + C]: boxes, objectness logit, class logits
  std::vector<int> strides;
  const auto network = [&](const Tensor& images) {
    const Predictions p = model(images);
    strides = p.strides;
    return torch::cat({p.reg, p.obj.unsqueeze(-1), p.cls}, -1);
  };
  torch::jit::Module module("YOLOX");
  const auto [state, outputs] = torch::jit::tracer::trace(
      {torch::zeros({2, 3, 64, 64})},
      [&](torch::jit::Stack inputs) { return torch::jit::Stack{network(inputs[0].toTensor())}; },
      [](const torch::autograd::Variable&) { return ""; }, /*strict=*/true, /*force_outplace=*/false, &module,
      {"images"});
  module.type()->addMethod(module._ivalue()->compilation_unit()->create_function(
      c10::QualifiedName(*module.type()->name(), "network"), state->graph));

  if (settings.decode)
    module.define(concat(R"(
def rows(self, images):
  raw = self.network(images)
  cells : List[Tensor] = []
  strides : List[Tensor] = []
  for s in )",
                         c10::ArrayRef<int>(strides), R"(:
    rows = images.size(2) // s
    columns = images.size(3) // s
    x = torch.arange(columns, device=raw.device).expand([rows, columns])
    y = torch.arange(rows, device=raw.device).unsqueeze(1).expand([rows, columns])
    cells.append(torch.stack([x, y], 2).view([-1, 2]))
    strides.append(torch.full([rows * columns, 1], float(s), device=raw.device))
  stride = torch.cat(strides)
  centre = (raw[:, :, 0:2] + torch.cat(cells)) * stride
  return torch.cat([centre, torch.exp(raw[:, :, 2:4]) * stride, torch.sigmoid(raw[:, :, 4:])], 2)
)"));
  else
    module.define(R"(
def rows(self, images):
  raw = self.network(images)
  return torch.cat([raw[:, :, 0:4], torch.sigmoid(raw[:, :, 4:])], 2)
)");
  if (!settings.nms) {
    module.define("def forward(self, images):\n  return self.rows(images)\n");
    return module;
  }
  module.define(forward_with_nms(settings));
  return module;
}

// Writes the module to `path`. Each metadata entry becomes an extra file that has the key as its name. Throws
// if the file cannot be written.
inline void save_torchscript(const torch::jit::Module& module, const Metadata& metadata,
                             const std::string& path) {
  torch::jit::ExtraFilesMap extra;
  for (const auto& [key, text] : metadata) extra[key] = text;
  std::ostringstream bytes;  // torch's file writer ends the process on a full disk
  module.save(bytes, extra);
  std::ofstream out(path, std::ios::binary);
  check(out << bytes.str() && out.flush(), "cannot write ", path,
        "; check folder, permissions and disk space");
}

}  // namespace yolox
