// What a training changes as it goes, and how a checkpoint holds it.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint.hpp"
#include "checkpoint/onnx_weights.hpp"
#include "evaluate.hpp"
#include "optim.hpp"
#include "yolox.hpp"

namespace yolox {

struct Training {
  YOLOX model, ema{nullptr};  // ema: empty when there is none
  Optimizer optimizer;
  GradScaler scaler;
  int64_t iteration = 0;     // steps done
  int64_t ema_updates = 0;   // fewer than the steps by those that were skipped
  int64_t skipped = 0;       // steps with gradients that overflowed
  int64_t epochs = 0;        // ended ones, with their evaluation
  std::optional<double> ap;  // of the evaluation after this step, if there was one
  double best_ap = -1;
  int64_t stale = 0;     // evaluations since the best
  double lr_factor = 1;  // halved by --keep-going
  int64_t returns = 0;   // of --keep-going to a checkpoint

  // A step is done, and its model has not been evaluated.
  void count_step() {
    ++iteration;
    ap.reset();
  }
  // What is evaluated and saved as the result.
  YOLOX& judged() { return ema.is_empty() ? model : ema; }
};

// Parameters and statistics.
std::vector<Tensor> tensors_of(YOLOX& model);

// All that ranks have in common.
std::vector<Tensor> tensors_of(Training& t);

// To a device, and to float32 or float64; whole numbers stay whole.
void move(YOLOX& model, torch::Device device, at::ScalarType type);

// A copy of a model with tensors of its own.
YOLOX copy_of(const YOLOX& model, const std::string& name, torch::Device device);

// The state of torch's random numbers, on the CPU and on the device. Nothing here draws from them while it
// trains (the order and the augmentation of images depend on seed and step alone), but a model with dropout
// would.
c10::IValue random_state(torch::Device device);
void set_random_state(const c10::IValue& state, torch::Device device);

// A checkpoint, of a run with so many steps an epoch and images in all: official YOLOX finds model,
// optimizer, start_epoch, best_ap and curr_ap; what the weights need is under "yolox", and what only resuming
// needs under "train".
GenericDict checkpoint(Training& t, const WeightsInfo& info, const Settings& settings, int64_t per_epoch,
                       int64_t images);

// The settings in a checkpoint. Throws when the file is not one of a training.
Settings saved_settings(const c10::IValue& file, const std::string& path);

// Goes on from such a file. Throws when it is of another model, or counts its epochs in other steps.
void load_checkpoint(Training& t, const c10::IValue& file, int64_t per_epoch, const std::string& path);

}  // namespace yolox
