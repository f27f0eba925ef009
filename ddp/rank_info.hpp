// SPDX-License-Identifier: Apache-2.0
// Rank and world size of this process, from the environment variables of torchrun, SLURM or our launcher.
#pragma once
#include <string>
#include <utility>

namespace yolox {

// Rank, world size and rendezvous address.
struct RankInfo {
  int rank = 0, world = 1;              // world: world size
  int local_rank = 0, local_world = 1;  // on this machine
  std::string host;                     // rendezvous address: the machine of rank 0
  int port = 0;                         // rendezvous port
  bool agent_hosts_store = false;       // true: the agent of torchrun hosts the store; false: rank 0
  int listening = -1;     // file descriptor of the socket that the launcher opened for rank 0; -1: none
  bool launched = false;  // started by our launcher

  // Returns true if torchrun or SLURM started the ranks.
  bool started_by_others() const { return world > 1 && !launched; }
};

// Exit code of a rank that ended because another rank ended.
constexpr int kLostRank = 75;
// Exit code of a rank that ended with NeedsRestart, so that the launcher resumes the run.
constexpr int kNeedsRestart = 76;

// Returns the value of an environment variable; empty if the variable is not set.
std::string environment_variable(const char* name);

// Returns the first host of a SLURM node list: "gpu[003-007,12]-ib,login" -> "gpu003-ib".
std::string first_slurm_host(const std::string& list);

// Returns entry `index` of a SLURM list with repetitions: "2(x3),1", 3 -> "1". Returns the last entry if the
// list is shorter.
std::string slurm_entry(const std::string& list, int index);

// Splits HOST:PORT, or [ADDRESS]:PORT for an IPv6 address, into host (without brackets) and port. Throws
// UsageError that begins with `what` if the text is not such an address.
std::pair<std::string, int> parse_address(const std::string& what, const std::string& text);

// Reads the environment variables of torchrun, SLURM or our launcher. Returns a world size of 1 if none are
// set. Throws UsageError, with the name of the variable, if the values are invalid or inconsistent.
RankInfo rank_info_from_environment();

}  // namespace yolox
