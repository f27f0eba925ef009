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
#include <string>
#include <string_view>
#include <utility>
#include <variant>
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

  // Declares a flag: the member that it sets, a heading in the help, its name, its default, what stands for
  // its value in the help, one line of doc. Returns the default, so that it can initialise the member.
  template <class T>
  T flag(T& member, std::string_view group, std::string_view name, const T& value, std::string_view argument,
         std::string_view doc) {
    add(&member, group, name, argument, doc);
    return value;
  }
  const char* flag(std::string& member, std::string_view group, std::string_view name, const char* value,
                   std::string_view argument, std::string_view doc) {
    add(&member, group, name, argument, doc);
    return value;
  }
  // A number above 0 that may be given as "auto", which is 0.
  int flag_auto(int& member, std::string_view group, std::string_view name, int value,
                std::string_view argument, std::string_view doc) {
    add(&member, group, name, argument, doc).word = "auto";
    return value;
  }
  // A number whose default is that of the model's recipe; -1 until the recipe is known.
  double flag_recipe(double& member, std::string_view group, std::string_view name, std::string_view argument,
                     std::string_view doc) {
    add(&member, group, name, argument, doc).word = "recipe";
    return -1;
  }
  // A flag that may be given several times. As text its values are lines.
  std::vector<std::string> flag_list(std::vector<std::string>& member, std::string_view group,
                                     std::string_view name, std::string_view argument, std::string_view doc) {
    add(&member, group, name, argument, doc);
    return {};
  }
  // A flag that may stand alone and then has the value `implicit`.
  const char* flag_alone(std::string& member, std::string_view group, std::string_view name,
                         std::string_view implicit, std::string_view argument, std::string_view doc) {
    add(&member, group, name, argument, doc).implicit = implicit;
    return "";
  }

 private:
  using Member = std::variant<bool*, int*, int64_t*, double*, std::string*, std::vector<std::string>*>;
  struct Flag {
    Member member;
    std::string group, name, argument, doc;
    std::string word = {};      // stands for a number: "auto" for 0, "recipe" for -1
    std::string implicit = {};  // the value of a flag that stands alone; empty: it may not

    bool is_bool() const { return std::holds_alternative<bool*>(member); }
    bool on_by_default() const { return is_bool() && *std::get<bool*>(member); }
    std::string as_shown() const { return on_by_default() ? "no-" + name : name; }
    std::string get() const;
    void set(const std::string& text) const;
  };
  std::vector<Flag> flags;
  std::vector<std::string> given;

  Flag& add(const Member& member, std::string_view group, std::string_view name, std::string_view argument,
            std::string_view doc);
  // The flags beside these, by group, in lines of 79 columns at most.
  std::string names_without(const std::vector<std::string>& often) const;
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
