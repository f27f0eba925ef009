// SPDX-License-Identifier: Apache-2.0
// Tiles: overlapping parts of large images, in which the network sees small objects at full resolution. Used
// by ./pack --tiles for training, and by ./eval and ./demo --tile.
#pragma once
#include <cstddef>
#include <opencv2/core.hpp>
#include <vector>

#include "data/dataset.hpp"

namespace yolox {

// Throws UsageError if the value of a flag is neither 0 (off) nor a side of 32 pixels or more.
void check_tile_side(const char* flag, int side);

// Returns the tiles of an image: squares of `side` pixels, evenly spaced, of which neighbours overlap by at
// least `overlap` times the side. A side of the image that is shorter than a tile is covered by one tile,
// which then is smaller.
std::vector<cv::Rect> tiles_of(cv::Size image, int side, double overlap);

// Parts of the images of a data set.
struct Tiles {
  Dataset data;  // record i shows `part[i]` of the image `image[i]`
  std::vector<size_t> image;
  std::vector<cv::Rect> part;
};

// Returns the tiles of all images with the objects in them, as a data set that encodes each tile as a JPEG.
// An object of which less than half is in a tile is an ignored region there. An image with an object that no
// tile shows entirely is there as a whole, too; the objects that tiles show are ignored regions in it.
// all_empty: keeps all tiles without objects, otherwise at most as many as there are tiles with objects, a
// random choice. `data` must outlive the result.
Tiles training_tiles(const Dataset& data, int side, double overlap, bool all_empty);

// Returns the tiles of all images, and each image of more than one tile as a whole, without objects. `data`
// must outlive the result.
Tiles inference_tiles(const Dataset& data, int side, double overlap);

// A detection in an image, or in a tile of it.
struct TileDetection {
  Box box;  // in pixels of the whole image
  double score;
  cv::Rect tile;  // the part of the image that the network has seen, maybe all of it
};

// Returns the detections in an image of those in its tiles, best first. Leaves out boxes that touch an inner
// edge of their tile, because they are parts of objects that another tile or the whole image shows entirely,
// and repetitions: boxes of one class in different tiles with an IoU above 0.5.
std::vector<TileDetection> merge_tiles(std::vector<TileDetection> found, cv::Size image);

}  // namespace yolox
