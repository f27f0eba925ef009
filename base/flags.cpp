// SPDX-License-Identifier: Apache-2.0
#include "base/flags.hpp"

#include <cstdio>
#include <cstdlib>
#include <cxxopts.hpp>
#include <iostream>
#include <sstream>

#include "base/error.hpp"

namespace yolox {

// ---- values as text

static std::string to_text(bool v) { return v ? "true" : "false"; }
static std::string to_text(const std::string& v) { return v; }
static std::string to_text(const std::vector<std::string>& v) {
  std::string text;
  for (const auto& line : v) text += (text.empty() ? "" : "\n") + line;
  return text;
}
// Returns the shortest of 6, 15 or 17 digits that reads back as the same number.
static std::string to_text(double v) {
  char text[32];
  for (const int digits : {6, 15, 17}) {
    std::snprintf(text, sizeof text, "%.*g", digits, v);
    if (std::strtod(text, nullptr) == v) break;
  }
  return text;
}
static std::string to_text(int64_t v) { return std::to_string(v); }
static std::string to_text(int v) { return std::to_string(v); }

static void from_text(const std::string&, const std::string& text, bool& v) { v = text == "true"; }
static void from_text(const std::string&, const std::string& text, std::string& v) { v = text; }
static void from_text(const std::string&, const std::string& text, std::vector<std::string>& v) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) v.push_back(line);
}
template <class T>
static void from_text(const std::string& name, const std::string& text, T& v) {
  std::istringstream in(text);
  T read;
  if (!(in >> read) || !in.eof())
    throw UsageError(concat("--", name, " must be ", std::is_integral_v<T> ? "an integer" : "a number",
                            ", got '", text, "'"));
  v = read;
}

// Returns the number that the word of a flag stands for.
static double number_of_keyword(const std::string& word) { return word == "auto" ? 0 : -1; }

std::string Flags::Flag::get() const {
  const std::string text = std::visit([](const auto* v) { return to_text(*v); }, member);
  return !keyword.empty() && text == to_text(number_of_keyword(keyword)) ? keyword : text;
}

void Flags::Flag::set(const std::string& text) const {
  const bool is_word = !keyword.empty() && text == keyword;
  const std::string number = is_word ? to_text(number_of_keyword(keyword)) : text;
  std::visit([&](auto* v) { from_text(name, number, *v); }, member);
  if (keyword == "auto" && !is_word && get() == keyword)
    throw UsageError(concat("--", name, " must be a number above 0 or auto, got ", text));
}

Flags::Flag& Flags::add(const Member& member, std::string_view group, std::string_view name,
                        std::string_view argument, std::string_view doc) {
  flags.push_back({member, std::string(group), std::string(name), std::string(argument), std::string(doc)});
  return flags.back();
}

// ---- the command line

void Flags::parse(int argc, char** argv, const std::string& about, const std::vector<std::string>& common) {
  const std::string program = std::string(argv[0]).substr(std::string(argv[0]).find_last_of('/') + 1);
  cxxopts::Options options(program, program + ": " + about), brief(program, program + ": " + about);
  options.set_width(80);
  brief.set_width(80);
  std::vector<std::string> groups;
  for (const auto& f : flags) {
    if (std::find(groups.begin(), groups.end(), f.group) == groups.end()) groups.push_back(f.group);
    const std::string shown = f.get().empty() || f.is_bool() ? "" : " [" + f.get() + "]";
    const auto add_to = [&](cxxopts::Options& to) {
      to.add_options(f.group)(f.as_shown(), f.doc + shown,
                              f.is_bool() ? cxxopts::value<bool>()
                              : !f.implicit.empty()
                                  ? cxxopts::value<std::string>()->implicit_value(f.implicit)
                                  : cxxopts::value<std::string>(),
                              f.argument);
    };
    add_to(options);
    if (std::find(common.begin(), common.end(), f.name) != common.end()) add_to(brief);
    // The opposite of a switch is accepted too, because a resumed run may need to change the setting back.
    if (f.is_bool()) options.add_options("hidden")(f.on_by_default() ? f.name : "no-" + f.name, "");
  }
  options.add_options("Help")("help", "this text");
  groups.push_back("Help");
  // Two cases are handled here, because cxxopts would accept a switch with a value, and would never use the
  // next word as the value of a flag that has an implicit value.
  std::vector<std::string> words{program};
  bool help_all = common.empty();
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "--help" && i + 1 < argc && argv[i + 1] == std::string("all")) {
      help_all = true;
      ++i;
    }
    for (const auto& f : flags) {
      for (const std::string& name : {"--" + f.name, "--no-" + f.name})
        if (f.is_bool() && word.rfind(name + "=", 0) == 0)
          throw UsageError(concat(name, " is a switch and takes no value, got '", word, "'"));
      if (!f.implicit.empty() && word == "--" + f.name && i + 1 < argc && argv[i + 1][0] != '-')
        word += concat("=", argv[++i]);
    }
    words.push_back(word);
  }
  std::vector<const char*> pointers;
  for (const auto& word : words) pointers.push_back(word.c_str());
  cxxopts::ParseResult result;
  try {
    result = options.parse(int(pointers.size()), pointers.data());
  } catch (const cxxopts::exceptions::exception& e) {
    throw UsageError(concat(e.what(), "; ", program, " --help lists the flags"));
  }
  if (result.count("help")) {
    std::string text = help_all ? options.help(groups) : brief.help(groups);
    if (!help_all) {  // without empty lines, so that the text fits on one screen
      for (size_t at; (at = text.find("\n\n")) != std::string::npos;) text.erase(at, 1);
      text += " More flags, explained by --help all:\n" + other_flag_names(common);
    }
    std::cout << text;
    std::exit(0);
  }
  if (!result.unmatched().empty()) {
    throw UsageError(concat("unexpected argument '", result.unmatched()[0],
                            "'; write a value as --name value or --name=value; ",
                            "a switch has no value (--no-NAME turns a switch off)"));
  }
  for (auto& f : flags) {
    if (f.is_bool()) {
      const bool on = result.count(f.name), off = result.count("no-" + f.name);
      if (on && off) throw UsageError(concat("--", f.name, " and --no-", f.name, " cannot be used together"));
      if (on || off) {
        f.set(on ? "true" : "false");
        given.push_back(f.name);
      }
    } else if (result.count(f.name)) {
      for (const auto& a : result.arguments())
        if (a.key() == f.name) f.set(a.value());
      given.push_back(f.name);
    }
  }
}

std::vector<std::pair<std::string, std::string>> Flags::values() const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& f : flags) all.emplace_back(f.name, f.get());
  return all;
}

bool Flags::set(const std::string& name, const std::string& value) {
  for (auto& f : flags)
    if (f.name == name) {
      f.set(value);
      return true;
    }
  return false;
}

std::string Flags::other_flag_names(const std::vector<std::string>& common) const {
  std::string text, group, line;
  for (const auto& f : flags) {
    if (std::find(common.begin(), common.end(), f.name) != common.end()) continue;
    const std::string word = " --" + f.as_shown();
    const bool begins = f.group != group;
    if (begins || line.size() + word.size() > 79) {
      if (!line.empty()) text += line + "\n";
      line = begins ? "  " + f.group + ":" : "     ";
    }
    group = f.group;
    line += word;
  }
  return text + line + "\n";
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

ImageSize parse_size(const std::string& text) {
  ImageSize size{0, 0};
  char x = 0, rest = 0;
  const int n = std::sscanf(text.c_str(), "%d%c%d%c", &size.height, &x, &size.width, &rest);
  if (n == 1) size.width = size.height;
  usage_check(n == 1 || (n == 3 && x == 'x'), "--size must be N or HEIGHTxWIDTH, got '", text, "'");
  usage_check(size.height > 0 && size.width > 0 && size.height % 32 == 0 && size.width % 32 == 0, "--size ",
              text, ": height and width must be multiples of 32, such as ",
              std::max(32, (size.height + 16) / 32 * 32),
              size.height == size.width ? "" : concat("x", std::max(32, (size.width + 16) / 32 * 32)));
  usage_check(size.height <= 8192 && size.width <= 8192, "--size ", text, " is larger than 8192");
  return size;
}

}  // namespace yolox
