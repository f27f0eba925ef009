// SPDX-License-Identifier: Apache-2.0
#include "base/program.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <opencv2/core/ocl.hpp>
#include <opencv2/core/utility.hpp>

#include "base/printable.hpp"

namespace yolox {

std::string python_with(const std::string& modules) {
  const char* given = std::getenv("PYTHON");
  for (const char* python :
       {given ? given : YOLOX_SOURCE_DIR "/.venv/bin/python", given ? given : "python3"}) {
    const std::string word = shell_word(python);
    if (std::system((word + " -c 'import " + modules + "' >/dev/null 2>&1").c_str()) == 0) return word;
  }
  return "";
}

void catch_signals(bool launcher) {
  static bool passes_on, is_silent;
  passes_on = launcher;
  is_silent = std::getenv("YOLOX_LAUNCHED");  // the launcher of this rank speaks
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = [](int signal) {
    static volatile double first = 0;
    if (stop_signal == 0) first = now();
    if (signal == SIGINT && stop_signal && now() - first < 0.5) return;
    if (signal == SIGINT && stop_signal && !passes_on) _exit(128 + SIGINT);
    const std::string_view text = "\nstops after this step; again = leave without saving\n";
    const bool speaks = signal == SIGINT && stop_signal == 0 && !is_silent;
    stop_signal = signal;
    stop_requests = stop_requests + 1;
    if (speaks && write(2, text.data(), text.size()) < 0) return;  // stderr may be closed
  };
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) sigaction(signal, &action, nullptr);
}

void report_signals() {
  for (const int signal : {SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT})
    std::signal(signal, [](int signal) {
      for (const char* part : {"stopped by SIG", sigabbrev_np(signal), " before the first step\n"})
        if (write(2, part, std::strlen(part)) < 0) break;
      std::signal(signal, SIG_DFL);
      std::raise(signal);
    });
}

void end_program(int code) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(code);
}

// Returns a message with plain words and a remedy in place of the text of torch or OpenCV, such as
// "OpenCV(4.6.0) alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate 9 bytes in function 'f'".
static std::string in_plain_words(const std::string& what) {
  const std::string remedy = "; give a smaller --bs or --size, or fewer --workers";
  if (what == "std::bad_alloc" || what.starts_with("[enforce fail at alloc_cpu") ||
      what.starts_with("can't allocate memory"))
    return "out of memory" + remedy;
  const std::string mark = "(-4:Insufficient memory) ";
  const size_t from = what.find("OpenCV("), at = what.find(mark, from);
  if (from == std::string::npos || at == std::string::npos) return what;
  std::string cause = what.substr(at + mark.size());
  cause.resize(std::min({cause.find(" in function"), cause.find('\n'), cause.size()}));
  return concat(what.substr(0, from), "out of memory (", cause, ")", remedy);
}

void print_error(const std::string& what) {
  const size_t trace =
      std::min({what.find("\nException raised from"), what.find("\nCall stack"), what.find("\nframe #")});
  std::string text = in_plain_words(what.substr(0, trace));
  // torch appends advice for programmers to an error of CUDA, in lines of its own.
  if (text.rfind("CUDA error", 0) == 0) text.resize(std::min(text.find('\n'), text.size()));
  std::cerr << "error: " << printable(text, /*keep_newlines=*/true) << std::endl;
}

void check_stdout() {
  check(std::cout.flush().good(),
        "cannot write to stdout, so that results are missing there; check the disk space. "
        "Files that were written are complete");
}

bool can_rewrite_lines() {
  const char* terminal = std::getenv("TERM");
  return isatty(1) && !(terminal && std::strcmp(terminal, "dumb") == 0);
}

void opencv_single_thread() {
  cv::setNumThreads(0);
  cv::ocl::setUseOpenCL(false);
}

// Prepares the process, see run_program().
static void prepare() {
  // A file that is opened while stdout is closed (`>&-`) would get its number, and the output.
  for (int fd = 0; fd <= 2; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) break;
  rlimit files;  // the soft limit is often only 1024
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  std::signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f`, write() then fails as on a full disk
  opencv_single_thread();
}

int run_program(const std::function<void()>& program) {
  try {
    prepare();
    program();
    return 0;
  } catch (const UsageError& e) {
    print_error(e.what());
    return 2;
  } catch (const std::filesystem::filesystem_error& e) {
    print_error(concat(e.path1().string(), ": ", e.code().message(), "; check the path and its permissions"));
  } catch (const std::system_error& e) {
    const bool no_thread = e.code() == std::errc::resource_unavailable_try_again;
    print_error(concat(no_thread ? "cannot start a thread: " : "", e.what(), no_thread ? kProcessLimit : ""));
  } catch (const std::exception& e) {
    print_error(e.what());
  }
  return 1;
}

}  // namespace yolox
