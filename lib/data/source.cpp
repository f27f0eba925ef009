// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include <sys/stat.h>

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <opencv2/core.hpp>
#include <unordered_map>
#include <unordered_set>

#include "base/flags.hpp"
#include "base/printable.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"

namespace yolox {

std::string Source::where(size_t annotation) const {
  const CocoAnnotation& a = coco.annotations[annotation];
  if (a.line == 0) return concat(name, ": annotation ", a.id, " of image ", a.image_id);
  return concat(label_files[a.image_id - 1], ":", a.line);
}

bool same_content(const std::string& a, const std::string& b) {
  std::error_code ignored;
  std::string of_a, of_b;
  return fs::file_size(a, ignored) == fs::file_size(b, ignored) && read_all(a, of_a).empty() &&
         read_all(b, of_b).empty() && of_a == of_b;
}

namespace {

// Files and boxes of a split by device and inode of the image, or by its path if it does not exist.
struct ImageBoxes {
  std::string file;
  std::multiset<std::array<double, 4>> boxes;
};

}  // namespace

static std::map<std::string, ImageBoxes> boxes_of_images(const Source& source) {
  std::vector<std::string> ids(source.files.size());
  parallel_for(int64_t(ids.size()), [&](int64_t i) {
    struct stat s {};
    const std::string& file = source.files[i];
    ids[i] = ::stat(file.c_str(), &s) == 0 ? concat(s.st_dev, ":", s.st_ino) : file;
  });
  std::map<std::string, ImageBoxes> images;
  std::unordered_map<int64_t, ImageBoxes*> image_of;
  for (size_t i = 0; i < ids.size(); ++i) {
    image_of[source.coco.images[i].id] = &images[ids[i]];
    images[ids[i]].file = source.files[i];
  }
  for (const CocoAnnotation& a : source.coco.annotations)
    if (const auto image = image_of.find(a.image_id); image != image_of.end())
      image->second->boxes.insert({a.x, a.y, a.w, a.h});
  return images;
}

void compare_splits(Sources& sources) {
  const Source &train = sources.train, &val = sources.val;
  const auto trained = boxes_of_images(train), evaluated = boxes_of_images(val);
  const auto id_of = [](const auto& image) { return image.first; };
  sources.same = std::ranges::equal(trained, evaluated, {}, id_of, id_of) &&
                 std::ranges::equal(train.coco.categories, val.coco.categories, {}, &CocoCategory::name,
                                    &CocoCategory::name) &&
                 std::ranges::equal(train.coco.annotations, val.coco.annotations, {}, identity, identity);
  if (sources.same) return;
  // Copies of images have their names and sizes; the content of about a hundred is compared.
  const auto copy_key = [](const std::string& file) {
    std::error_code missing;
    return concat(file.substr(file.rfind('/') + 1), "/", fs::file_size(file, missing));
  };
  std::unordered_map<std::string, std::string> copied;
  for (const auto& [_, image] : trained) copied.emplace(copy_key(image.file), image.file);
  std::vector<std::string> differ;  // images of both splits with other boxes
  std::vector<std::pair<std::string, std::string>> copies;
  size_t shared = 0;
  for (const auto& [id, image] : evaluated) {
    if (const auto found = trained.find(id); found != trained.end()) {
      ++shared;
      if (!found->second.boxes.empty() && !image.boxes.empty() && found->second.boxes != image.boxes)
        differ.push_back(image.file);
    } else if (const auto copy = copied.find(copy_key(image.file)); copy != copied.end()) {
      copies.emplace_back(copy->second, image.file);
    }
  }
  check(2 * differ.size() <= shared || 10 * differ.size() < val.files.size(), val.name, ": ", differ.size(),
        " of ", val.files.size(), " images are images of ", train.name, " with other boxes, such as ",
        listed(differ, 1), "; is a folder of images missing, or has it another name?");
  size_t compared = 0, same = 0;
  for (size_t i = 0; i < copies.size(); i += 1 + copies.size() / 100, ++compared)
    same += same_content(copies[i].first, copies[i].second);
  if (compared > 0) shared += copies.size() * same / compared;
  if (shared > 0)
    sources.val.notes.push_back(
        concat("warning: ", val.name, ": ", shared, " of ", val.files.size(),
               " images are training images, too, so that AP is too high for other images"));
}

// Returns the name of the picture that a file is a copy of: "a_jpg.rf.HASH.jpg" -> "a_jpg".
static std::string picture_of(const std::string& file) {
  const std::string stem = fs::path(file).stem().string();
  return stem.substr(0, stem.find(".rf."));
}

// Returns folder and name of a video whose frame a file may be: "x/clip_000012.jpg" -> "x/clip_".
static std::string video_of(const std::string& file) {
  std::string name = picture_of(file);
  for (const std::string end : {"_jpg", "_jpeg", "_png"})
    if (name.ends_with(end)) name.erase(name.size() - end.size());
  return (fs::path(file).parent_path() / name.substr(0, name.find_last_not_of("0123456789") + 1)).string();
}

// Returns the ids of `wanted` images of a split or a few less: whole groups of images with an equal key, in
// the order of the lowest hash of their file names. If each group is larger, returns the smallest one.
static std::unordered_set<int64_t> choose_groups(const Source& all, size_t wanted,
                                                 const std::function<std::string(const std::string&)>& key) {
  using Group = std::pair<uint64_t, std::vector<int64_t>>;  // hash, images
  std::map<std::string, Group> groups;
  for (size_t i = 0; i < all.files.size(); ++i) {
    uint64_t hash = 0;
    for (const unsigned char c : fs::path(all.files[i]).filename().string()) hash = Rng(hash, 0, c).next();
    Group& group = groups.emplace(key(all.files[i]), Group(hash, {})).first->second;
    group.first = std::min(group.first, hash);
    group.second.push_back(all.coco.images[i].id);
  }
  std::vector<Group> order;
  for (const auto& [_, group] : groups) order.push_back(group);
  std::ranges::stable_sort(order, {}, &Group::first);
  std::unordered_set<int64_t> chosen;
  for (const auto& [_, images] : order)
    if (chosen.size() + images.size() <= wanted) chosen.insert(images.begin(), images.end());
  if (!chosen.empty()) return chosen;
  const auto least = std::ranges::min_element(order, {}, [](const Group& g) { return g.second.size(); });
  return {least->second.begin(), least->second.end()};
}

Source hold_out(Source& all, double fraction) {
  const size_t n = all.files.size();
  check(n >= 2, "--val-fraction: ", all.name, " has only ", n, " image");
  const size_t wanted = std::clamp<size_t>(size_t(std::llround(fraction * double(n))), 1, n - 1);
  auto held = choose_groups(all, wanted, video_of);
  // Images may be numbered by class instead of by video: then a class would have no boxes for training.
  std::set<int64_t> trained, evaluated;
  for (const CocoAnnotation& a : all.coco.annotations)
    (held.count(a.image_id) ? evaluated : trained).insert(a.category_id);
  const bool videos =
      held.size() <= wanted && 2 * held.size() >= wanted && std::ranges::includes(trained, evaluated);
  if (!videos) held = choose_groups(all, wanted, picture_of);
  check(held.size() < n, "--val-fraction: ", all.name, " has copies of one picture only");

  Source val = all;
  val.name += concat(", ", held.size(), " images held out");
  val.notes.clear();
  val.coco.problems.clear();
  std::set<std::string> pictures, series;
  for (const std::string& file : all.files) {
    pictures.insert(picture_of(file));
    series.insert(video_of(file));
  }
  if (pictures.size() < n || (videos && series.size() < pictures.size()))
    val.notes.push_back(concat(
        "note: ", val.name, ": copies of a picture (NAME.rf.HASH)",
        videos ? ", and images whose names differ only in their last number, as frames of a video," : "",
        " are on the same side"));
  if (!videos && 2 * series.size() < pictures.size())
    val.notes.push_back(concat("note: ", val.name,
                               ": the images are numbered; put whole videos into train or val, ",
                               "because AP is too high if both have frames of one"));

  for (Source* part : {&all, &val}) {
    const auto elsewhere = [&](int64_t image) { return (held.count(image) > 0) != (part == &val); };
    size_t i = 0;
    std::erase_if(part->files, [&](const auto&) { return elsewhere(part->coco.images[i++].id); });
    std::erase_if(part->coco.images, [&](const CocoImage& image) { return elsewhere(image.id); });
    std::erase_if(part->coco.annotations, [&](const CocoAnnotation& a) { return elsewhere(a.image_id); });
  }
  return val;
}

void drop_parent_category(const std::vector<Source*>& sources) {
  const std::vector<CocoCategory> categories = sources.at(0)->coco.categories;
  for (const CocoCategory& parent : categories) {
    bool drop = categories.size() > 1;
    for (const auto& c : categories) drop = drop && (c.id == parent.id || c.supercategory == parent.name);
    for (const Source* source : sources)
      drop = drop && !std::ranges::count(source->coco.annotations, parent.id, &CocoAnnotation::category_id);
    if (!drop) continue;
    for (Source* source : sources) {
      std::erase_if(source->coco.categories,
                    [&](const CocoCategory& c) { return c.id == parent.id && c.name == parent.name; });
      source->notes.push_back(concat("note: ", source->name, ": left out the category ", parent.name,
                                     ", which has no boxes and is the supercategory of all others"));
    }
    return;
  }
}

void check_units(const std::string& name, const std::vector<PlacedBox>& boxes, bool relative,
                 const std::function<std::string(size_t)>& where) {
  const auto those = [&](const auto& wanted) {
    std::vector<size_t> found;
    for (size_t i = 0; i < boxes.size(); ++i)
      if (wanted(boxes[i])) found.push_back(i);
    return found;
  };
  const auto refuse_if = [&](bool wrong, const std::vector<size_t>& some, const std::string& what,
                             const std::string& remedy) {
    if (!wrong || some.empty()) return;
    const PlacedBox& b = boxes[some[0]];
    fail(name, ": ", some.size(), " of ", boxes.size(), " boxes ", what, ", such as ", where(b.index), " [",
         b.x, ", ", b.y, ", ", b.w, ", ", b.h, "]", b.width ? concat(" in ", b.width, "x", b.height) : "",
         "; ", remedy);
  };
  const auto has_area = [](const PlacedBox& b) { return b.w > 0 && b.h > 0; };
  const auto all = those(has_area),
             sized = those([&](const PlacedBox&b) { return has_area(b) && b.width > 0; });
  refuse_if(boxes.size() >= 2 * all.size(), those([](const PlacedBox& b) { return b.w < 0 || b.h < 0; }),
            "end before they begin", "are xmax and ymax width and height?");
  const std::string multiply = "multiply x and width by the width of the image, y and height by its height";
  const auto tiny = those([&](const PlacedBox& b) {
    return has_area(b) && std::max(b.x + b.w, b.y + b.h) <= 2 &&
           (b.width == 0 || std::max(b.width, b.height) > 8);
  });
  refuse_if(2 * tiny.size() >= all.size(), tiny, "are fractions of the image size instead of pixels",
            relative ? "were they divided by the image size twice?" : multiply);
  // Corners: x2 is above x1 in each box and grows with it, while a width does not grow with a position.
  const auto grows = [&](bool across) {
    cv::Vec<double, 5> sums;
    for (const size_t i : sized) {
      const PlacedBox& b = boxes[i];
      const double size = across ? b.width : b.height, e = (across ? b.w : b.h) / size,
                   p = (across ? b.x : b.y) / size + (relative ? e / 2 : 0);
      if (e <= p) return false;
      sums += cv::Vec<double, 5>(p, e, p * e, p * p, e * e);
    }
    const auto [p, e, pe, pp, ee] = (sums / double(sized.size())).val;
    return pe - p * e > 0.5 * std::sqrt((pp - p * p) * (ee - e * e));
  };
  refuse_if(sized.size() >= 10 && grows(true) && grows(false), sized, "are corners (x1, y1, x2, y2)",
            relative ? "YOLO labels are centre, width and height" : "subtract x1 from x2, and y1 from y2");
  double right = 0, bottom = 0, centres = 0;
  for (const size_t i : all) {
    const PlacedBox& b = boxes[i];
    right = std::max(right, b.x + b.w);
    bottom = std::max(bottom, b.y + b.h);
    if (b.width > 0) centres += (b.x + b.w / 2) / b.width + (b.y + b.h / 2) / b.height;
  }
  for (const auto& [top, unit] : {std::pair(100.0, "per cent"), {1000.0, "thousandths"}}) {
    double odds = 0;  // against boxes that are anywhere in their images, and are within the first pixels
    for (const size_t i : sized)
      odds += std::log(std::max(1.0, boxes[i].width / top) * std::max(1.0, boxes[i].height / top));
    const bool within =
        !relative && std::min(right, bottom) > 0.7 * top && std::max(right, bottom) <= 1.005 * top;
    // A million to one; in pixels, the sum of the centres is about 1 for each box.
    refuse_if(within && odds > 13.8 && centres < 0.8 * double(sized.size()), all,
              concat("are within 0..", top, ", although the images are larger: ", unit, " instead of pixels"),
              concat(multiply, ", and divide by ", top));
  }
  // Returns the boxes that reach beyond their images, by more than a tolerance in sizes of the image. shift:
  // of x and y, in sizes of the box. in_x, in_y: the directions.
  const auto beyond = [&](double tolerance, double shift, bool in_x = true, bool in_y = true) {
    return those([=](const PlacedBox& b) {
      const double x = b.x + shift * b.w, y = b.y + shift * b.h, dx = tolerance * b.width,
                   dy = tolerance * b.height;
      return b.w > 0 && b.h > 0 && b.width > 0 &&
             ((in_x && (x < -dx || x + b.w > b.width + dx)) ||
              (in_y && (y < -dy || y + b.h > b.height + dy)));
    });
  };
  const auto some = beyond(0.02, 0), most = beyond(relative && sized.size() >= 5 ? 0.02 : 0.05, 0);
  // In both directions: people whose boxes go on below the image reach beyond it in one.
  const size_t both = std::min(beyond(0.02, 0, true, false).size(), beyond(0.02, 0, false, true).size());
  refuse_if(some.size() >= 5 && 20 * some.size() >= sized.size() && 10 * both >= some.size() &&
                10 * beyond(0.02, relative ? 0.5 : -0.5).size() <= some.size(),
            some, "reach beyond their images",
            relative ? "do the labels begin with the top left corner? Add half of width and height to it"
                     : "do the boxes begin with their centre? Subtract half of width and height from it");
  refuse_if(2 * most.size() >= sized.size(), most, "reach beyond their images",
            relative ? "YOLO labels are centre, width and height in fractions: no pixels, per cent or corners"
                     : "are these corners (x1, y1, x2, y2), or pixels of another image size?");
}

std::string read_all(const std::string& path, std::string& text, bool* missing, size_t limit) {
  text.clear();
  if (missing) *missing = false;
  std::error_code unknown;
  const auto status = fs::status(path, unknown);
  if (is_other(status)) return "not a regular file";
  size_t size = is_regular_file(status) ? fs::file_size(path, unknown) : 0;
  if (unknown) size = 0;
  if (size > limit) return "larger than " + short_bytes(double(limit));
  const File file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (missing) *missing = !file && errno == ENOENT;
  if (!file) return std::strerror(errno);
  text.reserve(size);
  char buffer[1 << 14];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) text.append(buffer, n);
  if (std::ferror(file.get())) return std::strerror(errno);
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return "";
}

std::string read_text(const std::string& path, size_t limit) {
  std::string text;
  const std::string error = read_all(path, text, nullptr, limit);
  check(error.empty(), path, ": cannot be read (", error, "); check the path");
  check(text.find('\0') == std::string::npos, path, ": is not UTF-8 text; save the file as UTF-8");
  return text;
}

// Words that name a split, and its name. Longer words come before those that they contain.
static const std::vector<std::pair<std::string, std::string>> kSplitWords = {
    {"trainval", "trainval"}, {"train", "train"}, {"val", "val"},        {"test", "test"},
    {"training", "train"},    {"valid", "val"},   {"validation", "val"}, {"testing", "test"}};

std::string split_of(const fs::path& path) {
  std::string found;
  for (const fs::path& part : path) {
    std::string letters = lower(part.string());
    std::erase_if(letters, [](char c) { return !std::isalpha(static_cast<unsigned char>(c)); });
    for (const auto& [word, split] : kSplitWords)
      if (letters == word) found = split;
    if (letters == "dev" || letters == "eval" || letters == "validate") found = "val";
  }
  return found;
}

std::vector<fs::path> listing(const fs::path& folder, bool folders_only) {
  std::error_code error, ignored;
  std::vector<fs::path> entries;
  fs::directory_iterator all(folder, error);
  const std::string name = lower(folder.filename().string());
  const bool is_part = !split_of(folder.filename()).empty() || name == "annotations" || name == "labels" ||
                       name == "images" || name == "jpegimages" || name == "main";
  check(error != std::errc::permission_denied || !is_part, folder.string(), ": cannot be listed (",
        error.message(), "); check its permissions");
  for (const auto& entry : all)
    if (entry.path().filename().string()[0] != '.' && (!folders_only || entry.is_directory(ignored)))
      entries.push_back(entry.path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

static const std::set<std::string> kSystemFolders = {"lost+found", "__MACOSX",     "@eaDir",  "#recycle",
                                                     "#snapshot",  "$RECYCLE.BIN", "@Recycle"};

std::vector<std::string> files_under(const fs::path& folder, std::vector<std::string>& notes) {
  std::vector<std::string> files, skipped;
  std::set<fs::path> entered;
  const std::function<void(const fs::path&)> enter = [&](const fs::path& place) {
    std::error_code error, ignored;
    if (!entered.insert(fs::canonical(place, ignored)).second) return;
    fs::directory_iterator it(place, error), end;
    for (; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      if (name[0] == '.') continue;
      if (!it->is_directory(ignored))
        files.push_back(it->path().string());
      else if (kSystemFolders.count(name))
        skipped.push_back(it->path().string());
      else
        enter(it->path());
    }
    if (!error) return;
    check(place != folder, place.string(), ": cannot be listed (", error.message(),
          "); check its permissions");
    skipped.push_back(place.string());
  };
  enter(folder);
  if (!skipped.empty())
    notes.push_back(concat("note: ", folder.string(),
                           ": left out folders of the system, or unreadable: ", listed(skipped, 20)));
  std::sort(files.begin(), files.end());
  return files;
}

// Returns the length of the longest common end of two paths that begins with a slash.
static size_t common_end(std::string_view a, std::string_view b) {
  size_t length = 0;
  for (size_t n = 1; n <= std::min(a.size(), b.size()) && a[a.size() - n] == b[b.size() - n]; ++n)
    if (a[a.size() - n] == '/') length = n;
  return length;
}

// Returns how well a folder suits a split, 0 for the best. place: relative to the folder of the data set.
static int rank_of(const fs::path& place, const std::string& split) {
  std::vector<std::string> names;
  for (const fs::path& part : place)
    if (part != "images" && part != "." && part != "..") names.push_back(part.string());
  if (names.empty()) return place == "images" ? 2 : 3;
  if (names.size() == 1 && names[0] == split) return 0;
  const auto suits = [&](const std::string& name) {
    return (name.size() > 2 && split.find(name) != std::string::npos) ||
           split_name(name) == split_name(split);
  };
  return std::ranges::any_of(names, suits) ? 1 : 4;
}

// Returns true for two different splits.
static bool other_split(const std::string& a, const std::string& b) {
  return a != b && !a.empty() && !b.empty() && a != "trainval" && b != "trainval";
}

std::vector<std::string> find_images(Source& source, const std::string& list,
                                     const std::vector<std::string>& names, const fs::path& root,
                                     const std::string& split, const std::string& remedy) {
  struct Image {
    std::string name;                  // with a slash in front
    size_t end = 0;                    // length of the longest end that the name and a file share
    std::vector<std::string> folders;  // in front of this end, with a slash in front
    std::string file;                  // the one that is taken
    int rank = 0;                      // of its folder
  };
  std::vector<Image> images;
  std::unordered_map<std::string, std::vector<size_t>> images_of;  // by file name
  bool whole = false;                                              // true if a file has the whole name
  for (const std::string& given : names) {
    std::string name = fs::path(to_forward_slashes(given)).lexically_normal().string();
    while (name.starts_with("../")) name.erase(0, 3);  // relative to another folder, such as annotations
    if (!fs::path(name).is_absolute() || !is_file(name))
      images_of[name.substr(name.rfind('/') + 1)].push_back(images.size());
    images.emplace_back().name = "/" + name;
  }
  const auto split_in = [](const fs::path& file) { return split_of(file.parent_path()); };
  for (const std::string& file : files_under(root, source.notes)) {
    const auto of_name = images_of.find(file.substr(file.rfind('/') + 1));
    if (of_name == images_of.end()) continue;
    for (const size_t i : of_name->second) {
      Image& image = images[i];
      const size_t end = common_end(image.name, "/" + file);
      if (end > image.end) image.folders.clear();
      image.end = std::max(end, image.end);
      if (end < image.end ||
          other_split(split_in(image.name.substr(1)), split_in(fs::path(file).lexically_relative(root))))
        continue;
      image.folders.push_back(("/" + file).substr(0, 1 + file.size() - end));
      whole = whole || end == image.name.size();
    }
  }
  // A file that shares only its name is that of another image if other images of its folder were found.
  const auto name_alone = [](const Image& i) { return i.end == i.name.size() - i.name.rfind('/'); };
  const auto folder_of = [](const Image& i) { return i.name.substr(0, i.name.rfind('/')); };
  std::set<std::string> found_folders;
  for (const Image& image : images)
    if (!image.folders.empty() && !name_alone(image)) found_folders.insert(folder_of(image));
  std::map<std::string, std::vector<Image*>> by_folder;
  for (Image& image : images)
    for (const std::string& folder : image.folders)
      if (whole ? image.end == image.name.size()
                : !name_alone(image) || !found_folders.count(folder_of(image)))
        by_folder[folder].push_back(&image);
  const auto place_of = [&](const std::string& folder) {
    return fs::path(folder.substr(!folder.empty())).lexically_relative(root);
  };
  // Beside a folder of this split, one of another split has other images, even if it has more of the names.
  if (std::ranges::any_of(by_folder, [&](const auto& e) { return rank_of(place_of(e.first), split) <= 1; }))
    std::erase_if(by_folder,
                  [&](const auto& e) { return other_split(split_of(place_of(e.first)), split_of(split)); });
  size_t most = 0, moved = 0;
  for (const auto& [_, found] : by_folder) most = std::max(most, found.size());
  std::vector<std::tuple<int, int64_t, std::string>> order;  // rank, minus the number of images, folder
  for (const auto& [folder, found] : by_folder)
    order.emplace_back(2 * found.size() < most ? 9 : rank_of(place_of(folder), split), -int64_t(found.size()),
                       folder);
  std::ranges::sort(order);
  std::string example;
  for (const auto& [rank, _, folder] : order) {
    const std::vector<Image*>& found = by_folder[folder];
    const auto path_of = [&, &folder = folder](const Image* image) {
      return (folder + image->name.substr(image->name.size() - image->end)).substr(1);
    };
    std::vector<Image*> known;
    std::ranges::copy_if(found, std::back_inserter(known), [](auto* image) { return !image->file.empty(); });
    // The folder has other images of the same names, or copies, unless it has only a few of them.
    const bool others = !known.empty() && 2 * known.size() >= found.size();
    const bool as_good = others && rank < 9 && 4 * found.size() >= 3 * most;
    for (size_t k = 0; as_good && k < known.size(); k += 1 + known.size() / 100)
      check(known[k]->rank != rank || same_content(known[k]->file, path_of(known[k])), list,
            ": two folders have images of its names, such as ", known[k]->file, " and ", path_of(known[k]),
            "; ", remedy);
    for (Image* image : found) {
      if (others || !image->file.empty()) continue;
      image->file = path_of(image);
      image->rank = rank;
      if (image->end < image->name.size() && moved++ == 0)
        example = concat(image->file, " for ", names[image - images.data()]);
    }
  }
  if (moved > 0)
    source.notes.push_back(concat("note: ", list, ": ", moved, " of ", names.size(),
                                  " images were found under ", root.string(),
                                  " by the end of their names, such as ", example));
  std::vector<std::string> files;
  const fs::path expected = order.empty() ? root : fs::path(std::get<2>(order[0]).substr(1));
  for (const Image& image : images) {
    const fs::path file = image.file.empty() ? expected / image.name.substr(1) : fs::path(image.file);
    files.push_back(file.lexically_normal().string());
  }
  return files;
}

std::string to_forward_slashes(std::string path) {
  std::replace(path.begin(), path.end(), '\\', '/');
  return path;
}

std::string_view trimmed(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
}

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) return {};
  return value;
}

std::string quote(std::string_view text) {
  const std::string shown = cut_text(std::string(text), 60);
  return concat("\"", printable(shown), shown.size() < text.size() ? "...\"" : "\"");
}

std::string read_head(const fs::path& file, size_t bytes) {
  std::string text(bytes, '\0');
  if (!is_file(file)) return "";
  std::ifstream stream(file, std::ios::binary);
  stream.read(text.data(), std::streamsize(bytes));
  text.resize(size_t(stream.gcount()));
  return text;
}

std::string other_format(const fs::path& file) {
  struct Format {
    const char *name, *extensions;   // extensions: "": any
    std::vector<std::string> marks;  // which are all in the file
    const char* way_out;
  };
  static constexpr const char* kExport = "export COCO or YOLO in the tool that wrote it";
  static constexpr const char* kConvert = "convert it to COCO, for example with fiftyone";
  static const Format kFormats[] = {
      {"an archive", ".zip .tar .gz .tgz .bz2 .xz .7z .rar", {}, "unpack it, and give the folder"},
      {"a pointer of Git LFS", "", {"https://git-lfs.github.com/spec"}, "fetch the files: git lfs pull"},
      {"a file of labelme", "", {"\"shapes\"", "\"imagePath\""}, "convert it, for example with labelme2coco"},
      {"a file of VIA", "", {"\"regions\"", "\"shape_attributes\""}, "export COCO in VIA"},
      {"a file of Supervisely", "", {"\"classTitle\"", "\"points\""}, kExport},
      {"a file of Label Studio", "", {"\"from_name\"", "\"to_name\""}, kExport},
      {"a file of Label Studio", "", {"rectanglelabels", "original_width"}, kExport},
      {"a file of CVAT", ".xml", {"<annotations>", "<image "}, kExport},
      {"a file of Datumaro", "", {"\"items\"", "\"categories\"", "\"annotations\""}, kExport},
      {"a file of V7 Darwin", "", {"\"bounding_box\"", "\"slots\""}, kExport},
      {"a CreateML file", "", {"\"coordinates\"", "\"label\""}, kExport},
      {"a table of Open Images", ".csv", {"ImageID", "XMin"}, kConvert},
      {"a CSV table", ".csv .tsv", {}, "convert it to COCO; docs/data.md says how to add a format"},
      {"a TFRecord or Parquet file", ".tfrecord .record .parquet", {}, kExport}};
  const std::string text = read_head(file, 1 << 20);
  if (text.empty()) return "";
  if (text.starts_with("PK\3\4")) return concat(kFormats[0].name, "; ", kFormats[0].way_out);
  for (const Format& format : kFormats) {
    const auto extensions = split_list(format.extensions, ' ');
    if ((extensions.empty() || has_extension(file, {extensions.begin(), extensions.end()})) &&
        std::ranges::all_of(format.marks, [&](const auto& m) { return text.find(m) != std::string::npos; }))
      return concat(format.name, "; ", format.way_out);
  }
  // KITTI: Car 0.00 0 -1.57 x1 y1 x2 y2 and seven numbers of the box in space.
  const auto words = split_list(text.substr(0, text.find('\n')), ' ');
  const bool kitti = has_extension(file, {".txt"}) && (words.size() == 15 || words.size() == 16) &&
                     !parse_number(words[0]) && parse_number(words[4]);
  return kitti ? concat("a label file of KITTI; ", kConvert) : "";
}

std::string split_name(const std::string& name) {
  std::string words = " " + lower(name) + " ";
  for (char& c : words)
    if (!std::isalpha(static_cast<unsigned char>(c))) c = ' ';
  for (const std::string edge : {" ", ""})
    for (const auto& [word, split] : kSplitWords)
      if (words.find(edge + word + edge) != std::string::npos) return split;
  return name;
}

void add_image(Source& source, const std::string& file, const std::string& label_file, const Labels& labels) {
  CocoDataset& coco = source.coco;
  coco.problems.insert(coco.problems.end(), labels.problems.begin(), labels.problems.end());
  if (!labels.usable) return;
  const auto id = static_cast<int64_t>(source.files.size()) + 1;
  coco.images.push_back({id, file, labels.width, labels.height});
  source.files.push_back(file);
  source.label_files.push_back(label_file);
  for (CocoAnnotation a : labels.boxes) {
    a.id = static_cast<int64_t>(coco.annotations.size()) + 1;
    a.image_id = id;
    coco.annotations.push_back(a);
  }
}

void add_shared_label(Source& source, const std::string& label_file, const std::vector<std::string>& images) {
  source.coco.problems.push_back({"label file of several images, which are left out",
                                  concat(label_file, ": ", listed(images), "; keep one of them")});
}

}  // namespace yolox
