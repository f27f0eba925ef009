// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader of the pickle in a .pth. The zip container is valid and has the bytes of three tensor
// storages.
#include "weights.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile file;
  std::string bytes;
  pth::ZipWriter zip([&](std::string_view more) { bytes += more; });
  zip.add("data.pkl", {reinterpret_cast<const char*>(data), size});
  zip.add("data/0", std::string(32, '\x3f'));
  zip.add("data/1", std::string(8, '\1'));
  zip.add("data/2", "");
  zip.finish();
  file.write(bytes);
  fuzz::expect_own_exceptions([] { fuzz::to_module(read_pth(file.path), file.path); });
  return 0;
}
