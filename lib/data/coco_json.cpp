// SPDX-License-Identifier: Apache-2.0
#include "data/coco_json.hpp"

#include <rapidjson/document.h>
#include <rapidjson/error/en.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <optional>
#include <set>
#include <string_view>

#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "data/source.hpp"

namespace yolox {

namespace {

// Returns the finite number in a text, or nothing if the text is anything else.
std::optional<double> double_in(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size()) return {};
  if (error != std::errc()) value = std::strtod(std::string(text).c_str(), nullptr);  // 0 or infinite
  if (!std::isfinite(value)) return {};
  return value;
}

// The same for an integer of 64 bits. 3.0 is an integer, because exporters that store all columns as floats
// write ids like that. Beyond 2^53 a double does not represent every integer.
std::optional<int64_t> integer_in(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  const auto d = double_in(text);
  if (d && std::abs(*d) <= 0x1p53 && *d == std::floor(*d)) return static_cast<int64_t>(*d);
  return {};
}

// Returns true if a value is a text. Numbers are kept as they are written, and are strings for RapidJSON,
// too, but only a text follows a quote.
bool is_text(const rapidjson::Value& value) { return value.IsString() && value.GetString()[-1] == '"'; }

// Returns the characters of a text or number; false and true are 0 and 1.
std::optional<std::string_view> characters_of(const rapidjson::Value& value) {
  if (value.IsBool()) return value.GetBool() ? "1" : "0";
  if (!value.IsString()) return {};
  return std::string_view(value.GetString(), value.GetStringLength());
}

// One entry of a list, which should be a JSON object, with its position for error messages. The getters
// return the fallback if the key is missing or null. They throw if there is no fallback or if the value has
// the wrong type. A number in quotes is a number, and a number in the place of a text is that text. If a key
// occurs twice, its last value counts.
struct JsonEntry {
  const std::string &file, &list;
  size_t index;
  const rapidjson::Value& value;

  // "file.json: annotations[12]"
  std::string where() const { return concat(file, ": ", list, "[", index, "]"); }

  const rapidjson::Value* find(const char* key) const {
    if (!value.IsObject()) fail(where(), " is not an object {...}; repair or remove the entry");
    for (auto member = value.MemberEnd(); member != value.MemberBegin();)
      if (*characters_of((--member)->name) == key) return member->value.IsNull() ? nullptr : &member->value;
    return nullptr;
  }

  [[noreturn]] void throw_bad_value(const char* key, const char* needed) const {
    const rapidjson::Value* found = find(key);
    if (!found) fail(where(), " has no \"", key, "\", ", needed, " is needed; add it or remove the entry");
    std::string what(characters_of(*found).value_or("an object"));
    if (is_text(*found)) what = "the text " + quote(what);
    if (found->IsArray()) what = concat("a list of ", found->Size(), " values");
    fail(where(), ".", key, ": found ", what, ", ", needed, " is needed; repair the entry");
  }

  template <class Value>
  Value get(const char* key, std::optional<Value> fallback, const char* needed,
            std::optional<Value> (*value_in)(std::string_view)) const {
    const rapidjson::Value* found = find(key);
    if (!found && fallback) return *fallback;
    const auto text = found ? characters_of(*found) : std::nullopt;
    const auto value = text ? value_in(*text) : std::nullopt;
    if (!value) throw_bad_value(key, needed);
    return *value;
  }

  double number(const char* key, std::optional<double> fallback = {}) const {
    return get(key, fallback, "a finite number", double_in);
  }

  int64_t integer(const char* key, std::optional<int64_t> fallback = {}) const {
    return get(key, fallback, "an integer of 64 bits", integer_in);
  }

  std::string string(const char* key, std::optional<std::string> fallback) const {
    return get<std::string>(key, fallback, "a text in quotes",
                            [](std::string_view text) { return std::optional(std::string(text)); });
  }

  // An integer, or for a text such as "a5" or "007" a negative number that depends on the text alone, so that
  // annotations and detections find their image.
  int64_t id(const char* key, std::optional<int64_t> fallback = {}) const {
    const rapidjson::Value* found = find(key);
    if (!found || !is_text(*found)) return integer(key, fallback);
    const auto text = *characters_of(*found);
    const auto integer = integer_in(text);
    if (integer && std::to_string(*integer) == text) return *integer;
    return static_cast<int64_t>(fnv1a(text) | uint64_t{1} << 63);
  }

  int pixels(const char* key) const {
    const int64_t size = integer(key, 0);
    if (size < 0 || size > INT_MAX) throw_bad_value(key, "a size in pixels");
    return static_cast<int>(size);
  }

  std::array<double, 4> box(const char* key) const {
    std::array<double, 4> box{};
    const rapidjson::Value* found = find(key);
    bool good = found && found->IsArray() && found->Size() == 4;
    for (unsigned i = 0; good && i < 4; ++i) {
      const auto text = characters_of((*found)[i]);
      const auto value = text ? double_in(*text) : std::nullopt;
      box[i] = value.value_or(0);
      good = value.has_value();
    }
    if (!good) throw_bad_value(key, "a list of four finite numbers");
    return box;
  }
};

using JsonReaders = std::map<std::string, std::function<void(const JsonEntry&)>>;

// Calls a reader for each entry of a list of the object that the text is, by the key of the list. If the text
// is one list, its key is "detections". Only one entry at a time is a RapidJSON document, because files are
// large. Returns the keys of all lists. path: for error messages. problems: if given, gets the entries for
// which a reader throws.
std::set<std::string> read_json_lists(std::string text, const std::string& path, const JsonReaders& readers,
                                      ProblemList* problems = nullptr) {
  rapidjson::InsituStringStream stream(text.data());
  std::vector<char> memory(1 << 16);
  rapidjson::MemoryPoolAllocator<> pool(memory.data(), memory.size());
  rapidjson::Document document(&pool);
  const auto refuse = [&](size_t at, const char* why) {
    fail(path, ": not valid JSON at byte ", at, ": ", why,
         stream.Peek() == '\0' ? " The file ends there: is it empty or cut off? Copy the file again"
                               : " Repair or replace the file");
  };
  const auto next_is = [&](char wanted) {
    rapidjson::SkipWhitespace(stream);
    return stream.Peek() == wanted && stream.Take();
  };
  const auto expect = [&](char wanted, const char* why) {
    if (!next_is(wanted)) refuse(stream.Tell(), why);
  };
  // Python's json module writes NaN and Infinity: the getters refuse them, with the entry. Numbers arrive as
  // text, because RapidJSON converts numbers such as 0e30 incorrectly. It must not recurse, because a million
  // "[" would overflow the stack.
  const auto parse = [&]() -> const rapidjson::Value& {
    pool.Clear();
    document.ParseStream<rapidjson::kParseInsituFlag | rapidjson::kParseNumbersAsStringsFlag |
                         rapidjson::kParseNanAndInfFlag | rapidjson::kParseIterativeFlag |
                         rapidjson::kParseStopWhenDoneFlag>(stream);
    if (document.HasParseError())
      refuse(document.GetErrorOffset(), rapidjson::GetParseError_En(document.GetParseError()));
    return document;
  };
  std::set<std::string> lists;
  const auto read_list = [&](const std::string& name) {
    const auto reader = readers.find(name);
    for (size_t i = 0; !next_is(']'); ++i) {
      if (i > 0) expect(',', "Missing a comma or ] after an entry.");
      const auto& entry = parse();
      try {
        if (reader != readers.end()) reader->second({path, name, i, entry});
      } catch (const std::runtime_error& e) {
        if (!problems) throw;
        problems->push_back({"entry cannot be read", e.what()});
      }
    }
    lists.insert(name);
  };
  if (next_is('[')) {
    read_list("detections");
  } else if (!next_is('{')) {
    parse();
  } else {
    for (bool first = true; !next_is('}'); first = false) {
      if (!first) expect(',', "Missing a comma or } after a value.");
      const auto& key = parse();
      if (!is_text(key)) refuse(stream.Tell(), "Missing a name in quotes.");
      const std::string name(*characters_of(key));
      expect(':', "Missing a colon after a name.");
      if (next_is('['))
        read_list(name == "annotation" ? "annotations" : name);  // as in HIT-UAV
      else
        parse();
    }
  }
  rapidjson::SkipWhitespace(stream);
  if (stream.Peek() != '\0') refuse(stream.Tell(), "The file goes on after its end.");
  return lists;
}

}  // namespace

// Gives an annotation the upright box around its box, which is turned by degrees about its centre (CVAT).
static void turn(CocoAnnotation& a, double degrees) {
  const double angle = degrees * M_PI / 180, cosine = std::abs(std::cos(angle)),
               sine = std::abs(std::sin(angle)), w = a.w * cosine + a.h * sine, h = a.w * sine + a.h * cosine;
  a.x += (a.w - w) / 2;
  a.y += (a.h - h) / 2;
  a.w = w;
  a.h = h;
}

CocoDataset parse_coco(std::string text, const std::string& path) {
  CocoDataset data;
  const auto image = [&data](const JsonEntry& e) {
    const int64_t id = e.id("id");
    const std::string name = formatted("%012lld.jpg", static_cast<long long>(id));
    data.images.push_back(
        {id, e.string("file_name", e.string("filename", name)), e.pixels("width"), e.pixels("height")});
  };
  const auto category = [&data](const JsonEntry& e) {
    const int64_t id = e.id("id");
    const rapidjson::Value* parent = e.find("supercategory");
    data.categories.push_back({id, e.string("name", std::to_string(id)),
                               parent && is_text(*parent) ? e.string("supercategory", "") : ""});
  };
  const auto annotation = [&data](const JsonEntry& e) {
    const auto [x, y, w, h] = e.box("bbox");
    data.annotations.push_back({e.id("id", static_cast<int64_t>(e.index) + 1), e.id("image_id"),
                                e.id("category_id"), x, y, w, h, e.number("area", w * h),
                                e.integer("iscrowd", 0) != 0});
    if (const auto* more = e.find("attributes"); more && more->IsObject()) {
      const JsonEntry attributes{e.file, e.list, e.index, *more};
      const auto* degrees = attributes.find("rotation");  // of CVAT; an attribute of users is a text
      if (degrees && !is_text(*degrees)) turn(data.annotations.back(), attributes.number("rotation"));
    }
  };
  const auto lists = read_json_lists(
      std::move(text), path, {{"images", image}, {"categories", category}, {"annotations", annotation}},
      &data.problems);
  for (const char* list : {"images", "categories", "annotations"})
    check(lists.count(list), path, ": no list \"", list,
          "\" at the top level; a COCO annotation file has images, annotations and categories");

  if (data.images.empty() && !data.problems.empty()) fail(data.problems[0].second);
  std::sort(data.categories.begin(), data.categories.end(), [](auto& a, auto& b) { return a.id < b.id; });
  const auto repeated_ids = [](const auto& entries) {
    std::vector<int64_t> ids, repeated;
    for (const auto& entry : entries) ids.push_back(entry.id);
    std::sort(ids.begin(), ids.end());
    for (size_t i = 1; i < ids.size(); ++i)
      if (ids[i] == ids[i - 1]) repeated.push_back(ids[i]);
    return repeated;
  };
  if (const size_t repeated = repeated_ids(data.annotations).size(); repeated > 0)
    data.problems.push_back({"annotations with the id of another one", concat(path, ": ", repeated)});
  for (const int64_t id : repeated_ids(data.images))
    fail(path, ": two images have the id ", id, "; make the ids unique");
  for (const int64_t id : repeated_ids(data.categories))
    fail(path, ": two categories have the id ", id, "; make the ids unique");
  return data;
}

CocoDataset read_coco(const std::string& path) {
  try {
    return parse_coco(read_text(path, SIZE_MAX), path);
  } catch (const std::runtime_error&) {
    const std::string other = other_format(path);
    if (other.empty()) throw;
    fail(path, " is ", other);
  }
}

std::vector<Detection> read_detections(const std::string& path) {
  std::vector<Detection> detections;
  const auto detection = [&](const JsonEntry& e) {
    const auto [x, y, w, h] = e.box("bbox");
    detections.push_back({e.id("image_id"), e.id("category_id"), x, y, w, h, e.number("score")});
  };
  const auto lists = read_json_lists(read_text(path, SIZE_MAX), path, {{"detections", detection}});
  check(lists.count("detections"), path,
        ": not a list of detections [{\"image_id\", \"category_id\", \"bbox\", \"score\"}, ",
        "...]; use a file of detections");
  return detections;
}

void write_json(const std::string& path, const std::function<void(JsonWriter&)>& write) {
  NewFile file(path);
  std::vector<char> buffer(1 << 16);
  rapidjson::FileWriteStream stream(file.stream(), buffer.data(), buffer.size());
  JsonWriter writer(stream);
  write(writer);
  stream.Flush();
  file.commit();
}

void write_field(JsonWriter& writer, const char* key, int64_t value) {
  writer.Key(key);
  writer.Int64(value);
}

void write_field(JsonWriter& writer, const char* key, double value) {
  check(std::isfinite(value), "\"", key, "\" is ", value,
        ", which JSON cannot represent; only finite numbers can be written");
  writer.Key(key);
  writer.Double(value);
}

void write_field(JsonWriter& writer, const char* key, const std::string& value) {
  writer.Key(key);
  size_t at = 0;  // JSON is UTF-8
  for (size_t bytes; at < value.size() && (bytes = utf8_bytes(value, at)) > 0;) at += bytes;
  const std::string text = at < value.size() ? printable(value) : value;
  writer.String(text.data(), static_cast<rapidjson::SizeType>(text.size()));
}

void write_detections(const std::string& path, const std::vector<Detection>& detections,
                      const std::map<int64_t, std::string>& file_names) {
  write_json(path, [&](JsonWriter& writer) {
    write_list(writer, detections, [&](const Detection& d) {
      write_field(writer, "image_id", d.image_id);
      write_field(writer, "category_id", d.category_id);
      write_bbox(writer, d);
      write_field(writer, "score", d.score);
      if (const auto name = file_names.find(d.image_id); name != file_names.end())
        write_field(writer, "file_name", name->second);
    });
  });
}

static void write_coco(JsonWriter& writer, const CocoDataset& data) {
  writer.StartObject();
  if (!data.description.empty()) {
    writer.Key("info");
    writer.StartObject();
    write_field(writer, "description", data.description);
    write_field(writer, "max_dets", int64_t{data.max_detections});
    writer.EndObject();
  }
  writer.Key("images");
  write_list(writer, data.images, [&](const CocoImage& image) {
    write_field(writer, "id", image.id);
    write_field(writer, "file_name", image.file_name);
    write_field(writer, "width", int64_t{image.width});
    write_field(writer, "height", int64_t{image.height});
  });
  writer.Key("categories");
  write_list(writer, data.categories, [&](const CocoCategory& category) {
    write_field(writer, "id", category.id);
    write_field(writer, "name", category.name);
  });
  writer.Key("annotations");
  write_list(writer, data.annotations, [&](const CocoAnnotation& a) {
    write_field(writer, "id", a.id);
    write_field(writer, "image_id", a.image_id);
    write_field(writer, "category_id", a.category_id);
    write_bbox(writer, a);
    write_field(writer, "area", a.area);
    write_field(writer, "iscrowd", int64_t{a.crowd});
  });
  writer.EndObject();
}

void write_coco(const std::string& path, const CocoDataset& data) {
  write_json(path, [&](JsonWriter& writer) { write_coco(writer, data); });
}

std::string coco_text(const CocoDataset& data) {
  char* text = nullptr;
  size_t size = 0;
  {
    File file(open_memstream(&text, &size), std::fclose);
    check(file != nullptr, "not enough memory to write the annotations as text");
    std::vector<char> buffer(1 << 16);
    rapidjson::FileWriteStream stream(file.get(), buffer.data(), buffer.size());
    JsonWriter writer(stream);
    write_coco(writer, data);
    stream.Flush();
  }
  const std::unique_ptr<char, void (*)(void*)> owner(text, std::free);
  return {text, size};
}

}  // namespace yolox
