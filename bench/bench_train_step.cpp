// SPDX-License-Identifier: Apache-2.0
// Time and memory of the training step of train.cpp with SGD, from a batch of the loader to the numbers on
// the host. Prints a line of JSON for each of --kinds; train_step.py and gpu.py compare with the Python YOLOX
// and make the tables.
#include <iostream>
#include <sstream>

#include "base/device.hpp"
#include "base/flags.hpp"
#include "base/memory.hpp"
#include "bench/random_input.hpp"
#include "config.hpp"
#include "models.hpp"
#include "run/log.hpp"

#include "tests/train_step.hpp"

using namespace yolox;

struct BenchConfig : Flags {
  std::string model = flag(model, "Bench", "model", "yolox-nano", "NAME", "model size");
  int size = flag(size, "Bench", "size", 416, "N", "input size");
  int bs = flag(bs, "Bench", "bs", 8, "N", "batch size");
  int steps =
      flag(steps, "Bench", "steps", 8, "N",
           "timed steps, after 2 warm-up steps (10 on a GPU); 0: a single step, to time the start-up");
  int threads = flag(threads, "Bench", "threads", 2, "N", "number of torch threads");
  int objects = flag(objects, "Bench", "objects", 20, "N", "ground-truth boxes per image");
  std::string device = flag(device, "Bench", "device", "cpu", "auto|cpu|cuda[:N]", "device to train on");
  std::string amp = flag(amp, "Bench", "amp", "off", "off|tf32|bf16|fp16", "precision");
  std::string kinds =
      flag(kinds, "Bench", "kinds", "plain", "LIST",
           "steps to time: plain, norm (the fused norm kernels of a GPU), graph (replay the step "
           "as a CUDA graph), both");
  bool cudnn_benchmark = flag(cudnn_benchmark, "Bench", "cudnn-benchmark", false, "",
                              "let cuDNN time its algorithms, as in long runs");
};

// Prints times and memory of a kind of step.
static void time_steps(const BenchConfig& c, const std::string& kind, torch::Device device) {
  torch::manual_seed(0);
  use_fused_norm(kind == "norm" || kind == "both");
  Config config;
  config.model = c.model;
  config.amp = c.amp;
  config.optimizer = "sgd";
  fill_in(config);
  YOLOX model = make_model(c.model, 80);
  move(model, device, torch::kFloat);
  to_channels_last(*model);
  Training t = new_training(config, model, copy_of(model, device), {}, {}, device, /*casts_together=*/true);
  Log log("");
  const bool with_graphs = kind == "graph" || kind == "both";
  test::TrainSteps steps(t, device, log, with_graphs, c.bs);
  const Batch batch = random_batch(c.bs, c.size, c.objects, device);
  const ImageSize size{c.size, c.size};
  if (device.is_cuda()) empty_cache(device);
  const double before = memory_peak(device);
  // Training does not wait for the GPU after a step, so five steps are timed together.
  const int together = device.is_cuda() && c.steps >= 5 ? 5 : 1, warm_up = c.steps ? 2 * together : 0;
  std::vector<double> times;
  double start = now();
  for (int i = 0; i < (c.steps ? c.steps + warm_up : 1); ++i) {
    steps(batch, size, /*use_l1=*/false, 1e-4);
    if (steps.unread.due(0)) steps.unread.read();
    if ((i + 1) % together != 0) continue;
    if (device.is_cuda()) torch::cuda::synchronize();
    if (i >= warm_up || c.steps == 0) times.push_back((now() - start) / together);
    start = now();
  }
  check(steps.graphs.is_on() == with_graphs, "the step cannot be recorded");
  std::cout << "{\"kind\": \"" << kind << "\", \"seconds\": [";
  for (size_t i = 0; i < times.size(); ++i) std::cout << (i ? ", " : "") << times[i];
  std::cout << "], \"peak_bytes\": " << memory_peak(device) << ", \"before_bytes\": " << before << "}"
            << std::endl;
}

int main(int argc, char** argv) {
  return run_program([&] {
    BenchConfig c;
    c.parse(argc, argv, "times a training step");
    torch::set_num_threads(c.threads);
    const torch::Device device = parse_device(c.device);
    if (device.is_cpu()) keep_freed_memory();
    allow_tf32(c.amp == "tf32");
    use_cudnn_benchmark(c.cudnn_benchmark);
    std::istringstream kinds(c.kinds);
    for (std::string kind; std::getline(kinds, kind, ',');) {
      usage_check(kind == "plain" || kind == "norm" || kind == "graph" || kind == "both", "--kinds ", kind,
                  ": expected plain, norm, graph or both");
      time_steps(c, kind, device);
    }
  });
}
