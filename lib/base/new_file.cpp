// SPDX-License-Identifier: Apache-2.0
#include "base/new_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/text.hpp"

namespace yolox {

bool is_irregular_file(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown) && !std::filesystem::is_regular_file(path, unknown);
}

std::string why_missing(const std::string& path) {
  if (euidaccess(path.c_str(), R_OK) == 0) return "is neither a file nor a folder";
  return errno == ENOENT || errno == ENOTDIR ? "does not exist"
                                             : concat("cannot be read: ", std::strerror(errno));
}

NewFile::NewFile(const std::string& path) : path_(path), real_(path), part_(path) {
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
  flush();
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
  if (!done)
    throw Error(concat("cannot write ", path_, ": ", std::strerror(errno),
                       "; check folder, permissions and disk space; an existing file is unchanged"));
}

void protect_inputs(const char* what, const std::string& result, const std::vector<std::string>& inputs) {
  std::error_code different;
  for (const auto& input : inputs)
    usage_check(!std::filesystem::equivalent(result, input, different), what, " would overwrite ", input,
                ", which is an input; give another name");
}

bool replace_file(const std::string& path, std::string_view bytes, bool durable) {
  try {
    NewFile file(path);
    file.write(bytes);
    file.commit(durable);
    return true;
  } catch (const NewFile::Error&) {
    return false;
  }
}

}  // namespace yolox
