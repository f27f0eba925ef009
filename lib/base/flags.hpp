// SPDX-License-Identifier: Apache-2.0
// Command-line flags. Each flag is declared once, as a member of the program's Config with its default and
// one line of help.
//
//   struct Config : Flags {
//     int bs = flag(bs, "Training", "bs", 16, "N", "batch size");
//     bool strict = flag(strict, "Data", "strict", false, "", "stop at bad labels");  // --strict
//     bool mosaic = flag(mosaic, "Data", "mosaic", true, "", "mosaic augmentation");  // --no-mosaic
//   };
//   Config config;
//   config.parse(argc, argv, "trains YOLOX");
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/text.hpp"

namespace yolox {

// Range and marks of a flag, as the last argument of its declaration: at_least(1) | kOfCall.
struct FlagFacts {
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  int marks = 0;
  std::string_view implicit = {};  // what --name without a value means; empty: the flag needs a value
};
constexpr FlagFacts at_least(double min) { return {min}; }
constexpr FlagFacts between(double min, double max) { return {min, max}; }
constexpr int kOfCall = 1;     // not a setting of the run: a checkpoint does not keep it
constexpr int kOfMachine = 2;  // may differ between ranks
constexpr int kRecipe = 4;  // -1, the word "recipe", until recipe, optimizer and length of the run are known
constexpr FlagFacts operator|(FlagFacts facts, int marks) {
  facts.marks |= marks;
  return facts;
}
constexpr FlagFacts marked(int marks) { return FlagFacts() | marks; }

using Settings = std::vector<std::pair<std::string, std::string>>;  // name and value of each flag

// The settings of a run, as config.json and checkpoints have them.
struct RunSettings {
  Settings flags;   // values at the start of the run: typed, or defaults; auto is still auto
  Settings chosen;  // values that auto and the recipe have become
  bool operator==(const RunSettings&) const = default;
};

struct Flags {
  Flags() = default;
  Flags(const Flags&) = delete;  // `flags` holds pointers to the members of this object
  Flags& operator=(const Flags&) = delete;

  // A complete command that works, for combination_check(). Set by parse().
  static inline std::string example = {};

  // Parses the command line and sets the members. Prints help or version and exits with 0 on --help,
  // --version. The help of a switch that is on by default shows --no-NAME. about: one line for the help.
  // example: flags of a complete command. Throws UsageError for an unknown flag, a word without a flag, or a
  // value of the wrong type.
  void parse(int argc, char** argv, const std::string& about, const std::string& example = "");

  // Throws UsageError if a value is out of range, or not one of the words of its placeholder, such as
  // "off|fp16|bf16". Call it when the defaults of the recipe are known.
  void check_values() const;

  // Returns true if the flag was on the command line.
  bool was_given(const std::string& name) const { return std::ranges::find(given, name) != given.end(); }

  // Returns name and value of all flags as text, in the order of declaration. without: marks of the flags
  // that are left out.
  Settings values(int without = 0) const;

  Settings start;  // values of the settings of the run before auto and the recipe are filled in
  // Returns `start`, and the values that have changed since.
  RunSettings settings() const;

  // Returns true if a value of the flag is a number or a switch, which in JSON needs no quotes.
  bool is_literal(const std::string& name, const std::string& value) const;

  // Sets a flag from text. Returns false if there is no flag of this name. was_given() does not change.
  bool set(const std::string& name, const std::string& value);

  // Declares a flag and returns its default, so that the call can initialise the member.
  // member: the variable that the flag sets. group: heading in the help. name: without "--". value: default.
  // argument: placeholder of the value in the help, such as N, or all possible words: off|fp16. An integer
  // whose placeholder is N|auto is above 0, or 0 for "auto". doc: one line of help.
  template <class T, class Default>
  Default flag(T& member, const std::string& group, const std::string& name, Default value,
               const std::string& argument, const std::string& doc, const FlagFacts& facts = {}) {
    flags.push_back({&member, group, name, argument, doc, facts});
    return value;
  }

 private:
  struct Flag {
    std::variant<bool*, int*, int64_t*, double*, std::string*> member;
    std::string group, name, argument, doc;
    FlagFacts facts;

    bool is_bool() const { return std::holds_alternative<bool*>(member); }
    bool on_by_default() const { return is_bool() && *std::get<bool*>(member); }
    std::string keyword() const;  // "auto", the text of the value 0; "recipe", the text of -1; or empty
    std::string get() const;
    void set(const std::string& text) const;
  };
  std::vector<Flag> flags;
  std::vector<std::string> given;

  // Returns the flag, or null if there is none of this name.
  const Flag* find(const std::string& name) const;
  // Returns the message for an unknown flag. word: as on the command line, such as --batch=4.
  std::string unknown_flag(const std::string& word) const;
};

// As usage_check(), for flags that do not go together or are missing. The message also has a complete
// command.
template <class... Parts>
void combination_check(bool condition, const Parts&... parts) {
  usage_check(condition, parts...,
              Flags::example.empty() ? "" : "\nusage: " + Flags::example + "    (--help lists the flags)");
}

// Returns what to do instead of a flag of an older version of this program. Empty if there was no such flag,
// or if the value had no effect.
std::string gone_flag(const std::string& name, const std::string& value);

// Splits "a,b" into {"a", "b"}. Empty parts are left out.
std::vector<std::string> split_list(const std::string& text, char separator = ',');

}  // namespace yolox
