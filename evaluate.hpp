// SPDX-License-Identifier: Apache-2.0
// Evaluation: runs a model on a data set and computes AP.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/program.hpp"
#include "base/torch.hpp"
#include "checkpoint/checkpoint.hpp"
#include "coco_eval.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "images/image.hpp"
#include "yolox.hpp"

namespace yolox {

// RAII guard: sets a module and its submodules to evaluation mode, and restores the mode of each at the end.
// Evaluation with batch norms in training mode would cost more than one point of AP.
struct EvalGuard {
  explicit EvalGuard(torch::nn::Module& module) {
    for (const auto& m : module.modules()) modes.emplace_back(m, m->is_training());
    module.eval();
  }
  ~EvalGuard() {
    for (const auto& [module, training] : modes)
      module->train(training);  // parents come first, because train() also sets the children
  }
  EvalGuard(const EvalGuard&) = delete;
  EvalGuard& operator=(const EvalGuard&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
};

// On the CPU, chooses the number of threads for this network and input size, see fastest_threads().
inline void choose_threads(YOLOX& model, ImageSize size, torch::Device device) {
  if (device.is_cuda()) return;
  const EvalGuard evaluation(*model);
  const torch::NoGradGuard no_grad;
  const Tensor image = torch::zeros({1, 3, size.height, size.width}).to(model->parameters()[0].scalar_type());
  fastest_threads([&] {
    const double start = now();
    model(image);
    return now() - start;
  });
}

// The stages whose times eval --speed prints. Loading runs in other threads at the same time.
enum EvalStage { stage_preprocess, stage_forward, stage_decode, stage_nms };
constexpr std::array eval_stages{"preprocess", "forward", "decode", "NMS"};

// Settings of evaluate().
struct EvalSettings {
  ImageSize size{640, 640};
  double conf = 0.01, nms = 0.65;
  int max_detections = coco_max_detections;  // of a class per image, for AP and AR
  int batch = 16, workers = 2;
  bool legacy = false;
  torch::Device device = torch::kCPU;
  // "RUN/val_batch": writes images of the first three batches, with ground truth and detections, to
  // RUN/val_batch0_pred.jpg, ...
  std::string pictures;
  // With several ranks, each rank evaluates its share of the images. gather: all-gathers the values of the
  // ranks.
  int rank = 0, ranks = 1;
  std::function<std::vector<std::vector<double>>(const std::vector<double>&)> gather = {};
  bool measure_times = false;  // fill Evaluation::times; on a GPU, each stage then waits for the one before
  // Returns sums and counts of a batch, see validation_loss(). Null: no validation loss.
  Tensor (*loss)(const Predictions&, ImageSize, const Targets&) = nullptr;
};

// Converts `rows` [D, 7] of postprocess() (x1, y1, x2, y2 in pixels of the letterboxed image, objectness,
// class score, class; best score first) to boxes in pixels of the original image, not clipped. Skips boxes
// that are not finite. scale: of the letterbox.
inline std::vector<ScoredBox> to_image_pixels(const Tensor& rows, Scale scale) {
  std::vector<ScoredBox> found;
  const auto d = rows.accessor<float, 2>();
  for (int64_t i = 0; i < d.size(0); ++i) {
    const Box box{d[i][0] / scale.x, d[i][1] / scale.y, d[i][2] / scale.x, d[i][3] / scale.y, int(d[i][6])};
    if (!std::isfinite(box.x2 - box.x1) || !std::isfinite(box.y2 - box.y1))
      continue;  // exp() overflows if the model is untrained or diverges
    found.push_back({box, double(d[i][4] * d[i][5])});
  }
  return found;
}

// Result of evaluate().
struct Evaluation {
  EvalResult result;
  CocoDataset truth;  // ground truth of the data set without the unreadable images
  std::vector<Detection> detections;
  int64_t images = 0;                      // without the unreadable ones
  std::unordered_set<int64_t> unreadable;  // ids
  std::array<double, 4> loss_sums{};       // of EvalSettings::loss
  double loss = std::nan("");  // mean over the positives of all images; NaN without EvalSettings::loss
  double seconds = 0;
  std::array<double, eval_stages.size()> times{};  // seconds, with EvalSettings::measure_times
  bool complete = true;  // false: a signal interrupted the evaluation; `result` is empty
};

struct Score {
  std::string name;  // a column of metrics.csv
  double value;      // the higher, the better; negative if there is no object to find
};
// Returns the score that decides which evaluation of a run is the best one: for best.pth, --patience, log and
// report. Is also called with an empty Evaluation, for the name. For AP50: {"AP50", e.result.AP50}.
inline Score score_of(const Evaluation& e) { return {"AP", e.result.AP}; }

// Replaces the detections, the unreadable images and the sums of the loss of this rank by those of all ranks.
inline void gather_evaluation(Evaluation& e, const EvalSettings& s) {
  std::vector<double> mine(e.loss_sums.begin(), e.loss_sums.end());
  mine.insert(mine.end(), {double(e.complete), double(e.unreadable.size())});
  const auto packed = [](int64_t id) { return std::bit_cast<double>(id); };  // ids may exceed 2^53
  const auto unpacked = [](double bits) { return std::bit_cast<int64_t>(bits); };
  for (const int64_t id : e.unreadable) mine.push_back(packed(id));
  for (const Detection& d : e.detections)
    mine.insert(mine.end(), {packed(d.image_id), packed(d.category_id), d.x, d.y, d.w, d.h, d.score});
  e.detections.clear();
  e.loss_sums = {};
  for (const auto& of_rank : s.gather(mine)) {
    const double* v = of_rank.data();
    for (double& sum : e.loss_sums) sum += *v++;
    const bool whole = *v++ > 0;
    e.complete = e.complete && whole;
    for (int64_t n = int64_t(*v++); n > 0; --n) e.unreadable.insert(unpacked(*v++));
    for (; v < of_rank.data() + of_rank.size(); v += 7)
      e.detections.push_back({unpacked(v[0]), unpacked(v[1]), v[2], v[3], v[4], v[5], v[6]});
  }
  std::ranges::stable_sort(e.detections, {}, &Detection::image_id);
}

// Evaluates the model on all images of the data set. progress(done, images): called after each batch, with
// the images of this rank. Throws std::runtime_error if model and data set have different numbers of classes.
// Unreadable images are counted, added to data.problems and removed from the ground truth.
inline Evaluation evaluate(YOLOX& model, const Dataset& data, const EvalSettings& s,
                           const std::function<void(int64_t, int64_t)>& progress = {}) {
  check(model->num_classes == int(data.classes.size()), "the model has ", model->num_classes, " classes, ",
        data.name, " has ", data.classes.size(),
        "; train it on this data, or evaluate it on data with its classes");
  const double start = now();
  const torch::InferenceMode inference;
  const EvalGuard evaluation(*model);
  Evaluation e;
  e.truth = data.truth;
  const cv::Size size(s.size.width, s.size.height);
  const int64_t n = data.records.size(), from = n * s.rank / s.ranks, to = n * (s.rank + 1) / s.ranks;
  const auto type = model->parameters()[0].scalar_type();
  const auto wait_for_gpu = [&] {
    if (s.measure_times && s.device.is_cuda()) torch::cuda::synchronize(s.device.index());
  };
  double stage_start = 0;
  const auto end_stage = [&](EvalStage stage) {
    wait_for_gpu();
    e.times[stage] += now() - std::exchange(stage_start, now());
  };
  Loader loader(evaluation_items(data), from, to, s.batch, size, s.workers, s.device);
  for (int64_t at = from, k = 0; at < to; ++k) {
    Batch batch = loader.next();
    batch.data = &data;
    if (s.measure_times && k == 0) model(preprocess(batch.images, s.legacy).to(type));  // the first is slow
    const int64_t count = batch.images.size(0);
    wait_for_gpu();
    stage_start = now();
    Tensor images = preprocess(batch.images, s.legacy).to(type);
    // A GPU prepares its kernels for each batch size, so the last batch gets that of the others.
    if (s.device.is_cuda() && k > 0)
      images = torch::constant_pad_nd(images, {0, 0, 0, 0, 0, 0, 0, s.batch - count});
    end_stage(stage_preprocess);
    const Predictions predicted = model(images);
    end_stage(stage_forward);
    const Tensor out = decode(predicted, s.size.height, s.size.width);
    end_stage(stage_decode);
    const auto detections = postprocess(out.narrow(0, 0, count), s.conf, s.nms);
    end_stage(stage_nms);
    if (s.loss) {
      const auto part = [&](const Tensor& t) { return t.narrow(0, 0, count); };
      const Tensor sums =
          s.loss({part(predicted.reg), part(predicted.obj), part(predicted.cls), predicted.strides}, s.size,
                 batch.targets)
              .cpu();
      for (int i = 0; i < 4; ++i) e.loss_sums[i] += sums[i].item<double>();
    }
    if (!s.pictures.empty() && k < 3) {
      std::vector<std::vector<ScoredBox>> found;  // in pixels of the network's input
      for (const Tensor& rows : detections) found.push_back(to_image_pixels(rows, {1, 1}));
      save_image(concat(s.pictures, k, "_pred.jpg"), draw_comparison(batch, found));
    }
    for (size_t i = 0; i < detections.size(); ++i, ++at) {
      const int64_t id = data.records[at].image_id;
      if (batch.items[i].index < 0) {
        e.unreadable.insert(id);
        continue;
      }
      for (const auto& [b, score] : to_image_pixels(detections[i], batch.items[i].scale))
        e.detections.push_back(
            {id, data.truth.categories[b.cls].id, b.x1, b.y1, b.x2 - b.x1, b.y2 - b.y1, score});
    }
    if (progress) progress(at - from, to - from);
    e.complete = !stop_signal;
    if (!e.complete) break;
  }
  if (s.gather) gather_evaluation(e, s);
  if (!e.complete) return e;
  const auto& sums = e.loss_sums;
  if (s.loss) e.loss = sums[0] / std::max(1.0, sums[1]) + sums[2] / std::max(1.0, sums[3]);
  std::erase_if(e.truth.images, [&](const CocoImage& i) { return e.unreadable.contains(i.id); });
  e.images = int64_t(e.truth.images.size());
  e.result = coco_eval(e.truth, e.detections, s.ranks > 1 ? at::get_num_threads() : 0, s.max_detections);
  e.seconds = now() - start;
  return e;
}

}  // namespace yolox
