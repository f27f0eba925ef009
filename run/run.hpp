// Run: the folder of a training run and all that the run writes there. Log, progress line, metrics,
// checkpoints, pictures, report.html, crash.txt. train.cpp reaches this folder of the sources through it.
#pragma once
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config.hpp"
#include "data/batch.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "evaluate.hpp"
#include "run/fit.hpp"
#include "run/log.hpp"
#include "run/numbers.hpp"
#include "run/progress.hpp"
#include "run/saving.hpp"
#include "run/state.hpp"

namespace yolox {

// Makes the folder of a new run, or takes that of the run that is resumed. All ranks get its name. wanted:
// --out; name: of the folder below runs/ if --out was not given.
std::string open_run_folder(const SavedRun& saved, const std::string& wanted, const std::string& name,
                            Ranks& ranks);

// "" for rank 0, "_rank3" for rank 3: each rank has log and problems in files of its own.
std::string rank_suffix(const Ranks& ranks);

class Run {
 public:
  Run(const Config& config, const WeightsInfo& info, const SavedRun& saved, const Splits& data, Ranks& ranks,
      torch::Device device);
  ~Run();
  Run(const Run&) = delete;

  const std::string folder;
  Log log;

  // A line for the log after the settings.
  void note(const std::string& text);

  // ---- before the first step

  // --cache: decodes all images of a data set once.
  void cache_images(Dataset& train);
  // Loads the checkpoint of a resumed run and frees its memory. Throws if the run is complete.
  void resume(Training& t, SavedRun& saved, const Plan& plan);
  // Logs settings, data, model and plan. Writes config.json, labels.jpg and the first last.pth. facts: more
  // lines.
  void start(Training& t, Plan& plan, bool with_dtr, const std::vector<std::string>& facts);

  // ---- each step

  bool profiling() const { return config.profile; }
  // True if the last epoch has ended without its evaluation, as after a signal.
  bool evaluation_due(const Training& t) const;
  // True on all ranks after the same step, once any rank has received a signal that ends the run.
  bool stop_requested();
  // waited: seconds that the step waited for its batch.
  void start_step(int64_t step, const Batch& batch, double waited);
  void end_step(Training& t, const StepNumbers& numbers, double lr, const DtrStep& dtr);
  // --profile. False after its last step.
  bool profile_step(Training& t);
  // Saves last.pth if --save-minutes have passed.
  void save_if_due(Training& t);

  // ---- the end of an epoch

  // Evaluates the model with a smaller batch if memory runs out. The result is incomplete if a signal came.
  Evaluation evaluate(Training& t);
  // Logs memory, waiting time, an evaluation and problems of the data, and writes report.html. complete:
  // training is over. Returns true on all ranks if it is over on rank 0 before the last step (stop_early).
  bool end_of_epoch(Training& t, const Evaluation* e, bool stop_early);
  // Saves a checkpoint. False if the disk is full; `required`: throws then.
  bool save(Training& t, const std::string& name, bool required = false);
  bool saved_at(int64_t step) const { return saver.in_last == step; }
  // Resumes the newest good checkpoint at half the learning rate (--keep-going).
  void go_back(Training& t);

  // ---- the end of the run

  // Logs the result, or how to resume after a signal; saves then.
  void finish(Training& t);

  const Config& config;
  const Splits& data;
  double best_ap = -1;  // for the last line of the log

 private:
  struct Profiling;

  const WeightsInfo info;
  Ranks& ranks;
  const torch::Device device;
  const bool resumed;
  Plan plan{};
  Saver saver;
  std::vector<std::string> notes;
  std::optional<Telling> progress;
  std::unique_ptr<Profiling> profile;
  int64_t first = 0;      // step that this process starts with
  int64_t reported = -1;  // step of the latest report.html
  int stop = 0;           // the signal that ends all ranks after the same step
  bool complete = false;  // training is over, not only this process
  std::optional<PartsThatFit> eval_fit;
};

}  // namespace yolox
