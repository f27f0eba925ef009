// Loading a model from its file, running it over a data set, and the AP of what it finds. train and eval
// share this.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/onnx_weights.hpp"
#include "data.hpp"
#include "data/pictures.hpp"
#include "metrics/coco_eval.hpp"
#include "run/log.hpp"
#include "yolox.hpp"

namespace yolox {

// Seconds that all images took, stage by stage (eval --speed).
struct EvalTimes {
  double load = 0;  // reading, decoding and letterboxing, in the loader's threads beside the rest
  double preprocess = 0, forward = 0, decode = 0, nms = 0;
};

struct EvalSettings {
  ImageSize size{640, 640};
  double conf = 0.01, nms = 0.65;
  int batch = 16, workers = 2;
  bool legacy = false;
  torch::Device device = torch::kCPU;
  std::string
      pictures;  // "RUN/val_batch": the first batches with what was found go to RUN/val_batch0_pred.jpg
  // Several ranks, each with its share of the images: the numbers of all of them from those of each.
  int rank = 0, ranks = 1;
  std::function<std::vector<std::vector<double>>(const std::vector<double>&)> gather = {};
  EvalTimes* times = nullptr;  // is filled where it is given
};

// Detections of one image in COCO's form: x, y, w, h in pixels of the original picture, not clipped to it.
inline void add_detections(std::vector<Detection>& out, const Tensor& rows, Scale scale, int64_t image_id,
                           const CocoDataset& truth) {
  const auto d = rows.accessor<float, 2>();
  for (int64_t i = 0; i < d.size(0); ++i) {
    const double x1 = d[i][0] / scale.x, y1 = d[i][1] / scale.y, x2 = d[i][2] / scale.x,
                 y2 = d[i][3] / scale.y;
    if (!std::isfinite(x2 - x1) || !std::isfinite(y2 - y1))
      continue;  // exp overflows in a young or diverging model
    out.push_back({image_id, truth.categories[int64_t(d[i][6])].id, x1, y1, x2 - x1, y2 - y1,
                   double(d[i][4] * d[i][5])});
  }
}

struct Evaluation {
  EvalResult result;
  CocoDataset truth;  // what was to be found: that of the data, without images that cannot be read
  std::vector<Detection> detections;
  int64_t images = 0, unreadable = 0;
  double seconds = 0;
  bool complete = true;  // false: a signal ended it, and there is no result
};

// What a rank has found in its share of the images becomes what all have found.
inline void join_ranks(Evaluation& e, std::unordered_set<int64_t>& unreadable, const EvalSettings& s) {
  std::vector<double> mine{double(e.complete), double(unreadable.size())};
  mine.insert(mine.end(), unreadable.begin(), unreadable.end());
  for (const Detection& d : e.detections)
    mine.insert(mine.end(), {double(d.image_id), double(d.category_id), d.x, d.y, d.w, d.h, d.score});
  e.detections.clear();
  for (const auto& of_rank : s.gather(mine)) {
    const double* v = of_rank.data();
    const bool whole = *v++ > 0;
    e.complete = e.complete && whole;
    for (int64_t n = int64_t(*v++); n > 0; --n) unreadable.insert(int64_t(*v++));
    for (; v < of_rank.data() + of_rank.size(); v += 7)
      e.detections.push_back({int64_t(v[0]), int64_t(v[1]), v[2], v[3], v[4], v[5], v[6]});
  }
  std::stable_sort(e.detections.begin(), e.detections.end(),
                   [](const Detection& a, const Detection& b) { return a.image_id < b.image_id; });
}

// Runs the model over all images of the data set. The model's classes must be those of the data. Images that
// cannot be read are left out of the ground truth as well, counted and noted in data.problems.
inline Evaluation evaluate(YOLOX& model, const Dataset& data, const EvalSettings& s,
                           const std::function<void(int64_t)>& progress = {}) {
  check(model->num_classes == int(data.classes.size()), "the model knows ", model->num_classes, " classes, ",
        data.name, " has ", data.classes.size(),
        "; train it on this data, or evaluate it on data with its classes");
  const auto start = std::chrono::steady_clock::now();
  const torch::InferenceMode inference;
  const EvalGuard evaluation(*model);
  Evaluation e;
  e.truth = data.truth;
  std::unordered_set<int64_t> unreadable;
  const cv::Size size(s.size.width, s.size.height);
  const int64_t n = data.records.size(), from = n * s.rank / s.ranks, to = n * (s.rank + 1) / s.ranks;
  const auto type = model->parameters()[0].scalar_type();
  const auto timed = [&](double EvalTimes::*stage, const auto& work) {
    const double began = now();
    auto made = work();
    if (!s.times) return made;
    if (s.device.is_cuda()) torch::cuda::synchronize(s.device.index());
    s.times->*stage += now() - began;
    return made;
  };
  std::mutex loading;
  Loader::Make items = evaluation_items(data);
  if (s.times)
    items = [make = std::move(items), &loading, &s](int64_t position, Image& image) {
      const double began = now();
      Item item = make(position, image);
      const std::lock_guard lock(loading);
      s.times->load += now() - began;
      return item;
    };
  Loader loader(std::move(items), from, to, s.batch, size, s.workers, s.device.is_cuda());
  DeviceLoader batches(loader, s.device);
  for (int64_t at = from, k = 0; at < to; ++k) {
    const Batch batch = batches.next();
    if (s.times && k == 0) {  // the first time is slow
      model(preprocess(batch.images, s.legacy).to(type));
      if (s.device.is_cuda()) torch::cuda::synchronize(s.device.index());
    }
    const Tensor images =
        timed(&EvalTimes::preprocess, [&] { return preprocess(batch.images, s.legacy).to(type); });
    const Predictions predicted = timed(&EvalTimes::forward, [&] { return model(images); });
    const Tensor out =
        timed(&EvalTimes::decode, [&] { return decode(predicted, s.size.height, s.size.width); });
    const auto detections = timed(&EvalTimes::nms, [&] { return postprocess(out, s.conf, s.nms); });
    if (!s.pictures.empty() && k < 3)
      save_picture(concat(s.pictures, k, "_pred.jpg"),
                   draw_batch(batch.images, drawn(detections, data.classes)));
    for (size_t i = 0; i < detections.size(); ++i, ++at) {
      if (batch.indices[i] < 0)
        unreadable.insert(data.records[at].image_id);
      else
        add_detections(e.detections, detections[i], batch.scales[i], data.records[at].image_id, data.truth);
    }
    if (progress) progress(at);
    e.complete = !stop_signal;
    if (!e.complete) break;
  }
  if (s.gather) join_ranks(e, unreadable, s);
  if (!e.complete) return e;
  if (!unreadable.empty()) {
    auto& images = e.truth.images;
    images.erase(
        std::remove_if(images.begin(), images.end(), [&](const auto& i) { return unreadable.count(i.id); }),
        images.end());
  }
  e.unreadable = unreadable.size();
  e.images = n - e.unreadable;
  e.result = coco_eval(e.truth, e.detections, s.ranks > 1 ? at::get_num_threads() : 0);
  e.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return e;
}

}  // namespace yolox
