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
  if (lines.empty()) return concat(name, ": annotation ", a.id, " of image ", a.image_id);
  return concat(label_files[a.image_id - 1], ":", lines[annotation]);
}

// Returns device and inode of each file, or its path if it does not exist.
static std::vector<std::string> identities(const std::vector<std::string>& files) {
  std::vector<std::string> ids(files.size());
  parallel_for(int64_t(files.size()), [&](int64_t i) {
    struct stat s {};
    ids[i] = ::stat(files[i].c_str(), &s) == 0 ? concat(s.st_dev, ":", s.st_ino) : files[i];
  });
  return ids;
}

void compare_splits(Sources& sources) {
  const Source &train = sources.train, &val = sources.val;
  const auto in_train = identities(train.files), in_val = identities(val.files);
  const std::unordered_set<std::string> trained(in_train.begin(), in_train.end());
  const auto shared =
      std::ranges::count_if(in_val, [&](const std::string& id) { return trained.count(id) > 0; });
  sources.same = in_train == in_val &&
                 std::ranges::equal(train.coco.categories, val.coco.categories, {}, &CocoCategory::name,
                                    &CocoCategory::name) &&
                 std::ranges::equal(train.coco.annotations, val.coco.annotations, {}, identity, identity);
  if (shared > 0 && !sources.same)
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

// Returns `wanted` images of a split or a few less: whole groups of images with an equal key. Empty if each
// group is larger than that.
static std::vector<size_t> choose_groups(const Source& all, size_t wanted,
                                         const std::function<std::string(const std::string&)>& key) {
  struct Group {
    uint64_t hash = ~uint64_t{0};  // the lowest of its file names
    std::vector<size_t> images;
  };
  std::map<std::string, Group> groups;
  for (size_t i = 0; i < all.files.size(); ++i) {
    uint64_t hash = 0;
    for (const unsigned char c : fs::path(all.files[i]).filename().string()) hash = Rng(hash, 0, c).next();
    Group& group = groups[key(all.files[i])];
    group.hash = std::min(group.hash, hash);
    group.images.push_back(i);
  }
  std::vector<const Group*> order;
  for (const auto& [_, group] : groups) order.push_back(&group);
  std::ranges::sort(order, {}, [](const Group* g) { return std::pair(g->hash, g->images[0]); });
  std::vector<size_t> chosen;
  for (const Group* group : order)
    if (chosen.size() + group->images.size() <= wanted)
      chosen.insert(chosen.end(), group->images.begin(), group->images.end());
  return chosen;
}

Source hold_out(Source& all, double fraction) {
  const size_t n = all.files.size();
  check(n >= 2, "--val-fraction: ", all.name, " has only ", n, " image");
  const size_t wanted = std::clamp<size_t>(size_t(std::llround(fraction * double(n))), 1, n - 1);
  std::unordered_set<int64_t> held;  // image ids
  const auto hold = [&](const std::vector<size_t>& images) {
    held.clear();
    for (const size_t i : images) held.insert(all.coco.images[i].id);
  };
  // True if each class keeps boxes for training. Images may be numbered by class instead of by video.
  const auto all_classes_trained = [&] {
    std::set<int64_t> trained, evaluated;
    for (const CocoAnnotation& a : all.coco.annotations)
      (held.count(a.image_id) ? evaluated : trained).insert(a.category_id);
    return std::ranges::includes(trained, evaluated);
  };
  hold(choose_groups(all, wanted, video_of));
  const bool videos = 2 * held.size() >= wanted && all_classes_trained();
  if (!videos) hold(choose_groups(all, wanted, picture_of));
  for (size_t most = wanted + 1; held.empty() && most < n; ++most) hold(choose_groups(all, most, picture_of));
  check(!held.empty(), "--val-fraction: ", all.name, " has copies of one picture only");

  const auto part = [&](bool of_held) {
    Source out;
    out.name = all.name;
    out.coco.categories = all.coco.categories;
    out.label_files = all.label_files;
    out.relative = all.relative;
    for (size_t i = 0; i < n; ++i) {
      if ((held.count(all.coco.images[i].id) > 0) != of_held) continue;
      out.coco.images.push_back(all.coco.images[i]);
      out.files.push_back(all.files[i]);
    }
    for (size_t k = 0; k < all.coco.annotations.size(); ++k) {
      if ((held.count(all.coco.annotations[k].image_id) > 0) != of_held) continue;
      out.coco.annotations.push_back(all.coco.annotations[k]);
      if (!all.lines.empty()) out.lines.push_back(all.lines[k]);
    }
    return out;
  };
  Source train = part(false), val = part(true);
  val.name = concat(all.name, ", ", val.files.size(), " images held out");
  std::set<std::string> pictures, series;
  for (const std::string& file : all.files) {
    pictures.insert(picture_of(file));
    series.insert(video_of(file));
  }
  const auto note = [&](const char* text) { val.notes.push_back(concat("note: ", val.name, ": ", text)); };
  if (videos && series.size() < pictures.size())
    note("images whose names differ only in their last number, as frames of a video, are on the same side");
  else if (2 * series.size() < pictures.size())
    note(
        "the images are numbered; if they are frames of a few videos, AP is too high: put whole videos into "
        "train and val instead");
  if (pictures.size() < n) note("copies of a picture (NAME.rf.HASH) are on the same side");
  train.problems = all.problems;
  train.problems.insert(train.problems.end(), all.coco.problems.begin(), all.coco.problems.end());
  train.notes = all.notes;
  train.skipped = all.skipped;
  train.coco.repeated_ids = all.coco.repeated_ids;
  train.coco.without_box = all.coco.without_box;
  all = std::move(train);
  return val;
}

void drop_parent_category(const std::vector<Source*>& sources) {
  const std::vector<CocoCategory> categories = sources.at(0)->coco.categories;
  for (const CocoCategory& parent : categories) {
    bool drop = categories.size() > 1;
    for (const auto& c : categories) drop = drop && (c.id == parent.id || c.supercategory == parent.name);
    for (size_t i = 0; drop && i < sources.size(); ++i)
      for (const auto& a : sources[i]->coco.annotations) drop = drop && a.category_id != parent.id;
    if (!drop) continue;
    for (Source* source : sources) {
      auto& own = source->coco.categories;
      const auto same = [&](const CocoCategory& c) { return c.id == parent.id && c.name == parent.name; };
      std::erase_if(own, same);
      source->notes.push_back(concat("note: ", source->name, ": left out the category ", parent.name,
                                     ", which has no boxes and is the supercategory of all others"));
    }
    return;
  }
}

std::string normal_name(const std::string& name) {
  // Base letter and accent (U+0300 + its distance from '0') of the characters U+00C0 to U+017F.
  static constexpr std::string_view kLetters =
      "AAAAAA CEEEEIIII NOOOOO  UUUUY  aaaaaa ceeeeiiii nooooo  uuuuy yAaAaAaCcCcCcCcDd  "
      "EeEeEeEeEeGgGgGgGgHh  "
      "IiIiIiIiI   JjKk LlLlLl    NnNnNn   OoOoOo  RrRrRrSsSsSsSsTtTt  UuUuUuUuUuUuWwYyYZzZzZz ";
  static constexpr std::string_view kAccents =
      "01238: W01280128 301238  01281  01238: W01280128 301238  01281 84466XX112277<<<<  "
      "446677XX<<226677WW22  "
      "334466XX7   22WW 11WW<<    11WW<<   4466;;  11WW<<1122WW<<WW<<  334466::;;XX222281177<< ";
  std::string out;
  bool blank = false;
  for (size_t i = 0, bytes; i < name.size(); i += bytes) {
    bytes = std::max<size_t>(1, utf8_bytes(name, i));
    const std::string c = name.substr(i, bytes);
    if (c == " " || c == "\t" || c == "\xC2\xA0" ||
        c == "\xE3\x80\x80") {  // with the no-break and the wide one
      blank = !out.empty();
      continue;
    }
    if (bytes == 2 && (c[0] == '\xCC' || (c[0] == '\xCD' && c[1] < '\xB0')) && !out.empty() && !blank) {
      const char accent = char('0' + (uint8_t(c[0]) - 0xCC) * 64 + (uint8_t(c[1]) & 63));
      size_t k = 0;
      while (k < kLetters.size() && (kLetters[k] != out.back() || kAccents[k] != accent)) ++k;
      if (k < kLetters.size()) {
        out.back() = char(0xC3 + k / 64);
        out += char(0x80 + k % 64);
        continue;
      }
    }
    if (blank) out += ' ';
    blank = false;
    out += c;
  }
  return out;
}

std::string difference_of(const std::string& a, const std::string& b) {
  const auto letters = [](const std::string& name) {
    std::string kept = lower(name);
    std::erase_if(kept, [](char c) { return c == ' ' || c == '_' || c == '-'; });
    return kept;
  };
  if (a == b) return "";
  if (letters(a) == letters(b)) return concat(quote(a), " and ", quote(b), " differ in case, blanks, - or _");
  std::vector<std::string> differ;  // the characters that are not the same
  size_t i = 0, k = 0;
  for (size_t in_a, in_b; i < a.size() && k < b.size(); i += in_a, k += in_b) {
    in_a = std::max<size_t>(1, utf8_bytes(a, i));
    in_b = std::max<size_t>(1, utf8_bytes(b, k));
    const std::string of_a = a.substr(i, in_a), of_b = b.substr(k, in_b);
    if (of_a != of_b && std::max(in_a, in_b) > 1)
      differ.push_back(concat("\"", of_a, "\" (", in_a, " bytes) and \"", of_b, "\" (", in_b, " bytes)"));
    else if (of_a != of_b)
      return "";
  }
  const bool alike = differ.size() == 1 && i == a.size() && k == b.size();
  return alike ? concat(quote(a), " and ", quote(b), " differ in a character: ", differ[0]) : "";
}

void check_units(const std::string& name, const std::vector<PlacedBox>& boxes, bool relative,
                 const std::function<std::string(size_t)>& where) {
  size_t n = 0, tiny = 0, beyond = 0, sized = 0, first_tiny = 0, first_beyond = 0;
  double right = 0, bottom = 0, odds = 0, centres = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const PlacedBox& b = boxes[i];
    if (!(b.w > 0 && b.h > 0)) continue;
    ++n;
    const double x2 = b.x + b.w, y2 = b.y + b.h, tolerance = 0.05;
    right = std::max(right, x2);
    bottom = std::max(bottom, y2);
    if (x2 <= 2 && y2 <= 2 && (b.width == 0 || std::max(b.width, b.height) > 8) && tiny++ == 0)
      first_tiny = i;
    if (b.width == 0) continue;
    ++sized;
    const bool out = x2 > (1 + tolerance) * b.width || y2 > (1 + tolerance) * b.height ||
                     b.x < -tolerance * b.width || b.y < -tolerance * b.height;
    if (out && beyond++ == 0) first_beyond = i;
    centres += (b.x + b.w / 2) / b.width + (b.y + b.h / 2) / b.height;
    // Against a box that is anywhere in its image, and is within the first 100 x 100 pixels.
    odds += std::log(std::max(1.0, b.width / 100.0) * std::max(1.0, b.height / 100.0));
  }
  const auto such_as = [&](size_t i) {
    const PlacedBox& b = boxes[i];
    return concat(", such as ", where(i), " [", b.x, ", ", b.y, ", ", b.w, ", ", b.h, "]",
                  b.width ? concat(" in ", b.width, "x", b.height) : "");
  };
  const std::string multiply = "multiply x and width by the width of the image, y and height by its height";
  if (tiny > 0 && 2 * tiny >= n)
    fail(name, ": ", tiny, " of ", n, " boxes are fractions of the image size instead of pixels",
         such_as(first_tiny), relative ? "; were they divided by the image size twice?" : "; " + multiply);
  constexpr double kOdds = 13.8;                          // a million to one
  const bool off_centre = centres < 0.8 * double(sized);  // in pixels, the sum of both is about 1
  if (odds > kOdds && off_centre && right > 50 && bottom > 50 && right <= 100.5 && bottom <= 100.5)
    fail(name, ": all ", n, " boxes are within 0..100, although the images are larger: per cent instead of ",
         "pixels", such_as(0), "; ", multiply, ", and divide by 100");
  if (beyond == 0 || 2 * beyond < sized) return;
  if (relative)
    fail(name, ": ", beyond, " of ", sized, " boxes reach beyond their images, such as ", where(first_beyond),
         "; YOLO labels are class, centre x, centre y, width and height in fractions: divide pixels by the "
         "width and height of the image, per cent by 100, and convert corners (x1, y1, x2, y2)");
  fail(name, ": ", beyond, " of ", sized, " boxes reach beyond their images", such_as(first_beyond),
       "; a box is x, y, width, height in pixels: are these corners (x1, y1, x2, y2), or pixels of another ",
       "image size?");
}

std::string read_all(const std::string& path, std::string& text, bool* missing) {
  text.clear();
  if (missing) *missing = false;
  std::error_code unknown;
  const auto status = fs::status(path, unknown);
  if (is_other(status)) return "not a regular file";
  if (is_regular_file(status) && fs::file_size(path, unknown) > kMaxTextFile && !unknown)
    return "larger than " + short_bytes(double(kMaxTextFile));
  const File file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (missing) *missing = !file && errno == ENOENT;
  if (!file) return std::strerror(errno);
  char buffer[1 << 14];
  for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) text.append(buffer, n);
  if (std::ferror(file.get())) return std::strerror(errno);
  if (text.starts_with("\xEF\xBB\xBF")) text.erase(0, 3);
  return "";
}

std::string read_text(const std::string& path) {
  std::string text;
  const std::string error = read_all(path, text);
  check(error.empty(), path, ": cannot be read (", error, "); check the path");
  check(text.find('\0') == std::string::npos, path, ": is not UTF-8 text; save the file as UTF-8");
  return text;
}

std::vector<fs::path> listing(const fs::path& folder, bool folders_only) {
  std::error_code ignored;
  std::vector<fs::path> entries;
  for (const auto& entry : fs::directory_iterator(folder, ignored))
    if (entry.path().filename().string()[0] != '.' && (!folders_only || entry.is_directory(ignored)))
      entries.push_back(entry.path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// Returns true for folders that systems create, which may contain thumbnails.
static bool is_system_folder(const std::string& name) {
  return name == "lost+found" || name == "__MACOSX" || name.find_first_of("@#$") == 0;
}

std::vector<std::string> files_under(const fs::path& folder, const std::set<std::string>& extensions,
                                     std::vector<std::string>& skipped) {
  std::vector<std::string> files;
  std::set<fs::path> entered;
  const std::function<void(const fs::path&)> enter = [&](const fs::path& place) {
    std::error_code error, ignored;
    if (!entered.insert(fs::canonical(place, ignored)).second) return;
    fs::directory_iterator it(place, error), end;
    for (; !error && it != end; it.increment(error)) {
      const std::string name = it->path().filename().string();
      if (name[0] == '.') continue;
      if (!it->is_directory(ignored)) {
        if (extensions.empty() || has_extension(name, extensions)) files.push_back(it->path().string());
      } else if (is_system_folder(name)) {
        skipped.push_back(it->path().string());
      } else {
        enter(it->path());
      }
    }
    if (!error) return;
    check(place != folder, place.string(), ": cannot be listed (", error.message(),
          "); check its permissions");
    skipped.push_back(place.string());
  };
  enter(folder);
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> labelled_images(const fs::path& folder, std::vector<std::string>& skipped) {
  std::set<std::string> extensions = kImages;
  extensions.insert(kOtherImages.begin(), kOtherImages.end());
  std::vector<std::string> files = files_under(folder, extensions, skipped);
  std::set<fs::path> stems;
  for (const fs::path file : files)
    if (has_extension(file, kImages)) stems.insert(fs::path(file).replace_extension());
  std::erase_if(files, [&](const fs::path& file) {
    return has_extension(file, kOtherImages) && stems.count(fs::path(file).replace_extension());
  });
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
  if (names.size() > 1) return 4;
  if (names[0] == split) return 0;
  const bool part = names[0].size() > 2 && split.find(names[0]) != std::string::npos;
  return part || split_name(names[0]) == split_name(split) ? 1 : 4;
}

// Returns true if two files have the same content.
static bool same_content(const std::string& a, const std::string& b) {
  std::error_code ignored;
  if (fs::equivalent(a, b, ignored)) return true;
  std::string of_a, of_b;
  return fs::file_size(a, ignored) == fs::file_size(b, ignored) && read_all(a, of_a).empty() &&
         read_all(b, of_b).empty() && of_a == of_b;
}

std::vector<std::string> find_images(const std::string& list, const std::vector<std::string>& names,
                                     const fs::path& root, const std::string& split,
                                     const std::string& remedy, std::vector<std::string>& skipped,
                                     int64_t& moved) {
  struct Place {
    std::string folder;
    std::vector<size_t> images;
    int rank = 0;
  };
  std::vector<std::string> wanted(names.size()), found(names.size());
  std::unordered_map<std::string, std::vector<size_t>> images_of;  // by file name
  for (size_t i = 0; i < names.size(); ++i) {
    std::string name = fs::path(to_forward_slashes(names[i])).lexically_normal().string();
    while (name.starts_with("../")) name.erase(0, 3);  // relative to another folder, such as annotations
    wanted[i] = "/" + name;
    images_of[wanted[i].substr(wanted[i].rfind('/') + 1)].push_back(i);
  }
  std::vector<size_t> shared(names.size());  // length of the best end
  std::vector<std::vector<std::string>> candidates(names.size());
  bool whole = false;
  for (const std::string& file : files_under(root, {}, skipped)) {
    const auto images = images_of.find(file.substr(file.rfind('/') + 1));
    if (images == images_of.end()) continue;
    for (const size_t i : images->second) {
      const size_t end = common_end(wanted[i], "/" + file);
      if (end > shared[i]) candidates[i].clear();
      shared[i] = std::max(shared[i], end);
      if (end == shared[i]) candidates[i].push_back(file);
      whole = whole || end == wanted[i].size();
    }
  }
  std::map<std::string, Place> by_folder;
  for (size_t i = 0; i < names.size(); ++i)
    for (const std::string& file : candidates[i]) {
      if (whole && shared[i] < wanted[i].size()) continue;  // a file of another image
      const std::string folder = ("/" + file).substr(0, file.size() + 1 - shared[i]);
      by_folder[folder.substr(std::min<size_t>(1, folder.size()))].images.push_back(i);
    }
  size_t most = 0;
  std::vector<Place> places;
  for (auto& [folder, place] : by_folder) {
    most = std::max(most, place.images.size());
    places.push_back({folder, place.images, rank_of(fs::path(folder).lexically_relative(root), split)});
  }
  for (Place& place : places)
    if (2 * place.images.size() < most) place.rank = 9;  // stray copies
  std::ranges::stable_sort(places, {},
                           [](const Place& p) { return std::pair(p.rank, -int64_t(p.images.size())); });
  moved = 0;
  std::vector<int> rank(names.size(), -1);  // of the folder in which an image was found
  for (const Place& place : places) {
    const auto file_of = [&](size_t i) {
      return place.folder + (place.folder.empty() ? wanted[i].substr(1 + wanted[i].size() - shared[i])
                                                  : wanted[i].substr(wanted[i].size() - shared[i]));
    };
    std::vector<size_t> known;
    for (const size_t i : place.images)
      if (rank[i] >= 0) known.push_back(i);
    // The folder has other images of the same names, or copies, unless it has only a few of them.
    const bool others = !known.empty() && 2 * known.size() >= place.images.size();
    const bool as_good = others && place.rank < 9 && 10 * place.images.size() >= 9 * most;
    for (size_t k = 0; as_good && k < known.size(); k += 1 + known.size() / 100)
      if (const size_t i = known[k]; rank[i] == place.rank && !same_content(found[i], file_of(i)))
        fail(list, ": two folders have images of its names, such as ", found[i], " and ", file_of(i), "; ",
             remedy);
    for (const size_t i : place.images) {
      if (others || rank[i] >= 0) continue;
      found[i] = file_of(i);
      rank[i] = place.rank;
      moved += shared[i] < wanted[i].size();
    }
  }
  const std::string folder = places.empty() ? root.string() : places[0].folder;
  for (size_t i = 0; i < names.size(); ++i) {
    const fs::path file = rank[i] < 0 ? fs::path(folder) / wanted[i].substr(1) : fs::path(found[i]);
    found[i] = file.lexically_normal().string();
  }
  return found;
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
  std::string shown(text.substr(0, 60));
  for (char& c : shown)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  return "\"" + shown + (text.size() > 60 ? "...\"" : "\"");
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
  // Name; marks; way out. One of the extensions among the marks must fit, and all other marks must be in the
  // file.
  static constexpr const char* kExport = "export COCO or YOLO in the tool that wrote it";
  static constexpr const char* kConvert = "convert it to COCO, for example with fiftyone";
  static constexpr const char* kFormats[][3] = {
      {"an archive", ".zip .tar .gz .tgz .bz2 .xz .7z .rar", "unpack it, and give the folder"},
      {"a file of labelme", "\"shapes\" \"imagePath\"", "convert it to COCO, for example with labelme2coco"},
      {"a file of VIA", "\"regions\" \"shape_attributes\"", "export COCO in VIA"},
      {"a file of Supervisely", "\"classTitle\" \"points\"", kExport},
      {"a file of Label Studio", "\"from_name\" \"to_name\"", kExport},
      {"a CreateML file", "\"coordinates\" \"label\"", kExport},
      {"a table of Open Images", ".csv ImageID XMin", kConvert},
      {"a CSV table", ".csv .tsv", "convert it to COCO; docs/data.md says how to add a format"},
      {"a TFRecord or Parquet file", ".tfrecord .record .parquet", kExport}};
  const std::string text = read_head(file, 1 << 20);
  if (text.starts_with("PK\3\4")) return concat(kFormats[0][0], "; ", kFormats[0][2]);
  for (const auto& [name, marks, way_out] : kFormats) {
    bool all = true, named = true, fits = false;
    for (const std::string& mark : split_list(marks, ' ')) {
      if (mark[0] != '.') all = all && text.find(mark) != std::string::npos;
      named = named && mark[0] != '.';
      fits = fits || has_extension(file, {mark});
    }
    if (!text.empty() && all && (named || fits)) return concat(name, "; ", way_out);
  }
  // KITTI: Car 0.00 0 -1.57 x1 y1 x2 y2 and seven numbers of the box in space.
  const auto words = split_list(text.substr(0, text.find('\n')), ' ');
  const bool kitti =
      has_extension(file, {".txt"}) && (words.size() == 15 || words.size() == 16) && !parse_number(words[0]);
  return kitti && parse_number(words[4]) ? concat("a label file of KITTI; ", kConvert) : "";
}

std::string split_name(const std::string& name) {
  std::string words = " " + lower(name) + " ";
  for (char& c : words)
    if (!std::isalpha(static_cast<unsigned char>(c))) c = ' ';
  const std::vector<std::pair<std::string, std::string>> known = {
      {"trainval", "trainval"}, {"train", "train"}, {"val", "val"},        {"test", "test"},
      {"training", "train"},    {"valid", "val"},   {"validation", "val"}, {"testing", "test"}};
  for (const std::string edge : {" ", ""})
    for (const auto& [word, split] : known)
      if (words.find(edge + word + edge) != std::string::npos) return split;
  return name;
}

void add_image(Source& source, const std::string& file, const std::string& label_file, const Labels& labels) {
  source.problems.insert(source.problems.end(), labels.problems.begin(), labels.problems.end());
  if (!labels.usable) return;
  const int64_t id = static_cast<int64_t>(source.files.size()) + 1;
  source.coco.images.push_back({id, file, labels.width, labels.height});
  source.files.push_back(file);
  source.label_files.push_back(label_file);
  for (CocoAnnotation a : labels.boxes) {
    a.id = static_cast<int64_t>(source.coco.annotations.size()) + 1;
    a.image_id = id;
    source.coco.annotations.push_back(a);
  }
  source.lines.insert(source.lines.end(), labels.lines.begin(), labels.lines.end());
}

void add_shared_label(Source& source, const std::string& label_file, const std::vector<std::string>& images) {
  source.problems.push_back({"label file of several images, which are left out",
                             concat(label_file, ": ", listed(images), "; keep one of them")});
}

}  // namespace yolox
