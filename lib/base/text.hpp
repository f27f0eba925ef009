// SPDX-License-Identifier: Apache-2.0
// Text for messages (concatenation, printf formats, lists, numbers, sizes and times), and errors. The message
// of an exception is one line: the file, flag or key, the value that was found, and the remedy. It has no
// backtrace, because the reader is a user and the cause is usually a file or a flag. Also the hash of a text,
// and numbers as bytes.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace yolox {

// Returns all parts, formatted with operator<<, as one string: concat("a", 3, 0.5) is "a30.5".
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// ---- errors

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

// ---- formats

// Returns at most 255 bytes of text, formatted with a printf format.
[[gnu::format(printf, 1, 2)]] inline std::string formatted(const char* format, ...) {
  char text[256];
  std::va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

// Returns the FNV-1a hash (64 bits) of bytes, continued from `hash`, the hash of the bytes before them.
inline uint64_t fnv1a(std::string_view bytes, uint64_t hash = 0xCBF29CE484222325u) {
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001B3u;
  return hash;
}

// Reads a T of raw little-endian bytes from offset `at`. The caller has checked that bytes.size() >= at +
// sizeof(T).
template <class T>
T read_number(std::string_view bytes, size_t at = 0) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

// Appends the raw little-endian bytes of `value` to `out`.
template <class T>
void append_number(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

// Returns "a, b, c". If there are more than `max` names, the rest is "...".
inline std::string listed(const std::vector<std::string>& names, size_t max = 8) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), max); ++i) text += (i ? ", " : "") + names[i];
  return text + (names.size() > max ? ", ..." : "");
}

// Returns a number with three significant digits: 1.21, 12.3.
inline std::string rounded(double value) { return formatted("%.3g", value); }

// Returns a number of bytes in at most 5 characters, up to 9999 GB: 128G, 1.2G, 640M.
inline std::string short_bytes(double bytes) {
  if (bytes >= 1e9) return formatted(bytes >= 99.95e9 ? "%.0fG" : "%.1fG", bytes / 1e9);
  return formatted("%.0fM", bytes / 1e6);
}

// Returns a time in at most 6 characters: 42s, 12m30s, 3h05m, 4d07h.
inline std::string short_time(double seconds) {
  const auto s = static_cast<int>(std::max(0.0, std::min(seconds, 99.0 * 86400)));
  if (s < 60) return formatted("%ds", s);
  if (s < 3600) return formatted("%dm%02ds", s / 60, s % 60);
  if (s < 86400) return formatted("%dh%02dm", s / 3600, s / 60 % 60);
  return formatted("%dd%02dh", s / 86400, s / 3600 % 24);
}

}  // namespace yolox
