// SPDX-License-Identifier: Apache-2.0
// Reading and writing numbers as raw little-endian bytes.
#pragma once
#include <cstring>
#include <string>
#include <string_view>

namespace yolox {

namespace pth {

// Reads a T from offset `at`. The caller has checked that bytes.size() >= at + sizeof(T).
template <class T>
T number(std::string_view bytes, size_t at = 0) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

// Appends the bytes of `value` to `out`.
template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

}  // namespace pth

}  // namespace yolox
