// SPDX-License-Identifier: Apache-2.0
// HTML output: text, images, charts as inline SVG, and the page with its style sheet. A page is
// self-contained: it loads no resources and runs no scripts, and its Content-Security-Policy forbids both.
// The layout suits phones and large screens, in light and dark mode.
#pragma once
#include <cstdint>
#include <ctime>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace yolox {

// ---- text

// Escapes text for HTML elements and quoted attributes. Drops control characters.
std::string escaped(const std::string& text);

// Formats a metric in 0..1. A negative value means undefined and becomes a dash.
inline std::string metric_text(double value) { return value < 0 ? "–" : formatted("%.3f", value); }

// Formats a number for an axis: 20k, 1.5e-04, 0.25.
std::string axis_number(double value);

std::string base64(const std::vector<uint8_t>& bytes);

// Encodes an image as a data: URI of a JPEG whose longer side has at most `side` pixels.
std::string data_uri(cv::Mat image, int side);

// Returns a time of the system clock as local date and time: 2026-11-24 21:40.
std::string date_text(std::time_t time);

// Returns host, processor, and the cores that this process may use: "node7, AMD EPYC 7B13, 16 cores".
std::string machine_text();

// ---- charts

constexpr size_t kCurveStyles = 5;  // CSS classes c0 to c4

// One curve.
struct Series {
  std::string name;                               // in the legend, if not empty
  std::vector<std::pair<double, double>> points;  // by ascending x
  std::string style;                              // CSS class: a colour c0 .. c4, or thin
};

struct Chart {
  std::string title, x_name;
  std::vector<Series> series;
  bool unit = false;                  // both axes end at 1, and x begins at 0; otherwise at the points
  std::optional<double> marked = {};  // x of a dashed vertical line
  std::string note = {};              // text below the chart
  // A dashed horizontal line, with its name for the legend. Extends the axis up to three times to show it;
  // otherwise the legend says that it is above the chart.
  std::optional<std::pair<double, std::string>> limit = {};
};

// Returns about 3 to 6 round numbers from lo to hi.
std::vector<double> ticks(double lo, double hi);

// Draws a chart as inline SVG.
std::string chart_html(const Chart& chart);

// ---- the page

inline std::string tile(const std::string& value, const std::string& name) {
  return "<div class='tile'><b>" + escaped(value) + "</b><span>" + escaped(name) + "</span></div>";
}

std::string settings_section(const std::vector<std::pair<std::string, std::string>>& settings);

// Returns the whole page. about: text below the title, may have several lines. body: HTML sections. The CSS
// colours --o0 .. --o6 belong to the values of ErrorKind (errors.hpp) and must be visible on photos.
std::string page_html(const std::string& title, const std::string& about, const std::string& body);

}  // namespace yolox
