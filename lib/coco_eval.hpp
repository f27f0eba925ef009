// SPDX-License-Identifier: Apache-2.0
// AP and AR of boxes as defined by COCO (cocodataset.org/#detection-eval), with ten IoU thresholds
// .50:.05:.95, 101 recall points, four area ranges, and at most 1, 10 or 100 detections of a class per image
// (or another number than 100). The results equal those of pycocotools. There are two intended differences:
// pycocotools never finds a ground truth with id 0, and if annotations share an id, it uses the last one
// several times. This code uses each annotation once.
#pragma once
#include <array>
#include <ostream>

#include "data/coco_json.hpp"

namespace yolox {

// Area ranges in square pixels: 0..1e10, 0..32^2, 32^2..96^2, 96^2..1e10. Both ends are inclusive.
enum EvalArea { area_all, area_small, area_medium, area_large };
constexpr int eval_areas = 4, eval_thresholds = 10, eval_recalls = 101;
// The most detections of a class per image that COCO counts.
constexpr int coco_max_detections = 100;
// IoU thresholds, bit-equal to numpy.linspace(.5, .95, 10). The ninth is the largest double below 0.9.
constexpr double eval_iou[eval_thresholds] = {.5, .55, .6, .65, .7, .75, .8, .85, .8999999999999999, .95};

// Results of one class. Values are in 0..1, or -1 if the class has no ground truth. AP and AR are means over
// the ten IoU thresholds; AP also over the 101 recall points.
struct ClassResult {
  int64_t id = 0;
  std::string name;
  double AP = -1, AP50 = -1, AP75 = -1, AR100 = -1;
  int64_t ground_truths = 0, crowds = 0, detections = 0;    // ground_truths does not include crowds
  std::array<int64_t, eval_areas> ground_truths_of_area{};  // by EvalArea, without crowds
  // Maximum precision at recall >= r / 100, with at most max_detections per image: [area, threshold, r].
  std::array<std::array<std::array<double, eval_recalls>, eval_thresholds>, eval_areas> precision;
  // Recall with at most 1, 10 or max_detections per image: [area, max detections, threshold].
  std::array<std::array<std::array<double, eval_thresholds>, 3>, eval_areas> recall;
};

// The twelve COCO metrics in 0..1. Each is a mean over the classes with ground truth, or -1 if no class has
// any.
struct EvalResult {
  double AP = -1, AP50 = -1, AP75 = -1, APs = -1, APm = -1, APl = -1;
  double AR1 = -1, AR10 = -1, AR100 = -1, ARs = -1, ARm = -1, ARl = -1;
  int max_detections = coco_max_detections;  // of a class per image; AR100 is the AR with that many
  std::vector<ClassResult> per_class;        // by ascending category id
  int64_t unknown_annotations = 0;           // number of ignored annotations of unknown images or categories
  int64_t unknown_detections = 0;            // number of ignored detections of unknown categories
};

// Definition of a COCO metric: the mean of a slice of ClassResult::precision (AP) or ClassResult::recall
// (AR).
struct CocoMetric {
  const char* name;
  double EvalResult::*value;
  bool precision;
  const char* iou;  // as pycocotools prints the thresholds
  int t_begin, t_end;
  EvalArea area;
  int max_detections;  // index into 1, 10, EvalResult::max_detections
};
constexpr CocoMetric coco_metrics[] = {
    {"AP", &EvalResult::AP, true, "0.50:0.95", 0, 10, area_all, 2},
    {"AP50", &EvalResult::AP50, true, "0.50", 0, 1, area_all, 2},
    {"AP75", &EvalResult::AP75, true, "0.75", 5, 6, area_all, 2},
    {"APs", &EvalResult::APs, true, "0.50:0.95", 0, 10, area_small, 2},
    {"APm", &EvalResult::APm, true, "0.50:0.95", 0, 10, area_medium, 2},
    {"APl", &EvalResult::APl, true, "0.50:0.95", 0, 10, area_large, 2},
    {"AR1", &EvalResult::AR1, false, "0.50:0.95", 0, 10, area_all, 0},
    {"AR10", &EvalResult::AR10, false, "0.50:0.95", 0, 10, area_all, 1},
    {"AR100", &EvalResult::AR100, false, "0.50:0.95", 0, 10, area_all, 2},
    {"ARs", &EvalResult::ARs, false, "0.50:0.95", 0, 10, area_small, 2},
    {"ARm", &EvalResult::ARm, false, "0.50:0.95", 0, 10, area_medium, 2},
    {"ARl", &EvalResult::ARl, false, "0.50:0.95", 0, 10, area_large, 2},
};

// Returns the IoU. If the ground truth is a crowd, returns the intersection over the area of the detection.
double coco_iou(const Detection& d, const CocoAnnotation& g);

// Evaluates detections against the ground truth, with the classes distributed over `threads` threads (0: all
// cores). max_detections: of a class per image, those with the highest scores. Throws if a detection is not
// finite or belongs to an unknown image, or if the categories are not sorted.
EvalResult coco_eval(const CocoDataset& gt, const std::vector<Detection>& detections, int threads = 0,
                     int max_detections = coco_max_detections);

// Returns a note with the number of images that have more objects of a class than detections of it count, so
// that not even perfect detections have an AP of 1. Returns "" if there are none.
std::string crowded_images_note(const CocoDataset& gt, int max_detections);

// Prints the twelve lines of pycocotools, then the number of ignored annotations and detections, if any.
void print_summary(std::ostream& out, const EvalResult& r);

// Prints one line per class, 80 columns wide. Prints "-" if the class has no ground truth.
void print_per_class(std::ostream& out, const EvalResult& result);

// Writes the JSON file of `eval --json`: the twelve metrics at the top level, then per_class.
void write_eval_json(const std::string& path, const EvalResult& r);

}  // namespace yolox
