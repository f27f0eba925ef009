// SPDX-License-Identifier: Apache-2.0
// Text from files of unknown origin, such as class names, made safe to print.
#pragma once
#include <string>

namespace yolox {

// Returns `text` with each control character (below U+0020, and U+007F to U+009F) as \xNN, because terminals
// execute escape codes, and a line break in a name would add a false line to the log. keep_newlines: leaves
// '\n' as it is, for texts of several lines.
std::string printable(const std::string& text, bool keep_newlines = false);

// Returns a word of a command line for the shell, in quotes if it needs them.
std::string shell_word(const std::string& word);

}  // namespace yolox
