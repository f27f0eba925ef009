// SPDX-License-Identifier: Apache-2.0
#include "run/tensorboard.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
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

Events::Events(const std::string& folder, int64_t first_step)
    : folder(folder),
      opening(
          tensorboard::event(time(), 0, tensorboard::version_field, "brain.Event:2") +
          tensorboard::event(time(), first_step, tensorboard::session_field, tensorboard::session_start)) {
  waiting.push_back(opening);
  flush();
}

void Events::scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
  const std::string summary = tensorboard::summary(values);
  if (summary.empty()) return;
  if (waiting.size() < max_waiting_records)
    waiting.push_back(tensorboard::event(time(), step, tensorboard::summary_field, summary));
  flush();
}

void Events::flush() {
  int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) fd = create_file();
  if (fd < 0) return;
  while (!waiting.empty()) {
    const std::string& record = waiting.front();
    const ssize_t n = write(fd, record.data() + written, record.size() - written);
    if (n <= 0) break;
    written += size_t(n);
    if (written < record.size()) continue;
    waiting.pop_front();
    written = 0;
    opened = true;
  }
  close(fd);
}

int Events::create_file() {
  const std::string prefix = "events.out.tfevents.";
  int64_t second = int64_t(time());
  std::error_code error;
  for (std::filesystem::directory_iterator i(folder, error), end; !error && i != end; i.increment(error)) {
    const std::string name = i->path().filename().string();
    if (name.rfind(prefix, 0) != 0) continue;
    const int64_t other = std::strtoll(name.c_str() + prefix.size(), nullptr, 10);
    if (other < 9999999999) second = std::max(second, other + 1);  // more digits would not sort later as text
  }
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const std::string name = concat(folder, "/", prefix, second, ".", host, ".", getpid());
  const int fd = open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return fd;
  path = name;
  written = 0;
  if (opened) waiting.push_front(opening);
  opened = false;
  return fd;
}

}  // namespace yolox
