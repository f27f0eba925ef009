// SPDX-License-Identifier: Apache-2.0
#include "images/font.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <mutex>

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

// The font of OpenCV, at a scale at which capitals have 0.73 em.
static double scale_of(int em) { return em / 29.0; }
static int thickness_of(int em) { return std::max(1, int(std::lround(em / 22.0))); }

cv::Size text_extent(const std::string& text, int em) {
  int base = 0;
#ifdef YOLOX_FREETYPE
  if (font().face) {
    const std::lock_guard lock(font().mutex);
    return {font().face->getTextSize(printable(text), em, -1, &base).width, line_height(em)};
  }
#endif
  const auto size =
      cv::getTextSize(printable(text), cv::FONT_HERSHEY_SIMPLEX, scale_of(em), thickness_of(em), &base);
  return {size.width, line_height(em)};
}

void draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour) {
  const cv::Point baseline(place.x, place.y + int(std::lround(0.95 * em)));
#ifdef YOLOX_FREETYPE
  if (font().face) {
    const std::lock_guard lock(font().mutex);
    return font().face->putText(image, printable(text), baseline, em, colour, -1, cv::LINE_AA, true);
  }
#endif
  cv::putText(image, printable(text), baseline, cv::FONT_HERSHEY_SIMPLEX, scale_of(em), colour,
              thickness_of(em), cv::LINE_AA);
}

std::string font_note(const std::vector<std::string>& names) {
  uint8_t highest = 0;
  for (const std::string& name : names)
    for (const char c : name) highest = std::max(highest, uint8_t(c));
  if (highest < 0x80) return "";
#ifdef YOLOX_FREETYPE
  const std::string& path = font().path;
  if (path.empty())
    return "note: pictures show '?' for letters beyond ASCII, because this machine has no font for them; "
           "install fonts-noto-cjk or fonts-dejavu-core";
  const bool east_asian = highest >= 0xE3;  // U+3000 and above
  if (!east_asian || path.find("DejaVu") == std::string::npos) return "";
  return concat("note: pictures may lack letters of class names, which are drawn with ", path,
                "; install fonts-noto-cjk for Chinese, Japanese and Korean");
#else
  return "note: pictures show '?' for letters beyond ASCII, because this program was built without OpenCV's "
         "module freetype; install libopencv-contrib-dev and build again";
#endif
}

}  // namespace yolox
