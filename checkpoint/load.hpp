// Weights into a model, whatever file they are in.
#pragma once
#include <torch/torch.h>
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/flags.hpp"
#include "checkpoint/checkpoint.hpp"
#include "checkpoint/onnx_weights.hpp"
#include "data.hpp"
#include "yolox.hpp"

namespace yolox {

// Evaluation mode for as long as the guard lives; then each module has the mode that it had. Batch norm left
// in training mode costs a point of AP and more.
struct EvalGuard {
  explicit EvalGuard(torch::nn::Module& module) {
    for (const auto& m : module.modules()) modes.emplace_back(m, m->is_training());
    module.eval();
  }
  ~EvalGuard() {
    for (const auto& [module, training] : modes)
      module->train(training);  // outer modules first: train() goes inwards
  }
  EvalGuard(const EvalGuard&) = delete;
  EvalGuard& operator=(const EvalGuard&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
};

// The size of model that weights belong to, from the shape of the stem: `likely` where that fits, else the
// first that does; empty if none does.
inline std::string model_of_weights(const GenericDict& weights, const std::string& likely = "") {
  std::string first;
  for (const auto& e : weights) {
    if (!e.key().isString()) continue;
    std::string key = e.key().toStringRef();
    if (key.rfind("module.", 0) == 0) key = key.substr(7);
    if (key != "backbone.backbone.stem.conv.conv.weight" || !e.value().isTensor() ||
        e.value().toTensor().dim() != 4)
      continue;
    for (const ModelSize& size : model_sizes()) {
      if (e.value().toTensor().size(0) != int64_t(size.width * 64)) continue;
      if (first.empty() || size.name == likely) first = size.name;
    }
  }
  return first;
}

// The number of classes that weights predict, 0 if they have no head.
inline int64_t classes_of_weights(const GenericDict& weights) {
  for (const auto& e : weights) {
    if (!e.key().isString()) continue;
    const std::string key = e.key().toStringRef(), end = "head.cls_preds.0.weight";
    if (key.size() >= end.size() && key.compare(key.size() - end.size(), end.size(), end) == 0 &&
        e.value().isTensor() && e.value().toTensor().dim() == 4 && e.value().toTensor().numel() > 0)
      return e.value().toTensor().size(0);
  }
  return 0;
}

// Official checkpoints do not name their classes; with 80 of them they are those of COCO, in this order.
inline const std::vector<std::string>& coco_classes() {
  static const std::vector<std::string> names = {"person",        "bicycle",      "car",
                                                 "motorcycle",    "airplane",     "bus",
                                                 "train",         "truck",        "boat",
                                                 "traffic light", "fire hydrant", "stop sign",
                                                 "parking meter", "bench",        "bird",
                                                 "cat",           "dog",          "horse",
                                                 "sheep",         "cow",          "elephant",
                                                 "bear",          "zebra",        "giraffe",
                                                 "backpack",      "umbrella",     "handbag",
                                                 "tie",           "suitcase",     "frisbee",
                                                 "skis",          "snowboard",    "sports ball",
                                                 "kite",          "baseball bat", "baseball glove",
                                                 "skateboard",    "surfboard",    "tennis racket",
                                                 "bottle",        "wine glass",   "cup",
                                                 "fork",          "knife",        "spoon",
                                                 "bowl",          "banana",       "apple",
                                                 "sandwich",      "orange",       "broccoli",
                                                 "carrot",        "hot dog",      "pizza",
                                                 "donut",         "cake",         "chair",
                                                 "couch",         "potted plant", "bed",
                                                 "dining table",  "toilet",       "tv",
                                                 "laptop",        "mouse",        "remote",
                                                 "keyboard",      "cell phone",   "microwave",
                                                 "oven",          "toaster",      "sink",
                                                 "refrigerator",  "book",         "clock",
                                                 "vase",          "scissors",     "teddy bear",
                                                 "hair drier",    "toothbrush"};
  return names;
}

// The names of a model's classes: those of its file, or COCO's; empty where neither fits.
inline std::vector<std::string> class_names(const WeightsInfo& info, int64_t classes) {
  if (!info.classes.empty()) return info.classes;
  return classes == int64_t(coco_classes().size()) ? coco_classes() : std::vector<std::string>();
}

struct LoadedModel {
  YOLOX model{nullptr};
  WeightsInfo info;    // classes: empty if the file does not name them
  std::string report;  // what was skipped; empty if all went in
};

// A model with all of its weights, in evaluation mode on the device. `model` may be empty: then the file says
// which it is. preproc: "auto" (as the file says), "bgr" or "legacy". Throws when the weights do not fill the
// model.
inline LoadedModel load_model(const std::string& path, const std::string& model, const std::string& preproc,
                              torch::Device device) {
  usage_check(!path.empty(), "--weights FILE is needed");
  usage_check(preproc == "auto" || preproc == "bgr" || preproc == "legacy",
              "--preproc takes auto, bgr or legacy, got '", preproc, "'");
  const auto file = read_weights(path);
  const auto weights = find_weights(file, path);
  LoadedModel loaded;
  loaded.info = weights_info(file, path);
  if (preproc != "auto") loaded.info.legacy_preproc = preproc == "legacy";
  const std::string found = model_of_weights(weights, model.empty() ? loaded.info.model : model);
  const int64_t classes = classes_of_weights(weights);
  check(!found.empty() && classes > 0, path, " holds no YOLOX weights of a known size");
  check(model.empty() || model == found, path, " holds weights of ", found, "; --model ", model,
        " does not fit (leave it out)");
  loaded.info.model = found;
  loaded.model = YOLOX(found, int(classes));
  const auto report = load_state_dict(*loaded.model, weights, path);
  check(report.missing.empty() && report.mismatched.empty(), path, " does not fill ", found, ": ",
        to_string(report));
  if (!report.unexpected.empty()) loaded.report = to_string(report);
  if (int64_t(loaded.info.classes.size()) != classes) loaded.info.classes.clear();
  loaded.model->to(device);
  channels_last(*loaded.model);
  loaded.model->eval();
  return loaded;
}

// The input size: that of the flag --size when given, else that the weights were trained with, else the
// model's own.
inline ImageSize input_size(const WeightsInfo& info, const std::string& flag) {
  if (!flag.empty()) return parse_size(flag);
  if (info.height) return {int(info.height), int(info.width)};
  const int side = model_size(info.model).input;
  return {side, side};
}

// Weights of a file into a new model; what was skipped goes to `notes`. Gives what the file says of them.
inline WeightsInfo start_from(YOLOX& model, const std::string& path, const WeightsInfo& wanted,
                              std::vector<std::string>& notes) {
  const auto file = read_weights(path);
  const auto weights = find_weights(file, path);
  const std::string found = model_of_weights(weights, wanted.model);
  check(found.empty() || found == wanted.model, path, " holds weights of ", found, "; use --model ", found,
        " or other weights");
  notes.push_back(to_string(load_state_dict(*model, weights, path)));
  const auto info = weights_info(file, path);
  if (info.classes != wanted.classes && info.classes.size() == wanted.classes.size())
    notes.push_back(
        "the weights were trained on as many classes of other names: their class head is kept as a start");
  return info;
}

// A norm with the weights of another one that, in evaluation, sums up what comes to it.
struct WatchedNorm : torch::nn::BatchNorm2dImpl {
  explicit WatchedNorm(const torch::nn::BatchNorm2d& norm) : BatchNorm2dImpl(norm->options), norm(norm) {
    weight = norm->weight, bias = norm->bias;
    running_mean = norm->running_mean, running_var = norm->running_var;
    eval();
  }
  const torch::nn::BatchNorm2d norm;
  double count = 0;     // values of a channel
  Tensor sum, squares;  // float64 [C]

 protected:
  void _check_input_dim(const Tensor& x) override {  // what forward() calls with its input
    BatchNorm2dImpl::_check_input_dim(x);
    const Tensor exact = x.to(torch::kDouble), sum_here = exact.sum({0, 2, 3}),
                 squares_here = exact.square().sum({0, 2, 3});
    sum = count > 0 ? sum + sum_here : sum_here, squares = count > 0 ? squares + squares_here : squares_here;
    count += double(x.numel() / x.size(1));
  }
};

// Batch norms that were folded into their convolutions and come back from an ONNX file only add a bias. In
// training they would divide by the deviation of the batch all the same, and the network be another one. So
// they get the statistics of what comes to them from the first `most` images, and the weight and bias with
// which, in evaluation, they do what they did. Gives the number of images looked at, 0 where no norm is such.
inline int64_t unfold_norms(YOLOX& model, const Dataset& data, ImageSize size, bool legacy, int workers,
                            int64_t most = 32) {
  const torch::NoGradGuard no_grad;
  std::vector<std::pair<BaseConvImpl*, std::shared_ptr<WatchedNorm>>> watched;
  for (const auto& module : model->modules()) {
    auto* block = module->as<BaseConvImpl>();
    if (!block) continue;
    const auto& bn = *block->bn;
    const bool folded = (bn.weight == 1).all().item<bool>() && (bn.running_mean == 0).all().item<bool>() &&
                        (bn.running_var - (1 - bn.options.eps())).abs().max().item<double>() < 1e-7;
    if (!folded) continue;
    watched.emplace_back(block, std::make_shared<WatchedNorm>(block->bn));
    block->bn = std::shared_ptr<torch::nn::BatchNorm2dImpl>(watched.back().second);
  }
  if (watched.empty()) return 0;
  const EvalGuard evaluation(*model);
  const Tensor first = model->parameters()[0];
  const int64_t images = std::min<int64_t>(most, data.records.size());
  Loader loader(evaluation_items(data), 0, images, 1, {size.width, size.height}, workers, first.is_cuda());
  DeviceLoader batches(loader, first.device());
  for (int64_t i = 0; i < images; ++i)
    model(preprocess(batches.next().images, legacy).to(first.scalar_type()));
  for (const auto& [block, w] : watched) {
    block->bn = w->norm;
    const Tensor mean = w->sum / w->count, var = (w->squares / w->count - mean.square()).clamp_min(0);
    w->weight.copy_((var + w->options.eps()).sqrt()), w->bias.add_(mean);
    w->running_mean.copy_(mean), w->running_var.copy_(var);
  }
  return images;
}

}  // namespace yolox
