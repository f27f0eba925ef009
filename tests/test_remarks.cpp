#include "common.hpp"
// common.hpp first: it brings torch before doctest
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>

#include "base/memory.hpp"
#include "run/remarks.hpp"

using namespace yolox;

namespace {

StepNumbers losing(double total, double positives = 5) {
  StepNumbers n;
  n.total = total, n.positives = positives, n.objects = 2;
  return n;
}

std::string said(Watch& watch, const StepNumbers& n, int steps) {
  std::string all;
  for (int i = 0; i < steps; ++i)
    for (const auto& remark : watch.step(n)) all += remark + "\n";
  return all;
}

}  // namespace

TEST_CASE("watch: means are of the steps since the last look") {
  Means means;
  const StepNumbers a{1, {{"iou", 2}, {"obj", 3}}, 4, 5, 6}, b{5, {{"iou", 6}, {"obj", 7}}, 8, 9, 10};
  means.add(a);
  means.add(b);
  CHECK(means.steps == 2);
  const StepNumbers m = means.take();
  CHECK(m.terms == std::vector<std::pair<std::string, double>>{{"iou", 4}, {"obj", 5}});
  CHECK(std::vector<double>{m.total, m.positives, m.norm, m.objects} == std::vector<double>{3, 6, 7, 8});
  CHECK(means.steps == 0);
  means.add(b);
  CHECK(means.take().terms == b.terms);
  CHECK(losing(1).per_object() == 2.5);
  CHECK(StepNumbers().per_object() == 0);
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    StepNumbers n = losing(1);
    CHECK(n.finite());
    n.norm = bad;
    CHECK_FALSE(n.finite());
    CHECK_FALSE(losing(bad).finite());
  }
}

TEST_CASE("watch: no positives for 100 steps in a row is said, once") {
  Watch watch(true);
  CHECK(said(watch, losing(1, 0), 99) == "");
  CHECK(said(watch, losing(1, 1), 1) == "");
  CHECK(said(watch, losing(1, 0), 99) == "");
  CHECK(has(said(watch, losing(1, 0), 1), "nothing is learnt"));
  CHECK(said(watch, losing(1, 0), 500) == "");
}

TEST_CASE("watch: a loss that is flat from the start is said after 1000 steps, but not of one that fell") {
  Watch flat(true), falling(true), tuned(false);
  CHECK(said(flat, losing(10), 999) == "");
  CHECK(has(said(flat, losing(10), 1), "the loss has not fallen in 1000 steps"));
  CHECK(said(flat, losing(10), 3000) == "");
  CHECK(said(falling, losing(10), 300) == "");
  CHECK(said(falling, losing(9), 3000) == "");
  CHECK(said(tuned, losing(10), 3000) == "");
  Watch late(true), again(true);
  CHECK(said(late, losing(10), 900) == "");
  CHECK(said(late, losing(9), 100) == "");  // only the last ones count
  CHECK(said(again, losing(10), 300) == "");
  CHECK(said(again, losing(9), 800) == "");
  CHECK(said(again, losing(10), 1000) == "");  // looked at once
}

TEST_CASE("watch: waiting for data half of the time is said, once, after half a minute") {
  Watch watch(true);
  CHECK(watch.wait(20, 29).empty());
  CHECK(watch.wait(20, 41).empty());
  REQUIRE(watch.wait(31, 60).size() == 1);
  CHECK(watch.wait(31, 60).empty());
  CHECK(has(Watch(true).wait(31, 60).at(0), "--workers"));
  CHECK(has(Watch(true).wait(31, 60).at(0), "51 %"));
}

TEST_CASE("watch: a learning rate that was meant for the whole batch, or is next to nothing, is said") {
  CHECK(Watch::learning_rate("sgd", 0.01 / 64, 16, false) == "");
  CHECK(Watch::learning_rate("adamw", 0.001 / 64, 16, false) == "");
  CHECK(has(Watch::learning_rate("sgd", 0.01, 16, false), "which is 0.16 for the batch of 16"));
  CHECK(has(Watch::learning_rate("adam", 0.01 / 64, 16, false), "usual for adam"));
  CHECK(has(Watch::learning_rate("sgd", 1e-6, 16, false), "usual for sgd"));
  CHECK(Watch::learning_rate("sgd", 1e-6, 16, true) == "");  // fine-tuning
}

TEST_CASE("g7 watch: a loss that is not finite ends the run, a gradient only the 20th time in a row") {
  int64_t skipped = 0;
  StepNumbers overflow = losing(1), broken = losing(std::nan(""));
  overflow.norm = HUGE_VAL;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 19; ++i) CHECK(why_to_stop(overflow, skipped) == "");
    CHECK(skipped == 19);
    CHECK(why_to_stop(losing(1), skipped) == "");
    CHECK(skipped == 0);
  }
  for (int i = 0; i < 19; ++i) why_to_stop(overflow, skipped);
  CHECK(has(why_to_stop(overflow, skipped), "20 times in a row"));
  skipped = 0;
  CHECK(has(why_to_stop(broken, skipped), "the loss"));
}

TEST_CASE("a5 memory: what means that there is no more") {
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

TEST_CASE(
    "memory: a step that runs out of it is done again in more parts, which stay after the second time") {
  PartsThatFit fit{2, 7};
  int64_t room = 7;  // parts that fit
  std::string order;
  const auto step = [&] {
    order.clear();
    return fit(
        [&](int64_t parts) {
          order += concat(" ", parts);
          if (parts < room) throw std::runtime_error("out of memory");
          return parts * 10;
        },
        [&](int64_t parts) { order += concat(" undo", parts); });
  };
  CHECK(step() == 70);
  CHECK(order == " 2 undo4 4 undo7 7");
  room = 1;
  CHECK(step() == 20);  // that was a single large batch
  CHECK(order == " 2");
  room = 3;
  CHECK(step() == 40);
  room = 1;
  CHECK(step() == 40);
  CHECK(order == " 4");
  CHECK(fit.times == 2);
  room = 8;
  CHECK(has(error_of(step), "even with one image at a time"));
  CHECK(has(error_of(step), "(out of memory)"));  // what was asked for is in there
  CHECK(has(error_of([] {
              PartsThatFit{1, 1}([](int64_t) -> int { throw std::bad_alloc(); }, [](int64_t) {});
            }),
            "a single image"));
  CHECK(error_of([] {
          PartsThatFit{1, 4}([](int64_t) -> int { throw std::runtime_error("other"); }, [](int64_t) {});
        }) == "other");
}

TEST_CASE("memory: the largest batch within the budget is found, whatever the curve") {
  int tried = 0;
  double largest_tried = 0;
  const auto search = [&](int64_t limit, double budget, const std::function<double(double)>& bytes) {
    tried = 0, largest_tried = 0;
    return largest_batch(limit, budget, [&](int64_t n) {
      ++tried;
      largest_tried = std::max(largest_tried, bytes(double(n)));
      return bytes(double(n));
    });
  };
  const auto line = [](double n) { return 100 + 7 * n; };
  CHECK(search(1000, 100 + 7 * 23.5, line) == 23);
  CHECK(search(1000, 107, line) == 1);
  CHECK(search(5, 1e9, line) == 5);
  CHECK(search(1, 1e9, line) == 1);
  CHECK(search(2, 1e9, line) == 2);
  CHECK(search(3, 1e9, line) == 3);
  CHECK(has(error_of([&] { search(1000, 106, line); }), "not even one image"));
  const int64_t many = search(100000, 100 + 7 * 900.5, line);
  CHECK(many <= 900);
  CHECK(many > 900 * 31 / 32 - 1);
  CHECK(tried < 12);
  const auto square = [](double n) { return n * n; };
  CHECK(search(1000, 30.5 * 30.5, square) == 30);
  CHECK(largest_tried < 4 * 4 * 30.5 * 30.5);  // it does not jump far beyond what it has seen
  const auto steps = [](double n) { return 50 * std::ceil(n / 10); };  // an allocator's blocks
  CHECK(search(1000, 149, steps) == 20);
  const auto wall = [](double n) { return n > 13 ? std::numeric_limits<double>::infinity() : 1.0; };
  CHECK(search(1000, 2, wall) == 13);
  // Where something else than bytes is the limit, the line points beyond it each time.
  const auto slow = [&](double n) { return n > 40 ? std::numeric_limits<double>::infinity() : line(n); };
  CHECK(search(100000, 1e9, slow) == 40);
  CHECK(tried < 12);
}

TEST_CASE("memory: this process takes some, and its peak is no less; a peak can be forgotten") {
  CHECK(resident_bytes() > 1e5);
  CHECK(peak_bytes() >= 0.5 * resident_bytes());
  forget_peak();  // of the tests before
  const double before = peak_bytes();
  {
    // Not from the heap, which may have as much that is free and in RAM.
    const size_t bytes = 200 << 20;
    void* much = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(much != MAP_FAILED);
    std::memset(much, 1, bytes);
    CHECK(peak_bytes() > before + 100e6);
    munmap(much, bytes);
  }
  forget_peak();
  CHECK(peak_bytes() < before + 100e6);
}
