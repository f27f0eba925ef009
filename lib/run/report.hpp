// SPDX-License-Identifier: Apache-2.0
// What tools/report.py needs for report.html.
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

}  // namespace yolox
