// SPDX-License-Identifier: Apache-2.0
// Time of a training step on several ranks of one machine, on its CPU or its GPUs, to compare with one rank
// with the same total batch size and the same cores. Also the time of the gradient all-reduce, and how much
// of it overlaps with backward. Prints one line of JSON; ddp.py makes the table.
#include <array>
#include <iostream>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/threads.hpp"
#include "bench/random_input.hpp"
#include "ddp.hpp"
#include "median.hpp"
#include "models.hpp"
#include "optim.hpp"
#include "run/log.hpp"

#define YOLOX_WITHOUT_MAIN
#include "train.cpp"  // forward_backward()

using namespace yolox;

struct BenchConfig : Flags {
  std::string model = flag(model, "Bench", "model", "yolox-nano", "NAME", "model size");
  int size = flag(size, "Bench", "size", 416, "N", "input size");
  int bs = flag(bs, "Bench", "bs", 8, "N", "total batch size over all ranks");
  int ranks = flag(ranks, "Bench", "ranks", 2, "N", "number of ranks, which share the cores of this machine");
  int steps = flag(steps, "Bench", "steps", 8, "N", "timed steps of each kind, after 2 warm-up steps");
  bool sync_bn = flag(sync_bn, "Bench", "sync-bn", true, "", "SyncBN");
  int objects = flag(objects, "Bench", "objects", 20, "N", "ground-truth boxes per image");
  std::string device = flag(device, "Bench", "device", "cpu", "cpu|cuda", "cuda: a GPU for each rank");
};

// All-reduces the gradients as one tensor.
static void sum_gradients(const Optimizer& optimizer, Ranks& ranks) {
  std::vector<Tensor> flat;
  for (const Tensor& g : gradients(optimizer.groups)) flat.push_back(g.reshape(-1));
  Tensor all = torch::cat(flat);
  ranks.sum(all);
}

// Returns the seconds of work() on the slowest rank, because of the barriers.
template <class Work>
static double timed(Ranks& ranks, torch::Device device, const Work& work) {
  ranks.barrier();
  const double start = now();
  work();
  if (device.is_cuda()) torch::cuda::synchronize(device.index());
  ranks.barrier();
  return now() - start;
}

// Returns the median seconds of three kinds of backward: without all-reduce of the gradients; with one
// all-reduce after backward; with the all-reduces of the Reducer during backward.
static std::array<double, 3> time_backward(const BenchConfig& c, YOLOX& model, const Input& input,
                                           Optimizer& optimizer, GradientReducer& reducer, Ranks& ranks,
                                           torch::Device device) {
  std::vector<double> seconds[3];
  for (int i = 0; i < c.steps + 2; ++i) {
    for (int kind = 0; kind < 3; ++kind) {
      optimizer.zero_grad();
      const Tensor loss = yolox_loss(model(input.images), c.size, c.size, input.targets, false).total;
      if (kind == 2) reducer.before_backward({loss});
      const double of_step = timed(ranks, device, [&] {
        loss.backward();
        if (kind == 1) sum_gradients(optimizer, ranks);
      });
      if (i >= 2) seconds[kind].push_back(of_step);
    }
  }
  return {median(seconds[0]), median(seconds[1]), median(seconds[2])};
}

int main(int argc, char** argv) {
  int code = 0;
  const int failed = run_program([&] {
    BenchConfig c;
    c.parse(argc, argv, "times a training step on several ranks");
    const RankInfo rank_info = rank_info_from_environment();
    if (!rank_info.launched && !rank_info.started_by_others()) {
      code = launch({c.ranks, "", false}, argc, argv);
      return;
    }
    torch::set_num_threads(std::max(1, usable_cores() / rank_info.local_world));
    torch::manual_seed(0);
    const torch::Device device =
        parse_device(c.device == "cuda" ? concat("cuda:", rank_info.local_rank) : c.device);
    Ranks& ranks = *new Ranks(rank_info, device, 600);
    YOLOX model = make_model(c.model, 80), ema = make_model(c.model, 80);
    model->to(device);
    ema->to(device);
    to_channels_last(*model);
    to_channels_last(*ema);
    model->train();
    Training t{model, ema, Optimizer("sgd", parameter_groups(*model, 5e-4), false),
               GradScaler(false, device)};
    Optimizer& optimizer = t.optimizer;
    const int64_t share = c.bs / rank_info.world;
    Input input = random_input(share, c.size, c.objects, device);
    t.images_per_rank = double(share);
    const auto reducer = std::make_shared<GradientReducer>(ranks, model->parameters());
    t.reducer = reducer;
    const EmaTensors averaged = ema_tensors(*ema, *model);
    if (!ranks.alone() && c.sync_bn) use_sync_bn(*model, ranks.sync_bn_collectives());
    std::vector<double> steps;
    for (int i = 0; i < c.steps + 2; ++i)
      steps.push_back(timed(ranks, device, [&] {
        forward_backward(t, input, 1, /*use_l1=*/false, ranks);
        const std::vector<Tensor> grads = gradients(optimizer.groups);
        clip_gradients(grads, gradient_norm(grads), 10);
        optimizer.step(1e-4);
        ema_update(averaged, 0.9998);
      }));
    steps.erase(steps.begin(), steps.begin() + 2);
    use_sync_bn(*model, {});
    const auto [alone, then, during] = time_backward(c, model, input, optimizer, *reducer, ranks, device);
    double bytes = 0;
    for (const Tensor& p : model->parameters()) bytes += double(p.nbytes());
    std::cout << "{\"step\": " << median(steps) << ", \"alone\": " << alone << ", \"then\": " << then
              << ", \"during\": " << during << ", \"gradient_bytes\": " << bytes << "}" << std::endl;
    ranks.shutdown();
  });
  return failed ? failed : code;
}
