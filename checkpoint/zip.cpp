// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/zip.hpp"

#include <zip.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>

namespace yolox {

namespace pth {

// Throws with the actual format of a file that is not a zip archive. head: the first 512 bytes, or fewer.
[[noreturn]] static void refuse_other_format(const std::string& head, uint64_t size) {
  const auto starts = [&](std::string_view with) { return head.compare(0, with.size(), with) == 0; };
  if (size == 0) fail("the file is empty: its download or copy failed, get it again");
  if (starts("version https://git-lfs"))
    fail("is a git-lfs pointer, not the file itself; run \"git lfs pull\"");
  if (starts("\x1f\x8b")) fail("is compressed with gzip; unpack it first");
  if (starts("\x80") || head.compare(std::min<size_t>(257, head.size()), 5, "ustar") == 0)
    fail(
        "is in the format of torch.save before PyTorch 1.6 (or a plain pickle); convert it in Python: "
        "torch.save(torch.load(FILE, map_location='cpu'), NEW_FILE)");
  if (head.size() > 8 && head[8] == '{' && read_number<uint64_t>(head) < size)
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

ZipReader::ZipReader(const std::string& path) : archive_(nullptr, zip_discard) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  check(std::filesystem::exists(status), "no such file");
  check(!std::filesystem::is_directory(status), "is a folder; use the .pth file");
  check(std::filesystem::is_regular_file(status), "is not a regular file; use the .pth file");
  std::ifstream file(path, std::ios::binary);
  check(file.is_open(), "cannot open the file: ", std::strerror(errno));
  file_bytes_ = std::filesystem::file_size(path);
  std::string head(std::min<uint64_t>(file_bytes_, 512), '\0');
  file.read(head.data(), std::streamsize(head.size()));
  if (head.compare(0, 4, "PK\x03\x04") != 0) refuse_other_format(head, file_bytes_);

  int code = 0;
  archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
  if (code == ZIP_ER_NOZIP) damaged("the end of the zip archive is missing");
  if (!archive_) {
    zip_error_t reason;
    zip_error_init_with_code(&reason, code);
    const std::string text = zip_error_strerror(&reason);
    zip_error_fini(&reason);
    damaged("bad zip directory (", text, ")");
  }
  for (zip_int64_t i = 0; i < zip_get_num_entries(archive_.get(), 0); ++i) {
    zip_stat_t entry;
    if (zip_stat_index(archive_.get(), zip_uint64_t(i), ZIP_FL_ENC_RAW, &entry) != 0 ||
        !(entry.valid & ZIP_STAT_NAME) || !(entry.valid & ZIP_STAT_SIZE))
      damaged("bad zip directory");
    const std::string name = entry.name;
    const bool stored = entry.comp_method == ZIP_CM_STORE && entry.encryption_method == ZIP_EM_NONE;
    if (stored && entry.comp_size != entry.size) damaged(name, " has two different lengths");
    // torch puts all records in one folder, of any name.
    const Record record{zip_uint64_t(i), entry.size, stored, entry.crc != 0};
    if (!records_.emplace(name.substr(name.find('/') + 1), record).second)
      damaged(name, " occurs twice in the zip directory");
  }
}

void ZipReader::read(const std::string& name, char* to) {
  const Record& record = records_.at(name);
  check(record.is_stored, name,
        " is compressed or encrypted, which torch.save never does; save the file with torch.save");
  const std::unique_ptr<zip_file_t, int (*)(zip_file_t*)> data(
      zip_fopen_index(archive_.get(), record.index, 0), zip_fclose);
  if (!data) damaged(name, " is not where the zip directory says");
  for (uint64_t done = 0; done < record.bytes;) {
    const zip_int64_t more = zip_fread(data.get(), to + done, record.bytes - done);
    if (more <= 0) damaged("cannot read ", record.bytes, " bytes of ", name);
    done += uint64_t(more);
  }
  char beyond;  // libzip compares the checksum when it meets the end of the data
  if (record.has_checksum && zip_fread(data.get(), &beyond, 1) != 0) damaged(name, " has a wrong checksum");
}

std::string ZipReader::read(const std::string& name) {
  if (bytes(name) > file_bytes_) damaged(name, " is longer than the file");
  std::string out(bytes(name), '\0');
  read(name, out.data());
  return out;
}

}  // namespace pth

}  // namespace yolox
