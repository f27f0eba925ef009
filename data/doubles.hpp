// SPDX-License-Identifier: Apache-2.0
// Finds images that a data set has twice, and boxes of different classes on the same object.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/dataset.hpp"

namespace yolox {

// What two images are compared by.
struct Fingerprint {
  uint64_t bytes = 0;            // hash of the file
  std::optional<uint64_t> look;  // see look_of()
};

// Returns a hash of what an image looks like, which changes by few bits if the image is scaled, compressed
// or made brighter: for each of 8 x 8 places, whether the next place to the right is brighter (dHash).
// Returns nothing if the image has too little contrast.
std::optional<uint64_t> look_of(const Image& image);

// Reads all images. An unreadable one is added to data.problems and gets an empty fingerprint.
std::vector<Fingerprint> fingerprints(const Dataset& data);

// Two images, by index, the earlier one first.
using Pair = std::pair<size_t, size_t>;

// Returns for each image the first earlier one with the same bytes, if any.
std::vector<Pair> equal_images(const std::vector<Fingerprint>& images);

// Returns for each image the first earlier one whose look differs in at most 3 of 64 bits, if any, without
// images of the same bytes.
std::vector<Pair> similar_images(const std::vector<Fingerprint>& images);

// Two classes, the lower one first, whose boxes cover each other in a number of images.
struct ClassOverlap {
  int first, second;
  int64_t boxes = 0;  // pairs of boxes
  size_t image = 0;   // index of the first such image
};

// Returns the pairs of classes of which some boxes have an IoU of at least `iou`, the most frequent first.
std::vector<ClassOverlap> class_overlaps(const Dataset& data, double iou = 0.8);

}  // namespace yolox
