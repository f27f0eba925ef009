// Average precision and recall of boxes as COCO defines them (cocodataset.org/#detection-eval), equal to
// pycocotools: ten IoU thresholds .50:.05:.95, 101 recall points, four ranges of area, the best 1, 10 or 100
// detections of a picture. Kept from pycocotools on purpose: a ground truth whose id is 0 never counts as
// found (number annotations from 1). Not kept: of annotations that share an id, pycocotools takes the last
// one several times; here each is its own.
#pragma once
#include <array>
#include <atomic>
#include <future>
#include <ostream>
#include <thread>

#include "data/coco_json.hpp"

namespace yolox {

// Areas in square pixels: any, up to 32^2, 32^2 .. 96^2, from 96^2; both ends belong to the range, none goes
// beyond 1e10.
enum EvalArea { area_all, area_small, area_medium, area_large };
constexpr int eval_areas = 4, eval_thresholds = 10, eval_recalls = 101;
constexpr std::array<int, 3> eval_max_detections = {1, 10, 100};
// As numpy.linspace(.5, .95, 10) has them: the ninth is the double below 0.9.
constexpr double eval_iou[eval_thresholds] = {.5, .55, .6, .65, .7, .75, .8, .85, .8999999999999999, .95};

// One class; -1 where there is nothing to find. Averages are over the ten thresholds and the recall points.
struct ClassResult {
  int64_t id = 0;
  std::string name;
  double AP = -1, AP50 = -1, AP75 = -1, AR100 = -1;
  int64_t ground_truths = 0, crowds = 0, detections = 0;  // crowds are not among the ground truths
  // Best precision at recall >= r / 100, with 100 detections a picture: [area, threshold, r].
  std::array<std::array<std::array<double, eval_recalls>, eval_thresholds>, eval_areas> precision;
  // Recall with the best 1, 10, 100 detections a picture: [area, max detections, threshold].
  std::array<std::array<std::array<double, eval_thresholds>, 3>, eval_areas> recall;
};

// The twelve official numbers, 0..1, each a mean over the classes that have ground truths; -1 where none has.
struct EvalResult {
  double AP = -1, AP50 = -1, AP75 = -1, APs = -1, APm = -1, APl = -1;
  double AR1 = -1, AR10 = -1, AR100 = -1, ARs = -1, ARm = -1, ARl = -1;
  std::vector<ClassResult> per_class;  // by ascending category id
  int64_t unknown_annotations = 0;     // left out: of an image or category that the data set does not list
  int64_t unknown_detections = 0;      // left out: of a category that the data set does not list
};

// One of the twelve: which slice of precision (AP) or recall (AR) it is the mean of.
struct CocoMetric {
  const char* name;
  double EvalResult::*value;
  bool precision;
  const char* iou;  // as pycocotools prints the thresholds
  int t_begin, t_end;
  EvalArea area;
  int max_detections;  // position in eval_max_detections
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
constexpr const char* eval_area_names[] = {"all", "small", "medium", "large"};

// What happened to a detection: bit t of a mask is threshold t.
struct ScoredDetection {
  double score;
  int rank;                                // among the detections of its class in its picture, best first
  std::array<uint16_t, eval_areas> found;  // matched to a ground truth
  // Neither right nor wrong: matched to an ignored ground truth, or unmatched and of an area out of range.
  std::array<uint16_t, eval_areas> not_counted;
};

struct EvalGroundTruth {
  int image;
  const CocoAnnotation* box;
};
struct EvalDetection {
  int image;
  double score;
  const Detection* box;  // into one list, so that of two the smaller address came first
};

bool in_area(double area, int range);

// Intersection over union; over the detection's own area if the ground truth is a crowd.
double coco_iou(const Detection& d, const CocoAnnotation& g);

// Matches the detections of one class in one picture, best score first and at most 100, with its ground
// truths (in file order) and appends one entry a detection. Each detection takes the ground truth of highest
// IoU that is still free, the later one among equals; an ignored one (crowd, or area out of range) only if no
// other fits. Crowds are never used up.
void match_picture(const EvalGroundTruth* gts, size_t gt_count, const EvalDetection* dets, size_t det_count,
                   std::vector<ScoredDetection>& out);

// Fills precision and recall of one class from the detections of all pictures, best score first.
void accumulate(const std::vector<ScoredDetection>& dets, const std::array<int64_t, eval_areas>& gt_counts,
                ClassResult& result);

// Mean of a metric's slice over those of the classes begin .. end that have ground truths in its range; else
// -1.
double mean_of(const CocoMetric& metric, const ClassResult* begin, const ClassResult* end);

// One class: its ground truths and detections, in any order.
void evaluate_class(std::vector<EvalGroundTruth>& gts, std::vector<EvalDetection>& dets, ClassResult& result);

// Evaluates detections against the data set, classes spread over `threads` threads (0: all cores). Throws on
// a detection that is not finite or of an image that the data set does not list, and on categories out of
// order.
EvalResult coco_eval(const CocoDataset& gt, const std::vector<Detection>& detections, int threads = 0);

// The twelve lines as pycocotools prints them, then what was left out, if anything.
void print_summary(std::ostream& out, const EvalResult& r);

// One line a class, 80 columns wide; "-" where the class has no ground truth.
void print_per_class(std::ostream& out, const EvalResult& result);

// What `eval --json` gives: the twelve numbers on top, then per_class, then what more(writer) adds.
void write_eval_json(const std::string& path, const EvalResult& r,
                     const std::function<void(JsonWriter&)>& more = {});

}  // namespace yolox
