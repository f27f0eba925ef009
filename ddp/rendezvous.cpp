// SPDX-License-Identifier: Apache-2.0
#include "ddp/rendezvous.hpp"

#include "base/memory.hpp"

namespace yolox {

bool is_local_error(const std::exception& e) {
  const std::string what = e.what();
  return is_out_of_memory(e) || what.find("CUDA error") != std::string::npos ||
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

}  // namespace yolox
