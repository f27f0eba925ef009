// The scalars of a run for TensorBoard: a file of events per session in the folder of the run.
// Formats: records and their masked CRC as in tensorflow/core/lib/io/record_writer.cc; messages and the
// numbers of their fields as in tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/zip.hpp"

namespace yolox {

namespace tensorboard {

// CRC-32C (RFC 3720, appendix B.4), bit by bit: an event has some hundred bytes.
inline uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

// length, checksum of the length, data, checksum of the data
inline std::string record(std::string_view data) {
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

inline void varint(std::string& out, uint64_t value) {
  for (; value > 127; value >>= 7) out += char(value | 128);
  out += char(value);
}
// A field that is a text or a message.
inline void field(std::string& out, int number, std::string_view content) {
  varint(out, uint64_t(number << 3 | 2));
  varint(out, content.size());
  out += content;
}

// Fields of Event, one of which it has besides time and step, and the SessionLog {status: START}.
constexpr int version_field = 3, summary_field = 5, session_field = 7;
constexpr char session_start[] = "\x08\x01";

// The record of an Event; `time` in seconds since 1970.
inline std::string event(double time, int64_t step, int number, std::string_view content) {
  std::string out = "\x09";
  pth::append(out, time);
  out += '\x10';
  varint(out, uint64_t(step));
  field(out, number, content);
  return record(out);
}

// A Summary of the values that are not NaN.
inline std::string summary(const std::vector<std::pair<std::string, double>>& values) {
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

// Nothing here throws or ends a run because of a file: what cannot be written waits for a later call. A
// record that a full disk has torn is completed in place, as TensorBoard may have read its first part already
// and would take a record that replaced it for damaged.
struct Events {
  // TensorBoard drops what earlier sessions have written at `first_step` or later: it is the first step that
  // this session will write, not the last one that was done before it. Every session says so, also the one at
  // step 0: TensorBoard takes the first such event of a run for its beginning and drops nothing because of it
  // (plugin_event_accumulator.py). Its fast reader, in Rust, goes by steps alone: of a name it drops what is
  // not before the step that it reads.
  Events(const std::string& folder, int64_t first_step)
      : folder(folder),
        opening(
            tensorboard::event(time(), 0, tensorboard::version_field, "brain.Event:2") +
            tensorboard::event(time(), first_step, tensorboard::session_field, tensorboard::session_start)) {
    waiting.push_back(opening);
    flush();
  }

  // Names are UTF-8; the part before a slash is the group: "train/loss". NaN values are left out. What was
  // written stays when the process is killed.
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) {
    const std::string summary = tensorboard::summary(values);
    if (summary.empty()) return;
    if (waiting.size() < most_waiting)
      waiting.push_back(tensorboard::event(time(), step, tensorboard::summary_field, summary));
    flush();
  }

 private:
  static constexpr size_t most_waiting = 10000;  // some megabytes
  std::string folder, path, opening;
  std::deque<std::string> waiting;  // records that are not in the file, or not wholly
  size_t written = 0;               // bytes of the first of them that are in the file
  bool opened = false;              // the file has its opening

  static double time() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }

  // The file is opened anew each time: a folder may be gone, and may come back.
  void flush() {
    int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) fd = begin();
    if (fd < 0) return;
    while (!waiting.empty()) {
      const std::string& record = waiting.front();
      const ssize_t n = write(fd, record.data() + written, record.size() - written);
      if (n <= 0) break;
      written += size_t(n);
      if (written < record.size()) continue;
      waiting.pop_front();
      written = 0, opened = true;
    }
    close(fd);
  }

  // A new file, instead of the one that is gone if there was one; -1 if it cannot be made. TensorBoard reads
  // files in the order of their names, so its time is after that of all others, whatever the clock says.
  int begin() {
    const std::string prefix = "events.out.tfevents.";
    int64_t second = int64_t(time());
    std::error_code error;
    for (std::filesystem::directory_iterator i(folder, error), end; !error && i != end; i.increment(error)) {
      const std::string name = i->path().filename().string();
      if (name.rfind(prefix, 0) != 0) continue;
      const int64_t other = std::strtoll(name.c_str() + prefix.size(), nullptr, 10);
      if (other < 9999999999) second = std::max(second, other + 1);  // as text, more digits are not later
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
};

}  // namespace yolox
