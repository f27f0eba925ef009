// report.html of a run: its curves, its last evaluation, its pictures.
#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/new_file.hpp"
#include "evaluate.hpp"
#include "metrics/html.hpp"
#include "metrics/report.hpp"
#include "run/log.hpp"

namespace yolox {

// Returns the settings and versions in config.json of a run. Empty if the file cannot be read.
std::vector<std::pair<std::string, std::string>> read_config_json(const std::string& run);
// Returns the git revision of the program that wrote a run; empty if config.json cannot be read.
std::string revision_of(const std::string& run);

// metrics.csv. An empty cell is NaN. A torn last line is left out.
struct MetricsTable {
  std::vector<std::string> names;                      // of the columns, in the order of the file
  std::map<std::string, std::vector<double>> columns;  // by name

  // The names of the loss terms: the columns between "loss" and "positives_per_object".
  std::vector<std::string> loss_terms() const;
};
MetricsTable read_metrics(const std::string& path);

// A column over x, where it has values; means of neighbours where there are more than 300.
std::vector<std::pair<double, double>> curve(const std::vector<double>& x, const std::vector<double>& y);

std::string training_html(const std::string& run);

std::string pictures_html(const std::string& run);

constexpr const char* evaluation_begin = "<!-- evaluation -->\n";

constexpr const char* evaluation_end = "\n<!-- end of evaluation -->\n";

// Writes RUN/report.html from the files of the run; its evaluation is the one given, or, empty, that of the
// page that is there. False where it cannot be written: then the old one stays.
bool write_run_report(const std::string& run, std::string evaluation);

// report.html, with an evaluation, or, without, the one that the page has. No run ends for the want of it:
// false where it cannot be written. between: is called now and then.
inline bool report(
    const std::string& run, Log& log, int64_t step = 0, const Evaluation* e = nullptr,
    const Dataset* val = nullptr, const std::function<void()>& between = [] {}) {
  std::string why = "is the disk full?";
  try {
    std::string evaluated;
    if (e)
      evaluated =
          evaluation_html(concat("After step ", step, ", on ", e->images, " images of ", val->name),
                          e->result, e->truth, find_insight(e->truth, e->detections), val, {}, between);
    if (write_run_report(run, evaluated)) return true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  log.line(concat("WARNING: cannot write ", run, "/report.html; ", why));
  return false;
}

}  // namespace yolox
