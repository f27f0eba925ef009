// SPDX-License-Identifier: Apache-2.0
// Time and memory of our training step: forward, loss, backward, SGD, EMA. Prints one line of JSON;
// train_step.py compares with the Python YOLOX and makes the table.
#include <iostream>

#include "base/flags.hpp"
#include "base/memory.hpp"
#include "loss.hpp"
#include "optim.hpp"
#include "run/log.hpp"

using namespace yolox;

struct Config : Flags {
  std::string model = flag(model, "Bench", "model", "yolox-nano", "NAME", "model size");
  int size = flag(size, "Bench", "size", 416, "N", "input size");
  int bs = flag(bs, "Bench", "bs", 8, "N", "batch size");
  int steps = flag(steps, "Bench", "steps", 8, "N",
                   "timed steps, after 2 warm-up steps; 0: a single step, to time the start-up");
  int threads = flag(threads, "Bench", "threads", 2, "N", "number of torch threads");
  int objects = flag(objects, "Bench", "objects", 20, "N", "ground-truth boxes per image");
};

int main(int argc, char** argv) {
  return run_program([&] {
    Config c;
    c.parse(argc, argv, "times a training step");
    torch::set_num_threads(c.threads);
    torch::manual_seed(0);
    YOLOX model(c.model, 80), ema(c.model, 80);
    to_channels_last(*model);
    to_channels_last(*ema);
    model->train();
    Optimizer optimizer("sgd", parameter_groups(*model, 5e-4), false);
    const Tensor images = (torch::rand({c.bs, c.size, c.size, 3}) * 255).permute({0, 3, 1, 2});
    const Tensor r = torch::rand({c.bs, c.objects, 4});
    const Targets targets{torch::cat({r.slice(2, 0, 2) * c.size, 10 + r.slice(2, 2, 4) * c.size / 3}, 2),
                          torch::randint(80, {c.bs, c.objects}, torch::kLong),
                          std::vector<int64_t>(c.bs, c.objects)};
    const double before = peak_bytes();
    std::vector<double> times;
    for (int i = 0; i < (c.steps ? c.steps + 2 : 1); ++i) {
      const double start = now();
      const auto losses = yolox_loss(model(images), c.size, c.size, targets, false);
      optimizer.zero_grad();
      losses.total.backward();
      optimizer.step(1e-4);
      ema_update(*ema, *model, 0.9998);
      if (i >= 2 || c.steps == 0) times.push_back(now() - start);
    }
    std::cout << "{\"seconds\": [";
    for (size_t i = 0; i < times.size(); ++i) std::cout << (i ? ", " : "") << times[i];
    std::cout << "], \"peak_bytes\": " << peak_bytes() << ", \"before_bytes\": " << before << "}\n";
  });
}
