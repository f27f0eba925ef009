// HTML by hand: text, pictures, curves as inline SVG, and the page around them. A page is whole in itself:
// nothing is fetched and no script runs, which its own policy forbids. For phones and large screens, light
// and dark.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <opencv2/imgcodecs.hpp>
#include <opencv2/imgproc.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// ---- text

// As HTML shows it, in attributes too.
std::string escaped(const std::string& text);

// The first `most` characters of UTF-8 text.
std::string shortened(const std::string& text, size_t most);

// printf's format for one number.
std::string formatted(const char* format, double value);
// Of precision and the like, -1: there is none.
inline std::string share(double value) { return value < 0 ? "–" : formatted("%.3f", value); }

// For axes: 20k, 1.5e-4, 0.25
std::string axis_number(double value);

std::string base64(const std::vector<uint8_t>& bytes);

// A picture as a JPEG of `side` pixels at most.
std::string data_uri(cv::Mat image, int side);

// ---- curves

constexpr size_t kCurveStyles = 5;  // c0 to c4 of the style sheet

struct Series {
  std::string name;                               // empty: not in the legend
  std::vector<std::pair<double, double>> points;  // by ascending x
  std::string style;                              // CSS classes: c0 .. c4 colours, thin
};

struct Chart {
  std::string title, x_name;
  std::vector<Series> series;
  std::optional<double> x_end, y_end;  // else as far as the points go
  std::optional<double> marked;        // an x that is to be seen
  std::string note = {};
};

// Between 3 and 6 round numbers from lo to hi.
std::vector<double> ticks(double lo, double hi);

std::string chart_html(const Chart& chart);

// ---- the page

inline std::string tile(const std::string& value, const std::string& name) {
  return "<div class='tile'><b>" + escaped(value) + "</b><span>" + escaped(name) + "</span></div>";
}

std::string settings_html(const std::vector<std::pair<std::string, std::string>>& settings);

// body: sections of HTML. --o0 .. --o6 are the colours of an Verdict (insight.hpp), also drawn over photos.
std::string page_html(const std::string& title, const std::string& about, const std::string& body);

}  // namespace yolox
