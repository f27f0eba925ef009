// What a run says while it trains: a progress line and log.txt, metrics.csv, events for TensorBoard, and
// remarks on what looks wrong.
#pragma once
#include <ATen/record_function.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iomanip>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "config.hpp"
#include "data/dataset.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "dtr/trace.hpp"
#include "evaluate.hpp"
#include "run/log.hpp"
#include "run/remarks.hpp"
#include "run/tensorboard.hpp"

namespace yolox {

// Multiplications and additions of the convolutions for one image, as papers count them. All of them work on
// maps that grow with the image, so a small one tells.
double operations(YOLOX& model, ImageSize size);
double parameter_count(const torch::nn::Module& model);

// What config.json of a run holds: all settings, and what it runs with.
std::string config_json(const Flags& flags, torch::Device device);

class Telling {
 public:
  // first: the step that the run begins or goes on with.
  // rank: the first one writes metrics and events, the others have their log only.
  Telling(const std::string& run, Log& log, int64_t first, bool from_scratch, int rank = 0, bool dtr = false);

  // From now on time counts as the steps' again: an evaluation or a save lies before.
  void go_on() {
    looked_at = now();
    waited = 0;
  }
  void waited_for(double seconds) { waited += seconds; }
  // The run is back at a step: those after it will be done again.
  void go_back(int64_t step);

  // Step i (from 0) is done. Says so once a second, at the end of an epoch and of the run. within: what DTR
  // has done for it.
  void step(int64_t i, const StepNumbers& n, double lr, const Plan& plan, torch::Device device,
            const DtrStep& within = {});

  // The model was evaluated after `steps` steps.
  void evaluated(int64_t steps, const Evaluation& e, const Plan& plan);

  // What was left out of the data, where that is news: counts here, the rest in problems.txt.
  void problems(const Splits& splits);
  void problems(const Dataset& data, const std::string& list);

  // All settings, two to a line of 80 columns.
  void settings(const Flags& flags);

  // Of several ranks, since the last call: memory, the share of time that each has waited for images, and the
  // one that the others wait for.
  void ranks(Ranks& ranks, torch::Device device);

  // Boxes of each class, the ten most frequent by name, and what is missing.
  void classes(const Splits& splits);

 private:
  // ---- the progress line: 78 columns, with numbers as they are in training and four terms of the loss

  static std::string cell(size_t width, const std::string& text) {
    return std::string(width - std::min(width, text.size()), ' ') + text;
  }
  static std::string number(size_t width, const char* format, double value);
  // With DTR, the share of time that it takes stands in the place of the last term, which metrics.csv has.
  size_t terms_shown(const StepNumbers& n) const { return n.terms.size() - (dtr && !n.terms.empty()); }
  std::string heading(const StepNumbers& n) const;
  // Appends a row to metrics.csv and the same numbers to TensorBoard's events.
  void record(int64_t steps, double epoch, const StepNumbers& n, double lr, double speed, double share,
              const DtrSteps& remade);

  Log& log;
  const std::string run;
  const int rank;
  const int64_t first;
  const bool dtr;
  bool has_heading = false;
  DtrSteps again;       // since the last line
  double exceeded = 0;  // bytes: what is more is worth a warning
  std::optional<Metrics> metrics;
  std::optional<Events> events;
  Watch watch;
  Means recent, of_epoch;
  std::map<std::string, int64_t> told;  // counts of problems
  double looked_at = now(), rate = 0;   // images per second, smoothed
  double waited = 0, waited_in_all = 0, seconds_in_all = 0;
};

// Logs settings, data, model, ranks, and the length of the run.
void log_plan(Telling& tell, Log& log, const Config& config, const Splits& splits, YOLOX& model,
              ImageSize base, torch::Device device, const Plan& plan, double lr, const Ranks& ranks);

}  // namespace yolox
