// SPDX-License-Identifier: Apache-2.0
#include "run/log.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <iostream>
#include <set>
#include <sstream>

#include "base/flags.hpp"
#include "base/printable.hpp"

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
  if (!text.empty()) write(wrapped(printable(text, /*keep_newlines=*/true), 8));
}

void Log::row(const std::string& text) { write(printable(text, /*keep_newlines=*/true)); }

void Log::write(const std::string& text) {
  if (tty && in_place) std::cout << "\r\033[K";
  in_place = false;
  if (!quiet) std::cout << text << std::endl;
  file.line(text);
}

void Log::progress(const std::string& text, bool keep) {
  if (keep || (!tty && now() - last > 30)) {
    row(text);
    last = now();
  } else if (tty) {
    winsize window{};
    const size_t columns = ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col - 1 : 79;
    std::cout << "\r\033[K" << cut_to_columns(printable(text), columns) << std::flush;
    in_place = true;
  }
}

Metrics::Metrics(const std::string& path) : file{path} {
  std::ifstream old(path);
  std::string line;
  std::getline(old, line);
  columns = split_list(line);
}

void Metrics::truncate_after(int64_t step, bool evaluation) {
  rewrite([&](const std::string& line) {
    const size_t second = line.find(',') + 1, third = line.find(',', second) + 1;
    if (second == 0 || third == 0) return std::string();
    const int64_t count = std::atoll(line.c_str() + second);
    return count < step || (count == step && (!evaluation || line[third] != ',')) ? line + "\n"
                                                                                  : std::string();
  });
}

void Metrics::row(const Row& cells) {
  std::set<std::string> names;
  for (const auto& cell : cells)
    check(names.insert(cell.first).second, file.path, " already has a column ", cell.first,
          "; give the value in the loss another name");
  add_columns(cells);
  std::ostringstream line;
  line.precision(9);
  for (size_t c = 0; c < columns.size(); ++c) {
    if (c) line << ",";
    const auto named = [&](const auto& cell) { return cell.first == columns[c]; };
    const auto cell = std::find_if(cells.begin(), cells.end(), named);
    if (cell != cells.end() && !std::isnan(cell->second)) line << cell->second;
  }
  file.line(line.str());
}

void Metrics::add_columns(const Row& cells) {
  const std::vector<std::string> before = columns;
  size_t at = 0;
  for (const auto& cell : cells) {
    const auto known = std::find(columns.begin(), columns.end(), cell.first);
    if (known == columns.end()) columns.insert(columns.begin() + std::ptrdiff_t(at), cell.first);
    at = size_t(std::find(columns.begin(), columns.end(), cell.first) - columns.begin()) + 1;
  }
  if (columns == before) return;
  if (before.empty()) return file.line(head());
  rewrite([&](const std::string& line) {  // moves the cells of old rows to the new positions of their columns
    std::vector<std::string> old;
    std::istringstream in(line + ",");
    for (std::string cell; std::getline(in, cell, ',');) old.push_back(cell);
    std::string moved;
    for (size_t c = 0; c < columns.size(); ++c) {
      const auto b = size_t(std::find(before.begin(), before.end(), columns[c]) - before.begin());
      moved += (c ? "," : "") + (b < old.size() ? old[b] : "");
    }
    return moved + "\n";
  });
}

std::string Metrics::head() const {
  std::string text;
  for (const auto& column : columns) text += (text.empty() ? "" : ",") + column;
  return text;
}

}  // namespace yolox
