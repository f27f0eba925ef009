// SPDX-License-Identifier: Apache-2.0
// Memory of a process, out-of-memory errors, and the search for the largest batch that fits.
#include "tensors.hpp"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "base/memory.hpp"
#include "run/step_memory.hpp"

using namespace yolox;

// Runs a step that needs at least `room` parts. Returns its number of parts. order: set to the attempts.
static int64_t parts_of_step(RetryInParts& in_parts, int64_t room, std::string& order,
                             const std::string& error = "out of memory") {
  order.clear();
  for (int64_t parts = in_parts.parts;;) {
    order += concat(" ", parts);
    try {
      check(parts >= room, error);
      in_parts.succeeded(parts);
      return parts;
    } catch (const std::exception& e) {
      parts = in_parts.more_parts(e, parts);
    }
  }
}

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

TEST_CASE("memory: a step out of memory is repeated in more parts; after the second time the number stays") {
  RetryInParts in_parts{2, 7};
  int64_t room = 7;  // smallest number of parts that fits
  std::string order;
  const auto step = [&] { return 10 * parts_of_step(in_parts, room, order); };
  CHECK(step() == 70);
  CHECK(order == " 2 4 7");
  room = 1;
  CHECK(step() == 20);  // After the first retry, a step starts with two parts again.
  CHECK(order == " 2");
  room = 3;
  CHECK(step() == 40);
  room = 1;
  CHECK(step() == 40);
  CHECK(order == " 4");
  CHECK(in_parts.retries == 2);
  room = 8;
  CHECK(has(error_of(step), "even with one image at a time"));
  CHECK(has(error_of(step), "(out of memory)"));  // the original message
  RetryInParts single{1, 1};
  CHECK(has(error_of([&] { parts_of_step(single, 2, order); }), "a single image"));
  CHECK(error_of([&] { parts_of_step(in_parts, 8, order, "other"); }) == "other");
  CHECK(order == " 4");
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

TEST_CASE("memory: resident memory and its peak are measured, and the peak can be reset") {
  CHECK(resident_bytes() > 1e5);
  CHECK(peak_bytes() >= 0.5 * resident_bytes());
  reset_peak();  // the earlier tests have a peak too
  const double before = peak_bytes();
  {
    // mmap(), because the heap may contain as much free memory that is already resident.
    const size_t bytes = 200 << 20;
    void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(block != MAP_FAILED);
    std::memset(block, 1, bytes);
    CHECK(peak_bytes() > before + 100e6);
    munmap(block, bytes);
  }
  reset_peak();
  CHECK(peak_bytes() < before + 100e6);
}
