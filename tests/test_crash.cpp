// SPDX-License-Identifier: Apache-2.0
// Crash reports. Each case crashes a child process and checks its crash.txt, stderr and exit code.
#include "tensors.hpp"

#include <fcntl.h>

#include <functional>
#include <thread>

#include "run/run.hpp"

using namespace yolox;

namespace {

struct End {
  int code;                  // exit code, or 128 + N for signal N as in a shell
  std::string report, said;  // crash.txt, stderr
};

// Runs f() in a child process whose crash context is step 120 of a run in `folder`. Resets the signal
// handlers that doctest installed.
End end_of(const std::function<void()>& f, const std::string& folder = "run") {
  const TempDir dir;
  std::filesystem::create_directory(dir / "run");
  const pid_t pid = fork();
  if (pid == 0) {
    for (int number = 1; number < 32; ++number) std::signal(number, SIG_DFL);
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    dup2(open((dir / "said").c_str(), O_WRONLY | O_CREAT, 0644), 2);
    crash_context(dir / folder, "lr 0.1\nbs 2");
    crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");
    std::thread(f).join();  // an exception that leaves a thread calls std::terminate()
    _exit(7);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), contents(dir / "run/crash.txt"),
          contents(dir / "said")};
}

void check_report(const std::string& report, const std::string& cause) {
  CHECK(report.starts_with("==== ended by " + cause + "\nstep 120 (epoch 3), images: a.jpg, b.jpg\n\n"));
  CHECK_HAS(report, "\n\nlr 0.1\nbs 2\n\ncommand  " + std::string(contents("/proc/self/cmdline").c_str()));
  CHECK_HAS(report, "\nfolder   " + std::filesystem::current_path().string() + "\n");
}

}  // namespace

// Not static, because a stack has only the names of functions that the program exports.
namespace crash_test {
[[gnu::noinline]] void store_to(volatile int* place) { *place = 1; }
[[gnu::noinline]] void open_image(int i) {
  check(i < 0, "cannot decode ", i);
  asm volatile("");
}
}  // namespace crash_test
using namespace crash_test;

TEST_CASE("crash: a fatal signal leaves a report with its stack, and ends the process") {
  const End end = end_of([] {
    static volatile uintptr_t address = 0xbad0;  // volatile, so that the compiler does not know the value
    store_to(reinterpret_cast<volatile int*>(address));
  });
  CHECK(end.code == 128 + SIGSEGV);
  check_report(end.report, "SIGSEGV");
  CHECK_HAS(end.report.substr(end.report.find("\nstack: ")), "store_to");
  CHECK_HAS(end.said, "\ncrash report: ");
#ifndef YOLOX_SANITIZED  // the address sanitizer ends the process at the overwritten heap
  // The report allocates no memory: the crash may be within malloc(), whose lock the thread then holds.
  const End heap = end_of([] {
    volatile size_t size = 4000;  // also overwrites the size of what is left of the heap of this thread
    std::memset(new char[100], 0xff, size);
    ::operator delete(::operator new(100000));
  });
  CHECK(heap.code == 128 + SIGABRT);
  check_report(heap.report, "SIGABRT");
#endif
  for (const int number : {SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTERM}) {
    const End other = end_of([&] { raise(number); });
    CHECK(other.code == 128 + number);
    if (number == SIGTERM)  // no crash
      CHECK(other.report.empty());
    else
      check_report(other.report, concat("SIG", sigabbrev_np(number)));
  }
}

TEST_CASE("crash: an uncaught exception leaves a report; one of the GPU ends the process with exit code 1") {
  const End end = end_of([] { open_image(12); });
  CHECK(end.code == 128 + SIGABRT);
  check_report(end.report, "cannot decode 12");
  CHECK_HAS(end.report.substr(end.report.find("\nstack: ")), "open_image");
  CHECK_HAS(end.said, "error: cannot decode 12\n");
  CHECK(count_of(end.report, "==== ended by ") == 1);
  const End gpu = end_of([] {
    throw std::runtime_error("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA");
  });
  CHECK(gpu.code == 1);
  CHECK(gpu.report.starts_with("==== ended by CUDA error: unspecified launch failure\n"));
  CHECK(gpu.said.ends_with("error: CUDA error: unspecified launch failure\n"));
}

TEST_CASE("crash: a caught exception leaves a report without stack; a later crash appends one of its step") {
  const auto crashes_twice = [] {
    try {
      open_image(12);
    } catch (...) {
      write_crash();
    }
    crash_step("the end");
    raise(SIGSEGV);
  };
  const End end = end_of(crashes_twice);
  const size_t second = end.report.find("==== ended by SIGSEGV\nthe end");
  REQUIRE(second != std::string::npos);
  const std::string first = end.report.substr(0, second);
  check_report(first, "cannot decode 12");
  CHECK_HAS(first, "\nlr 0.1\n");
  CHECK_FALSE(has(first, "\nstack: "));
  // If crash.txt cannot be written, the reports are on stderr.
  const End gone = end_of(crashes_twice, "gone");
  CHECK(gone.code == 128 + SIGSEGV);
  for (const char* part : {"gone/crash.txt\n==== ended by cannot decode 12\n", "\n==== ended by SIGSEGV\n"})
    CHECK_HAS(gone.said, part);
}
