// SPDX-License-Identifier: Apache-2.0
// Fuzzes the readers of YOLO files: the input is read as a data.yaml and as a label file, with and without
// keypoints.
#include "fuzz.hpp"

using namespace yolox;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string& path = fuzz::file_with(data, size);
  fuzz::expect_own_exceptions([&] { yolo_file_splits(path); });
  for (const bool keypoints : {false, true})
    fuzz::expect_own_exceptions([&] {
      Source source;
      source.name = "yolo";
      source.relative = true;
      source.coco.categories = {{0, "a"}, {1, "b"}};
      add_image(source, "a.jpg", path, read_yolo_txt(path, keypoints));
      fuzz::to_dataset(source);
    });
  return 0;
}
