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
bool is_own_failure(const std::exception& e);

// What torch throws when a connection to another rank breaks.
bool is_lost_rank(const std::exception& e);

// Where a rank runs.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;  // where it sits in its machine; empty for the CPU
  std::string text() const { return concat(host, ", process ", process, gpu.empty() ? "" : ", GPU ", gpu); }
};

}  // namespace yolox
