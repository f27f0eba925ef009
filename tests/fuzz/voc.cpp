// SPDX-License-Identifier: Apache-2.0
// Fuzzes the reader of Pascal VOC XML.
#include "fuzz.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string& path = fuzz::file_with(data, size);
  fuzz::expect_own_exceptions([&] {
    Labels labels = read_voc_xml(path);
    Source source;
    source.name = "voc";
    for (size_t i = 0; i < labels.boxes.size(); ++i) {
      labels.boxes[i].category_id = int64_t(i);
      source.coco.categories.push_back({int64_t(i), labels.names[i]});
    }
    add_image(source, labels.image, path, labels);
    fuzz::to_dataset(source);
  });
  return 0;
}
