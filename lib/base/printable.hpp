// SPDX-License-Identifier: Apache-2.0
// Text from files of unknown origin, such as class names, made safe to print.
#pragma once
#include <cstddef>
#include <string>

namespace yolox {

// Returns the number of bytes of the UTF-8 character that begins at byte `at`, or 0 if there is none.
size_t utf8_bytes(const std::string& text, size_t at);

// Returns `text` with each control character (below U+0020, and U+007F to U+009F) as \xNN, because terminals
// execute escape codes, and a line break in a name would add a false line to the log. Bytes that are not
// UTF-8 become \xNN, too, because other programs could not read the files that contain them. keep_newlines:
// leaves '\n' as it is, for texts of several lines.
std::string printable(const std::string& text, bool keep_newlines = false);

// Returns the number of characters of UTF-8 text.
size_t count_characters(const std::string& text);

// Returns the first `characters` characters of UTF-8 text.
std::string cut_text(const std::string& text, size_t characters);

// Returns a word of a command line for the shell, in quotes if it needs them.
std::string shell_word(const std::string& word);

}  // namespace yolox
