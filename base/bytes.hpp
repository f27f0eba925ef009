// Numbers as raw bytes, little-endian.
#pragma once
#include <cstring>
#include <string>
#include <string_view>

namespace yolox {

namespace pth {

// A number at the start of raw bytes; the caller has checked that they are there.
template <class T>
T number(std::string_view bytes, size_t at = 0) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

template <class T>
void append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

}  // namespace pth

}  // namespace yolox
