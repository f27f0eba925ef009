// Files that appear under their name whole or not at all: an error, a full disk or a kill leaves the old one
// as it was.
#pragma once
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// A file under a temporary name beside `path`, NAME.tmp.PID, until commit() gives it the real one; removed
// where that is not reached. A link stays a link. What is there and is no regular file, such as a pipe or a
// device, is written straight: it must not be replaced.
class NewFile {
 public:
  // Of what goes wrong here: one line that names `path`.
  struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  explicit NewFile(const std::string& path);
  NewFile(const NewFile&) = delete;
  ~NewFile();

  // Adds to it, in one of three ways: this, a stream, or the name that it has until commit().
  void write(std::string_view bytes) {
    require(std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size());
  }
  std::FILE* stream() { return file_; }
  const std::string& part() const { return part_; }

  // On the disk before the name changes, and the name before we say so: a power cut leaves the old file or
  // the new one.
  void commit();

 private:
  void require(bool done) const;
  std::string path_, real_, part_;
  std::FILE* file_ = nullptr;
  bool straight_ = false, committed_ = false;
};

// Throws where a result would take the place of what it is made from, also under another name of the file.
// what: the flag of the result.
void protect_inputs(const char* what, const std::string& result, const std::vector<std::string>& inputs);

// Puts a text in the place of a file. False where that cannot be: then the file stays as it was.
bool replace_text(const std::string& path, const std::string& text);

}  // namespace yolox
