// How this project says that something is wrong: one line that names the file, flag or key, what was found
// and what to do about it. No backtrace: the reader is a user, and the mistake is usually in a file or a
// flag.
#pragma once
#include <stdexcept>
#include <string>

#include "base/text.hpp"

namespace yolox {

// A mistake on the command line: programs print it and exit with 2. Every other exception: exit with 1.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws std::runtime_error with all parts in one message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(concat(parts...));
}

// fail(parts...) unless the condition holds; the message is only built when it does not.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// UsageError(parts...) unless the condition holds.
template <class... Parts>
void usage_check(bool condition, const Parts&... parts) {
  if (!condition) throw UsageError(concat(parts...));
}

}  // namespace yolox
