// SPDX-License-Identifier: Apache-2.0
#include "data/pictures.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "base/new_file.hpp"

namespace yolox {

cv::Scalar class_colour(int cls) {
  cv::Mat pixel(1, 1, CV_8UC3, cv::Scalar(std::fmod(cls * 180 * 0.618034 + 60, 180), 200, 255));
  cv::cvtColor(pixel, pixel, cv::COLOR_HSV2BGR);
  const auto c = pixel.at<cv::Vec3b>(0, 0);
  return {double(c[0]), double(c[1]), double(c[2])};
}

void draw_box(cv::Mat& image, const Box& box, const std::string& text) {
  const cv::Scalar colour = class_colour(box.cls);
  const int side = std::max(image.cols, image.rows), thick = std::max(1, int(std::lround(side / 400.0)));
  const double font = std::max(0.35, side / 1400.0);
  const int pen = std::max(1, int(std::lround(1.2 * font)));
  // Use black text on bright colours and white text on dark ones. Luma is that of ITU-R BT.601.
  const double luma = 0.114 * colour[0] + 0.587 * colour[1] + 0.299 * colour[2];
  // Clamp the corners: an untrained network predicts boxes of a billion pixels, and OpenCV needs minutes to
  // draw one.
  const auto near = [](double v, int extent) {
    return int(std::lround(std::clamp(v, -1.0 * extent, 2.0 * extent)));
  };
  const cv::Point a(near(box.x1, image.cols), near(box.y1, image.rows)),
      b(near(box.x2, image.cols), near(box.y2, image.rows));
  cv::rectangle(image, a, b, colour, thick);
  if (text.empty()) return;
  int base = 0;
  const cv::Size extent = cv::getTextSize(text, cv::FONT_HERSHEY_SIMPLEX, font, pen, &base);
  const int x = std::clamp(a.x, 0, std::max(0, image.cols - extent.width - 2));
  const int y =
      a.y - base >= extent.height ? a.y : std::min(std::max(a.y, 0) + extent.height + base, image.rows);
  cv::rectangle(image, {x, y - extent.height - base}, {x + extent.width + 2, y}, colour, cv::FILLED);
  cv::putText(image, text, {x + 1, y - base + 1}, cv::FONT_HERSHEY_SIMPLEX, font,
              cv::Scalar::all(luma > 110 ? 0 : 255), pen, cv::LINE_AA);
}

Image draw_batch(const Tensor& batch, const std::vector<std::vector<LabelledBox>>& boxes) {
  const int n = int(std::min<int64_t>(16, batch.size(0))), columns = std::min(4, n);
  const int h = int(batch.size(1)), w = int(batch.size(2));
  Image sheet({columns * w, (n + columns - 1) / columns * h}, border_grey);
  const Tensor images = batch.slice(0, 0, n).cpu().contiguous();
  for (int i = 0; i < n; ++i) {
    cv::Mat tile = sheet(cv::Rect(i % columns * w, i / columns * h, w, h));
    cv::Mat(h, w, CV_8UC3, images[i].data_ptr<uint8_t>()).copyTo(tile);
    for (const auto& [box, text] : boxes[i]) draw_box(tile, box, text);
    cv::rectangle(tile, {0, 0, w, h}, cv::Scalar::all(255));
  }
  return sheet;
}

std::vector<std::vector<LabelledBox>> labelled_boxes(const Targets& targets,
                                                     const std::vector<std::string>& classes) {
  std::vector<std::vector<LabelledBox>> all(targets.counts.size());
  const Tensor boxes = targets.boxes.cpu(), cls = targets.classes.cpu();
  for (size_t i = 0; i < all.size(); ++i) {
    for (int64_t g = 0; g < targets.counts[i]; ++g) {
      const float* b = boxes[i][g].data_ptr<float>();
      const int c = int(cls[i][g].item<int64_t>());
      all[i].push_back({{b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2, c}, classes[c]});
    }
  }
  return all;
}

std::vector<std::vector<LabelledBox>> labelled_boxes(const std::vector<Tensor>& found,
                                                     const std::vector<std::string>& classes) {
  std::vector<std::vector<LabelledBox>> all(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const auto d = found[i].accessor<float, 2>();
    for (int64_t k = 0; k < d.size(0); ++k) {
      const float score = d[k][4] * d[k][5];
      if (!(score >= 0.25f) || !std::isfinite(d[k][0] + d[k][1] + d[k][2] + d[k][3])) continue;
      const int c = int(d[k][6]);
      char text[16];
      std::snprintf(text, sizeof text, " %.2f", double(score));
      all[i].push_back({{d[k][0], d[k][1], d[k][2], d[k][3], c}, classes[c] + text});
    }
  }
  return all;
}

Image draw_label_statistics(const Dataset& data) {
  const auto counts = class_counts(data);
  const int bars = int(std::min<size_t>(counts.size(), 40)), side = 400, edge = 50;
  Image sheet({3 * side, side + 2 * edge}, 255);
  const auto text = [&](const std::string& t, int x, int y, double size = 0.45) {
    cv::putText(sheet, t, {x, y}, cv::FONT_HERSHEY_SIMPLEX, size, cv::Scalar::all(40), 1, cv::LINE_AA);
  };

  const auto order = classes_by_count(counts);
  text(concat("boxes per class",
              order.size() > size_t(bars) ? concat(" (", bars, " of ", order.size(), ")") : ""),
       10, 30);
  const double most = std::max<double>(1, counts[order[0]]), step = std::min(40.0, double(side) / bars);
  for (int k = 0; k < bars; ++k) {
    const int y = int(edge + k * step), thick = std::max(1, int(step * 0.8)), c = int(order[k]);
    const int length = int(std::lround((side - 190) * counts[c] / most));
    cv::rectangle(sheet, {130, y, std::max(1, length), thick}, class_colour(c), cv::FILLED);
    const double font = std::min(0.45, step / 25);
    text(data.classes[c].substr(0, 16), 5, y + int(step * 0.6), font);
    text(std::to_string(counts[c]), 135 + length, y + int(step * 0.6), font);
  }

  // Draws a 2-D histogram with a logarithmic grey scale; dark means many boxes.
  const auto density = [&](int left, const std::string& title, auto point) {
    constexpr int kCells = 80;
    cv::Mat cells = cv::Mat::zeros(kCells, kCells, CV_32F);
    for (const Record& r : data.records) {
      for (const Box& b : r.boxes) {
        const cv::Point2d p = point(r, b);
        const auto cell = [](double v) { return std::clamp(int(v * kCells), 0, kCells - 1); };
        ++cells.at<float>(cell(p.y), cell(p.x));
      }
    }
    cells += 1;
    cv::log(cells, cells);
    double top = 0;
    cv::minMaxLoc(cells, nullptr, &top);
    cv::Mat shade, large;
    cells.convertTo(shade, CV_8U, top > 0 ? -225 / top : 0, 255);
    cv::resize(shade, large, {side - 40, side - 40}, 0, 0, cv::INTER_NEAREST);
    cv::cvtColor(large, large, cv::COLOR_GRAY2BGR);
    const cv::Rect place(left, edge, side - 40, side - 40);
    large.copyTo(sheet(place));
    cv::rectangle(sheet, place, cv::Scalar::all(120));
    text(title, left, 30);
  };
  density(side + 20, "box centres, relative to the image", [](const Record& r, const Box& b) {
    return cv::Point2d((b.x1 + b.x2) / 2 / r.width, (b.y1 + b.y2) / 2 / r.height);
  });
  density(2 * side + 20, "box width (x axis) and height (y axis)", [](const Record& r, const Box& b) {
    return cv::Point2d((b.x2 - b.x1) / r.width, (b.y2 - b.y1) / r.height);
  });
  return sheet;
}

bool save_image(const std::string& path, const Image& image) {
  std::vector<unsigned char> bytes;
  try {
    if (!cv::imencode(std::filesystem::path(path).extension().string(), image, bytes)) return false;
    NewFile file(path);
    file.write({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    file.commit(/*durable=*/false);
    return true;
  } catch (const cv::Exception&) {  // no encoder for this extension, or the image is too large for it
    return false;
  } catch (const NewFile::Error&) {
    return false;
  }
}

}  // namespace yolox
