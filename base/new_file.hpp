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

  explicit NewFile(const std::string& path) : path_(path), real_(path), part_(path) {
    std::error_code unknown;
    straight_ = std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown);
    if (!straight_) {
      if (const auto target = std::filesystem::canonical(path, unknown); !unknown) real_ = target.string();
      part_ = concat(real_, ".tmp.", getpid());
    }
    file_ = std::fopen(part_.c_str(), "wbe");
    require(file_ != nullptr);
  }
  NewFile(const NewFile&) = delete;
  ~NewFile() {
    if (file_) std::fclose(file_);
    if (!committed_ && !straight_) ::unlink(part_.c_str());
  }

  // Adds to it, in one of three ways: this, a stream, or the name that it has until commit().
  void write(std::string_view bytes) {
    require(std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size());
  }
  std::FILE* stream() { return file_; }
  const std::string& part() const { return part_; }

  // On the disk before the name changes, and the name before we say so: a power cut leaves the old file or
  // the new one.
  void commit() {
    require(!std::ferror(file_) && std::fflush(file_) == 0);
    require(straight_ || ::fsync(fileno(file_)) == 0);
    require(std::fclose(std::exchange(file_, nullptr)) == 0);
    committed_ = true;
    if (straight_) return;
    committed_ = ::rename(part_.c_str(), real_.c_str()) == 0;
    require(committed_);
    const auto folder = std::filesystem::path(real_).parent_path();
    const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return;  // a folder that may be written but not listed
    ::fsync(fd);
    ::close(fd);
  }

 private:
  void require(bool done) const {
    if (!done)
      throw Error(concat("cannot write ", path_, ": ", std::strerror(errno),
                         "; check folder, rights and room; a file that was there is untouched"));
  }
  std::string path_, real_, part_;
  std::FILE* file_ = nullptr;
  bool straight_ = false, committed_ = false;
};

// Throws where a result would take the place of what it is made from, also under another name of the file.
// what: the flag of the result.
inline void protect_inputs(const char* what, const std::string& result,
                           const std::vector<std::string>& inputs) {
  std::error_code different;
  for (const auto& input : inputs)
    usage_check(!std::filesystem::equivalent(result, input, different), what, " would overwrite ", input,
                ", which is read; give another name");
}

// Puts a text in the place of a file. False where that cannot be: then the file stays as it was.
inline bool replace_text(const std::string& path, const std::string& text) {
  try {
    NewFile file(path);
    file.write(text);
    file.commit();
    return true;
  } catch (const NewFile::Error&) {
    return false;
  }
}

}  // namespace yolox
