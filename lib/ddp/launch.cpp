// SPDX-License-Identifier: Apache-2.0
#include "ddp/launch.hpp"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
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
#include <map>
#include <sstream>
#include <vector>

#include "base/memory.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"
#include "ddp/shared_memory.hpp"

namespace yolox {

// ---- launcher

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

// ---- ranks

std::string environment_variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string first_slurm_host(const std::string& list) {
  const size_t bracket = list.find_first_of("[,");
  if (bracket == std::string::npos || list[bracket] == ',') return list.substr(0, bracket);
  const size_t end = list.find_first_of("-,]", bracket), close = list.find(']', bracket);
  const std::string rest = close == std::string::npos ? "" : list.substr(close + 1);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1) +
         rest.substr(0, rest.find(','));
}

std::string slurm_entry(const std::string& list, int index) {
  std::istringstream in(list);
  std::string value;
  for (std::string part; index >= 0 && std::getline(in, part, ',');) {
    const size_t times = part.find("(x");
    value = part.substr(0, times);
    index -= times == std::string::npos ? 1 : std::max(1, std::atoi(part.c_str() + times + 2));
  }
  return value;
}

// Returns the host without the brackets of an IPv6 address.
static std::string without_brackets(const std::string& host) {
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return bracketed ? host.substr(1, host.size() - 2) : host;
}

RankInfo rank_info_from_environment() {
  RankInfo p;
  const auto parse = [](const char* name, const std::string& text) {
    char* end;
    const long value = std::strtol(text.c_str(), &end, 10);
    usage_check(end != text.c_str() && *end == 0 && value >= 0 && value < 2000000000, name, "=", text,
                " is not a number in 0..1999999999");
    return int(value);
  };
  const auto number = [&](const char* name, int otherwise) {
    return environment_variable(name).empty() ? otherwise : parse(name, environment_variable(name));
  };
  p.launched = !environment_variable("YOLOX_LAUNCHED").empty();
  bool one_node = false;  // known with srun only
  if (number("WORLD_SIZE", 1) > 1) {
    for (const char* name : {"RANK", "LOCAL_RANK"})
      usage_check(!environment_variable(name).empty(), "WORLD_SIZE=", environment_variable("WORLD_SIZE"),
                  " means that this process is one of several ranks, but ", name,
                  " is not set; start the ranks with --gpus, torchrun or srun, or unset WORLD_SIZE");
    p.world = number("WORLD_SIZE", 1);
    p.rank = number("RANK", 0);
    p.local_rank = number("LOCAL_RANK", 0);
    p.local_world = number("LOCAL_WORLD_SIZE", p.world);
    p.agent_hosts_store = environment_variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
    p.listening = number("YOLOX_LISTENING", -1);
    p.port = number("MASTER_PORT", 29500);
  } else if (!p.launched && number("SLURM_STEP_NUM_TASKS", 1) > 1) {  // set by srun, not by sbatch
    p.world = number("SLURM_STEP_NUM_TASKS", 1);
    p.rank = number("SLURM_PROCID", 0);
    p.local_rank = number("SLURM_LOCALID", 0);
    p.local_world =
        parse("SLURM_STEP_TASKS_PER_NODE",
              slurm_entry(environment_variable("SLURM_STEP_TASKS_PER_NODE"), number("SLURM_NODEID", 0)));
    one_node = p.local_world == p.world;
    if (!one_node) p.host = first_slurm_host(environment_variable("SLURM_STEP_NODELIST"));
    p.port = number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000);
  }
  if (!environment_variable("MASTER_ADDR").empty())
    p.host = without_brackets(environment_variable("MASTER_ADDR"));
  // The store must not listen on all interfaces if all ranks are on one machine.
  if (p.host.empty() || p.host == "::1" || one_node) p.host = "127.0.0.1";
  usage_check(p.world == 1 || (p.port >= 1 && p.port <= 65535), "MASTER_PORT=", p.port,
              " is not a port in 1..65535");
  usage_check(p.world >= 1 && p.rank < p.world && p.local_rank < std::max(1, p.local_world), "rank ", p.rank,
              " of ", p.world, ", local rank ", p.local_rank, " of ", p.local_world,
              ": RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are inconsistent");
  return p;
}

// Returns the local address of the route to a host.
static std::string address_towards(const std::string& host, int port) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), concat(port).c_str(), &hints, &found) != 0) return "127.0.0.1";
  const int fd = socket(found->ai_family, SOCK_DGRAM, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  char text[256] = "127.0.0.1";
  if (::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&own), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  close(fd);
  freeaddrinfo(found);
  return text;
}

std::string own_address(const RankInfo& info, bool same_machine) {
  const std::string address = address_towards(info.host, info.port);
  if (same_machine || (!address.starts_with("127.") && address != "::1")) return address;
  ifaddrs* all = nullptr;
  std::string found;
  if (getifaddrs(&all) == 0) {
    for (const ifaddrs* a = all; a && found.empty(); a = a->ifa_next) {
      if (!a->ifa_addr || a->ifa_addr->sa_family != AF_INET || !(a->ifa_flags & IFF_UP) ||
          (a->ifa_flags & IFF_LOOPBACK))
        continue;
      char text[256] = "";
      getnameinfo(a->ifa_addr, sizeof(sockaddr_in), text, sizeof text, nullptr, 0, NI_NUMERICHOST);
      found = text;
    }
    freeifaddrs(all);
  }
  check(!found.empty(), info.host, " resolves to ", address, ", which other machines cannot reach, and this ",
        "machine has no other address; give MASTER_ADDR as a network address, or set ",
        "GLOO_SOCKET_IFNAME=INTERFACE");
  return found;
}

bool is_local_error(const std::exception& e) {
  const std::string what = e.what();
  return is_out_of_memory(e) || what.find("CUDA error") != std::string::npos ||
         what.find("CUDA driver error") != std::string::npos ||
         what.find("unhandled cuda error") != std::string::npos;
}

bool is_lost_rank_error(const std::exception& e) {
  const std::string what = e.what();
  if (is_local_error(e)) return false;
  for (const char* words : {"third_party/gloo", "Connection closed by peer", "Connection reset by peer",
                            "Broken pipe", "NCCL error", "NCCL communicator was aborted"})
    if (what.find(words) != std::string::npos) return true;
  return dynamic_cast<const LostRank*>(&e) != nullptr;
}

void check_gpus(const std::vector<Peer>& peers) {
  std::map<std::pair<std::string, std::string>, size_t> gpus;  // (machine, PCI address) -> rank
  for (size_t r = 0; r < peers.size(); ++r) {
    const Peer& p = peers[r];
    if (p.gpu.empty()) continue;
    const auto [other, is_new] = gpus.emplace(std::pair(p.machine(), p.pci), r);
    if (is_new) continue;
    check(p.gpu == peers[other->second].gpu, "rank ", other->second, " and rank ", r,
          " use two MIG slices of one GPU (", p.text(),
          "); NCCL does not support this: use one slice, or turn ", "MIG off");
    fail("rank ", other->second, " and rank ", r, " share a GPU (", p.text(),
         "); each rank needs its own GPU: start fewer ranks, or check CUDA_VISIBLE_DEVICES");
  }
}

}  // namespace yolox
