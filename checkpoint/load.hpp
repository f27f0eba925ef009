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
  explicit EvalGuard(torch::nn::Module& module);
  ~EvalGuard();
  EvalGuard(const EvalGuard&) = delete;
  EvalGuard& operator=(const EvalGuard&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes;
};

// The size of model that weights belong to, from the shape of the stem: `likely` where that fits, else the
// first that does; empty if none does.
std::string model_of_weights(const GenericDict& weights, const std::string& likely = "");

// The number of classes that weights predict, 0 if they have no head.
int64_t classes_of_weights(const GenericDict& weights);

// Official checkpoints do not name their classes; with 80 of them they are those of COCO, in this order.
const std::vector<std::string>& coco_classes();

// The names of a model's classes: those of its file, or COCO's; empty where neither fits.
std::vector<std::string> class_names(const WeightsInfo& info, int64_t classes);

struct LoadedModel {
  YOLOX model{nullptr};
  WeightsInfo info;    // classes: empty if the file does not name them
  std::string report;  // what was skipped; empty if all went in
};

// A model with all of its weights, in evaluation mode on the device. `model` may be empty: then the file says
// which it is. preproc: "auto" (as the file says), "bgr" or "legacy". Throws when the weights do not fill the
// model.
LoadedModel load_model(const std::string& path, const std::string& model, const std::string& preproc,
                       torch::Device device);

// The input size: that of the flag --size when given, else that the weights were trained with, else the
// model's own.
ImageSize input_size(const WeightsInfo& info, const std::string& flag);

// Weights of a file into a new model; what was skipped goes to `notes`. Gives what the file says of them.
WeightsInfo start_from(YOLOX& model, const std::string& path, const WeightsInfo& wanted,
                       std::vector<std::string>& notes);

// A norm with the weights of another one that, in evaluation, sums up what comes to it.
struct WatchedNorm : torch::nn::BatchNorm2dImpl {
  explicit WatchedNorm(const torch::nn::BatchNorm2d& norm);
  const torch::nn::BatchNorm2d norm;
  double count = 0;     // values of a channel
  Tensor sum, squares;  // float64 [C]

 protected:
  void _check_input_dim(const Tensor& x) override;
};

// Batch norms that were folded into their convolutions and come back from an ONNX file only add a bias. In
// training they would divide by the deviation of the batch all the same, and the network be another one. So
// they get the statistics of what comes to them from the first `most` images, and the weight and bias with
// which, in evaluation, they do what they did. Gives the number of images looked at, 0 where no norm is such.
int64_t unfold_norms(YOLOX& model, const Dataset& data, ImageSize size, bool legacy, int workers,
                     int64_t most = 32);

}  // namespace yolox
