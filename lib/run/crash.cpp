// SPDX-License-Identifier: Apache-2.0
#include "run/run.hpp"

#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "base/program.hpp"
#include "base/text.hpp"
#include "ddp/launch.hpp"

namespace yolox {

namespace {

// Complete texts, because a signal handler must not allocate. Never destroyed, because exit() can crash.
struct Context {
  std::string path, settings;  // path: of crash.txt; empty before crash_context()
  std::string step = "before the first step";
};
Context& context = *new Context;

// Unlike dprintf(), allocates no memory: a crash may be within malloc(), which then holds its lock.
void put(int fd, std::initializer_list<std::string_view> texts) {
  for (const std::string_view text : texts)
    if (write(fd, text.data(), text.size()) < 0) return;
}

// prefix: before the cause, "SIG" of a signal.
void report(const char* prefix, const char* cause, bool with_stack) {
  const int file = open(context.path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const int fd = file < 0 ? 2 : file;
  put(2, {"\n", file < 0 ? "cannot write " : "crash report: ", context.path, "\n"});
  put(fd, {"==== ended by ", prefix, cause, "\n", context.step, "\n\n", context.settings});
  if (with_stack) {
    put(fd, {"\nstack: file(function+offset); addr2line -Cfie FILE OFFSET prints the source line\n"});
    void* frames[64];
    backtrace_symbols_fd(frames, backtrace(frames, 64), fd);
  }
  put(fd, {"\n"});
  if (file >= 0) close(file);
}

void on_fatal_signal(int number) {
  std::signal(SIGALRM, SIG_DFL);
  alarm(10);  // ends the process if the report hangs
  report("SIG", sigabbrev_np(number), /*with_stack=*/true);
  std::signal(number, SIG_DFL);
  raise(number);
}

// Returns the message of the exception that is handled or has led to std::terminate().
std::string message_of_exception() {
  if (!std::current_exception()) return "std::terminate() without an exception";
  try {
    throw;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception without a message";
  }
}

// After a failed kernel every call of CUDA throws, also in destructors, which ends the process. It then ends
// with one line on stderr and the exit code 1, as after any other error.
[[noreturn]] void on_terminate() {
  const std::string message = message_of_exception();
  report("", message.c_str(), /*with_stack=*/true);
  print_error(message);
  if (is_local_error(std::runtime_error(message))) _exit(1);
  std::signal(SIGABRT, SIG_DFL);  // the report is written already
  std::abort();
}

}  // namespace

void write_crash() {
  if (!context.path.empty()) report("", message_of_exception().c_str(), /*with_stack=*/false);
}

void crash_step(const std::string& text) { context.step = text; }

void crash_context(const std::string& folder, const std::string& text, const std::string& name) {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string command{std::istreambuf_iterator<char>(file), {}};
  std::replace(command.begin(), command.end(), '\0', ' ');
  std::error_code ignored;
  context.settings = concat(text, "\n\ncommand  ", command, "\nfolder   ",
                            std::filesystem::current_path(ignored).string(), "\n");
  context.path = (std::filesystem::absolute(folder, ignored) / name).string();
  void* frame;
  backtrace(&frame, 1);  // loads libgcc now, because a signal handler must not load a library
  for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(number, on_fatal_signal);
  std::set_terminate(on_terminate);
}

}  // namespace yolox
