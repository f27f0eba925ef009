// SPDX-License-Identifier: Apache-2.0
// The evaluation section of report.html: metrics, curves, per-class results, confusion matrix and the images
// with the most errors.
#pragma once
#include <rapidjson/document.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "data/dataset.hpp"
#include "metrics/coco_eval.hpp"
#include "metrics/errors.hpp"
#include "metrics/html.hpp"

namespace yolox {

// Descriptions of the error types, by ErrorKind.
constexpr const char* error_kind_descriptions[] = {
    "wrong class, IoU at least 0.5", "right class, IoU 0.1 to 0.5",        "wrong class, IoU 0.1 to 0.5",
    "second detection of an object", "detection of background, IoU < 0.1", "object without detection",
};

std::string errors_html(const ErrorAnalysis& analysis);

std::string sizes_html(const EvalResult& result, const CocoDataset& truth);

std::string precision_recall_html(const EvalResult& result);

std::string f1_html(const ErrorAnalysis& analysis);

std::string classes_html(const EvalResult& result, const ErrorAnalysis& analysis,
                         const std::optional<VocResult>& voc);

// Shows the confusion matrix, with the 20 classes that are confused most if there are more, and a list of the
// most frequent confusions.
std::string confusion_html(const ErrorAnalysis& analysis);

// Shows an image with its boxes as SVG. data: source of the image; if null, only the boxes are shown.
std::string image_html(const ImageErrors& image, const ErrorAnalysis& analysis, const CocoImage& about,
                       const Dataset* data, int64_t record);

// Shows the images with the most errors. between: is called before each image, so that a caller can keep a
// watchdog from timing out.
std::string worst_html(const ErrorAnalysis& analysis, const CocoDataset& truth, const Dataset* data,
                       const std::function<void()>& between);

// Returns the evaluation section. heading: such as "after step 100". data: source of the images; may be null.
// between: is called before each image.
inline std::string evaluation_html(
    const std::string& heading, const EvalResult& result, const CocoDataset& truth,
    const ErrorAnalysis& analysis, const Dataset* data, const std::optional<VocResult>& voc = {},
    const std::function<void()>& between = [] {}) {
  const int at = int(analysis.working_score * 100 + 0.5);
  std::string html = "<section id='evaluation'><h2>Evaluation</h2><p class='note'>" + escaped(heading) +
                     "</p><div class='tiles'>";
  for (const auto& [value, name] : {std::pair(result.AP, "AP"),
                                    {result.AP50, "AP50"},
                                    {result.AP75, "AP75"},
                                    {result.AR100, "AR"},
                                    {analysis.f1[at], "best F1"}})
    html += tile(metric_text(value), name);
  if (voc) html += tile(metric_text(voc->AP), "VOC AP") + tile(metric_text(voc->AP11), "VOC AP, 11 points");
  html += "</div><div class='cards two'>" + errors_html(analysis) + sizes_html(result, truth) +
          precision_recall_html(result) + f1_html(analysis) + "</div>" + classes_html(result, analysis, voc) +
          confusion_html(analysis) + worst_html(analysis, truth, data, between);
  return html + "</section>";
}

}  // namespace yolox
