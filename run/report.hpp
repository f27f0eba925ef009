// SPDX-License-Identifier: Apache-2.0
// report.html of a run: training curves, the last evaluation, pictures and settings.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "evaluate.hpp"
#include "metrics/report.hpp"
#include "run/log.hpp"

namespace yolox {

// Returns the settings and versions in config.json of a run. Empty if the file cannot be read.
std::vector<std::pair<std::string, std::string>> read_config_json(const std::string& run);
// Returns the git revision of the program that wrote a run; empty if config.json cannot be read.
std::string revision_of(const std::string& run);

// Returns the date at which a run was started first, from its config.json; now if that has none or `run` is
// empty.
std::string started_at(const std::string& run);

// Contents of metrics.csv. An empty cell is NaN. An incomplete last line is left out.
struct MetricsTable {
  std::vector<std::string> names;                      // of the columns, in the order of the file
  std::map<std::string, std::vector<double>> columns;  // by name

  // Returns the names of the columns between two others. The loss terms are between "loss" and
  // "positives_per_object", what losses.log() has logged is between "waiting_share" and "AP".
  std::vector<std::string> between(const char* before, const char* after) const;
};
MetricsTable read_metrics(const std::string& path);

// Returns the points (x, y) with a finite y. If there are more than 300, averages neighbours to at most 300.
std::vector<std::pair<double, double>> curve(const std::vector<double>& x, const std::vector<double>& y);

// Returns the HTML section with the training curves, from metrics.csv.
std::string training_html(const std::string& run);

// Returns the HTML section with the pictures of the run folder, or "" without pictures.
std::string pictures_html(const std::string& run);

// The evaluation of a report stands between these two comments.
constexpr const char* evaluation_begin = "<!-- evaluation -->\n";
constexpr const char* evaluation_end = "\n<!-- end of evaluation -->\n";

// Writes RUN/report.html from the files of the run. evaluation: HTML; if empty, the evaluation of the
// existing report is kept. Returns false if the report cannot be written; the old one then stays.
bool write_run_report(const std::string& run, std::string evaluation);

// Writes report.html. e: the evaluation after `step` on `val`; null keeps the one of the existing report.
// Returns false and logs a warning if the report cannot be written. Never throws, because a missing report
// must not end a run. between: called from time to time, to restart the timeout of the watchdog.
inline bool report(
    const std::string& run, Log& log, int64_t step = 0, const Evaluation* e = nullptr,
    const Dataset* val = nullptr, const std::function<void()>& between = [] {}) {
  std::string why = "is the disk full?";
  try {
    std::string evaluated;
    if (e)
      evaluated =
          evaluation_html(concat("After step ", step, ", on ", e->images, " images of ", val->name),
                          e->result, e->truth, analyse_errors(e->truth, e->detections), val, {}, between);
    if (write_run_report(run, evaluated)) return true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  log.line(concat("warning: cannot write ", run, "/report.html; ", why));
  return false;
}

}  // namespace yolox
