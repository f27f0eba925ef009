// SPDX-License-Identifier: Apache-2.0
#include "ddp/launch.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <vector>

#include "base/program.hpp"
#include "base/threads.hpp"
#include "ddp/rank_info.hpp"
#include "ddp/shared_memory.hpp"

namespace yolox {

int listen_on_loopback(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(uint16_t(port));
  // Without SO_REUSEADDR, a port is refused for a minute after the end of the last run that used it.
  const bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                       bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                       listen(fd, 1024) == 0;
  check(listens, "failed to listen on a port of 127.0.0.1: ", std::strerror(errno));
  return fd;
}

int listen_on_free_port(int& port) {
  const int fd = listen_on_loopback(0);
  sockaddr_in address{};
  socklen_t size = sizeof address;
  const bool known = getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  check(known, "cannot read the port of a socket: ", std::strerror(errno));
  port = ntohs(address.sin_port);
  return fd;
}

// Child process of the launcher: one rank.
struct Child {
  pid_t pid = 0;            // 0: the process has ended
  int status = 0;           // from waitpid()
  int output = -1;          // pipe of stdout and stderr; only stderr for rank 0
  std::string output_tail;  // the end of the output
};

// Starts this program again as a rank. listening: socket for the store. reports: pipe for
// Ranks::report_run_folder() of rank 0. words: command line.
static Child start_rank(const Launch& l, int rank, int port, int listening, int reports,
                        const std::vector<std::string>& words) {
  int ends[2];
  const bool has_pipe = pipe2(ends, O_CLOEXEC) == 0;
  check(has_pipe, "cannot create a pipe: ", std::strerror(errno));
  const int cores = std::max(1, usable_cores() / l.ranks);
  const pid_t launcher = getpid();
  Child child;
  child.output = ends[0];
  child.pid = fork();
  check(child.pid >= 0, "cannot start a process: ", std::strerror(errno));
  if (child.pid > 0) {
    close(ends[1]);
    return child;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // the rank ends when the launcher ends, for any reason
  if (getppid() != launcher) _exit(1);
  setpgid(0, 0);  // own process group: Ctrl-C reaches the rank only through the launcher, once
  dup2(ends[1], 2);
  if (rank > 0) dup2(ends[1], 1);
  std::signal(SIGTTOU, SIG_IGN);  // `stty tostop` would stop a rank that prints
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  set("YOLOX_LAUNCHED", "1");
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  set("RANK", concat(rank));
  set("WORLD_SIZE", concat(l.ranks));
  set("LOCAL_RANK", concat(rank));
  set("LOCAL_WORLD_SIZE", concat(l.ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", concat(port));
  setenv("OMP_NUM_THREADS", concat(cores).c_str(), /*overwrite=*/0);
  if (rank == 0) {
    fcntl(listening, F_SETFD, 0);
    set("YOLOX_LISTENING", concat(listening));
    fcntl(reports, F_SETFD, 0);
    set("YOLOX_REPORTS", concat(reports));
  }
  std::vector<char*> argv;
  for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv("/proc/self/exe", argv.data());
  _exit(127);
}

// Returns a description of a status from waitpid(): "failed with exit code 1", "was killed by SIGKILL".
static std::string describe_exit_status(int status) {
  if (!WIFSIGNALED(status)) return concat("failed with exit code ", WEXITSTATUS(status));
  const bool killed = WTERMSIG(status) == SIGKILL;
  return concat("was killed by SIG", sigabbrev_np(WTERMSIG(status)),
                killed ? " (by a user, or by the kernel because memory ran out)" : "");
}

// Returns the last `count` lines of a text, indented, without empty lines.
static std::string last_lines(const std::string& text, size_t count) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) lines.push_back(line);
  std::string last;
  for (size_t i = lines.size() - std::min(lines.size(), count); i < lines.size(); ++i)
    last += "\n  " + lines[i];
  return last;
}

// Reads the output of the ranks into their output_tail, and what they write to report_pipe into `run`. Shows
// the output of rank 0. Waits for up to `milliseconds`; returns false if there was no output. Closes
// a pipe whose other end is closed, and sets it to -1.
static bool read_output(std::vector<Child>& ranks, int& report_pipe, std::string& run, int milliseconds) {
  std::vector<pollfd> open{{report_pipe, POLLIN, 0}};
  for (const Child& c : ranks) open.push_back({c.output, POLLIN, 0});
  if (poll(open.data(), open.size(), milliseconds) <= 0) return false;
  char text[4096];
  for (size_t i = 0; i < open.size(); ++i) {
    if (!open[i].revents) continue;
    const ssize_t n = read(open[i].fd, text, sizeof text);
    if (n <= 0) {
      int& pipe = i == 0 ? report_pipe : ranks[i - 1].output;
      close(pipe);
      pipe = -1;
      continue;
    }
    if (i == 0) {
      run.append(text, size_t(n));
      continue;
    }
    Child& c = ranks[i - 1];
    if (i == 1) std::cerr.write(text, n).flush();
    c.output_tail.append(text, size_t(n));
    if (c.output_tail.size() > 16384) c.output_tail.erase(0, c.output_tail.size() - 8192);
  }
  return true;
}

// Runs the ranks until all have ended. Returns 0, or the exit code of the first rank that failed, which is
// printed with its last lines. Sets `run` to the run folder if a checkpoint was saved.
static int run_ranks(const Launch& l, const std::vector<std::string>& words, std::string& run) {
  int port = 0, reports[2];
  const int listening = listen_on_free_port(port);
  const bool has_pipe = pipe2(reports, O_CLOEXEC) == 0;
  check(has_pipe, "cannot create a pipe: ", std::strerror(errno));
  std::vector<Child> ranks;
  for (int i = 0; i < l.ranks; ++i) ranks.push_back(start_rank(l, i, port, listening, reports[1], words));
  close(reports[1]);
  close(listening);

  const auto signal_all = [&](int signal) {
    for (const Child& c : ranks)
      if (c.pid) kill(c.pid, signal);
  };
  int living = l.ranks, passed_on = 0, failed = -1;
  double ended_at = 0;  // time of the first failure of a rank
  bool killed = false;
  // Returns true if rank k ended because it lost another rank, and is therefore not the cause of the failure.
  const auto lost = [&](int k) {
    return WIFEXITED(ranks[k].status) && WEXITSTATUS(ranks[k].status) == kLostRank;
  };
  while (living > 0) {
    if (stop_requests != passed_on) {
      passed_on = stop_requests;
      signal_all(stop_signal);
    }
    read_output(ranks, reports[0], run, 50);
    for (int i = 0; i < l.ranks; ++i) {
      Child& c = ranks[i];
      if (!c.pid || waitpid(c.pid, &c.status, WNOHANG) != c.pid) continue;
      c.pid = 0;
      --living;
      if (c.status == 0) continue;
      if (failed < 0) ended_at = now();
      if (failed < 0 || (lost(failed) && !lost(i) && !killed)) failed = i;
    }
    const auto can_end = [](const Child& c) { return c.pid && process_state(c.pid) != 'T'; };
    // The other ranks have 5 s to notice the failure, print their errors and end.
    if (failed >= 0 && !killed &&
        (now() - ended_at > 5 || std::none_of(ranks.begin(), ranks.end(), can_end))) {
      signal_all(SIGKILL);
      killed = true;
    }
  }
  while (read_output(ranks, reports[0], run, 0)) {  // reads the rest of the output
  }
  for (const Child& c : ranks)
    if (c.output >= 0) close(c.output);
  if (reports[0] >= 0) close(reports[0]);
  if (failed < 0) return 0;
  const Child& c = ranks[failed];
  const int code = WIFSIGNALED(c.status) ? 128 + WTERMSIG(c.status) : WEXITSTATUS(c.status);
  if (code == 128 + SIGINT) return code;  // the second Ctrl-C
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::cerr << "error: rank " << failed << " of " << l.ranks << " on " << host << " "
            << (lost(failed) ? "lost another rank" : describe_exit_status(c.status))
            << (failed == 0 || c.output_tail.empty() ? ""
                                                     : "; its last output:" + last_lines(c.output_tail, 8))
            << std::endl;
  return code;
}

int launch(const Launch& l, int argc, char** argv) {
  catch_signals(/*launcher=*/true);
  std::vector<std::string> words(argv, argv + argc);
  std::string run;  // kept over attempts, because an attempt that fails early does not report the run folder
  for (int restarts = 0;;) {
    std::string reported;
    const int code = run_ranks(l, words, reported);
    if (!reported.empty()) run = reported;
    if (code == 0 || code == 2 || stop_signal || run.empty()) return code;
    std::string restart = "out of memory";  // not counted: each time, the ranks need less memory
    if (code != kNeedsRestart) {
      if (restarts == l.restarts) return code;
      restart = concat("restart ", ++restarts, " of ", l.restarts);
    }
    std::cerr << restart << ": resuming " << run << std::endl;
    words.assign(argv, argv + argc);
    words.insert(words.end(), {"--out=" + run, "--resume=auto"});  // the last value of a flag counts
  }
}

}  // namespace yolox
