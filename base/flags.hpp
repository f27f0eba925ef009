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
  void parse(int argc, char** argv, const std::string& about, const std::vector<std::string>& often = {});

  bool was_given(const std::string& name) const {
    return std::find(given.begin(), given.end(), name) != given.end();
  }

  // All flags as text, in the order of their declaration.
  std::vector<std::pair<std::string, std::string>> values() const;

  // Sets a flag by name from text, as if it had been given; false if there is no such flag.
  bool set(const std::string& name, const std::string& value);

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
                const std::string& argument, const std::string& doc);
  // A flag that may be given several times. As text its values are lines.
  std::vector<std::string> flag_list(std::vector<std::string>& member, const std::string& group,
                                     const std::string& name, const std::string& argument,
                                     const std::string& doc);
  // A flag that may stand alone and then has the value `implicit`.
  std::string flag_alone(std::string& member, const std::string& group, const std::string& name,
                         const std::string& implicit, const std::string& argument, const std::string& doc);

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
  std::string names_without(const std::vector<std::string>& often) const;

  static std::string to_text(bool v) { return v ? "true" : "false"; }
  static std::string to_text(const std::string& v) { return v; }
  static std::string to_text(const std::vector<std::string>& v);
  static std::string to_text(double v);
  template <class T>
  static std::string to_text(T v) {
    return concat(v);
  }

  static void from_text(const std::string&, const std::string& text, bool& v) { v = text == "true"; }
  static void from_text(const std::string&, const std::string& text, std::string& v) { v = text; }
  static void from_text(const std::string&, const std::string& text, std::vector<std::string>& v);
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
std::vector<std::string> split_list(const std::string& text);

// "640" -> 640 x 640, "480x640" -> height 480, width 640; both multiples of 32.
struct ImageSize {
  int height, width;
};
ImageSize parse_size(const std::string& text);

using Settings = std::vector<std::pair<std::string, std::string>>;  // flag, value

}  // namespace yolox
