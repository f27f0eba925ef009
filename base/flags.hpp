// Command-line flags, declared once: each is a member of the program's Config with its default and a line of
// doc.
//
//   struct Config : Flags {
//     int bs = flag(bs, "Training", "bs", 16, "N", "images in a step");
//     bool strict = flag(strict, "Data", "strict", false, "", "stop at bad labels");   // --strict
//     bool mosaic = flag(mosaic, "Data", "mosaic", true, "", "four images in one");    // --no-mosaic
//   };
//   Config config;
//   config.parse(argc, argv, "trains YOLOX");
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cxxopts.hpp>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace yolox {

struct Flags {
  Flags() = default;
  Flags(const Flags&) = delete;  // the flags below know their members by address
  Flags& operator=(const Flags&) = delete;

  // Flags given on the command line, then the values of all of them. Prints help and exits on --help; where
  // there are so many flags that some are named as used `often`, that explains these, and --help all the
  // others too. Unknown flags, stray words and values of the wrong type: UsageError.
  void parse(int argc, char** argv, const std::string& about, const std::vector<std::string>& often = {}) {
    const std::string program = std::string(argv[0]).substr(std::string(argv[0]).find_last_of('/') + 1);
    cxxopts::Options options(program, program + ": " + about), brief(program, program + ": " + about);
    options.set_width(80), brief.set_width(80);
    std::vector<std::string> groups;
    for (const auto& f : flags) {
      if (std::find(groups.begin(), groups.end(), f.group) == groups.end()) groups.push_back(f.group);
      const std::string shown = f.get().empty() || f.is_bool ? "" : " [" + f.get() + "]";
      const auto add_to = [&](cxxopts::Options& to) {
        to.add_options(f.group)(f.as_shown(), (f.on_by_default() ? "without: " : "") + f.doc + shown,
                                f.is_bool    ? cxxopts::value<bool>()
                                : f.optional ? cxxopts::value<std::string>()->implicit_value(f.implicit)
                                             : cxxopts::value<std::string>(),
                                f.argument);
      };
      add_to(options);
      if (std::find(often.begin(), often.end(), f.name) != often.end()) add_to(brief);
      // The other way about, for a run that is resumed with another setting.
      if (f.is_bool) options.add_options("hidden")(f.on_by_default() ? f.name : "no-" + f.name, "");
    }
    options.add_options("Help")("help", "this text");
    groups.push_back("Help");
    // Where cxxopts does otherwise: a switch with a value would count as given, and a flag that may stand
    // alone would never take the next word.
    std::vector<std::string> words{program};
    bool help_all = often.empty();
    for (int i = 1; i < argc; ++i) {
      std::string word = argv[i];
      if (word == "--help" && i + 1 < argc && argv[i + 1] == std::string("all")) help_all = true, ++i;
      for (const auto& f : flags) {
        for (const std::string& name : {"--" + f.name, "--no-" + f.name})
          if (f.is_bool && word.rfind(name + "=", 0) == 0)
            throw UsageError(concat(name, " is a switch and takes no value, got '", word, "'"));
        if (f.optional && word == "--" + f.name && i + 1 < argc && argv[i + 1][0] != '-')
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
      if (!help_all) {  // on one screen: without empty lines
        for (size_t at; (at = text.find("\n\n")) != std::string::npos;) text.erase(at, 1);
        text += " More, explained by --help all:\n" + names_without(often);
      }
      std::cout << text;
      std::exit(0);
    }
    if (!result.unmatched().empty()) {
      throw UsageError(concat("stray word '", result.unmatched()[0],
                              "'; flags take values as --name value or --name=value, and ",
                              "a switch takes none (--no-... turns off what is on by default)"));
    }
    for (auto& f : flags) {
      if (f.is_bool) {
        const bool on = result.count(f.name), off = result.count("no-" + f.name);
        if (on && off) throw UsageError(concat("--", f.name, " and --no-", f.name, " exclude each other"));
        if (on || off) f.set(on ? "true" : "false"), given.push_back(f.name);
      } else if (result.count(f.name)) {
        for (const auto& a : result.arguments())
          if (a.key() == f.name) f.set(a.value());
        given.push_back(f.name);
      }
    }
  }

  bool was_given(const std::string& name) const {
    return std::find(given.begin(), given.end(), name) != given.end();
  }

  // All flags as text, in the order of their declaration.
  std::vector<std::pair<std::string, std::string>> values() const {
    std::vector<std::pair<std::string, std::string>> all;
    for (const auto& f : flags) all.emplace_back(f.name, f.get());
    return all;
  }

  // Sets a flag by name from text, as if it had been given; false if there is no such flag.
  bool set(const std::string& name, const std::string& value) {
    for (auto& f : flags)
      if (f.name == name) return f.set(value), true;
    return false;
  }

 protected:
  // Declares a flag: the member it fills, a heading in the help, its name, its default, what stands for its
  // value in the help, one line of doc. Returns the default, so that it can initialise the member.
  template <class T>
  T flag(T& member, const std::string& group, const std::string& name, const T& value,
         const std::string& argument, const std::string& doc) {
    Flag f{group, name, argument, doc, std::is_same_v<T, bool>, false, "", {}, {}};
    f.get = [&member] { return to_text(member); };
    f.set = [&member, name](const std::string& text) { from_text(name, text, member); };
    flags.push_back(f);
    return value;
  }
  std::string flag(std::string& member, const std::string& group, const std::string& name, const char* value,
                   const std::string& argument, const std::string& doc) {
    return flag<std::string>(member, group, name, value, argument, doc);
  }
  // A number that may be given as "auto", which is 0.
  int flag_auto(int& member, const std::string& group, const std::string& name, int value,
                const std::string& argument, const std::string& doc) {
    flag<int>(member, group, name, value, argument, doc);
    flags.back().get = [&member] { return member == 0 ? "auto" : to_text(member); };
    flags.back().set = [&member, name](const std::string& text) {
      from_text(name, text == "auto" ? "0" : text, member);
      if (member == 0 && text != "auto")
        throw UsageError(concat("--", name, " takes a number above 0 or auto, got ", text));
    };
    return value;
  }
  // A flag that may be given several times. As text its values are lines.
  std::vector<std::string> flag_list(std::vector<std::string>& member, const std::string& group,
                                     const std::string& name, const std::string& argument,
                                     const std::string& doc) {
    flag<std::vector<std::string>>(member, group, name, {}, argument, doc);
    return {};
  }
  // A flag that may stand alone and then has the value `implicit`.
  std::string flag_alone(std::string& member, const std::string& group, const std::string& name,
                         const std::string& implicit, const std::string& argument, const std::string& doc) {
    flag<std::string>(member, group, name, "", argument, doc);
    flags.back().optional = true;
    flags.back().implicit = implicit;
    return "";
  }

 private:
  struct Flag {
    std::string group, name, argument, doc;
    bool is_bool, optional;
    std::string implicit;
    std::function<std::string()> get;
    std::function<void(const std::string&)> set;

    bool on_by_default() const { return is_bool && get() == "true"; }
    std::string as_shown() const { return on_by_default() ? "no-" + name : name; }
  };
  std::vector<Flag> flags;
  std::vector<std::string> given;

  // The flags beside these, by group, in lines of 79 columns at most.
  std::string names_without(const std::vector<std::string>& often) const {
    std::string text, group, line;
    for (const auto& f : flags) {
      if (std::find(often.begin(), often.end(), f.name) != often.end()) continue;
      const std::string word = " --" + f.as_shown();
      const bool begins = f.group != group;
      if (begins || line.size() + word.size() > 79) {
        if (!line.empty()) text += line + "\n";
        line = begins ? "  " + f.group + ":" : "     ";
      }
      group = f.group, line += word;
    }
    return text + line + "\n";
  }

  static std::string to_text(bool v) { return v ? "true" : "false"; }
  static std::string to_text(const std::string& v) { return v; }
  static std::string to_text(const std::vector<std::string>& v) {
    std::string text;
    for (const auto& line : v) text += (text.empty() ? "" : "\n") + line;
    return text;
  }
  static std::string to_text(double v) {  // as short as can be without changing the number
    char text[32];
    for (const int digits : {6, 15, 17}) {
      std::snprintf(text, sizeof text, "%.*g", digits, v);
      if (std::strtod(text, nullptr) == v) break;
    }
    return text;
  }
  template <class T>
  static std::string to_text(T v) {
    return concat(v);
  }

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
      throw UsageError(concat("--", name, " takes ", std::is_integral_v<T> ? "a whole number" : "a number",
                              ", got '", text, "'"));
    v = read;
  }
};

// "a,b" -> a and b; empty text -> nothing
inline std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

// "640" -> 640 x 640, "480x640" -> height 480, width 640; both multiples of 32.
struct ImageSize {
  int height, width;
};
inline ImageSize parse_size(const std::string& text) {
  ImageSize size{0, 0};
  char x = 0, rest = 0;
  const int n = std::sscanf(text.c_str(), "%d%c%d%c", &size.height, &x, &size.width, &rest);
  if (n == 1) size.width = size.height;
  usage_check(n == 1 || (n == 3 && x == 'x'), "--size takes a side or HEIGHTxWIDTH, got '", text, "'");
  usage_check(size.height > 0 && size.width > 0 && size.height % 32 == 0 && size.width % 32 == 0, "--size ",
              text, ": height and width must be multiples of 32, such as ",
              std::max(32, (size.height + 16) / 32 * 32),
              size.height == size.width ? "" : concat("x", std::max(32, (size.width + 16) / 32 * 32)));
  usage_check(size.height <= 8192 && size.width <= 8192, "--size ", text, " is larger than 8192");
  return size;
}

using Settings = std::vector<std::pair<std::string, std::string>>;  // flag, value

}  // namespace yolox
