// SPDX-License-Identifier: Apache-2.0
// The folder run/ has the code of a training run besides the training step itself: run folder, log, metrics,
// checkpoints, recovery, the files for report.html, crash.txt and profile. train() of train.cpp uses it.
// This file: the run folder and its log, evaluations while training, and the end of a run.
#pragma once
#include <torch/torch.h>

#include <string>

#include "config.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "run/progress.hpp"
#include "run/saving.hpp"
#include "run/step_memory.hpp"

namespace yolox {

// Creates and locks the folder of a new run. Returns its path, or that of the resumed run, on all ranks.
std::string open_run_folder(const Config& config, const SavedRun& saved, Ranks& ranks);

// Opens the log of this rank, and logs folder and hardware. Sets up crash reports.
Log open_log(const std::string& run, const Config& config, const SavedRun& saved, torch::Device device,
             Ranks& ranks);

// Returns the writer of the checkpoints, which writes on rank 0 only. images: in the training set.
Saver new_saver(const std::string& run, const Config& config, const WeightsInfo& info, const Plan& plan,
                int64_t images, const Ranks& ranks);

// Loads the checkpoint of a resumed run and frees its memory. Throws UsageError if the run is complete or was
// stopped by --patience; with --resume auto it logs this and returns false. resume: --resume.
bool resume_run(SavedRun& saved, Training& t, const Plan& plan, const std::string& resume, Saver& saver,
                Log& log);

// Logs settings, data, model, plan and notes. Writes config.json, labels.jpg and, for a new run, the first
// last.pth. Installs the signal handlers and starts the timeout. Call it before the first step.
void start_run(const std::string& run, const Config& config, const SavedRun& saved, const Splits& data,
               Training& t, const Plan& plan, torch::Device device, Ranks& ranks, Saver& saver,
               Progress& progress, Log& log);

// What all ranks have agreed on.
struct Agreement {
  int signal = 0;           // the signal that ends the run; 0: none
  bool save_due = false;    // last.pth is due (--save-minutes)
  double step_seconds = 0;  // of the slowest rank
};
// All ranks must call it together.
Agreement agree(Ranks& ranks, const Saver& saver, const UnreadSteps& unread);

// Evaluates the EMA model, or the model without EMA, while training. All ranks must call it together.
class Evaluator {
 public:
  Evaluator(const std::string& run, const Dataset& data, EvalSettings settings, Ranks& ranks);

  // Returns an evaluation. It is incomplete if a signal arrived. Repeats it with a smaller batch if memory
  // runs out.
  Evaluation evaluate(Training& t, Log& log);
  // Writes the files of the best evaluation so far that report.html shows.
  void save(const Training& t, const Evaluation& e, Log& log) const;

 private:
  const std::string run;
  const Dataset& data;
  EvalSettings settings;
  Ranks& ranks;
  RetryInParts in_parts;  // of settings.batch
};

// Saves a failed step: nonfinite.pth, with batch, weights and statistics, and nonfinite.jpg. Returns a text
// with the paths of these files, or with the reason why they could not be written.
std::string save_failed_step(const std::string& run, Training& t, const Plan& plan, const StepRow& row,
                             const Batch& batch, int rank = 0);

// Saves a failed step and throws std::runtime_error with its numbers and the command to continue. batch: of
// this step.
[[noreturn]] void report_failed_step(const std::string& run, Training& t, const Plan& plan,
                                     const StepFailed& failed, const Batch& batch, int rank);

}  // namespace yolox
