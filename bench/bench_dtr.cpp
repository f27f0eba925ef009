// SPDX-License-Identifier: Apache-2.0
// Time of a training step under memory budgets of DTR (dtr.hpp), as a ratio to a plain step. Each round runs
// one step of each kind. Times are CPU seconds, or on a GPU seconds until it has finished, and the table has
// the medians of the ratios. Gradients and losses must be bit-for-bit equal to those of the plain step; on a
// GPU, see --deterministic.
//   ./build/bench_dtr --model yolox-tiny --bs 4 --size 416
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/memory.hpp"
#include "base/program.hpp"
#include "bench/random_input.hpp"
#include "dtr/budget.hpp"
#include "median.hpp"
#include "models.hpp"
#include "run/log.hpp"
#include "run/step_memory.hpp"

#define YOLOX_WITHOUT_MAIN
#include "train.cpp"  // forward_backward()

using namespace yolox;

struct BenchConfig : Flags {
  std::string model = flag(model, "Bench", "model", "yolox-tiny", "NAME", "model size");
  int size = flag(size, "Bench", "size", 416, "N", "input size");
  int bs = flag(bs, "Bench", "bs", 4, "N", "batch size");
  int rounds = flag(rounds, "Bench", "rounds", 5, "N", "timed rounds, after 1 warm-up round");
  int threads = flag(threads, "Bench", "threads", 1, "N", "number of torch threads");
  std::string amp = flag(amp, "Bench", "amp", "off", "off|bf16", "mixed precision");
  std::string device = flag(device, "Bench", "device", "cpu", "cpu|cuda[:N]", "device to train on");
  bool deterministic =
      flag(deterministic, "Bench", "deterministic", false, "", "deterministic algorithms on a GPU");
  std::string budgets =
      flag(budgets, "Bench", "budgets", "100,80,60,50,40,30,0", "P,...",
           "memory budgets in % of the activations; 100: no limit; 0: activation checkpointing");
};

static double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Activation checkpointing, the usual alternative to DTR. A block keeps only its input, and backward
// recomputes the whole block, even if memory is free. Batch norm statistics are updated in the first forward
// pass only.
struct RecomputedBlock : torch::autograd::Function<RecomputedBlock> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, Block* block) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = int64_t(block);
    return block->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    auto* block = reinterpret_cast<Block*>(ctx->saved_data["block"].toInt());
    SavedStatistics statistics(*block);
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode on(true);
    const Tensor y = block->forward(x);
    statistics.restore();
    y.backward(grads[0]);
    return {x.grad(), {}};
  }
};
// A block with activation checkpointing while `on` is true.
struct CheckpointedBlock : Block {
  explicit CheckpointedBlock(BlockPtr b) : inner(std::move(b)) {}
  Tensor forward(Tensor x) override {
    return on && x.requires_grad() ? RecomputedBlock::apply(x, inner.get()) : inner->forward(x);
  }
  BlockPtr inner;
  inline static bool on = false;
};
// Wraps all blocks of the sequences in backbone and head, and the blocks of the neck.
static void checkpoint_blocks(YOLOX& model) {
  const auto wrap = [](BlockPtr& b) { b = std::make_shared<CheckpointedBlock>(b); };
  auto& neck = *model->backbone->as<YOLOPAFPN>();
  auto& head = *model->head->as<YOLOXHead>();
  auto& darknet = *neck.backbone->as<CSPDarknet>();
  for (Seq* seq : {&darknet.dark2, &darknet.dark3, &darknet.dark4, &darknet.dark5, &head.stems,
                   &head.cls_convs, &head.reg_convs})
    for (BlockPtr& b : (*seq)->blocks) wrap(b);
  for (BlockPtr* b : {&neck.C3_p4, &neck.C3_p3, &neck.bu_conv2, &neck.C3_n3, &neck.bu_conv1, &neck.C3_n4})
    wrap(*b);
}

// Result of a step. bytes: peak above the start of the step.
struct Outcome {
  double seconds, bytes, loss;
  std::vector<Tensor> gradients;
};

// A row of the table: a budget in percent of the activations; 0: activation checkpointing.
struct Kind {
  double percent;
  std::unique_ptr<Dtr> dtr;
  std::vector<double> ratios;
  double bytes = 0;
  bool equal = true;
  std::string error;
};

static std::vector<Kind> kinds_of(const BenchConfig& c, double activations, torch::Device device) {
  std::vector<Kind> kinds;
  for (const std::string& text : split_list(c.budgets)) {
    Kind k;
    k.percent = std::stod(text);
    DtrSettings s = dtr_settings(1, device, 1);
    s.budget = 0;
    const double most =
        k.percent >= 100 ? std::numeric_limits<double>::infinity() : activations * k.percent / 100;
    if (k.percent > 0) s.automatic = [most](double used, int64_t) { return used + most; };
    k.dtr = std::make_unique<Dtr>(s);
    kinds.push_back(std::move(k));
  }
  return kinds;
}

static void print_table(std::vector<Kind>& kinds, double activations) {
  std::printf(
      "| budget, %% of activations | peak, %% | step | min to max | equal | evicted | rematerialised |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  for (Kind& k : kinds) {
    const std::string label = k.percent > 0 ? rounded(k.percent) : "checkpointing";
    if (!k.error.empty()) {
      std::printf("| %s | %s |\n", label.c_str(), k.error.c_str());
      continue;
    }
    std::sort(k.ratios.begin(), k.ratios.end());
    const DtrStep& d = k.dtr->step();
    std::printf("| %s | %.1f | x%.3f | %.3f to %.3f | %s | %ld | %ld |\n", label.c_str(),
                100 * k.bytes / activations, median(k.ratios), k.ratios.front(), k.ratios.back(),
                k.equal ? "yes" : "NO", long(d.evictions), long(d.rematerialisations));
  }
}

// Adds the result of a step with this kind, and compares it with that of a plain step. timed: not a warm-up.
static void add_result(Kind& k, const Outcome& o, const Outcome& plain, bool timed) {
  if (timed) k.ratios.push_back(o.seconds / plain.seconds);
  k.bytes = std::max(k.bytes, o.bytes);
  k.equal &= o.loss == plain.loss && o.gradients.size() == plain.gradients.size();
  for (size_t i = 0; i < o.gradients.size() && k.equal; ++i)
    k.equal = torch::equal(o.gradients[i], plain.gradients[i]);
}

int main(int argc, char** argv) {
  return run_program([&] {
    keep_freed_memory();
    BenchConfig c;
    c.parse(argc, argv, "times a training step under memory budgets of DTR");
    torch::set_num_threads(c.threads);
    auto& allocator = CountingAllocator::get();
    const torch::Device device = parse_device(c.device);
    if (c.deterministic) use_deterministic_algorithms();
    torch::manual_seed(0);
    YOLOX model = make_model(c.model, 80);
    model->to(device);
    to_channels_last(*model);
    model->train();
    Training t{model, YOLOX(nullptr), Optimizer("sgd", parameter_groups(*model, 5e-4), false),
               GradScaler(false, device)};
    t.amp = c.amp == "bf16" ? torch::kBFloat16 : torch::kFloat;
    const Input input = random_input(c.bs, c.size, 20, device);

    // On a GPU the peak is measured in the steps with empty_cache() only.
    Ranks alone(RankInfo(), device, 0);
    const auto step = [&](Dtr& dtr, bool measure_memory) {
      t.optimizer.zero_grad();
      const bool gpu = device.is_cuda();
      if (!gpu) allocator.reset_peak();
      if (gpu && measure_memory) empty_cache(device);
      if (gpu) torch::cuda::synchronize();
      const auto seconds_now = [&] { return gpu ? now() : cpu_seconds(); };
      const double base = gpu ? allocated_bytes(device).now : double(allocator.live());
      const double start = seconds_now();
      const Losses losses = dtr.run([&] { return forward_backward(t, input, 1, /*use_l1=*/false, alone); });
      if (gpu) torch::cuda::synchronize();
      const double seconds = seconds_now() - start;
      const double peak = !gpu             ? double(allocator.peak())
                          : measure_memory ? allocated_bytes(device).peak
                                           : base;
      return Outcome{seconds, peak - base, losses.total.item<double>(), gradients(t.optimizer.groups)};
    };
    Dtr off;
    step(off, true);
    Outcome plain = step(off, true);
    const double activations = plain.bytes;
    std::printf("%s, %d images of %dx%d, %s, %d threads: %.1f MB of activations, %.1f MB of other tensors\n",
                c.model.c_str(), c.bs, c.size, c.size, c.amp.c_str(), c.threads, activations / 1e6,
                (device.is_cuda() ? allocated_bytes(device).now : double(allocator.live())) / 1e6);

    checkpoint_blocks(model);  // inactive until CheckpointedBlock::on
    std::vector<Kind> kinds = kinds_of(c, activations, device);
    std::vector<double> seconds, again;
    for (int round = -1; round < c.rounds; ++round) {
      plain = Outcome{};
      plain = step(off, round < 0);
      for (Tensor& g : plain.gradients) g = g.clone();
      if (round >= 0) seconds.push_back(plain.seconds);
      for (Kind& k : kinds) try {
          if (!k.error.empty()) continue;
          CheckpointedBlock::on = k.percent == 0;
          const Outcome o = step(*k.dtr, round < 0);
          CheckpointedBlock::on = false;
          add_result(k, o, plain, round >= 0);
        } catch (const std::exception& e) {
          k.error = e.what();
          k.error = k.error.substr(0, k.error.find(char(10)));
        }
      t.optimizer.zero_grad();
      const double s = step(off, false).seconds;
      if (round >= 0) again.push_back(s / plain.seconds);
    }
    std::printf("plain step: %.3f CPU s (a second plain step: x%.3f)\n\n", median(seconds), median(again));
    print_table(kinds, activations);
    std::printf("\n%ld operations per step\n", long(kinds.front().dtr->step().operations));
  });
}
