// SPDX-License-Identifier: Apache-2.0
#include "ddp/launch.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>
#include <sstream>
#include <vector>

#include "base/memory.hpp"
#include "base/new_file.hpp"
#include "base/program.hpp"
#include "base/threads.hpp"

namespace yolox {

// ---- launcher

int listen_on_loopback(int& port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  sockaddr_in address{};
  socklen_t size = sizeof address;
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(uint16_t(port));
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  // Without SO_REUSEADDR, a port is refused for a minute after the end of the last run that used it.
  const bool listens = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                       bind(fd, generic, size) == 0 && listen(fd, 1024) == 0 &&
                       getsockname(fd, generic, &size) == 0;
  check(listens, "failed to listen on a port of 127.0.0.1: ", std::strerror(errno));
  port = ntohs(address.sin_port);
  return fd;
}

// Child process of the launcher: one rank.
struct Child {
  pid_t pid = 0;    // 0: the process has ended
  int status = 0;   // from waitpid()
  int output = -1;  // of ranks above 0: memory file with stdout and stderr
};

// Starts this program again as a rank. listening: socket for the store. words: command line.
static Child start_rank(int ranks, int rank, int port, int listening, const std::vector<std::string>& words) {
  const pid_t launcher = getpid();
  Child child;
  if (rank > 0) child.output = memfd_create("yolox-rank", MFD_CLOEXEC);
  check(rank == 0 || child.output >= 0, "cannot create a memory file: ", std::strerror(errno));
  child.pid = fork();
  check(child.pid >= 0, "cannot start a process: ", std::strerror(errno), kProcessLimit);
  if (child.pid > 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // the rank ends when the launcher ends, for any reason
  if (getppid() != launcher) _exit(1);
  setpgid(0, 0);  // own process group: Ctrl-C reaches the rank only through the launcher, once
  for (const int fd : {1, 2})
    if (rank > 0) dup2(child.output, fd);
  std::signal(SIGTTOU, SIG_IGN);  // `stty tostop` would stop a rank that prints
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  set("YOLOX_LAUNCHED", "1");
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  set("RANK", concat(rank));
  set("WORLD_SIZE", concat(ranks));
  set("LOCAL_RANK", concat(rank));
  set("LOCAL_WORLD_SIZE", concat(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", concat(port));
  if (rank == 0) {
    fcntl(listening, F_SETFD, 0);
    set("YOLOX_LISTENING", concat(listening));
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

// Returns the last 8 lines in a memory file, indented, without empty lines, as the end of a sentence; "" if
// there is none.
static std::string last_lines(int file) {
  std::deque<std::string> lines;
  std::ifstream in(concat("/proc/self/fd/", file));  // from the beginning
  for (std::string line; std::getline(in, line);) {
    if (!line.empty()) lines.push_back("\n  " + line);
    if (lines.size() > 8) lines.pop_front();
  }
  return std::accumulate(lines.begin(), lines.end(), std::string(lines.empty() ? "" : "; its last output:"));
}

// Runs the ranks until all have ended. Returns 0, or the exit code of the first rank that failed, which is
// printed with its last lines.
static int run_ranks(int count, const std::vector<std::string>& words) {
  int port = 0;
  const int listening = listen_on_loopback(port);
  std::vector<Child> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(start_rank(count, i, port, listening, words));
  close(listening);

  int living = count, passed_on = 0, failed = -1;
  double ended_at = 0;        // time of the first failure of a rank
  std::string had_not_ended;  // the ranks that had to be killed
  const auto signal_all = [&](int signal) {
    for (const Child& c : ranks)
      if (c.pid) kill(c.pid, signal);
  };
  // Returns true if rank k ended because it lost another rank, and is therefore not the cause of the failure.
  const auto lost = [&](int k) {
    return WIFEXITED(ranks[k].status) && WEXITSTATUS(ranks[k].status) == kLostRank;
  };
  for (; living > 0; usleep(20000)) {
    if (stop_requests != passed_on) {
      passed_on = stop_requests;
      signal_all(stop_signal);
    }
    for (int i = 0; i < count; ++i) {
      Child& c = ranks[i];
      if (!c.pid || waitpid(c.pid, &c.status, WNOHANG) != c.pid) continue;
      c.pid = 0;
      --living;
      if (c.status == 0) continue;
      if (failed < 0) ended_at = now();
      if (failed < 0 || (lost(failed) && !lost(i) && had_not_ended.empty())) failed = i;
    }
    // The other ranks have 5 s to notice the failure, print their errors and end.
    if (failed < 0 || !had_not_ended.empty() || now() - ended_at <= 5) continue;
    for (int i = 0; i < count; ++i)
      if (ranks[i].pid) had_not_ended += concat("; rank ", i, " had not ended");
    signal_all(SIGKILL);
  }
  std::string output = failed > 0 ? last_lines(ranks[failed].output) : "";  // rank 0 has printed its own
  for (const Child& c : ranks)
    if (c.output >= 0) close(c.output);
  if (failed < 0) return 0;
  const int status = ranks[failed].status,
            code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code == 128 + SIGINT) return code;  // the second Ctrl-C
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::cerr << "error: rank " << failed << " of " << count << " on " << host << " "
            << (lost(failed) ? "lost another rank" : describe_exit_status(status)) << had_not_ended << output
            << std::endl;
  return code;
}

int launch(const Launch& l, int argc, char** argv) {
  catch_signals(/*launcher=*/true);
  std::vector<std::string> words(argv, argv + argc);
  if (l.is_new) words.push_back("--out=" + l.run);  // the last value of a flag counts
  for (;;) {
    const int code = run_ranks(l.ranks, words);
    if (code != kNeedsRestart || stop_signal) return code;
    std::cerr << "out of memory: resuming " << l.run << std::endl;
    words.assign(argv, argv + argc);
    words.insert(words.end(), {"--out=" + l.run, "--resume=auto"});
  }
}

std::string unused_run_folder(const std::string& name) {
  std::string folder = "runs/" + name;
  for (int i = 2; std::filesystem::exists(folder); ++i) folder = concat("runs/", name, "-", i);
  return folder;
}

int64_t parts_of_run(const std::string& run) {
  int64_t parts = 1;
  std::ifstream(run + "/parts") >> parts;
  return parts;
}

void save_parts(const std::string& run, int64_t parts) {
  check(replace_file(run + "/parts", concat(parts, "\n")), "out of memory, and cannot write ", run,
        "/parts; resume the run with --accum ", parts);
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
  // Each process of mpirun would train the whole model. `srun --mpi=pmi2` sets PMI_SIZE, too.
  const bool is_step = !environment_variable("SLURM_STEP_NUM_TASKS").empty();
  for (const char* size : {"OMPI_COMM_WORLD_SIZE", is_step ? "OMPI_COMM_WORLD_SIZE" : "PMI_SIZE"})
    usage_check(p.launched || number("WORLD_SIZE", 1) > 1 || number(size, 1) <= 1, "mpirun started ",
                environment_variable(size), " of these processes (", size,
                "), but not as ranks; start one process with --gpus or --procs ", environment_variable(size),
                ", or on several machines torchrun or srun");
  bool one_node = false, binds = false;  // known with srun only
  if (number("WORLD_SIZE", 1) > 1) {
    p.variable = "WORLD_SIZE";
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
    p.variable = "SLURM_STEP_NUM_TASKS";
    p.world = number("SLURM_STEP_NUM_TASKS", 1);
    p.rank = number("SLURM_PROCID", 0);
    p.local_rank = number("SLURM_LOCALID", 0);
    p.local_world =
        parse("SLURM_STEP_TASKS_PER_NODE",
              slurm_entry(environment_variable("SLURM_STEP_TASKS_PER_NODE"), number("SLURM_NODEID", 0)));
    one_node = p.local_world == p.world;
    // With --cpus-per-task, srun gives each rank cores of its own, unless --cpu-bind=none.
    binds = usable_cores() < number("SLURM_CPUS_PER_TASK", 1) * p.local_world;
    if (!one_node) p.host = first_slurm_host(environment_variable("SLURM_STEP_NODELIST"));
    p.port = number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000);
  }
  p.sharing = binds ? 1 : p.local_world;
  const std::string address = environment_variable("MASTER_ADDR");
  const bool is_ipv6 = address.starts_with('[') && address.ends_with(']');
  if (!address.empty()) p.host = is_ipv6 ? address.substr(1, address.size() - 2) : address;
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
  const std::string found = address_towards("192.0.2.1", info.port);  // reserved by RFC 5737; sends nothing
  check(!found.starts_with("127."), info.host, " resolves to ", address,
        ", which other machines cannot reach, and this machine has no default route; give MASTER_ADDR as a "
        "network address, or set GLOO_SOCKET_IFNAME=INTERFACE");
  return found;
}

bool is_local_error(const std::exception& e) {
  const std::string what = e.what();
  return is_out_of_memory(e) || what.find("CUDA error") != std::string::npos ||
         what.find("CUDA driver error") != std::string::npos ||
         what.find("unhandled cuda error") != std::string::npos;
}

int rank_exit_code(const std::exception& e) {
  if (const auto* error = dynamic_cast<const RankError*>(&e)) return error->code;
  if (is_local_error(e)) return 0;
  const std::string what = e.what();
  for (const char* words : {"third_party/gloo", "Connection closed by peer", "Connection reset by peer",
                            "Broken pipe", "NCCL error", "NCCL communicator was aborted"})
    if (what.find(words) != std::string::npos) return kLostRank;
  return dynamic_cast<const c10::DistError*>(&e) ? kLostRank : 0;  // of a store
}

int run_rank(const std::function<int()>& program, const std::function<void()>& failed) {
  int code = 0;
  const int error = run_program([&] {
    try {
      code = program();
    } catch (const UsageError&) {
      throw;
    } catch (const std::exception& e) {
      code = rank_exit_code(e);
      if (code == 0) failed();
      if (code != kLostRank || dynamic_cast<const RankError*>(&e)) throw;
      fail("lost another rank (", nccl_cause(e.what()), "); see the end of the output of that rank");
    }
  });
  return code ? code : error;
}

void set_up_nccl(bool graph) {
  // NCCL's own handling of errors would abort the process before it can print why, and its recorder of
  // collectives costs time in each of them.
  for (const char* name :
       {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS", "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE"})
    setenv(name, "0", /*overwrite=*/0);
  // "all" and "SyncBN" run at the same time. All ranks launch them in one order, which NCCL then keeps.
  if (!graph) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  // With registered buffers of CUDA graphs, the ranks of a machine wait for each other while they record. A
  // rank whose recording has failed would never arrive.
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
}

std::string nccl_cause(const std::string& what) {
  const std::string mark = "Last error:";
  std::string cause = what.substr(0, what.find('\n'));
  if (cause[0] == '[' && cause.find("] ") != std::string::npos) cause = cause.substr(cause.find("] ") + 2);
  if (const size_t last = what.find(mark); last != std::string::npos) {
    const size_t begin = what.find_first_not_of(" \n", last + mark.size());
    if (begin != std::string::npos) cause += ": " + what.substr(begin, what.find('\n', begin) - begin);
  }
  return cause;
}

void check_gpus(const std::vector<Peer>& peers) {
  std::map<std::string, size_t> ranks;  // by GPU
  for (size_t r = 0; r < peers.size(); ++r) {
    const Peer& p = peers[r];
    if (p.gpu.empty()) continue;
    const auto [other, is_new] = ranks.emplace(p.machine + " " + p.gpu, r);
    check(is_new, "rank ", other->second, " and rank ", r, " share a GPU (", p.text(),
          "); each rank needs a whole GPU, not a MIG slice of it: start fewer ranks, or check "
          "CUDA_VISIBLE_DEVICES");
  }
}

}  // namespace yolox
