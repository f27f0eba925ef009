// SPDX-License-Identifier: Apache-2.0
// Progress of a run: progress line and log, metrics.csv, TensorBoard events, and notes on unusual
// statistics.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/flags.hpp"
#include "base/torch.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "evaluate.hpp"
#include "run/log.hpp"
#include "run/saving.hpp"
#include "run/step_metrics.hpp"

namespace yolox {

class Profile;

// Returns config.json of a run: all settings, device, versions and git revision. ranks: number of ranks.
std::string config_json(const Flags& flags, torch::Device device, int ranks);

// Returns a note for the log if a GPU mostly waits for the host, which launches its kernels, otherwise "".
// idle: number of steps of `steps` in which it has waited. loader_share: share of the time in which training
// has waited for the data loader.
std::string launch_note(int64_t idle, int64_t steps, double loader_share);

// Returns a note for the log if the learning rate is far from the usual one of the optimizer, otherwise "".
std::string learning_rate_note(const std::string& optimizer, double lr, int64_t batch, bool fine_tuned);

// Returns true if the last epoch has ended without its evaluation, for example because of a signal.
bool evaluation_due(const Training& t, const Plan& plan);
// Returns true if training is over: after the last step and its evaluation, or because of --patience.
bool is_complete(const Training& t, const Plan& plan);
// Returns the plan of --profile: some steps from step `first` on, without evaluation.
Plan profiled(Plan plan, int64_t first);

// Reports the progress of training to the log, metrics.csv and TensorBoard. Used by the training thread.
class Progress {
 public:
  // run: the run folder. first: first step of this process. Only rank 0 writes metrics and events.
  // dtr: show the statistics of DTR. profile: record the steps of profiled().
  Progress(const std::string& run, Log& log, torch::Device device, int64_t first, int rank = 0,
           bool dtr = false, bool profile = false);

  // Restarts the measurement of speed and waiting time.
  void restart_clock() {
    last_time = now();
    waited = 0;
  }
  // Describes a step (from 0) for crash.txt, and saves pictures of the first three batches. waited: seconds
  // that the step has waited for its batch.
  void start_step(const Plan& plan, int64_t step, const Batch& batch, double waited);
  // Records steps. Prints a line for the first step, at most once a second, and at the end of each epoch and
  // of the run. Returns the number of steps whose gradient was not finite. Throws StepFailed if training
  // cannot continue, see stop_reason().
  int64_t log_steps(const std::vector<StepRow>& steps, const Plan& plan);

  // Reports the evaluation after `steps` steps. best: it is the best of the run so far.
  void log_evaluation(int64_t steps, const Evaluation& e, const Plan& plan, bool best);
  // Logs the number of data problems of each kind if the number has changed, and writes all problems to
  // problems.txt and problems_val.txt.
  void log_problems(const Splits& splits);

  // Logs for several ranks: memory and data loader waiting time of each rank, and the slowest rank since the
  // last call. All ranks must call it together.
  void log_ranks(Ranks& ranks);
  // Logs skipped steps, problems of the data, and whether --patience ends training. Evaluation and saving do
  // not count for the times of the next epoch. All ranks must call it together.
  void end_epoch(const Training& t, const Plan& plan, const Splits& data, Ranks& ranks);
  // Logs the result of the run, or after a signal how to resume it, or the profile. signal: see Agreement.
  void log_end(const Training& t, const Plan& plan, int signal);

 private:
  // Prints a line after step i, if it is time for one, and writes its row. lr: of this step.
  void print(int64_t i, double lr, const Plan& plan);

  Log& log;
  const std::string run;
  const torch::Device device;
  const int rank;
  const int64_t first;
  const bool dtr;
  bool has_heading = false;
  int64_t skipped = 0;  // steps in a row whose gradient was not finite
  double exceeded = 0;  // bytes; a step that needs more is worth a new warning
  std::optional<Metrics> metrics;
  std::shared_ptr<Profile> profile;  // shared_ptr, because the type is incomplete here
  int64_t idle_steps = 0;            // for launch_note()
  Means recent, of_epoch;
  std::map<std::string, int64_t> logged_problems;  // logged number of problems of each kind
  double last_time = now();                        // time of the last progress line
  double rate = 0;                                 // images per second, exponential moving average
  double waited = 0;                               // seconds waited for the data loader since last_time
  double total_waited = 0, total_seconds = 0;
};

// Logs the number of boxes, the ten most frequent classes, and the classes without boxes.
void log_classes(Log& log, const Splits& splits);

// Logs the flags that were given, data, model, ranks, the length of the run, and the notes.
void log_plan(Log& log, const Config& config, const Splits& splits, YOLOX& model, torch::Device device,
              const Plan& plan, const Ranks& ranks, const std::vector<std::string>& notes);

// --dry-run: prints what a training logs at its start, and all problems of the data, and ends the ranks.
// Returns the exit code: 1 if there are problems.
int dry_run(Config& config, const Splits& splits, YOLOX& model, torch::Device device,
            const std::vector<std::string>& notes, Ranks& ranks);

}  // namespace yolox
