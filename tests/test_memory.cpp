// SPDX-License-Identifier: Apache-2.0
// Memory of a process, out-of-memory errors, and the search for the largest batch that fits.
#include "tensors.hpp"

#include "base/memory.hpp"
#include "run/step_memory.hpp"

using namespace yolox;

TEST_CASE("memory: out-of-memory errors are recognised, others are not") {
  CHECK(is_out_of_memory(std::bad_alloc()));
  CHECK(is_out_of_memory(std::runtime_error("CUDA out of memory. Tried to allocate 20.00 MiB")));
  CHECK(is_out_of_memory(std::runtime_error("DefaultCPUAllocator: can't allocate memory: you tried")));
  for (const char* what : {"cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
                           "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
                           "CUDA error: cudaErrorMemoryAllocation",
                           "GET was unable to find an engine to execute this computation"})
    CHECK_MESSAGE(is_out_of_memory(std::runtime_error(what)), what);
  CHECK_FALSE(is_out_of_memory(std::runtime_error("cuDNN error: CUDNN_STATUS_BAD_PARAM")));
  CHECK(is_out_of_memory(std::runtime_error("could not create a primitive")));
  CHECK_FALSE(is_out_of_memory(
      std::runtime_error("could not create a primitive descriptor for a convolution forward propagation")));
  CHECK_FALSE(is_out_of_memory(std::runtime_error("the shapes do not fit")));
}

TEST_CASE("memory: the largest batch that fits is found, without trying one more than twice as large") {
  for (const int64_t limit : {1, 2, 3, 5, 1000, 100000})
    for (const int64_t room : {0, 1, 2, 3, 4, 13, 23, 63, 900, 100000}) {
      INFO("limit ", limit, ", room ", room);
      int tried = 0;
      int64_t largest_tried = 0;
      const int64_t found = largest_batch(limit, [&](int64_t images) {
        ++tried;
        largest_tried = std::max(largest_tried, images);
        return images <= room;
      });
      const int64_t best = std::min(limit, room);
      CHECK(found <= best);
      CHECK(found >= best - best / 32);
      if (best == limit) CHECK(found == limit);
      CHECK(largest_tried <= std::max<int64_t>(2, 2 * best));
      CHECK(tried < 24);
    }
}
