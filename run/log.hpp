// What a run says as it goes: log, metrics and progress line; and the signals that end it.
#pragma once
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/new_file.hpp"
#include "base/program.hpp"

namespace yolox {

// A text file that grows line by line. It is opened anew for each: a folder may be gone and come back. On a
// full disk a line is lost, whole; that ends no run.
struct Lines {
  std::string path;

  void add(const std::string& text) const {
    if (path.empty()) return;
    const std::string line = text + "\n";
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return;
    const off_t end = lseek(fd, 0, SEEK_END);
    for (size_t done = 0; done < line.size();) {
      const ssize_t n = write(fd, line.data() + done, line.size() - done);
      if (n <= 0 && errno == EINTR) continue;
      if (n <= 0) {
        if (ftruncate(fd, end) < 0) errno = 0;  // a pipe or the like: what is written stays
        break;
      }
      done += size_t(n);
    }
    close(fd);
  }
};

// Prints to the terminal and to log.txt (path; empty: none). In a terminal the progress line is rewritten in
// place. quiet: to the file only.
struct Log {
  explicit Log(const std::string& path, bool quiet = false)
      : file{path}, quiet(quiet), tty(!quiet && isatty(1)) {}

  void line(const std::string& text) {
    if (tty && in_place) std::cout << "\r\033[K";
    in_place = false;
    if (!quiet) std::cout << text << std::endl;
    file.add(text);
  }
  // What the run is made of: a heading of 8 columns and its text, in lines of 80 columns at most.
  void fact(const std::string& text) {
    constexpr size_t kHeading = 8, kColumns = 79;
    std::string rest = text;
    while (rest.size() > kColumns) {
      const size_t blank = rest.rfind(' ', kColumns);
      if (blank == std::string::npos || blank <= kHeading) break;
      line(rest.substr(0, blank));
      rest = std::string(kHeading, ' ') + rest.substr(blank + 1);
    }
    line(rest);
  }
  // Replaces the progress line in a terminal. Elsewhere it is a line of its own, every 30 seconds at most, or
  // when `keep` says that it is worth one.
  void progress(const std::string& text, bool keep) {
    if (keep || (!tty && now() - last > 30)) {
      line(text);
      last = now();
    } else if (tty) {
      winsize window{};
      const size_t columns = ioctl(1, TIOCGWINSZ, &window) == 0 && window.ws_col > 1 ? window.ws_col - 1 : 79;
      std::cout << "\r\033[K" << text.substr(0, columns) << std::flush;
      in_place = true;
    }
  }

 private:
  Lines file;
  bool quiet, tty, in_place = false;
  double last = now();
};

// metrics.csv. Each row names its cells. A name that the file does not have yet becomes a new column behind
// the one that it follows in the row, so that the columns stand in the order of the first row.
class Metrics {
 public:
  using Row = std::vector<std::pair<std::string, double>>;

  // Goes on with the file if it exists.
  explicit Metrics(const std::string& path) : file{path} {
    std::ifstream old(path);
    std::string line, name;
    std::getline(old, line);
    std::istringstream head(line);
    while (std::getline(head, name, ',')) columns.push_back(name);
  }
  // Deletes the rows of steps that will be repeated: those whose second column is greater than `step`, and
  // rows of step `step` without a third column, which are evaluations. If the disk is full, the file stays as
  // it is.
  void cut(int64_t step) {
    rewrite([&](const std::string& line) {
      const size_t second = line.find(',') + 1, third = line.find(',', second) + 1;
      if (second == 0 || third == 0) return std::string();
      const int64_t count = std::atoll(line.c_str() + second);
      return count < step || (count == step && line[third] != ',') ? line + "\n" : std::string();
    });
  }
  // Appends a row. NaN is an empty cell.
  void row(const Row& cells) {
    add_columns(cells);
    std::ostringstream line;
    line.precision(9);
    for (size_t c = 0; c < columns.size(); ++c) {
      if (c) line << ",";
      for (const auto& [name, value] : cells)
        if (name == columns[c] && !std::isnan(value)) line << value;
    }
    file.add(line.str());
  }

 private:
  void add_columns(const Row& cells) {
    const std::vector<std::string> before = columns;
    size_t at = 0;
    for (const auto& cell : cells) {
      const auto known = std::find(columns.begin(), columns.end(), cell.first);
      if (known == columns.end()) columns.insert(columns.begin() + std::ptrdiff_t(at), cell.first);
      at = size_t(std::find(columns.begin(), columns.end(), cell.first) - columns.begin()) + 1;
    }
    if (columns == before) return;
    if (before.empty()) return file.add(head());
    rewrite([&](const std::string& line) {  // the cells of old rows move to where their columns are now
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
  // Writes the file anew: the column names, and what row(line) returns for each complete row.
  template <class Change>
  void rewrite(const Change& change) {
    std::ifstream old(file.path);
    std::string text = columns.empty() ? "" : head() + "\n", line;
    std::getline(old, line);
    while (std::getline(old, line) && !old.eof()) text += change(line);  // a last line without an end is torn
    if (!columns.empty()) replace_text(file.path, text);
  }
  std::string head() const {
    std::string text;
    for (const auto& column : columns) text += (text.empty() ? "" : ",") + column;
    return text;
  }

  Lines file;
  std::vector<std::string> columns;
};

}  // namespace yolox
