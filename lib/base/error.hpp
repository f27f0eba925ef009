// SPDX-License-Identifier: Apache-2.0
// Errors. The message of an exception is one line: the file, flag or key, the value that was found, and the
// remedy. It has no backtrace, because the reader is a user and the cause is usually a file or a flag.
#pragma once
#include <stdexcept>

#include "base/text.hpp"

namespace yolox {

// A mistake on the command line. The program prints it and exits with 2. Every other exception exits with 1.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws std::runtime_error with the concatenated parts as message.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(concat(parts...));
}

// Calls fail(parts...) if `condition` is false. The message is built only then.
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// Throws UsageError with the concatenated parts as message if `condition` is false.
template <class... Parts>
void usage_check(bool condition, const Parts&... parts) {
  if (!condition) throw UsageError(concat(parts...));
}

}  // namespace yolox
