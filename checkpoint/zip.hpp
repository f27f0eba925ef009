// SPDX-License-Identifier: Apache-2.0
// Reader of the zip container of .pth files (libzip): uncompressed records in one top-level folder. torch's
// own reader does not compare the checksums, so that a damaged file would be read without an error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/error.hpp"

struct zip;  // an open archive of libzip

namespace yolox {

namespace pth {

template <class... Parts>
[[noreturn]] void damaged(const Parts&... parts) {
  fail(parts..., "; the file is damaged or incomplete: download or copy it again");
}

// Records are known by their names without the top-level folder.
class ZipReader {
 public:
  // Opens a file. Throws if the file is damaged or has another format, which the message names.
  explicit ZipReader(const std::string& path);

  bool has(const std::string& name) const { return records_.count(name) != 0; }

  // Returns the length of a record, as the archive states it. The file may be shorter.
  uint64_t bytes(const std::string& name) const { return records_.at(name).bytes; }

  // Reads the data of a record, bytes(name) bytes, and compares the checksum. Throws if the record is
  // damaged.
  void read(const std::string& name, char* to);
  std::string read(const std::string& name);

  uint64_t file_bytes() const { return file_bytes_; }

 private:
  struct Record {
    uint64_t index = 0, bytes = 0;
    bool is_stored = false;     // neither compressed nor encrypted
    bool has_checksum = false;  // false after torch.serialization.set_crc32_options(False)
  };
  uint64_t file_bytes_ = 0;
  std::unique_ptr<zip, void (*)(zip*)> archive_;
  std::unordered_map<std::string, Record> records_;
};

}  // namespace pth

}  // namespace yolox
