// SPDX-License-Identifier: Apache-2.0
// What tools/report.py needs for report.html, and the start of this script at the end of a run.
#pragma once
#include <string>

#include "data/dataset.hpp"
#include "evaluate.hpp"

namespace yolox {

// Writes val_detections.json and val_truth.json, with the absolute paths of the images, to a folder. If
// images are no files (`shapes`, packed data sets), also writes JPEGs of those with the most errors to
// val_worst/. heading: of the evaluation on the page. Throws if a file cannot be written.
void write_evaluation(const std::string& folder, const std::string& heading, const Evaluation& e,
                      const Dataset& data);

// Runs tools/report.py on a run folder, with the Python of python_with(). Returns "", or a line for the log
// if there is no report: the reason, and the command that writes it. Does nothing with $YOLOX_NO_REPORT, and
// if the run was ended by a signal other than Ctrl-C, because the machine may soon be gone then.
std::string write_report(const std::string& run, int signal = 0);

}  // namespace yolox
