// SPDX-License-Identifier: Apache-2.0
// The ranks of a run: their launcher, and what a rank knows of itself and the others.
//
// `--gpus N` and `--procs N` start one process per rank on this machine and supervise them. The launcher sets
// the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
// MASTER_PORT. A rank under torchrun reads the same variables, a rank under `srun` those of SLURM.
// WORLD_SIZE=1 is ignored, because some clusters set it in every process.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
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
  int sharing = 1;        // ranks that share the CPU cores which this rank may use

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
// IPv4 address of the default route. same_machine: all ranks run on this machine.
std::string own_address(const RankInfo& info, bool same_machine);

// Error of a rank that ends because another rank ended.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// NCCL cannot connect the GPUs.
struct NcclError : std::runtime_error {
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

// Returns true for LostRank and for errors of torch about a connection to another rank that breaks later.
bool is_lost_rank_error(const std::exception& e);

// Runs program() like run_program() and returns the exit code of the process. program() returns the exit
// code. The exit code is kLostRank if this rank ended because it lost another rank, so that the launcher can
// find the rank that failed first, kNeedsRestart for NeedsRestart, kNcclFailed for NcclError. failed():
// called before any other error is printed, but not for UsageError.
int run_rank(
    const std::function<int()>& program, const std::function<void()>& failed = [] {});

// Sets the environment of NCCL, before other threads read it. graph: collectives are recorded in graphs.
void set_up_nccl(bool graph);
// Returns the cause in an error of torch about a collective, in one line: the first line without the place in
// the source, and NCCL's "Last error".
std::string nccl_cause(const std::string& what);
// Returns what helps against a failed start of NCCL, as the end of a message.
std::string nccl_remedy(const std::string& what);

// Host, process and GPU of a rank.
struct Peer {
  std::string host;
  pid_t process = 0;
  std::string gpu;   // PCI address; empty for the CPU
  std::string boot;  // changes with each start of a machine, and so differs between machines of one name
  std::string machine() const { return host + " " + boot; }
  std::string text() const { return concat(host, ", process ", process, gpu.empty() ? "" : ", GPU " + gpu); }
};

// Throws std::runtime_error if two ranks have the same GPU, which NCCL cannot connect, or two MIG slices of
// one. peers: of all ranks, by rank.
void check_gpus(const std::vector<Peer>& peers);

// ---- shared memory: exchange of small vectors between the ranks of one machine. A gloo collective uses
// threads and sockets and takes about a millisecond, however small the vector is. SyncBN needs two
// all-reduces per batch norm and iteration. An exchange through shared memory takes microseconds.

// Returns the state of a process, the third word of /proc/PID/stat: 'T' stopped, 'Z' and 'X' ended. 'X' if
// there is no such process.
inline char process_state(pid_t pid) {
  std::string text;  // "123 (name) T ...", and the name may contain ")"
  std::getline(std::ifstream(concat("/proc/", pid, "/stat")), text);
  const size_t name = text.rfind(") ");
  return name != std::string::npos && name + 2 < text.size() ? text[name + 2] : 'X';
}

// Shared-memory all-gather for the ranks of one machine.
class SharedMemoryGather {
 public:
  static constexpr size_t kMaxValues = 8192;  // maximum number of values per exchange

  SharedMemoryGather(int rank, int ranks) : rank(rank), pids(ranks) {}
  ~SharedMemoryGather() {
    if (memory) munmap(memory, bytes());
    if (fd >= 0) close(fd);
  }
  SharedMemoryGather(const SharedMemoryGather&) = delete;

  // Creates the shared memory on rank 0. Returns its address for open(), or an empty string on failure. The
  // memory is anonymous (memfd), so that the kernel frees it when the processes end.
  std::string create() {
    fd = memfd_create("yolox-ranks", MFD_CLOEXEC);
    const bool made = fd >= 0 && ftruncate(fd, off_t(bytes())) == 0 && map();
    return made ? concat("/proc/", getpid(), "/fd/", fd, " ", identity()) : "";
  }
  // Maps the memory that create() of rank 0 created. Returns false if that is impossible, as between
  // containers. In this case, call no other function.
  bool open(const std::string& place) {
    if (rank == 0) return memory;
    const size_t space = place.find(' ');
    if (space == std::string::npos) return false;
    fd = ::open(place.substr(0, space).c_str(), O_RDWR | O_CLOEXEC);
    return fd >= 0 && identity() == place.substr(space + 1) && map();
  }
  // Sets the process id of another rank. exchange() uses it to detect that the process ended.
  void set_process(int other, pid_t pid) { pids[other] = pid; }

  // Calls take(values of a rank) for each rank in order. All ranks must call it with the same `count` <=
  // kMaxValues. Returns the rank whose process ended, or -1 if all ranks run. Throws std::runtime_error if
  // the counts differ, because the ranks then execute different collectives.
  template <class Take>
  int exchange(const double* mine, size_t count, const Take& take) {
    ++turn;
    std::memcpy(slot(rank).values[turn % 2], mine, count * sizeof(double));
    slot(rank).counts[turn % 2] = count;
    slot(rank).turn.store(turn, std::memory_order_release);
    wake(slot(rank));
    // Double buffering: a rank that is one exchange ahead writes into the other half. No rank can be two
    // ahead.
    for (size_t r = 0; r < pids.size(); ++r)
      if (!wait(int(r))) return int(r);
    for (size_t r = 0; r < pids.size(); ++r)
      check(slot(int(r)).counts[turn % 2] == count, "rank ", rank, " sums ", count, " numbers where rank ", r,
            " sums ", slot(int(r)).counts[turn % 2], ": the ranks do not run the same program");
    for (size_t r = 0; r < pids.size(); ++r) take(const_cast<const double*>(slot(int(r)).values[turn % 2]));
    return -1;
  }

 private:
  struct alignas(64) Slot {
    std::atomic<uint32_t> turn;      // number of the latest exchange whose values this rank has written
    std::atomic<uint32_t> sleepers;  // number of ranks that sleep on `turn`
    size_t counts[2];                // number of values of even and odd exchanges
    alignas(64) double values[2][kMaxValues];
  };

  size_t bytes() const { return pids.size() * sizeof(Slot); }
  Slot& slot(int r) { return static_cast<Slot*>(memory)[r]; }
  bool map() {
    memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) memory = nullptr;
    return memory;
  }
  // Returns device and inode of the memory, and the inode of the PID namespace. The PID namespace must be
  // equal, because process ids of another container have no meaning here.
  std::string identity() const {
    struct stat own = {}, processes = {};
    const bool known = fstat(fd, &own) == 0 && stat("/proc/self/ns/pid", &processes) == 0;
    return known ? concat(own.st_dev, ":", own.st_ino, ":", processes.st_ino) : "";
  }

  static long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, timeout, nullptr, 0);
  }
  static void wake(Slot& s) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (s.sleepers.load() > 0) futex(s.turn, FUTEX_WAKE, INT32_MAX, nullptr);
  }
  // Waits until rank r has written its values. Returns false if its process ended. Spins for some
  // microseconds, then sleeps on a futex, because other processes may need the core.
  bool wait(int r) {
    Slot& s = slot(r);
    const auto there = [&] { return int32_t(s.turn.load(std::memory_order_acquire) - turn) >= 0; };
    for (int i = 0; i < 2000; ++i) {
      if (there()) return true;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
    const timespec timeout{0, 50000000};
    for (char state = 'R'; !there(); state = process_state(pids[r])) {
      if (state == 'Z' || state == 'X') return false;
      ++s.sleepers;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      const uint32_t seen = s.turn.load();
      if (int32_t(seen - turn) < 0) futex(s.turn, FUTEX_WAIT, seen, &timeout);
      --s.sleepers;
    }
    return true;
  }

  const int rank;
  std::vector<pid_t> pids;
  void* memory = nullptr;
  int fd = -1;
  uint32_t turn = 0;
};

}  // namespace yolox
