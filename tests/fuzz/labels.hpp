// SPDX-License-Identifier: Apache-2.0
// Shared by the fuzzers of labels: conversion of a Source to a Dataset.
#pragma once

#include "data/dataset.hpp"
#include "data/source.hpp"
#include "fuzz.hpp"

namespace yolox::fuzz {

// Builds the Dataset as if every image existed, with the size in its labels, or 640x480 if the labels have
// none. Aborts if a box is outside its image or has an unknown class.
inline void to_dataset(Source source) {
  ImageChecks checks;
  for (const CocoImage& image : source.coco.images) {
    const bool sized = image.width > 0 && image.height > 0;
    checks.images.push_back({sized ? image.width : 640, sized ? image.height : 480, ""});
  }
  const Dataset data = make_dataset(std::move(source), checks);
  class_counts(data);
  for (const Record& r : data.records)
    for (const Box& b : r.boxes)
      if (!(b.x1 >= 0 && b.y1 >= 0 && b.x2 <= r.width && b.y2 <= r.height && has_area(b)) || b.cls < 0 ||
          b.cls >= int(data.classes.size())) {
        std::fprintf(stderr, "a box is outside its image, or its class does not exist\n");
        std::abort();
      }
}

}  // namespace yolox::fuzz
