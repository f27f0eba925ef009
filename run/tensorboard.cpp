// SPDX-License-Identifier: Apache-2.0
#include "run/tensorboard.hpp"

#include <unistd.h>

#include <chrono>
#include <cmath>

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
    append_number(out, (crc >> 15 | crc << 17) + 0xA282EAD8u);
  };
  append_number(out, uint64_t(data.size()));
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
  append_number(out, time);
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
    append_number(one, float(value));
    field(out, 1, one);
  }
  return out;
}

}  // namespace tensorboard

static double time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Returns the path of the event file of a session. TensorBoard reads files in the order of their names.
static std::string event_file(const std::string& folder) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return concat(folder, "/events.out.tfevents.", int64_t(time_now()), ".", host, ".", getpid());
}

Events::Events(const std::string& folder, int64_t first_step) : file{event_file(folder)} {
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
