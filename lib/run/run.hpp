// SPDX-License-Identifier: Apache-2.0
// The folder run/ has the code of a training run besides the training step itself: run folder, log, metrics,
// checkpoints, recovery, the files for report.html, crash.txt and profile. train.cpp uses the folder through
// class Run. This file: class Run.
#pragma once
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "evaluate.hpp"
#include "run/log.hpp"
#include "run/profile.hpp"
#include "run/progress.hpp"
#include "run/saving.hpp"
#include "run/state.hpp"
#include "run/step_memory.hpp"
#include "run/step_metrics.hpp"

namespace yolox {

// Writes nonfinite.pth, with batch, weights and statistics of a step, and nonfinite.jpg. Returns a text with
// the paths of these files, or with the reason why they could not be written.
std::string save_failed_step(const std::string& run, Training& t, const StepRecord& step, int rank = 0);

// A training run: its folder, log, checkpoints and evaluations. Every rank has one. All member functions are
// called by the training thread.
class Run {
 public:
  Run(const Config& config, const WeightsInfo& info, const SavedRun& saved, const Splits& data, Ranks& ranks,
      torch::Device device);
  Run(const Run&) = delete;

  const std::string folder;
  Log log;

  // Adds a line that start() logs after the settings. An empty text is no line.
  void note(const std::string& text) { notes.push_back(text); }

  // ---- before the first step

  // Decodes all images of a data set into the cache (--cache).
  void cache_images(Dataset& train);
  // Sets the plan. Loads the checkpoint of a resumed run and frees the memory of `saved`. Throws UsageError
  // if the run is complete or was stopped by --patience; with --resume auto it logs this and returns false.
  bool resume(Training& t, SavedRun& saved, const Plan& plan);
  // Logs settings, data, model and plan. Writes config.json, labels.jpg and the first last.pth. Installs the
  // signal handlers.
  void start(Training& t, Plan& plan, bool with_dtr);

  // ---- each step

  bool profiling() const { return config.profile; }
  // Returns true if the last epoch has ended without its evaluation, for example because of a signal.
  bool evaluation_due(const Training& t) const;
  // Lets all ranks agree whether any rank has received a signal that ends the run, and whether last.pth is
  // due. All ranks must call it together, once in a step.
  void check_signals();
  bool stopped() const { return stop != 0; }
  // Reports the start of a step to the watchdog and the crash report. Rank 0 saves pictures of the first
  // three batches. waited: seconds that the step has waited for its batch.
  void start_step(int64_t step, const Batch& batch, double waited);
  // Returns true on all ranks if the numbers of all steps must be read now: before a checkpoint, an
  // evaluation or the end of the run, and with --profile.
  bool must_read_all(const Training& t) const;
  // Counts and logs a step whose numbers have been read. Calls fail_step() if training cannot continue after
  // it, see stop_reason().
  void end_step(Training& t, const StepRecord& record);
  // Saves a step (nonfinite.pth) and throws std::runtime_error with `why` and the command to continue.
  [[noreturn]] void fail_step(Training& t, const std::string& why, const StepRecord& record);
  // Reports the end of a step to the profile (--profile). Returns false after the last step of the profile.
  bool profile_step();
  // Saves last.pth if more than --save-minutes have passed since the last save of rank 0.
  void save_if_due(Training& t);

  // ---- the end of an epoch

  // Evaluates the EMA model, or the model without EMA. Repeats the evaluation with a smaller batch if memory
  // runs out. The result is incomplete if a signal arrived.
  // loss: computes the validation loss.
  Evaluation evaluate(Training& t, BatchLoss* loss);
  // Writes the files of the best evaluation so far that report.html shows.
  void save_evaluation(const Training& t, const Evaluation& e);
  // Logs skipped steps and problems of the data. stop_early: rank 0 ends training before the last step
  // (--patience). Returns stop_early of rank 0 on all ranks.
  bool end_of_epoch(Training& t, bool stop_early);
  // Saves a checkpoint. If writing fails, for example on a full disk, it returns false, or throws if
  // `required`.
  bool save(Training& t, const std::string& name, bool required = false);
  // Saves last.pth on this rank, which need not be rank 0, with another --accum for the resumed run. For
  // NeedsRestart: weights are equal on all ranks, and no step can follow.
  void save_for_restart(Training& t, int64_t accum);
  bool saved_at(int64_t step) const { return saver.last_step == step; }  // last.pth holds this step

  // ---- the end of the run

  // Logs the result. After a signal, saves last.pth and logs how to resume.
  void finish(Training& t);
  // Writes report.html, on rank 0. Call it after the ranks have closed, because it may take a minute.
  void write_report();

  const Config& config;
  const Splits& data;
  double best_score = -1;  // best score_of() of the run, for the last line of the log; -1: none

 private:
  const WeightsInfo info;
  Ranks& ranks;
  const torch::Device device;
  const bool resumed;
  Plan plan{};
  Saver saver;
  std::vector<std::string> notes;
  std::optional<RunProgress> progress;
  std::optional<Profile> profile;  // on rank 0, with --profile
  int64_t first = 0;               // first step of this process
  int64_t skipped = 0;             // steps in a row whose gradient was not finite
  int stop = 0;                    // the signal that ends the run on all ranks; 0: none
  bool save_due = false;           // on all ranks: last.pth is due
  bool complete = false;           // the last step is done, or --patience has ended the run
  std::optional<RetryInParts> eval_parts;
};

}  // namespace yolox
