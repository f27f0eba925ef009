// SPDX-License-Identifier: Apache-2.0
// Text from files of unknown origin, such as class names, made safe to print.
#pragma once
#include <rapidjson/encodings.h>
#include <rapidjson/memorystream.h>
#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/text.hpp"

namespace yolox {

// Returns the number of bytes of the UTF-8 character that begins at byte `at`, or 0 if there is none.
inline size_t utf8_bytes(const std::string& text, size_t at) {
  rapidjson::MemoryStream in(text.data() + at, text.size() - at);
  unsigned character;
  return rapidjson::UTF8<>::Decode(in, &character) ? in.Tell() : 0;
}

// Returns `text` with each control character (below U+0020, and U+007F to U+009F) as \xNN, because terminals
// execute escape codes, and a line break in a name would add a false line to the log. Bytes that are not
// UTF-8 become \xNN, too, because other programs could not read the files that contain them. keep_newlines:
// leaves '\n' as it is, for texts of several lines.
inline std::string printable(const std::string& text, bool keep_newlines = false) {
  std::string out;
  for (size_t i = 0, bytes; i < text.size(); i += std::max<size_t>(1, bytes)) {
    bytes = utf8_bytes(text, i);
    const auto first = uint8_t(text[i]);
    const bool c1 = first == 0xC2 && bytes == 2 && uint8_t(text[i + 1]) <= 0x9F;  // U+0080 to U+009F
    if (bytes > 0 && !c1 && ((first >= 0x20 && first != 0x7F) || (first == '\n' && keep_newlines)))
      out.append(text, i, bytes);
    else
      out += formatted("\\x%02x", c1 ? uint8_t(text[i + 1]) : first);
  }
  return out;
}

// Returns the number of characters of UTF-8 text.
inline size_t count_characters(const std::string& text) {
  return size_t(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
}

// Returns the first `characters` characters of UTF-8 text.
inline std::string cut_text(const std::string& text, size_t characters) {
  size_t end = 0;
  for (; end < text.size() && characters > 0; --characters) end += std::max<size_t>(1, utf8_bytes(text, end));
  return text.substr(0, end);
}

// Returns a word of a command line for the shell, in quotes if it needs them.
inline std::string shell_word(const std::string& word) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("_-./+:=,@%", c);
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), is_plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

}  // namespace yolox
