// How ranks find each other, and what it means when one of them is gone.
#pragma once
#include <sys/types.h>
#include <stdexcept>
#include <string>

#include "base/error.hpp"
#include "base/memory.hpp"

namespace yolox {

// Another rank has gone: this one is not to blame.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Of this rank itself, though it shows where ranks talk to each other.
inline bool is_own_failure(const std::exception& e) {
  const std::string what = e.what();
  return is_out_of_memory(e) || what.find("CUDA error") != std::string::npos ||
         what.find("unhandled cuda error") != std::string::npos;
}

// What torch throws when a connection to another rank breaks.
inline bool is_lost_rank(const std::exception& e) {
  const std::string what = e.what();
  if (is_own_failure(e)) return false;
  for (const char* words : {"third_party/gloo", "Connection closed by peer", "Connection reset by peer",
                            "Broken pipe", "NCCL error", "NCCL communicator was aborted"})
    if (what.find(words) != std::string::npos) return true;
  return dynamic_cast<const LostRank*>(&e) != nullptr;
}

// Where a rank runs.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;  // where it sits in its machine; empty for the CPU
  std::string text() const { return concat(host, ", process ", process, gpu.empty() ? "" : ", GPU ", gpu); }
};

}  // namespace yolox
