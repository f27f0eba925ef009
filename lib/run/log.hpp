// SPDX-License-Identifier: Apache-2.0
// The log and the progress line of a run, metrics.csv, and event files for TensorBoard.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/program.hpp"

namespace yolox {

// A file that is appended to. The file is opened for each call, because the folder may be unavailable for a
// while. On a full disk the text of a call is lost as a whole. Never throws, because a log must not end a
// run.
struct AppendFile {
  std::string path;

  void append(const std::string& text) const;
  void line(const std::string& text) const { append(text + "\n"); }
};

// Prints lines to stdout and to a file. path: log.txt of the run; empty: no file. quiet: to the file only.
struct Log {
  explicit Log(const std::string& path, bool quiet = false)
      : file{path}, quiet(quiet), tty(!quiet && can_rewrite_lines()) {}

  // Prints a line, with control characters escaped. Does nothing if the text is empty.
  void line(const std::string& text);
  // Replaces the progress line, cut to the width of the terminal, if stdout is a terminal. Otherwise logs a
  // line at most every 30 seconds. keep: always logs the line.
  void progress(const std::string& text, bool keep);

 private:
  AppendFile file;
  bool quiet, tty, in_place = false;
  double last = now();
};

// metrics.csv. Each row is a list of column names and values. The first row of a file names its columns. A
// row with another name, such as a loss term that was added to a resumed run, begins metrics_2.csv,
// metrics_3.csv and so on.
class Metrics {
 public:
  using Row = std::vector<std::pair<std::string, double>>;

  // path: of the first file. Continues the newest file.
  explicit Metrics(const std::string& path);
  // Deletes the rows of steps that will be repeated. These are the rows whose second column is greater than
  // `step`, and if `evaluation`, the evaluations of step `step`, which have an empty third column. If the
  // disk is full, a file stays unchanged.
  void truncate_after(int64_t step, bool evaluation = true) const;
  // Appends a row. A NaN becomes an empty cell. Throws if two cells have the same name.
  void row(const Row& cells);

 private:
  std::vector<AppendFile> files;     // the last one gets the rows
  std::vector<std::string> columns;  // of the last file
};

// Scalars for TensorBoard: event files in the run folder, one for each session.
// Format of records and their masked CRC: tensorflow/core/lib/io/record_writer.cc. Messages and field
// numbers: tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
namespace tensorboard {

// Returns the CRC-32C (RFC 3720, appendix B.4), bit by bit, because an event has only some hundred bytes.
uint32_t crc32c(std::string_view bytes);

// Returns a record: length, checksum of the length, data, checksum of the data.
std::string record(std::string_view data);

// Field numbers of Event. An Event has time, step, and one of these fields.
constexpr int version_field = 3, summary_field = 5, session_field = 7;
// The message SessionLog {status: START}, the content of session_field.
constexpr char session_start[] = "\x08\x01";

// Returns the record of an Event. time: seconds since 1970. number: field of `content`.
std::string event(double time, int64_t step, int number, std::string_view content);

// Returns a Summary of the values that are not NaN.
std::string summary(const std::vector<std::pair<std::string, double>>& values);

}  // namespace tensorboard

// An event file. A record that cannot be written, for example on a full disk, is lost as a whole.
struct Events {
  // Starts a session. TensorBoard then discards the events of earlier sessions at `first_step` or later,
  // which is the first step that this session writes. A session at step 0 writes the session event too,
  // because TensorBoard discards nothing for the first such event of a run (plugin_event_accumulator.py).
  Events(const std::string& folder, int64_t first_step);

  // Writes scalars. Names are UTF-8, and the part before a slash is the group, as in "train/loss". NaN values
  // are left out. Events that were written survive a kill of the process.
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) const;

 private:
  const AppendFile file;
};

}  // namespace yolox
