// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader of weights in ONNX files.
#include "checkpoint/onnx_weights.hpp"
#include "weights.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::MemoryFile file;
  file.write({reinterpret_cast<const char*>(data), size});
  fuzz::expect_own_exceptions(
      [] { fuzz::to_module(weights_from_onnx(read_onnx(file.path), file.path), file.path); });
  return 0;
}
