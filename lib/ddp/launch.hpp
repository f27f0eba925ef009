// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: their launcher, and what a rank knows of itself and the others.
//
// `--gpus N` and `--procs N` start one process per rank on this machine and supervise them. The launcher sets
// the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT. A rank under torchrun reads the same variables, a rank under `srun` those of SLURM.
// WORLD_SIZE=1 is ignored, because some clusters set it in every process.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/text.hpp"
#include "base/timeout.hpp"

namespace yolox {

// ---- launcher

// Settings of the launcher.
struct Launch {
  int ranks = 1;        // number of ranks
  std::string run;      // run folder
  bool is_new = false;  // the run begins, so that the ranks get the name of its folder as --out
};

// Opens a listening socket on a port of the loopback interface, and returns its file descriptor. port: 0 is
// replaced by a free one.
int listen_on_loopback(int& port);

// Starts the ranks, waits for them and returns the exit code of the run. Forwards the signals that end a run
// to the ranks. Rank 0 prints; of another rank that fails first, the last lines are printed. Resumes the run
// if a rank ended with kNeedsRestart.
int launch(const Launch& l, int argc, char** argv);

// Returns the first of runs/NAME, runs/NAME-2, ... that does not exist.
std::string unused_run_folder(const std::string& name);

// A rank of several that runs out of memory in a step saves in RUN/parts in how many micro-batches all ranks
// must compute a step, and ends. A run that is resumed uses at least as many.
int64_t parts_of_run(const std::string& run);  // 1 if nothing was saved
void save_parts(const std::string& run, int64_t parts);

// ---- ranks

// Rank, world size and rendezvous address.
struct RankInfo {
  int rank = 0, world = 1;              // world: world size
  int local_rank = 0, local_world = 1;  // on this machine
  std::string host;                     // rendezvous address: the machine of rank 0
  int port = 0;                         // rendezvous port
  bool agent_hosts_store = false;       // true: the agent of torchrun hosts the store; false: rank 0
  int listening = -1;     // file descriptor of the socket that the launcher opened for rank 0; -1: none
  bool launched = false;  // started by our launcher
  std::string variable;   // the variable that says how many ranks there are; empty: none

  // Returns true if torchrun or SLURM started the ranks.
  bool started_by_others() const { return world > 1 && !launched; }
};

// Exit code of a rank that ended with NeedsRestart.
constexpr int kNeedsRestart = 76;

// Returns the value of an environment variable; empty if the variable is not set.
std::string environment_variable(const char* name);

// Returns the first host of a SLURM node list: "gpu[003-007,12]-ib,login" -> "gpu003-ib".
std::string first_slurm_host(const std::string& list);

// Returns entry `index` of a SLURM list with repetitions: "2(x3),1", 3 -> "1". Returns the last entry if the
// list is shorter.
std::string slurm_entry(const std::string& list, int index);

// Reads the environment variables of torchrun, SLURM or our launcher. Returns a world size of 1 if none are
// set. Throws UsageError, with the name of the variable, if the values are invalid or inconsistent.
RankInfo rank_info_from_environment();

// Returns the address of this machine that other machines can connect to. The host name of a machine often
// resolves to a loopback address (127.0.1.1), which other machines cannot reach. In this case, returns the
// IPv4 address of the default route, or else of the first other network interface. same_machine: all ranks
// run on this machine.
std::string own_address(const RankInfo& info, bool same_machine);

// Error of a rank that ends because another rank ended.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A rank of several ran out of memory in a step. All ranks must resume from the last checkpoint, with the
// micro-batches of parts_of_run().
struct NeedsRestart : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns true for errors that are caused by this rank although a collective threw them: CUDA errors and out
// of memory.
bool is_local_error(const std::exception& e);

// Returns true for LostRank and for errors of torch about a broken connection to another rank.
bool is_lost_rank_error(const std::exception& e);

// Returns the cause in an error of torch about a collective, in one line: the first line without the place in
// the source, and NCCL's "Last error".
std::string nccl_cause(const std::string& what);
// Returns what helps against a failed start of NCCL, as the end of a message.
std::string nccl_remedy(const std::string& what);

// Host, process and GPU of a rank.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;   // UUID; empty for the CPU
  std::string pci;   // PCI address of the GPU; empty for the CPU
  std::string boot;  // changes with each start of a machine, and so differs between machines of one name
  std::string machine() const { return host + " " + boot; }
  std::string text() const {
    return concat(host, ", process ", process, gpu.empty() ? "" : ", " + gpu.substr(0, 12));
  }
};

// Throws std::runtime_error if NCCL cannot connect the GPUs, because two ranks have the same GPU or two MIG
// slices of one GPU. peers: of all ranks, by rank.
void check_gpus(const std::vector<Peer>& peers);

}  // namespace yolox
