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

// Returns the width of UTF-8 text in a terminal: 2 columns for a wide character of East Asia and for an
// emoji, 0 for a combining mark, 1 for every other character. A byte that is not UTF-8 counts as one
// character.
size_t terminal_columns(const std::string& text);

// Returns the longest beginning of UTF-8 text that is at most `columns` wide.
std::string cut_to_columns(const std::string& text, size_t columns);

// Returns the text in lines of at most 79 columns. Breaks lines at blanks only, so that a longer word has a
// line of its own. Leaves a command at the end of a line, such as ": ./train --resume RUN", in one line, so
// that it can be copied. A line that continues another begins with `indent` blanks, at most 39.
std::string wrapped(const std::string& text, size_t indent);

// Returns a word of a command line for the shell, in quotes if it needs them.
std::string shell_word(const std::string& word);

}  // namespace yolox
