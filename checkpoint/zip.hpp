// SPDX-License-Identifier: Apache-2.0
// Reader and writer of the zip container of .pth files: uncompressed records in one top-level folder. The
// reader validates every number in the file. The caller of the writer must replace the file atomically.
// Formats: PKWARE APPNOTE 6.3.9 (zip, zip64, CRC-32); alignment and record names as in
// torch/serialization.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/bytes.hpp"
#include "base/error.hpp"

namespace yolox {

namespace pth {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "zip and pickle are little-endian, and so are the tensors");

template <class... Parts>
[[noreturn]] void damaged(const Parts&... parts) {
  fail(parts..., "; the file is damaged or incomplete: download or copy it again");
}

// CRC-32 of zip (polynomial 0xEDB88320). Processes eight bytes per step, because checkpoints have hundreds of
// megabytes.
uint32_t crc32(std::string_view bytes);

// ---- the zip container, reading

// Entry of the zip central directory.
struct Record {
  uint64_t header = 0, bytes = 0;  // offset of the local header; length of the data
  uint32_t crc = 0;
  uint16_t flags = 0, method = 0;
};

struct ZipReader {
  std::ifstream file;
  uint64_t size = 0;                                // file size in bytes
  std::unordered_map<std::string, Record> records;  // by name without the top-level folder
  bool has(const std::string& name) const { return records.count(name) != 0; }
};

// Reads bytes at an offset. Throws if the file ends before.
void read_at(ZipReader& zip, uint64_t offset, uint64_t bytes, char* to);

std::string read_at(ZipReader& zip, uint64_t offset, uint64_t bytes);

// Throws with the actual format of a file that is not a zip archive. head: the first 512 bytes, or fewer.
[[noreturn]] inline void refuse_other_format(const std::string& head, uint64_t size) {
  const auto starts = [&](std::string_view with) { return head.compare(0, with.size(), with) == 0; };
  if (size == 0) fail("the file is empty: its download or copy failed, get it again");
  if (starts("version https://git-lfs"))
    fail("is a git-lfs pointer, not the file itself; run \"git lfs pull\"");
  if (starts("\x1f\x8b")) fail("is compressed with gzip; unpack it first");
  if (starts("\x80") || head.compare(std::min<size_t>(257, head.size()), 5, "ustar") == 0)
    fail(
        "is in the format of torch.save before PyTorch 1.6 (or a plain pickle); convert it in Python: "
        "torch.save(torch.load(FILE, map_location='cpu'), NEW_FILE)");
  if (head.size() > 8 && head[8] == '{' && number<uint64_t>(head) < size)
    fail(
        "is a safetensors file; convert it in Python: torch.save(safetensors.torch.load_file(FILE), "
        "NEW_FILE)");
  if (head.size() > 2 && head[0] == 8 && head[1] < 32 && (head[2] == 0x12 || head[2] == 0x3a))
    fail(
        "is an ONNX file, which does not contain the names of the weights; use the .pth from which it was "
        "exported");
  const size_t text = head.find_first_not_of(" \t\r\n\xEF\xBB\xBF");
  if (text != std::string::npos && head[text] == '<')
    fail("is a web page, not a checkpoint: the download was refused or redirected; download the file again");
  fail("is not a .pth file (torch.save writes a zip archive, which starts with \"PK\")");
}

// Opens a zip archive and reads its central directory. Throws if the file is not a zip archive or is damaged.
ZipReader open_zip(const std::string& path);

// Reads the data of a record, records.at(name).bytes bytes, and checks the checksum.
void read_record(ZipReader& zip, const std::string& name, char* to);

// Writer of uncompressed records. Data is aligned to 64 bytes as torch.save does. All records use zip64
// fields, so that small and large files have one format.
class ZipWriter {
 public:
  explicit ZipWriter(std::function<void(std::string_view)> write) : write_(std::move(write)) {}

  void add(const std::string& name, std::string_view data);

  // Writes the central directory.
  void finish();

 private:
  void write(std::string_view bytes);

  std::function<void(std::string_view)> write_;
  uint64_t written_ = 0;
  std::string directory_;
  uint64_t records_ = 0;
};

}  // namespace pth

}  // namespace yolox
