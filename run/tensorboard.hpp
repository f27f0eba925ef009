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
uint32_t crc32c(std::string_view bytes);

// length, checksum of the length, data, checksum of the data
std::string record(std::string_view data);

void varint(std::string& out, uint64_t value);
// A field that is a text or a message.
void field(std::string& out, int number, std::string_view content);

// Fields of Event, one of which it has besides time and step, and the SessionLog {status: START}.
constexpr int version_field = 3, summary_field = 5, session_field = 7;
constexpr char session_start[] = "\x08\x01";

// The record of an Event; `time` in seconds since 1970.
std::string event(double time, int64_t step, int number, std::string_view content);

// A Summary of the values that are not NaN.
std::string summary(const std::vector<std::pair<std::string, double>>& values);

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
  Events(const std::string& folder, int64_t first_step);

  // Names are UTF-8; the part before a slash is the group: "train/loss". NaN values are left out. What was
  // written stays when the process is killed.
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);

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
  void flush();

  // A new file, instead of the one that is gone if there was one; -1 if it cannot be made. TensorBoard reads
  // files in the order of their names, so its time is after that of all others, whatever the clock says.
  int begin();
};

}  // namespace yolox
