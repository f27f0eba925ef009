// SPDX-License-Identifier: Apache-2.0
#include "data/source.hpp"

#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <unordered_set>

#include "base/random.hpp"
#include "base/text.hpp"

namespace yolox {

std::string Source::where(size_t annotation) const {
  const CocoAnnotation& a = coco.annotations[annotation];
  if (lines.empty()) return concat(name, ": annotation ", a.id, " of image ", a.image_id);
  return concat(label_files[a.image_id - 1], ":", lines[annotation]);
}

void compare_splits(Sources& sources) {
  const Source &train = sources.train, &val = sources.val;
  const std::unordered_set<std::string> trained(train.files.begin(), train.files.end());
  const auto shared =
      std::ranges::count_if(val.files, [&](const std::string& file) { return trained.count(file) > 0; });
  sources.same = train.files == val.files &&
                 std::ranges::equal(train.coco.categories, val.coco.categories, {}, &CocoCategory::name,
                                    &CocoCategory::name) &&
                 std::ranges::equal(train.coco.annotations, val.coco.annotations, {}, identity, identity);
  if (shared > 0 && !sources.same)
    sources.val.notes.push_back(
        concat("warning: ", val.name, ": ", shared, " of ", val.files.size(),
               " images are training images, too, so that AP is too high for other images"));
}

Source hold_out(Source& all, double fraction) {
  const size_t n = all.files.size();
  check(n >= 2, "--val-fraction: ", all.name, " has only ", n, " image");
  std::vector<std::pair<uint64_t, size_t>> order;
  for (size_t i = 0; i < n; ++i) {
    uint64_t hash = 0;
    for (const unsigned char c : fs::path(all.files[i]).filename().string()) hash = Rng(hash, 0, c).next();
    order.emplace_back(hash, i);
  }
  std::sort(order.begin(), order.end());
  const size_t wanted = size_t(std::llround(fraction * double(n)));
  std::unordered_set<int64_t> held;  // image ids
  for (size_t k = 0; k < std::clamp<size_t>(wanted, 1, n - 1); ++k)
    held.insert(all.coco.images[order[k].second].id);

  Source train = all, val;
  train.coco.images.clear();
  train.coco.annotations.clear();
  train.files.clear();
  train.lines.clear();
  val.coco.categories = all.coco.categories;
  val.label_files = all.label_files;
  val.relative = all.relative;
  const auto part_of = [&](int64_t image_id) -> Source& { return held.count(image_id) ? val : train; };
  for (size_t i = 0; i < n; ++i) {
    const CocoImage& image = all.coco.images[i];
    part_of(image.id).coco.images.push_back(image);
    part_of(image.id).files.push_back(all.files[i]);
  }
  for (size_t k = 0; k < all.coco.annotations.size(); ++k) {
    const CocoAnnotation& a = all.coco.annotations[k];
    part_of(a.image_id).coco.annotations.push_back(a);
    if (!all.lines.empty()) part_of(a.image_id).lines.push_back(all.lines[k]);
  }
  val.name = concat(all.name, ", ", val.files.size(), " images held out");
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

std::vector<std::string> files_under(const fs::path& folder, const std::set<std::string>& extensions) {
  std::vector<std::string> files;
  std::error_code error, ignored;
  std::set<fs::path> entered = {fs::canonical(folder, ignored)};
  fs::path last = folder;  // which cannot be listed if there is an error
  fs::recursive_directory_iterator it(folder, fs::directory_options::follow_directory_symlink, error), end;
  for (; !error && it != end; it.increment(error)) {
    const fs::path& path = last = it->path();
    const bool hidden = path.filename().string()[0] == '.';
    if (it->is_directory(ignored)) {
      if (hidden || !entered.insert(fs::canonical(path, ignored)).second) it.disable_recursion_pending();
    } else if (!hidden && has_extension(path, extensions)) {
      files.push_back(path.string());
    }
  }
  check(!error, last.string(), ": cannot be listed (", error.message(), "); check its permissions");
  std::sort(files.begin(), files.end());
  return files;
}

std::vector<std::string> labelled_images(const fs::path& folder) {
  std::set<std::string> extensions = kImages;
  extensions.insert(kOtherImages.begin(), kOtherImages.end());
  std::vector<std::string> files = files_under(folder, extensions);
  std::set<fs::path> stems;
  for (const fs::path file : files)
    if (has_extension(file, kImages)) stems.insert(fs::path(file).replace_extension());
  const auto is_other = [&](const fs::path& file) {
    return has_extension(file, kOtherImages) && stems.count(fs::path(file).replace_extension());
  };
  std::erase_if(files, is_other);
  return files;
}

std::map<std::string, std::string> names_of(const std::string& folder,
                                            const std::vector<std::string>& files) {
  std::map<std::string, std::string> names;
  for (const std::string& file : files)
    names.emplace(file.substr(folder.size() + 1, file.rfind('.') - folder.size() - 1), file);
  return names;
}

FilesByEnd::FilesByEnd(const fs::path& folder, const std::set<std::string>& extensions) {
  for (const std::string& file : files_under(folder, extensions))
    named[fs::path(file).filename().string()].push_back(file);
}

std::string FilesByEnd::find(const std::string& path) const {
  const std::string wanted = "/" + to_forward_slashes(path);
  const auto same = named.find(wanted.substr(wanted.rfind('/') + 1));
  if (same == named.end()) return "";
  std::string best;
  int64_t most = 0;
  for (const std::string& file : same->second) {
    const std::string whole = "/" + file;
    const auto differ = std::mismatch(wanted.rbegin(), wanted.rend(), whole.rbegin(), whole.rend());
    const int64_t shared = std::count(wanted.rbegin(), differ.first, '/');
    if (shared == most) best.clear();
    if (shared > most) best = file;
    most = std::max(most, shared);
  }
  return best;
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

}  // namespace yolox
