// SPDX-License-Identifier: Apache-2.0
#include "data/pictures.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <mutex>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/text.hpp"
#ifdef YOLOX_FREETYPE
#include <opencv2/freetype.hpp>
#endif

namespace yolox {

#ifdef YOLOX_FREETYPE
// The first of these fonts that this machine has. Those before DejaVu also have Chinese, Japanese and Korean.
struct Font {
  std::mutex mutex;  // a face is used by one thread at a time
  cv::Ptr<cv::freetype::FreeType2> face;
  std::string path;

  Font() {
    for (const char* file :
         {"/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc",
          "/usr/share/fonts/noto-cjk/NotoSansCJK-Regular.ttc",
          "/usr/share/fonts/google-noto-cjk/NotoSansCJK-Regular.ttc",
          "/usr/share/fonts/truetype/wqy/wqy-zenhei.ttc", "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
          "/usr/share/fonts/TTF/DejaVuSans.ttf", "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf"}) {
      if (!std::filesystem::exists(file)) continue;
      face = cv::freetype::createFreeType2();
      face->loadFontData(file, 0);
      path = file;
      return;
    }
  }
};

static Font& font() {
  static Font& font = *new Font;  // never destroyed, because threads may draw until the end of the process
  return font;
}
#endif

static int line_height(int em) { return int(std::lround(1.25 * em)); }

int draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour) {
  const std::string line = printable(text);
  const cv::Point baseline(place.x, place.y + int(std::lround(0.95 * em)));
  int below = 0;
#ifdef YOLOX_FREETYPE
  if (font().face) {
    const std::lock_guard lock(font().mutex);
    if (!image.empty()) font().face->putText(image, line, baseline, em, colour, -1, cv::LINE_AA, true);
    return font().face->getTextSize(line, em, -1, &below).width;
  }
#endif
  const double scale = em / 29.0;  // capitals have 0.73 em
  const int thickness = std::max(1, int(std::lround(em / 22.0))), face = cv::FONT_HERSHEY_SIMPLEX;
  if (!image.empty()) cv::putText(image, line, baseline, face, scale, colour, thickness, cv::LINE_AA);
  return cv::getTextSize(line, face, scale, thickness, &below).width;
}

std::string font_note(const std::vector<std::string>& names) {
  uint8_t highest = 0;
  for (const std::string& name : names)
    for (const char c : name) highest = std::max(highest, uint8_t(c));
  if (highest < 0x80) return "";
#ifdef YOLOX_FREETYPE
  const bool east_asian = highest >= 0xE3;  // U+3000 and above
  if (font().face && (!east_asian || font().path.find("DejaVu") == std::string::npos)) return "";
#endif
  return "note: pictures may show '?' for letters of class names; install fonts-noto-cjk, and "
         "libopencv-contrib-dev before building";
}

cv::Scalar class_colour(int cls) {
  cv::Mat pixel(1, 1, CV_8UC3, cv::Scalar(std::fmod(cls * 180 * 0.618034 + 60, 180), 200, 255));
  cv::cvtColor(pixel, pixel, cv::COLOR_HSV2BGR);
  const auto c = pixel.at<cv::Vec3b>(0, 0);
  return {double(c[0]), double(c[1]), double(c[2])};
}

// Use black text on bright colours and white text on dark ones. Luma is that of ITU-R BT.601.
static cv::Scalar text_colour(const cv::Scalar& background) {
  const double luma = 0.114 * background[0] + 0.587 * background[1] + 0.299 * background[2];
  return cv::Scalar::all(luma > 110 ? 0 : 255);
}

// Returns the pixels of a box. Clamps the corners: an untrained network predicts boxes of a billion pixels,
// and OpenCV needs minutes to draw one.
static cv::Rect pixels_of(const Box& box, cv::Size size) {
  const auto near = [](double v, int extent) {
    return int(std::lround(std::clamp(v, -1.0 * extent, 2.0 * extent)));
  };
  return {cv::Point(near(box.x1, size.width), near(box.y1, size.height)),
          cv::Point(near(box.x2, size.width), near(box.y2, size.height))};
}

void draw_boxes(cv::Mat& image, const std::vector<LabelledBox>& boxes) {
  const int side = std::max(image.cols, image.rows), line = std::max(1, int(std::lround(side / 400.0))),
            em = std::max(11, side / 36);
  for (auto b = boxes.rbegin(); b != boxes.rend(); ++b) {
    const cv::Scalar colour = b->box.cls == kIgnoredRegion ? cv::Scalar::all(255) : class_colour(b->box.cls);
    const cv::Rect box = pixels_of(b->box, image.size());
    cv::rectangle(image, box.tl(), box.br(), colour, line);
    if (b->text.empty()) continue;
    cv::Mat none;
    const cv::Size label(draw_text(none, b->text, {}, em, {}) + 4, line_height(em));
    const cv::Point place(std::clamp(box.x, 0, std::max(0, image.cols - label.width)),
                          std::clamp(box.y - label.height, 0, std::max(0, image.rows - label.height)));
    cv::rectangle(image, {place, label}, colour, cv::FILLED);
    draw_text(image, b->text, place + cv::Point(2, 0), em, text_colour(colour));
  }
}

// Draws the first 16 images of a batch, [B, H, W, 3] uint8, with their boxes, each below its title.
static Image draw_batch(const Tensor& batch, const std::vector<std::vector<LabelledBox>>& boxes,
                        const std::vector<std::string>& titles) {
  const int n = int(std::min<int64_t>(16, batch.size(0))), columns = std::min(4, n), gap = 4;
  const Tensor images = batch.slice(0, 0, n).cpu().contiguous();
  const cv::Size original(int(images.size(2)), int(images.size(1)));
  const int factor = std::max(1, 320 / std::max(original.width, original.height));
  const cv::Size size = original * factor;
  const int em = std::max(11, std::max(size.width, size.height) / 36);
  const int caption = line_height(em) + 4, rows = (n + columns - 1) / columns;
  const cv::Size step(size.width + gap, caption + size.height + gap);
  Image sheet({columns * step.width - gap, rows * step.height - gap}, 40);
  for (int i = 0; i < n; ++i) {
    const cv::Point place(i % columns * step.width, i / columns * step.height);
    cv::Mat title = sheet(cv::Rect(place, cv::Size(size.width, caption)));  // cuts a long title
    draw_text(title, titles[i], {4, 2}, em, cv::Scalar::all(235));
    cv::Mat tile = sheet(cv::Rect(place + cv::Point(0, caption), size));
    const cv::Mat image(original, CV_8UC3, images[i].data_ptr<uint8_t>());
    cv::resize(image, tile, size, 0, 0, cv::INTER_NEAREST);
    std::vector<LabelledBox> enlarged = boxes[i];
    for (auto& [box, _] : enlarged)
      box = {box.x1 * factor, box.y1 * factor, box.x2 * factor, box.y2 * factor, box.cls};
    draw_boxes(tile, enlarged);
  }
  return sheet;
}

std::vector<std::string> image_names(const Batch& batch) {
  std::vector<std::string> names;
  for (const Item& item : batch.items)
    names.push_back(item.index < 0 ? "unreadable image" : batch.data->name_of(item.index));
  return names;
}

// Returns the names of the images of a batch, without folders.
static std::vector<std::string> short_names(const Batch& batch) {
  std::vector<std::string> names = image_names(batch);
  for (std::string& name : names) name = std::filesystem::path(name).filename().string();
  return names;
}

Image draw_truth(const Batch& batch) {
  std::vector<std::vector<LabelledBox>> boxes;
  for (const Item& item : batch.items) boxes.push_back(labelled_boxes(item.boxes, batch.data->classes));
  return draw_batch(batch.images, boxes, short_names(batch));
}

Image draw_comparison(const Batch& batch, const std::vector<std::vector<ScoredBox>>& found) {
  constexpr double kScore = 0.25;
  const size_t n = std::min<size_t>(8, found.size());
  const auto& classes = batch.data->classes;
  const auto names = short_names(batch);
  std::vector<std::vector<LabelledBox>> boxes;
  std::vector<std::string> titles;
  for (size_t i = 0; i < n; ++i) {
    boxes.push_back(labelled_boxes(batch.items[i].boxes, classes));
    boxes.push_back(labelled_boxes(found[i], classes, kScore));
    titles.insert(titles.end(), {"truth: " + names[i], concat("prediction, score at least ", kScore)});
  }
  return draw_batch(batch.images.slice(0, 0, int64_t(n)).repeat_interleave(2, 0), boxes, titles);
}

std::vector<LabelledBox> labelled_boxes(const std::vector<Box>& boxes,
                                        const std::vector<std::string>& classes) {
  std::vector<LabelledBox> labelled;
  for (const Box& b : boxes) labelled.push_back({b, b.cls == kIgnoredRegion ? "" : classes[b.cls]});
  std::ranges::stable_sort(labelled, {}, [](const LabelledBox& b) {
    return (b.box.x2 - b.box.x1) * (b.box.y2 - b.box.y1);  // small boxes are drawn over large ones
  });
  return labelled;
}

std::vector<LabelledBox> labelled_boxes(const std::vector<ScoredBox>& found,
                                        const std::vector<std::string>& classes, double min_score) {
  std::vector<LabelledBox> labelled;
  for (const auto& [box, score] : found)
    if (score >= min_score) labelled.push_back({box, classes[box.cls] + formatted(" %.2f", score)});
  return labelled;
}

Image draw_label_statistics(const Dataset& data) {
  constexpr int kSide = 360, kEdge = 40;
  Image sheet({2 * kSide + 3 * kEdge, kSide + 2 * kEdge}, 255);
  // Draws a 2-D histogram with a logarithmic grey scale; dark means many boxes.
  const auto draw = [&](int left, const std::string& title, auto point) {
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
    cv::resize(shade, large, {kSide, kSide}, 0, 0, cv::INTER_NEAREST);
    cv::cvtColor(large, large, cv::COLOR_GRAY2BGR);
    const cv::Rect place(left, kEdge, kSide, kSide);
    large.copyTo(sheet(place));
    cv::rectangle(sheet, place, cv::Scalar::all(120));
    draw_text(sheet, title, {left, 14}, 14, cv::Scalar::all(40));
  };
  draw(kEdge, "box centres, relative to the image", [](const Record& r, const Box& b) {
    return cv::Point2d((b.x1 + b.x2) / 2 / r.width, (b.y1 + b.y2) / 2 / r.height);
  });
  draw(kSide + 2 * kEdge, "box width (x axis) and height (y axis)", [](const Record& r, const Box& b) {
    return cv::Point2d((b.x2 - b.x1) / r.width, (b.y2 - b.y1) / r.height);
  });
  return sheet;
}

bool save_image(const std::string& path, const Image& image) {
  std::vector<unsigned char> bytes;
  try {
    if (!cv::imencode(std::filesystem::path(path).extension().string(), image, bytes)) return false;
  } catch (const cv::Exception&) {  // no encoder for this extension, or the image is too large for it
    return false;
  }
  return replace_file(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, /*durable=*/false);
}

}  // namespace yolox
