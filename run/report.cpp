// SPDX-License-Identifier: Apache-2.0
#include "run/report.hpp"

#include <rapidjson/document.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "metrics/html.hpp"
#include "metrics/report.hpp"

namespace yolox {

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

// Returns the seconds of training and of evaluation, from metrics.csv and epochs.csv. Steps that were lost or
// rolled back do not count. bs: images per step.
static std::pair<double, double> seconds_of(const std::string& run, MetricsTable& metrics, double bs) {
  double training = 0, evaluation = 0, before = 0;
  const auto &step = metrics.columns["iteration"], &speed = metrics.columns["images_per_second"];
  for (size_t i = 0; i < speed.size(); ++i) {  // no column, if no step had finite numbers so far
    if (!(speed[i] > 0) || step[i] <= before) continue;
    training += (step[i] - before) * bs / speed[i];
    before = step[i];
  }
  MetricsTable epochs = read_metrics(run + "/epochs.csv");
  for (const double v : epochs.columns["eval_seconds"])
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
    const auto [training, evaluation] = seconds_of(run, table, bs);
    html += tile(short_time(training), "training time");
    if (evaluation > 0) html += tile(short_time(evaluation), "evaluation time");
  }
  html += "</div><div class='cards'>";
  std::vector<Series> losses{series("loss", "total", "c0")};
  for (const auto& term : table.between("loss", "positives_per_object"))
    losses.push_back(series(term, term, concat("c", losses.size() % kCurveStyles)));
  losses.push_back(series("val_loss", "validation, without l1", "c1"));
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
  return replace_text(path, page_html(name.empty() ? run : name, about, html));
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
