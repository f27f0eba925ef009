// SPDX-License-Identifier: Apache-2.0
#include "data/tiles.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <opencv2/imgcodecs.hpp>
#include <unordered_map>
#include <utility>

#include "base/random.hpp"

namespace yolox {

void check_tile_side(const char* flag, int side) {
  usage_check(side == 0 || side >= 32, flag, " must be at least 32, got ", side);
}

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

// Decodes parts of images. Keeps the two images that were decoded last, because neighbouring tiles are of one
// image. Thread-safe.
class Decoder {
 public:
  explicit Decoder(const Dataset& data) : data(data) {}
  // Throws ImageError.
  Image operator()(size_t image, const cv::Rect& part) {
    {
      const std::lock_guard lock(mutex);
      for (const auto& [i, pixels] : kept)
        if (i == image) return Image(pixels(part));
    }
    const Image whole = read_image(data, image);
    const std::lock_guard lock(mutex);
    kept.emplace_front(image, whole);
    kept.resize(std::min<size_t>(kept.size(), 2));
    return Image(whole(part));
  }

 private:
  const Dataset& data;
  std::mutex mutex;
  std::list<std::pair<size_t, Image>> kept;
};

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
  const std::string place = part.size() == data.size(image) ? "" : concat("_", part.x, "_", part.y),
                    name = concat((file.parent_path() / file.stem()).string(), place, ".jpg");
  tiles.data.records.push_back({data.records[image].file, id, part.width, part.height, {}});
  tiles.data.truth.images.push_back({id, name, part.width, part.height});
  tiles.image.push_back(image);
  tiles.part.push_back(part);
}

// Adds the objects of an image to its last tile. crowds: of this image. hidden(box): objects that become
// ignored regions.
static void add_objects(Tiles& tiles, const Dataset& data, const std::vector<const CocoAnnotation*>& crowds,
                        const std::function<bool(const Box&)>& hidden) {
  Record& r = tiles.data.records.back();
  const auto add = [&](const Box& b, int64_t category, bool crowd) {
    const Box seen = in_tile(b, tiles.part.back());
    if (!has_area(seen)) return;
    (crowd ? r.ignored : r.boxes)
        .push_back({seen.x1, seen.y1, seen.x2, seen.y2, crowd ? kIgnoredRegion : b.cls});
    const double w = seen.x2 - seen.x1, h = seen.y2 - seen.y1;
    tiles.data.truth.annotations.push_back({int64_t(tiles.data.truth.annotations.size()) + 1, r.image_id,
                                            category, seen.x1, seen.y1, w, h, w * h, crowd});
  };
  for (const Box& b : data.boxes(tiles.image.back()))
    add(b, data.truth.categories[size_t(b.cls)].id, hidden(b));
  for (const CocoAnnotation* a : crowds) add({a->x, a->y, a->x + a->w, a->y + a->h, 0}, a->category_id, true);
}

Tiles training_tiles(const Dataset& data, int side, double overlap, bool all_empty) {
  struct Tile {
    size_t image;
    cv::Rect part;
  };
  const auto shows = [](const cv::Rect& part, const Box& b, double share) {
    return area(in_tile(b, part)) >= share * area(b);
  };
  std::vector<Tile> with, without;
  for (size_t i = 0; i < data.records.size(); ++i) {
    const auto& boxes = data.boxes(i);
    const auto parts = tiles_of(data.size(i), side, overlap);
    for (const cv::Rect& part : parts) {
      const bool any = std::ranges::any_of(boxes, [&](const Box& b) { return shows(part, b, 0.5); });
      (any ? with : without).push_back({i, part});
    }
    const bool large = std::ranges::any_of(boxes, [&](const Box& b) {
      return std::ranges::none_of(parts, [&](const cv::Rect& part) { return shows(part, b, 1); });
    });
    if (large) with.push_back({i, {{0, 0}, data.size(i)}});
  }
  if (!all_empty && without.size() > with.size()) {
    Rng rng(0, 0, without.size());
    shuffle(without, rng);
    without.resize(with.size());
  }
  with.insert(with.end(), without.begin(), without.end());
  std::ranges::stable_sort(with, {}, &Tile::image);

  std::unordered_map<int64_t, std::vector<const CocoAnnotation*>> crowds;  // by image id
  for (const CocoAnnotation& a : data.truth.annotations)
    if (a.crowd) crowds[a.image_id].push_back(&a);
  Tiles tiles{without_images(data, concat(", tiles of ", side, " pixels")), {}, {}};
  for (const Tile& t : with) {
    add_tile(tiles, data, t.image, t.part);
    const auto parts = tiles_of(data.size(t.image), side, overlap);
    const bool whole = parts.size() > 1 && t.part.size() == data.size(t.image);
    add_objects(tiles, data, crowds[data.records[t.image].image_id], [&](const Box& b) {
      if (!whole) return !shows(t.part, b, 0.5);
      return std::ranges::any_of(parts, [&](const cv::Rect& part) { return shows(part, b, 1); });
    });
  }
  ContentKey key;
  key.add(data.key);
  for (const cv::Rect& part : tiles.part) key.add(&part, sizeof part);
  tiles.data.key = key.text();
  const auto decode = std::make_shared<Decoder>(data);
  tiles.data.read = [decode, problems = data.problems, image = tiles.image, part = tiles.part](size_t i) {
    std::vector<uchar> bytes;
    try {
      cv::imencode(".jpg", (*decode)(image[i], part[i]), bytes, {cv::IMWRITE_JPEG_QUALITY, 95});
    } catch (const ImageError& e) {  // stays an image that cannot be decoded
      problems->add("image cannot be used", e.what());
      return std::string("no image: ") + e.what();
    }
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
  const auto decode = std::make_shared<Decoder>(data);
  tiles.data.stored = [decode, image = tiles.image, part = tiles.part](size_t i, double) {
    return ImageRegion{(*decode)(image[i], part[i])};
  };
  return tiles;
}

std::vector<TileDetection> merge_tiles(std::vector<TileDetection> found, cv::Size image) {
  const auto is_cut = [&](const TileDetection& d) {
    const cv::Rect& t = d.tile;
    const double near =
        std::max(4.0, 0.01 * t.width);  // pixels; boxes of objects that are cut end about here
    return (t.x > 0 && d.box.x1 < t.x + near) || (t.y > 0 && d.box.y1 < t.y + near) ||
           (t.x + t.width < image.width && d.box.x2 > t.x + t.width - near) ||
           (t.y + t.height < image.height && d.box.y2 > t.y + t.height - near);
  };
  std::erase_if(found, is_cut);
  std::ranges::stable_sort(found, std::ranges::greater(), &TileDetection::score);
  std::vector<TileDetection> kept;
  std::map<int, std::vector<TileDetection>> of_class;
  for (const TileDetection& d : found) {
    auto& same = of_class[d.box.cls];
    const bool repeats = std::ranges::any_of(same, [&](const TileDetection& k) {
      const Box both{std::max(k.box.x1, d.box.x1), std::max(k.box.y1, d.box.y1), std::min(k.box.x2, d.box.x2),
                     std::min(k.box.y2, d.box.y2), 0};
      return k.tile != d.tile && area(both) > 0.5 * (area(k.box) + area(d.box) - area(both));
    });
    if (repeats) continue;
    same.push_back(d);
    kept.push_back(d);
  }
  return kept;
}

}  // namespace yolox
