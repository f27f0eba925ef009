// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: their launcher, and what a rank knows of itself and the others.
//
// `--gpus N` and `--procs N` start one process per rank on this machine and supervise them. The launcher sets
// the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT. A rank under torchrun reads the same variables, a rank under `srun` those of SLURM.
// WORLD_SIZE=1 is ignored, because some clusters set it in every process.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "base/timeout.hpp"
#include "base/torch.hpp"

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
  int sharing = 1;        // ranks that share the CPU cores which this rank may use

  // Returns true if torchrun or SLURM started the ranks.
  bool started_by_others() const { return world > 1 && !launched; }
};

// Exit code of a rank of several that ran out of memory in a step. All ranks must resume from the last
// checkpoint, with the micro-batches of parts_of_run().
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
// IPv4 address of the default route. same_machine: all ranks run on this machine.
std::string own_address(const RankInfo& info, bool same_machine);

// An error after which a rank ends with an exit code of its own: kLostRank, kNcclFailed or kNeedsRestart.
struct RankError : std::runtime_error {
  RankError(int code, const std::string& what) : runtime_error(what), code(code) {}
  int code;
};

// Returns true for errors that are caused by this rank although a collective threw them: CUDA errors and out
// of memory.
bool is_local_error(const std::exception& e);

// Returns the code of a RankError, kLostRank for an error of torch about a connection to another rank or the
// store that broke, and 0 for every other error.
int rank_exit_code(const std::exception& e);

// Runs program() like run_program() and returns the exit code of the process, which is that of program() or
// rank_exit_code(): kLostRank tells the launcher that another rank failed first. failed(): called before any
// other error is printed, but not for UsageError.
int run_rank(
    const std::function<int()>& program, const std::function<void()>& failed = [] {});

// Sets the environment of NCCL, before other threads read it. graph: collectives are recorded in graphs.
void set_up_nccl(bool graph);
// Returns the cause in an error of torch about a collective, in one line: the first line without the place in
// the source, and NCCL's "Last error".
std::string nccl_cause(const std::string& what);
// What helps against a failed start of NCCL: the end of a message.
constexpr char kNcclRemedy[] =
    "; a container needs more shared memory: docker run --shm-size 1g, or --ipc host; if the GPUs cannot "
    "reach each other directly (ACS, IOMMU), set NCCL_P2P_DISABLE=1; NCCL_SOCKET_IFNAME names the network "
    "interface; NCCL_DEBUG=INFO says more, see docs/troubleshooting.md";

// Host, process and GPU of a rank.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;      // PCI address; empty for the CPU
  std::string machine;  // differs between machines and containers, also of one name
  std::string text() const { return concat(host, ", process ", process, gpu.empty() ? "" : ", GPU " + gpu); }
};

// Throws std::runtime_error if two ranks have the same GPU, which NCCL cannot connect, or two MIG slices of
// one. peers: of all ranks, by rank.
void check_gpus(const std::vector<Peer>& peers);

// ---- shared memory: sums of small vectors over the ranks of one machine. A gloo collective uses threads and
// sockets and takes about a millisecond, however small the vector is. SyncBN needs two all-reduces per batch
// norm and iteration. Through shared memory they take microseconds.

// Returns true if a process has ended, also if its parent has not waited for it yet.
inline bool has_ended(pid_t pid) {
  std::string text;  // "123 (name) S ...", and the name may contain ")". Z, X: ended
  std::getline(std::ifstream(concat("/proc/", pid, "/stat")), text);
  const size_t name = text.rfind(") ");
  return name == std::string::npos || text.find_first_of("ZX", name) == name + 2;
}

// Shared-memory all-reduce for the ranks of one machine.
class SharedMemory {
 public:
  static constexpr size_t kMaxValues = 8192;  // maximum number of values

  // Maps the memory at `path`, an empty memory file that all ranks open. pids: process ids, by rank. Throws
  // c10::Error if the memory cannot be mapped.
  SharedMemory(const std::string& path, int rank, const std::vector<pid_t>& pids)
      : rank(rank),
        pids(pids),
        memory(torch::from_file(path, /*shared=*/true, int64_t(pids.size() * sizeof(Slot)), torch::kByte)) {}

  // Replaces the values by the results of operation(a, b) over all ranks, in their order. All ranks must call
  // it with the same `count` <= kMaxValues. Returns the rank whose process ended, or -1 if all ranks run.
  // Throws std::runtime_error if the counts differ, because the ranks then execute different collectives.
  template <class Operation>
  int all_reduce(double* values, size_t count, const Operation& operation) {
    // Double buffering: a rank that is one turn ahead writes into the other half. No rank can be two ahead.
    const size_t half = ++turn % 2;
    std::copy_n(values, count, slot(rank).values[half]);
    slot(rank).counts[half] = count;
    slot(rank).turn.store(turn, std::memory_order_release);
    futex(slot(rank).turn, FUTEX_WAKE, INT32_MAX, nullptr);
    for (size_t r = 0; r < pids.size(); ++r)
      if (!wait(int(r))) return int(r);
    for (size_t r = 0; r < pids.size(); ++r)
      check(slot(r).counts[half] == count, "rank ", rank, " sums ", count, " numbers where rank ", r,
            " sums ", slot(r).counts[half], ": the ranks do not run the same program");
    std::copy_n(slot(0).values[half], count, values);
    for (size_t r = 1; r < pids.size(); ++r)
      std::transform(values, values + count, slot(r).values[half], values, operation);
    return -1;
  }

 private:
  struct alignas(64) Slot {
    std::atomic<uint32_t> turn;  // number of the latest exchange whose values this rank has written
    size_t counts[2];            // number of values of even and odd exchanges
    alignas(64) double values[2][kMaxValues];
  };

  Slot& slot(size_t r) { return static_cast<Slot*>(memory.data_ptr())[r]; }
  static long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, timeout, nullptr, 0);
  }
  // Waits until rank r has written its values. Returns false if its process ended. Spins for some
  // microseconds, then sleeps on a futex, because other processes may need the core.
  bool wait(int r) {
    std::atomic<uint32_t>& written = slot(r).turn;
    const timespec timeout{0, 50000000};
    uint32_t seen;
    for (int i = 0; int32_t((seen = written.load(std::memory_order_acquire)) - turn) < 0; ++i) {
      if (i < 2000) {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
      } else {
        futex(written, FUTEX_WAIT, seen, &timeout);
        if (has_ended(pids[r]) && written == seen) return false;
      }
    }
    return true;
  }

  const int rank;
  const std::vector<pid_t> pids;
  const torch::Tensor memory;
  uint32_t turn = 0;
};

}  // namespace yolox
