// SPDX-License-Identifier: Apache-2.0
// Scalars for TensorBoard: event files in the run folder, one for each session.
// Format of records and their masked CRC: tensorflow/core/lib/io/record_writer.cc. Messages and field
// numbers: tensorflow/core/util/event.proto and tensorflow/core/framework/summary.proto.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "run/log.hpp"

namespace yolox {

namespace tensorboard {

// Returns the CRC-32C (RFC 3720, appendix B.4). Computed bit by bit, because an event has only some hundred
// bytes.
uint32_t crc32c(std::string_view bytes);

// Returns a record: length, checksum of the length, data, checksum of the data.
std::string record(std::string_view data);

// Appends a protobuf varint.
void varint(std::string& out, uint64_t value);
// Appends a protobuf field that is a string or a message.
void field(std::string& out, int number, std::string_view content);

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
  // because TensorBoard discards nothing for the first such event of a run (plugin_event_accumulator.py). The
  // fast reader of TensorBoard, in Rust, uses only the steps: for each name it discards the values that are
  // not before the step that it reads.
  Events(const std::string& folder, int64_t first_step);

  // Writes scalars. Names are UTF-8, and the part before a slash is the group, as in "train/loss". NaN values
  // are left out. Events that were written survive a kill of the process.
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values) const;

 private:
  const AppendFile file;
};

}  // namespace yolox
