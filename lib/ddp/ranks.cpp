// SPDX-License-Identifier: Apache-2.0
#include "ddp.hpp"

#include <c10/util/Logging.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <thread>
#include <unordered_map>

#include "base/device.hpp"
#include "base/torch_versions.hpp"
#include "ddp/launch.hpp"

namespace yolox {

// Timeout of collectives. The watchdog ends a run earlier, with a message that names the missing rank.
static constexpr std::chrono::milliseconds kLongerThanWatchdog = std::chrono::hours(24);

Ranks::Ranks(const RankInfo& info, torch::Device device, double seconds) : info(info), seconds(seconds) {
  if (info.world == 1) return;
  {
    // c10d warns if an address has no host name, and prints a stack trace before it throws the error of a
    // failed connection, which open_store() reports in one line.
    const std::string level = environment_variable("TORCH_CPP_LOG_LEVEL");
    setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/level.empty());
    c10::initLogging();
    // Rank 0 names the missing ranks later than the others, see exchange_peers().
    const double slack = first() ? 10 : 3;
    {
      const std::jthread deadline = start_deadline(seconds + slack, no_connection());
      open_store();
    }
    {
      const std::jthread deadline = start_deadline(seconds + slack, no_connection());
      exchange_peers(device);
    }
    setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/level.empty());
    c10::initLogging();
  }
  std::vector<std::string> names;
  for (const Peer& p : peers) names.push_back(p.text());
  watchdog = std::make_unique<Watchdog>(info.rank, names, seconds,
                                        [this] { return connect_store(/*serves=*/false, this->seconds); });
  watchdog->reached("the rendezvous");  // a firewall may pass the port of the store and block all others
  connect(device);
  watchdog->reached("the data",
                    /*patient=*/true);  // checking the images is slow, and slower on some machines
}

bool Ranks::same_machine() const {
  const auto elsewhere = [&](const Peer& p) { return p.machine() != peers[0].machine(); };
  return info.local_world == info.world && std::none_of(peers.begin(), peers.end(), elsewhere);
}

void Ranks::sum(Tensor& t) {
  if (alone()) return;
  const size_t count = t.numel();
  if (local && t.is_cpu() && t.scalar_type() == torch::kDouble && t.is_contiguous() &&
      count <= SharedMemoryGather::kMaxValues) {
    double* sums = t.data_ptr<double>();
    const std::vector<double> mine(sums, sums + count);
    std::fill_n(sums, count, 0.0);
    exchange(mine, [&](const double* v) {
      for (size_t i = 0; i < count; ++i) sums[i] += v[i];
    });
    return;
  }
  collective([&] {
    std::vector<Tensor> one{t};
    return processes->allreduce(one);
  });
}

std::vector<double> Ranks::sum(std::vector<double> values) {
  if (alone()) return values;
  Tensor t = torch::from_blob(values.data(), {int64_t(values.size())}, torch::kDouble);
  sum(t);
  return values;
}

double Ranks::max(double mine) {
  std::vector<double> all(info.world);
  all[info.rank] = mine;
  return std::ranges::max(sum(std::move(all)));
}

void Ranks::average(const std::vector<Tensor>& tensors) {
  if (alone()) return;
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> floats, flat, parts;
  for (const Tensor& t : tensors)
    if (t.is_floating_point()) {
      floats.push_back(t);
      flat.push_back(t.reshape(-1));
    }
  if (floats.empty()) return;
  Tensor all = torch::cat(flat);
  sum(all);
  all /= info.world;
  int64_t at = 0;
  for (const Tensor& t : floats) {
    parts.push_back(all.slice(0, at, at + t.numel()).view(t.sizes()));
    at += t.numel();
  }
  at::_foreach_copy_(floats, parts);
}

std::vector<std::vector<double>> Ranks::gather(const std::vector<double>& mine) {
  if (alone()) return {mine};
  std::vector<double> sizes(info.world);
  sizes[info.rank] = double(mine.size());
  sizes = sum(sizes);
  const auto most = int64_t(*std::max_element(sizes.begin(), sizes.end()));
  Tensor padded = torch::zeros({std::max<int64_t>(1, most)}, torch::kDouble);
  std::copy(mine.begin(), mine.end(), padded.data_ptr<double>());
  std::vector<std::vector<Tensor>> all(1);
  for (int r = 0; r < info.world; ++r) all[0].push_back(torch::empty_like(padded));
  collective([&] {
    std::vector<Tensor> one{padded};
    return processes->allgather(all, one);
  });
  std::vector<std::vector<double>> values;
  for (int r = 0; r < info.world; ++r) {
    const double* v = all[0][r].data_ptr<double>();
    values.emplace_back(v, v + int64_t(sizes[r]));
  }
  return values;
}

std::vector<std::string> Ranks::gather_texts(const std::string& mine) {
  std::vector<std::string> texts;
  for (const auto& letters : gather(std::vector<double>(mine.begin(), mine.end())))
    texts.emplace_back(letters.begin(), letters.end());
  return texts;
}

void Ranks::broadcast(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) {
    if (alone() || tensor.numel() == 0) continue;
    const Tensor t = tensor.detach(), dense = t.contiguous();
    collective([&] {
      std::vector<Tensor> one{dense};
      return processes->broadcast(one);
    });
    if (!dense.is_same(t)) t.copy_(dense);
  }
}

// Returns a hash of the bytes of a tensor.
static uint64_t hash_of(const Tensor& tensor) {
  const Tensor t = tensor.detach().to(torch::kCPU).contiguous();
  const char* bytes = static_cast<const char*>(t.const_data_ptr());
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i < t.nbytes(); i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min<size_t>(8, t.nbytes() - i));
    hash = (hash ^ word) * 0x100000001b3;
  }
  return hash;
}

void Ranks::check_equal(const std::vector<Tensor>& tensors, const std::string& when) {
  if (alone()) return;
  uint64_t hash = 0;
  for (const Tensor& t : tensors) hash = (hash ^ hash_of(t)) * 0x100000001b3;
  const auto all = gather({double(hash >> 32), double(hash & 0xffffffff)});
  for (int r = 0; r < info.world; ++r)
    check(all[r] == all[0], when, " rank ", r, " has other weights than rank 0: the ranks have diverged");
}

void Ranks::check_same_settings(const std::vector<std::pair<std::string, std::string>>& settings) {
  if (alone()) return;
  std::string mine;
  for (const auto& [name, value] : settings) mine += name + '\0' + value + '\0';
  std::istringstream firsts(broadcast(mine));
  barrier();
  std::string name, value, differs;
  for (const auto& [own, here] : settings)
    if (std::getline(firsts, name, '\0') && std::getline(firsts, value, '\0') &&
        (name != own || value != here))
      differs += concat(differs.empty() ? "" : ", ", own, " ", here, " where rank 0 has ", value);
  check(differs.empty(), "rank ", info.rank, " (", location(info.rank),
        ") has other settings than rank 0: ", differs, "; start all ranks with the same flags and data");
}

void Ranks::report_run_folder(const std::string& run) const {
  const std::string fd = environment_variable("YOLOX_REPORTS");
  if (fd.empty()) return;
  if (write(std::atoi(fd.c_str()), run.data(), run.size()) < 0) return;
  close(std::atoi(fd.c_str()));
}

void Ranks::shutdown() {
  barrier();
#ifdef YOLOX_CUDA
  if (sync_bn) sync_bn->shutdown();
  if (!alone() && device.is_cuda()) processes->getBackend(torch::kCUDA)->shutdown();
#endif
  delete this;
}

c10::intrusive_ptr<c10d::Store> Ranks::connect_store(bool serves, double most) {
  c10d::TCPStoreOptions options;
  options.port = uint16_t(info.port);
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = Milliseconds(int64_t(1000 * most));
  // TCPStore itself would listen on all interfaces.
  const bool local_only = info.host == "127.0.0.1" || info.host == "localhost";
  if (serves && info.listening >= 0)
    options.masterListenFd = info.listening;
  else if (serves && local_only)
    options.masterListenFd = listen_on_loopback(info.port);
  auto tcp = c10::make_intrusive<c10d::TCPStore>(info.host, options);
  tcp->setTimeout(timeout());
  if (!info.agent_hosts_store) return tcp;
  // The store of the agent still has the keys of attempts that failed. A store of rank 0 is new in each
  // attempt, and agents have counted different numbers of restarts if one of them joined later.
  return c10::make_intrusive<c10d::PrefixStore>("yolox/" + environment_variable("TORCHELASTIC_RESTART_COUNT"),
                                                tcp);
}

void Ranks::open_store() {
  const bool serves = first() && !info.agent_hosts_store;
  // TCPStore may try twice, with the whole timeout each time.
  const double start = now();
  const auto left = [&] { return seconds - (now() - start); };
  while (!serves && left() > 2) {
    try {
      store = connect_store(serves, std::min(5.0, left() / 2));
      return;
    } catch (const std::exception&) {}  // rank 0 may not have started yet
  }
  try {
    store = connect_store(serves, serves ? seconds : std::max(0.5, left() / 2));
  } catch (const std::exception& e) {
    const std::string what = e.what(), cause = concat(" (", what.substr(0, what.find('\n')), ")");
    check(!serves || what.find("failed to listen") == std::string::npos, "rank 0 cannot listen on port ",
          info.port, "; if the port is in use, give another MASTER_PORT", cause);
    check(!serves, "rank 0 cannot connect to itself at ", store_address(),
          "; give an address of this machine as MASTER_ADDR", cause);
    fail(no_connection());
  }
}

std::string Ranks::wait_for_key(const std::string& key, double most) {
  try {
    for (const double start = now(); !store->check({key}); std::this_thread::sleep_for(Milliseconds(20)))
      if (now() - start > most) return "";
    const auto bytes = store->get(key);
    return {bytes.begin(), bytes.end()};
  } catch (const std::exception&) {  // rank 0 hosts the store
    throw LostRank(concat("rank ", info.rank, " lost rank 0 (", peers.empty() ? store_address() : location(0),
                          "), whose process ended; see the end of the output of that rank"));
  }
}

void Ranks::exchange_peers(torch::Device own) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  std::string boot = "-";
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::string me = concat(getpid(), " ", host, " ", boot, " ", gpu_uuid(own), " ", gpu_pci_address(own));
#ifdef YOLOX_CUDA
  if (own.is_cuda()) me += " " + c10d::getNcclVersion();
#endif
  store->set(concat("here/", info.rank), std::vector<uint8_t>(me.begin(), me.end()));
  std::vector<Peer> found(info.world);
  std::vector<std::string> missing;
  const double start = now();
  for (int r = 0; r < info.world; ++r) {
    std::istringstream in(wait_for_key(concat("here/", r), std::max(0.0, seconds - (now() - start))));
    Peer& p = found[r];
    if (!(in >> p.process >> p.host >> p.boot)) missing.push_back(concat(r));
    in >> p.gpu >> p.pci >> p.nccl;
  }
  if (!missing.empty()) {
    if (first()) std::this_thread::sleep_for(std::chrono::seconds(2));  // other ranks still read the store
    fail(missing.size() == 1 ? "rank " : "ranks ", listed(missing, 16), " of ", info.world,
         " did not reach the rendezvous at ", store_address(), " within ", seconds, " s; rank 0 is on ",
         found[0].text(), "; check that all ranks run, with the same world size");
  }
  peers = std::move(found);
  check_gpus(peers);
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

// Returns the address of this machine that other machines can connect to. The host name of a machine often
// resolves to a loopback address (127.0.1.1), which other machines cannot reach. In this case, returns the
// first IPv4 address of another network interface. first: host of rank 0.
static std::string own_address(const std::string& first, int port, bool same_machine) {
  const std::string address = address_towards(first, port);
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
  check(!found.empty(), first, " resolves to ", address, ", which other machines cannot reach, and this ",
        "machine has no other address; give MASTER_ADDR as a network address, or set ",
        "GLOO_SOCKET_IFNAME=INTERFACE");
  return found;
}

#ifdef YOLOX_CUDA
c10::intrusive_ptr<c10d::Backend> Ranks::connect_nccl(const std::string& name, bool small) {
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/small);
  options->timeout = kLongerThanWatchdog;
#ifdef NCCL_HAS_CONFIG
  if (small) options->config.maxCTAs = 4;
#endif
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(name, store),
                                                     info.rank, info.world, options);
}
#endif

SyncBnCollectives Ranks::sync_bn_collectives() {
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    // Not asynchronous: on the current stream, without events and a second stream.
    return {[this](Tensor& t) {
              collective([&] {
                std::vector<Tensor> one{t};
                c10d::AllreduceOptions options;
                options.asyncOp = false;
                return sync_bn->allreduce(one, options);
              });
            },
            [this](const Tensor& x) {
              Tensor all = torch::empty({info.world, x.numel()}, x.options()), mine = x;
              collective([&] {
                c10d::AllgatherOptions options;
                options.asyncOp = false;
                return sync_bn->_allgather_base(all, mine, options);
              });
              return all;
            }};
  }
#endif
  return {[this](Tensor& t) { sum(t); }};
}

void Ranks::connect(torch::Device where) {
  device = where;
  using Kind = c10d::ProcessGroup::BackendType;
  processes = c10::make_intrusive<c10d::ProcessGroup>(store, info.rank, info.world);
  auto options = c10d::ProcessGroupGloo::Options::create(kLongerThanWatchdog);
  const std::string interface = environment_variable("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface.empty() ? c10d::ProcessGroupGloo::createDeviceForHostname(
                                                     own_address(info.host, info.port, same_machine()))
                                               : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
  collective([&] {
    processes->setBackend(torch::kCPU, Kind::GLOO,
                          c10::make_intrusive<c10d::ProcessGroupGloo>(store, info.rank, info.world, options));
    return c10::intrusive_ptr<c10d::Work>();
  });
  processes->setDefaultBackend(Kind::GLOO);
  if (same_machine()) share_memory();
#ifdef YOLOX_CUDA
  if (device.is_cuda()) {
    // A lost rank is reported by the watchdog, with its name. NCCL's own handling of errors would abort the
    // process first.
    for (const char* name : {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS",
                             "TORCH_NCCL_ENABLE_MONITORING"})
      setenv(name, "0", /*overwrite=*/0);
    // "all" and "SyncBN" run at the same time. All ranks launch them in one order, which NCCL then keeps.
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
    // With registered buffers of CUDA graphs, the ranks of a machine wait for each other while they record. A
    // rank whose recording has failed would never arrive.
    setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
    processes->setBackend(torch::kCUDA, Kind::NCCL, connect_nccl("all", /*small=*/false));
    processes->setDefaultBackend(Kind::NCCL);
    // NCCL initialises at the first collective. Doing so here reports errors early, and --bs auto counts the
    // memory of NCCL.
    sync_bn = connect_nccl("SyncBN", /*small=*/true);
    Tensor one = torch::ones({1}, device);
    sum(one);
    sync_bn_collectives().sum(one);
    check(one.item<float>() == float(info.world) * float(info.world),
          "the all-reduce of NCCL returned a wrong sum on ", location(info.rank));
  }
#endif
}

Ranks::Wait::~Wait() {
  if (ranks.watchdog) {
    ranks.watchdog->waiting = within;
    ranks.watchdog->restart_timeout();
  }
  ranks.waiting += now() - start;
}

void Ranks::share_memory() {
  auto sums = std::make_unique<SharedMemoryGather>(info.rank, info.world);
  const bool open = sums->open(broadcast(first() ? sums->create() : ""));
  for (int r = 0; r < info.world; ++r) sums->set_process(r, peers[r].process);
  if (max(!open) == 0) local = std::move(sums);
}

// Warning handler that drops two warnings of the Reducer about a negligible cost: find_unused_parameters is
// not needed while all parameters are used, and gradient strides differ for weights with a dimension of
// size 1.
struct ReducerWarningFilter : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    const std::string& text = warning.msg();
    if (text.find("find_unused_parameters=True") == std::string::npos &&
        text.find("Grad strides do not match") == std::string::npos)
      c10::WarningHandler::process(warning);
  }
};

GradientReducer::GradientReducer(Ranks& ranks, const std::vector<Tensor>& params)
    : GradientReducer(ranks.alone() ? nullptr : ranks.group(), params) {
  may_wait = [&ranks] { ranks.may_wait(); };
}

GradientReducer::GradientReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                 const std::vector<Tensor>& params) {
  if (!group) return;
  static ReducerWarningFilter quiet;
  c10::WarningUtils::set_warning_handler(&quiet);
  const size_t first = 1 << 20, others = 25 << 20;  // bytes per bucket; a small first bucket starts earlier
  const std::vector<bool> sparse(params.size(), false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(params, {first, others}, sparse));
  std::reverse(buckets.begin(), buckets.end());  // backward computes the last parameters first
  reducer = std::make_shared<c10d::Reducer>(
      params, std::move(buckets), group, sparse, others, /*find_unused_parameters=*/true,
      /*gradient_as_bucket_view=*/true, std::unordered_map<size_t, std::string>{}, first,
      /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false
#if YOLOX_TORCH_AT_LEAST(11)
      ,
      std::vector<int64_t>{}
#endif
  );
  logger = std::make_shared<c10d::Logger>(reducer);  // the Reducer dereferences its logger without a check
  reducer->set_logger(logger);
}

void GradientReducer::before_backward(const std::vector<Tensor>& outputs) {
  if (!reducer) return;
  reducer->prepare_for_forward();
  reducer->prepare_for_backward(outputs);
  may_wait();
}

}  // namespace yolox
