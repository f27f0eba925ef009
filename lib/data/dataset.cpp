// SPDX-License-Identifier: Apache-2.0
#include "data/dataset.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <numeric>
#include <set>
#include <unordered_map>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/threads.hpp"
#include "data/shapes.hpp"
#include "data/source.hpp"

namespace yolox {

void Problems::add(const std::string& kind, const std::string& text) {
  std::lock_guard lock(mutex);
  seen.emplace(kind, printable(text));
}

std::map<std::string, int64_t> Problems::summary() const {
  std::lock_guard lock(mutex);
  std::map<std::string, int64_t> counts;
  for (const auto& [kind, _] : seen) ++counts[kind];
  return counts;
}

std::vector<std::string> Problems::lines() const {
  std::lock_guard lock(mutex);
  std::vector<std::string> all;
  for (const auto& [kind, line] : seen) all.push_back(kind + ": " + line);
  return all;
}

void Problems::write(const std::string& path) const {
  const auto all = lines();
  if (all.empty()) return;
  std::ofstream file(path);
  for (const auto& line : all) file << line << "\n";
}

std::string file_state(const std::string& file) {
  std::error_code unknown;
  const std::string path = fs::absolute(file, unknown).string();
  struct stat s {};
  if (::stat(file.c_str(), &s) != 0 || !S_ISREG(s.st_mode)) return path + "\n";
  return concat(path, " ", s.st_size, " ", s.st_mtim.tv_sec, " ", s.st_mtim.tv_nsec, " ", s.st_ctim.tv_sec,
                " ", s.st_ctim.tv_nsec, "\n");
}

// Returns the check of one image.
static ImageCheck check_file(const std::string& file) {
  if (!is_file(file)) return {0, 0, file + " is missing"};
  try {
    DeepRange deep;
    const cv::Size size = image_size(file, &deep);
    return {size.width, size.height, "", deep};
  } catch (const std::exception& e) {
    std::string error = dynamic_cast<const ImageError*>(&e) ? e.what() : concat(file, ": ", e.what());
    std::ranges::replace(error, '\n', ' ');
    return {0, 0, error};
  }
}

ImageChecks check_images(const std::vector<std::string>& files, const std::string& keep) {
  std::vector<std::string> states(files.size());
  parallel_for(int64_t(files.size()), [&](int64_t i) { states[i] = file_state(files[i]); });
  // The number changes if this program reads other sizes or ranges from the same files than before.
  std::string all = "3\n";
  for (const std::string& state : states) all += state;
  ImageChecks result{std::vector<ImageCheck>(files.size()), content_key(all)};
  std::vector<ImageCheck>& checks = result.images;
  const std::string path = keep.empty() ? "" : concat(keep, "/images-", result.key, ".txt");
  std::ifstream kept(path);
  for (ImageCheck& c : checks) kept >> c.width >> c.height >> c.deep.low >> c.deep.high;
  if (std::string end; !(kept >> end) || end != "end") checks.assign(files.size(), {});  // cut off
  std::atomic<bool> found{false};
  parallel_for(int64_t(files.size()), [&](int64_t i) {
    if (checks[i].width > 0) return;
    checks[i] = check_file(files[i]);
    if (checks[i].width > 0) found = true;
  });
  if (!path.empty() && found) {  // ignore errors, because the run works without the stored results
    std::error_code ignored;
    fs::create_directories(keep, ignored);
    std::string text;
    for (const ImageCheck& c : checks)
      text += concat(c.width, " ", c.height, " ", c.deep.low, " ", c.deep.high, "\n");
    replace_file(path, text + "end\n");
  }
  return result;
}

ImageRegion Dataset::image_region(size_t i, const cv::Rect& part, double scale) const {
  const Record& r = records[i];
  ImageRegion found = stored ? stored(i, scale) : ImageRegion();
  if (!found.image.empty()) return found;
  return decode_region(bytes(i), r.file, part, scale, size(i));
}

size_t Dataset::replacement_index(size_t i, const ImageError& e, size_t tries) const {
  if (strict) throw e;
  problems->add("image cannot be used", e.what());
  check(tries < records.size(), name, ": no image can be read; the last error: ", e.what());
  return (i + 1) % records.size();
}

void check_strict(const Dataset& data) {
  const auto problems = data.problems->lines();
  if (!data.strict || problems.empty()) return;
  fail(data.name, " has ", problems.size(), problems.size() == 1 ? " problem" : " problems",
       "; correct the data or leave out --strict: ", listed(problems, 20));
}

Image read_image(const Dataset& data, size_t i) {
  const cv::Size known = data.size(i);
  return data.image_region(i, {{0, 0}, known.empty() ? cv::Size(1 << 20, 1 << 20) : known}, 1).image;
}

Dataset shapes_dataset(uint64_t seed, int split, int64_t count) {
  Dataset data;
  data.name = split == 0 ? "shapes (train)" : "shapes (val)";
  data.classes = shapes_classes();
  data.stored = [=](size_t i, double) { return ImageRegion{draw_shapes(seed, split, int64_t(i)).image}; };
  data.key = content_key(seed, split, count);
  data.records.resize(count);
  parallel_for(count, [&](int64_t i) {
    const auto scene = draw_shapes(seed, split, i);
    data.records[i] = {"", i + 1, scene.image.cols, scene.image.rows, scene.boxes};
  });
  for (size_t c = 0; c < data.classes.size(); ++c) {
    data.truth.categories.push_back({int64_t(c) + 1, data.classes[c]});
    data.category_ids.push_back(int64_t(c) + 1);
  }
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

// Boxes of a class in an image, by x.
using AddedBoxes = std::multimap<double, const CocoAnnotation*>;

// Returns true if a box differs from an earlier one by at most 1 % of its width and height, or by rounding.
static bool repeats(const CocoAnnotation& a, const AddedBoxes& earlier) {
  const double in_x = std::max(a.w / 100, 0.49), in_y = std::max(a.h / 100, 0.49);
  for (auto b = earlier.lower_bound(a.x - in_x); b != earlier.end() && b->first <= a.x + in_x; ++b) {
    const CocoAnnotation& other = *b->second;
    if (std::abs(a.w - other.w) <= in_x && std::max(std::abs(a.y - other.y), std::abs(a.h - other.h)) <= in_y)
      return true;
  }
  return false;
}

// Throws if the labels number the classes from 1 and the categories from 0, or the other way round.
static void check_class_ids(const Source& source, const std::unordered_map<int64_t, size_t>& class_of) {
  const auto& boxes = source.coco.annotations;
  const auto known = [&](int64_t shift) {
    return [&, shift](const CocoAnnotation& a) { return class_of.count(a.category_id + shift) > 0; };
  };
  const auto unknown = std::ranges::find_if_not(boxes, known(0));
  const bool add = unknown != boxes.end() && std::ranges::all_of(boxes, known(1));
  if (unknown == boxes.end() || (!add && !std::ranges::all_of(boxes, known(-1)))) return;
  fail(source.name, ": the classes of the labels are off by one: there is no class ", unknown->category_id,
       ", as in ", source.where(unknown - boxes.begin()), ", but each one ", add ? "above" : "below",
       "; YOLO numbers the names from 0: ", add ? "add 1 to" : "subtract 1 from", " each class");
}

// Adds the usable boxes of source.coco to their records, and the others to the problems. Makes pixels of
// fractions. Throws if the boxes are in another unit, see check_units(). record_of: index of the record by
// image id. class_of: class by category id.
static void add_boxes(Dataset& data, Source& source, const std::unordered_map<int64_t, size_t>& record_of,
                      const std::unordered_map<int64_t, size_t>& class_of) {
  CocoDataset& truth = source.coco;
  check_class_ids(source, class_of);
  std::map<std::pair<Record*, size_t>, AddedBoxes> added;  // by image and class
  std::vector<PlacedBox> placed;
  for (size_t i = 0; i < truth.annotations.size(); ++i) {
    auto& a = truth.annotations[i];
    const auto where = [&] {
      return concat(source.where(i), " [", a.x, ", ", a.y, ", ", a.w, ", ", a.h, "]");
    };
    const auto known = record_of.find(a.image_id);
    const auto cls = class_of.find(a.category_id);
    Record* record = known == record_of.end() ? nullptr : &data.records[known->second];
    if (record && source.relative) {
      a.x *= record->width;
      a.w *= record->width;
      a.y *= record->height;
      a.h *= record->height;
      a.area = a.w * a.h;
    }
    if (record) placed.push_back({a.x, a.y, a.w, a.h, record->width, record->height, i});
    if (cls == class_of.end()) {
      data.problems->add("annotation of an unknown class",
                         concat(source.where(i), " has the class id ", a.category_id));
    } else if (!record) {
      data.problems->add("annotation of an image that is skipped or not listed", source.where(i));
    } else if (a.crowd) {
      if (const auto b = clip_box(a.x, a.y, a.w, a.h, kIgnoredRegion, {record->width, record->height}))
        record->ignored.push_back(*b);
    } else if (!(a.w > 0 && a.h > 0)) {
      data.problems->add("box without area", where());
    } else if (a.w < 1 && a.h < 1 && std::max(record->width, record->height) > 8) {
      data.problems->add("box below one pixel", where());
    } else if (auto& others = added[{record, cls->second}]; repeats(a, others)) {
      data.problems->add("duplicate box", where());
    } else {
      others.emplace(a.x, &a);
      if (a.x < -1 || a.y < -1 || a.x + a.w > record->width + 1 || a.y + a.h > record->height + 1)
        data.problems->add("box exceeds the image (clipped)",
                           concat(where(), " in ", record->width, "x", record->height));
      if (const auto b = clip_box(a.x, a.y, a.w, a.h, int(cls->second), {record->width, record->height}))
        record->boxes.push_back(*b);
      else
        data.problems->add("box outside of the image",
                           concat(where(), " in ", record->width, "x", record->height));
    }
  }
  check_units(data.name, placed, source.relative,
              [&](size_t annotation) { return source.where(annotation); });
}

void check_deep_range(const std::vector<const Dataset*>& splits) {
  std::vector<DeepRange> ranges;
  std::set<std::string> patterns;  // of these files, for the shell
  std::string example, all;
  size_t images = 0;
  for (const Dataset* data : splits)
    for (const auto& [file, range] : data->deep) {
      images += range.high > 0;  // not black
      if (!range.is_narrow()) continue;
      ranges.push_back(range);
      patterns.insert(concat(" ", shell_word(fs::path(file).parent_path().string()), "/*",
                             fs::path(file).extension().string()));
      example = file;
    }
  if (2 * ranges.size() <= images) return;
  std::ranges::sort(ranges, {}, &DeepRange::low);
  const int low = ranges[ranges.size() / 20].low;
  std::ranges::sort(ranges, std::greater(), &DeepRange::high);
  const int high = ranges[ranges.size() / 20].high;
  if (!DeepRange{low, high}.is_narrow()) return;
  for (const std::string& pattern : patterns) all += pattern;
  fail(splits[0]->name, ": the images of 16 bits have only the values ", low, " to ", high,
       " of 65535, such as ", example,
       ", and would be nearly black or grey; convert a copy of all images, also those for ./demo, to 8 bits "
       "with these numbers: python3 -c \"import cv2, sys; [cv2.imwrite(f, ((i.astype('f4') - ",
       low, ") * (255 / ", std::max(1, high - low),
       ")).clip(0, 255).astype('u1')) for f in sys.argv[1:] for i in "
       "[cv2.imread(f, -1)] if i.dtype == 'uint16']\"",
       all);
}

std::string fingerprint(const Dataset& data) {
  std::string bytes = listed(data.classes, data.classes.size());
  size_t boxes = 0;
  for (const Record& r : data.records) {
    append_number(bytes, r.width);
    append_number(bytes, r.height);
    for (const Box& b : r.boxes) {
      for (const double side : {b.x1, b.y1, b.x2, b.y2}) append_number(bytes, side);
      append_number(bytes, b.cls);
    }
    boxes += r.boxes.size();
  }
  return concat(data.records.size(), " images, ", boxes, " boxes (", content_key(bytes), ")");
}

std::string normal_name(const std::string& name) {
  // An accent, and letters without and with it.
  static constexpr std::pair<const char*, const char*> kAccents[] = {
      {"\u0300", "AÀEÈIÌOÒUÙaàeèiìoòuù"},
      {"\u0301", "AÁEÉIÍOÓUÚYÝaáeéiíoóuúyýCĆcćLĹlĺNŃnńRŔrŕSŚsśZŹzź"},
      {"\u0302", "AÂEÊIÎOÔUÛaâeêiîoôuûCĈcĉGĜgĝHĤhĥJĴjĵSŜsŝWŴwŵYŶyŷ"},
      {"\u0303", "AÃNÑOÕaãnñoõIĨiĩUŨuũ"},
      {"\u0304", "AĀaāEĒeēIĪiīOŌoōUŪuū"},
      {"\u0306", "AĂaăEĔeĕGĞgğIĬiĭOŎoŏUŬuŭ"},
      {"\u0307", "CĊcċEĖeėGĠgġIİZŻzż"},
      {"\u0308", "AÄEËIÏOÖUÜaäeëiïoöuüyÿYŸ"},
      {"\u030a", "AÅaåUŮuů"},
      {"\u030b", "OŐoőUŰuű"},
      {"\u030c", "CČcčDĎdďEĚeěLĽlľNŇnňRŘrřSŠsšTŤtťZŽzž"},
      {"\u0327", "CÇcçGĢgģKĶkķLĻlļNŅnņRŖrŗSŞsşTŢtţ"},
      {"\u0328", "AĄaąEĘeęIĮiįUŲuų"}};
  std::string text = name, out;
  const auto replace_all = [&](const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
  };
  for (const char* blank : {"\u00a0", "\u3000", "\t"}) replace_all(blank, " ");
  // Most names are ASCII, and a VOC file has one for each object.
  const bool has_accents = std::ranges::any_of(text, [](char c) { return uint8_t(c) >= 0x80; });
  for (const auto& [accent, letters] : kAccents)
    for (const char* pair = letters; has_accents && *pair; pair += 3)  // one byte and two
      replace_all(pair[0] + std::string(accent), {pair + 1, 2});
  for (const std::string& word : split_list(text, ' ')) out += (out.empty() ? "" : " ") + word;
  return out;
}

void normalize_names(CocoDataset& coco, const std::string& file) {
  std::set<std::string> names;
  for (CocoCategory& c : coco.categories) {
    c.name = normal_name(printable(c.name));
    if (!names.insert(c.name).second)
      coco.problems.push_back({"classes with equal names", concat(file, ": ", c.name, " (id ", c.id, ")")});
  }
}

// Returns a name in lower case, without blanks, - and _.
static std::string letters_of(const std::string& name) {
  std::string kept = lower(name);
  std::erase_if(kept, [](char c) { return c == ' ' || c == '_' || c == '-'; });
  return kept;
}

// Returns what differs between two names that look alike: in case, blanks, - and _, or in one character. ""
// if they do not look alike.
static std::string difference_of(const std::string& a, const std::string& b) {
  if (letters_of(a) == letters_of(b))
    return concat(quote(a), " and ", quote(b), " differ in case, blanks, - or _");
  size_t i = size_t(std::ranges::mismatch(a, b).in1 - a.begin());
  while (i > 0 && (a[i] & 0xC0) == 0x80) --i;  // the first byte of the character
  const std::string of_a = a.substr(i, utf8_bytes(a, i)), of_b = b.substr(i, utf8_bytes(b, i));
  const bool alike = std::max(of_a.size(), of_b.size()) > 1 && !of_a.empty() && !of_b.empty() &&
                     a.substr(i + of_a.size()) == b.substr(i + of_b.size());
  return alike ? concat(quote(a), " and ", quote(b), " differ in a character: \"", of_a, "\" (", of_a.size(),
                        " bytes) and \"", of_b, "\" (", of_b.size(), " bytes)")
               : "";
}

Dataset make_dataset(Source source, const ImageChecks& checks) {
  Dataset data;
  data.name = source.name;
  CocoDataset& truth = source.coco;
  check(!truth.images.empty(), data.name, " lists no images");
  check(!truth.categories.empty(), data.name, " has no classes",
        truth.problems.empty() ? "" : "; the first problem: " + truth.problems[0].second);
  normalize_names(truth, data.name);
  for (const auto& [kind, line] : truth.problems) data.problems->add(kind, line);
  for (const auto& note : source.notes) data.notes.push_back(printable(note));

  std::unordered_map<int64_t, size_t> record_of, class_of;
  std::unordered_map<std::string, std::string> by_letters;  // names of classes
  for (const auto& c : truth.categories) {
    const std::string letters = letters_of(c.name);
    const auto [other, is_new] = by_letters.emplace(letters, c.name);
    if (!is_new && other->second != c.name)
      data.notes.push_back(
          concat("note: ", data.name, ": the classes ", difference_of(c.name, other->second)));
    if (letters == "dontcare" || letters.starts_with("ignore"))
      data.notes.push_back(concat("note: ", data.name, ": the class ", c.name,
                                  " is learned like the others; ",
                                  "tools/merge_coco.py --ignore makes ignored regions of it"));
    class_of[c.id] = data.classes.size();
    data.classes.push_back(c.name);
    data.category_ids.push_back(c.id);
  }
  std::vector<CocoImage> present;
  for (size_t i = 0; i < truth.images.size(); ++i) {
    CocoImage image = truth.images[i];
    const ImageCheck& c = checks.images[i];
    if (!c.error.empty()) {
      data.problems->add(is_file(source.files[i]) ? "image cannot be used" : "image missing", c.error);
      continue;
    }
    if (image.width > 0 && image.height > 0 && (image.width != c.width || image.height != c.height)) {
      data.problems->add(
          "image size differs from its annotation",
          concat(source.files[i], " is ", c.width, "x", c.height, ", annotated as ", image.width, "x",
                 image.height, image.width == c.height ? " (rotated by its EXIF tag, or swapped?)" : ""));
      continue;
    }
    image.width = c.width;
    image.height = c.height;
    record_of[image.id] = data.records.size();
    data.records.push_back({source.files[i], image.id, c.width, c.height, {}});
    present.push_back(image);
    if (c.deep.high >= 0) data.deep[source.files[i]] = c.deep;
  }
  if (present.empty())
    fail(data.name, ": none of its ", truth.images.size(),
         " images can be used; the first problem: ", data.problems->lines().front());
  truth.images = std::move(present);
  add_boxes(data, source, record_of, class_of);
  std::string used = checks.key;
  for (const Record& r : data.records) used += "\n" + r.file;
  data.key = content_key(used);
  truth.problems.clear();
  data.truth = std::move(truth);
  return data;
}

void use_classes(Dataset& data, const std::vector<std::string>& classes) {
  if (data.classes == classes) return;
  std::map<std::string, int> class_of;
  for (size_t c = classes.size(); c-- > 0;)
    class_of[normal_name(classes[c])] = int(c);  // of equal names, the first
  constexpr int kUnknown = -1;
  std::vector<int> new_class;  // by old class
  std::vector<std::string> unknown, alike;
  std::vector<int64_t> ids(classes.size(), kNoCategory);
  std::unordered_map<int64_t, int> class_of_id;
  for (size_t c = 0; c < data.classes.size(); ++c) {
    const auto found = class_of.find(normal_name(data.classes[c]));
    new_class.push_back(found == class_of.end() ? kUnknown : found->second);
    if (found == class_of.end()) {
      unknown.push_back(data.classes[c]);
      for (const std::string& name : classes)
        if (const std::string why = difference_of(data.classes[c], name); !why.empty()) alike.push_back(why);
      continue;
    }
    class_of_id[data.truth.categories[c].id] = found->second;
    if (ids[found->second] == kNoCategory) ids[found->second] = data.category_ids[c];
  }
  check(unknown.size() < data.classes.size(), data.name, " has other classes (", listed(data.classes),
        ") than ", listed(classes), "; classes are matched by name: give them the same names",
        alike.empty() ? "" : "; " + listed(alike));
  for (const std::string& why : alike)
    data.notes.push_back(concat("note: ", data.name, ": the classes ", why));
  std::vector<std::string> without;
  for (const std::string& name : classes)
    if (ids[class_of[normal_name(name)]] == kNoCategory) without.push_back(name);
  if (!without.empty())
    data.notes.push_back(concat("note: ", data.name, ": does not have the classes ", listed(without),
                                ", which are left out of AP"));
  for (const std::string& name : unknown)
    data.problems->add("class that the model does not learn",
                       concat(data.name, ": objects of the class ", name, " are left out"));

  for (Record& r : data.records) {
    for (Box& b : r.boxes) b.cls = new_class[b.cls];
    std::erase_if(r.boxes, [](const Box& b) { return b.cls == kUnknown; });
  }
  auto& annotations = data.truth.annotations;
  std::erase_if(annotations, [&](const auto& a) { return !class_of_id.count(a.category_id); });
  for (CocoAnnotation& a : annotations) a.category_id = class_of_id[a.category_id];
  data.truth.categories.clear();
  for (size_t c = 0; c < classes.size(); ++c) data.truth.categories.push_back({int64_t(c), classes[c]});
  data.classes = classes;
  data.category_ids = ids;
}

std::vector<int64_t> class_counts(const Dataset& data) {
  std::vector<int64_t> counts(data.classes.size());
  for (const Record& r : data.records)
    for (const Box& b : r.boxes) ++counts[b.cls];
  return counts;
}

std::vector<double> class_weights(const std::vector<int64_t>& counts, double power) {
  constexpr double kMost = 10;
  const double most = double(std::max<int64_t>(1, *std::max_element(counts.begin(), counts.end())));
  std::vector<double> weights;
  double sum = 0, boxes = 0;
  for (const int64_t n : counts) {
    weights.push_back(std::min(kMost, std::pow(most / double(std::max<int64_t>(1, n)), power)));
    sum += weights.back() * double(n);
    boxes += double(n);
  }
  for (double& w : weights) w *= boxes / std::max(sum, 1e-9);
  return weights;
}

std::vector<size_t> classes_by_count(const std::vector<int64_t>& counts) {
  std::vector<size_t> order(counts.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return counts[a] > counts[b]; });
  return order;
}

Dataset load_dataset(Source source, const std::string& keep) {
  const auto checks = check_images(source.files, keep);
  return make_dataset(std::move(source), checks);
}

}  // namespace yolox
