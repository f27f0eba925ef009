// SPDX-License-Identifier: Apache-2.0
#include "base/printable.hpp"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <sstream>

#include "base/text.hpp"

namespace yolox {

size_t utf8_bytes(const std::string& text, size_t at) {
  const auto byte = [&](size_t k) { return at + k < text.size() ? uint8_t(text[at + k]) : 0u; };
  const unsigned first = byte(0), second = byte(1);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first >= 0xF5) return 0;
  const size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  for (size_t k = 1; k < bytes; ++k)
    if ((byte(k) & 0xC0) != 0x80) return 0;
  // Overlong encodings, UTF-16 surrogates and code points above U+10FFFF.
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0)) return 0;
  if ((first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90)) return 0;
  return bytes;
}

std::string printable(const std::string& text, bool keep_newlines) {
  std::string out;
  for (size_t i = 0, bytes; i < text.size(); i += std::max<size_t>(1, bytes)) {
    bytes = utf8_bytes(text, i);
    const auto first = uint8_t(text[i]);
    const bool c1 = first == 0xC2 && bytes == 2 && uint8_t(text[i + 1]) <= 0x9F;  // U+0080 to U+009F
    if (bytes > 0 && !c1 && ((first >= 0x20 && first != 0x7F) || (first == '\n' && keep_newlines))) {
      out.append(text, i, bytes);
      continue;
    }
    out += formatted("\\x%02x", c1 ? uint8_t(text[i + 1]) : first);
  }
  return out;
}

// Returns the character of UTF-8 text that begins at byte `at`, and sets `bytes` to its length. A byte that
// is not UTF-8 is a character.
static char32_t character_at(const std::string& text, size_t at, size_t& bytes) {
  bytes = std::max<size_t>(1, utf8_bytes(text, at));
  const auto first = uint8_t(text[at]);
  if (bytes == 1) return first;
  char32_t character = first & (0xFF >> (bytes + 1));
  for (size_t k = 1; k < bytes; ++k) character = character << 6 | (uint8_t(text[at + k]) & 0x3F);
  return character;
}

// Returns the columns of a character, by the blocks of Unicode.
static size_t columns_of(char32_t c) {
  struct Range {
    char32_t first, last;
  };
  static constexpr Range combining[] = {{0x300, 0x36F}, {0x200B, 0x200F}, {0x20D0, 0x20FF}, {0xFE00, 0xFE0F}};
  static constexpr Range wide[] = {
      {0x1100, 0x115F},   {0x2E80, 0x303E},   {0x3041, 0xA4CF},  {0xA960, 0xA97F}, {0xAC00, 0xD7A3},
      {0xF900, 0xFAFF},   {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},  {0xFFE0, 0xFFE6}, {0x1F300, 0x1F64F},
      {0x1F680, 0x1F6FF}, {0x1F900, 0x1F9FF}, {0x20000, 0x3FFFD}};
  const auto includes = [c](const Range& r) { return r.first <= c && c <= r.last; };
  if (std::any_of(std::begin(combining), std::end(combining), includes)) return 0;
  return std::any_of(std::begin(wide), std::end(wide), includes) ? 2 : 1;
}

// Returns the end of the longest part of UTF-8 text from byte `at` on that is at most `columns` wide.
static size_t end_of_columns(const std::string& text, size_t at, size_t columns) {
  for (size_t bytes = 0, used = 0; at < text.size(); at += bytes) {
    used += columns_of(character_at(text, at, bytes));
    if (used > columns) break;
  }
  return at;
}

std::string cut_to_columns(const std::string& text, size_t columns) {
  return text.substr(0, end_of_columns(text, 0, columns));
}

size_t terminal_columns(const std::string& text) {
  size_t columns = 0;
  for (size_t at = 0, bytes = 0; at < text.size(); at += bytes)
    columns += columns_of(character_at(text, at, bytes));
  return columns;
}

// Returns the end of the text before a command such as ": ./train --resume RUN", behind its colon, or the
// size of the line. Names from files, such as a class "a: ./b", are no commands.
static size_t end_before_command(const std::string& line) {
  for (size_t colon = 0; (colon = line.find(": ./", colon)) != std::string::npos; ++colon) {
    size_t end = colon + 4;
    while (end < line.size() && std::islower(static_cast<unsigned char>(line[end]))) ++end;
    if (line.compare(end, 3, " --") == 0) return colon + 1;
  }
  return line.size();
}

std::string wrapped(const std::string& text, size_t indent) {
  constexpr size_t kColumns = 79;
  indent = std::min(indent, kColumns / 2);
  std::string lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const std::string rest = line.substr(0, end_before_command(line)), command = line.substr(rest.size());
    size_t at = 0, blanks = 0;  // begin and indentation of the present line
    for (;;) {
      const size_t end = end_of_columns(rest, at, kColumns - blanks);
      if (end == rest.size()) break;
      size_t blank = rest.rfind(' ', end);
      if (blank == std::string::npos || blank <= at + (at == 0 ? indent : 0))
        blank = rest.find(' ', end);  // a long path
      if (blank == std::string::npos) break;
      lines += std::string(blanks, ' ') + rest.substr(at, blank - at) + "\n";
      at = blank + 1;
      blanks = indent;
    }
    const std::string last = std::string(blanks, ' ') + rest.substr(at);
    const bool fits = command.empty() || terminal_columns(last + command) <= kColumns;
    lines += last + (fits ? command : "\n" + std::string(indent, ' ') + command.substr(1)) + "\n";
  }
  if (!lines.empty()) lines.pop_back();
  return lines;
}

std::string shell_word(const std::string& word) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_-./+:=,@%", c);
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace yolox
