// The batch that fits: --bs auto, a step in parts where memory runs out, --dtr tried out.
#pragma once
#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "config.hpp"
#include "data/batch.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "optim.hpp"
#include "run/log.hpp"
#include "run/state.hpp"

namespace yolox {

// compute(parts), in twice as many parts as long as memory runs out, `most` at most. Where that happens a
// second time, the smaller parts are kept: it was not one large batch. before_retry(parts) is called with
// nothing of the failed attempt alive.
struct PartsThatFit {
  int64_t parts, most;
  int64_t times = 0;        // that memory ran out
  std::string remedy = {};  // what to do where `most` is not one image at a time

  template <class Compute, class BeforeRetry>
  auto operator()(const Compute& compute, const BeforeRetry& before_retry) {
    for (int64_t now = parts;;) {
      try {
        auto result = compute(now);
        if (now > parts && ++times > 1) parts = now;
        return result;
      } catch (const std::exception& e) {
        if (!is_out_of_memory(e)) throw;
        const std::string what = e.what(), cause = concat(" (", what.substr(0, what.find('\n')), ")");
        check(now < most || remedy.empty(), "out of memory; ", remedy, cause);
        const char* least = most > 1 ? "one image at a time" : "a single image";
        check(now < most, "out of memory, even with ", least, "; give a smaller --size or --model", cause);
      }
      now = std::min(2 * now, most);
      before_retry(now);
    }
  }
};

// The statistics of batch norms as they are, to be put back when a step is done again: an attempt that ran
// out of memory half-way has moved some of them.
struct SavedBuffers {
  explicit SavedBuffers(const torch::nn::Module& model) : live(model.buffers()) {
    for (const Tensor& t : live) saved.push_back(t.clone());
  }
  void save() { copy(saved, live); }
  void restore() { copy(live, saved); }

 private:
  static void copy(std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    torch::NoGradGuard no_grad;
    at::_foreach_copy_(to, from);
  }
  std::vector<Tensor> live, saved;
};

// Computes a step in micro-batches: --accum of them, and twice as many where memory runs out.
class MicroBatches {
 public:
  // share: images of a step that belong to this rank.
  MicroBatches(Training& t, int64_t accum, int64_t share, const Ranks& ranks, Log& log);
  // Returns the result of compute(micro-batches), which computes the gradients of a step. Repeats it with
  // smaller micro-batches if memory runs out. Throws if that does not help. With several ranks it is not
  // repeated, because all ranks must compute the same number of micro-batches.
  template <class Compute>
  auto run(int64_t step, ImageSize size, const Compute& compute) {
    return fit(
        [&](int64_t parts) {
          statistics.save();
          return compute(parts);
        },
        [&](int64_t parts) { prepare_retry(step, size, parts); });
  }
  // Sets the statistics of batch norms to what they were before the latest step.
  void restore_statistics() { statistics.restore(); }

 private:
  void prepare_retry(int64_t step, ImageSize size, int64_t parts);

  Training& t;
  Log& log;
  PartsThatFit fit;
  SavedBuffers statistics;
};

// The largest batch of at most `limit` images whose peak(images), bytes, stays within `budget`; peak is
// infinite where memory ran out. Exact up to 32, within 3 % above. Throws where not even one image fits.
template <class Peak>
int64_t largest_batch(int64_t limit, double budget, const Peak& peak, const std::string& remedy = "") {
  int64_t fits = 0, too_large = limit + 1;
  double of_fits = 0, slope = 0;
  for (int64_t next = std::min<int64_t>(2, limit); too_large - fits > std::max<int64_t>(1, fits / 32);) {
    const double bytes = peak(next);
    if (bytes <= budget) {
      if (fits > 0) slope = (bytes - of_fits) / double(next - fits);
      fits = next;
      of_fits = bytes;
    } else {
      too_large = next;
    }
    // A straight line through what fitted, but not far beyond what was seen; the middle where that leads to
    // what is known not to fit.
    double line = slope > 0 ? (budget - of_fits) / slope : double(fits);
    line = double(fits) + std::min(line, 3.0 * double(fits));
    next = too_large <= limit && line >= double(too_large) ? (fits + too_large) / 2 : int64_t(line);
    next = std::clamp(next, fits + 1, std::max(fits + 1, too_large - 1));
  }
  check(fits > 0, "not even one image fits into memory; give ", remedy, "a smaller --size or --model");
  return fits;
}

// Computes the gradients of a step: images [n, 3, H, W], their boxes, number of micro-batches.
using ComputeStep = std::function<void(const Tensor&, const Targets&, int64_t)>;

// The peak memory of a step of n images, in bytes; infinity if memory runs out. base: the size that images
// are loaded in. largest: that of multi-scale. run(body) computes the step. The model, its statistics and its
// gradients are as before afterwards.
double memory_of_step(int64_t n, int64_t parts, YOLOX& model, Optimizer& optimizer, ImageSize base,
                      ImageSize largest, torch::Device device, const ComputeStep& compute,
                      const std::function<void(const std::function<void()>&)>& run);

// Tries steps of the largest size on each rank by itself. The all-reduces of several ranks are left out,
// because they need little memory.
struct Trial {
  Training& t;
  ComputeStep compute;
  ImageSize base, largest;
  torch::Device device;
  Dtr& dtr;

  // Returns the bytes that a step of so many images needs; infinity if memory runs out. dtr.step() is that
  // step.
  double operator()(int64_t images, int64_t accum) const;
};

// --bs auto: sets the batch to the largest that fits, of at most n images. Gives what to say of it.
std::string find_batch(Config& config, const Trial& trial, int64_t n, Ranks& ranks, Log& log);

// With --dtr: shows that the largest step can be done, and says at what cost.
std::string try_dtr(const Config& config, const Trial& trial, int64_t share, Ranks& ranks);

}  // namespace yolox
