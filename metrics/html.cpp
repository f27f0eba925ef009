// SPDX-License-Identifier: Apache-2.0
#include "metrics/html.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "base/error.hpp"
#include "base/threads.hpp"

namespace yolox {

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if (uint8_t(c) >= ' ' || c == '\n' || c == '\t')
      out += c;  // HTML does not allow other control characters
  }
  return out;
}

std::string axis_number(double value) {
  if (value != 0 && std::abs(value) < 1e-3) return formatted("%.1e", value);
  if (std::abs(value) >= 1e6) return formatted("%.3gM", value / 1e6);
  if (std::abs(value) >= 1e4) return formatted("%.3gk", value / 1e3);
  return formatted("%.4g", value);
}

std::string date_text(std::time_t time) {
  std::tm local{};
  localtime_r(&time, &local);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M", &local);
  return text;
}

std::string machine_text() {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::string cpu;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; cpu.empty() && std::getline(file, line);)
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      cpu = ", " + line.substr(line.find(": ") + 2);
  const int cores = usable_cores();
  return concat(host, cpu, ", ", cores, cores == 1 ? " core" : " cores");
}

std::string base64(const std::vector<uint8_t>& bytes) {
  constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const auto byte = [&](size_t k) { return k < bytes.size() ? uint32_t(bytes[k]) : 0; };
    const uint32_t three = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    for (int k = 0; k < 4; ++k) out += i + k <= bytes.size() ? digits[three >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

std::string data_uri(cv::Mat image, int side) {
  const double shrink = double(side) / std::max(image.cols, image.rows);
  if (shrink < 1) {
    const cv::Size size(std::max(1, int(image.cols * shrink)), std::max(1, int(image.rows * shrink)));
    cv::Mat smaller;
    cv::resize(image, smaller, size, 0, 0, cv::INTER_AREA);
    image = smaller;
  }
  std::vector<uint8_t> bytes;
  cv::imencode(".jpg", image, bytes, {cv::IMWRITE_JPEG_QUALITY, 80});
  return "data:image/jpeg;base64," + base64(bytes);
}

std::vector<double> ticks(double lo, double hi) {
  const double power = std::pow(10, std::floor(std::log10((hi - lo) / 3)));
  double step = power;
  for (const double factor : {2., 5.})
    if ((hi - lo) / (power * factor) >= 3) step = power * factor;
  std::vector<double> all;
  for (double k = std::ceil(lo / step - 1e-9); k * step <= hi + 1e-9 * (hi - lo); ++k)
    all.push_back(k * step + 0.0);
  return all;
}

std::string chart_html(const Chart& chart) {
  double x_lo = HUGE_VAL, x_hi = -HUGE_VAL;
  std::vector<double> ys;
  for (const Series& s : chart.series) {
    for (const auto& [x, y] : s.points) {
      x_lo = std::min(x_lo, x);
      x_hi = std::max(x_hi, x);
      ys.push_back(y);
    }
  }
  std::string html = "<div class='card chart'><h3>" + escaped(chart.title) + "</h3><p class='legend'>";
  for (const Series& s : chart.series)
    if (!s.name.empty() && !s.points.empty())
      html += "<span class='" + s.style + "'><i></i>" + escaped(s.name) + "</span> ";
  std::sort(ys.begin(), ys.end());
  // Clip outliers: losses and gradient norms of the first steps are many times larger than all others.
  const double usual = ys.empty() ? 0 : ys[size_t(0.9 * double(ys.size() - 1))];
  double y_hi = ys.empty() ? 0 : ys.back() > 3 * usual && usual > 0 ? 2 * usual : ys.back();
  const bool limit_visible = chart.limit && chart.limit->first <= 3 * y_hi;
  if (limit_visible) y_hi = std::max(y_hi, chart.limit->first);
  if (chart.limit)
    html += "<span class='limit'><i></i>" + escaped(chart.limit->second) +
            (limit_visible || ys.empty() ? "" : ", above this chart") + "</span>";
  html += "</p>";
  if (ys.empty()) return html + "<p class='none'>no data yet</p></div>";
  if (!(y_hi > 0)) y_hi = 1;
  y_hi *= 1.05;
  if (chart.unit) {
    x_lo = 0;
    x_hi = y_hi = 1;
  }
  if (!(x_hi > x_lo)) x_hi = x_lo + 1;
  constexpr double w = 360, h = 210, left = 52, right = 12, top = 8, bottom = 34;
  constexpr double plot_w = w - left - right, plot_h = h - top - bottom;
  const auto px = [&](double x) { return formatted("%.1f", (x - x_lo) / (x_hi - x_lo) * plot_w); };
  const auto py = [&](double y) { return formatted("%.1f", plot_h - y / y_hi * plot_h); };
  html += concat("<svg viewBox='0 0 ", w, " ", h, "' role='img' aria-label='", escaped(chart.title), "'>");
  html += concat("<g transform='translate(", left, " ", top, ")'>");
  for (const double y : ticks(0, y_hi))
    html += concat("<line class='grid' x2='", plot_w, "' y1='", py(y), "' y2='", py(y),
                   "'/><text class='y' x='-6' y='", py(y), "' dy='.35em'>", axis_number(y), "</text>");
  for (const double x : ticks(x_lo, x_hi))
    html += concat("<line class='grid' y2='", plot_h, "' x1='", px(x), "' x2='", px(x), "'/><text x='", px(x),
                   "' y='", plot_h + 14, "'>", axis_number(x), "</text>");
  html += concat("<text x='", plot_w / 2, "' y='", plot_h + 29, "'>", escaped(chart.x_name), "</text>");
  if (chart.marked)
    html += concat("<line class='mark' y2='", plot_h, "' x1='", px(*chart.marked), "' x2='",
                   px(*chart.marked), "'/>");
  if (limit_visible)
    html += concat("<line class='mark limit' x2='", plot_w, "' y1='", py(chart.limit->first), "' y2='",
                   py(chart.limit->first), "'><title>", escaped(chart.limit->second), "</title></line>");
  html += concat("<svg width='", plot_w, "' height='", plot_h,
                 "'>");  // the inner svg clips the curves to the plot
  for (const Series& s : chart.series) {
    html += "<polyline class='" + s.style + "' points='";
    for (const auto& [x, y] : s.points) html += px(x) + "," + py(y) + " ";
    html += "'><title>" + escaped(s.name) + "</title></polyline>";
    if (s.points.size() <= 30 && !s.name.empty() && !chart.unit)
      for (const auto& [x, y] : s.points)
        html += concat("<circle class='", s.style, "' cx='", px(x), "' cy='", py(y), "' r='3'><title>",
                       escaped(s.name), " ", axis_number(y), " at ", axis_number(x), "</title></circle>");
  }
  html += "</svg></g></svg>";
  if (!chart.note.empty()) html += "<p class='note'>" + escaped(chart.note) + "</p>";
  return html + "</div>";
}

std::string settings_section(const std::vector<std::pair<std::string, std::string>>& settings) {
  std::string html = "<section id='settings'><h2>Settings</h2><div class='card'><dl>";
  for (const auto& [name, value] : settings)
    if (!value.empty()) html += "<div><dt>" + escaped(name) + "</dt><dd>" + escaped(value) + "</dd></div>";
  return html + "</dl></div></section>";
}

std::string page_html(const std::string& title, const std::string& about, const std::string& body) {
  static constexpr const char* style = R"(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5d6878;--line:#e3e7ed;--faint:#dbe6f8;
 --o0:#c084fc;--o1:#60a5fa;--o2:#f472b6;--o3:#22d3ee;--o4:#f87171;--o5:#fbbf24;--o6:#4ade80;
 --c0:#2563eb;--c1:#e8710a;--c2:#0d9465;--c3:#9333ea;--c4:#d0306b}
@media(prefers-color-scheme:dark){:root{--page:#0f141b;--card:#18202a;--ink:#e4e9f0;--soft:#95a1b2;--line:#2b3542;
 --faint:#26395a;--c0:#6aa5ff;--c1:#ffa24d;--c2:#3ecf97;--c3:#c08bff;--c4:#ff7fae}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
 -webkit-text-size-adjust:100%}
main{max-width:1240px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:1.75rem;line-height:1.2;margin:0;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:40px 0 12px;letter-spacing:-.01em}h3{font-size:1rem;margin:0 0 4px}
header p,.note{color:var(--soft);margin:4px 0 0;overflow-wrap:anywhere}.note{font-size:.85rem;margin:8px 0 0}
h2+.note{margin:-8px 0 12px}#worst{margin-top:28px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(128px,1fr));gap:12px;margin:0 0 16px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px;min-width:0}
.tile b{display:block;font-size:1.6rem;line-height:1.15;font-variant-numeric:tabular-nums;letter-spacing:-.02em}
.tile span{color:var(--soft);font-size:.85rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:16px}
.cards.two{grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr))}
.wide{margin-top:16px}
svg{display:block;width:100%;height:auto}
.chart text,.matrix text{fill:var(--soft);font-size:11px;text-anchor:middle}.chart text.y,.matrix text.y{text-anchor:end}
.matrix text.slant{text-anchor:start}.matrix text.axis{fill:var(--ink);font-weight:600;text-anchor:start}.matrix text.n{fill:var(--ink)}.matrix text.on{fill:#fff;font-weight:600}
.matrix rect{stroke:var(--line);stroke-width:1}.matrix .right{fill:#1d8a5f}.matrix .wrong{fill:#d04545}
@media(min-width:1000px){.two .chart text{font-size:9px}}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
polyline{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}circle{fill:currentColor}
.thin{stroke:var(--soft);stroke-width:1;opacity:.35}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.ink{color:var(--ink)}
.legend{margin:0 0 6px;font-size:.85rem;min-height:1.5em}.legend span,.key span{margin-right:12px;white-space:nowrap}
.legend i,.key i{display:inline-block;width:12px;height:4px;border-radius:2px;background:currentColor;margin-right:6px;
 vertical-align:middle}.key i{height:12px;border-radius:3px}
.limit{color:#d04545}line.limit{stroke:#d04545}.legend .limit i{height:0;border-top:2px dashed;background:none}
.about{white-space:pre-line}
.none{color:var(--soft);text-align:center;padding:48px 0;margin:0}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
.bars th{font-weight:500;text-align:left;padding:6px 12px 6px 0;line-height:1.25;width:44%}
.bars small{display:block;color:var(--soft);font-weight:400;font-size:.78rem}
.bars td{position:relative;padding:6px 0}.bars td i{position:absolute;left:0;top:50%;height:16px;margin-top:-8px;
 border-radius:4px;min-width:2px}.bars .n{width:3.4em;text-align:right;font-weight:600}
.scroll{max-height:34rem;overflow-y:auto}
.classes th,.classes td{padding:5px 8px;text-align:right;border-bottom:1px solid var(--line);font-size:.88rem}
.classes th{font-weight:500;color:var(--soft)}.classes th:first-child{text-align:left;color:var(--ink);overflow-wrap:anywhere;padding-left:0}
.classes .ap{position:relative;min-width:4.2em}.ap i{position:absolute;left:4px;bottom:3px;height:3px;border-radius:2px;
 background:var(--c0);max-width:calc(100% - 8px)}.ap span{position:relative;font-weight:600}
.mistakes{columns:280px;margin:4px 0 0;padding-left:1.2em;font-size:.9rem}.mistakes small{color:var(--soft)}
.wide>p:not(.note){margin:12px 0 0}
.images{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:16px;margin-top:14px;align-items:start}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:12px;overflow:hidden}
figure>svg{background:#20262e;max-height:420px}figcaption{padding:8px 12px;font-size:.82rem;color:var(--soft);overflow-wrap:anywhere}
figcaption b{color:var(--ink);font-weight:600}
figure rect{fill:none;stroke-width:2;vector-effect:non-scaling-stroke;pointer-events:all}
figure .under{stroke:#000;stroke-opacity:.45;stroke-width:4;pointer-events:none}
figure text{font-weight:600;paint-order:stroke;stroke:#10151c;stroke-width:.28em;stroke-linejoin:round;pointer-events:none}
.o0{stroke:var(--o0)}.o1{stroke:var(--o1)}.o2{stroke:var(--o2)}.o3{stroke:var(--o3)}.o4{stroke:var(--o4)}
.o5{stroke:var(--o5);stroke-dasharray:6 4}.o6,.o7{stroke:var(--o6)}figure .o6,figure .o7{stroke-width:1.5}
.pictures{display:grid;gap:16px}
img{display:block;width:100%;height:auto}
dl{margin:0;columns:300px;column-gap:32px;font-size:.85rem}dl div{display:flex;justify-content:space-between;gap:16px;
 break-inside:avoid;border-bottom:1px solid var(--line);padding:2px 0}dt{color:var(--soft)}dd{margin:0;text-align:right;
 overflow-wrap:anywhere;min-width:0}
@media(max-width:600px){main{padding:18px 12px 32px}.w{display:none}.tile,.card{padding:12px}.tile b{font-size:1.35rem}
 .tiles{grid-template-columns:repeat(auto-fit,minmax(98px,1fr));gap:8px}.classes th,.classes td{padding:5px 4px;font-size:.8rem}
 h1{font-size:1.4rem}.legend:empty{display:none}}
)";
  return "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>\n"
         "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src "
         "'unsafe-inline'; "
         "img-src data:\">\n<meta name='viewport' content='width=device-width, initial-scale=1'>\n<title>" +
         escaped(title) + "</title><style>" + style + "</style></head>\n<body><main><header><h1>" +
         escaped(title) + "</h1><p class='about'>" + escaped(about) + "</p></header>\n" + body +
         "</main></body></html>\n";
}

}  // namespace yolox
