// SPDX-License-Identifier: Apache-2.0
#include "ddp/rendezvous.hpp"

#include <map>
#include <utility>

#include "base/memory.hpp"

namespace yolox {

bool is_local_error(const std::exception& e) {
  const std::string what = e.what();
  return is_out_of_memory(e) || what.find("CUDA error") != std::string::npos ||
         what.find("CUDA driver error") != std::string::npos ||
         what.find("unhandled cuda error") != std::string::npos;
}

bool is_lost_rank_error(const std::exception& e) {
  const std::string what = e.what();
  if (is_local_error(e)) return false;
  for (const char* words : {"third_party/gloo", "Connection closed by peer", "Connection reset by peer",
                            "Broken pipe", "NCCL error", "NCCL communicator was aborted"})
    if (what.find(words) != std::string::npos) return true;
  return dynamic_cast<const LostRank*>(&e) != nullptr;
}

void check_gpus(const std::vector<Peer>& peers) {
  std::map<std::pair<std::string, std::string>, size_t> gpus;  // (machine, PCI address) -> rank
  for (size_t r = 0; r < peers.size(); ++r) {
    const Peer& p = peers[r];
    if (p.gpu.empty()) continue;
    check(p.nccl == peers[0].nccl, "rank 0 has NCCL ", peers[0].nccl, ", but rank ", r, " (", p.text(),
          ") has ", p.nccl, "; all machines need the same libnccl, that of LibTorch: check LD_LIBRARY_PATH");
    const auto [other, is_new] = gpus.emplace(std::pair(p.machine(), p.pci), r);
    if (is_new) continue;
    check(p.gpu == peers[other->second].gpu, "rank ", other->second, " and rank ", r,
          " use two MIG slices of one GPU (", p.text(),
          "); NCCL does not support this: use one slice, or turn ", "MIG off");
    fail("rank ", other->second, " and rank ", r, " share a GPU (", p.text(),
         "); each rank needs its own GPU: start fewer ranks, or check CUDA_VISIBLE_DEVICES");
  }
}

}  // namespace yolox
