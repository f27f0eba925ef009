// SPDX-License-Identifier: Apache-2.0
#include "ddp/rank_info.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>

#include "base/memory.hpp"

namespace yolox {

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
