// Small vectors between the ranks of one machine, through memory that they share. A collective of gloo, with
// its threads and sockets, takes a millisecond however small it is, and SyncBN needs two of them for each
// batch norm in each step; this takes microseconds.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace yolox {

// A process that is there and has not ended, though its parent may not have noticed yet.
bool process_runs(pid_t pid);

class LocalSums {
 public:
  static constexpr size_t kMost = 8192;  // numbers in a vector

  LocalSums(int rank, int ranks) : rank(rank), pids(ranks) {}
  ~LocalSums();
  LocalSums(const LocalSums&) = delete;

  // Rank 0 makes the memory and says where it is; the others open it there. It has no name and goes with the
  // processes. False where that cannot be done, as between containers: nothing else may be called then.
  std::string make();
  bool open(const std::string& place);
  // Whether all ranks run is asked of these processes.
  void know(int other, pid_t pid) { pids[other] = pid; }

  // Calls take(values of a rank) for each rank in order, all with `count` <= kMost values. Every rank calls
  // it as often. Gives the rank that has ended, -1 if none has. Throws where a rank came with another number
  // of values: then ranks do not do the same.
  template <class Take>
  int exchange(const double* mine, size_t count, const Take& take) {
    ++turn;
    std::memcpy(slot(rank).values[turn % 2], mine, count * sizeof(double));
    slot(rank).counts[turn % 2] = count;
    slot(rank).turn.store(turn, std::memory_order_release);
    wake(slot(rank));
    // A rank that is ahead by one writes into the other half; it cannot be ahead by two.
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
    std::atomic<uint32_t> turn;      // exchanges that this rank has written its values for
    std::atomic<uint32_t> sleepers;  // ranks that sleep until it has
    size_t counts[2];                // of values, by turn: even, odd
    alignas(64) double values[2][kMost];
  };

  // Of the memory on this machine, and of what process numbers mean, which differs between containers.
  std::string identity() const;
  size_t bytes() const { return pids.size() * sizeof(Slot); }
  Slot& slot(int r) { return static_cast<Slot*>(memory)[r]; }
  bool map();

  static long futex(std::atomic<uint32_t>& word, int what, uint32_t value, const timespec* most) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), what, value, most, nullptr, 0);
  }
  static void wake(Slot& s);
  // Until the rank has written its values; false: its process has ended. Looks for some microseconds, then
  // sleeps: others may need the core.
  bool wait(int r);

  const int rank;
  std::vector<pid_t> pids;
  void* memory = nullptr;
  int fd = -1;
  uint32_t turn = 0;
};

}  // namespace yolox
