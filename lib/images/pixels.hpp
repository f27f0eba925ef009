// SPDX-License-Identifier: Apache-2.0
// The two pixel loops in which augmentation spends most of its time: affine warp and HSV jitter. Both write
// directly to their destination, and both are bit-identical on every machine.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <opencv2/core.hpp>
#if defined(__x86_64__)
#include <tmmintrin.h>
#endif

#include "images/image.hpp"

namespace yolox {

namespace pixels_detail {

// Position in fixed point: pixels times 2^32.
struct Position {
  int64_t x, y;
  Position at(int64_t i, const Position& step) const { return {x + i * step.x, y + i * step.y}; }
};
inline int64_t fixed(double pixels) { return std::llround(pixels * 0x1p32); }

// Bilinear interpolation of one channel. Weights are in 1/128 along x and 1/256 along y, so that every
// intermediate value fits 16 bits.
inline uchar bilinear(int top_left, int top_right, int left, int right, int wx, int wy) {
  const int a = top_left * (128 - wx) + top_right * wx, b = left * (128 - wx) + right * wx;
  return uchar((a + (((b - a) * wy + 128) >> 8) + 64) >> 7);
}

// Samples one pixel at any position. Positions outside of the image use the nearest edge pixel.
inline void sample_pixel(const Image& image, Position p, uchar* out) {
  const int x = int(p.x >> 32), y = int(p.y >> 32);
  const auto column = [&](int i) { return 3 * std::clamp(i, 0, image.cols - 1); };
  const uchar* top = image.ptr(std::clamp(y, 0, image.rows - 1));
  const uchar* low = image.ptr(std::clamp(y + 1, 0, image.rows - 1));
  const int l = column(x), r = column(x + 1);
  for (int c = 0; c < 3; ++c)
    out[c] =
        bilinear(top[l + c], top[r + c], low[l + c], low[r + c], int(p.x >> 25 & 127), int(p.y >> 24 & 255));
}

// Samples n pixels of a row. All four neighbours of each pixel, and one more column to their right, must be
// inside the image.
inline void sample_row_plain(const Image& image, Position p, Position step, uchar* out, int n) {
  const size_t stride = image.step;
  for (int i = 0; i < n; ++i, out += 3, p = p.at(1, step)) {
    const uchar* top = image.ptr() + size_t(p.y >> 32) * stride + 3 * size_t(p.x >> 32);
    const uchar* low = top + stride;
    for (int c = 0; c < 3; ++c)
      out[c] = bilinear(top[c], top[c + 3], low[c], low[c + 3], int(p.x >> 25 & 127), int(p.y >> 24 & 255));
  }
}
#if defined(__x86_64__)
// Same as sample_row_plain(), two pixels at a time.
__attribute__((target("ssse3"))) inline void sample_row_ssse3(const Image& image, Position p, Position step,
                                                              uchar* out, int n) {
  const size_t stride = image.step;
  const auto load = [](const uchar* a, const uchar* b) __attribute__((target("ssse3"))) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
  };
  const __m128i pairs =
      _mm_setr_epi8(0, 3, 1, 4, 2, 5, 6, 7, 8, 11, 9, 12, 10, 13, 14, 15);  // pairs (left, right) per channel
  int i = 0;
  for (; i + 2 < n; i += 2, out += 6) {  // stops before the last pixel: each store writes 4 bytes, not 3
    const Position q = p.at(1, step);
    const uchar* a = image.ptr() + size_t(p.y >> 32) * stride + 3 * size_t(p.x >> 32);
    const uchar* b = image.ptr() + size_t(q.y >> 32) * stride + 3 * size_t(q.x >> 32);
    const short ax = short(p.x >> 25 & 127), bx = short(q.x >> 25 & 127);
    const __m128i wx =
        _mm_unpacklo_epi64(_mm_set1_epi16(short(128 - 255 * ax)), _mm_set1_epi16(short(128 - 255 * bx)));
    const __m128i wy = _mm_unpacklo_epi64(_mm_set1_epi16(short((p.y >> 24 & 255) << 7)),
                                          _mm_set1_epi16(short((q.y >> 24 & 255) << 7)));
    // Pixels are the unsigned operand. The weights are signed bytes, which cannot represent +128. Therefore
    // the weights are negated (ax - 128 and -ax), and so are `top` and `low`.
    const __m128i top = _mm_maddubs_epi16(_mm_shuffle_epi8(load(a, b), pairs), wx);
    const __m128i low = _mm_maddubs_epi16(_mm_shuffle_epi8(load(a + stride, b + stride), pairs), wx);
    __m128i s = _mm_sub_epi16(_mm_mulhrs_epi16(_mm_sub_epi16(top, low), wy), top);
    s = _mm_srli_epi16(_mm_add_epi16(s, _mm_set1_epi16(64)), 7);
    const uint64_t packed = uint64_t(_mm_cvtsi128_si64(_mm_packus_epi16(s, s)));
    const uint32_t first = uint32_t(packed), second = uint32_t(packed >> 32);
    std::memcpy(out, &first, 4);
    std::memcpy(out + 3, &second, 4);
    p = q.at(1, step);
  }
  sample_row_plain(image, p, step, out, n - i);
}
#endif
inline void sample_row(const Image& image, Position p, Position step, uchar* out, int n) {
#if defined(__x86_64__)
  static const bool ssse3 = __builtin_cpu_supports("ssse3");
  if (ssse3) return sample_row_ssse3(image, p, step, out, n);
#endif
  sample_row_plain(image, p, step, out, n);
}

struct Span {
  int from, to;
};
// Returns the integers x of `in` with lo <= a * x + b < hi. Adjacent intervals [lo, hi) give adjacent spans,
// without gap or overlap.
inline Span span_of_interval(double a, double b, double lo, double hi, Span in) {
  if (std::abs(a) < 1e-12) return b >= lo && b < hi ? in : Span{in.from, in.from};
  const double first = a > 0 ? std::ceil((lo - b) / a) : std::floor((hi - b) / a) + 1;
  const double last = a > 0 ? std::ceil((hi - b) / a) : std::floor((lo - b) / a) + 1;
  const double from = std::clamp(first, double(in.from), double(in.to));
  return {int(from), int(std::clamp(last, from, double(in.to)))};
}

}  // namespace pixels_detail

// Warps an image into `out` with bilinear interpolation. Writes the pixels of `out` whose centres
// out_to_canvas maps into the rectangle `shown`. Both matrices map positions (pixel edges) of `out`:
// out_to_picture to the image, out_to_canvas to the canvas on which the image lies.
inline void warp_image(Image& out, const ImageRegion& piece, const cv::Matx23d& out_to_picture,
                       const cv::Matx23d& out_to_canvas, const cv::Rect2d& shown) {
  using namespace pixels_detail;
  const Image& image = piece.image;
  const cv::Matx23d &p = out_to_picture, &c = out_to_canvas;
  const Position step{fixed(p(0, 0) * piece.scale.x), fixed(p(1, 0) * piece.scale.y)};
  for (int y = 0; y < out.rows; ++y) {
    const auto at_first = [&](const cv::Matx23d& m, int row) {
      return m(row, 0) * 0.5 + m(row, 1) * (y + 0.5) + m(row, 2);
    };
    Span span = span_of_interval(c(0, 0), at_first(c, 0), shown.x, shown.x + shown.width, {0, out.cols});
    span = span_of_interval(c(1, 0), at_first(c, 1), shown.y, shown.y + shown.height, span);
    if (span.from >= span.to) continue;
    // The origin is a multiple of a reduced pixel. Subtract it after rounding, so that a region gives the
    // same bits as the whole image.
    const Position first{fixed(at_first(p, 0) * piece.scale.x - 0.5) - fixed(piece.origin.x * piece.scale.x),
                         fixed(at_first(p, 1) * piece.scale.y - 0.5) - fixed(piece.origin.y * piece.scale.y)};
    // Pixels whose neighbours are all inside the image are sampled faster.
    const auto inside = [&](int x) {
      const Position q = first.at(x, step);
      return q.x >= 0 && q.x >> 32 < image.cols - 2 && q.y >= 0 && q.y >> 32 < image.rows - 1;
    };
    Span fast = span;
    while (fast.from < fast.to && !inside(fast.from)) ++fast.from;
    while (fast.from < fast.to && !inside(fast.to - 1)) --fast.to;
    uchar* row = out.ptr(y);
    for (int x = span.from; x < fast.from; ++x) sample_pixel(image, first.at(x, step), row + 3 * x);
    sample_row(image, first.at(fast.from, step), step, row + 3 * fast.from, fast.to - fast.from);
    for (int x = fast.to; x < span.to; ++x) sample_pixel(image, first.at(x, step), row + 3 * x);
  }
}

// Replaces `image` by the rounded mean of both images, which must have the same size.
__attribute__((optimize("O3"))) inline void average_images(Image& image, const Image& other) {
  const int n = 3 * image.cols;
  for (int y = 0; y < image.rows; ++y) {
    uchar* a = image.ptr(y);
    const uchar* b = other.ptr(y);
    for (int i = 0; i < n; ++i) a[i] = uchar((a[i] + b[i] + 1) >> 1);
  }
}

// HSV jitter, in place: adds to hue (in units of 2 degrees, wraps around), saturation and value (clamped to
// 0..255). count: number of BGR pixels. Grey pixels have the hue of red, as in OpenCV.
#if defined(__x86_64__)
__attribute__((target_clones("avx2", "default"), optimize("O3,no-trapping-math")))
#endif
inline void
hsv_jitter(uchar* pixels, int64_t count, float hue, float saturation, float value) {
  constexpr int kStrip = 64;  // a constant length lets the compiler vectorise the loops
  float b[kStrip], g[kStrip], r[kStrip];
  uchar strip[3 * kStrip] = {};
  for (int64_t from = 0; from < count; from += kStrip) {
    const size_t bytes = size_t(3 * (count - from < kStrip ? count - from : kStrip));
    std::memcpy(strip, pixels + 3 * from, bytes);
    for (int i = 0; i < kStrip; ++i) {
      b[i] = strip[3 * i];
      g[i] = strip[3 * i + 1];
      r[i] = strip[3 * i + 2];
    }
    for (int i = 0; i < kStrip; ++i) {
      const float blue = b[i], green = g[i], red = r[i];
      const float gr = green > red ? green : red, v = blue > gr ? blue : gr;
      const float gr_low = green < red ? green : red, low = blue < gr_low ? blue : gr_low, d = v - low;
      const float over_d = 1 / (d > 0 ? d : 1);  // hue is in units of 60 degrees
      const bool is_red = v == red, is_green = v == green;
      const float from = is_red ? green : is_green ? blue : red, to = is_red ? blue : is_green ? red : green;
      float h = (is_red ? 0.f : is_green ? 2.f : 4.f) + (from - to) * over_d + hue * (1 / 30.f);
      h += h < 0 ? 6.f : 0.f;
      h -= h >= 6 ? 6.f : 0.f;
      float s = 255 * d / (v > 0 ? v : 1) + saturation;
      s = s < 0 ? 0 : s;
      s = s > 255 ? 255 : s;
      float lit = v + value;
      lit = lit < 0 ? 0 : lit;
      lit = lit > 255 ? 255 : lit;
      const float chroma = lit * s * (1 / 255.f);
      const auto channel = [&](float n) __attribute__((always_inline)) {
        float k = n + h;
        k -= k >= 6 ? 6.f : 0.f;
        const float down = 4 - k;
        k = k < down ? k : down;
        k = k < 0 ? 0 : k;
        k = k > 1 ? 1 : k;
        return lit - chroma * k + 0.5f;
      };
      b[i] = channel(1);
      g[i] = channel(3);
      r[i] = channel(5);
    }
    for (int i = 0; i < kStrip; ++i) {
      strip[3 * i] = uchar(int(b[i]));
      strip[3 * i + 1] = uchar(int(g[i]));
      strip[3 * i + 2] = uchar(int(r[i]));
    }
    std::memcpy(pixels + 3 * from, strip, bytes);
  }
}

}  // namespace yolox
