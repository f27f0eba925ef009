// What a run says as it goes: log, metrics and progress line; and the signals that end it.
#pragma once
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

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

// metrics.csv: one row per call, columns as given; a value that is not known is left empty (NaN).
struct Metrics {
  Metrics(const std::string& path, const std::vector<std::string>& columns) : file{path} {
    for (const auto& column : columns) head += (head.empty() ? "" : ",") + column;
    if (!std::filesystem::exists(path)) file.add(head);
  }
  // Takes out what will come again: rows whose second column, which counts, is beyond `from`, and of `from`
  // itself those without a third column. The file stays as it is where there is no room for another.
  void cut(int64_t from) {
    std::string kept = head + "\n";
    std::ifstream old(file.path);
    for (std::string line; std::getline(old, line) && !old.eof();) {  // a last line without an end is torn
      const size_t second = line.find(',') + 1, third = line.find(',', second) + 1;
      if (line == head || second == 0 || third == 0) continue;
      const int64_t count = std::atoll(line.c_str() + second);
      if (count < from || (count == from && line[third] != ',')) kept += line + "\n";
    }
    replace_text(file.path, kept);
  }
  void row(const std::vector<double>& values) {
    std::ostringstream line;
    line.precision(9);
    for (size_t i = 0; i < values.size(); ++i) {
      if (i) line << ",";
      if (!std::isnan(values[i])) line << values[i];
    }
    file.add(line.str());
  }

 private:
  Lines file;
  std::string head;
};

}  // namespace yolox
