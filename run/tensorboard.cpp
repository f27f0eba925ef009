// SPDX-License-Identifier: Apache-2.0
#include "run/tensorboard.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/bytes.hpp"
#include "base/error.hpp"

namespace yolox {

namespace tensorboard {

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

std::string record(std::string_view data) {
  std::string out;
  const auto checksum = [&](std::string_view of) {
    const uint32_t crc = crc32c(of);
    pth::append(out, (crc >> 15 | crc << 17) + 0xA282EAD8u);
  };
  pth::append(out, uint64_t(data.size()));
  checksum(out);
  out += data;
  checksum(data);
  return out;
}

void varint(std::string& out, uint64_t value) {
  for (; value > 127; value >>= 7) out += char(value | 128);
  out += char(value);
}

void field(std::string& out, int number, std::string_view content) {
  varint(out, uint64_t(number << 3 | 2));
  varint(out, content.size());
  out += content;
}

std::string event(double time, int64_t step, int number, std::string_view content) {
  std::string out = "\x09";
  pth::append(out, time);
  out += '\x10';
  varint(out, uint64_t(step));
  field(out, number, content);
  return record(out);
}

std::string summary(const std::vector<std::pair<std::string, double>>& values) {
  std::string out;
  for (const auto& [name, value] : values) {
    if (std::isnan(value)) continue;
    std::string one;
    field(one, 1, name);
    one += '\x15';
    pth::append(one, float(value));
    field(out, 1, one);
  }
  return out;
}

}  // namespace tensorboard

static double time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Returns the path of a new event file. TensorBoard reads files in the order of their names, so the time in
// the name is later than in all others, even if the clock has been set back.
static std::string new_event_file(const std::string& folder) {
  const std::string prefix = "events.out.tfevents.";
  int64_t second = int64_t(time_now());
  std::error_code error;
  for (std::filesystem::directory_iterator i(folder, error), end; !error && i != end; i.increment(error)) {
    const std::string name = i->path().filename().string();
    if (name.rfind(prefix, 0) != 0) continue;
    const int64_t other = std::strtoll(name.c_str() + prefix.size(), nullptr, 10);
    if (other < 9999999999) second = std::max(second, other + 1);  // more digits would not sort later as text
  }
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return concat(folder, "/", prefix, second, ".", host, ".", getpid());
}

Events::Events(const std::string& folder, int64_t first_step) : file{new_event_file(folder)} {
  using namespace tensorboard;
  file.append(event(time_now(), 0, version_field, "brain.Event:2") +
              event(time_now(), first_step, session_field, session_start));
}

void Events::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) const {
  const std::string summary = tensorboard::summary(values);
  if (!summary.empty())
    file.append(tensorboard::event(time_now(), step, tensorboard::summary_field, summary));
}

}  // namespace yolox
