// SPDX-License-Identifier: Apache-2.0
// Exchange of small vectors between the ranks of one machine through shared memory. A gloo collective uses
// threads and sockets and takes about a millisecond, however small the vector is. SyncBN needs two
// all-reduces per batch norm and iteration. An exchange through shared memory takes microseconds.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
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

#include "base/text.hpp"

namespace yolox {

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
