// SPDX-License-Identifier: Apache-2.0
#include "run/log.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/text.hpp"

namespace yolox {

void append_text(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const off_t end = lseek(fd, 0, SEEK_END);
  const bool whole = write(fd, text.data(), text.size()) == ssize_t(text.size());
  if (!whole && ftruncate(fd, end) != 0) errno = 0;  // a pipe cannot be truncated
  close(fd);
}

void Log::line(const std::string& text) {
  if (text.empty()) return;
  const std::string safe = printable(text, /*keep_newlines=*/true);
  if (tty && in_place) std::cout << "\r\033[K";
  in_place = false;
  if (!quiet) std::cout << safe << std::endl;
  append_text(path, safe + "\n");
}

void Log::progress(const std::string& text, bool keep) {
  if (keep || (!tty && now() - last > 30)) {
    line(text);
    last = now();
  } else if (tty) {
    winsize window{};
    const size_t columns = ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col - 1 : 79;
    std::cout << "\r\033[K" << cut_text(printable(text), columns) << std::flush;
    in_place = true;
  }
}

static double time_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Returns the path of the event file of a session. TensorBoard reads files in the order of their names.
static std::string event_file(const std::string& folder) {
  return concat(folder, "/events.out.tfevents.", int64_t(time_now()), ".", getpid());
}

std::string Metrics::csv(size_t number) const {
  return concat(folder, "/metrics", number > 1 ? concat("_", number) : "", ".csv");
}

Metrics::Metrics(const std::string& folder, int64_t first) : folder(folder), events(event_file(folder)) {
  for (;; ++number) {
    columns.clear();
    std::ifstream old(csv(number));
    std::string text, line;
    while (std::getline(old, line) && !old.eof()) {  // leaves out a torn line
      if (text.empty()) columns = split_list(line);
      const int64_t step = std::atoll(line.c_str() + line.find(',') + 1);
      if (text.empty() || step <= first) text += line + "\n";
    }
    if (!text.empty()) replace_file(csv(number), text);
    if (!std::filesystem::exists(csv(number + 1))) break;
  }
  // The session event is needed at step 0, too: TensorBoard discards nothing for the first one of a run
  // (plugin_event_accumulator.py).
  using namespace tensorboard;
  append_text(events, event(time_now(), 0, version_field, "brain.Event:2") +
                          event(time_now(), first + 1, session_field, session_start));
}

void Metrics::row(const Row& cells) {
  std::map<std::string, double> values;
  for (const Cell& cell : cells)
    check(values.emplace(cell.column, cell.value).second, csv(number), " already has a column ", cell.column,
          "; give the value in the loss another name");
  std::ostringstream text;
  text.precision(9);
  if (std::ranges::any_of(values, [&](const auto& v) { return !std::ranges::count(columns, v.first); })) {
    if (!columns.empty()) ++number;
    columns.clear();
    for (const Cell& cell : cells) columns.push_back(cell.column);
    for (size_t c = 0; c < columns.size(); ++c) text << (c ? "," : "") << columns[c];
    text << "\n";
  }
  for (size_t c = 0; c < columns.size(); ++c) {
    if (c) text << ",";
    const auto value = values.find(columns[c]);
    if (value != values.end() && !std::isnan(value->second)) text << value->second;
  }
  append_text(csv(number), text.str() + "\n");
  const std::string summary = tensorboard::summary(cells);
  if (!summary.empty())
    append_text(events, tensorboard::event(time_now(), int64_t(cells.at(1).value), tensorboard::summary_field,
                                           summary));
}

// Returns the masked CRC-32C (RFC 3720, appendix B.4), computed bit by bit, because an event has only some
// hundred bytes.
static uint32_t masked_crc(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const unsigned char byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

// Appends a protobuf varint.
static void varint(std::string& out, uint64_t value) {
  for (; value > 127; value >>= 7) out += char(value | 128);
  out += char(value);
}

// Appends a protobuf field that is a string or a message.
static void field(std::string& out, int number, std::string_view content) {
  varint(out, uint64_t(number << 3 | 2));
  varint(out, content.size());
  out += content;
}

std::string tensorboard::event(double time, int64_t step, int number, std::string_view content) {
  std::string data = "\x09";
  append_number(data, time);
  data += '\x10';
  varint(data, uint64_t(step));
  field(data, number, content);
  std::string record;
  append_number(record, uint64_t(data.size()));
  append_number(record, masked_crc(record));
  record += data;
  append_number(record, masked_crc(data));
  return record;
}

std::string tensorboard::summary(const Metrics::Row& cells) {
  std::string out;
  for (const auto& [column, value, tag] : cells) {
    if (tag.empty() || std::isnan(value)) continue;
    std::string one;
    field(one, 1, tag);
    one += '\x15';
    append_number(one, float(value));
    field(out, 1, one);
  }
  return out;
}

}  // namespace yolox
