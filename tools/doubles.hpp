// SPDX-License-Identifier: Apache-2.0
// Finds images that a data set has twice, and boxes of different classes on the same object.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/threads.hpp"
#include "data/dataset.hpp"

namespace yolox {

// What two images are compared by.
struct Fingerprint {
  uint64_t bytes = 0;            // hash of the file
  std::optional<uint64_t> look;  // see look_of()
};

// Returns a hash of what an image looks like, which changes by few bits if the image is scaled, compressed
// or made brighter: for each of 8 x 8 places, whether the next place to the right is brighter (dHash).
// Returns nothing if the image has too little contrast.
inline std::optional<uint64_t> look_of(const Image& image) {
  constexpr double kLeastContrast = 4;  // standard deviation of the brightness, of 255 levels
  cv::Mat grey, small, mean, deviation;
  cv::cvtColor(image, grey, cv::COLOR_BGR2GRAY);
  cv::resize(grey, small, {9, 8}, 0, 0, cv::INTER_AREA);
  cv::meanStdDev(small, mean, deviation);
  if (deviation.at<double>(0) < kLeastContrast) return {};
  uint64_t look = 0;
  for (int y = 0; y < 8; ++y)
    for (int x = 0; x < 8; ++x)
      look = look << 1 | uint64_t(small.at<uchar>(y, x + 1) > small.at<uchar>(y, x));
  return look;
}

// Reads all images. An unreadable one is added to data.problems and gets an empty fingerprint.
inline std::vector<Fingerprint> fingerprints(const Dataset& data) {
  std::vector<Fingerprint> all(data.records.size());
  parallel_for(int64_t(all.size()), [&](int64_t i) {
    try {
      // About 64 pixels on the shorter side are enough, and read a JPEG several times as fast.
      const cv::Size size = data.size(i);
      const double scale = std::min(1.0, 64.0 / std::min(size.width, size.height));
      const bool is_file = !data.stored;
      const std::string bytes = is_file ? data.bytes(i) : "";
      const Image image = is_file
                              ? decode_region(bytes, data.records[i].file, {{0, 0}, size}, scale, size).image
                              : data.image_region(i, {{0, 0}, size}, scale).image;
      uint64_t hash = fnv1a(bytes);
      for (int y = 0; !is_file && y < image.rows; ++y)
        hash = fnv1a({reinterpret_cast<const char*>(image.ptr(y)), 3 * size_t(image.cols)}, hash);
      all[i] = {hash, look_of(image)};
    } catch (const ImageError& e) {
      data.problems->add("image cannot be used", e.what());
    }
  });
  return all;
}

// Two images, by index, the earlier one first.
using Pair = std::pair<size_t, size_t>;

// Returns for each image the first earlier one with the same bytes, if any.
inline std::vector<Pair> equal_images(const std::vector<Fingerprint>& images) {
  std::vector<Pair> pairs;
  std::unordered_map<uint64_t, size_t> first_of;
  for (size_t i = 0; i < images.size(); ++i) {
    if (images[i].bytes == 0) continue;
    const auto [first, is_new] = first_of.emplace(images[i].bytes, i);
    if (!is_new) pairs.push_back({first->second, i});
  }
  return pairs;
}

// Returns for each image the first earlier one whose look differs in at most 3 of 64 bits, if any, without
// images of the same bytes.
inline std::vector<Pair> similar_images(const std::vector<Fingerprint>& images) {
  constexpr int kMostBits = 3;
  // Of four parts of 16 bits, at least one is equal if at most three bits differ.
  std::array<std::unordered_map<uint16_t, std::vector<size_t>>, kMostBits + 1> parts;
  std::vector<Pair> pairs;
  for (size_t i = 0; i < images.size(); ++i) {
    if (!images[i].look) continue;
    const uint64_t look = *images[i].look;
    size_t first = i;
    bool copy = false;
    for (size_t p = 0; p < parts.size(); ++p) {
      std::vector<size_t>& same = parts[p][uint16_t(look >> 16 * p)];
      for (const size_t other : same) {
        if (std::popcount(look ^ *images[other].look) > kMostBits) continue;
        copy = copy || (images[i].bytes != 0 && images[i].bytes == images[other].bytes);
        first = std::min(first, other);
        break;  // they are sorted
      }
      same.push_back(i);
    }
    if (first < i && !copy) pairs.push_back({first, i});
  }
  return pairs;
}

// Two classes, the lower one first, whose boxes cover each other in a number of images.
struct ClassOverlap {
  int first, second;
  int64_t boxes = 0;  // pairs of boxes
  size_t image = 0;   // index of the first such image
};

// Returns the pairs of classes of which some boxes have an IoU of at least `iou`, the most frequent first.
inline std::vector<ClassOverlap> class_overlaps(const Dataset& data, double iou = 0.8) {
  std::map<std::pair<int, int>, ClassOverlap> found;
  for (size_t i = 0; i < data.records.size(); ++i) {
    const std::vector<Box>& boxes = data.records[i].boxes;
    for (size_t a = 0; a < boxes.size(); ++a)
      for (size_t b = a + 1; b < boxes.size(); ++b) {
        if (boxes[a].cls == boxes[b].cls) continue;
        const auto rectangle = [](const Box& x) { return cv::Rect2d(x.x1, x.y1, x.x2 - x.x1, x.y2 - x.y1); };
        const cv::Rect2d one = rectangle(boxes[a]), two = rectangle(boxes[b]);
        const double both = (one & two).area();
        if (both < iou * (one.area() + two.area() - both)) continue;
        const auto [low, high] = std::minmax(boxes[a].cls, boxes[b].cls);
        ++found.emplace(std::pair(low, high), ClassOverlap{low, high, 0, i}).first->second.boxes;
      }
  }
  std::vector<ClassOverlap> all;
  for (const auto& entry : found) all.push_back(entry.second);
  std::ranges::stable_sort(all, std::ranges::greater(), &ClassOverlap::boxes);
  return all;
}

}  // namespace yolox
