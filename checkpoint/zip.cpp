// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/zip.hpp"

#include <array>
#include <cerrno>
#include <filesystem>

namespace yolox {

namespace pth {

uint32_t crc32(std::string_view bytes) {
  static const auto table = [] {
    std::array<std::array<uint32_t, 256>, 8> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      t[0][i] = i;
      for (int bit = 0; bit < 8; ++bit) t[0][i] = t[0][i] >> 1 ^ (t[0][i] & 1 ? 0xEDB88320u : 0);
    }
    for (int k = 1; k < 8; ++k)
      for (int i = 0; i < 256; ++i) t[k][i] = t[k - 1][i] >> 8 ^ t[0][t[k - 1][i] & 255];
    return t;
  }();
  uint32_t crc = ~0u;
  size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    const uint64_t x = number<uint64_t>(bytes, at) ^ crc;
    crc = 0;
    for (int k = 0; k < 8; ++k) crc ^= table[7 - k][x >> 8 * k & 255];
  }
  for (; at < bytes.size(); ++at) crc = crc >> 8 ^ table[0][(crc ^ bytes[at]) & 255];
  return ~crc;
}

void read_at(ZipReader& zip, uint64_t offset, uint64_t bytes, char* to) {
  if (offset > zip.size || bytes > zip.size - offset) damaged("data ends at byte ", zip.size);
  zip.file.seekg(static_cast<std::streamoff>(offset));
  zip.file.read(to, static_cast<std::streamsize>(bytes));
  if (!zip.file) damaged("cannot read ", bytes, " bytes at ", offset);
}

std::string read_at(ZipReader& zip, uint64_t offset, uint64_t bytes) {
  if (bytes > zip.size) damaged("data ends at byte ", zip.size);
  std::string out(bytes, '\0');
  read_at(zip, offset, bytes, out.data());
  return out;
}

ZipReader open_zip(const std::string& path) {
  ZipReader zip;
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  check(std::filesystem::exists(status), "no such file");
  check(!std::filesystem::is_directory(status), "is a folder; use the .pth file");
  check(std::filesystem::is_regular_file(status), "is not a regular file; use the .pth file");
  zip.file.open(path, std::ios::binary);
  check(zip.file.is_open(), "cannot open the file: ", std::strerror(errno));
  zip.size = std::filesystem::file_size(path, error);
  check(!error, "not a regular file: ", error.message());
  const std::string head = read_at(zip, 0, std::min<uint64_t>(zip.size, 512));
  if (head.compare(0, 4, "PK\x03\x04") != 0) refuse_other_format(head, zip.size);

  // The end-of-central-directory record is at the end of the file, followed by a comment of up to 65535
  // bytes. The zip64 locator (20 bytes) right before that record contains the offset of the zip64 record.
  const uint64_t tail_start = zip.size - std::min<uint64_t>(zip.size, 65535 + 22 + 20);
  const std::string tail = read_at(zip, tail_start, zip.size - tail_start);
  const size_t end = tail.rfind("PK\x05\x06");
  if (end == std::string::npos || tail.size() - end < 22) damaged("the end of the zip archive is missing");
  uint64_t directory_bytes = number<uint32_t>(tail, end + 12),
           directory_start = number<uint32_t>(tail, end + 16);
  if (end >= 20 && tail.compare(end - 20, 4, "PK\x06\x07") == 0) {
    const std::string end64 = read_at(zip, number<uint64_t>(tail, end - 20 + 8), 56);
    if (end64.compare(0, 4, "PK\x06\x06") != 0) damaged("the zip64 end record is missing");
    directory_bytes = number<uint64_t>(end64, 40);
    directory_start = number<uint64_t>(end64, 48);
  }

  const std::string directory = read_at(zip, directory_start, directory_bytes);
  for (size_t at = 0; at < directory.size();) {
    if (directory.size() - at < 46 || directory.compare(at, 4, "PK\x01\x02") != 0)
      damaged("bad zip directory");
    Record record;
    record.flags = number<uint16_t>(directory, at + 8);
    record.method = number<uint16_t>(directory, at + 10);
    record.crc = number<uint32_t>(directory, at + 16);
    uint64_t packed = number<uint32_t>(directory, at + 20);
    record.bytes = number<uint32_t>(directory, at + 24);
    record.header = number<uint32_t>(directory, at + 42);
    const size_t name_bytes = number<uint16_t>(directory, at + 28),
                 extra_bytes = number<uint16_t>(directory, at + 30),
                 comment_bytes = number<uint16_t>(directory, at + 32);
    if (directory.size() - at - 46 < name_bytes + extra_bytes + comment_bytes) damaged("bad zip directory");
    const std::string name = directory.substr(at + 46, name_bytes);
    std::string_view extra = std::string_view(directory).substr(at + 46 + name_bytes, extra_bytes);
    while (extra.size() >= 4) {
      const size_t length = number<uint16_t>(extra, 2);
      std::string_view field = extra.substr(4, length);
      if (field.size() < length) damaged("bad zip directory");
      if (number<uint16_t>(extra) ==
          1)  // zip64 field: contains, in this order, those of the three numbers that do not fit 32 bits
        for (uint64_t* value : {&record.bytes, &packed, &record.header})
          if (*value == 0xFFFFFFFF && field.size() >= 8) {
            *value = number<uint64_t>(field);
            field.remove_prefix(8);
          }
      extra.remove_prefix(4 + length);
    }
    if (record.method == 0 && packed != record.bytes) damaged(name, " has two different lengths");
    // torch puts all records in one folder, of any name.
    if (!zip.records.emplace(name.substr(name.find('/') + 1), record).second)
      damaged(name, " occurs twice in the zip directory");
    at += 46 + name_bytes + extra_bytes + comment_bytes;
  }
  return zip;
}

void read_record(ZipReader& zip, const std::string& name, char* to) {
  const Record& record = zip.records.at(name);
  check(record.method == 0 && !(record.flags & 1), name,
        " is compressed or encrypted, which torch.save never does; save the file with torch.save");
  const std::string header = read_at(zip, record.header, 30);
  if (header.compare(0, 4, "PK\x03\x04") != 0) damaged(name, " is not where the zip directory says");
  const uint64_t names = number<uint16_t>(header, 26) + number<uint16_t>(header, 28);
  read_at(zip, record.header + 30 + names, record.bytes, to);
  // After torch.serialization.set_crc32_options(False), torch.save writes 0 instead of the checksum.
  if (record.crc != 0 && crc32({to, record.bytes}) != record.crc) damaged(name, " has a wrong checksum");
}

void ZipWriter::add(const std::string& name, std::string_view data) {
  const std::string full_name = "archive/" + name;
  const uint64_t header = written_;
  // Version 4.5, UTF-8 names, stored. The date is always 1980-01-01, so that equal contents give equal bytes.
  std::string common;
  for (const uint16_t field : {45, 0x800, 0, 0, 0x21}) append(common, field);
  append(common, crc32(data));
  append(common, ~uint32_t(0));
  append(common, ~uint32_t(0));
  append(common, uint16_t(full_name.size()));

  std::string local = "PK\x03\x04" + common;
  const size_t padding = 63 - (header + local.size() + 2 + full_name.size() + 20 + 4 + 63) % 64;
  append(local, uint16_t(20 + 4 + padding));
  local += full_name;
  for (const uint16_t field : {1, 16}) append(local, field);
  for (int copy = 0; copy < 2; ++copy) append(local, uint64_t(data.size()));
  append(local, uint16_t(0x4246));  // tag of torch's padding field
  append(local, uint16_t(padding));
  write(local + std::string(padding, 'Z'));
  write(data);

  directory_ += "PK\x01\x02";
  append(directory_, uint16_t(45));
  directory_ += common;
  append(directory_, uint16_t(28));
  directory_.append(10, '\0');
  append(directory_, ~uint32_t(0));
  directory_ += full_name;
  for (const uint16_t field : {1, 24}) append(directory_, field);
  for (const uint64_t field : {uint64_t(data.size()), uint64_t(data.size()), header})
    append(directory_, field);
  ++records_;
}

void ZipWriter::finish() {
  const uint64_t start = written_, bytes = directory_.size();
  std::string end = directory_ + "PK\x06\x06";
  append(end, uint64_t(44));
  for (const uint16_t version : {45, 45}) append(end, version);
  end.append(8, '\0');
  for (const uint64_t field : {records_, records_, bytes, start}) append(end, field);
  end += "PK\x06\x07";
  end.append(4, '\0');
  append(end, start + bytes);
  append(end, uint32_t(1));
  end += "PK\x05\x06";
  end.append(4, '\0');
  end.append(12, '\xff');
  end.append(2, '\0');
  write(end);
}

void ZipWriter::write(std::string_view bytes) {
  write_(bytes);
  written_ += bytes.size();
}

}  // namespace pth

}  // namespace yolox
