// SPDX-License-Identifier: Apache-2.0
// Atomic writing of files: an error, a full disk or SIGKILL leaves the old file as it was.
#pragma once
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace yolox {

// Returns true if a folder, a pipe or a device is at `path`. Reading a pipe or a device may never end.
bool is_irregular_file(const std::string& path);

// Returns why a path is neither a file nor a folder that can be read: "does not exist", or "cannot be read:
// Permission denied", also if a folder on the way may not be entered.
std::string why_missing(const std::string& path);

// A file that replaces `path` atomically. Until commit() it has the temporary name PATH.tmp.PID, and the
// destructor removes it if commit() was not reached. If `path` is a symbolic link, the target is replaced.
// A pipe or a device at `path` is written directly, because it must not be replaced.
class NewFile {
 public:
  // What all functions of this class throw: one line that names `path`.
  struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  explicit NewFile(const std::string& path);
  NewFile(const NewFile&) = delete;
  ~NewFile();

  // Two ways of writing: write() and stream().
  void write(std::string_view bytes) {
    require(std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size());
  }
  std::FILE* stream() { return file_; }
  // After flush(), temporary_path() has what was written so far.
  void flush() { require(!std::ferror(file_) && std::fflush(file_) == 0); }
  const std::string& temporary_path() const { return part_; }

  // Writes the file to disk (fsync), renames it to `path` and syncs the folder, so that a power cut leaves
  // the old file or the new one. durable: false: does not wait for the disk, for files that can be made
  // again.
  void commit(bool durable = true);

 private:
  void require(bool done) const;
  std::string path_, real_, part_;
  std::FILE* file_ = nullptr;
  bool direct_ = false, committed_ = false;
};

// Throws UsageError if `result` is one of the `inputs`, also if the same file has another name (a link).
// what: the flag that named the result.
void protect_inputs(const char* what, const std::string& result, const std::vector<std::string>& inputs);

// Replaces the contents of a file atomically. Returns false on failure; the old file then stays. durable: see
// NewFile::commit().
bool replace_file(const std::string& path, std::string_view bytes, bool durable = true);

}  // namespace yolox
