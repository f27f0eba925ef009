// SPDX-License-Identifier: Apache-2.0
// Fast paths of a GPU (--fast): fused kernels in place of operations of torch, and CUDA graphs in place of
// single launches. Before a run uses one, a child process compares it with what it replaces, on the GPU of
// the run and with its sizes. A path that fails is left out, and the run continues without it. The check
// needs a process of its own, because an error in a kernel leaves a CUDA context that cannot be used again.
#pragma once
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/flags.hpp"
#include "config.hpp"
#include "ddp.hpp"

namespace yolox {

// Settings of the check of a fast path, which are the flags of the child process. The result also depends on
// the GPU, the driver and the program.
struct FastPathCase : Flags {
  std::string path = flag(path, "Check", "check-fast-path", "", "NAME", "name of the fast path");
  std::string with = flag(with, "Check", "with", "", "NAME,...", "other fast paths that are on");
  std::string model = flag(model, "Check", "model", "yolox-s", "NAME", "model");
  int classes = flag(classes, "Check", "classes", 80, "N", "number of classes");
  std::string size = flag(size, "Check", "size", "640", "HxW", "input size");
  int images = flag(images, "Check", "images", 16, "N", "images in a micro-batch of a rank");
  int accum = flag(accum, "Check", "accum", 1, "N", "micro-batches of a step");
  std::string amp = flag(amp, "Check", "amp", "off", "NAME", "precision");
  std::string optimizer = flag(optimizer, "Check", "optimizer", "sgd", "NAME", "optimizer");
  bool sync_bn = flag(sync_bn, "Check", "sync-bn", false, "", "SyncBN over two ranks");
  bool deterministic = flag(deterministic, "Check", "deterministic", false, "", "equal bits in two runs");
  std::string device = flag(device, "Check", "device", "cuda", "NAME", "device");
};

struct FastPathResult {
  std::string failure;    // empty if the path passed
  double difference = 0;  // largest relative difference of a layer, or of the weights after some steps
};

struct FastPath {
  std::string name;               // as in --fast
  std::string what;               // name in the log
  std::function<void(bool)> use;  // turns it on or off for this process
  // Compares the path with the plain path in this process, with this number of images.
  std::function<FastPathResult(const FastPath&, const FastPathCase&, int64_t images)> check;
};

// Returns the fast paths that this program contains and that work on this device in this precision (--amp).
std::vector<FastPath> fast_paths(torch::Device device, const std::string& amp);

// Checks a path that replaces operations. Compares
//   1. each layer of batch norm and SiLU with a shape of its own: results, gradients and running statistics,
//   with float32 as reference (limit 1e-4 in float32, 2e-3 in fp16, 2e-2 in bf16);
//   2. losses and gradient norm of two training steps (limit: 10 times the effect of rounding the pixels);
//   3. with `deterministic`, the bits of two calls.
FastPathResult check_operations(const FastPath& path, const FastPathCase& c, int64_t images);

// Checks CUDA graphs. Runs five steps with and without graphs. Each has another batch, learning rate and EMA
// decay, and two have L1 loss and another size. Compares
//   1. with deterministic algorithms: the bits of model, EMA, optimizer and gradient scaler;
//   2. with the algorithms of the run: losses (limit 0.1), gradient norms
//   (limit 0.5), and the difference of the states relative to their change (limit 0.5). The limits are loose,
//   because small differences grow.
FastPathResult check_graphs(const FastPath& path, const FastPathCase& c, int64_t images);

// Calls path.check(). Uses fewer images if memory runs out.
FastPathResult check_fast_path(const FastPath& path, const FastPathCase& c);

// Returns true if this process was started by use_fast_paths() to check a path.
bool is_fast_path_check(int argc, char** argv);
// The main function of that process. Prints the result and returns the exit code.
int fast_path_check(int argc, char** argv);

// Checks the paths of config.fast in child processes, turns on those that pass on all ranks, and sets
// config.fast to their names, so that a resumed run uses the same. A result is kept in the cache folder (see
// disk_place()) for the next start with the same GPU, driver, program and sizes. Returns a line for the log;
// adds warnings to `notes`. classes: number of classes. graphs: the training loop can use CUDA graphs. Throws
// UsageError if --fast names a path that does not exist here. All ranks must call it together.
std::string use_fast_paths(Config& config, int64_t classes, torch::Device device, Ranks& ranks, bool graphs,
                           std::vector<std::string>& notes);

// Returns true if use_fast_paths() has decided to use this path.
bool uses_fast_path(const Config& config, const std::string& name);

}  // namespace yolox
