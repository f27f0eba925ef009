// SPDX-License-Identifier: Apache-2.0
#include "data/batches.hpp"

#include <optional>
#include <utility>

#include "base/program.hpp"
#include "data.hpp"

namespace yolox {

struct Batches::Pipeline {
  Loader::Make items;
  int64_t batch, from, to, end;  // total batch size, share of this rank in it, position after the last image
  int workers;
  cv::Size size;
  torch::Device device;
  std::optional<Loader> loader;
  std::optional<DeviceLoader> batches;
  double waited = 0;
};

Batches::Batches(const Dataset& data, const BatchSettings& settings, int rank, ImageSize size,
                 torch::Device device, int64_t head, int64_t heads) {
  const auto mosaic_at = [=, batch = settings.batch, until = settings.mosaic_iters](int64_t position) {
    return position / batch * heads + head < until;
  };
  Loader::Make items = training_items(data, settings.seed + head, settings.augment, settings.augmented,
                                      mosaic_at, repeat_factors(data, settings.repeat_rare));
  if (settings.check_boxes) items = checked_items(items, data);
  pipeline.reset(new Pipeline{std::move(items),
                              settings.batch,
                              settings.batch * rank / settings.ranks,
                              settings.batch * (rank + 1) / settings.ranks,
                              settings.iters * settings.batch,
                              settings.workers,
                              cv::Size(size.width, size.height),
                              device,
                              {},
                              {}});
}

Batches::~Batches() = default;

void Batches::start(int64_t step) {
  Pipeline& s = *pipeline;
  s.batches.reset();
  s.loader.reset();
  s.loader.emplace(s.items, step * s.batch + s.from, s.end, int(s.to - s.from), s.size, s.workers,
                   s.device.is_cuda(), /*stride=*/s.batch);
  s.batches.emplace(*s.loader, s.device);
}

Batch Batches::next() {
  RECORD_USER_SCOPE("data");
  const double start = now();
  Batch batch = pipeline->batches->next();
  pipeline->waited += now() - start;
  return batch;
}

double Batches::reset_waiting_time() { return std::exchange(pipeline->waited, 0.0); }

}  // namespace yolox
