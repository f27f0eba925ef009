// From files to batches: data sets (COCO JSON, or the built-in shapes), a check of their labels, and a loader
// whose threads live as long as it does.
//
// B images in a batch, H W height and width of the network's input, G objects in an image.
#pragma once
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <opencv2/imgcodecs.hpp>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "augment.hpp"
#include "checkpoint.hpp"
#include "coco_json.hpp"
#include "error.hpp"
#include "shapes.hpp"
#include "simota.hpp"

namespace yolox {

namespace fs = std::filesystem;

// ---- problems

// What was wrong with the data and left out: counted by kind, listed line by line. Safe to use from
// all threads.
struct Problems {
  void add(const std::string& kind, const std::string& line) {
    std::lock_guard lock(mutex);
    if (seen.emplace(kind + ": " + line, true).second) ++counts[kind];
  }
  std::map<std::string, int64_t> summary() const {
    std::lock_guard lock(mutex);
    return counts;
  }
  std::vector<std::string> lines() const {
    std::lock_guard lock(mutex);
    std::vector<std::string> all;
    for (const auto& [line, _] : seen) all.push_back(line);
    return all;
  }
  // All of them, a line each; does nothing when there are none.
  void write(const std::string& path) const {
    const auto all = lines();
    if (all.empty()) return;
    std::ofstream file(path);
    for (const auto& line : all) file << line << "\n";
  }

 private:
  mutable std::mutex mutex;
  std::map<std::string, int64_t> counts;
  std::map<std::string, bool> seen;
};

// ---- data sets

struct Record {
  std::string file;  // empty for a drawn image
  int64_t image_id;
  int width, height;       // of the picture, pixels
  std::vector<Box> boxes;  // x1, y1, x2, y2 in pixels of the picture, inside of it; no crowds
};

struct Dataset {
  std::string name;                  // where it is from, for messages
  std::vector<std::string> classes;  // names; position = class id
  std::vector<Record> records;
  CocoDataset truth;      // for evaluation: the same images, all annotations as they were
  int shapes_split = -1;  // 0 or 1: the images are drawn
  uint64_t shapes_seed = 0;
  std::shared_ptr<Problems> problems = std::make_shared<Problems>();
};

// Image i as BGR, turned as its EXIF tag says. Throws std::runtime_error naming the file.
inline Image read_image(const Dataset& data, int64_t i) {
  const Record& r = data.records[i];
  if (data.shapes_split >= 0) return draw_shapes(data.shapes_seed, data.shapes_split, r.image_id - 1).image;
  cv::Mat image;
  try {
    image = cv::imread(r.file, cv::IMREAD_COLOR);
  } catch (const cv::Exception& e) {
    fail(r.file, " cannot be decoded: ", e.err);
  }
  check(!image.empty(), r.file, " cannot be read as an image");
  check(r.width == 0 || (image.cols == r.width && image.rows == r.height), r.file, " is ", image.cols, "x",
        image.rows, ", its annotations say ", r.width, "x", r.height);
  return image;
}

// The data set that needs no files: `count` scenes of split 0 (train) or 1 (val).
inline Dataset shapes_dataset(uint64_t seed, int split, int64_t count) {
  Dataset data;
  data.name = split == 0 ? "shapes (train)" : "shapes (val)";
  data.classes = shapes_classes();
  data.shapes_split = split;
  data.shapes_seed = seed;
  data.records.resize(count);
  std::atomic<int64_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1u, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (int64_t i; (i = next++) < count;) {
        const auto scene = draw_shapes(seed, split, i);
        Record& r = data.records[i];
        r = {"", i + 1, scene.image.cols, scene.image.rows, {}};
        r.boxes = scene.boxes;
      }
    });
  }
  for (auto& t : threads) t.join();
  for (size_t c = 0; c < data.classes.size(); ++c)
    data.truth.categories.push_back({int64_t(c) + 1, data.classes[c]});
  for (const Record& r : data.records) {
    data.truth.images.push_back({r.image_id, concat("shapes_", r.image_id, ".png"), r.width, r.height});
    for (const Box& b : r.boxes) {
      const double w = b.x2 - b.x1, h = b.y2 - b.y1;
      data.truth.annotations.push_back({int64_t(data.truth.annotations.size()) + 1, r.image_id, b.cls + 1,
                                        b.x1, b.y1, w, h, w * h, false});
    }
  }
  return data;
}

// Folder that holds the images of a COCO JSON file: the first of the usual places that has one of the first
// images.
inline fs::path find_image_folder(const fs::path& json, const CocoDataset& coco) {
  const fs::path folder = json.parent_path().empty() ? "." : json.parent_path();
  const fs::path root = folder.filename() == "annotations" ? folder / ".." : folder;
  std::string split = json.stem().string();
  if (split.rfind("instances_", 0) == 0) split = split.substr(10);
  std::vector<fs::path> places = {root / split, root / "images" / split, root / "images", root, folder};
  for (const fs::path& parent : {root, root / "images"}) {
    std::error_code ignored;
    std::vector<fs::path> others;
    for (const auto& entry : fs::directory_iterator(parent, ignored))
      if (entry.is_directory(ignored)) others.push_back(entry.path());
    std::sort(others.begin(), others.end());
    std::stable_partition(others.begin(), others.end(),
                          [&](const fs::path& p) {  // "val" for annotations_val first
                            return split.find(p.filename().string()) != std::string::npos;
                          });
    places.insert(places.end(), others.begin(), others.end());
  }
  for (const auto& place : places)
    for (size_t i = 0; i < std::min<size_t>(coco.images.size(), 20); ++i)
      if (fs::exists(place / coco.images[i].file_name)) return place.lexically_normal();
  std::string looked;
  for (const auto& place : places)
    looked += "\n  " + (place / coco.images[0].file_name).lexically_normal().string();
  fail(
      json.string(),
      ": none of its first images is in any of the usual places; put the images into one of them. Looked for",
      looked);
}

// One COCO JSON file and its images. Boxes and images that cannot be used are left out and noted.
inline Dataset coco_dataset(const fs::path& json, bool official_quirks) {
  Dataset data;
  data.name = json.string();
  data.truth = read_coco(json.string());
  check(!data.truth.images.empty(), json.string(), " lists no images");
  check(!data.truth.categories.empty(), json.string(), " lists no categories");
  const fs::path folder = find_image_folder(json, data.truth);
  std::unordered_map<int64_t, size_t> record_of, class_of;
  for (const auto& c : data.truth.categories) {
    class_of[c.id] = data.classes.size();
    data.classes.push_back(c.name);
  }
  std::vector<CocoImage> present;
  for (const auto& image : data.truth.images) {
    const fs::path file = folder / image.file_name;
    if (!fs::exists(file)) {
      data.problems->add("image missing", file.string());
      continue;
    }
    record_of[image.id] = data.records.size();
    data.records.push_back({file.string(), image.id, image.width, image.height, {}});
    if (image.width <= 0 || image.height <= 0) {  // the file does not say: ask the picture
      cv::Mat picture;
      try {
        picture = cv::imread(file.string(), cv::IMREAD_COLOR);
      } catch (const cv::Exception&) {}  // read_image() names it later
      data.records.back().width = picture.cols, data.records.back().height = picture.rows;
    }
    present.push_back(image);
  }
  check(!present.empty(), json.string(), ": no image that it lists is in ", folder.string());
  if (data.truth.without_box > 0)
    data.problems->add("annotations without bbox", concat(json.string(), ": ", data.truth.without_box));
  data.truth.images = present;
  for (const auto& a : data.truth.annotations) {
    const std::string where = concat(json.string(), ": annotation ", a.id, " of image ", a.image_id);
    const std::string box = concat(" [", a.x, ", ", a.y, ", ", a.w, ", ", a.h, "]");
    const auto record = record_of.find(a.image_id);
    const auto cls = class_of.find(a.category_id);
    if (cls == class_of.end()) {
      data.problems->add("category id without category", concat(where, " has category_id ", a.category_id));
    } else if (record == record_of.end()) {
      data.problems->add("annotation of an image that is not there", where);
    } else if (a.crowd) {
      continue;  // a region of many objects: evaluation knows it, training does not learn it
    } else if (official_quirks ? !(a.area > 0) : !(a.w > 0 && a.h > 0)) {
      data.problems->add("box of no size", where + box);
    } else {
      Record& r = data.records[record->second];
      if (a.x < -1 || a.y < -1 || a.x + a.w > r.width + 1 || a.y + a.h > r.height + 1)
        data.problems->add("box reaches out of the image (cut)",
                           concat(where, box, " in ", r.width, "x", r.height));
      if (const auto b = clip_box(a.x, a.y, a.w, a.h, int(cls->second), {r.width, r.height}, official_quirks))
        r.boxes.push_back(*b);
      else
        data.problems->add("box outside of the image", concat(where, box, " in ", r.width, "x", r.height));
    }
  }
  return data;
}

struct Splits {
  Dataset train, val;
  bool same = false;  // there is one split only, and it serves as both
};

// The COCO JSON files of --data: {train, val}, equal where there is one only. Throws with what was looked
// for.
inline std::pair<fs::path, fs::path> find_coco(const std::string& data) {
  if (const size_t comma = data.find(','); comma != std::string::npos && !fs::exists(data)) {
    const fs::path train = data.substr(0, comma), val = data.substr(comma + 1);
    for (const fs::path& f : {train, val})
      check(fs::is_regular_file(f), "--data ", data, ": ", f.string(),
            " is no file; give TRAIN.json,VAL.json");
    return {train, val};
  }
  const fs::path path(data);
  check(fs::exists(path), "--data ", data,
        " does not exist; give a folder with annotations/*.json, a COCO JSON file, or shapes");
  if (!fs::is_directory(path)) return {path, path};
  std::vector<fs::path> files;
  for (const fs::path& folder : {path / "annotations", path}) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored))
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    if (!files.empty()) break;
  }
  if (files.empty()) {  // a folder for each split, with its JSON file inside
    fs::path found[2];
    const std::vector<std::string> names[2] = {{"train", "train2017"}, {"valid", "val", "val2017"}};
    std::error_code ignored;
    for (const int split : {0, 1})
      for (const auto& name : names[split])
        for (const auto& entry : fs::directory_iterator(path / name, ignored))
          if (entry.path().extension() == ".json" && found[split].empty()) found[split] = entry.path();
    if (!found[0].empty() && !found[1].empty()) return {found[0], found[1]};
  }
  std::sort(files.begin(), files.end());
  const auto named = [&](const std::string& word) {
    std::vector<fs::path> found;
    for (const auto& f : files) {
      const std::string name = f.stem().string();
      const bool instances =
          name.find("caption") == std::string::npos && name.find("keypoint") == std::string::npos &&
          name.find("panoptic") == std::string::npos && name.find("stuff") == std::string::npos;
      if (instances && name.find(word) != std::string::npos) found.push_back(f);
    }
    check(found.size() <= 1, "--data ", data, " has several files for '", word,
          "': ", found.size() > 1 ? found[0].string() : "", ", ", found.size() > 1 ? found[1].string() : "",
          "; give --data TRAIN.json,VAL.json");
    return found.empty() ? fs::path() : found[0];
  };
  const fs::path train = named("train"), val = named("val");
  if (!train.empty() && !val.empty()) return {train, val};
  if (!train.empty()) return {train, train};
  if (!val.empty()) return {val, val};
  check(files.size() == 1, "--data ", data,
        files.empty()
            ? " has no annotations: looked for annotations/*.json and *.json"
            : " has several JSON files, none with train or val in its name; give --data TRAIN.json,VAL.json");
  return {files[0], files[0]};
}

constexpr int64_t kShapesTrain = 2000, kShapesVal = 200;

// --data: a folder, a COCO JSON file, or "shapes".
inline Splits load_splits(const std::string& data, uint64_t seed, bool official_quirks) {
  if (data == "shapes")
    return {shapes_dataset(seed, 0, kShapesTrain), shapes_dataset(seed, 1, kShapesVal), false};
  const auto [train, val] = find_coco(data);
  Splits splits{coco_dataset(train, official_quirks), {}, train == val};
  splits.val = splits.same ? splits.train : coco_dataset(val, official_quirks);
  check(splits.train.classes == splits.val.classes, train.string(), " and ", val.string(),
        " list different categories (", splits.train.classes.size(), " and ", splits.val.classes.size(),
        "); they must be the same");
  const auto has_box = [](const Record& r) { return !r.boxes.empty(); };
  check(std::any_of(splits.train.records.begin(), splits.train.records.end(), has_box), splits.train.name,
        " has no usable box; check bbox, image_id and category_id of its annotations");
  return splits;
}
inline Dataset load_val(const std::string& data, uint64_t seed) {
  if (data == "shapes") return shapes_dataset(seed, 1, kShapesVal);
  return coco_dataset(find_coco(data).second, false);
}

// ---- batches

struct Item {
  Image image;             // H x W
  std::vector<Box> boxes;  // in pixels of `image`
  int64_t index = -1;      // of the record; -1: an unreadable image stands here, all grey
  Scale scale{1, 1};       // from the pixels of the original to those of `image`
};

struct Batch {
  Tensor images;    // [B, H, W, 3] uint8, BGR; pinned when asked for
  Targets targets;  // in pixels of the images
  std::vector<int64_t> indices;
  std::vector<Scale> scales;
};

// Boxes of a batch as the loss takes them, padded to the largest count.
inline Targets make_targets(const std::vector<std::vector<Box>>& boxes) {
  size_t rows = 0;
  for (const auto& b : boxes) rows = std::max(rows, b.size());
  Targets t{torch::zeros({int64_t(boxes.size()), int64_t(rows), 4}),
            torch::zeros({int64_t(boxes.size()), int64_t(rows)}, torch::kLong),
            {}};
  float* box = t.boxes.data_ptr<float>();
  int64_t* cls = t.classes.data_ptr<int64_t>();
  for (size_t i = 0; i < boxes.size(); ++i) {
    t.counts.push_back(boxes[i].size());
    for (size_t g = 0; g < boxes[i].size(); ++g) {
      const Box& b = boxes[i][g];
      const double row[4] = {(b.x1 + b.x2) / 2, (b.y1 + b.y2) / 2, b.x2 - b.x1, b.y2 - b.y1};
      std::copy(row, row + 4, box + 4 * (i * rows + g));
      cls[i * rows + g] = b.cls;
    }
  }
  return t;
}

// Makes batches ahead of their use, in order, by threads that live as long as the loader. `make` gives the
// item of a position; positions run from `first` to `end`, `batch` at a time, the last batch may be smaller.
// What an item holds may depend on its position alone: then the number of threads changes nothing. An
// exception in a thread comes out of the next() that would have given its batch.
class Loader {
 public:
  using Make = std::function<Item(int64_t)>;

  Loader(Make make, int64_t first, int64_t end, int batch, cv::Size size, int threads, bool pinned)
      : make(std::move(make)), position(first), end(end), batch(batch), size(size), pinned(pinned) {
    plan();
    try {
      for (int i = 0; i < std::max(1, threads); ++i) workers.emplace_back([this] { work(); });
    } catch (const std::system_error& e) {
      end_workers();
      fail("cannot start ", threads, " threads (", e.what(), "); give fewer --workers");
    }
  }
  ~Loader() { end_workers(); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  bool done() {
    std::lock_guard lock(mutex);
    return pending.empty() && position >= end;
  }

  Batch next() {
    std::unique_lock lock(mutex);
    plan();
    check(!pending.empty(), "the loader is at its end");
    const auto first = pending.front();
    has_batch.wait(lock, [&] { return first->missing == 0; });
    pending.pop_front();
    plan();
    lock.unlock();
    has_work.notify_all();
    if (first->error) std::rethrow_exception(first->error);
    Batch out{first->images, make_targets(first->boxes), first->indices, first->scales};
    return out;
  }

 private:
  static constexpr size_t kAhead = 3;  // batches in the making or waiting

  struct Pending {
    Tensor images;
    std::vector<std::vector<Box>> boxes;
    std::vector<int64_t> indices;
    std::vector<Scale> scales;
    int64_t first;
    size_t taken = 0, missing;
    std::exception_ptr error;
  };

  void end_workers() {
    {
      std::lock_guard lock(mutex);
      stop = true;
    }
    has_work.notify_all();
    for (auto& w : workers) w.join();
  }

  // Starts batches until enough are on their way. Called with the lock held.
  void plan() {
    while (pending.size() < kAhead && position < end) {
      const size_t n = std::min<int64_t>(batch, end - position);
      auto p = std::make_shared<Pending>();
      p->images = torch::empty({int64_t(n), size.height, size.width, 3},
                               torch::TensorOptions(torch::kByte).pinned_memory(pinned));
      p->boxes.resize(n), p->indices.resize(n), p->scales.resize(n);
      p->first = position, p->missing = n;
      pending.push_back(p);
      position += n;
      has_work.notify_all();
    }
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      const auto free = std::find_if(pending.begin(), pending.end(),
                                     [](const auto& p) { return p->taken < p->boxes.size(); });
      if (stop) return;
      if (free == pending.end()) {
        has_work.wait(lock);
        continue;
      }
      const auto p = *free;
      const size_t slot = p->taken++;
      lock.unlock();
      std::exception_ptr error;
      try {
        Item item = make(p->first + slot);
        check(item.image.size() == size, "an image of the batch is ", item.image.cols, "x", item.image.rows,
              ", not ", size.width, "x", size.height);
        Image row(cv::Mat(size, CV_8UC3, p->images[slot].data_ptr<uint8_t>()));
        item.image.copyTo(row);
        p->boxes[slot] = std::move(item.boxes), p->indices[slot] = item.index, p->scales[slot] = item.scale;
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !p->error) p->error = error;
      if (--p->missing == 0) has_batch.notify_all();
    }
  }

  const Make make;
  int64_t position;
  const int64_t end;
  const int batch;
  const cv::Size size;
  const bool pinned;
  std::mutex mutex;
  std::condition_variable has_work, has_batch;
  std::deque<std::shared_ptr<Pending>> pending;
  bool stop = false;
  std::vector<std::thread> workers;
};

// The order of the images in one pass over n of them: drawn from (seed, pass) alone.
inline std::vector<int64_t> permutation(int64_t n, uint64_t seed, uint64_t pass) {
  Rng rng(seed, pass, ~uint64_t{0});
  std::vector<int64_t> order(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[rng.randint(0, i)]);
  return order;
}

// Items for training: an endless stream of passes over the data, each in an order of its own; batches are
// always full and run on from one pass into the next. mosaic_at(position) says if mosaic and mixup are on
// there. An image that cannot be used is noted, and the next one takes its place.
inline Loader::Make training_items(const Dataset& data, uint64_t seed, const AugmentConfig& augment,
                                   cv::Size size, bool augmented, std::function<bool(int64_t)> mosaic_at,
                                   bool strict = false) {
  struct Orders {  // of the two latest passes: batches at a seam need both
    std::mutex mutex;
    std::map<int64_t, std::vector<int64_t>> of_pass;
  };
  const auto orders = std::make_shared<Orders>();
  const int64_t n = data.records.size();
  return [=, &data](int64_t position) {
    const int64_t pass = position / n;
    int64_t index;
    {
      std::lock_guard lock(orders->mutex);
      auto& order = orders->of_pass[pass];
      if (order.empty()) order = permutation(n, seed, pass);
      index = order[position % n];
      while (orders->of_pass.size() > 2) orders->of_pass.erase(orders->of_pass.begin());
    }
    const auto load = [&](size_t i) {
      for (int64_t tries = 0; tries < n; ++tries, i = (i + 1) % n) {
        try {
          return fit({read_image(data, i), data.records[i].boxes}, size, augment.official_quirks);
        } catch (const std::exception& e) {
          if (strict) throw;
          data.problems->add("image cannot be used", e.what());
        }
      }
      fail(data.name, ": no image can be read");
    };
    const auto has_boxes = [&](size_t i) { return !data.records[i].boxes.empty(); };
    Item item;
    item.index = index;
    Sample sample;
    if (augmented) {
      Rng rng(seed, pass, index);
      sample = make_training_sample(load, has_boxes, n, index, rng, augment, size, mosaic_at(position));
    } else {
      sample = train_transform(load(index), {}, size, augment.official_quirks);
    }
    item.image = sample.image, item.boxes = sample.boxes;
    return item;
  };
}

// Items for evaluation: record by record, letterboxed. An image that cannot be used is noted and has index
// -1.
inline Loader::Make evaluation_items(const Dataset& data, cv::Size size) {
  return [&data, size](int64_t position) {
    try {
      const auto boxed =
          letterbox(read_image(data, position), size, /*official_quirks=*/true);  // AP compares
      return Item{boxed.image, {}, position, boxed.scale};
    } catch (const std::exception& e) {
      data.problems->add("image cannot be used", e.what());
      return Item{Image(size, border_grey), {}, -1, {1, 1}};
    }
  };
}

// From pinned memory when that is a GPU: then nothing waits.
inline Targets to_device(const Targets& targets, torch::Device device) {
  const auto send = [&](const Tensor& t) {
    return (device.is_cuda() && t.numel() > 0 ? t.pin_memory() : t).to(device, /*non_blocking=*/true);
  };
  return {send(targets.boxes), send(targets.classes), targets.counts};
}

// Images of a batch [B, H, W, 3] uint8 BGR -> what the network takes: [B, 3, H, W] float on the device, in
// channels- last order. legacy: weights of YOLOX 0.1.0 want RGB in 0..1, less ImageNet's mean, by its
// deviation.
inline Tensor preprocess(const Tensor& images, torch::Device device, bool legacy) {
  const Tensor x = images.to(device, /*non_blocking=*/true).permute({0, 3, 1, 2}).to(torch::kFloat);
  if (!legacy) return x;
  const auto format = pixel_format(true);
  const auto channel = [&](const std::array<double, 3>& v) {
    return torch::tensor({v[0], v[1], v[2]}, x.options()).view({1, 3, 1, 1});
  };
  return ((x.flip(1) / 255 - channel(format.mean)) / channel(format.std))
      .contiguous(torch::MemoryFormat::ChannelsLast);
}

}  // namespace yolox
