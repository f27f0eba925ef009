// What a detector gets wrong, from its detections and the truth: errors split into kinds with what each costs
// in AP (TIDE: Bolya, Foley, Hays, Hoffman, "TIDE: A General Toolbox for Identifying Object Detection
// Errors", arXiv 2008.08115, section 2), precision, recall and F1 by score, which class is taken for which,
// the images with the most errors, and AP as Pascal VOC defines it. All at an IoU of 0.5.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <ostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/threads.hpp"
#include "metrics/coco_eval.hpp"

namespace yolox {

// What became of a detection, or of a truth (missed). The first six are errors.
enum Verdict {
  kWrongClass,  // IoU >= 0.5 with an object of another class
  kMisplaced,   // IoU 0.1 .. 0.5 with an object of its class
  kBothWrong,   // IoU 0.1 .. 0.5 with an object of another class
  kDuplicate,   // IoU >= 0.5 with an object of its class that a better one has found
  kBackground,  // IoU < 0.1 with all objects
  kMissed,      // an object that no detection has found, nor would with its class or place mended
  kRight,
  kNotCounted,  // in a crowd, or on an object that is marked as difficult
};
constexpr int error_kinds = 6;
constexpr const char* verdict_names[] = {"class",      "localisation", "both",  "duplicate",
                                         "background", "missed",       "right", "not counted"};
constexpr double insight_iou = 0.5, insight_near = 0.1;

// ---- boxes by image

struct ImageBoxes {
  struct Truth {
    const CocoAnnotation* box;
    int cls;  // position among the categories
  };
  struct Found {
    const Detection* box;
    int cls;
  };
  int64_t id = 0;
  std::vector<Truth> truths;
  std::vector<Found> found;  // best score first
};

// By ascending id of the image. What is of an image or a category that the truth does not list is left out.
std::vector<ImageBoxes> boxes_by_image(const CocoDataset& truth, const std::vector<Detection>& detections);

// ---- average precision

// Best score first: was it right? And how many there are to find, above 0.
struct Hits {
  std::vector<char> right;
  int64_t truths = 0;
};

// Precision after each right detection, made monotone: the best that is to be had at that recall or a higher.
std::vector<double> precision_envelope(const Hits& hits);

// Mean precision at `points` recalls 0 .. 1: 101 as COCO, 11 as VOC until 2009.
double ap_at_points(const Hits& hits, int points);

// The area under the curve: VOC from 2010 on.
double ap_area(const Hits& hits);

// ---- what became of each box

struct JudgedBox {
  double x, y, w, h;  // pixels of the picture, as everywhere here
  int cls;
  double score;  // 1 for a truth
  Verdict verdict;
  int truth = -1;  // in its image: what it is right about, or what mending its class or place would make it
  bool mends = false;  // it would find that truth: no other has, and no better one would
};
struct JudgedImage {
  int64_t id = 0;
  std::vector<JudgedBox> found;  // best score first; of each class at most 100, as in COCO's AP
  struct Truth {
    const CocoAnnotation* box;
    int cls;
    int found_by = -1;    // in `found`
    bool counts = true;   // no crowd
    bool missed = false;  // see kMissed
  };
  std::vector<Truth> truths;
};

// Matching is that of COCO's AP (match_picture()), so that what is right here is right there.
JudgedImage judge(const ImageBoxes& image);

// ---- the whole

constexpr int score_steps = 101;  // scores 0, 0.01, ... 1
// As it is written: 35 * 0.01 is the double above 0.35, and a score of 0.35 would not reach it.
inline double score_of_step(int step) { return step / 100.0; }

struct ClassInsight {
  std::string name;
  int64_t truths = 0;
  double precision = -1, recall = -1, f1 = -1;  // at the working score; -1: nothing found, nothing to find
};

// An image with errors, and all that is to be drawn of it at the working score: detections, then truths that
// none of them has found (kMissed).
struct ImageInsight {
  int64_t id = 0;
  double cost = 0;  // objects not found, and wrong detections weighed by their score
  std::vector<JudgedBox> boxes;
};

// -1 where there is nothing to find, or, for precision, nothing found.
struct Insight {
  double AP50 = -1;  // as in EvalResult, with these errors in it
  // Mean over the classes that have truths, of detections with that score or a better one.
  std::array<double, score_steps> precision{}, recall{}, f1{};
  double working_score = 0.25;             // where F1 is best; 0.25 where it is 0 everywhere
  std::array<double, error_kinds> cost{};  // what AP50 would be more, 0..1, without errors of that kind alone
  std::array<int64_t, error_kinds> count{};  // errors, at any score
  std::vector<ClassInsight> classes;
  // At the working score: {class of the truth, class found} -> how often. The number of classes stands for
  // no object where it comes first, for an object not found where it comes second.
  std::map<std::pair<int, int>, int64_t> confusion;
  std::vector<ImageInsight> worst;  // the first is the worst; at most 25, none without errors
};

namespace insight_detail {

// A detection in the list of its class, or, foreign, in that of the class that would be right.
struct Entry {
  double score;
  Verdict verdict;
  bool mends, foreign;
};

// AP of one class at IoU 0.5 with the errors of a kind mended: put in their place where they find something
// then, else taken out. kRight: nothing is.
double ap_without(const std::vector<Entry>& entries, int64_t truths, Verdict kind);

// Pairs of a truth and a detection at the working score: first those that are right, then what overlaps most.
void confuse(const JudgedImage& image, double score, int classes,
             std::map<std::pair<int, int>, int64_t>& counts);

ImageInsight errors_of(const JudgedImage& image, double score);

}  // namespace insight_detail

// `truth` as coco_eval() takes it, without the images that were not looked at. Detections are of its images.
Insight find_insight(const CocoDataset& truth, const std::vector<Detection>& detections);

// ---- AP as Pascal VOC defines it

struct VocResult {
  double AP11 = -1, AP = -1;  // means over the classes with objects: at 11 recalls (VOC 2007), the area
  struct Class {
    std::string name;
    double AP11 = -1, AP = -1;
  };
  std::vector<Class> per_class;
};

// As the development kit has it ("The PASCAL VOC Challenge", IJCV 2010, section 4.2, and its VOCevaldet):
// each detection looks at the object of its class that it overlaps most, taken or not; a box holds the pixels
// of both its ends; difficult objects (here: crowds) count neither way; the best 100 are not all that count.
VocResult voc_ap(const CocoDataset& truth, const std::vector<Detection>& detections);

// ---- in words and as JSON

void print_insight(std::ostream& out, const Insight& insight);

void print_voc(std::ostream& out, const VocResult& voc);

// "insight": {...}
void write_insight(JsonWriter& writer, const Insight& insight);

// "voc": {...}
void write_voc(JsonWriter& writer, const VocResult& voc);

}  // namespace yolox
