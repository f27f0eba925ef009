// SPDX-License-Identifier: Apache-2.0
// The folder run/ has the code of a training run besides the training step itself: run folder, log, metrics,
// checkpoints, recovery, the files for report.html, crash.txt and profile. train() of train.cpp uses it.
// This file: the setup before the first step, the run folder and its log, evaluations while training, and the
// end of a run.
#pragma once

#include <string>
#include <vector>

#include "base/device.hpp"
#include "base/torch.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "run/progress.hpp"
#include "run/saving.hpp"
#include "run/step_memory.hpp"

namespace yolox {

// ---- process, data, model and weights

// Configures this process for training: threads, allocators (--dtr), determinism, TF32 and anomaly mode. Sets
// what depends on the machine: config.amp, if it is auto, and config.loader_threads. Returns the device.
torch::Device prepare_process(Config& config, const RankInfo& rank_info);

// Lets bn_silu() use its CUDA kernels, after a comparison with torch on a small tensor of each dtype. If a
// rank finds a difference, all ranks keep torch's batch norm and SiLU. Returns a line for the log about that,
// or "". All ranks must call it together. Draws no random numbers.
std::string turn_on_fused_norm(torch::Device device, Ranks& ranks);

// Returns true if a run is so long that cuDNN should time its algorithms: see use_cudnn_benchmark(). Does not
// depend on the step at which the run is resumed.
bool cudnn_benchmark_pays(const Config& config, const Plan& plan);

// Loads the data sets. On each machine one rank checks the images first, and the others read its results.
// Throws if a data set is empty, --strict finds a problem, the ranks have different data, settings or
// checkpoints, or there are more ranks than images. All ranks must call it together.
Splits load_data(const Config& config, const std::string& data, const SavedRun& saved, torch::Device device,
                 Ranks& ranks);
// --cache: decodes the images of a data set once on each machine, whose ranks share them, and makes `data`
// read them. All ranks must call it together.
void cache_images(Dataset& data, const Config& config, ImageSize size, Ranks& ranks, Log& log);

// Freezes the parts of --freeze, or none. Sets `parts` to `of_recipe` if it is "recipe". Throws UsageError if
// a part does not exist, or nothing is left to train.
void freeze_parts(torch::nn::Module& model, std::string& parts, const std::string& of_recipe);

// Returns a new model on the device, in the channels-last memory format, with the weights of --weights if
// given, and the parts of --freeze frozen. The recipe freezes the stem only if all of it is in the file. Sets
// `info`. Adds lines for the log to `notes`. saved: the resumed run; resume_run() loads its weights later.
YOLOX new_model(Config& config, const SavedRun& saved, const Dataset& data, torch::Device device,
                WeightsInfo& info, std::vector<std::string>& notes);

// Returns model, optimizer, scaler and EMA, and how steps compute. ema: a copy of the model, or empty. data:
// for training. casts_together: see CastWeights; not with DTR.
Training new_training(const Config& config, YOLOX model, YOLOX ema, const WeightsInfo& info,
                      const Dataset& data, torch::Device device, bool casts_together);

// ---- run folder and log

// Opens the log of this rank, and logs the folder. Sets up crash reports.
Log open_log(const std::string& run, const Config& config, const SavedRun& saved, torch::Device device,
             Ranks& ranks);

// Loads the checkpoint of a resumed run and frees its memory. Throws UsageError if the run is complete or was
// stopped by --patience; with --resume auto it logs this and returns false. resume: --resume.
bool resume_run(SavedRun& saved, Training& t, const Plan& plan, const std::string& resume, Saver& saver,
                Log& log);

// Logs settings, data, model, plan and notes. Writes config.json, labels.jpg and, for a new run, the first
// last.pth. Installs the signal handlers and starts the timeout. Call it before the first step.
void start_run(const std::string& run, const Config& config, const SavedRun& saved, const Splits& data,
               Training& t, const Plan& plan, torch::Device device, Ranks& ranks, Saver& saver,
               Progress& progress, Log& log);

// ---- steps and evaluations

// What all ranks have agreed on.
struct Agreement {
  int signal = 0;           // the signal that ends the run; 0: none
  bool save_due = false;    // last.pth is due (--save-minutes)
  double step_seconds = 0;  // of the slowest rank
};
// All ranks must call it together.
Agreement agree(Ranks& ranks, const Saver& saver, const UnreadSteps& unread);

// Returns the settings of evaluations while training.
EvalSettings eval_settings(const std::string& run, const Config& config, const WeightsInfo& info,
                           const Plan& plan, torch::Device device, Ranks& ranks);
// Evaluates the EMA model, or the model without EMA. The evaluation is incomplete if a signal arrived. If
// memory runs out, repeats it with half of settings.batch. All ranks must call it together.
Evaluation evaluate(Training& t, const Dataset& data, EvalSettings& settings, Ranks& ranks, Log& log);
// Writes the files of the best evaluation so far that report.html shows, on rank 0.
void save_evaluation(const std::string& run, const Training& t, const Evaluation& e, const Dataset& data,
                     Log& log);

// ---- the end of a run

// Saves a failed step (nonfinite.pth, with batch and weights; running statistics may be those of later steps,
// which a GPU has made before the numbers are read; and nonfinite.jpg), and throws
// std::runtime_error with its numbers, the paths of these files, and the command to continue. batch: of this
// step.
[[noreturn]] void report_failed_step(const std::string& run, Training& t, const Plan& plan,
                                     const StepFailed& failed, const Batch& batch, int rank);

// Runs tools/report.py on a run folder, with the Python of python_with(). Returns "", or a line for the log
// if there is no report: the reason, and the command that writes it. Does nothing with $YOLOX_NO_REPORT, and
// if the run was ended by a signal other than Ctrl-C, because the machine may soon be gone then.
std::string write_report(const std::string& run, int signal = 0);

// ---- crash.txt has the fatal signal or the exception that ended a run, the step with its images, all
// settings and versions, and the stack after a signal or std::terminate(). The stack of an exception that
// main() has caught is lost; gdb shows it (CONTRIBUTING.md). Each crash appends a report. There is none after
// SIGKILL, which the kernel sends when memory runs out.

// Installs handlers of fatal signals and std::terminate(), which write reports to folder/name. A report
// contains `text` (settings, versions) and the command line. A second call only changes folder, name and
// text.
void crash_context(const std::string& folder, const std::string& text, const std::string& name = "crash.txt");

// Sets the description of the current step. Only one thread may call it.
void crash_step(const std::string& text);

// Writes a report about the exception that the enclosing catch block handles. Does nothing before
// crash_context().
void write_crash();

}  // namespace yolox
