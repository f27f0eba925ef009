// SPDX-License-Identifier: Apache-2.0
#include "images/font.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>

#include "base/printable.hpp"
#include "base/text.hpp"

#ifdef YOLOX_FREETYPE
#include <ft2build.h>
#include FT_FREETYPE_H
#endif

namespace yolox {

std::vector<char32_t> code_points(const std::string& text) {
  std::vector<char32_t> out;
  for (size_t at = 0, bytes; at < text.size(); at += std::max<size_t>(1, bytes)) {
    bytes = utf8_bytes(text, at);
    const auto first = uint8_t(text[at]);
    char32_t c = bytes == 0 ? 0xFFFD : bytes == 1 ? first : first & (0xFF >> (bytes + 1));
    for (size_t k = 1; k < bytes; ++k) c = c << 6 | (uint8_t(text[at + k]) & 0x3F);
    const bool is_control = c < ' ' || (c >= 0x7F && c < 0xA0);
    out.push_back(is_control ? 0xFFFD : c);
  }
  return out;
}

#ifdef YOLOX_FREETYPE

// Returns how unsuitable a font is for labels: plain sans-serif fonts are the best, DejaVu Sans before all.
static int font_rank(const std::filesystem::path& file) {
  std::string name = file.stem().string();
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  constexpr const char* odd[] = {"bold",      "italic", "oblique", "mono", "serif",
                                 "condensed", "light",  "thin",    "black"};
  if (std::any_of(std::begin(odd), std::end(odd), has)) return 3;
  return name == "dejavusans" ? 0 : has("sans") ? 1 : 2;
}

// Returns the font files of this machine, the most suitable ones first.
static std::vector<std::string> font_files() {
  namespace fs = std::filesystem;
  std::vector<std::string> folders = {"/usr/share/fonts", "/usr/local/share/fonts"};
  if (const char* home = std::getenv("HOME"))
    for (const char* folder : {"/.local/share/fonts", "/.fonts"})
      folders.push_back(home + std::string(folder));
  std::vector<std::pair<int, std::string>> found;
  for (const auto& folder : folders) {
    std::error_code error;
    for (fs::recursive_directory_iterator i(folder, fs::directory_options::skip_permission_denied, error),
         end;
         !error && i != end; i.increment(error)) {
      const std::string type = i->path().extension().string();
      if (type == ".ttf" || type == ".otf" || type == ".ttc")
        found.emplace_back(font_rank(i->path()), i->path().string());
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> files;
  for (auto& entry : found) files.push_back(std::move(entry.second));
  return files;
}

namespace {

struct Glyph {
  cv::Mat coverage;  // [h, w] uint8
  int left, top;     // from the pen on the baseline to the top left pixel; top counts upwards
  int advance;
};

// The fonts of this machine. A font file is opened when a character is in none of the fonts before it.
class Fonts {
 public:
  static Fonts& of_machine() {
    static Fonts& fonts = *new Fonts;  // never destroyed: threads may draw until the end of the process
    return fonts;
  }

  bool has(char32_t c) {
    const std::lock_guard lock(mutex);
    return face_of(c) != nullptr;
  }
  bool any() { return has('A'); }

  // Returns the glyph of a character that is in a font.
  const Glyph& glyph(char32_t c, int em) {
    const std::lock_guard lock(mutex);
    if (const auto known = glyphs.find({c, em}); known != glyphs.end()) return known->second;
    auto* face = face_of(c);
    Glyph made{{}, 0, 0, em / 2};
    if (face && FT_Set_Pixel_Sizes(face, 0, FT_UInt(em)) == 0 &&
        FT_Load_Char(face, c, FT_LOAD_RENDER | FT_LOAD_TARGET_LIGHT) == 0) {
      const auto* slot = face->glyph;
      made = {{}, slot->bitmap_left, slot->bitmap_top, int(slot->advance.x >> 6)};
      if (slot->bitmap.pixel_mode == FT_PIXEL_MODE_GRAY && slot->bitmap.rows > 0)
        made.coverage = cv::Mat(int(slot->bitmap.rows), int(slot->bitmap.width), CV_8U, slot->bitmap.buffer,
                                size_t(slot->bitmap.pitch))
                            .clone();
    }
    return glyphs.emplace(std::pair(c, em), std::move(made)).first->second;
  }

 private:
  Fonts() {
    if (FT_Init_FreeType(&library) == 0) files = font_files();
  }

  FT_Face face_of(char32_t c) {
    if (const auto known = faces.find(c); known != faces.end()) return known->second;
    FT_Face found = nullptr;
    for (size_t i = 0; !found && (i < opened.size() || open_next()); ++i)
      if (opened[i] && FT_Get_Char_Index(opened[i], c) != 0) found = opened[i];
    return faces[c] = found;
  }

  // Opens the next font file. Adds a null pointer if it is not a usable font.
  bool open_next() {
    if (opened.size() == files.size()) return false;
    FT_Face face = nullptr;
    if (FT_New_Face(library, files[opened.size()].c_str(), 0, &face) != 0) face = nullptr;
    if (face && !FT_IS_SCALABLE(face)) {
      FT_Done_Face(face);
      face = nullptr;
    }
    opened.push_back(face);
    return true;
  }

  std::mutex mutex;
  FT_Library library = nullptr;
  std::vector<std::string> files;
  std::vector<FT_Face> opened;
  std::map<char32_t, FT_Face> faces;  // null: no font has the character
  std::map<std::pair<char32_t, int>, Glyph> glyphs;
};

}  // namespace

static bool has_fonts() { return Fonts::of_machine().any(); }

// Returns true if a font has this character. The first call with a character beyond the usual font looks
// through all fonts of the machine.
static bool can_draw(char32_t c) {
  return c != 0xFFFD && (has_fonts() ? Fonts::of_machine().has(c) : c < 0x7F);
}

#else

static bool has_fonts() { return false; }

static bool can_draw(char32_t c) { return c < 0x7F; }

#endif

// Replaces what cannot be drawn by '?'.
static std::vector<char32_t> drawable(const std::string& text) {
  std::vector<char32_t> out = code_points(text);
  for (char32_t& c : out)
    if (!can_draw(c)) c = '?';
  return out;
}

static int line_height(int em) { return int(std::lround(1.25 * em)); }

// The font of OpenCV, at a scale at which capitals have 0.73 em.
static double hershey_scale(int em) { return em / 29.0; }
static int hershey_pen(int em) { return std::max(1, int(std::lround(em / 22.0))); }

static std::string ascii(const std::string& text) {
  std::string out;
  for (const char32_t c : drawable(text)) out += char(c);
  return out;
}

cv::Size text_extent(const std::string& text, int em) {
  if (!has_fonts()) {
    int base = 0;
    const auto size =
        cv::getTextSize(ascii(text), cv::FONT_HERSHEY_SIMPLEX, hershey_scale(em), hershey_pen(em), &base);
    return {size.width, line_height(em)};
  }
  int width = 0;
#ifdef YOLOX_FREETYPE
  for (const char32_t c : drawable(text)) width += Fonts::of_machine().glyph(c, em).advance;
#endif
  return {width, line_height(em)};
}

void draw_text(cv::Mat& image, const std::string& text, cv::Point place, int em, const cv::Scalar& colour) {
  const int baseline = place.y + int(std::lround(0.95 * em));
  if (!has_fonts())
    return cv::putText(image, ascii(text), {place.x, baseline}, cv::FONT_HERSHEY_SIMPLEX, hershey_scale(em),
                       colour, hershey_pen(em), cv::LINE_AA);
#ifdef YOLOX_FREETYPE
  int pen = place.x;
  for (const char32_t c : drawable(text)) {
    const Glyph& glyph = Fonts::of_machine().glyph(c, em);
    const cv::Rect whole(pen + glyph.left, baseline - glyph.top, glyph.coverage.cols, glyph.coverage.rows);
    const cv::Rect seen = whole & cv::Rect({0, 0}, image.size());
    for (int y = seen.y; y < seen.y + seen.height; ++y)
      for (int x = seen.x; x < seen.x + seen.width; ++x) {
        auto& pixel = image.at<cv::Vec3b>(y, x);
        const double part = glyph.coverage.at<uint8_t>(y - whole.y, x - whole.x) / 255.0;
        for (int k = 0; k < 3; ++k)
          pixel[k] = cv::saturate_cast<uint8_t>(pixel[k] + part * (colour[k] - pixel[k]));
      }
    pen += glyph.advance;
  }
#endif
}

std::string fitted_text(const std::string& text, int em, int width) {
  if (text_extent(text, em).width <= width) return text;
  // Starts at 4 bytes for each pixel: no longer part fits, and names from files may have any length.
  for (size_t end = std::min(text.size(), 4 * size_t(std::max(width, 0))); end > 0; --end) {
    if ((uint8_t(text[end]) & 0xC0) == 0x80) continue;  // within a character
    if (std::string part = text.substr(0, end) + ".."; text_extent(part, em).width <= width) return part;
  }
  return "";
}

std::string font_note(const std::vector<std::string>& names) {
  std::vector<std::string> odd;
  for (const std::string& name : names) {
    const auto text = code_points(name);
    if (!std::all_of(text.begin(), text.end(), can_draw)) odd.push_back(name);
  }
  if (odd.empty()) return "";
#ifdef YOLOX_FREETYPE
  const std::string why = has_fonts()
                              ? "no font of this machine has these letters; install one, for example "
                                "fonts-noto-cjk or fonts-noto-core"
                              : "this machine has no fonts; install one, for example fonts-dejavu-core";
#else
  const std::string why = "this program was built without FreeType; install libfreetype-dev and build again";
#endif
  return concat("note: pictures show '?' in the names of ", odd.size(),
                odd.size() == 1 ? " class" : " classes", " (", listed(odd, 5), "): ", why);
}

}  // namespace yolox
