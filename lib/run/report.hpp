// SPDX-License-Identifier: Apache-2.0
// report.html of a run: training curves, the last evaluation, pictures and settings. The evaluation section,
// also for ./eval: metrics, curves, per-class results, confusion matrix and the images with the most errors.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coco_eval.hpp"
#include "data/dataset.hpp"
#include "evaluate.hpp"
#include "metrics/errors.hpp"
#include "run/log.hpp"

namespace yolox {

// Returns the evaluation section. heading: such as "after step 100". data: source of the images; may be null.
std::string evaluation_html(const std::string& heading, const EvalResult& result, const CocoDataset& truth,
                            const ErrorAnalysis& analysis, const Dataset* data,
                            const std::optional<VocResult>& voc = {});

// Returns the settings and versions in config.json of a run. Empty if the file cannot be read.
std::vector<std::pair<std::string, std::string>> read_config_json(const std::string& run);

// Returns the points (x, y) with a finite y. If there are more than 300, averages neighbours to at most 300.
std::vector<std::pair<double, double>> curve(const std::vector<double>& x, const std::vector<double>& y);

// Returns the HTML section with the training curves, from metrics.csv.
std::string training_html(const std::string& run);

// Writes report.html. e: the evaluation after `step` on `val`; null keeps the one of the existing report.
// Returns false and logs a warning if the report cannot be written; the old one then stays. Never throws,
// because a missing report must not end a run.
bool report(const std::string& run, Log& log, int64_t step = 0, const Evaluation* e = nullptr,
            const Dataset* val = nullptr);

}  // namespace yolox
