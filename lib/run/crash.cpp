// SPDX-License-Identifier: Apache-2.0
#include "run/crash.hpp"

#include <cxxabi.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>

#include "base/program.hpp"
#include "ddp/rank_info.hpp"

namespace yolox {

namespace {

// Prepared in advance, because a signal handler must not allocate. Never destroyed, because exit() can crash.
struct {
  std::atomic<bool> on, busy;  // busy: a thread writes a report
  std::atomic<int> step;       // index of the text in `steps` that is complete
  char steps[2][16384 + 1];
  const char *path, *settings;
  double start;
  alignas(16) char stack[1 << 16];  // of the signal handler, also after a stack overflow
} crash;

// The functions from here to on_fatal_signal() run in a signal handler, also after a crash inside malloc().
// They do not allocate. dprintf() does, in glibc before 2.37.

// Returns false if the text cannot be written, for example on a full disk.
bool put(int fd, const char* text, size_t size) {
  while (size > 0) {
    const ssize_t n = write(fd, text, size);
    if (n <= 0) return false;
    text += n;
    size -= size_t(n);
  }
  return true;
}
bool put(int fd, std::initializer_list<const char*> texts) {
  bool good = true;
  for (const char* text : texts) good = good && put(fd, text, std::strlen(text));
  return good;
}

// Copies the lines of a small file that begin with one of the words.
void put_lines(int fd, const char* path, std::initializer_list<const char*> words) {
  char text[4097];
  const int from = open(path, O_RDONLY | O_CLOEXEC);
  text[std::max<ssize_t>(0, read(from, text, sizeof text - 1))] = 0;
  close(from);
  for (const char *line = text, *end; (end = std::strchr(line, '\n')); line = end + 1)
    for (const char* word : words)
      if (std::strncmp(line, word, std::strlen(word)) == 0) put(fd, line, size_t(end + 1 - line));
}

// Returns false if the file cannot be written, for example on a full disk.
bool put_context(int fd, const char* cause, const char* more) {
  char when[80];
  std::snprintf(when, sizeof when, "\nafter %d s, in thread %d of process %d\n", int(now() - crash.start),
                int(gettid()), int(getpid()));
  put(fd, {"==== ended by ", cause, when, crash.steps[crash.step], "\n\n"});
  put_lines(fd, "/proc/self/status", {"VmHWM:", "VmRSS:", "Threads:"});
  put_lines(fd, "/proc/meminfo", {"MemTotal:", "MemAvailable:"});
  return put(fd, {more, "\n\n", crash.settings});
}

void report(const char* cause, const char* more, bool with_stack) {
  int fd = open(crash.path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const bool in_file = fd >= 0 && put_context(fd, cause, more);
  put(2, {in_file ? "\ncrash report: " : "\ncannot write ", crash.path, "\n"});
  if (!in_file) {
    fd = 2;
    put_context(fd, cause, more);
  }
  if (with_stack) {
    put(fd, {"\nstack: file(function+offset); addr2line -Cfie FILE OFFSET prints the source line\n"});
    void* frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), fd);  // last, because a damaged stack may crash again
  }
  put(fd, {"\n"});
  if (fd != 2) close(fd);
}

// Returns true if this thread must write the report. Otherwise another thread writes one and then ends the
// process, or this thread crashed while it wrote one. Waits, because the end of this thread ends the process.
bool claim_report() {
  if (!crash.busy.exchange(true)) return true;
  sleep(5);
  return false;
}

// All signals are blocked until this handler returns.
void on_fatal_signal(int number, siginfo_t* info, void*) {
  char cause[64];
  const char* name = sigabbrev_np(number);
  if (info->si_code > 0)
    std::snprintf(cause, sizeof cause, "SIG%s at address %p", name, info->si_addr);
  else
    std::snprintf(cause, sizeof cause, "SIG%s from process %d", name, int(info->si_pid));
  if (claim_report()) report(cause, "", /*with_stack=*/true);
  std::signal(number, SIG_DFL);
  raise(number);
}

void report_exception(const std::string& more, bool with_stack) {
  if (!crash.on || !claim_report()) return;
  std::string cause = "std::terminate() without an exception";
  if (const auto* type = abi::__cxa_current_exception_type()) {
    char* plain = abi::__cxa_demangle(type->name(), nullptr, nullptr, nullptr);
    cause = plain ? plain : type->name();
    std::free(plain);
    try {
      throw;
    } catch (const std::exception& e) {
      cause += concat(": ", e.what());
    } catch (...) {}  // has no message
  }
  report(cause.c_str(), more.c_str(), with_stack);
  crash.busy = false;
}

// After a failed kernel every call of CUDA throws, also in destructors, which ends the process. It then ends
// with one line on stderr and the exit code 1, as after any other error.
[[noreturn]] void on_terminate() {
  report_exception("", /*with_stack=*/true);
  try {
    if (std::current_exception()) throw;
  } catch (const std::exception& e) {
    if (is_local_error(e)) {
      print_error(e.what());
      _exit(1);
    }
  } catch (...) {}                // not an error of the GPU
  std::signal(SIGABRT, SIG_DFL);  // the report is written already
  __gnu_cxx::__verbose_terminate_handler();
  std::abort();
}

}  // namespace

void write_crash(const std::string& more) { report_exception(more, /*with_stack=*/false); }

void crash_step(const std::string& text) {
  if (crash.busy) return;  // the report must not change while it is written
  char* next = crash.steps[1 - crash.step];
  next[text.copy(next, sizeof crash.steps[0] - 1)] = 0;
  crash.step = 1 - crash.step;
}

void crash_context(const std::string& folder, const std::string& text, const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  utsname host{};
  uname(&host);
  char started[64];
  const std::time_t moment = std::time(nullptr);
  std::strftime(started, sizeof started, "%Y-%m-%d %H:%M:%S %z", std::localtime(&moment));
  const std::string settings =
      concat(text, "\n\nstarted    ", started, "\ncommand    ", command, "\nfolder     ",
             fs::current_path(ignored).string(), "\nhost       ", host.nodename, ", ", host.sysname, " ",
             host.release, " ", host.machine, "\nsource     ", YOLOX_SOURCE_DIR, " at git revision ",
             git_revision(), "\ncompiler   C++ ", __VERSION__, "\n");
  crash.settings = strdup(settings.c_str());
  crash.path = strdup((fs::absolute(folder, ignored) / name).c_str());
  crash.start = now();
  crash_step("before the first step");
  if (crash.on.exchange(true)) return;
  void* frame;
  backtrace(&frame, 1);  // loads libgcc now, because a signal handler must not load a library

  stack_t stack{};
  stack.ss_sp = crash.stack;
  stack.ss_size = sizeof crash.stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = on_fatal_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigfillset(&action.sa_mask);  // a fatal signal inside the handler ends the process at once
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigaction(number, &action, nullptr);
  std::set_terminate(on_terminate);
}

}  // namespace yolox
