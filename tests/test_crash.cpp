// SPDX-License-Identifier: Apache-2.0
// Crash reports. Each case crashes a child process and checks its crash.txt, stderr and exit code.
#include "base/program.hpp"
#include "base/text.hpp"
#include "run/crash.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common.hpp"

using namespace yolox;

namespace {

constexpr int kFinished = 7;  // exit code of a child in which f() returned

struct End {
  int code;  // exit code, or 128 + N for signal N as in a shell
  pid_t pid;
  std::string report, said;  // crash.txt, stderr
  double seconds;

  size_t reports() const { return count_of(report, "==== ended by "); }
  std::string step() const {
    const size_t from = report.find('\n', report.find(" of process ")) + 1;
    return report.substr(from, report.find("\n\n", from) - from);
  }
  std::string stack() const { return report.substr(std::min(report.size(), report.find("\nstack: "))); }
};

// Runs f() in a child process whose crash context is step 120 of a run in `dir`. Resets the signal handlers
// that doctest installed.
End end_of(
    const TempDir& dir, const std::function<void()>& f, const std::function<void()>& before = [] {}) {
  const double start = now();
  const pid_t pid = fork();
  if (pid == 0) {
    [&]() noexcept {
      for (int number = 1; number < 32; ++number) std::signal(number, SIG_DFL);
      std::set_terminate([] { _exit(99); });
      const rlimit none{0, 0}, stack{8 << 20, RLIM_INFINITY};
      setrlimit(RLIMIT_CORE, &none);
      setrlimit(RLIMIT_STACK, &stack);
      dup2(open((dir / "said").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 2);
      before();
      crash_context(dir.path.string(), "lr 0.1\nbs 2");
      crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");
      f();
      _exit(kFinished);
    }();
  }
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (now() - start > 20) kill(pid, SIGKILL);
    poll(nullptr, 0, 1);
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), pid, contents(dir / "crash.txt"),
          contents(dir / "said"), now() - start};
}
End end_of(const std::function<void()>& f) { return end_of(TempDir(), f); }

void check_whole(const std::string& report, pid_t pid) {
  char host[256] = "";
  gethostname(host, sizeof host);
  utsname system{};
  uname(&system);
  const size_t after = report.find("\nafter ");
  REQUIRE(after != std::string::npos);
  CHECK(std::atoi(report.c_str() + after + 7) < 20);
  for (const std::string& part :
       {concat(" of process ", pid, "\nstep 120 (epoch 3), images: a.jpg, b.jpg\n"),
        std::string("\nlr 0.1\nbs 2\n"), std::string("\nVmHWM:"), std::string("\nVmRSS:"),
        std::string("\nMemAvailable:"), std::string("\nstarted    20"),
        concat("\ncommand    ", contents("/proc/self/cmdline").c_str()),
        concat("\nfolder     ", std::filesystem::current_path().string(), "\n"),
        concat("\nhost       ", host, ", "), std::string(system.release),
        concat("\nsource     ", YOLOX_SOURCE_DIR, " at git revision "),
        concat("\ncompiler   C++ ", __VERSION__, "\n")})
    CHECK_MESSAGE(has(report, part), part << "\nis not in\n" << report);
}

volatile int* nowhere() {
  static volatile uintptr_t address = 0xbad0;  // volatile, so that the compiler does not know the value
  return reinterpret_cast<volatile int*>(address);
}

struct Plain {
  int value;
};

}  // namespace

// Not static, because a stack has only the names of functions that the program exports.
namespace crash_test {
[[gnu::noinline]] void store_to(volatile int* place) { *place = 1; }
[[gnu::noinline]] void give_up() { std::abort(); }
[[gnu::noinline]] int recurse(volatile int* above, int depth) {
  volatile int here[256];
  here[depth % 256] = *above;
  return depth < 0 ? 0 : recurse(here, depth + 1) + here[0];
}
[[gnu::noinline]] void decode(int i) {
  if (i >= 0) fail("cannot decode ", i);
}
// Its call of decode() is not in the cold part of a function, whose name is not in the table of symbols.
[[gnu::noinline]] void open_image(int i) {
  decode(i);
  asm volatile("");
}
}  // namespace crash_test
using namespace crash_test;

TEST_CASE(
    "crash: the report of a segmentation fault has its address and function, and the signal ends the "
    "process") {
  TempDir dir;
  const End end = end_of(dir, [] { store_to(nowhere()); });
  CHECK(end.code == 128 + SIGSEGV);
  CHECK(end.report.rfind("==== ended by SIGSEGV at address 0xbad0\nafter ", 0) == 0);
  CHECK(end.reports() == 1);
  check_whole(end.report, end.pid);
  CHECK(has(end.said, concat("\ncrash report: ", dir / "crash.txt", "\n")));

  // The frame has the file, the function and the offset of the faulting instruction in it.
  const std::string stack = end.stack();
  const size_t name = stack.find("store_to");
  REQUIRE(name != std::string::npos);
  const std::string line = stack.substr(stack.rfind('\n', name) + 1);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").filename();
  CHECK(has(line.substr(0, line.find("store_to")), program + "("));
  CHECK(std::stoull(line.substr(line.find("+0x") + 1), nullptr, 16) < 200);
  CHECK(has(stack, "(main+0x"));
}

TEST_CASE("crash: fatal signals sent by a process are reported with its pid") {
  for (const auto& [number, name] :
       {std::pair(SIGSEGV, "SIGSEGV"), std::pair(SIGBUS, "SIGBUS"), std::pair(SIGFPE, "SIGFPE"),
        std::pair(SIGILL, "SIGILL"), std::pair(SIGABRT, "SIGABRT")}) {
    const End end = end_of([number = number] { kill(getpid(), number); });
    CHECK(end.code == 128 + number);
    CHECK(has(end.report, concat("==== ended by ", name, " from process ", end.pid, "\n")));
    check_whole(end.report, end.pid);
  }
  const End end = end_of([] { raise(SIGTERM); });  // SIGTERM is no crash
  CHECK(end.code == 128 + SIGTERM);
  CHECK(end.report.empty());
}

TEST_CASE("crash: a stack overflow is reported") {
  const End end = end_of([] {
    volatile int zero = 0;
    recurse(&zero, 0);
  });
  CHECK(end.code == 128 + SIGSEGV);
  CHECK(end.reports() == 1);
  check_whole(end.report, end.pid);
  CHECK(has(end.stack(), "recurse"));
}

TEST_CASE("crash: an uncaught exception is reported with its message and the stack of its throw") {
  for (const bool in_thread : {false, true}) {
    const End end = end_of([&] {
      if (in_thread) std::thread(open_image, 12).join();
      open_image(12);
    });
    CHECK(end.code == 128 + SIGABRT);
    CHECK(end.report.rfind("==== ended by std::runtime_error: cannot decode 12\nafter ", 0) == 0);
    CHECK(end.reports() == 1);
    check_whole(end.report, end.pid);
    if (in_thread) CHECK(has(end.stack(), "open_image"));
    CHECK(has(end.said, "what():  cannot decode 12"));
  }
  const End end = end_of([] { std::terminate(); });
  CHECK(end.code == 128 + SIGABRT);
  CHECK(end.report.rfind("==== ended by std::terminate() without an exception\n", 0) == 0);
  CHECK(has(end.stack(), "(main+0x"));
}

TEST_CASE("crash: an error of the GPU in a destructor ends the process with one line and exit code 1") {
  const End gpu = end_of([] {
    const std::shared_ptr<int> memory(new int, [](const int* p) {
      delete p;
      throw std::runtime_error("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA");
    });
  });
  CHECK(gpu.code == 1);
  CHECK(gpu.report.rfind("==== ended by std::runtime_error: CUDA error: unspecified launch failure\n", 0) ==
        0);
  CHECK(has(gpu.said, "error: CUDA error: unspecified launch failure\n"));
  CHECK_FALSE(has(gpu.said, "DSA"));
  CHECK_FALSE(has(gpu.said, "terminate called"));
}

TEST_CASE("crash: an exception caught in main is reported with its type, its message and the given lines") {
  const End end = end_of([] {
    try {
      decode(12);
    } catch (...) {
      write_crash("GPU memory 3.1G of 16G");
      _exit(1);
    }
  });
  CHECK(end.code == 1);
  CHECK(end.report.rfind("==== ended by std::runtime_error: cannot decode 12\nafter ", 0) == 0);
  CHECK(end.reports() == 1);
  check_whole(end.report, end.pid);
  CHECK(has(end.report, " kB\nGPU memory 3.1G of 16G\n\nlr 0.1\n"));
  CHECK_FALSE(has(end.report, "\nstack: "));  // that of the catch block explains nothing
  CHECK(has(end.said, "\ncrash report: "));
  const End plain = end_of([] {
    try {
      throw Plain{3};
    } catch (...) {
      write_crash();
    }
  });
  CHECK(plain.code == kFinished);
  CHECK(plain.report.rfind("==== ended by (anonymous namespace)::Plain\nafter", 0) == 0);
}

TEST_CASE("crash: a signal during crash_step() finds the complete text of one step") {
  const std::string texts[] = {std::string(12000, 'a'), std::string(13000, 'b')};
  for (int run = 0; run < 30; ++run) {
    const End end = end_of([&] {
      std::atomic<int> told{0};
      std::thread storm([&] {
        for (;; ++told) crash_step(texts[told % 2]);
      });
      while (told < 50 + run) continue;
      if (run % 2) pthread_kill(storm.native_handle(), SIGSEGV);
      store_to(nowhere());
    });
    CHECK(end.code == 128 + SIGSEGV);
    const std::string text = end.step();
    CHECK((text == texts[0] || text == texts[1]));
  }
}

TEST_CASE("crash: the report has the text of the last crash_step(), truncated to 16384 bytes") {
  for (const auto& [last, reported] :
       {std::pair(std::string("2"), std::string("2")), {std::string(20000, 'x'), std::string(16384, 'x')}}) {
    const End end = end_of([&, last = last] {
      crash_step("one");
      crash_step(std::string(20000, 'y'));
      crash_step(last);
      store_to(nowhere());
    });
    CHECK(end.step() == reported);
  }
}

TEST_CASE("crash: if crash.txt cannot be written, the report is on stderr") {
  for (const bool full : {false, true}) {
    for (const bool caught : {false, true}) {
      TempDir dir;
      const std::string path = dir / "run/crash.txt";
      const End end = end_of(dir, [&] {
        std::filesystem::create_directories(dir / "run");
        crash_context(dir / "run", "lr 0.1\nbs 2");
        crash_step("step 120 (epoch 3), images: a.jpg, b.jpg");
        std::filesystem::remove_all(dir / "run");
        if (full) {
          std::filesystem::create_directories(dir / "run");
          std::filesystem::create_symlink("/dev/full", path);
        }
        if (!caught) store_to(nowhere());
        try {
          decode(12);
        } catch (...) {
          write_crash();
        }
      });
      CHECK(end.code == (caught ? kFinished : 128 + SIGSEGV));
      CHECK(end.seconds < 4);
      CHECK(has(end.said,
                concat("\n", "cannot write ", path, "\n==== ended by ",
                       caught ? "std::runtime_error: cannot decode 12\n" : "SIGSEGV at address 0xbad0\n")));
      check_whole(end.said, end.pid);
      CHECK(has(end.said, "store_to") == !caught);
    }
  }
}

TEST_CASE("crash: the report is written even if stderr is closed") {
  TempDir dir;
  const End end = end_of(dir, [] {
    int ends[2];
    if (pipe(ends) != 0) _exit(1);
    dup2(ends[1], 2);
    close(ends[0]);
    close(ends[1]);
    store_to(nowhere());
  });
  CHECK(end.code == 128 + SIGSEGV);
  check_whole(end.report, end.pid);
}

TEST_CASE("crash: if several threads crash at the same time, one writes the report and the process ends") {
  for (int run = 0; run < 20; ++run) {
    const End end = end_of([&] {
      std::atomic<int> ready{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t)
        threads.emplace_back([&, t] {
          ++ready;
          while (ready < 3) continue;
          if (t == 0 && run % 4 == 1) give_up();
          if (t == 0 && run % 4 == 2) decode(12);
          if (t == 0 && run % 4 == 3) kill(getpid(), SIGSEGV);
          store_to(nowhere());
        });
      for (auto& t : threads) t.join();
    });
    CHECK((end.code == 128 + SIGSEGV || (end.code == 128 + SIGABRT && (run % 4 == 1 || run % 4 == 2))));
    CHECK(end.reports() == 1);
    check_whole(end.report, end.pid);
    CHECK(end.seconds < 4);
  }
}

TEST_CASE("crash: a later crash appends its report, with the later step") {
  TempDir dir;
  write_text(dir / "crash.txt", "earlier\n");
  const End end = end_of(dir, [] {
    try {
      decode(12);
    } catch (...) {
      write_crash();
    }
    crash_step("the end");
    store_to(nowhere());
  });
  CHECK(end.code == 128 + SIGSEGV);
  CHECK(end.reports() == 2);
  CHECK(end.report.rfind("earlier\n==== ended by std::runtime_error: cannot decode 12\n", 0) == 0);
  const size_t second = end.report.find("\n\n==== ended by SIGSEGV at address 0xbad0\n");
  REQUIRE(second != std::string::npos);
  CHECK(has(end.report.substr(second), "\nthe end\n"));
}

TEST_CASE("crash: without crash_context() nothing is written") {
  try {
    decode(12);
  } catch (...) {
    write_crash();
  }
  CHECK_FALSE(std::filesystem::exists("crash.txt"));
}
