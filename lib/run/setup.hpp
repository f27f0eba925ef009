// SPDX-License-Identifier: Apache-2.0
// Setup of a training before the first step: process, data, model, weights and ranks. train.cpp
// calls these functions one after the other.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "base/device.hpp"
#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "run/saving.hpp"
#include "run/state.hpp"

namespace yolox {

// Configures this process for training: OpenCV threads, allocators (--dtr), determinism, TF32 and anomaly
// mode. Sets what depends on the machine: config.amp, if it is auto, and config.loader_threads. Returns the
// device.
torch::Device prepare_process(Config& config, const RankInfo& rank_info);

// Lets bn_silu() use its CUDA kernels, after a comparison with torch on a small tensor of each dtype. If a
// rank finds a difference, all ranks keep torch's batch norm and SiLU. Returns a line for the log about that,
// or "". All ranks must call it together. Draws no random numbers.
std::string turn_on_fused_norm(torch::Device device, Ranks& ranks);

// Returns true if a run is so long that cuDNN should time its algorithms: see use_cudnn_benchmark(). Does not
// depend on the step at which the run is resumed.
bool cudnn_benchmark_pays(const Config& config, const Plan& plan);

// Sets torch's number of threads for the whole run: one if a step is small, otherwise at most as many as the
// CPU quota allows. The number does not follow the load of the machine, because the order of additions
// depends on it. Changes nothing on a GPU, with several ranks, whose launcher divides the cores, and if the
// user has set OMP_NUM_THREADS or the cores of OpenMP. parameters: of the model. size: of the input.
void set_compute_threads(double parameters, ImageSize size, torch::Device device, int world);

// Locks the folder of a resumed run and reads its newest checkpoint again, because a training that was just
// ending may have saved a later step since find_run(). Throws if another training uses the folder, or if it
// has changed the settings. Does nothing without --resume. All ranks must call it together.
void lock_resumed_run(SavedRun& saved, Ranks& ranks);

// Loads the data sets. On each machine one rank checks the images first, and the others read its results.
// Throws if a data set is empty or --strict finds a problem.
Splits load_data(const Config& config, const std::string& data, const std::string& run, Ranks& ranks);
// --cache: decodes the images of a data set once on each machine, whose ranks share them, and makes `data`
// read them. All ranks must call it together.
void cache_images(Dataset& data, const Config& config, ImageSize size, Ranks& ranks, Log& log);
// Throws if the ranks have different data or settings, or if there are more ranks than images.
void check_ranks(Ranks& ranks, const Config& config, const Splits& splits, const SavedRun& saved,
                 torch::Device device);

// Freezes the parts of --freeze, or none. Sets `parts` to `of_recipe` if it is "recipe". Throws UsageError if
// a part does not exist, or nothing is left to train.
void freeze_parts(torch::nn::Module& model, std::string& parts, const std::string& of_recipe);

// Returns a new model on the device, in the channels-last memory format, with the weights of --weights if
// given, and the parts of --freeze frozen. The recipe freezes the stem only if all of it is in the file. Sets
// `info`. Adds lines for the log to `notes`. saved: the resumed run; Run::resume() loads its weights later.
YOLOX new_model(Config& config, const SavedRun& saved, const Dataset& data, torch::Device device,
                WeightsInfo& info, std::vector<std::string>& notes);

// Returns model, optimizer, scaler and EMA, and how steps compute. ema: a copy of the model, or empty.
// data: for training. casts_together: see
// CastWeights; not with DTR.
Training new_training(const Config& config, YOLOX model, YOLOX ema, const WeightsInfo& info,
                      const Dataset& data, torch::Device device, bool casts_together);

// Returns the settings of evaluate() for this rank.
EvalSettings evaluation_settings(const Config& config, const WeightsInfo& info, const Plan& plan,
                                 torch::Device device, Ranks& ranks);

}  // namespace yolox
