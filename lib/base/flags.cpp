// SPDX-License-Identifier: Apache-2.0
#include "base/flags.hpp"

#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cxxopts.hpp>
#include <iostream>
#include <sstream>

#include "base/program.hpp"

namespace yolox {

// ---- values as text

// Returns the shortest text that reads back as the same value.
template <class T>
static std::string to_text(const T& v) {
  if constexpr (std::is_same_v<T, bool>) {
    return v ? "true" : "false";
  } else if constexpr (std::is_same_v<T, double>) {
    char text[32];
    return {text, std::to_chars(text, std::end(text), v).ptr};
  } else {
    return concat(v);
  }
}

template <class T>
static void from_text(const std::string& name, const std::string& text, T& v) {
  if constexpr (std::is_same_v<T, bool>) {
    v = text == "true";
  } else if constexpr (std::is_same_v<T, std::string>) {
    v = text;
  } else {
    std::istringstream in(text);
    T read;
    usage_check(in >> std::noskipws >> read && in.eof(), "--", name, " must be ",
                std::is_integral_v<T> ? "an integer" : "a number", ", got '", text, "'");
    v = read;
  }
}

std::string Flags::Flag::keyword() const {
  const bool is_auto = std::holds_alternative<int*>(member) && argument.ends_with("|auto");
  return is_auto ? "auto" : facts.marks & kRecipe ? "recipe" : "";
}

std::string Flags::Flag::get() const {
  const std::string text = std::visit([](const auto*v) { return to_text(*v); }, member), word = keyword();
  return !word.empty() && text == (word == "auto" ? "0" : "-1") ? word : text;
}

void Flags::Flag::set(const std::string& text) const {
  const std::string word = keyword();
  const bool is_auto = word == "auto", is_word = !word.empty() && text == word;
  const std::string number = is_word ? (is_auto ? "0" : "-1") : text;
  std::visit([&](auto* v) { from_text(name, number, *v); }, member);
  usage_check(word.empty() || is_word || (get() != word && !(is_auto && text[0] == '-')), "--", name,
              " must be a number ", is_auto ? "above" : "from", " 0 or ", word, ", got ", text);
}

const Flags::Flag* Flags::find(const std::string& name) const {
  const auto flag = std::ranges::find(flags, name, &Flag::name);
  return flag == flags.end() ? nullptr : &*flag;
}

// ---- the command line

// Flags that users of YOLOX, Ultralytics or MMDetection type, the flag here, and what differs. The first row
// whose flag the program has holds.
struct Alias {
  const char *others, *name, *note;
};
static const Alias aliases[] = {
    {"b batch batch-size", "bs", ""},
    {"c ckpt", "weights", ""},
    {"n", "model", ""},
    {"f exp-file", "model", " (there are no experiment files: flags set everything)"},
    {"d devices", "gpus", " (the number of GPUs, not an index)"},
    {"d", "device", ""},
    {"imgsz tsize", "size", " (a multiple of 32, or HEIGHTxWIDTH)"},
    {"fp16", "amp", " (--amp fp16)"},
    {"project name expn", "out", " (one path, such as runs/my-run)"},
    {"name", "save", " (one path, such as runs/my-demo)"},
    {"path", "source", ""},
    {"iou", "nms", ""},
    {"mosaic", "mosaic-prob", " (a probability; 0 = off)"},
    {"close-mosaic", "no-aug-epochs", ""},
};

// Flags of older versions, each with the value that had no effect, and what to do now.
struct Gone {
  const char *flags, *remedy;
};
static const Gone gone_flags[] = {
    {"classes= crop=false", "filter the boxes of --json FILE, or cut them out of the images"},
    {"draw=true no-draw=false", "images are always drawn, into --save DIR"},
    {"recursive=false", "run ./demo once for each folder"},
    {"bn-momentum=0.03",
     "it follows from the recipe and the length of the run; edit norm_momentum_of_run() in optim.hpp, or "
     "Plan::norm_momentum in config.hpp"},
    {"fast=off",
     "the fused norm is on wherever it computes what torch computes; --graph replays steps as CUDA graphs"},
    {"hsv-h=5 hsv-s=30 hsv-v=30 mixup-scale-hi=1.5 mixup-scale-lo=0.5 shear=2 translate=0.1",
     "edit AugmentConfig in augment.hpp"},
    {"mosaic-scale-hi=2 mosaic-scale-lo=0.1", "edit the recipes in models.hpp"},
    {"compress=off", "gradients are all-reduced in float32"},
    {"dtr-slowdown=1.3", "with --dtr, --bs auto accepts 1.3 times the computation"},
    {"keep=1", "last.pth and last.bak.pth, the one before it, are kept"},
    {"keep-going=false", "--resume RUN --lr X continues after a non-finite loss"},
    {"min-lr-ratio=0.05", "edit Schedule::min_ratio in optim.hpp"},
    {"repeat-rare=0", "--class-weights X weights rare classes in the loss"},
    {"restarts=0", "until ./train --resume auto --out RUN ...; do sleep 1; done"},
    {"report=", "tools/report.py writes the page, see docs/report.md"},
    {"voc=false", "COCO AP50 is near VOC AP; the VOC development kit computes the latter"},
    {"hard-negatives=", "tools/report.py --hard-negatives FILE.json"},
    {"tile=0 tiles=0 overlap=0.2",
     "tools/tiles.py cuts images and labels into tiles, and merges the detections"},
    {"master= node=0 nodes=1",
     "torchrun and srun start ranks on several machines: torchrun --no-python --nnodes 2 --nproc-per-node 4 "
     "--rdzv-backend c10d --rdzv-endpoint HOST0:29500 ./train ..."},
    {"patience-on=ap", "--patience waits for a better score"},
    {"format=", "the extension of --out selects the format: .onnx, or .ts for TorchScript"},
    {"fp16=false", "trtexec --fp16, or onnxconverter-common"},
    {"class-map= ignore-class=", "tools/merge_coco.py --rename OLD=NEW --ignore NAME"},
};

std::string gone_flag(const std::string& name, const std::string& value) {
  for (const auto& row : gone_flags)
    for (const std::string& flag : split_list(row.flags, ' '))
      if (flag.starts_with(name + "=") && flag != name + "=" + value)
        return concat("--", name, " is gone: ", row.remedy);
  return "";
}

std::string Flags::unknown_flag(const std::string& word) const {
  const std::string written = word.substr(0, word.find('='));
  std::string name = written.substr(std::min(written.find_first_not_of('-'), written.size()));
  std::ranges::replace(name, '_', '-');  // --batch_size
  for (const auto& [others, here, note] : aliases)
    if (std::ranges::count(split_list(others, ' '), name) && find(here))
      return concat("there is no flag ", written, "; use --", here, note);
  const std::string gone = gone_flag(name, "?");
  return gone.empty() ? concat("there is no flag ", written, "; --help lists the flags") : gone;
}

void Flags::parse(int argc, char** argv, const std::string& about, const std::string& example_flags) {
  const std::string program = std::string(argv[0]).substr(std::string(argv[0]).find_last_of('/') + 1);
  example = example_flags.empty() ? "" : concat("./", program, " ", example_flags);
  cxxopts::Options options(program, program + ": " + about);
  options.set_width(80).allow_unrecognised_options();
  std::vector<std::string> groups;
  for (const auto& f : flags) {
    if (!std::ranges::count(groups, f.group)) groups.push_back(f.group);
    const std::string shown = f.get().empty() || f.is_bool() ? "" : " [" + f.get() + "]";
    options.add_options(f.group)(
        f.on_by_default() ? "no-" + f.name : f.name, (f.on_by_default() ? "turn off " : "") + f.doc + shown,
        f.is_bool() ? cxxopts::value<bool>() : cxxopts::value<std::string>(), f.argument);
    // The opposite of a switch is accepted too, because a resumed run may need to change the setting back.
    if (f.is_bool()) options.add_options("hidden")(f.on_by_default() ? f.name : "no-" + f.name, "");
  }
  options.add_options("Help")("h,help", "this text")("version", "version and revision");
  groups.push_back("Help");
  std::vector<std::string> words{program};
  for (int i = 1; i < argc; ++i) {
    words.emplace_back(argv[i]);
    // cxxopts does not read the next word as a value that may be left out.
    for (const auto& f : flags)
      if (!f.facts.implicit.empty() && argv[i] == "--" + f.name)
        words.back() += concat("=", i + 1 < argc && argv[i + 1][0] != '-' ? argv[++i] : f.facts.implicit);
  }
  std::vector<const char*> pointers;
  for (const auto& word : words) pointers.push_back(word.c_str());
  cxxopts::ParseResult result;
  try {
    result = options.parse(int(pointers.size()), pointers.data());
  } catch (const cxxopts::exceptions::exception& e) {
    throw UsageError(concat(e.what(), "; --help lists the flags"));
  }
  if (!result.unmatched().empty()) {
    const std::string& first = result.unmatched()[0];
    if (first.size() > 1 && first[0] == '-') throw UsageError(unknown_flag(first));
    throw UsageError(concat("unexpected argument '", first,
                            "'; write a value as --name value or --name=value; ",
                            "a switch has no value (--no-NAME turns a switch off)"));
  }
  if (result.count("version") || result.count("help")) {
    std::cout << (result.count("help")
                      ? options.help(groups)
                      : concat(program, " ", version(), ", revision ", git_revision(), "\n"));
    check_stdout();
    std::exit(0);
  }
  for (const auto& a : result.arguments()) {
    const std::string name = a.key().starts_with("no-") && !find(a.key()) ? a.key().substr(3) : a.key();
    const Flag& f = *find(name);
    usage_check(!f.is_bool() || a.value() == "true", "--", a.key(), " is a switch and takes no value, got '",
                a.value(), "'");
    f.set(f.is_bool() ? to_text(a.key() == name) : a.value());
    given.push_back(name);
  }
}

Settings Flags::values(int without) const {
  Settings all;
  for (const auto& f : flags)
    if (!(f.facts.marks & without)) all.emplace_back(f.name, f.get());
  return all;
}

RunSettings Flags::settings() const {
  RunSettings all{start, {}};
  const Settings now = values(/*without=*/kOfCall);
  for (size_t i = 0; i < now.size(); ++i)
    if (now[i] != start.at(i)) all.chosen.push_back(now[i]);
  return all;
}

void Flags::check_values() const {
  for (const auto& f : flags) {
    const std::string value = f.get();
    if (value == f.keyword()) continue;
    if (is_literal(f.name, value) && !f.is_bool()) {
      const double number = std::strtod(value.c_str(), nullptr), min = f.facts.min, max = f.facts.max;
      const bool has_max = std::isfinite(max);
      usage_check(number >= min && number <= max, "--", f.name, " must be ", has_max ? "in " : "at least ",
                  to_text(min), has_max ? ".." + to_text(max) : "", ", got ", value);
    }
    // A placeholder such as "off|fp16|bf16" has all words, unless a part of it stands for a value.
    const bool has_words = f.argument.find('|') != std::string::npos &&
                           std::ranges::none_of(f.argument, [](char c) { return std::isupper(c); });
    const std::vector<std::string> words = split_list(f.argument, '|');
    usage_check(!has_words || std::ranges::count(words, value), "--", f.name, " must be ", listed(words),
                ", got '", value, "'");
  }
}

bool Flags::is_literal(const std::string& name, const std::string& value) const {
  const Flag* f = find(name);
  return f && value != f->keyword() && !std::holds_alternative<std::string*>(f->member);
}

bool Flags::set(const std::string& name, const std::string& value) {
  const Flag* f = find(name);
  if (f) f->set(value);
  return f != nullptr;
}

std::vector<std::string> split_list(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

}  // namespace yolox
