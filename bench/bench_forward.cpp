// SPDX-License-Identifier: Apache-2.0
// Times the network on one image as demo runs it: batch norms folded, boxes decoded. Prints one line of JSON;
// forward.py compares with ONNX Runtime and OpenVINO.
//   build/bench_forward --weights FILE [--size HxW] [--runs N] [--threads N]
#include <iostream>

#include "base/flags.hpp"
#include "base/memory.hpp"
#include "base/program.hpp"
#include "checkpoint/load.hpp"

using namespace yolox;

struct BenchConfig : Flags {
  std::string weights = flag(weights, "Bench", "weights", "", "FILE", "checkpoint");
  std::string size = flag(size, "Bench", "size", "", "N|HxW", "input size; default: that of the weights");
  int runs = flag(runs, "Bench", "runs", 50, "N", "timed runs, after 5 others");
  int threads = flag(threads, "Bench", "threads", 2, "N", "number of torch threads");
};

int main(int argc, char** argv) {
  return run_program([&] {
    BenchConfig c;
    c.parse(argc, argv, "times the network on one image");
    torch::set_num_threads(c.threads);
    keep_freed_memory();
    const torch::NoGradGuard no_grad;
    LoadedModel loaded = load_model(c.weights, "", "auto", torch::kCPU);
    fuse_batch_norms(*loaded.model);
    const ImageSize size = input_size(loaded.info, c.size);
    const torch::Tensor image =
        torch::rand({1, 3, size.height, size.width}).mul(255).contiguous(at::MemoryFormat::ChannelsLast);
    std::cout << "{\"seconds\": [";
    for (int i = -5; i < c.runs; ++i) {
      const double start = now();
      decode(loaded.model(image), size.height, size.width);
      if (i >= 0) std::cout << (i ? ", " : "") << now() - start;
    }
    std::cout << "]}\n";
  });
}
