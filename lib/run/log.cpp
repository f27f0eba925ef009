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
#include <set>
#include <sstream>

#include "base/flags.hpp"
#include "base/new_file.hpp"
#include "base/printable.hpp"
#include "base/text.hpp"

namespace yolox {

void AppendFile::append(const std::string& text) const {
  if (path.empty()) return;
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const off_t end = lseek(fd, 0, SEEK_END);
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = write(fd, text.data() + done, text.size() - done);
    if (n <= 0 && errno == EINTR) continue;
    if (n <= 0) {
      if (ftruncate(fd, end) < 0) errno = 0;  // a pipe cannot be truncated
      break;
    }
    done += size_t(n);
  }
  close(fd);
}

void Log::line(const std::string& text) {
  if (text.empty()) return;
  const std::string safe = printable(text, /*keep_newlines=*/true);
  if (tty && in_place) std::cout << "\r\033[K";
  in_place = false;
  if (!quiet) std::cout << safe << std::endl;
  file.line(safe);
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

// Returns the path of a file of Metrics: metrics.csv, metrics_2.csv, ...
static AppendFile metrics_file(const std::string& first, size_t number) {
  if (number == 1) return {first};
  return {concat(first.substr(0, first.rfind('.')), "_", number, ".csv")};
}

Metrics::Metrics(const std::string& path) : files{{path}} {
  while (std::filesystem::exists(metrics_file(path, files.size() + 1).path))
    files.push_back(metrics_file(path, files.size() + 1));
  std::ifstream newest(files.back().path);
  std::string head;
  std::getline(newest, head);
  columns = split_list(head);
}

void Metrics::truncate_after(int64_t step, bool evaluation) const {
  for (const AppendFile& file : files) {
    std::ifstream old(file.path);
    std::string text, line;
    for (bool head = true; std::getline(old, line) && !old.eof(); head = false) {  // leaves out a torn line
      const size_t second = line.find(',') + 1, third = line.find(',', second) + 1;
      const int64_t count = std::atoll(line.c_str() + second);
      const bool before = count < step || (count == step && (!evaluation || line[third] != ','));
      if (head || (second > 0 && third > 0 && before)) text += line + "\n";
    }
    if (!text.empty()) replace_file(file.path, text);
  }
}

void Metrics::row(const Row& cells) {
  std::set<std::string> names;
  for (const auto& cell : cells)
    check(names.insert(cell.first).second, files.back().path, " already has a column ", cell.first,
          "; give the value in the loss another name");
  std::ostringstream text;
  text.precision(9);
  for (const auto& column : columns) names.erase(column);
  if (!names.empty()) {
    if (!columns.empty()) files.push_back(metrics_file(files[0].path, files.size() + 1));
    columns.clear();
    for (const auto& cell : cells) {
      text << (columns.empty() ? "" : ",") << cell.first;
      columns.push_back(cell.first);
    }
    text << "\n";
  }
  for (size_t c = 0; c < columns.size(); ++c) {
    if (c) text << ",";
    const auto named = [&](const auto& cell) { return cell.first == columns[c]; };
    const auto cell = std::find_if(cells.begin(), cells.end(), named);
    if (cell != cells.end() && !std::isnan(cell->second)) text << cell->second;
  }
  files.back().line(text.str());
}

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
