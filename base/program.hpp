// What main() does around a program: exit codes, signals, open files, cores.
#pragma once
#include <sys/resource.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <system_error>

#include "base/error.hpp"

namespace yolox {

// Seconds since some moment in the past.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns the git revision that this program was built from. "+edits": its sources differed from that
// revision.
const char* git_revision();

// ---- signals

// The signal that asked the run to end, 0: none; and how many did. SIGHUP (the terminal is gone) and SIGPIPE
// (so is what it was piped to) do not.
inline volatile std::sig_atomic_t stop_signal = 0, stop_requests = 0;

// From now on SIGTERM, SIGUSR1 (SLURM, spot machines) and SIGINT (Ctrl-C) only set stop_signal: the loop ends
// after its step. The next Ctrl-C ends the process at once; a launcher passes it on instead. One that comes
// twice within half a second, as when a rank gets it from `pkill` and from its launcher, counts once.
void catch_signals(bool launcher = false);

// Until then they end the process as they always do, for there is nothing to be saved yet; but it says so.
void tell_signals();

inline void ignore_hangup() {
  for (const int signal : {SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
}

// ---- main()

// OpenMP's threads spin while they wait, by default for so long that a step takes several times as long where
// others want the cores: a loader's threads, another program. With 10000 turns it is no slower on a quiet
// machine and three times as fast beside a busy one. libgomp looks only when it is loaded, so the program
// starts anew. To be called first.
void share_cores(char** argv);

// As many open files as the system allows: the soft limit is often 1024.
void allow_open_files();

// What main() does: runs the program, turns exceptions into one line on stderr and the exit code (2 usage, 1
// failure).
template <class Program>
int run_program(Program&& program) {
  allow_open_files();
  std::signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f` writing fails, as on a full disk
  try {
    program();
    return 0;
  } catch (const UsageError& e) {
    std::cerr << "error: " << e.what() << std::endl;
    return 2;
  } catch (const std::filesystem::filesystem_error& e) {
    std::cerr << "error: " << e.path1().string() << ": " << e.code().message()
              << "; check the path and its rights" << std::endl;
    return 1;
  } catch (const std::exception& e) {  // torch appends its own backtrace after the first line
    const std::string what = e.what();
    const size_t trace =
        std::min({what.find("\nException raised from"), what.find("\nCall stack"), what.find("\nframe #")});
    std::cerr << "error: " << what.substr(0, trace) << std::endl;
    return 1;
  }
}

}  // namespace yolox
