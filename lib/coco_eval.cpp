// SPDX-License-Identifier: Apache-2.0
#include "coco_eval.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <span>

#include "base/printable.hpp"
#include "base/threads.hpp"

namespace yolox {

// Returns true if an area in square pixels is in the range (an EvalArea).
static bool in_area(double area, int range) {
  constexpr double low[] = {0, 0, 32 * 32, 96 * 96}, high[] = {1e10, 32 * 32, 96 * 96, 1e10};
  return low[range] <= area && area <= high[range];
}

double coco_iou(const Detection& d, const CocoAnnotation& g) {
  const double w = std::min(d.x + d.w, g.x + g.w) - std::max(d.x, g.x);
  const double h = std::min(d.y + d.h, g.y + g.h) - std::max(d.y, g.y);
  if (w <= 0 || h <= 0) return 0;
  const double both = w * h;
  return both / (g.crowd ? d.w * d.h : d.w * d.h + g.w * g.h - both);
}

namespace {

// Returns the bit of an area range and an IoU threshold in a mask.
constexpr uint64_t bit_of(int area, int threshold) {
  return uint64_t{1} << (eval_thresholds * area + threshold);
}

// Match result of a detection.
struct ScoredDetection {
  double score;
  int rank;              // rank by score in its image and class; 0 is the best
  uint64_t matched = 0;  // true positive: matched to a ground truth
  // Neither true nor false positive: matched to an ignored ground truth, or unmatched with an area out of
  // range.
  uint64_t ignored = 0;
};

struct EvalGroundTruth {
  int image;
  const CocoAnnotation* box;
};
struct EvalDetection {
  int image;
  double score;
  const Detection* box;  // all point into one list, so that comparing addresses gives the input order
};

// Matches the detections of one class in one image (by descending score) with the ground truths (in file
// order). Appends one entry per detection to `out`. Each detection is matched to the unmatched
// ground truth with the highest IoU, or the last one in case of a tie. Ignored ground truths (crowds, or area
// out of range) are considered only if no other one matches. A crowd can be matched any number of times.
void match_picture(std::span<const EvalGroundTruth> gts, std::span<const EvalDetection> dets,
                   std::vector<ScoredDetection>& out) {
  struct Pair {
    size_t gt;
    double iou;
  };
  thread_local std::vector<Pair> pairs;     // with an IoU of at least the lowest threshold
  thread_local std::vector<uint64_t> used;  // [G] masks: matched
  used.assign(gts.size(), 0);
  for (size_t d = 0; d < dets.size(); ++d) {
    const Detection& box = *dets[d].box;
    ScoredDetection result{dets[d].score, int(d)};
    pairs.clear();
    for (size_t g = 0; g < gts.size(); ++g)
      if (const double iou = coco_iou(box, *gts[g].box); iou >= eval_iou[0]) pairs.push_back({g, iou});
    for (int area = 0; area < eval_areas; ++area) {
      const bool outside = !in_area(box.w * box.h, area);
      if (pairs.empty()) {  // fast path: most detections overlap no ground truth
        if (outside) result.ignored |= bit_of(area + 1, 0) - bit_of(area, 0);
        continue;
      }
      for (int t = 0; t < eval_thresholds; ++t) {
        const uint64_t bit = bit_of(area, t);
        const Pair* best = nullptr;
        bool best_ignored = false;
        for (const Pair& p : pairs) {
          const CocoAnnotation& gt = *gts[p.gt].box;
          if (p.iou < eval_iou[t] || ((used[p.gt] & bit) && !gt.crowd)) continue;
          const bool ignored = gt.crowd || !in_area(gt.area, area);
          if (best && (ignored == best_ignored ? p.iou < best->iou : ignored)) continue;
          best = &p;
          best_ignored = ignored;
        }
        if (best) {
          used[best->gt] |= bit;
          result.matched |= bit;
        }
        if (best ? best_ignored : outside) result.ignored |= bit;
      }
    }
    out.push_back(result);
  }
}

// Computes precision and recall of one class from the detections of all images, sorted by descending score.
void accumulate(const std::vector<ScoredDetection>& dets, const std::array<int, 3>& max_detections,
                ClassResult& result) {
  std::vector<double> precision;  // after each true positive
  for (int area = 0; area < eval_areas; ++area) {
    const double count = static_cast<double>(result.ground_truths_of_area[area]);
    for (int t = 0; t < eval_thresholds; ++t) {
      if (count == 0) {
        result.precision[area][t].fill(-1);
        for (auto& recall : result.recall[area]) recall[t] = -1;
        continue;
      }
      precision.clear();
      std::array<int64_t, 3> found = {};
      double wrong = 0;
      for (const ScoredDetection& d : dets) {
        if (d.ignored & bit_of(area, t)) continue;
        if (d.matched & bit_of(area, t)) {
          for (size_t m = 0; m < found.size(); ++m) found[m] += d.rank < max_detections[m];
          const double right = static_cast<double>(precision.size() + 1);
          precision.push_back(right / (right + wrong + 0x1p-52));  // 2^-52 is numpy.spacing(1)
        } else {
          ++wrong;
        }
      }
      for (size_t m = 0; m < found.size(); ++m)
        result.recall[area][m][t] = static_cast<double>(found[m]) / count;
      for (size_t i = precision.size(); i-- > 1;) precision[i - 1] = std::max(precision[i - 1], precision[i]);
      size_t i = 0;  // the first detection at which recall (i + 1) / count reaches r / 100
      for (int r = 0; r < eval_recalls; ++r) {
        while (i < precision.size() && static_cast<double>(i + 1) / count < r * 0.01) ++i;
        result.precision[area][t][r] = i < precision.size() ? precision[i] : 0;
      }
    }
  }
}

// Returns the mean of a metric over the classes that have ground truth in its area range, or -1 if none has.
double mean_metric(const CocoMetric& metric, std::span<const ClassResult> classes) {
  double sum = 0;
  int64_t count = 0;
  for (const ClassResult& c : classes)
    for (int t = metric.t_begin; t < metric.t_end; ++t) {
      const auto& precision = c.precision[metric.area][t];
      const double& recall = c.recall[metric.area][metric.max_detections][t];
      for (const double v : metric.precision ? std::span<const double>(precision) : std::span(&recall, 1)) {
        sum += v >= 0 ? v : 0;
        count += v >= 0;
      }
    }
  return count ? sum / static_cast<double>(count) : -1;
}

// Evaluates one class. Sorts its ground truths and detections.
void evaluate_class(std::vector<EvalGroundTruth>& gts, std::vector<EvalDetection>& dets, int max_detections,
                    ClassResult& result) {
  for (const EvalGroundTruth& gt : gts) {
    result.crowds += gt.box->crowd;
    for (int area = 0; area < eval_areas; ++area)
      result.ground_truths_of_area[area] += !gt.box->crowd && in_area(gt.box->area, area);
  }
  result.ground_truths = static_cast<int64_t>(gts.size()) - result.crowds;
  result.detections = static_cast<int64_t>(dets.size());

  std::ranges::stable_sort(gts, {}, &EvalGroundTruth::image);
  std::sort(dets.begin(), dets.end(), [](const EvalDetection& a, const EvalDetection& b) {
    if (a.image != b.image) return a.image < b.image;
    return a.score != b.score ? a.score > b.score : a.box < b.box;
  });
  std::vector<ScoredDetection> scored;
  scored.reserve(dets.size());
  for (size_t d = 0, g = 0; d < dets.size();) {
    const int image = dets[d].image;
    size_t d_end = d, g_end;
    while (d_end < dets.size() && dets[d_end].image == image) ++d_end;
    while (g < gts.size() && gts[g].image < image) ++g;
    for (g_end = g; g_end < gts.size() && gts[g_end].image == image;) ++g_end;
    match_picture({gts.data() + g, g_end - g}, {dets.data() + d, std::min(d_end - d, size_t(max_detections))},
                  scored);
    d = d_end;
    g = g_end;
  }
  // A stable sort, so that among equal scores the image with the smaller id comes first, as in pycocotools.
  std::ranges::stable_sort(scored, std::ranges::greater(), &ScoredDetection::score);
  accumulate(scored, {1, 10, max_detections}, result);
  result.AP = mean_metric(coco_metrics[0], {&result, 1});
  result.AP50 = mean_metric(coco_metrics[1], {&result, 1});
  result.AP75 = mean_metric(coco_metrics[2], {&result, 1});
  result.AR100 = mean_metric(coco_metrics[8], {&result, 1});
}

}  // namespace

EvalResult coco_eval(const CocoDataset& gt, const std::vector<Detection>& detections, int threads,
                     int max_detections) {
  std::vector<int64_t> images, classes;  // sorted ids; the evaluation uses positions in these lists
  for (const CocoImage& image : gt.images) images.push_back(image.id);
  for (const CocoCategory& category : gt.categories) classes.push_back(category.id);
  std::sort(images.begin(), images.end());
  check(std::is_sorted(classes.begin(), classes.end()), "coco_eval: sort the categories by id first");
  const auto position = [](const std::vector<int64_t>& ids, int64_t id) {  // -1 if not found
    const auto it = std::lower_bound(ids.begin(), ids.end(), id);
    return it != ids.end() && *it == id ? static_cast<int>(it - ids.begin()) : -1;
  };

  EvalResult result;
  result.max_detections = max_detections;
  std::vector<std::vector<EvalGroundTruth>> gts(classes.size());
  std::vector<std::vector<EvalDetection>> dets(classes.size());
  for (const CocoAnnotation& a : gt.annotations) {
    const int image = position(images, a.image_id), c = position(classes, a.category_id);
    if (image < 0 || c < 0)
      ++result.unknown_annotations;
    else
      gts[c].push_back({image, &a});
  }
  for (size_t i = 0; i < detections.size(); ++i) {
    const Detection& d = detections[i];
    check(std::isfinite(d.x + d.y + d.w + d.h + d.score), "detections[", i,
          "]: the score or the box is not finite (", d.x, " ", d.y, " ", d.w, " ", d.h, ", score ", d.score,
          "); remove this detection");
    const int image = position(images, d.image_id), c = position(classes, d.category_id);
    if (image < 0)
      fail("detections[", i, "]: image_id ", d.image_id < -1e15 ? "(text)" : concat(d.image_id),
           " is not in the ground truth (", images.size(),
           " images); detections and ground truth must be of the same data set");
    if (c < 0)
      ++result.unknown_detections;
    else
      dets[c].push_back({image, d.score, &d});
  }

  result.per_class.resize(classes.size());
  const auto evaluate = [&](int64_t c) {
    result.per_class[c].id = gt.categories[c].id;
    result.per_class[c].name = gt.categories[c].name;
    evaluate_class(gts[c], dets[c], max_detections, result.per_class[c]);
  };
  parallel_for(int64_t(classes.size()), evaluate, unsigned(threads));
  for (const CocoMetric& metric : coco_metrics) result.*metric.value = mean_metric(metric, result.per_class);
  return result;
}

std::string crowded_images_note(const CocoDataset& gt, int max_detections) {
  std::map<std::pair<int64_t, int64_t>, int64_t> objects;  // by image and class
  for (const CocoAnnotation& a : gt.annotations) objects[{a.image_id, a.category_id}] += !a.crowd;
  std::set<int64_t> crowded;
  int64_t most = 0;
  for (const auto& [of, count] : objects) {
    if (count > max_detections) crowded.insert(of.first);
    most = std::max(most, count);
  }
  if (crowded.empty()) return "";
  return concat("note: ", crowded.size(), crowded.size() == 1 ? " image has" : " images have", " more than ",
                max_detections, " objects of a class, up to ", most, ", but at most ", max_detections,
                " detections of a class count in an image, as in COCO; --max-dets ", most, " counts all");
}

void print_summary(std::ostream& out, const EvalResult& r) {
  const int max_detections[] = {1, 10, r.max_detections};
  const char* const areas[] = {"all", "small", "medium", "large"};
  for (const CocoMetric& metric : coco_metrics)
    out << formatted(" %-18s %s @[ IoU=%-9s | area=%6s | maxDets=%3d ] = %0.3f\n",
                     metric.precision ? "Average Precision" : "Average Recall",
                     metric.precision ? "(AP)" : "(AR)", metric.iou, areas[metric.area],
                     max_detections[metric.max_detections], r.*metric.value);
  if (r.unknown_annotations > 0)
    out << "Ignored: " << r.unknown_annotations << " annotations of unknown images or categories.\n";
  if (r.unknown_detections > 0)
    out << "Ignored: " << r.unknown_detections
        << " detections of categories that are not in the ground truth; do their ids begin with 0?\n";
}

// Returns the first column of a table: a name, cut to 29 characters and padded to 30.
static std::string name_cell(const std::string& name) {
  const std::string shown = cut_text(printable(name), 29);
  return shown + std::string(30 - count_characters(shown), ' ');
}

// Returns a number of a table, or "-" if it is negative.
static std::string number_cell(double value, int width, int decimals) {
  return value < 0 ? formatted("%*s", width, "-") : formatted("%*.*f", width, decimals, value);
}

void print_per_class(std::ostream& out, const EvalResult& result) {
  out << name_cell("class") << "   truths detections     AP   AP50   AP75"
      << formatted("%9s\n", concat("AR", result.max_detections).c_str());
  for (const ClassResult& c : result.per_class)
    out << name_cell(c.name) << number_cell(double(c.ground_truths), 9, 0)
        << number_cell(double(c.detections), 11, 0) << number_cell(c.AP, 7, 3) << number_cell(c.AP50, 7, 3)
        << number_cell(c.AP75, 7, 3) << number_cell(c.AR100, 9, 3) << "\n";
}

void write_eval_json(const std::string& path, const EvalResult& r) {
  write_json(path, [&](JsonWriter& writer) {
    writer.StartObject();
    for (const CocoMetric& metric : coco_metrics) write_field(writer, metric.name, r.*metric.value);
    write_field(writer, "max_dets", int64_t{r.max_detections});
    writer.Key("per_class");
    write_list(writer, r.per_class, [&](const ClassResult& c) {
      write_field(writer, "id", c.id);
      write_field(writer, "name", c.name);
      write_field(writer, "AP", c.AP);
      write_field(writer, "AP50", c.AP50);
      write_field(writer, "AP75", c.AP75);
      write_field(writer, "AR", c.AR100);
      write_field(writer, "ground_truths", c.ground_truths);
      write_field(writer, "crowds", c.crowds);
      write_field(writer, "detections", c.detections);
    });
    writer.EndObject();
  });
}

}  // namespace yolox
