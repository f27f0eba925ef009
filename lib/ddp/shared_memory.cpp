// SPDX-License-Identifier: Apache-2.0
#include "ddp/shared_memory.hpp"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <fstream>

namespace yolox {

char process_state(pid_t pid) {
  std::string text;  // "123 (name) T ...", and the name may contain ")"
  std::getline(std::ifstream(concat("/proc/", pid, "/stat")), text);
  const size_t name = text.rfind(") ");
  return name != std::string::npos && name + 2 < text.size() ? text[name + 2] : 'X';
}

SharedMemoryGather::~SharedMemoryGather() {
  if (memory) munmap(memory, bytes());
  if (fd >= 0) close(fd);
}

std::string SharedMemoryGather::create() {
  fd = memfd_create("yolox-ranks", MFD_CLOEXEC);
  const bool made = fd >= 0 && ftruncate(fd, off_t(bytes())) == 0 && map();
  return made ? concat("/proc/", getpid(), "/fd/", fd, " ", identity()) : "";
}

bool SharedMemoryGather::open(const std::string& place) {
  if (rank == 0) return memory;
  const size_t space = place.find(' ');
  if (space == std::string::npos) return false;
  fd = ::open(place.substr(0, space).c_str(), O_RDWR | O_CLOEXEC);
  return fd >= 0 && identity() == place.substr(space + 1) && map();
}

std::string SharedMemoryGather::identity() const {
  struct stat s {
  }, processes{};
  const bool known = fstat(fd, &s) == 0 && stat("/proc/self/ns/pid", &processes) == 0;
  return known ? concat(s.st_dev, ":", s.st_ino, ":", processes.st_ino) : "";
}

bool SharedMemoryGather::map() {
  memory = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) memory = nullptr;
  return memory;
}

void SharedMemoryGather::wake(Slot& s) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (s.sleepers.load() > 0) futex(s.turn, FUTEX_WAKE, INT32_MAX, nullptr);
}

bool SharedMemoryGather::wait(int r) {
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

}  // namespace yolox
