// SPDX-License-Identifier: Apache-2.0
// Image cache (--cache ram|disk): the decoded images of a data set, no larger than the input size, in an LMDB
// file (packed.hpp) that all processes of the machine share. The first process that needs a file writes it;
// the other processes wait for it.
#pragma once
#include <functional>
#include <string>

#include "data/dataset.hpp"

namespace yolox {

struct CachePlace {
  std::string folder;
  bool keep;  // true: on disk, kept for later runs; false: in RAM, removed by its last user
};

// Returns the folder of --cache ram: $YOLOX_CACHE_RAM, or /dev/shm if that is not set.
CachePlace ram_place();

// Returns the folder for files that runs share: $YOLOX_CACHE_DIR, else $XDG_CACHE_HOME/yolox, else
// ~/.cache/yolox, or "" if HOME is not set.
std::string cache_folder();

// Returns the folder of --cache disk, which is cache_folder(). Creates it.
CachePlace disk_place();

// Removes files that killed processes left behind: in RAM every file that no process uses, on disk every
// file that is incomplete. Does not touch the file `except`.
void sweep_caches(const CachePlace& place, const std::string& except = "");

// Writes the cache, or opens an existing one, and makes `data` read its images from the cache.
// Images are stored no larger than the input size, and are decoded on `threads` threads.
// progress(done, n) is called after each chunk of images, and every 50 ms while another process writes. An
// exception of progress() ends writing or waiting. Throws before it writes anything if there is not enough
// space. After an exception no file is left. Returns the size and the path of the cache for the log.
std::string use_cache(Dataset& data, const CachePlace& place, cv::Size input, int threads,
                      const std::function<void(size_t done, size_t n)>& progress);

}  // namespace yolox
