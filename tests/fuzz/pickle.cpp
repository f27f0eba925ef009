// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader of the pickle in a .pth. The zip container is valid and has the bytes of three tensor
// storages.
#include <caffe2/serialize/inline_container.h>

#include "weights.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter zip([&](const void* more, size_t count) {
    bytes.append(static_cast<const char*>(more), count);
    return count;
  });
  zip.writeRecord("data.pkl", data, size);
  zip.writeRecord("data/0", std::string(32, '\x3f').data(), 32);
  zip.writeRecord("data/1", std::string(8, '\1').data(), 8);
  zip.writeRecord("data/2", data, 0);
  zip.writeEndOfFile();
  const std::string& path = fuzz::file_with(bytes.data(), bytes.size());
  fuzz::expect_own_exceptions([&] { fuzz::to_module(read_pth(path), path); });
  return 0;
}
