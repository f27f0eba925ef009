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

  void add(const std::string& text) const;
};

// Prints to the terminal and to log.txt (path; empty: none). In a terminal the progress line is rewritten in
// place. quiet: to the file only.
struct Log {
  explicit Log(const std::string& path, bool quiet = false)
      : file{path}, quiet(quiet), tty(!quiet && isatty(1)) {}

  void line(const std::string& text);
  // What the run is made of: a heading of 8 columns and its text, in lines of 80 columns at most.
  void fact(const std::string& text);
  // Replaces the progress line in a terminal. Elsewhere it is a line of its own, every 30 seconds at most, or
  // when `keep` says that it is worth one.
  void progress(const std::string& text, bool keep);

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
  explicit Metrics(const std::string& path);
  // Deletes the rows of steps that will be repeated: those whose second column is greater than `step`, and
  // rows of step `step` without a third column, which are evaluations. If the disk is full, the file stays as
  // it is.
  void cut(int64_t step);
  // Appends a row. NaN is an empty cell.
  void row(const Row& cells);

 private:
  void add_columns(const Row& cells);
  // Writes the file anew: the column names, and what row(line) returns for each complete row.
  template <class Change>
  void rewrite(const Change& change) {
    std::ifstream old(file.path);
    std::string text = columns.empty() ? "" : head() + "\n", line;
    std::getline(old, line);
    while (std::getline(old, line) && !old.eof()) text += change(line);  // a last line without an end is torn
    if (!columns.empty()) replace_text(file.path, text);
  }
  std::string head() const;

  Lines file;
  std::vector<std::string> columns;
};

}  // namespace yolox
