// SPDX-License-Identifier: Apache-2.0
// Error analysis of detections at IoU 0.5: error types with their cost in AP (TIDE), precision, recall and F1
// by score threshold, the confusion matrix, the images with the most errors, and Pascal VOC AP. TIDE: Bolya,
// Foley, Hays, Hoffman, "TIDE: A General Toolbox for Identifying Object Detection Errors", arXiv 2008.08115,
// section 2.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "data/coco_json.hpp"

namespace yolox {

// Result of a detection, or of a ground truth (kMissed). The first six are the error types of TIDE.
enum ErrorKind {
  kWrongClass,    // IoU >= 0.5 with an object of another class
  kLocalisation,  // localisation error: 0.1 <= IoU < 0.5 with an object of the same class
  kBoth,          // 0.1 <= IoU < 0.5 with an object of another class
  kDuplicate,     // IoU >= 0.5 with an object of the same class that a higher-scoring detection matched
  kBackground,    // IoU < 0.1 with all objects
  kMissed,        // an object without detection, also after correcting class and localisation errors
  kTruePositive,  // true positive
  kIgnored,       // matched to a crowd or a difficult object: neither true nor false positive
};
constexpr int error_kinds = 6;
constexpr const char* error_kind_names[] = {"class",      "localisation", "both",  "duplicate",
                                            "background", "missed",       "right", "not counted"};

struct ClassifiedBox {
  double x, y, w, h;  // pixels of the image
  int cls;
  double score;  // 1 for a ground truth
  ErrorKind kind;
  // Index of a ground truth of the image: the matched one if the detection is right, or the one that the
  // detection would match after correcting `fix`. -1 otherwise.
  int truth = -1;
  // The error whose correction makes the detection match `truth`: kWrongClass or kLocalisation; kIgnored if
  // none does. An ignored detection can have one, too, as in tidecv: a box in a crowd that is near an object
  // of its own would be right if it were drawn better.
  ErrorKind fix = kIgnored;
  // True if no detection matches that ground truth, and this is the highest-scoring one that would after
  // correction.
  bool fixes_truth = false;
};
struct ClassifiedImage {
  int64_t id = 0;
  std::vector<ClassifiedBox> found;  // detections by descending score; at most 100 per class, as in COCO AP
  struct Truth {
    const CocoAnnotation* box;
    int cls;
    int found_by = -1;    // index into `found`; -1 if unmatched
    bool counts = true;   // false for a crowd
    bool missed = false;  // see kMissed
  };
  std::vector<Truth> truths;
};

// Classifies all boxes, image by image, sorted by image id. Matching is that of COCO AP, so that a true
// positive here is a true positive there. Ignores boxes of unknown images and categories. The results point
// into `truth`.
std::vector<ClassifiedImage> classify_errors(const CocoDataset& truth,
                                             const std::vector<Detection>& detections);

constexpr int score_steps = 101;  // score thresholds 0, 0.01, ..., 1
// Returns the score threshold of a step. Divides, because 35 * 0.01 is greater than 0.35, so that a score of
// 0.35 would be below the threshold.
inline double score_of_step(int step) { return step / 100.0; }

// Results of one class at the score threshold ErrorAnalysis::working_score; -1 if undefined.
struct ClassErrors {
  std::string name;
  int64_t truths = 0;  // number of ground truths
  double precision = -1, recall = -1, f1 = -1;
};

// An image with errors. `boxes` are the detections at the score threshold ErrorAnalysis::working_score, then
// the ground truths that none of these detections matches (kMissed).
struct ImageErrors {
  int64_t id = 0;
  double cost = 0;  // number of missed objects plus the sum of the scores of the wrong detections
  std::vector<ClassifiedBox> boxes;
};

// Error analysis of a data set. A value is -1 if it is undefined: without ground truth, or a precision
// without detections.
struct ErrorAnalysis {
  double AP50 = -1;  // equals EvalResult::AP50
  // By score threshold: means over the classes with ground truth.
  std::array<double, score_steps> precision{}, recall{}, f1{};
  double working_score = 0.25;  // score threshold with the best F1; 0.25 if F1 is 0 everywhere
  std::array<double, error_kinds>
      cost{};  // increase of AP50 (0..1) if only the errors of this kind are corrected
  // Number of errors at any score. An ignored detection counts if its correction is part of the cost.
  std::array<int64_t, error_kinds> count{};
  std::vector<ClassErrors> classes;
  // Confusion matrix at the score threshold working_score: {class of the ground truth, class of the
  // detection} -> count. The number of classes stands for background (first) and for a missed object
  // (second).
  std::map<std::pair<int, int>, int64_t> confusion;
  std::vector<ImageErrors> worst;  // at most 25 images with errors, by descending cost

  // Returns the step of working_score.
  int working_step() const { return int(std::lround(100 * working_score)); }
};

// Analyses detections. `truth` must be sorted as for coco_eval() and contain only the images that were
// evaluated.
ErrorAnalysis analyse_errors(const CocoDataset& truth, const std::vector<Detection>& detections);

struct VocResult {
  double AP11 = -1, AP = -1;  // means over the classes with objects: 11-point AP (VOC 2007), area (VOC 2010)
  struct Class {
    std::string name;
    double AP11 = -1, AP = -1;
  };
  std::vector<Class> per_class;
};

// Computes VOC AP at IoU 0.5, as VOCevaldet of the development kit ("The PASCAL VOC Challenge", IJCV 2010,
// section 4.2). Differences from COCO: a detection is compared only with the object of its class that it
// overlaps most, even if that object is already matched; boxes include the pixels of both ends (width = x2 -
// x1 + 1); the number of detections per image is not limited. Difficult objects (crowds) are ignored.
VocResult voc_ap(const CocoDataset& truth, const std::vector<Detection>& detections);

void print_error_analysis(std::ostream& out, const ErrorAnalysis& analysis);

void print_voc(std::ostream& out, const VocResult& voc);

// Writes the field "error_analysis": {...}.
void write_error_analysis(JsonWriter& writer, const ErrorAnalysis& analysis);

// Writes the field "voc": {...}.
void write_voc(JsonWriter& writer, const VocResult& voc);

}  // namespace yolox
