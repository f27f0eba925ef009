// SPDX-License-Identifier: Apache-2.0
#include "base/new_file.hpp"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "base/error.hpp"

namespace yolox {

bool is_irregular_file(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown);
}

bool FolderLock::was_replaced() const {
  struct stat current {};
  return stat(path.c_str(), &current) == 0 && (current.st_ino != inode || current.st_dev != device);
}

// The watched folders by their absolute path.
static std::map<std::string, FolderLock>& watched() {
  static auto& folders = *new std::map<std::string, FolderLock>;  // a crash report may be written at exit
  return folders;
}

static std::filesystem::path absolute_path(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::absolute(path, unknown).lexically_normal();
}

void watch_folder(const std::string& folder, int lock) {
  struct stat file {};
  if (lock < 0 || fstat(lock, &file) != 0) return;
  const auto path = absolute_path(folder + "/.lock");
  watched()[path.parent_path().string()] = {path.string(), file.st_dev, file.st_ino};
}

const FolderLock* lock_of(const std::string& folder) {
  const auto found = watched().find(absolute_path(folder + "/.lock").parent_path().string());
  return found == watched().end() ? nullptr : &found->second;
}

bool is_in_replaced_folder(const std::string& path) {
  if (watched().empty()) return false;
  const auto found = watched().find(absolute_path(path).parent_path().string());
  return found != watched().end() && found->second.was_replaced();
}

NewFile::NewFile(const std::string& path) : path_(path), real_(path), part_(path) {
  if (is_in_replaced_folder(path))
    throw Error(concat("cannot write ", path, ": its folder was moved away, and another run uses the name"),
                /*disk_full=*/false);
  direct_ = is_irregular_file(path);
  if (!direct_) {
    std::error_code unknown;
    if (const auto target = std::filesystem::canonical(path, unknown); !unknown) real_ = target.string();
    part_ = concat(real_, ".tmp.", getpid());
  }
  file_ = std::fopen(part_.c_str(), "wbe");
  require(file_ != nullptr);
}

NewFile::~NewFile() {
  if (file_) std::fclose(file_);
  if (!committed_ && !direct_) ::unlink(part_.c_str());
}

void NewFile::commit(bool durable) {
  require(!std::ferror(file_) && std::fflush(file_) == 0);
  require(direct_ || !durable || ::fsync(fileno(file_)) == 0);
  require(std::fclose(std::exchange(file_, nullptr)) == 0);
  committed_ = true;
  if (direct_) return;
  committed_ = ::rename(part_.c_str(), real_.c_str()) == 0;
  require(committed_);
  if (!durable) return;
  const auto folder = std::filesystem::path(real_).parent_path();
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;  // the folder is writable but not readable
  ::fsync(fd);
  ::close(fd);
}

void NewFile::require(bool done) const {
  if (done) return;
  const int error = errno;
  throw Error(concat("cannot write ", path_, ": ", std::strerror(error),
                     "; check folder, permissions and disk space; an existing file is unchanged"),
              error == ENOSPC || error == EDQUOT);
}

void protect_inputs(const char* what, const std::string& result, const std::vector<std::string>& inputs) {
  std::error_code different;
  for (const auto& input : inputs)
    usage_check(!std::filesystem::equivalent(result, input, different), what, " would overwrite ", input,
                ", which is an input; give another name");
}

bool replace_text(const std::string& path, const std::string& text) {
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
