// SPDX-License-Identifier: Apache-2.0
#include "dtr/trace.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace yolox {

// Returns the distance of ticks on an axis from 0 to `most`: 1, 2 or 5 times a power of ten, so that the axis
// has 4 to 9 of them.
static double tick_distance(double most) {
  const double power = std::pow(10.0, std::floor(std::log10(most / 4)));
  for (const double times : {5.0, 2.0})
    if (most / (times * power) >= 4) return times * power;
  return power;
}

cv::Mat draw_memory_chart(const std::vector<MemorySample>& samples, double budget, double backward) {
  const cv::Rect plot(80, 50, 850, 370);
  const cv::Scalar paper(255, 255, 255), ink(60, 60, 60), lines(225, 225, 225), plain(200, 190, 180),
      kept(170, 105, 30), limit(40, 40, 205);
  cv::Mat picture(480, 960, CV_8UC3, paper);
  double end = 1e-9, most = std::max(1.0, budget);
  for (const auto& s : samples) {
    end = std::max(end, s.seconds);
    most = std::max({most, s.with_dtr, s.without_dtr});
  }
  most *= 1.05;
  const auto x = [&](double seconds) { return plot.x + int(std::lround(plot.width * seconds / end)); };
  const auto y = [&](double bytes) { return plot.br().y - int(std::lround(plot.height * bytes / most)); };
  const auto write = [&](const std::string& text, cv::Point at, const cv::Scalar& colour, double align) {
    const int width = cv::getTextSize(text, cv::FONT_HERSHEY_SIMPLEX, 0.45, 1, nullptr).width;
    cv::putText(picture, text, at - cv::Point(int(align * width), 0), cv::FONT_HERSHEY_SIMPLEX, 0.45, colour,
                1, cv::LINE_AA);
  };
  const double gb = most >= 2e9 ? 1e9 : 1e6, part = tick_distance(most / gb) * gb, time = tick_distance(end);
  for (double bytes = 0; bytes <= most; bytes += part) {
    cv::line(picture, {plot.x, y(bytes)}, {plot.br().x, y(bytes)}, lines);
    write(rounded(bytes / gb) + (gb == 1e9 ? " GB" : " MB"), {plot.x - 8, y(bytes) + 5}, ink, 1);
  }
  for (double s = 0; s <= end; s += time) write(rounded(s) + " s", {x(s), plot.br().y + 20}, ink, 0.5);

  // Outline of a step function: memory is constant from one sample to the next.
  const auto outline = [&](double MemorySample::*bytes) {
    std::vector<cv::Point> points{{plot.x, plot.br().y}};
    for (size_t i = 0; i < samples.size(); ++i) {
      const double until = i + 1 < samples.size() ? samples[i + 1].seconds : end;
      points.emplace_back(x(samples[i].seconds), y(samples[i].*bytes));
      points.emplace_back(x(until), y(samples[i].*bytes));
    }
    points.emplace_back(x(end), plot.br().y);
    return points;
  };
  cv::fillPoly(picture, std::vector{outline(&MemorySample::without_dtr)}, plain);
  cv::fillPoly(picture, std::vector{outline(&MemorySample::with_dtr)}, kept);
  cv::line(picture, {plot.x, y(budget)}, {plot.br().x, y(budget)}, limit, 1, cv::LINE_AA);
  cv::line(picture, {x(backward), plot.y}, {x(backward), plot.br().y}, ink, 1);
  write("backward", {x(backward) + 6, plot.y + 14}, ink, 0);
  cv::rectangle(picture, plot, ink);

  write("memory over one step", {plot.x, 30}, ink, 0);
  int at = plot.br().x;
  for (const auto& [colour, text] : {std::pair(limit, "budget"), std::pair(plain, "memory without DTR"),
                                     std::pair(kept, "memory with DTR")}) {
    const int width = cv::getTextSize(text, cv::FONT_HERSHEY_SIMPLEX, 0.45, 1, nullptr).width;
    write(text, {at, 30}, ink, 1);
    cv::rectangle(picture, cv::Rect(at - width - 20, 20, 12, 12), colour, cv::FILLED);
    at -= width + 40;
  }
  write("time in the step", {plot.x + plot.width / 2, 465}, ink, 0.5);
  return picture;
}

}  // namespace yolox
