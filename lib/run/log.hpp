// SPDX-License-Identifier: Apache-2.0
// The log and the progress line of a run, metrics.csv, and event files for TensorBoard.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/program.hpp"

namespace yolox {

// Appends text to a file. Opens the file for each call, because the folder may be unavailable for a while. On
// a full disk the text is lost as a whole. Never throws, because a log must not end a run.
void append_text(const std::string& path, const std::string& text);

// Prints lines to stdout and to a file. path: log.txt of the run; empty: no file. quiet: to the file only.
struct Log {
  explicit Log(const std::string& path, bool quiet = false)
      : path(path), quiet(quiet), tty(!quiet && can_rewrite_lines()) {}

  // Prints a line, with control characters escaped. Does nothing if the text is empty.
  void line(const std::string& text);
  // Replaces the progress line, cut to the width of the terminal, if stdout is a terminal. Otherwise logs a
  // line at most every 30 seconds. keep: always logs the line.
  void progress(const std::string& text, bool keep);

 private:
  std::string path;
  bool quiet, tty, in_place = false;
  double last = now();
};

// The numbers of a run: metrics.csv, and an event file for TensorBoard, one for each session. The first row
// of metrics.csv names its columns. A row with another column, such as a loss term that was added to a
// resumed run, begins metrics_2.csv, metrics_3.csv and so on.
class Metrics {
 public:
  struct Cell {
    std::string column;    // of metrics.csv
    double value;          // NaN: an empty cell, and no scalar
    std::string tag = "";  // of the scalar in TensorBoard, such as "train/loss"; empty: none
  };
  using Row = std::vector<Cell>;

  // folder: the run folder. Continues the newest file. Deletes the rows of steps that will be repeated, whose
  // second column is greater than `first`. If the disk is full, a file stays unchanged. TensorBoard discards
  // the events of earlier sessions at step `first` + 1 or later.
  explicit Metrics(const std::string& folder, int64_t first = 0);
  // Appends a row. Its second cell is the step. Throws if two cells have the same column.
  void row(const Row& cells);

 private:
  // Returns the path of metrics.csv, metrics_2.csv, ...
  std::string csv(size_t number) const;

  const std::string folder, events;
  size_t number = 1;                 // of the file that gets the rows
  std::vector<std::string> columns;  // of this file
};

// Format of records and their masked CRC: tensorflow/core/lib/io/record_writer.cc. Messages and field
// numbers: tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
namespace tensorboard {

// Field numbers of Event. An Event has time, step, and one of these fields.
constexpr int version_field = 3, summary_field = 5, session_field = 7;
// The message SessionLog {status: START}, the content of session_field.
constexpr char session_start[] = "\x08\x01";

// Returns the record of an Event. time: seconds since 1970. number: field of `content`.
std::string event(double time, int64_t step, int number, std::string_view content);

// Returns a Summary of the cells that have a tag and a number; empty if none has.
std::string summary(const Metrics::Row& cells);

}  // namespace tensorboard

}  // namespace yolox
