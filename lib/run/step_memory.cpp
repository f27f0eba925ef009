// SPDX-License-Identifier: Apache-2.0
#include "run/step_memory.hpp"

#include <cmath>
#include <limits>

#include "base/cuda_graph.hpp"
#include "base/device.hpp"
#include "base/memory.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"
#include "run/step_metrics.hpp"

namespace yolox {

// Times the computation of a step without DTR that --bs auto accepts with DTR.
static constexpr double kMaxSlowdown = 1.3;

Losses MicroBatches::fit(ImageSize size, const std::function<Losses(int64_t)>& compute) {
  statistics.save();
  for (int64_t now = std::min(parts, max_parts);;) {
    try {
      Losses losses = compute(now);
      if (now > parts && ++retries > 1) parts = now;
      return losses;
    } catch (const std::exception& e) {
      now = repeat_after(e, now, size);
    }
  }
}

int64_t MicroBatches::repeat_after(const std::exception& e, int64_t now, ImageSize size) {
  const std::string error = e.what();
  if (error.find("returned nan values") != std::string::npos)  // torch's anomaly mode (--debug)
    throw StepFailed(error.substr(0, error.find('.')), {t.iteration, t.optimizer.lr, {}, {}});
  // A step that is not recorded needs less memory; see StepGraphs.
  if (!is_out_of_memory(e) || is_recording_cuda_graph()) throw;
  const std::string what =
      concat("out of memory at step ", t.iteration, " with ", size.height, "x", size.width, " pixels");
  int64_t next = now;
  if (!ranks.alone() || !graphs.free_memory()) {
    check(now < max_parts, what, ", even with one image at a time; give a smaller --size or --model (",
          error.substr(0, error.find('\n')), ")");
    next = std::min(2 * now, max_parts);
  }
  if (!ranks.alone()) {
    save_parts(run, next);
    throw RankError(kNeedsRestart,
                    concat(what, " on rank ", ranks.info.rank,
                           "; resume the run, which then computes each step in ", next, " micro-batches"));
  }
  free_failed_backward(t.device());
  t.optimizer.zero_grad();
  statistics.restore();
  empty_cache(t.device());
  log.line(concat("note: ", what, "; repeated", next > 1 ? concat(" in ", next, " micro-batches") : ""));
  return next;
}

double TrialStep::operator()(int64_t images, int64_t accum) const {
  const torch::Device device = t.device();
  // On the CPU, the data loader holds three batches and copies one more.
  const double waiting = device.is_cpu() ? 4.0 * double(images) * base.height * base.width * 3 : 0;
  double bytes = std::numeric_limits<double>::infinity();
  SavedStatistics statistics(*t.model);
  empty_cache(device);
  try {
    Ranks alone(RankInfo(), device, 0);
    Input input{torch::full({images, base.height, base.width, 3}, 114, torch::kByte)
                    .to(device)
                    .permute({0, 3, 1, 2})
                    .to(t.type),
                {torch::full({images, 20, 4}, base.width / 4.0, device),
                 torch::zeros({images, 20}, torch::TensorOptions(torch::kLong).device(device)),
                 std::vector<int64_t>(images, 20)}};
    resize_batch(input.images, input.targets, largest);
    const auto step = [&] {
      dtr.run([&] { forward_backward(t, input, std::min(accum, images), /*use_l1=*/false, alone); });
    };
    if (dtr.on()) step();  // the first step is slow
    step();
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
    bytes = memory_peak(device) + waiting;
  } catch (const std::exception& e) {
    if (!is_out_of_memory(e)) throw;
    free_failed_backward(device);
  }
  t.optimizer.zero_grad();
  statistics.restore();
  empty_cache(device);
  return bytes;
}

int64_t largest_batch(int64_t limit, const std::function<bool(int64_t)>& fits) {
  int64_t largest = 0, too_large = limit + 1;
  for (int64_t next = std::min<int64_t>(2, limit);
       too_large - largest > std::max<int64_t>(1, largest / 32);) {
    (fits(next) ? largest : too_large) = next;
    next = too_large > limit ? std::min(2 * largest, limit) : (largest + too_large) / 2;
  }
  return largest;
}

// --bs auto: sets config.bs to the largest batch size that fits, at most n images over all ranks. Returns a
// line for the log.
static std::string find_batch(Config& config, const TrialStep& trial, int64_t n, Ranks& ranks, Log& log) {
  const int world = ranks.info.world;
  const bool on_cpu = trial.t.device().is_cpu(), with_dtr = trial.dtr.on();
  // Ranks on the CPU share the memory of their machine. The rank with the least memory decides for all.
  const double mine = memory_budget(trial.t.device()) / (on_cpu ? ranks.info.local_world : 1),
               budget = -ranks.max(-mine);
  const auto fits = [&](int64_t images) {
    const double bytes = ranks.max(trial(images, config.accum));
    const DtrStep& s = trial.dtr.step();
    const double slowdown = ranks.max(s.slowdown()), dtr_budget = ranks.max(s.budget);
    const bool ran = std::isfinite(bytes) && ranks.max(s.limit > Dtr::kSlack * s.budget) == 0;
    const std::string times = with_dtr ? ", " + trial.dtr.slowdown_text(slowdown) : "";
    log.line(concat("bs auto: ", images, " images per rank ",
                    ran ? "need " + short_bytes(bytes) + times : "do not fit"));
    // The process also uses memory that DTR does not count. That part must not decide the batch size, unless
    // the DTR budget exceeds the memory of the machine.
    return ran && slowdown <= kMaxSlowdown && (bytes <= budget || (with_dtr && dtr_budget <= budget));
  };
  // The learning rate needs some steps in an epoch.
  const int64_t limit = std::max<int64_t>(1, n / 10 / world), found = largest_batch(limit, fits);
  check(found > 0, "not even one image fits in memory; give ", with_dtr ? "a larger --dtr, or " : "",
        "a smaller --size or --model");
  config.bs = int(found) * world;
  config.accum = std::min(config.accum, int(found));
  return concat("--bs auto: ", config.bs, found == limit ? " (at least ten steps in an epoch)" : "",
                "; the memory budget is ", short_bytes(mine), " per rank");
}

void choose_batch(Config& config, const TrialStep& trial, int64_t images, const std::string& run,
                  Ranks& ranks, Log& log) {
  if (config.bs == 0) log.line(find_batch(config, trial, images, ranks, log));
  const int given = config.accum, max_parts = config.bs / ranks.info.world;
  const int64_t share = (config.bs + ranks.info.world - 1) / ranks.info.world;
  config.accum = std::max(given, std::min(int(ranks.max(double(parts_of_run(run)))), max_parts));
  if (config.accum > given)
    log.line(concat("accum   ", config.accum, " instead of ", given, ", because memory ran out (", run,
                    "/parts)"));
  // Ranks cannot repeat a step, but on GPUs they can try one.
  if (ranks.alone() || trial.t.device().is_cpu() || trial.dtr.on()) return;
  while (!std::isfinite(ranks.max(trial(share, config.accum)))) {
    check(config.accum < max_parts,
          "the largest step does not fit in memory, even with one image at a time; give a smaller --size or "
          "--model");
    config.accum = std::min(2 * config.accum, max_parts);
    log.line(concat("accum   ", config.accum, " instead of ", given, ": with less, a step of ",
                    trial.largest.height, "x", trial.largest.width,
                    " pixels does not fit in the memory of each GPU"));
  }
}

std::string set_threads(Config& config, Training& t, ImageSize base, int64_t share, Ranks& ranks) {
  if (t.device().is_cuda()) return "";
  // With --deterministic, two equal commands have equal results, which depend on the number.
  const bool chooses = config.threads == 0 && !config.deterministic;
  if (chooses) {
    SavedStatistics statistics(*t.model);
    const auto images = torch::full({std::min<int64_t>(share, 4), 3, base.height, base.width}, 114, t.type)
                            .contiguous(torch::MemoryFormat::ChannelsLast);
    config.threads = fastest_threads([&] {
      const double start = now();
      const AutocastGuard autocast(torch::kCPU, t.amp);
      const Predictions p = YOLOX(t.model)(images);
      (p.reg.sum() + p.obj.sum() + p.cls.sum()).backward();
      return ranks.max(now() - start);
    });
    t.optimizer.zero_grad();
    statistics.restore();
  }
  if (config.threads > 0) torch::set_num_threads(config.threads);
  return concat("threads ", torch::get_num_threads(), " of ", usable_cores(), " cores",
                chooses ? "; --threads N fixes it" : "");
}

std::string try_dtr_step(const Config& config, const TrialStep& trial, int64_t share, Ranks& ranks) {
  const double bytes = ranks.max(trial(share, config.accum));
  check(std::isfinite(bytes), "the first step does not fit in memory with --dtr ", config.dtr, "; give ",
        config.dtr == "auto" ? "a smaller --bs, --size or --model" : "a smaller --dtr");
  const DtrStep& s = trial.dtr.step();
  trial.dtr.check_budget(ranks.max(s.limit));
  const double peak = ranks.max(s.peak), slowdown = ranks.max(s.slowdown());
  return concat("dtr     ", trial.largest.height, "x", trial.largest.width, ": a step needs ",
                short_bytes(peak), " of ", short_bytes(s.budget), "; ", s.rematerialisations,
                " rematerialisations, ", trial.dtr.slowdown_text(slowdown), trial.dtr.pinned_operations(),
                s.limit > Dtr::kSlack * s.budget ? "; warning: this exceeds the free memory" : "");
}

}  // namespace yolox
