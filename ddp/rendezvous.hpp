// SPDX-License-Identifier: Apache-2.0
// Identity of ranks, and classification of errors in collectives.
#pragma once
#include <sys/types.h>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// Error of a rank that ends because another rank ended.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A rank ran out of memory in a step, which has changed nothing yet. All ranks must repeat it in `accum`
// micro-batches, and for this resume from a checkpoint.
struct NeedsRestart : std::runtime_error {
  NeedsRestart(int64_t accum, const std::string& what)
      : std::runtime_error(concat(what, "; resume the run, which goes on from there with --accum ", accum)),
        accum(accum) {}
  int64_t accum;
};

// Returns true for errors that are caused by this rank although a collective threw them: CUDA errors and out
// of memory.
bool is_local_error(const std::exception& e);

// Returns true for LostRank and for errors of torch about a broken connection to another rank.
bool is_lost_rank_error(const std::exception& e);

// Host, process and GPU of a rank.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;        // UUID; empty for the CPU
  std::string pci;        // PCI address of the GPU; empty for the CPU
  std::string boot;       // changes with each start of a machine, and so differs between machines of one name
  std::string nccl = "";  // version; empty for the CPU
  std::string machine() const { return host + " " + boot; }
  std::string text() const {
    return concat(host, ", process ", process, gpu.empty() ? "" : ", " + gpu.substr(0, 12));
  }
};

// Throws std::runtime_error if NCCL cannot connect the GPUs: if two ranks have the same GPU, two MIG slices
// of one GPU, or other versions of NCCL. peers: of all ranks, by rank.
void check_gpus(const std::vector<Peer>& peers);

}  // namespace yolox
