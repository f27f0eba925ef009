// What the fuzzers share. Each makes a file of the bytes that it is given, has it read as a program would,
// and ends in a report where that is not a value or an error of ours. checks.sh runs them; CONTRIBUTING.md
// says how to run one alone.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>

#include "base/error.hpp"

namespace yolox::fuzz {

// A file in memory, under a name that open() takes. Each write() replaces what was there.
class MemoryFile {
 public:
  MemoryFile() : fd(memfd_create("fuzz", MFD_CLOEXEC)), path(concat("/proc/self/fd/", fd)) {
    require(fd >= 0);
  }
  MemoryFile(const MemoryFile&) = delete;
  ~MemoryFile() { close(fd); }
  void write(std::string_view bytes) {
    require(ftruncate(fd, 0) == 0 && pwrite(fd, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()));
  }

 private:
  static void require(bool done) {
    if (!done) std::perror("a file in memory"), std::abort();
  }
  const int fd;

 public:
  const std::string path;
};

// Does f(). An error of error.hpp is an answer like any other; what a library throws, or the language, should
// have been turned into one on its way.
template <class Function>
void answers(Function f) {
  try {
    f();
  } catch (const std::exception& e) {
    if (typeid(e) == typeid(std::runtime_error) || typeid(e) == typeid(UsageError)) return;
    std::fprintf(stderr, "an exception that is not ours, %s: %s\n", typeid(e).name(), e.what());
    std::abort();
  }
}

}  // namespace yolox::fuzz
