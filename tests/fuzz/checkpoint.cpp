// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader of .pth files: the zip container, and the pickle if the zip is valid.
#include "weights.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string& path = fuzz::file_with(data, size);
  fuzz::expect_own_exceptions([&] { fuzz::to_module(read_pth(path), path); });
  return 0;
}
