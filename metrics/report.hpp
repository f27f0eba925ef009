// SPDX-License-Identifier: Apache-2.0
// The evaluation section of report.html: metrics, curves, per-class results, confusion matrix and the images
// with the most errors.
#pragma once
#include <optional>
#include <string>

#include "data/dataset.hpp"
#include "metrics/coco_eval.hpp"
#include "metrics/errors.hpp"

namespace yolox {

// Returns the evaluation section. heading: such as "after step 100". data: source of the images; may be null.
std::string evaluation_html(const std::string& heading, const EvalResult& result, const CocoDataset& truth,
                            const ErrorAnalysis& analysis, const Dataset* data,
                            const std::optional<VocResult>& voc = {});

}  // namespace yolox
