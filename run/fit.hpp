// The batch that fits: --bs auto, a step in parts where memory runs out, --dtr tried out.
#pragma once
#include <torch/torch.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/device.hpp"
#include "base/memory.hpp"
#include "config.hpp"
#include "ddp.hpp"
#include "dtr/dtr.hpp"
#include "run/log.hpp"
#include "run/state.hpp"
#include "step.hpp"

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
      fits = next, of_fits = bytes;
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

// The memory of a step of n images, bytes; infinity where it runs out. base: the size that images are loaded
// in, largest: that of multi-scale. run(body) does the step. Leaves the model as it was.
template <class Run>
double memory_of_step(int64_t n, int64_t parts, YOLOX& model, Optimizer& optimizer, const GradScaler& scaler,
                      const StepSettings& settings, ImageSize base, ImageSize largest, torch::Device device,
                      const Run& run) {
  struct AsBefore {  // whatever happens
    Optimizer& optimizer;
    torch::Device device;
    SavedBuffers statistics;
    ~AsBefore() { optimizer.zero_grad(), statistics.restore(), empty_cache(device); }
  } as_before{optimizer, device, SavedBuffers(*model)};
  // Beside the step: images on their way, three batches in the loader and one being copied.
  const double waiting = device.is_cpu() ? 4.0 * double(n) * base.height * base.width * 3 : 0;
  double bytes = std::numeric_limits<double>::infinity();
  empty_cache(device);
  try {
    Tensor images = torch::full({n, base.height, base.width, 3}, 114, torch::kByte).to(device);
    images = images.permute({0, 3, 1, 2}).to(model->parameters()[0].scalar_type());
    Targets targets{torch::full({n, 20, 4}, base.width / 4.0, device),
                    torch::zeros({n, 20}, torch::TensorOptions(torch::kLong).device(device)),
                    std::vector<int64_t>(n, 20)};
    resize_batch(images, targets, largest);
    run([&] {
      compute_gradients([&](const Tensor& x) { return model(x); }, images, targets, parts, optimizer, scaler,
                        settings);
    });
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    bytes = memory_peak(device) + waiting;
  } catch (const std::exception& e) {
    if (!is_out_of_memory(e)) throw;
  }
  return bytes;
}

// Tries steps of the largest size, by themselves, on each rank: without the sums of ranks, which take little.
struct Trial {
  Training& t;
  const StepSettings& step;
  ImageSize base, largest;
  torch::Device device;
  Dtr& dtr;

  // Bytes that a step of so many images takes; infinity: it does not fit. dtr.step() is that step.
  double operator()(int64_t images, int64_t accum) const;
};

// --bs auto: sets the batch to the largest that fits, of at most n images. Gives what to say of it.
std::string find_batch(Config& config, const Trial& trial, int64_t n, Ranks& ranks, Log& log);

// With --dtr: shows that the largest step can be done, and says at what cost.
std::string try_dtr(const Config& config, const Trial& trial, int64_t share, Ranks& ranks);

}  // namespace yolox
