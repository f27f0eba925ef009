// SPDX-License-Identifier: Apache-2.0
// Distributed data-parallel training: rendezvous, collectives, and all-reduce of the gradients. Built on c10d
// of torch: a TCP store for the rendezvous, NCCL between GPUs, gloo between CPUs, and the Reducer, which
// all-reduces gradients in buckets during backward.
//
// Every rank runs the same program on its share of each batch. SyncBN (layers/sync_bn.hpp), the number of
// positives (loss.hpp) and the gradients are all-reduced. An iteration therefore equals that of a single rank
// with the whole batch, up to rounding.
#pragma once
#include <ATen/record_function.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#ifdef YOLOX_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "base/timeout.hpp"
#include "base/torch.hpp"
#include "ddp/launch.hpp"
#include "layers/bn_silu.hpp"

namespace yolox {

using torch::Tensor;

// The process group as seen by this rank. Every collective must be called by all ranks in the same order,
// from the same thread of each rank. With a single rank, collectives do nothing. If another rank has
// ended, they throw an error whose rank_exit_code() is kLostRank.
class Ranks {
 public:
  // Rendezvous with all other ranks. Throws std::runtime_error after `seconds`, with the ranks that are
  // missing. device: of the tensors for sum(), average() and broadcast(). graph: the collectives of a step
  // are recorded in a CUDA graph (--graph).
  Ranks(const RankInfo& info, torch::Device device, double seconds, bool graph = false)
      : info(info), device(device), seconds(seconds) {
    if (alone()) return;
    if (device.is_cuda()) set_up_nccl(graph);
    const WaitsFor others("other ranks");
    rendezvous();
    connect(graph);
    made_progress("");  // stops the timeout, because ranks may wait while another one checks the images
  }
  Ranks(const Ranks&) = delete;

  const RankInfo info;
  bool first() const { return info.rank == 0; }
  bool alone() const { return info.world == 1; }
  // Returns true if the launcher reports one node and all ranks are on the same machine, in one container.
  bool same_machine() const {
    const auto is_here = [&](const Peer& p) { return p.machine == peers[0].machine; };
    return info.local_world == info.world && std::ranges::all_of(peers, is_here);
  }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return processes; }

  // ---- collectives

  // All-reduces `t` (sum) in place. On a GPU the call returns before the result is ready; stream order makes
  // later kernels see it.
  void sum(Tensor& t) { all_reduce(t, c10d::ReduceOp::SUM); }
  // Returns the elementwise sum over all ranks.
  std::vector<double> sum(std::vector<double> values) {
    return all_reduce(std::move(values), c10d::ReduceOp::SUM);
  }
  // Returns the elementwise maximum over all ranks.
  std::vector<double> max(std::vector<double> values) {
    return all_reduce(std::move(values), c10d::ReduceOp::MAX);
  }
  double max(double mine) { return max(std::vector<double>{mine})[0]; }
  // Barrier: returns after all ranks have called it.
  void barrier() { max(0); }
  // All-reduces floating-point tensors (mean) in place. They must be dense, with the same strides on all
  // ranks. Integer tensors do not change.
  void average(const std::vector<Tensor>& tensors) {
    if (alone()) return;
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> flat;  // in the order of memory, so that one kernel copies all of them
    std::vector<int64_t> sizes;
    for (const Tensor& t : tensors) {
      if (!t.is_floating_point()) continue;
      check(t.is_non_overlapping_and_dense(), "a tensor to average over the ranks is not dense");
      flat.push_back(t.as_strided({t.numel()}, {1}));
      sizes.push_back(t.numel());
    }
    if (flat.empty()) return;
    Tensor all = torch::cat(flat);
    sum(all);
    all /= info.world;
    at::_foreach_copy_(flat, all.split_with_sizes(sizes));
  }
  // All-gathers values. Returns the values of each rank, by rank. Ranks may have different numbers of values.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine) {
    if (alone()) return {mine};
    std::vector<double> sizes(info.world);
    sizes[info.rank] = double(mine.size());
    sizes = sum(sizes);
    Tensor padded = torch::zeros({std::max<int64_t>(1, int64_t(std::ranges::max(sizes)))}, torch::kDouble);
    std::copy(mine.begin(), mine.end(), padded.data_ptr<double>());
    std::vector<std::vector<Tensor>> rows{
        torch::empty({info.world, padded.numel()}, torch::kDouble).unbind()};
    collective([&] {
      std::vector<Tensor> one{padded};
      return processes->allgather(rows, one);
    });
    std::vector<std::vector<double>> values;
    for (int r = 0; r < info.world; ++r) {
      const auto* v = rows[0][r].const_data_ptr<double>();
      values.emplace_back(v, v + int64_t(sizes[r]));
    }
    return values;
  }
  std::vector<std::string> gather_texts(const std::string& mine) {
    std::vector<std::string> texts;
    for (const auto& letters : gather(std::vector<double>(mine.begin(), mine.end())))
      texts.emplace_back(letters.begin(), letters.end());
    return texts;
  }
  // Broadcasts from rank 0: overwrites the tensors, or returns the text or the value of rank 0.
  void broadcast(const std::vector<Tensor>& tensors) {
    for (const Tensor& tensor : tensors) {
      if (alone() || tensor.numel() == 0) continue;
      const Tensor t = tensor.detach(), dense = t.contiguous();
      collective([&] {
        std::vector<Tensor> one{dense};
        c10d::BroadcastOptions options;
        options.asyncOp = false;
        return processes->broadcast(one, options);
      });
      if (!dense.is_same(t)) t.copy_(dense);
    }
  }
  std::string broadcast(const std::string& mine) { return gather_texts(mine)[0]; }
  double broadcast(double mine) { return sum({first() ? mine : 0})[0]; }
  // Returns the value of rank 0 for one that all ranks have computed from equal numbers, because processors
  // of different machines may round it differently.
  Tensor agreed(const Tensor& value) {
    if (!same_machine()) broadcast({value});
    return value;
  }
  // Returns the collectives of SyncBN. On a GPU they have an NCCL communicator of their own, so that they do
  // not wait for the buckets of the Reducer, except with --graph. Valid as long as this object.
  SyncBnCollectives sync_bn_collectives() {
    if (!device.is_cuda()) return {[this](Tensor& t) { sum(t); }};
    return {[this](Tensor& t) { all_reduce(*sync_bn, t, c10d::ReduceOp::SUM); },
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

  // ---- checks, and work on one rank

  // Throws std::runtime_error with the number of a rank if the tensors are not bitwise equal on all ranks.
  // when: the moment, for the message.
  void check_equal(const std::vector<Tensor>& tensors, const std::string& when) {
    if (alone()) return;
    uint64_t hash = 0;
    for (const Tensor& tensor : tensors) {
      const Tensor t = tensor.detach().to(torch::kCPU).contiguous();
      const std::string_view bytes(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
      hash = (hash ^ std::hash<std::string_view>()(bytes)) * 0x100000001b3;
    }
    const auto all = gather({double(hash >> 32), double(hash & 0xffffffff)});
    for (int r = 0; r < info.world; ++r)
      check(all[r] == all[0], when, " rank ", r, " has other weights than rank 0: the ranks have diverged");
  }
  // Barrier that throws std::runtime_error if a setting (flag, value) of this rank differs from rank 0.
  void check_same_settings(const std::vector<std::pair<std::string, std::string>>& settings) {
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
  // Returns the lowest rank of this machine.
  int first_of_machine() const {
    if (alone()) return 0;
    return int(std::ranges::find(peers, peers[info.rank].machine, &Peer::machine) - peers.begin());
  }
  // Returns work(), which runs on one rank of each machine first, and then on the other ranks. Use it for
  // work that writes a cache on disk, which the other ranks then read. work() must not call collectives.
  template <class Work>
  auto run_first_on_one_rank_per_machine(const Work& work) {
    const bool is_first = info.rank == first_of_machine();
    if (!is_first) barrier();
    auto result = work();
    if (is_first) barrier();
    return result;
  }
  // Waits for all ranks, stops the timeout, closes the connections and deletes this object. Call it at the
  // end of a successful run.
  void shutdown() {
    barrier();
    made_progress("");
    if (sync_bn) {
      const auto all = processes->getBackend(torch::kCUDA);
      if (sync_bn != all) sync_bn->shutdown();
      all->shutdown();
    }
    delete this;
  }

  // ---- who waits for whom

  // Returns the seconds in collectives since the last call. The slowest rank has the smallest value.
  double collective_seconds() { return std::exchange(waiting, 0.0); }
  // Returns host, process id and GPU of a rank: "host, process 123".
  std::string location(int rank) const { return peers[rank].text(); }
  // Returns what this process is, for messages: "rank 1 (host, process 123)".
  std::string name() const {
    return alone() ? "training" : concat("rank ", info.rank, " (", location(info.rank), ")");
  }

 private:
  // ---- rendezvous

  static std::chrono::milliseconds milliseconds(double seconds) {
    return std::chrono::milliseconds(int64_t(1000 * seconds));
  }
  std::string store_address() const {
    const bool is_ipv6 = info.host.find(':') != std::string::npos;
    return concat(is_ipv6 ? "[" : "", info.host, is_ipv6 ? "]:" : ":", info.port);
  }

  // Sets `store` and `peers`.
  void rendezvous() {
    // c10d warns if an address has no host name, and prints a stack trace before it throws the error of a
    // failed connection, which open_store() reports in one line.
    const std::string level = environment_variable("TORCH_CPP_LOG_LEVEL");
    setenv("TORCH_CPP_LOG_LEVEL", "FATAL", /*overwrite=*/level.empty());
    c10::initLogging();
    // The constructor of a store and its first calls never end if another program accepts the connection and
    // does not answer. This timeout ends them. It is longer than `seconds`, so that an error with the missing
    // ranks comes first.
    start_timeout(seconds + (first() ? 10 : 3), concat("rank ", info.rank));
    made_progress("the connection to rank 0 at " + store_address());
    open_store();
    made_progress("the rendezvous at " + store_address());
    exchange_peers();
    setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/level.empty());
    c10::initLogging();
  }

  // Returns a connection to the store. serves: this process hosts the store. limit: seconds for the
  // connection.
  c10::intrusive_ptr<c10d::Store> connect_store(bool serves, double limit) {
    c10d::TCPStoreOptions options;
    int port = info.port;
    options.port = uint16_t(port);
    options.isServer = serves;
    options.waitWorkers = false;
    options.timeout = milliseconds(limit);
    // TCPStore itself would listen on all interfaces.
    const bool local_only = info.host == "127.0.0.1" || info.host == "localhost";
    if (serves && info.listening >= 0)
      options.masterListenFd = info.listening;
    else if (serves && local_only)
      options.masterListenFd = listen_on_loopback(port);
    auto tcp = c10::make_intrusive<c10d::TCPStore>(info.host, options);
    tcp->setTimeout(milliseconds(seconds));
    if (!info.agent_hosts_store) return tcp;
    // The store of the agent keeps the keys of failed attempts; the prefix separates them. A store of rank 0
    // needs none: it is new, and agents that joined later have counted fewer restarts.
    return c10::make_intrusive<c10d::PrefixStore>(
        "yolox/" + environment_variable("TORCHELASTIC_RESTART_COUNT"), tcp);
  }
  void open_store() {
    const bool serves = first() && !info.agent_hosts_store;
    for (const double end = now() + seconds;;) try {
        // TCPStore may try twice, with the whole timeout each time.
        store = connect_store(serves, serves ? seconds : std::clamp((end - now()) / 2, 0.5, 5.0));
        return;
      } catch (const std::exception& e) {
        if (!serves && now() + 1 < end) continue;  // rank 0 may not have started yet
        const std::string what = e.what(), cause = concat(" (", what.substr(0, what.find('\n')), ")");
        check(serves, "rank ", info.rank, " cannot connect to rank 0 at ", store_address(), " within ",
              seconds,
              " s; check that rank 0 runs, the host name, the firewall, and that no other program uses the "
              "port");
        check(what.find("failed to listen") == std::string::npos, "rank 0 cannot listen on port ", info.port,
              "; if the port is in use, give another MASTER_PORT", cause);
        fail("rank 0 cannot connect to itself at ", store_address(),
             "; give an address of this machine as MASTER_ADDR", cause);
      }
  }

  // Exchanges host, process id and GPU of all ranks through the store. Throws std::runtime_error if ranks are
  // missing after the timeout, or share a GPU.
  void exchange_peers() {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    std::error_code unknown;  // process ids of another container have no meaning here
    const std::string pids = std::filesystem::read_symlink("/proc/self/ns/pid", unknown).string();
    std::vector<std::string> keys, missing;
    for (int r = 0; r < info.world; ++r) keys.push_back(concat("here/", r));
    // torchrun counts no restart if a machine joins or leaves.
    check(!info.agent_hosts_store || !store->check({keys[info.rank]}), "rank ", info.rank,
          " finds itself in the store of torchrun, which still has an earlier attempt; start torchrun with ",
          "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1");
    store->set(keys[info.rank],
               concat(getpid(), " ", host, " ", host, "/", boot, "/", pids, " ", gpu_address(device)));
    for (const bool last : {false, true}) {
      const double early = std::min(5.0, seconds / 2);
      try {
        store->wait(keys, milliseconds(last ? seconds - early : early));
        break;
      } catch (const std::exception&) {}  // check() throws if rank 0 has ended
      missing.clear();
      for (int r = 0; r < info.world; ++r)
        if (!store->check({keys[r]})) missing.push_back(concat(r));
      if (!last && first() && !info.launched)  // in a shell of `srun --pty`, none will come
        std::cerr << concat("note: waiting for rank ", listed(missing, 16), " of ", info.world, " (",
                            info.variable, "=", info.world, ") at ", store_address(), ", up to ", seconds,
                            " s. To train with this process alone: ", info.variable, "=1 ./train ...")
                  << std::endl;
      if (!last) continue;
      if (first()) std::this_thread::sleep_for(std::chrono::seconds(2));  // other ranks still read the store
      fail(missing.size() == 1 ? "rank " : "ranks ", listed(missing, 16), " of ", info.world,
           " did not reach the rendezvous at ", store_address(), " within ", seconds,
           " s; check that all ranks run, with the same world size");
    }
    for (const std::string& key : keys) {
      std::istringstream in(store->get_to_str(key));
      Peer& p = peers.emplace_back();
      in >> p.process >> p.host >> p.machine >> p.gpu;
    }
    check_gpus(peers);
  }

  // ---- process groups

  // Timeout of collectives. --timeout usually ends a run earlier, see base/timeout.hpp.
  static constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24);

  // Creates the process groups: gloo, shared memory on a single machine, and NCCL on a GPU.
  void connect([[maybe_unused]] bool graph) try {
    made_progress("the connection to the other ranks");  // a firewall may pass only the port of the store
    using Kind = c10d::ProcessGroup::BackendType;
    processes = c10::make_intrusive<c10d::ProcessGroup>(store, info.rank, info.world);
    auto options = c10d::ProcessGroupGloo::Options::create(kLongest);
    const std::string interface = environment_variable("GLOO_SOCKET_IFNAME");
    options->devices.push_back(
        interface.empty() ? c10d::ProcessGroupGloo::createDeviceForHostname(own_address(info, same_machine()))
                          : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    processes->setBackend(torch::kCPU, Kind::GLOO,
                          c10::make_intrusive<c10d::ProcessGroupGloo>(store, info.rank, info.world, options));
    processes->setDefaultBackend(Kind::GLOO);
    if (same_machine()) share_memory();
#ifdef YOLOX_CUDA
    if (!device.is_cuda()) return;
    start_timeout(kNcclSeconds, name(), kNcclRemedy);
    made_progress("the start of NCCL");
    processes->setBackend(torch::kCUDA, Kind::NCCL, connect_nccl("all"));
    processes->setDefaultBackend(Kind::NCCL);
    // Within graphs, collectives of two communicators may wait for each other.
    sync_bn = graph ? processes->getBackend(torch::kCUDA) : connect_nccl("SyncBN");
    // NCCL initialises at the first collective. Doing so here reports errors early, and --bs auto counts the
    // memory of NCCL.
    Tensor one = torch::ones({1}, device);
    sum(one);
    sync_bn_collectives().sum(one);
    check(one.item<float>() == float(info.world) * float(info.world),
          "the all-reduce of NCCL returned a wrong sum on ", location(info.rank));
#endif
  } catch (const std::exception& e) {
    processes.release();  // the destructors would wait for the other ranks
    sync_bn.release();
    const std::string what = e.what();
    if (what.find("NCCL") == std::string::npos || what.find("remote process exited") != std::string::npos)
      throw;  // another rank has ended
    throw RankError(kNcclFailed, concat("NCCL cannot connect the GPUs: ", nccl_cause(what), kNcclRemedy));
  }
#ifdef YOLOX_CUDA
  static constexpr double kNcclSeconds = 90;  // longest start of NCCL

  // Returns a new NCCL communicator over all ranks.
  c10::intrusive_ptr<c10d::Backend> connect_nccl(const std::string& name) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = kLongest;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(name, store),
                                                       info.rank, info.world, options);
  }
#endif

  // Sets up `local`. Call it only if all ranks run on this machine.
  void share_memory() {
    const int fd = first() ? memfd_create("yolox-ranks", MFD_CLOEXEC) : -1;
    const std::string path = broadcast(concat("/proc/", getpid(), "/fd/", fd));
    std::vector<pid_t> pids;
    for (const Peer& p : peers) pids.push_back(p.process);
    std::unique_ptr<SharedMemory> memory;
    try {
      memory = std::make_unique<SharedMemory>(path, info.rank, pids);
    } catch (const c10::Error&) {}
    if (max(!memory) == 0) local = std::move(memory);
    if (fd >= 0) close(fd);  // the kernel frees the memory when no rank has it mapped
  }

  // ---- collectives

  // Scope guard of a collective: measures the time.
  struct Wait {
    ~Wait() { seconds += now() - start; }
    double& seconds;
    const double start = now();
    const WaitsFor others{"other ranks"};
  };

  // All-reduces `t` in place. On a GPU on the current stream, without events and a second stream.
  template <class Group>
  void all_reduce(Group& group, Tensor& t, c10d::ReduceOp::RedOpType operation) {
    collective([&] {
      std::vector<Tensor> one{t};
      c10d::AllreduceOptions options;
      options.reduceOp = operation;
      options.asyncOp = false;
      return group.allreduce(one, options);
    });
  }
  // The same over the process group of the tensor's device. Small vectors go through shared memory.
  void all_reduce(Tensor& t, c10d::ReduceOp::RedOpType operation) {
    if (alone()) return;
    const size_t count = t.numel();
    if (!local || !t.is_cpu() || t.scalar_type() != torch::kDouble || !t.is_contiguous() ||
        count > SharedMemory::kMaxValues)
      return all_reduce(*processes, t, operation);
    const bool adds = operation == c10d::ReduceOp::SUM;
    RECORD_USER_SCOPE("reduce");
    const Wait wait{waiting};
    const int gone = local->all_reduce(t.data_ptr<double>(), count,
                                       [adds](double a, double b) { return adds ? a + b : std::max(a, b); });
    if (gone >= 0)
      throw RankError(kLostRank, concat("rank ", info.rank, " lost rank ", gone, " (", location(gone),
                                        "), whose process ended; see the end of the output of that rank"));
  }
  std::vector<double> all_reduce(std::vector<double> values, c10d::ReduceOp::RedOpType operation) {
    Tensor t = torch::from_blob(values.data(), {int64_t(values.size())}, torch::kDouble);
    all_reduce(t, operation);
    return values;
  }
  // Waits for the collective that begin() starts.
  template <class Begin>
  void collective(const Begin& begin) {
    RECORD_USER_SCOPE("reduce");
    const Wait wait{waiting};
    if (const auto work = begin()) work->wait();
  }
  const torch::Device device;
  const double seconds;  // timeout
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> processes;
  c10::intrusive_ptr<c10d::Backend> sync_bn;  // on a GPU: the communicator of SyncBN
  std::vector<Peer> peers;                    // by rank; empty before the rendezvous
  double waiting = 0;
  std::unique_ptr<SharedMemory> local;  // null: on several machines, or if there is none
};

// All-reduces gradients (mean over the ranks) during backward: a bucket is reduced as soon as its last
// gradient is ready. Gradients are views of the buckets. A parameter that no rank used has no gradient. A
// rank that did not use a parameter contributes zero.
class GradientReducer {
 public:
  // params: in about the order of use in the forward pass, so that the gradients of a bucket become ready
  // together. With one rank, does nothing.
  GradientReducer(Ranks& ranks, const std::vector<Tensor>& params) {
    if (ranks.alone()) return;
    static WarningFilter filter;
    c10::WarningUtils::set_warning_handler(&filter);
    // Bytes per bucket. The first one, of the first layers, is small, because it is reduced last, after the
    // end of backward.
    const size_t first = 1 << 20, others = 25 << 20;
    const std::vector<bool> sparse(params.size(), false);
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(params, {first, others}, sparse));
    std::reverse(buckets.begin(), buckets.end());  // backward computes the last parameters first
    reducer = std::make_shared<c10d::Reducer>(
        params, std::move(buckets), ranks.group(), sparse, others, /*find_unused_parameters=*/true,
        /*gradient_as_bucket_view=*/true, std::unordered_map<size_t, std::string>{}, first,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false
#if YOLOX_TORCH_AT_LEAST(11)
        ,
        std::vector<int64_t>{}
#endif
#if YOLOX_TORCH_AT_LEAST(15)
        ,
        /*batched_grad_copy=*/params[0].is_cuda()  // one kernel for a bucket instead of one for each gradient
#endif
    );
    logger = std::make_shared<c10d::Logger>(reducer);  // the Reducer dereferences its logger without a check
    reducer->set_logger(logger);
  }
  // Prepares the all-reduce. Call it only before the last backward() of an iteration, because the gradients
  // of earlier micro-batches accumulate on each rank without communication. outputs: the tensors that
  // backward() starts from.
  void before_backward(const std::vector<Tensor>& outputs) {
    if (!reducer) return;
    reducer->prepare_for_forward();
    reducer->prepare_for_backward(outputs);
  }

 private:
  // Drops two warnings of the Reducer about a negligible cost: find_unused_parameters is not needed while all
  // parameters are used, and gradient strides differ for weights with a dimension of size 1.
  struct WarningFilter : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      const std::string& text = warning.msg();
      if (text.find("find_unused_parameters=True") == std::string::npos &&
          text.find("Grad strides do not match") == std::string::npos)
        c10::WarningHandler::process(warning);
    }
  };

  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
};

}  // namespace yolox
