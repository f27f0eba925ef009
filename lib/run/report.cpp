// SPDX-License-Identifier: Apache-2.0
#include "run/report.hpp"

#include <rapidjson/document.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <string_view>
#include <unordered_map>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "metrics/html.hpp"

namespace yolox {

// ---- the evaluation section

// Descriptions of the error types, by ErrorKind.
static constexpr const char* error_kind_descriptions[] = {
    "wrong class, IoU at least 0.5", "right class, IoU 0.1 to 0.5",        "wrong class, IoU 0.1 to 0.5",
    "second detection of an object", "detection of background, IoU < 0.1", "object without detection",
};

// Returns the beginning of a name, at most `columns` wide, followed by "…" if the name is longer.
static std::string short_name(const std::string& name, size_t columns) {
  const std::string begin = cut_text(name, columns);
  return begin.size() < name.size() ? begin + "…" : name;
}

static std::string errors_html(const ErrorAnalysis& analysis) {
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

static std::string sizes_html(const EvalResult& result) {
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

static std::string precision_recall_html(const EvalResult& result) {
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

static std::string f1_html(const ErrorAnalysis& analysis) {
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

static std::string classes_html(const EvalResult& result, const ErrorAnalysis& analysis,
                                const std::optional<VocResult>& voc) {
  std::vector<size_t> order(result.per_class.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::ranges::stable_sort(order, std::ranges::greater(), [&](size_t c) { return result.per_class[c].AP; });
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
static std::string confusion_html(const ErrorAnalysis& analysis) {
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
    std::ranges::stable_sort(shown, std::ranges::greater(),
                             [&](int c) { return std::pair(mixed[c], analysis.classes[c].truths); });
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
static std::string image_html(const ImageErrors& image, const ErrorAnalysis& analysis, const CocoImage& about,
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
      if (std::ranges::any_of(written, [&](const auto& r) { return (r & text).area() > 0; })) continue;
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
static std::string worst_html(const ErrorAnalysis& analysis, const CocoDataset& truth, const Dataset* data) {
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

// ---- the report of a run

// The evaluation of a report stands between these two comments.
static constexpr std::string_view evaluation_begin = "<!-- evaluation -->\n";
static constexpr std::string_view evaluation_end = "\n<!-- end of evaluation -->\n";

// Contents of metrics.csv. An empty cell is NaN. An incomplete last line is left out.
struct MetricsTable {
  std::vector<std::string> names;                      // of the columns, in the order of the file
  std::map<std::string, std::vector<double>> columns;  // by name

  // Returns the names of the columns between two others. The loss terms are between "loss" and
  // "positives_per_object", what losses.log() has logged is between "waiting_share" and "AP".
  std::vector<std::string> between(const char* before, const char* after) const {
    const auto first = std::find(names.begin(), names.end(), before);
    const auto last = std::find(first, names.end(), after);
    return first == last ? std::vector<std::string>() : std::vector<std::string>(first + 1, last);
  }
};

static MetricsTable read_metrics(const std::string& path) {
  std::ifstream file(path);
  MetricsTable table;
  auto& [names, columns] = table;
  for (std::string line; std::getline(file, line) && !file.eof();) {
    if (names.empty()) {
      names = split_list(line);
      continue;
    }
    const char* at = line.c_str();
    for (const auto& name : names) {
      char* end;
      const double value = std::strtod(at, &end);
      columns[name].push_back(end == at ? std::nan("") : value);
      at = *end == ',' ? end + 1 : end;
    }
  }
  return table;
}

std::vector<std::pair<double, double>> curve(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<std::pair<double, double>> all, points;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
    if (std::isfinite(y[i])) all.emplace_back(x[i], y[i]);
  const size_t each = (all.size() + 299) / 300;
  for (size_t i = 0; i < all.size(); i += each) {
    const size_t end = std::min(all.size(), i + each);
    std::pair<double, double> mean{0, 0};
    for (size_t k = i; k < end; ++k) {
      mean.first += all[k].first / double(end - i);
      mean.second += all[k].second / double(end - i);
    }
    points.push_back(mean);
  }
  return points;
}

// Returns the seconds of training and of evaluation, from metrics.csv. Steps that were lost or
// rolled back do not count. bs: images per step.
static std::pair<double, double> seconds_of(MetricsTable& metrics, double bs) {
  double training = 0, evaluation = 0, before = 0;
  const auto &step = metrics.columns["iteration"], &speed = metrics.columns["images_per_second"];
  for (size_t i = 0; i < speed.size(); ++i) {  // no column, if no step had finite numbers so far
    if (!(speed[i] > 0) || step[i] <= before) continue;
    training += (step[i] - before) * bs / speed[i];
    before = step[i];
  }
  for (const double v : metrics.columns["eval_seconds"])
    if (std::isfinite(v)) evaluation += v;
  return {training, evaluation};
}

std::string training_html(const std::string& run) {
  MetricsTable table = read_metrics(run + "/metrics.csv");
  auto& columns = table.columns;
  const auto& step = columns["iteration"];
  const auto& epoch = columns["epoch"];
  if (step.empty()) return "";
  double per_epoch = 1;  // steps per epoch; exact, because each epoch has a row at its end
  for (size_t i = 0; i < step.size(); ++i) per_epoch = std::max(per_epoch, step[i] / epoch[i]);
  const bool in_epochs = epoch.back() > 2;
  std::vector<double> x = step;
  if (in_epochs)
    for (double& v : x) v /= per_epoch;
  const std::string x_name = in_epochs ? "epoch" : "step";
  const auto series = [&](const std::string& column, const std::string& name, const std::string& style,
                          double factor = 1) {
    Series s{name, curve(x, columns[column]), style};
    for (auto& point : s.points) point.second *= factor;
    return s;
  };
  const auto chart = [&](const std::string& title, std::vector<Series> of) {
    return chart_html({title, x_name, std::move(of), {}, {}, {}});
  };
  const auto settings = read_config_json(run);
  std::map<std::string, std::string> by_name(settings.begin(), settings.end());
  const std::string score = score_of({}).name;
  columns[score].resize(step.size(), std::nan(""));
  double best = -1, best_epoch = 0, last = -1;
  for (size_t i = 0; i < step.size(); ++i) {
    const double ap = columns[score][i];
    if (std::isnan(ap)) continue;
    last = ap;
    if (ap > best) {
      best = ap;
      best_epoch = epoch[i];
    }
  }
  double speed = 0, rows = 0;
  for (const double v : columns["images_per_second"])
    if (std::isfinite(v)) {
      speed += v;
      ++rows;
    }
  std::string html = "<section id='training'><h2>Training</h2><div class='tiles'>";
  html += tile(metric_text(best), concat("best ", score, best < 0 ? "" : concat(", in epoch ", best_epoch)));
  html += tile(metric_text(last), "last " + score);
  html += tile(concat(epoch.back()), "epochs");
  html += tile(axis_number(step.back()), "steps");
  if (rows > 0) html += tile(formatted("%.3g", speed / rows), "images per second");
  if (const double bs = std::atof(by_name["bs"].c_str()); bs > 0) {
    const auto [training, evaluation] = seconds_of(table, bs);
    html += tile(short_time(training), "training time");
    if (evaluation > 0) html += tile(short_time(evaluation), "evaluation time");
  }
  html += "</div><div class='cards'>";
  std::vector<Series> losses{series("loss", "total", "c0")};
  for (const auto& term : table.between("loss", "positives_per_object"))
    losses.push_back(series(term, term, concat("c", losses.size() % kCurveStyles)));
  losses.push_back(series("val_loss", "validation, without l1", "ink"));
  html += chart("Loss", losses);
  html += chart("AP on the evaluation images", {series("AP", "AP", "c0"), series("AP50", "AP50", "c1")});
  html += chart("Learning rate", {series("lr", "", "c0")});
  Chart norm{"Gradient norm", x_name, {series("grad_norm", "before clipping", "c0")}, {}, {}, {}};
  if (const double clip = std::atof(by_name["clip"].c_str()); clip > 0)
    norm.limit = {clip, concat("clipped to ", clip)};
  html += chart_html(norm);
  for (const auto& logged : table.between("waiting_share", "AP"))
    if (logged != "grad_norm") html += chart(logged, {series(logged, "", "c0")});
  html += chart("Images per second", {series("images_per_second", "", "c0")});
  html += chart("Time spent waiting for images, %", {series("waiting_share", "", "c0", 100)});
  return html + "</div></section>";
}

// Returns the HTML section with the pictures of the run folder, or "" without pictures.
static std::string pictures_html(const std::string& run) {
  std::string html;
  for (const auto& [file, about] :
       {std::pair("labels.jpg", "Ground truth boxes of the training set"),
        {"train_batch0.jpg", "The first training batch after augmentation, with its ground truth"},
        {"val_batch0_pred.jpg",
         "The first images of the last evaluation: truth on the left, prediction on the right"}}) {
    const std::string path = run + "/" + file;  // exists(), because imread() prints a warning otherwise
    if (const cv::Mat image = std::filesystem::exists(path) ? cv::imread(path) : cv::Mat(); !image.empty())
      html += concat("<figure><img alt='", file, "' src='", data_uri(image, 1400), "'><figcaption>", about,
                     "</figcaption></figure>");
  }
  return html.empty()
             ? ""
             : "<section id='pictures'><h2>Pictures</h2><div class='pictures'>" + html + "</div></section>";
}

std::vector<std::pair<std::string, std::string>> read_config_json(const std::string& run) {
  std::ifstream file(run + "/config.json", std::ios::binary);
  const std::string json{std::istreambuf_iterator<char>(file), {}};
  rapidjson::Document config;
  if (config.Parse<rapidjson::kParseNumbersAsStringsFlag>(json.c_str(), json.size()).HasParseError() ||
      !config.IsObject())
    return {};
  std::vector<std::pair<std::string, std::string>> settings;
  for (const auto& m : config.GetObject())
    settings.emplace_back(m.name.GetString(), m.value.IsString() ? m.value.GetString()
                                              : m.value.IsTrue() ? "true"
                                                                 : "false");
  return settings;
}

// Writes RUN/report.html from the files of the run. evaluation: HTML; if empty, the evaluation of the
// existing report is kept. Returns false if the report cannot be written.
static bool write_run_report(const std::string& run, std::string evaluation) {
  const std::string path = run + "/report.html";
  if (evaluation.empty()) {
    std::ifstream old(path, std::ios::binary);
    const std::string page{std::istreambuf_iterator<char>(old), {}};
    const size_t begin = page.find(evaluation_begin), end = page.find(evaluation_end);
    if (begin != std::string::npos && end != std::string::npos) {
      const size_t text = begin + evaluation_begin.size();
      evaluation = page.substr(text, end - text);
    }
  }
  const auto settings = read_config_json(run);
  std::map<std::string, std::string> by_name(settings.begin(), settings.end());
  const std::string &ranks = by_name["ranks"], &threads = by_name["threads"];
  std::string about = concat(by_name["model"], " on ", by_name["data"], ", torch ", by_name["torch"],
                             ", revision ", by_name["revision"]);
  if (!ranks.empty())
    about += concat("\nStarted ", by_name["started"], ", this report ", date_text(std::time(nullptr)), "\n",
                    by_name["machine"], "; ", by_name["device_name"], "; ", ranks,
                    ranks == "1" ? " rank with " : " ranks with ", threads,
                    threads == "1" ? " thread" : " threads", ranks == "1" ? "" : " each");
  const std::string name = std::filesystem::absolute(run).lexically_normal().filename().string();
  const std::string html = concat(training_html(run), evaluation_begin, evaluation, evaluation_end,
                                  pictures_html(run), settings_section(settings));
  return replace_file(path, page_html(name.empty() ? run : name, about, html));
}

bool report(const std::string& run, Log& log, int64_t step, const Evaluation* e, const Dataset* val) {
  std::string why = "is the disk full?";
  try {
    std::string evaluated;
    if (e)
      evaluated = evaluation_html(concat("After step ", step, ", on ", e->images, " images of ", val->name),
                                  e->result, e->truth, analyse_errors(e->truth, e->detections), val);
    if (write_run_report(run, evaluated)) return true;
  } catch (const std::exception& error) {
    why = error.what();
  }
  log.line(concat("warning: cannot write ", run, "/report.html; ", why));
  return false;
}

}  // namespace yolox
