// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/ contains libFuzzer targets for the readers of files. Each target writes its input to a file and
// reads the file. The result must be a value or an exception of base/error.hpp; any other exception is a
// crash. checks.sh runs all targets; CONTRIBUTING.md says how to run one. This file has what the targets
// share.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include "data/dataset.hpp"
#include "data/source.hpp"

namespace yolox::fuzz {

// Writes the bytes to a file in memory, which replaces those of the last call. Returns its path.
inline const std::string& file_with(const void* bytes, size_t size) {
  static const int fd = memfd_create("fuzz", MFD_CLOEXEC);
  static const std::string path = concat("/proc/self/fd/", fd);
  if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, bytes, size, 0) != ssize_t(size)) {
    std::perror("memfd");
    std::abort();
  }
  return path;
}

// Calls f(). Aborts if f() throws anything but the exceptions of base/error.hpp, because the readers must
// convert exceptions of libraries.
template <class Function>
void expect_own_exceptions(Function f) {
  try {
    f();
  } catch (const std::exception& e) {
    if (typeid(e) == typeid(std::runtime_error) || typeid(e) == typeid(UsageError)) return;
    std::fprintf(stderr, "exception not of base/error.hpp, %s: %s\n", typeid(e).name(), e.what());
    std::abort();
  }
}

// Builds the Dataset as if every image existed, with the size in its labels, or 640x480 if the labels have
// none. Aborts if a box is outside its image or has an unknown class.
inline void to_dataset(Source source) {
  ImageChecks checks;
  for (const CocoImage& image : source.coco.images) {
    const bool sized = image.width > 0 && image.height > 0;
    checks.images.push_back({sized ? image.width : 640, sized ? image.height : 480, ""});
  }
  const Dataset data = make_dataset(std::move(source), checks);
  class_counts(data);
  for (const Record& r : data.records)
    for (const Box& b : r.boxes)
      if (!(b.x1 >= 0 && b.y1 >= 0 && b.x2 <= r.width && b.y2 <= r.height && has_area(b)) || b.cls < 0 ||
          b.cls >= int(data.classes.size())) {
        std::fprintf(stderr, "a box is outside its image, or its class does not exist\n");
        std::abort();
      }
}

}  // namespace yolox::fuzz
