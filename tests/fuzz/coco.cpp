// SPDX-License-Identifier: Apache-2.0
// Fuzzes the readers of COCO JSON: the input is read as annotations and as detections.
#include "data/coco_json.hpp"
#include "fuzz.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string& path = fuzz::file_with(data, size);
  fuzz::expect_own_exceptions([&] {
    Source source;
    source.name = path;
    source.coco = read_coco(path);
    for (const CocoImage& image : source.coco.images)
      source.files.push_back(to_forward_slashes(image.file_name));
    fuzz::to_dataset(source);
  });
  fuzz::expect_own_exceptions([&] { read_detections(path); });
  return 0;
}
