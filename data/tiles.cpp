// SPDX-License-Identifier: Apache-2.0
#include "data/tiles.hpp"

#include <algorithm>
#include <cmath>
#include <opencv2/imgcodecs.hpp>
#include <utility>

#include "base/random.hpp"

namespace yolox {

std::vector<cv::Rect> tiles_of(cv::Size image, int side, double overlap) {
  const auto starts = [&](int length) {
    std::vector<int> all{0};
    if (length <= side) return all;
    const double step = std::max(1.0, side * (1 - overlap));
    const int more = int(std::ceil((length - side) / step));
    for (int k = 1; k <= more; ++k) all.push_back(int(std::lround(double(length - side) * k / more)));
    return all;
  };
  std::vector<cv::Rect> tiles;
  for (const int y : starts(image.height))
    for (const int x : starts(image.width))
      tiles.emplace_back(x, y, std::min(side, image.width), std::min(side, image.height));
  return tiles;
}

// Returns exactly the pixels of a part of an image.
static Image pixels_of(const Dataset& data, size_t image, const cv::Rect& part) {
  const ImageRegion region = data.image_region(image, part, 1);
  const cv::Point origin(int(region.origin.x), int(region.origin.y));
  return Image(region.image(part - origin));
}

static double area(const Box& b) { return std::max(0.0, b.x2 - b.x1) * std::max(0.0, b.y2 - b.y1); }

static Box in_tile(const Box& b, const cv::Rect& part) {
  const auto x = [&](double v) { return std::clamp(v - part.x, 0.0, double(part.width)); };
  const auto y = [&](double v) { return std::clamp(v - part.y, 0.0, double(part.height)); };
  return {x(b.x1), y(b.y1), x(b.x2), y(b.y2), b.cls};
}

// Returns a data set without images that otherwise equals `data`.
static Dataset without_images(const Dataset& data, const std::string& what) {
  Dataset empty;
  empty.name = data.name + what;
  empty.classes = data.classes;
  empty.category_ids = data.category_ids;
  empty.truth.categories = data.truth.categories;
  empty.strict = data.strict;
  empty.problems = data.problems;
  empty.notes = data.notes;
  return empty;
}

static void add_tile(Tiles& tiles, const Dataset& data, size_t image, const cv::Rect& part) {
  const int64_t id = int64_t(tiles.part.size()) + 1;
  const fs::path file = data.truth.images[image].file_name;
  const std::string name =
      concat((file.parent_path() / file.stem()).string(), "_", part.x, "_", part.y, ".jpg");
  tiles.data.records.push_back({data.records[image].file, id, part.width, part.height, {}});
  tiles.data.truth.images.push_back({id, name, part.width, part.height});
  tiles.image.push_back(image);
  tiles.part.push_back(part);
}

// Adds the objects of the image to the last tile.
static void add_objects(Tiles& tiles, const Dataset& data) {
  Record& r = tiles.data.records.back();
  const Record& whole = data.records[tiles.image.back()];
  const auto add = [&](const Box& b, bool is_region) {
    const Box seen = in_tile(b, tiles.part.back());
    if (!has_area(seen)) return;
    const bool crowd = is_region || area(seen) < area(b) / 2;
    // A region belongs to no class. As a crowd in a COCO file it needs one.
    const int64_t category = data.truth.categories[size_t(std::max(0, b.cls))].id;
    const double w = seen.x2 - seen.x1, h = seen.y2 - seen.y1;
    (crowd ? r.ignored : r.boxes)
        .push_back({seen.x1, seen.y1, seen.x2, seen.y2, crowd ? kIgnoredRegion : b.cls});
    tiles.data.truth.annotations.push_back({int64_t(tiles.data.truth.annotations.size()) + 1, r.image_id,
                                            category, seen.x1, seen.y1, w, h, w * h, crowd});
  };
  for (const Box& b : whole.boxes) add(b, false);
  for (const Box& b : whole.ignored) add(b, true);
}

Tiles training_tiles(const Dataset& data, int side, double overlap, double most_empty) {
  struct Tile {
    size_t image;
    cv::Rect part;
  };
  std::vector<Tile> with, without;
  for (size_t i = 0; i < data.records.size(); ++i)
    for (const cv::Rect& part : tiles_of(data.size(i), side, overlap)) {
      const auto& boxes = data.boxes(i);
      const bool any = std::any_of(boxes.begin(), boxes.end(),
                                   [&](const Box& b) { return area(in_tile(b, part)) >= area(b) / 2; });
      (any ? with : without).push_back({i, part});
    }
  Rng rng(0, 0, without.size());
  for (size_t i = without.size(); i-- > 1;)
    std::swap(without[i], without[size_t(rng.randint(0, int64_t(i)))]);
  without.resize(std::min(without.size(), size_t(std::ceil(most_empty * double(with.size())))));
  with.insert(with.end(), without.begin(), without.end());
  std::stable_sort(with.begin(), with.end(), [](const Tile& a, const Tile& b) { return a.image < b.image; });

  Tiles tiles{without_images(data, concat(", tiles of ", side, " pixels")), {}, {}};
  for (const Tile& t : with) {
    add_tile(tiles, data, t.image, t.part);
    add_objects(tiles, data);
  }
  ContentKey key;
  key.add(data.key);
  for (const cv::Rect& part : tiles.part) key.add(&part, sizeof part);
  tiles.data.key = key.text();
  tiles.data.read = [&data, image = tiles.image, part = tiles.part](size_t i) {
    std::vector<uchar> bytes;
    cv::imencode(".jpg", pixels_of(data, image[i], part[i]), bytes, {cv::IMWRITE_JPEG_QUALITY, 95});
    return std::string(bytes.begin(), bytes.end());
  };
  return tiles;
}

Tiles inference_tiles(const Dataset& data, int side, double overlap) {
  Tiles tiles{without_images(data, ""), {}, {}};
  for (size_t i = 0; i < data.records.size(); ++i) {
    const auto parts = tiles_of(data.size(i), side, overlap);
    for (const cv::Rect& part : parts) add_tile(tiles, data, i, part);
    if (parts.size() > 1) add_tile(tiles, data, i, {{0, 0}, data.size(i)});
  }
  tiles.data.stored = [&data, image = tiles.image, part = tiles.part](size_t i, double) {
    return ImageRegion{pixels_of(data, image[i], part[i])};
  };
  return tiles;
}

std::vector<TileDetection> merge_tiles(std::vector<TileDetection> found, cv::Size image) {
  const auto is_cut = [&](const TileDetection& d) {
    const double near = 4;  // pixels: boxes of objects that are cut end about here
    const cv::Rect& t = d.tile;
    return (t.x > 0 && d.box.x1 < t.x + near) || (t.y > 0 && d.box.y1 < t.y + near) ||
           (t.x + t.width < image.width && d.box.x2 > t.x + t.width - near) ||
           (t.y + t.height < image.height && d.box.y2 > t.y + t.height - near);
  };
  found.erase(std::remove_if(found.begin(), found.end(), is_cut), found.end());
  std::stable_sort(found.begin(), found.end(),
                   [](const TileDetection& a, const TileDetection& b) { return a.score > b.score; });
  std::vector<TileDetection> kept;
  for (const TileDetection& d : found) {
    const bool repeats = std::any_of(kept.begin(), kept.end(), [&](const TileDetection& k) {
      const Box both{std::max(k.box.x1, d.box.x1), std::max(k.box.y1, d.box.y1), std::min(k.box.x2, d.box.x2),
                     std::min(k.box.y2, d.box.y2), 0};
      return k.box.cls == d.box.cls && k.tile != d.tile &&
             area(both) > 0.5 * (area(k.box) + area(d.box) - area(both));
    });
    if (!repeats) kept.push_back(d);
  }
  return kept;
}

}  // namespace yolox
