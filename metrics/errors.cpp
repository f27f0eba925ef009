// SPDX-License-Identifier: Apache-2.0
#include "metrics/errors.hpp"

#include <algorithm>
#include <functional>
#include <tuple>

#include "base/threads.hpp"
#include "coco_eval.hpp"

namespace yolox {

namespace {

constexpr double match_threshold = 0.5, background_threshold = 0.1;

// Ground truths and detections of one image.
struct ImageBoxes {
  struct Truth {
    const CocoAnnotation* box;
    int cls;  // position in CocoDataset::categories
  };
  struct Found {
    const Detection* box;
    int cls;
  };
  int64_t id = 0;
  std::vector<Truth> truths;
  std::vector<Found> found;  // detections by descending score
};

// Groups ground truths and detections by image, sorted by image id. Ignores boxes of unknown images and
// categories. The results point into the arguments.
std::vector<ImageBoxes> boxes_by_image(const CocoDataset& truth, const std::vector<Detection>& detections) {
  std::vector<ImageBoxes> images(truth.images.size());
  for (size_t i = 0; i < images.size(); ++i) images[i].id = truth.images[i].id;
  std::ranges::sort(images, {}, &ImageBoxes::id);
  const auto put = [&](const auto& box, auto member) {
    const auto image = std::ranges::lower_bound(images, box.image_id, {}, &ImageBoxes::id);
    const auto category = std::ranges::lower_bound(truth.categories, box.category_id, {}, &CocoCategory::id);
    if (image == images.end() || image->id != box.image_id || category == truth.categories.end() ||
        category->id != box.category_id)
      return;
    ((*image).*member).push_back({&box, int(category - truth.categories.begin())});
  };
  for (const auto& a : truth.annotations) put(a, &ImageBoxes::truths);
  for (const auto& d : detections) put(d, &ImageBoxes::found);
  parallel_for(int64_t(images.size()), [&](int64_t i) {
    std::ranges::stable_sort(images[i].found, std::ranges::greater(),
                             [](const auto& f) { return f.box->score; });
  });
  return images;
}

// Detections of one class by descending score, and the number of ground truths, which must be above 0.
struct RankedMatches {
  std::vector<char> right;  // 1 for a true positive, 0 for a false positive
  int64_t truths = 0;
};

// Returns, for each true positive, the maximum precision at its recall or any higher recall.
std::vector<double> precision_envelope(const RankedMatches& hits) {
  std::vector<double> precision;
  for (size_t i = 0; i < hits.right.size(); ++i)
    if (hits.right[i]) precision.push_back(double(precision.size() + 1) / double(i + 1));
  for (size_t i = precision.size(); i-- > 1;) precision[i - 1] = std::max(precision[i - 1], precision[i]);
  return precision;
}

// Returns the mean precision at `points` equidistant recalls 0..1. COCO uses 101 points, VOC until 2009 11
// points.
double ap_at_points(const RankedMatches& hits, int points) {
  const auto precision = precision_envelope(hits);
  double sum = 0;
  size_t i = 0;  // the first true positive at which recall (i + 1) / truths reaches r / (points - 1)
  for (int r = 0; r < points; ++r) {
    while (i < precision.size() && double(i + 1) / double(hits.truths) < r * (1.0 / (points - 1))) ++i;
    if (i < precision.size()) sum += precision[i];
  }
  return sum / points;
}

// Returns the area under the precision-recall curve: VOC AP since 2010.
double ap_area(const RankedMatches& hits) {
  double sum = 0;
  for (const double p : precision_envelope(hits)) sum += p;
  return sum / double(hits.truths);
}

ClassifiedImage classify_image(const ImageBoxes& image) {
  ClassifiedImage out;
  out.id = image.id;
  for (const auto& t : image.truths)
    out.truths.push_back({t.box, t.cls, -1, !t.box->crowd && in_area(t.box->area, area_all), false});
  std::map<int, int> of_class;
  std::vector<char> taken(out.truths.size(), 0);
  for (const auto& [box, cls] : image.found) {
    if (++of_class[cls] > eval_max_detections[2]) continue;
    ClassifiedBox d{box->x, box->y, box->w, box->h, cls, box->score, kBackground};
    int match = -1;
    double best = match_threshold, same = 0, other = 0;
    int same_truth = -1, other_truth = -1;
    for (const bool counts : {true, false}) {
      if (match >= 0) break;
      for (size_t t = 0; t < out.truths.size(); ++t) {
        const auto& truth = out.truths[t];
        if (truth.counts != counts || (!counts && truth.cls != cls)) continue;
        const double iou = coco_iou(*box, *truth.box);
        if (truth.cls != cls) {
          if (iou > other) {
            other = iou;
            other_truth = int(t);
          }
          continue;
        }
        if (counts && iou > same) {
          same = iou;
          same_truth = int(t);
        }
        if ((taken[t] && !truth.box->crowd) || iou < best) continue;
        match = int(t);
        best = iou;
      }
    }
    if (match >= 0) taken[match] = 1;
    if (match >= 0 && out.truths[match].counts && out.truths[match].box->id != 0) {
      d.kind = kTruePositive;
      d.truth = match;
      out.truths[match].found_by = int(out.found.size());
    } else if (same >= background_threshold && same < match_threshold) {
      d.kind = d.fix = kLocalisation;
      d.truth = same_truth;
    } else if (other >= match_threshold) {
      d.kind = d.fix = kWrongClass;
      d.truth = other_truth;
    } else if (same >= match_threshold) {
      d.kind = kDuplicate;
    } else if (other >= background_threshold) {
      d.kind = kBoth;
    }
    const bool in_crowd = match >= 0 && !out.truths[match].counts;
    if (in_crowd || (d.kind != kTruePositive && !in_area(box->w * box->h, area_all))) d.kind = kIgnored;
    out.found.push_back(d);
  }
  for (auto& truth : out.truths) truth.missed = truth.counts && truth.found_by < 0;
  for (auto& d : out.found) {  // the highest-scoring correctable detection gets the missed ground truth
    if (d.fix == kIgnored) continue;
    d.fixes_truth = std::exchange(out.truths[d.truth].missed, false);
  }
  return out;
}

// A detection in the list of its own class. corrected_class: a copy in the list of the correct class.
struct Entry {
  double score;
  ErrorKind kind, fix;
  bool fixes_truth, corrected_class;
};

// Returns the AP of one class at IoU 0.5 after correcting all errors of one kind. An error becomes a true
// positive if it then matches a free ground truth; otherwise it is removed. kTruePositive: corrects nothing.
double ap_after_fixing(const std::vector<Entry>& entries, int64_t truths, ErrorKind kind) {
  RankedMatches hits{{}, truths};
  for (const Entry& e : entries) {
    if (e.corrected_class ? kind == kWrongClass : kind == kLocalisation && e.fix == kind && e.fixes_truth)
      hits.right.push_back(true);
    else if (!e.corrected_class && e.kind != kIgnored && (e.kind == kTruePositive || e.kind != kind))
      hits.right.push_back(e.kind == kTruePositive);
  }
  return ap_at_points(hits, eval_recalls);
}

// Adds an image to the confusion matrix at a score threshold. Counts the true positives, then pairs the
// remaining ground truths and detections of any class by descending IoU.
void add_to_confusion_matrix(const ClassifiedImage& image, double score, int classes,
                             std::map<std::pair<int, int>, int64_t>& counts) {
  std::vector<char> free_truth, free_found;
  for (const auto& d : image.found)
    if (d.score >= score) free_found.push_back(d.kind != kTruePositive && d.kind != kIgnored);
  for (const auto& t : image.truths) {
    const bool found = t.found_by >= 0 && t.found_by < int(free_found.size());
    free_truth.push_back(t.counts && !found);
    if (t.counts && found) ++counts[{t.cls, t.cls}];
  }
  std::vector<std::tuple<double, size_t, size_t>> pairs;  // -IoU, truth, detection
  for (size_t d = 0; d < free_found.size(); ++d) {
    const auto& box = image.found[d];
    for (size_t t = 0; t < free_truth.size() && free_found[d]; ++t) {
      if (!free_truth[t]) continue;
      const double iou = coco_iou({0, 0, box.x, box.y, box.w, box.h, 0}, *image.truths[t].box);
      if (iou >= match_threshold) pairs.emplace_back(-iou, t, d);
    }
  }
  std::sort(pairs.begin(), pairs.end());
  for (const auto& [_, t, d] : pairs) {
    if (!free_truth[t] || !free_found[d]) continue;
    free_truth[t] = free_found[d] = false;
    ++counts[{image.truths[t].cls, image.found[d].cls}];
  }
  for (size_t t = 0; t < free_truth.size(); ++t)
    if (free_truth[t]) ++counts[{image.truths[t].cls, classes}];
  for (size_t d = 0; d < free_found.size(); ++d)
    if (free_found[d]) ++counts[{classes, image.found[d].cls}];
}

// Returns the errors of an image at a score threshold.
ImageErrors image_errors(const ClassifiedImage& image, double score) {
  ImageErrors out;
  out.id = image.id;
  for (const auto& d : image.found) {
    if (d.score < score) break;
    if (d.kind < error_kinds) out.cost += d.score;
    out.boxes.push_back(d);
  }
  const int found = int(out.boxes.size());
  for (const auto& t : image.truths) {
    if (!t.counts || (t.found_by >= 0 && t.found_by < found)) continue;
    out.cost += 1;
    out.boxes.push_back({t.box->x, t.box->y, t.box->w, t.box->h, t.cls, 1, kMissed});
  }
  return out;
}

// The curves of a class; -1 where a value is undefined.
struct ClassCurves {
  // AP after correcting each kind of error; the last one corrects nothing.
  std::array<double, error_kinds + 1> ap;
  std::array<double, score_steps> precision, recall, f1;  // at each score threshold
};

// Returns the curves of a class. entries: its detections, which are sorted here. truths: number of its ground
// truth boxes. missed: number of those that no detection matches.
ClassCurves class_curves(std::vector<Entry>& entries, int64_t truths, int64_t missed) {
  ClassCurves out;
  out.ap.fill(-1);
  for (auto* values : {&out.precision, &out.recall, &out.f1}) values->fill(-1);
  std::ranges::stable_sort(entries, std::ranges::greater(), &Entry::score);
  if (truths == 0) return out;
  for (int k = 0; k <= error_kinds; ++k) {
    const int64_t left = k == kMissed ? truths - missed : truths;
    // If all objects of the class were missed, none is left, and the class has no AP, as in COCO.
    if (left > 0) out.ap[k] = ap_after_fixing(entries, left, k == error_kinds ? kTruePositive : ErrorKind(k));
  }
  size_t i = 0;
  double right = 0, all = 0;
  for (int s = score_steps; s-- > 0;) {
    for (; i < entries.size() && entries[i].score >= score_of_step(s); ++i) {
      if (entries[i].corrected_class || entries[i].kind == kIgnored) continue;
      right += entries[i].kind == kTruePositive;
      ++all;
    }
    if (all > 0) out.precision[s] = right / all;
    out.recall[s] = right / double(truths);
    out.f1[s] = 2 * right / (all + double(truths));
  }
  return out;
}

}  // namespace

std::vector<ClassifiedImage> classify_errors(const CocoDataset& truth,
                                             const std::vector<Detection>& detections) {
  const auto boxes = boxes_by_image(truth, detections);
  std::vector<ClassifiedImage> images(boxes.size());
  parallel_for(int64_t(images.size()), [&](int64_t i) { images[i] = classify_image(boxes[i]); });
  return images;
}

ErrorAnalysis analyse_errors(const CocoDataset& truth, const std::vector<Detection>& detections) {
  const int classes = int(truth.categories.size());
  const std::vector<ClassifiedImage> images = classify_errors(truth, detections);
  ErrorAnalysis out;
  out.classes.resize(classes);
  std::vector<std::vector<Entry>> entries(classes);
  std::vector<int64_t> missed(classes);
  for (const ClassifiedImage& image : images) {
    for (const auto& d : image.found) {
      entries[d.cls].push_back({d.score, d.kind, d.fix, d.fixes_truth, false});
      if (d.fix == kWrongClass && d.fixes_truth)
        entries[image.truths[d.truth].cls].push_back({d.score, d.kind, d.fix, true, true});
      if (d.kind < error_kinds)
        ++out.count[d.kind];
      else if (d.kind == kIgnored && d.fixes_truth)
        ++out.count[d.fix];
    }
    for (const auto& t : image.truths) {
      out.classes[t.cls].truths += t.counts;
      missed[t.cls] += t.missed;
      out.count[kMissed] += t.missed;
    }
  }

  std::vector<ClassCurves> curves(classes);
  parallel_for(classes,
               [&](int64_t c) { curves[c] = class_curves(entries[c], out.classes[c].truths, missed[c]); });
  const auto mean_over_classes = [&](auto value) {
    double sum = 0, count = 0;
    for (int c = 0; c < classes; ++c)
      if (const double v = value(c); v >= 0) {
        sum += v;
        ++count;
      }
    return count > 0 ? sum / count : -1;
  };
  out.AP50 = mean_over_classes([&](int c) { return curves[c].ap[error_kinds]; });
  for (int k = 0; k < error_kinds; ++k)
    out.cost[k] = std::max(0.0, mean_over_classes([&](int c) { return curves[c].ap[k]; }) - out.AP50);
  double best = 0;
  int working = 25, until = 25;  // the steps with the best F1; the working score is their middle
  for (int s = 0; s < score_steps; ++s) {
    out.precision[s] = mean_over_classes([&](int c) { return curves[c].precision[s]; });
    out.recall[s] = mean_over_classes([&](int c) { return curves[c].recall[s]; });
    out.f1[s] = mean_over_classes([&](int c) { return curves[c].f1[s]; });
    if (out.f1[s] > best) {
      best = out.f1[s];
      working = until = s;
    } else if (out.f1[s] == best && best > 0 && until == s - 1)
      until = s;
  }
  working = (working + until) / 2;
  out.working_score = score_of_step(working);
  for (int c = 0; c < classes; ++c) {
    ClassErrors& of_class = out.classes[c];
    of_class.name = truth.categories[c].name;
    of_class.precision = curves[c].precision[working];
    of_class.recall = curves[c].recall[working];
    of_class.f1 = curves[c].f1[working];
  }

  // By image.
  constexpr size_t most = 25;
  const auto worse = [](const auto& a, const auto& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.id < b.id;
  };
  for (const ClassifiedImage& image : images) {
    add_to_confusion_matrix(image, out.working_score, classes, out.confusion);
    ImageErrors errors = image_errors(image, out.working_score);
    if (errors.cost == 0) continue;
    out.worst.insert(std::upper_bound(out.worst.begin(), out.worst.end(), errors, worse), std::move(errors));
    if (out.worst.size() > most) out.worst.pop_back();
  }
  return out;
}

VocResult voc_ap(const CocoDataset& truth, const std::vector<Detection>& detections) {
  const size_t classes = truth.categories.size();
  std::vector<std::vector<std::pair<double, bool>>> found(classes);  // score, right
  std::vector<int64_t> truths(classes);
  for (const ImageBoxes& image : boxes_by_image(truth, detections)) {
    for (const auto& t : image.truths) truths[t.cls] += !t.box->crowd;
    std::vector<char> taken(image.truths.size(), 0);
    for (const auto& [d, cls] : image.found) {
      double best = -1;
      size_t match = 0;
      for (size_t t = 0; t < image.truths.size(); ++t) {
        const CocoAnnotation& g = *image.truths[t].box;
        if (image.truths[t].cls != cls) continue;
        const double w = std::min(d->x + d->w, g.x + g.w) - std::max(d->x, g.x) + 1,
                     h = std::min(d->y + d->h, g.y + g.h) - std::max(d->y, g.y) + 1;
        if (w <= 0 || h <= 0) continue;
        const double iou = w * h / ((d->w + 1) * (d->h + 1) + (g.w + 1) * (g.h + 1) - w * h);
        if (iou > best) {
          best = iou;
          match = t;
        }
      }
      const bool near = best >= match_threshold;
      if (near && image.truths[match].box->crowd) continue;
      found[cls].emplace_back(d->score, near && !std::exchange(taken[match], 1));
    }
  }
  VocResult out;
  double sum11 = 0, sum = 0, count = 0;
  for (size_t c = 0; c < classes; ++c) {
    out.per_class.push_back({truth.categories[c].name});
    if (truths[c] == 0) continue;
    std::ranges::stable_sort(found[c], std::ranges::greater(), &std::pair<double, bool>::first);
    RankedMatches hits{{}, truths[c]};
    for (const auto& [_, right] : found[c]) hits.right.push_back(right);
    VocResult::Class& of_class = out.per_class.back();
    of_class.AP11 = ap_at_points(hits, 11);
    of_class.AP = ap_area(hits);
    sum11 += of_class.AP11;
    sum += of_class.AP;
    ++count;
  }
  if (count > 0) {
    out.AP11 = sum11 / count;
    out.AP = sum / count;
  }
  return out;
}

void print_error_analysis(std::ostream& out, const ErrorAnalysis& analysis) {
  if (analysis.AP50 < 0) return;
  out << "\nCost of each error type in AP50 points (TIDE):\n ";
  for (int k = 0; k < error_kinds; ++k)
    out << formatted(" %s %.1f", error_kind_names[k], 100 * analysis.cost[k]);
  const int s = analysis.working_step();
  out << formatted(
      "\nBest F1 %.3f at score threshold %.2f: precision %.3f, recall %.3f (means over classes)\n",
      analysis.f1[s], analysis.working_score, std::max(0.0, analysis.precision[s]), analysis.recall[s]);
}

void print_voc(std::ostream& out, const VocResult& voc) {
  out << "\n" << name_cell("VOC AP at IoU 0.5") << "  all points   11 points\n";
  const auto row = [&](const std::string& name, double all, double eleven) {
    out << name_cell(name) << number_cell(all, 12, 4) << number_cell(eleven, 12, 4) << "\n";
  };
  for (const auto& c : voc.per_class) row(c.name, c.AP, c.AP11);
  row("mean", voc.AP, voc.AP11);
}

void write_error_analysis(JsonWriter& writer, const ErrorAnalysis& analysis) {
  const int classes = int(analysis.classes.size());
  const auto numbers = [&](const char* key, const auto& values) {
    writer.Key(key);
    writer.StartArray();
    for (const double v : values) writer.Double(v);
    writer.EndArray();
  };
  writer.Key("error_analysis");
  writer.StartObject();
  write_field(writer, "AP50", analysis.AP50);
  write_field(writer, "working_score", analysis.working_score);
  writer.Key("errors");
  writer.StartObject();
  for (int k = 0; k < error_kinds; ++k) {
    writer.Key(error_kind_names[k]);
    writer.StartObject();
    write_field(writer, "AP50", analysis.cost[k]);
    write_field(writer, "count", analysis.count[k]);
    writer.EndObject();
  }
  writer.EndObject();
  numbers("precision_by_score", analysis.precision);
  numbers("recall_by_score", analysis.recall);
  numbers("F1_by_score", analysis.f1);
  writer.Key("per_class");
  write_list(writer, analysis.classes, [&](const ClassErrors& c) {
    write_field(writer, "name", c.name);
    write_field(writer, "precision", c.precision);
    write_field(writer, "recall", c.recall);
    write_field(writer, "F1", c.f1);
  });
  writer.Key("confusion");
  write_list(writer, analysis.confusion, [&](const auto& entry) {
    const auto [truth, found] = entry.first;
    if (truth < classes) write_field(writer, "truth", analysis.classes[truth].name);
    if (found < classes) write_field(writer, "found", analysis.classes[found].name);
    write_field(writer, "count", entry.second);
  });
  writer.Key("worst_images");
  write_list(writer, analysis.worst, [&](const ImageErrors& image) {
    write_field(writer, "image_id", image.id);
    write_field(writer, "cost", image.cost);
  });
  writer.EndObject();
}

void write_voc(JsonWriter& writer, const VocResult& voc) {
  writer.Key("voc");
  writer.StartObject();
  write_field(writer, "AP", voc.AP);
  write_field(writer, "AP11", voc.AP11);
  writer.Key("per_class");
  write_list(writer, voc.per_class, [&](const VocResult::Class& c) {
    write_field(writer, "name", c.name);
    write_field(writer, "AP", c.AP);
    write_field(writer, "AP11", c.AP11);
  });
  writer.EndObject();
}

}  // namespace yolox
