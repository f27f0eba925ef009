// SPDX-License-Identifier: Apache-2.0
// Progress of a run: progress line and log, metrics.csv, TensorBoard events, and notes on unusual
// statistics.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/flags.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "evaluate.hpp"
#include "optim.hpp"
#include "run/log.hpp"
#include "run/step_metrics.hpp"

namespace yolox {

double parameter_count(const torch::nn::Module& model);

// Returns config.json of a run: all settings, device, versions, git revision, machine, and the date of the
// start of this process. ranks: number of ranks.
std::string config_json(const Flags& flags, torch::Device device, int ranks);

// Returns a note for the log if training has waited for the data loader for more than half of the time, and
// for more than half a minute in total, otherwise "". waited: seconds of waiting in the last `seconds`
// seconds. noted: of the run; is set, so that there is one note.
std::string waiting_note(double waited, double seconds, bool& noted);

// Returns a note for the log if the learning rate is far from the usual one of the optimizer, otherwise "".
std::string learning_rate_note(const std::string& optimizer, double lr, int64_t batch, bool fine_tuned);

// Reports the progress of training to the log, metrics.csv and TensorBoard. Used by the training thread.
class RunProgress {
 public:
  // run: the run folder. first: first step of this process. Only rank 0 writes metrics and events.
  // dtr: show the statistics of DTR. evaluates: a resumed run evaluates before its
  // first step, so that rows of an evaluation at this step are deleted.
  RunProgress(const std::string& run, Log& log, int64_t first, int rank = 0, bool dtr = false,
              bool evaluates = true);

  // Restarts the measurement of speed and waiting time. Call it after an evaluation, whose time must not
  // count.
  void restart_clock() {
    last_time = now();
    waited = 0;
  }
  // Adds time that training has waited for the data loader.
  void add_wait(double seconds) { waited += seconds; }

  // Records step i (from 0). Prints a line for the first step, at most once a second, and at the end of each
  // epoch and of the run. within: statistics of DTR for this step.
  void step(int64_t i, const StepMetrics& n, double lr, const Plan& plan, torch::Device device,
            const DtrStep& within = {});

  // Reports the evaluation after `steps` steps. best: it is the best of the run so far.
  void log_evaluation(int64_t steps, const Evaluation& e, const Plan& plan, bool best);
  // Reports how many images of an evaluation are done.
  void evaluated(int64_t done, int64_t images) {
    log.progress(concat("  evaluated ", done, " of ", images, " images"), /*keep=*/false);
  }
  // Logs the number of data problems of each kind if the number has changed, and writes all problems to
  // problems.txt or to `list`.
  void log_problems(const Splits& splits);
  void log_problems(const Dataset& data, const std::string& list);

  // Logs for several ranks: memory and data loader waiting time of each rank, and the slowest rank since the
  // last call. All ranks must call it together.
  void log_ranks(Ranks& ranks, torch::Device device);

 private:
  // Appends a row to metrics.csv and the same values to the TensorBoard events.
  void record(int64_t steps, double epoch, const StepMetrics& n, double lr, double speed, double share,
              const DtrSteps& remade);

  Log& log;
  const std::string run;
  const int rank;
  const int64_t first;
  const bool dtr;
  bool has_heading = false;
  DtrSteps again;       // statistics of DTR since the last row of metrics.csv
  double exceeded = 0;  // bytes; a step that needs more is worth a new warning
  std::optional<Metrics> metrics;
  std::optional<Events> events;
  bool noted_waiting = false;
  Means recent, of_epoch;
  std::map<std::string, int64_t> logged_problems;  // logged number of problems of each kind
  double last_time = now();                        // time of the last progress line
  double rate = 0;                                 // images per second, exponential moving average
  double waited = 0;                               // seconds waited for the data loader since last_time
  double total_waited = 0, total_seconds = 0;
};

// Logs the flags that were given.
void log_flags(Log& log, const Config& config);

// Logs the number of boxes, the ten most frequent classes, and the classes without boxes.
void log_classes(Log& log, const Splits& splits);

// Logs settings, data, model, ranks, and the length of the run.
void log_plan(Log& log, const Config& config, const Splits& splits, YOLOX& model, ImageSize base,
              torch::Device device, const Plan& plan, const Ranks& ranks);

// --dry-run: prints what a training logs at its start, and all problems of the data, and ends the ranks.
// Returns the exit code: 1 if there are problems.
int dry_run(Config& config, const Splits& splits, YOLOX& model, ImageSize base, torch::Device device,
            const std::vector<std::string>& notes, Ranks& ranks);

}  // namespace yolox
