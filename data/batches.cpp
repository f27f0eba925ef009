// SPDX-License-Identifier: Apache-2.0
#include "data/batches.hpp"

#include <utility>

#include "base/program.hpp"
#include "data.hpp"

namespace yolox {

Batches::Batches(const Dataset& data, const BatchSettings& settings, int rank, ImageSize size,
                 torch::Device device, int64_t head, int64_t heads)
    : settings(settings),
      from(settings.batch * rank / settings.ranks),
      to(settings.batch * (rank + 1) / settings.ranks),
      size(size.width, size.height),
      device(device) {
  const auto mosaic_at = [=, batch = settings.batch, until = settings.mosaic_iters](int64_t position) {
    return position / batch * heads + head < until;
  };
  items = training_items(data, settings.seed + head, settings.augment, settings.augmented, mosaic_at,
                         repeat_factors(data, settings.repeat_rare));
  if (settings.check_boxes) items = checked_items(items, data);
}

void Batches::start(int64_t step) {
  batches.reset();
  loader.reset();
  loader.emplace(items, step * settings.batch + from, settings.iters * settings.batch, int(to - from), size,
                 settings.workers, device.is_cuda(), /*stride=*/settings.batch);
  batches.emplace(*loader, device);
}

Batch Batches::next() {
  RECORD_USER_SCOPE("data");
  const double start = now();
  Batch batch = batches->next();
  waited += now() - start;
  return batch;
}

double Batches::reset_waiting_time() { return std::exchange(waited, 0.0); }

}  // namespace yolox
