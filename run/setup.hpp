// What happens before the first step: the process, the data, the model and its weights, and what ranks share.
// train.cpp and examples/multitask.cpp call these one after the other.
#pragma once
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "run/saving.hpp"
#include "run/state.hpp"

namespace yolox {

// Prepares this process for training, and returns its device: random number generators, threads of OpenCV,
// allocator (--dtr), determinism and anomaly mode.
torch::Device prepare_process(const Config& config, const Place& place);

// Loads the data sets. On each machine one rank checks the images first, and the others read its results.
// Throws if a data set is empty, if --strict finds a problem, or if the ranks have different data or
// settings.
Splits load_data(const Config& config, const std::string& data, const std::string& run, Ranks& ranks);
void check_ranks(Ranks& ranks, const Config& config, const Splits& splits, const SavedRun& saved,
                 torch::Device device);

// Returns a new model in channels-last memory on the device, with the weights of --weights if there are any,
// and sets `info`. saved: the run that is resumed; its weights are loaded later, by Run::resume(). notes: for
// the log.
YOLOX new_model(const Config& config, const SavedRun& saved, const Dataset& data, torch::Device device,
                WeightsInfo& info, std::vector<std::string>& notes);

// Returns model, optimizer, scaler and EMA, with the parts of --freeze frozen.
Training new_training(const Config& config, YOLOX model, torch::Device device);

// Returns the network as a function: images [B, 3, H, W] to predictions. The model is compiled there, so that
// an edit of the loss does not compile it again.
std::function<Predictions(const Tensor&)> network_of(YOLOX model);

// Settings of evaluate() for this rank.
EvalSettings evaluation_settings(const Config& config, const WeightsInfo& info, int64_t share,
                                 torch::Device device, Ranks& ranks);

// Gives all ranks the state of rank 0, and checks that they have it.
void synchronize(Ranks& ranks, Training& t);

// Clips the gradients and returns their norm before that. All ranks use the norm of rank 0 if they are on
// several machines, because different processors may round it differently.
Tensor clip_on_all_ranks(const std::vector<Tensor>& gradients, double max_norm, Ranks& ranks);

}  // namespace yolox
