// SPDX-License-Identifier: Apache-2.0
#include "base/flags.hpp"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cxxopts.hpp>
#include <iostream>
#include <sstream>

#include "base/printable.hpp"
#include "base/program.hpp"

namespace yolox {

// ---- values as text

// A number has the least of 6, 15 or 17 digits with which it reads back as the same number.
static std::string to_text(double v) {
  std::string text;
  for (const int digits : {6, 15, 17}) {
    text = formatted("%.*g", digits, v);
    if (std::strtod(text.c_str(), nullptr) == v) break;
  }
  return text;
}
static std::string to_text(bool v) { return v ? "true" : "false"; }
static std::string to_text(int v) { return std::to_string(v); }
static std::string to_text(int64_t v) { return std::to_string(v); }
static std::string to_text(const std::string& v) { return v; }
static std::string to_text(const std::vector<std::string>& v) {
  std::string text;
  for (const auto& line : v) text += (text.empty() ? "" : "\n") + line;
  return text;
}

template <class T>
static void from_text(const std::string& name, const std::string& text, T& v) {
  if constexpr (std::is_same_v<T, bool>) {
    v = text == "true";
  } else if constexpr (std::is_same_v<T, std::string>) {
    v = text;
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    for (const auto& line : split_list(text, '\n')) v.push_back(line);
  } else {
    std::istringstream in(text);
    T read;
    usage_check(in >> std::noskipws >> read && in.eof(), "--", name, " must be ",
                std::is_integral_v<T> ? "an integer" : "a number", ", got '", text, "'");
    v = read;
  }
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
  if (!keyword.empty() && !is_word && (get() == keyword || (keyword == "auto" && text[0] == '-')))
    throw UsageError(concat("--", name, " must be a number ", keyword == "auto" ? "above" : "from", " 0 or ",
                            keyword, ", got ", text));
}

Flags::Flag& Flags::add(const Member& member, std::string_view group, std::string_view name,
                        std::string_view argument, std::string_view doc, FlagFacts facts) {
  flags.push_back(
      {member, std::string(group), std::string(name), std::string(argument), std::string(doc), facts});
  return flags.back();
}

// ---- the command line

// A flag that users of YOLOX, Ultralytics or MMDetection type, the flag here, and what differs. The first row
// whose flag the program has holds.
struct Alias {
  const char *other, *name, *note;
};
static const Alias aliases[] = {
    {"b", "bs", ""},
    {"batch", "bs", ""},
    {"batch-size", "bs", ""},
    {"c", "weights", ""},
    {"ckpt", "weights", ""},
    {"n", "model", ""},
    {"f", "model", "there are no experiment files: flags set everything"},
    {"exp-file", "model", "there are no experiment files: flags set everything"},
    {"d", "gpus", "the number of GPUs, not an index"},
    {"d", "device", ""},
    {"devices", "gpus", "the number of GPUs, not an index"},
    {"imgsz", "size", "a multiple of 32, or HEIGHTxWIDTH"},
    {"tsize", "size", "a multiple of 32, or HEIGHTxWIDTH"},
    {"fp16", "amp", "--amp fp16"},
    {"project", "out", "one path, such as runs/my-run"},
    {"name", "out", "one path, such as runs/my-run"},
    {"name", "save", "one path, such as runs/my-demo"},
    {"expn", "out", "one path, such as runs/my-run"},
    {"path", "source", ""},
    {"iou", "nms", ""},
    {"mosaic", "mosaic-prob", "a probability; 0 = off"},
    {"close-mosaic", "no-aug-epochs", ""},
};

// A flag of older versions, its value without effect, and what to do now.
struct Gone {
  const char *name, *off, *remedy;
};
static const Gone gone_flags[] = {
    {"keep-going", "false", "--resume RUN --lr X continues after a non-finite loss"},
    {"tile", "0", "tools/tiles.py cuts images into tiles, and merges the detections"},
    {"tiles", "0", "tools/tiles.py cuts images and labels into tiles"},
    {"overlap", "0.2", "tools/tiles.py --overlap"},
};

std::string gone_flag(const std::string& name, const std::string& value) {
  for (const auto& flag : gone_flags)
    if (flag.name == name && flag.off != value) return concat("--", name, " is gone: ", flag.remedy);
  return "";
}

// Returns how many letters must be changed, inserted or deleted to turn a into b.
static size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row.back();
}

// Returns the message for an unknown flag: the flag that another trainer's name stands for, or the nearest
// one. written: the flag with its dashes. names: the flags of the program, without dashes.
static std::string unknown_flag(const std::string& program, const std::string& written,
                                const std::vector<std::string>& names) {
  std::string name = written.substr(written.find_first_not_of('-'));
  std::replace(name.begin(), name.end(), '_', '-');  // --batch_size
  for (const auto& alias : aliases)
    if (name == alias.other && std::find(names.begin(), names.end(), alias.name) != names.end())
      return concat("there is no flag ", written, "; use --", alias.name, *alias.note ? " (" : "", alias.note,
                    *alias.note ? ")" : "");
  if (const std::string gone = gone_flag(name, "?"); !gone.empty()) return gone;
  std::string nearest;
  size_t distance = std::max<size_t>(1, (name.size() + 2) / 3) + 1;  // a name that differs more is no slip
  for (const auto& known : names) {
    if (known == "help" || known == "version") continue;
    const size_t d = edit_distance(name, known);
    if (d >= distance) continue;
    nearest = known;
    distance = d;
  }
  return concat("there is no flag ", written, nearest.empty() ? "" : "; did you mean --", nearest,
                nearest.empty() ? "; " : "? ", program, " --help all lists the flags");
}

// Returns the words of the command line for cxxopts, which alone would accept a switch with a value, would
// never use the next word as the value of a flag that has an implicit value, and does not suggest a flag for
// an unknown one. help_all: set to true by --help all.
std::vector<std::string> Flags::words_of(const std::string& program, int argc, char** argv,
                                         bool& help_all) const {
  std::vector<std::string> words{program}, names{"help", "version"};
  for (const auto& f : flags) {
    names.push_back(f.name);
    if (f.is_bool()) names.push_back("no-" + f.name);
  }
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (word == "-h") word = "--help";
    if (word == "--help" && i + 1 < argc && argv[i + 1] == std::string("all")) {
      help_all = true;
      ++i;
    }
    const std::string written = word.substr(0, word.find('='));
    const bool is_long = word.size() > 2 && word.rfind("--", 0) == 0;
    const bool is_short =
        word.size() > 1 && word[0] == '-' && std::isalpha(static_cast<unsigned char>(word[1]));
    if (is_short || (is_long && std::find(names.begin(), names.end(), written.substr(2)) == names.end()))
      throw UsageError(unknown_flag(program, written, names));
    bool next_is_value = false;
    for (const auto& f : flags) {
      if (word == "--" + f.name) next_is_value = !f.is_bool() && f.implicit.empty() && i + 1 < argc;
      for (const std::string& name : {"--" + f.name, "--no-" + f.name})
        if (f.is_bool() && word.rfind(name + "=", 0) == 0)
          throw UsageError(concat(name, " is a switch and takes no value, got '", word, "'"));
      if (!f.implicit.empty() && word == "--" + f.name)
        word += concat("=", i + 1 < argc && argv[i + 1][0] != '-' ? argv[++i] : f.implicit);
    }
    words.push_back(word);
    if (next_is_value) words.emplace_back(argv[++i]);
  }
  return words;
}

void Flags::parse(int argc, char** argv, const std::string& about, const std::string& example_flags) {
  const std::string program = std::string(argv[0]).substr(std::string(argv[0]).find_last_of('/') + 1);
  example = example_flags.empty() ? "" : concat("./", program, " ", example_flags);
  cxxopts::Options options(program, program + ": " + about), brief(program, program + ": " + about);
  options.set_width(80);
  brief.set_width(80);
  std::vector<std::string> groups;
  for (const auto& f : flags) {
    if (std::find(groups.begin(), groups.end(), f.group) == groups.end()) groups.push_back(f.group);
    const std::string shown = f.get().empty() || f.is_bool() ? "" : " [" + f.get() + "]";
    const auto add_to = [&](cxxopts::Options& to) {
      to.add_options(f.group)(f.as_shown(), f.doc + shown,
                              f.is_bool() ? cxxopts::value<bool>() : cxxopts::value<std::string>(),
                              f.argument);
    };
    add_to(options);
    if (f.facts.marks & kFrequent) add_to(brief);
    // The opposite of a switch is accepted too, because a resumed run may need to change the setting back.
    if (f.is_bool()) options.add_options("hidden")(f.on_by_default() ? f.name : "no-" + f.name, "");
  }
  options.add_options("Help")("help", "this text (also -h); --version prints the version");
  options.add_options("hidden")("version", "");
  groups.push_back("Help");
  bool help_all =
      std::none_of(flags.begin(), flags.end(), [](const Flag& f) { return f.facts.marks & kFrequent; });
  const std::vector<std::string> words = words_of(program, argc, argv, help_all);
  std::vector<const char*> pointers;
  for (const auto& word : words) pointers.push_back(word.c_str());
  cxxopts::ParseResult result;
  try {
    result = options.parse(int(pointers.size()), pointers.data());
  } catch (const cxxopts::exceptions::exception& e) {
    std::string text = e.what();
    for (const std::string quote : {"\u2018", "\u2019"})  // typographic quotes break in some terminals
      for (size_t at; (at = text.find(quote)) != std::string::npos;) text.replace(at, quote.size(), "'");
    throw UsageError(concat(text, "; ", program, " --help lists the flags"));
  }
  if (result.count("version")) {
    std::cout << program << " " << version() << ", revision " << git_revision() << "\n";
    check_stdout();
    std::exit(0);
  }
  if (result.count("help")) {
    std::string text = help_all ? options.help(groups) : brief.help(groups);
    if (!help_all) {  // without empty lines, so that the text fits on one screen
      for (size_t at; (at = text.find("\n\n")) != std::string::npos;) text.erase(at, 1);
      text += " More flags, explained by --help all:\n" + other_flag_names();
    }
    std::cout << text;
    check_stdout();
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

std::vector<std::pair<std::string, std::string>> Flags::values(int without) const {
  std::vector<std::pair<std::string, std::string>> all;
  for (const auto& f : flags)
    if (!(f.facts.marks & without)) all.emplace_back(f.name, f.get());
  return all;
}

// Returns the words of a placeholder such as "off|fp16|bf16"; empty if it has a part that stands for a value.
static std::vector<std::string> words_of_placeholder(const std::string& argument) {
  const bool is_list =
      argument.find('|') != std::string::npos &&
      argument.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-|") == std::string::npos;
  return is_list ? split_list(argument, '|') : std::vector<std::string>();
}

void Flags::check_values() const {
  const auto text_of = [](double v) {
    return std::abs(v) < 1e15 && v == std::floor(v) ? to_text(int64_t(v)) : to_text(v);
  };
  for (const auto& f : flags) {
    const std::string value = f.get();
    if (!f.keyword.empty() && value == f.keyword) continue;
    if (is_literal(f.name) && !f.is_bool()) {
      const double number = std::strtod(value.c_str(), nullptr);
      const auto& [least, most, marks] = f.facts;
      const bool has_most = std::isfinite(most);
      usage_check(number >= least && number <= most, "--", f.name, " must be ",
                  has_most ? "in " : "at least ", text_of(least), has_most ? ".." + text_of(most) : "",
                  ", got ", text_of(number));
    }
    const std::vector<std::string> known = words_of_placeholder(f.argument);
    std::string list;
    for (size_t i = 0; i < known.size(); ++i)
      list += (i == 0 ? "" : i + 1 == known.size() ? " or " : ", ") + known[i];
    usage_check(known.empty() || std::find(known.begin(), known.end(), value) != known.end(), "--", f.name,
                " must be ", list, ", got '", value, "'");
  }
}

bool Flags::is_literal(const std::string& name) const {
  for (const auto& f : flags)
    if (f.name == name)
      return f.get() != f.keyword && !std::holds_alternative<std::string*>(f.member) &&
             !std::holds_alternative<std::vector<std::string>*>(f.member);
  return false;
}

bool Flags::set(const std::string& name, const std::string& value) {
  for (auto& f : flags)
    if (f.name == name) {
      f.set(value);
      return true;
    }
  return false;
}

std::string Flags::other_flag_names() const {
  std::string text, group;
  for (const auto& f : flags) {
    if (f.facts.marks & kFrequent) continue;
    if (f.group != group) text += (text.empty() ? "  " : "\n  ") + f.group + ":";
    group = f.group;
    text += " --" + f.as_shown();
  }
  return wrapped(text, 6) + "\n";
}

std::vector<std::string> split_list(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

}  // namespace yolox
