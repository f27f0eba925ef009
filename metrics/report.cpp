// SPDX-License-Identifier: Apache-2.0
#include "metrics/report.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <numeric>
#include <unordered_map>

#include "base/printable.hpp"
#include "metrics/html.hpp"

namespace yolox {

namespace {

// Descriptions of the error types, by ErrorKind.
constexpr const char* error_kind_descriptions[] = {
    "wrong class, IoU at least 0.5", "right class, IoU 0.1 to 0.5",        "wrong class, IoU 0.1 to 0.5",
    "second detection of an object", "detection of background, IoU < 0.1", "object without detection",
};

// Returns the beginning of a name, at most `columns` wide, followed by "…" if the name is longer.
std::string short_name(const std::string& name, size_t columns) {
  const std::string begin = cut_to_columns(name, columns);
  return begin.size() < name.size() ? begin + "…" : name;
}

std::string errors_html(const ErrorAnalysis& analysis) {
  std::string html =
      "<div class='card' id='errors'><h3>Cost of each error type in AP50</h3><table class='bars'>";
  const double most = std::max(1e-9, *std::max_element(analysis.cost.begin(), analysis.cost.end()));
  for (int k = 0; k < error_kinds; ++k)
    html += concat("<tr><th>", error_kind_names[k], "<small>", error_kind_descriptions[k],
                   "</small></th><td><i style='width:", formatted("%.1f", 100 * analysis.cost[k] / most),
                   "%;background:var(--o", k, ")'></i></td><td class='n'>",
                   formatted("%.1f", 100 * analysis.cost[k]), "</td></tr>");
  return html +
         "</table><p class='note'>AP50 points gained by correcting all errors of one type and nothing else "
         "(TIDE). The values of different types do not add up.</p></div>";
}

std::string sizes_html(const EvalResult& result) {
  std::array<int64_t, eval_areas> counts{};
  for (const ClassResult& c : result.per_class)
    for (int area = 0; area < eval_areas; ++area) counts[area] += c.ground_truths_of_area[area];
  const double ap[] = {result.AP, result.APs, result.APm, result.APl},
               ar[] = {result.AR100, result.ARs, result.ARm, result.ARl};
  constexpr const char* extents[] = {"", "up to 32², ", "32² to 96², ", "from 96², "};
  std::string html = "<div class='card' id='sizes'><h3>AP by size</h3><table class='bars'>";
  for (int area = 0; area < eval_areas; ++area)
    html += concat(
        "<tr><th>", eval_area_names[area], "<small>", extents[area], counts[area],
        " objects</small></th><td><i style='width:", formatted("%.1f", 100 * std::max(0.0, ar[area])),
        "%;background:var(--faint)'></i><i style='width:", formatted("%.1f", 100 * std::max(0.0, ap[area])),
        "%;background:var(--c0)'></i></td><td class='n'>", metric_text(ap[area]), "</td></tr>");
  return html +
         "</table><p class='note'>Areas in square pixels of the image. Pale bars: AR, the recall with at "
         "most 100 detections per image.</p></div>";
}

std::string precision_recall_html(const EvalResult& result) {
  std::vector<Series> series;
  const auto curve_of = [&](const std::vector<const ClassResult*>& classes, int t_begin, int t_end) {
    std::vector<std::pair<double, double>> points;
    for (int r = 0; r < eval_recalls && !classes.empty(); ++r) {
      double sum = 0;
      for (const ClassResult* c : classes)
        for (int t = t_begin; t < t_end; ++t) sum += c->precision[area_all][t][r];
      points.emplace_back(r * 0.01, sum / double(classes.size() * size_t(t_end - t_begin)));
    }
    return points;
  };
  std::vector<const ClassResult*> all;
  for (const ClassResult& c : result.per_class)
    if (c.precision[area_all][0][0] >= 0) all.push_back(&c);
  for (size_t i = 0; i < all.size() && all.size() <= 20; ++i)
    series.push_back({"", curve_of({all[i]}, 0, 1), "thin"});
  series.push_back({"IoU 0.5", curve_of(all, 0, 1), "c0"});
  series.push_back({"0.75", curve_of(all, 5, 6), "c1"});
  series.push_back({"0.5 to 0.95", curve_of(all, 0, 10), "c2"});
  const bool thin = all.size() > 1 && all.size() <= 20;
  return chart_html({.title = "Precision over recall",
                     .x_name = "recall",
                     .series = std::move(series),
                     .unit = true,
                     .note = concat("Means over classes", thin ? "; thin: each class at IoU 0.5." : ".")});
}

std::string f1_html(const ErrorAnalysis& analysis) {
  const auto series = [&](const std::string& name, const auto& values, const char* style) {
    Series s{name, {}, style};
    for (int k = 0; k < score_steps; ++k)
      if (values[k] >= 0) s.points.emplace_back(k * 0.01, values[k]);
    return s;
  };
  return chart_html(
      {.title = "F1 by score threshold",
       .x_name = "score threshold",
       .series = {series("F1", analysis.f1, "c0"), series("precision", analysis.precision, "c1"),
                  series("recall", analysis.recall, "c2")},
       .unit = true,
       .marked = analysis.working_score,
       .note = concat("IoU 0.5, means over classes. Best F1 ",
                      metric_text(analysis.f1[analysis.working_step()]), " at a score threshold of ",
                      formatted("%.2f", analysis.working_score), "; use this value for ./demo --conf.")});
}

std::string classes_html(const EvalResult& result, const ErrorAnalysis& analysis,
                         const std::optional<VocResult>& voc) {
  std::vector<size_t> order(result.per_class.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return result.per_class[a].AP > result.per_class[b].AP; });
  std::string html = concat(
      "<div class='card wide' id='classes'><h3>Classes</h3><div class='scroll'><table class='classes'><tr>"
      "<th>class</th><th class='w'>objects</th><th>AP</th><th>AP50</th><th class='w'>AP75</th>",
      voc ? "<th class='w'>VOC AP</th><th class='w'>11 points</th>" : "",
      "<th class='w'>AR</th><th>precision</th><th>recall</th><th>F1</th></tr>");
  for (const size_t i : order) {
    const ClassResult& c = result.per_class[i];
    const ClassErrors& more = analysis.classes[i];
    html += concat("<tr><th>", escaped(c.name), "</th><td class='w'>", c.ground_truths,
                   "</td><td class='ap'>", "<i style='width:", formatted("%.1f", 100 * std::max(0.0, c.AP)),
                   "%'></i><span>", metric_text(c.AP), "</span></td><td>", metric_text(c.AP50),
                   "</td><td class='w'>", metric_text(c.AP75), "</td>");
    if (voc)
      html += concat("<td class='w'>", metric_text(voc->per_class[i].AP), "</td><td class='w'>",
                     metric_text(voc->per_class[i].AP11), "</td>");
    html += concat("<td class='w'>", metric_text(c.AR100), "</td><td>", metric_text(more.precision),
                   "</td><td>", metric_text(more.recall), "</td><td>", metric_text(more.f1), "</td></tr>");
  }
  if (voc)
    html += concat("<tr><th>mean</th><td class='w'></td><td>", metric_text(result.AP), "</td><td>",
                   metric_text(result.AP50), "</td><td class='w'>", metric_text(result.AP75),
                   "</td><td class='w'>", metric_text(voc->AP), "</td><td class='w'>", metric_text(voc->AP11),
                   "</td><td class='w'>", metric_text(result.AR100), "</td><td></td><td></td><td></td></tr>");
  return html +
         concat("</table></div><p class='note'>Precision, recall and F1 at IoU 0.5 and a score threshold of ",
                formatted("%.2f", analysis.working_score), ".</p></div>");
}

// Shows the confusion matrix, with the 20 classes that are confused most if there are more, and a list of the
// most frequent confusions.
std::string confusion_html(const ErrorAnalysis& analysis) {
  const int classes = int(analysis.classes.size());
  std::vector<int64_t> mixed(classes), row_sum(classes + 1);
  std::vector<std::pair<int64_t, std::pair<int, int>>> mistakes;
  for (const auto& [pair, n] : analysis.confusion) {
    const auto [t, f] = pair;
    row_sum[t] += n;
    if (t == f || t == classes || f == classes) continue;
    mixed[t] += n;
    mixed[f] += n;
    mistakes.emplace_back(-n, pair);
  }
  std::sort(mistakes.begin(), mistakes.end());
  std::vector<int> shown(classes);
  std::iota(shown.begin(), shown.end(), 0);
  constexpr int most = 20;
  if (classes > most) {
    std::stable_sort(shown.begin(), shown.end(), [&](int a, int b) {
      return std::pair(mixed[a], analysis.classes[a].truths) >
             std::pair(mixed[b], analysis.classes[b].truths);
    });
    shown.resize(most);
    std::sort(shown.begin(), shown.end());
  }
  shown.push_back(classes);  // the row of background and the column of missed objects
  const int n = int(shown.size()), cell = 30, left = 122, top = 104;
  std::string html =
      concat("<div class='card wide' id='confusion'><h3>Confusion matrix</h3>",
             "<p class='note'>Rows: truth. Columns: prediction.</p>",
             "<div class='matrix'><svg viewBox='0 0 ", left + n * cell + 40, " ", top + n * cell + 4,
             "' style='max-width:", int(1.25 * (left + n * cell + 40)),
             "px' role='img' aria-label='confusion matrix; rows: truth, columns: prediction'>");
  html += concat("<text class='axis' x='", left,
                 "' y='11'>prediction →</text><text class='axis' transform='translate(11 ", top,
                 ") rotate(90)'>truth →</text>");
  for (int r = 0; r < n; ++r) {
    const int t = shown[r];
    html += concat("<text class='y' x='", left - 6, "' y='", top + r * cell + cell / 2, "' dy='.35em'>",
                   escaped(t < classes ? short_name(analysis.classes[t].name, 15) : "background"), "</text>");
    html += concat("<text class='slant' transform='translate(", left + r * cell + cell / 2 + 3, " ", top - 6,
                   ") rotate(-45)'>",
                   escaped(t < classes ? short_name(analysis.classes[t].name, 15) : "missed"), "</text>");
    for (int k = 0; k < n; ++k) {
      const int f = shown[k];
      const auto entry = analysis.confusion.find({t, f});
      const int64_t count = entry == analysis.confusion.end() ? 0 : entry->second;
      if (t == classes && f == classes) continue;
      const double part = row_sum[t] ? double(count) / double(row_sum[t]) : 0;
      html +=
          concat("<rect class='", t == f ? "right" : "wrong", "' x='", left + k * cell + 1, "' y='",
                 top + r * cell + 1, "' width='", cell - 2, "' height='", cell - 2,
                 "' rx='3' style='fill-opacity:", formatted("%.2f", count ? 0.08 + 0.92 * part : 0), "'/>");
      if (count)
        html += concat("<text class='", part > 0.45 ? "on" : "n", "' x='", left + k * cell + cell / 2,
                       "' y='", top + r * cell + cell / 2, "' dy='.35em'>",
                       count < 1000 ? concat(count) : axis_number(double(count)), "</text>");
    }
  }
  html += concat(
      "</svg></div><p class='note'>IoU 0.5, score threshold ", formatted("%.2f", analysis.working_score),
      ". The shade is the fraction of the row",
      classes > most ? concat(". Shown: the ", most, " of ", classes, " classes that are confused most") : "",
      ".</p>");
  if (!mistakes.empty()) {
    html += "<p>Most frequent confusions:</p><ul class='mistakes'>";
    for (size_t i = 0; i < std::min<size_t>(12, mistakes.size()); ++i) {
      const auto& [count, pair] = mistakes[i];
      html += concat("<li><b>", escaped(analysis.classes[pair.first].name), "</b> detected as <b>",
                     escaped(analysis.classes[pair.second].name), "</b> <small>", -count, " of ",
                     analysis.classes[pair.first].truths, "</small></li>");
    }
    html += "</ul>";
  }
  return html + "</div>";
}

// Shows an image with its boxes as SVG. data: source of the image; if null, only the boxes are shown.
std::string image_html(const ImageErrors& image, const ErrorAnalysis& analysis, const CocoImage& about,
                       const Dataset* data, int64_t record) {
  int w = about.width, h = about.height;
  std::string uri, error;
  if (data) {
    try {
      constexpr int side = 480;
      const cv::Size full = data->size(record);
      w = full.width;
      h = full.height;
      const cv::Rect all(0, 0, w, h);
      uri =
          data_uri(data->image_region(record, all, std::min(1.0, double(side) / std::max(w, h))).image, side);
    } catch (const std::exception& e) {
      error = e.what();
    }
  }
  for (const ClassifiedBox& b : image.boxes)  // if the image size is unknown, use the extent of the boxes
    if (about.width <= 0 && uri.empty()) {
      w = std::max(w, int(std::clamp(b.x + b.w + 1, 0., 1e5)));
      h = std::max(h, int(std::clamp(b.y + b.h + 1, 0., 1e5)));
    }
  const double font = std::max(w, h) / 34.0;
  const auto number = [](double value) { return formatted("%.1f", value); };
  std::string boxes, texts;
  std::array<int, error_kinds> counts{};
  std::vector<cv::Rect2d> written;  // skip a label that would overlap another label
  size_t drawn = 0;
  for (const bool errors : {false, true}) {  // draw errors last, so that they are on top
    for (const ClassifiedBox& b : image.boxes) {
      if ((b.kind < error_kinds) != errors) continue;
      if (errors) ++counts[b.kind];
      if (++drawn > 200) continue;
      const std::string score = b.kind == kMissed ? "" : " " + formatted("%.2f", b.score),
                        name = analysis.classes[b.cls].name, label = short_name(name, 20) + score;
      const std::string place =
          concat("x='", number(b.x), "' y='", number(b.y), "' width='", number(std::max(0.0, b.w)),
                 "' height='", number(std::max(0.0, b.h)), "'");
      boxes += concat("<rect class='under' ", place, "/><rect class='o", int(b.kind), "' ", place, "><title>",
                      escaped(name), score, ": ", error_kind_names[b.kind], "</title></rect>");
      if (!errors) continue;
      const double width = 0.6 * font * double(label.size());
      const cv::Rect2d text(std::max(0.0, std::min(b.x, w - width)),
                            std::max(0.0, std::min(b.y - font / 4, double(h)) - font), width, font);
      if (std::any_of(written.begin(), written.end(), [&](const auto& r) { return (r & text).area() > 0; }))
        continue;
      written.push_back(text);
      texts += concat("<text x='", number(text.x), "' y='", number(text.y + font), "' style='fill:var(--o",
                      int(b.kind), ")'>", escaped(label), "</text>");
    }
  }
  std::string html = concat("<figure><svg viewBox='0 0 ", w, " ", h, "' style='aspect-ratio:", w, "/", h,
                            ";font-size:", formatted("%.1f", font), "px' role='img' aria-label='",
                            escaped(about.file_name), "'>");
  if (!uri.empty()) html += concat("<image width='", w, "' height='", h, "' href='", uri, "'/>");
  const std::string name = std::filesystem::path(about.file_name).filename().string();
  html += boxes + texts + "</svg><figcaption><b>" + escaped(name) + "</b> ";
  std::string what;
  for (int k = 0; k < error_kinds; ++k)
    if (counts[k]) what += concat(what.empty() ? "" : ", ", counts[k], " ", error_kind_names[k]);
  html += what;
  if (!error.empty()) html += "; " + escaped(error);
  return html + "</figcaption></figure>";
}

// Shows the images with the most errors.
std::string worst_html(const ErrorAnalysis& analysis, const CocoDataset& truth, const Dataset* data) {
  std::unordered_map<int64_t, const CocoImage*> images;
  for (const auto& i : truth.images) images[i.id] = &i;
  std::unordered_map<int64_t, int64_t> records;
  for (size_t i = 0; data && i < data->records.size(); ++i) records[data->records[i].image_id] = int64_t(i);
  std::string html = concat("<h3 id='worst'>",
                            analysis.worst.empty() ? "No image has errors"
                                                   : concat("The ", analysis.worst.size(),
                                                            analysis.worst.size() == 1 ? " image" : " images",
                                                            " with the most errors"),
                            "</h3><p class='note key'>");
  for (const ErrorKind o :
       {kTruePositive, kWrongClass, kLocalisation, kBoth, kDuplicate, kBackground, kMissed})
    html += concat("<span><i style='background:var(--o", int(o), ")'></i>", error_kind_names[o], "</span> ");
  html += concat("</p><p class='note'>Detections with a score of at least ",
                 formatted("%.2f", analysis.working_score),
                 ", and missed objects. Sorted by the number of missed objects plus the sum of the scores of "
                 "wrong detections.</p><div class='images'>");
  for (const ImageErrors& image : analysis.worst) {
    const auto record = records.find(image.id);
    html += image_html(image, analysis, *images[image.id], record == records.end() ? nullptr : data,
                       record == records.end() ? 0 : record->second);
  }
  return html + "</div>";
}

}  // namespace

std::string evaluation_html(const std::string& heading, const EvalResult& result, const CocoDataset& truth,
                            const ErrorAnalysis& analysis, const Dataset* data,
                            const std::optional<VocResult>& voc) {
  std::string html = "<section id='evaluation'><h2>Evaluation</h2><p class='note'>" + escaped(heading) +
                     "</p><div class='tiles'>";
  for (const auto& [value, name] : {std::pair(result.AP, "AP"),
                                    {result.AP50, "AP50"},
                                    {result.AP75, "AP75"},
                                    {result.AR100, "AR"},
                                    {analysis.f1[analysis.working_step()], "best F1"}})
    html += tile(metric_text(value), name);
  if (voc) html += tile(metric_text(voc->AP), "VOC AP") + tile(metric_text(voc->AP11), "VOC AP, 11 points");
  html += "</div><div class='cards two'>" + errors_html(analysis) + sizes_html(result) +
          precision_recall_html(result) + f1_html(analysis) + "</div>" + classes_html(result, analysis, voc) +
          confusion_html(analysis) + worst_html(analysis, truth, data);
  return html + "</section>";
}

}  // namespace yolox
