// SPDX-License-Identifier: Apache-2.0
// Distributed data-parallel training: rendezvous, collectives, gradient all-reduce, and detection of lost
// ranks. Built on c10d of torch: a TCP store for the rendezvous, NCCL between GPUs, gloo between CPUs, and
// the Reducer, which all-reduces gradients in buckets during backward.
//
// Every rank runs the same program on its share of each batch. SyncBN (layers/sync_bn.hpp), the number of
// positives (loss.hpp) and the gradients are all-reduced. An iteration therefore equals that of a single rank
// with the whole batch, up to rounding.
#pragma once
#include <ATen/record_function.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#ifdef YOLOX_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/program.hpp"
#include "ddp/rank_info.hpp"
#include "ddp/shared_memory.hpp"
#include "ddp/watchdog.hpp"
#include "layers/collectives.hpp"

namespace yolox {

using torch::Tensor;

// The process group as seen by this rank. Every collective must be called by all ranks in the same order,
// from the same thread of each rank. With a single rank, all functions are no-ops. Collectives throw LostRank
// if another rank has ended.
class Ranks {
 public:
  // Rendezvous with all other ranks. Throws std::runtime_error after `seconds`, with the ranks that are
  // missing. The same timeout holds for every later collective. device: of the tensors for sum(), average()
  // and broadcast().
  Ranks(const RankInfo& info, torch::Device device, double seconds);
  Ranks(const Ranks&) = delete;

  const RankInfo info;
  bool first() const { return info.rank == 0; }
  bool alone() const { return info.world == 1; }
  // Returns true if the launcher reports one node and all ranks report the same host name.
  bool same_machine() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return processes; }

  // All-reduces `t` (sum) in place. On a GPU the call returns before the result is ready; stream order makes
  // later kernels see it.
  void sum(Tensor& t);
  // Returns the elementwise sum over all ranks.
  std::vector<double> sum(std::vector<double> values);
  // Returns the collectives of SyncBN. On a GPU they have an NCCL communicator of their own, so that they do
  // not wait for the buckets of the Reducer. Valid as long as this object.
  SyncBnCollectives sync_bn_collectives();
  // Returns the maximum over all ranks.
  double max(double mine);
  // All-reduces floating-point tensors (mean) in place. Integer tensors do not change.
  void average(const std::vector<Tensor>& tensors);
  // Returns the value of rank 0.
  bool broadcast_flag(bool mine) { return sum({double(first() && mine)})[0] > 0; }
  // All-gathers values. Returns the values of each rank, by rank. Ranks may have different numbers of values.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine);
  std::vector<std::string> gather_texts(const std::string& mine);
  // Overwrites a value that all ranks have computed from equal numbers by that of rank 0, because processors
  // of different machines may round it differently. Does nothing if all ranks are on one machine.
  void agree(const Tensor& value) {
    if (!same_machine()) broadcast({value});
  }
  // Broadcasts from rank 0: overwrites the tensors, or returns the text of rank 0.
  void broadcast(const std::vector<Tensor>& tensors);
  std::string broadcast(const std::string& mine) { return gather_texts(mine)[0]; }
  // Barrier: returns after all ranks have called it.
  void barrier() { max(0); }
  // Throws std::runtime_error with the number of a rank if the tensors are not bitwise equal on all ranks.
  // when: the moment, for the message.
  void check_equal(const std::vector<Tensor>& tensors, const std::string& when);
  // Barrier that throws std::runtime_error if a setting (flag, value) of this rank differs from rank 0.
  void check_same_settings(const std::vector<std::pair<std::string, std::string>>& settings);
  // Returns the lowest rank of this machine.
  int first_of_machine() const {
    if (alone()) return 0;
    const auto is_here = [&](const Peer& p) { return p.machine() == peers[info.rank].machine(); };
    return int(std::find_if(peers.begin(), peers.end(), is_here) - peers.begin());
  }
  // Returns work(), which runs on one rank of each machine first, and then on the other ranks of that
  // machine. Use it for work that writes a cache on disk, which the other ranks then read.
  template <class Work>
  auto run_first_on_one_rank_per_machine(const Work& work) {
    if (alone()) return work();
    const int first = first_of_machine();
    const std::string key = concat("turn/", first, "/", turns++);
    if (info.rank != first) wait_for_key(key);
    auto result = work();
    if (info.rank == first) store->set(key, std::vector<uint8_t>{1});
    return result;
  }

  // Reports the run folder to the launcher of this machine, which resumes from there after a failure.
  void report_run_folder(const std::string& run) const;
  // Waits for all ranks, closes the connections and deletes this object. Call it at the end of a successful
  // run.
  void shutdown();

  // Reports that this rank has reached the named barrier. The watchdog ends the run if another rank does not
  // reach it within the timeout.
  void reached(const std::string& where) {
    if (watchdog) watchdog->reached(where);
  }
  // Restarts the timeout. Call it in phases in which ranks do different amounts of work, such as evaluation.
  void restart_timeout() {
    if (watchdog) watchdog->restart_timeout();
  }
  // Tells the watchdog that this rank may wait for other ranks without a call of this class: in the Reducer,
  // or in a CUDA graph.
  void may_wait() {
    if (watchdog) watchdog->waiting = true;
  }
  // Returns the seconds in collectives since the last call. The slowest rank has the smallest value.
  double collective_seconds() { return std::exchange(waiting, 0.0); }
  // Returns host, process id and GPU of a rank: "host, process 123".
  std::string location(int rank) const { return peers[rank].text(); }

 private:
  using Milliseconds = std::chrono::milliseconds;
  Milliseconds timeout() const { return Milliseconds(int64_t(1000 * seconds)); }
  std::string store_address() const {
    const bool is_ipv6 = info.host.find(':') != std::string::npos;
    return concat(is_ipv6 ? "[" : "", info.host, is_ipv6 ? "]:" : ":", info.port);
  }

  // Returns the error of a rank that does not find rank 0.
  std::string no_connection() const {
    return concat(
        "rank ", info.rank, " cannot connect to rank 0 at ", store_address(), " within ", seconds,
        " s; check that rank 0 runs, the host name, the firewall, and that no other program uses the "
        "port");
  }

  // most: seconds for the connection.
  c10::intrusive_ptr<c10d::Store> connect_store(bool serves, double most);
  void open_store();
  // Returns the value that a rank stored under `key`. Polls for up to `most` seconds; returns an empty string
  // if the key does not appear. Throws LostRank if rank 0, which hosts the store, has ended.
  std::string wait_for_key(const std::string& key, double most = std::numeric_limits<double>::infinity());
  // Exchanges host, process id and GPU of all ranks through the store. own: device of this rank. Throws
  // std::runtime_error if ranks are missing after the timeout or share a GPU.
  void exchange_peers(torch::Device own);

#ifdef YOLOX_CUDA
  // Returns a new NCCL communicator over all ranks. small: for many small tensors beside large ones, so it
  // has precedence and takes few of the GPU's processors.
  c10::intrusive_ptr<c10d::Backend> connect_nccl(const std::string& name, bool small);
#endif
  // Creates the process groups: gloo, shared memory on a single machine, and NCCL on a GPU.
  void connect(torch::Device where);

  // Scope guard of a collective: marks this rank as waiting for the watchdog, measures the time, and restarts
  // the timeout at its end.
  struct Wait {
    explicit Wait(Ranks& ranks)
        : ranks(ranks), within(ranks.watchdog && ranks.watchdog->waiting.exchange(true)) {}
    ~Wait();
    Ranks& ranks;
    const bool within;  // value of `waiting` before: true inside of backward
    const double start = now();
  };

  // Sets up `local`. Call it only if all ranks run on this machine.
  void share_memory();
  // Runs SharedMemoryGather::exchange(). Throws LostRank if a rank has ended.
  template <class Take>
  void exchange(const std::vector<double>& mine, const Take& take) {
    RECORD_USER_SCOPE("reduce");
    const Wait wait(*this);
    const int gone = local->exchange(mine.data(), mine.size(), take);
    if (gone >= 0)
      throw LostRank(concat("rank ", info.rank, " lost rank ", gone, " (", location(gone),
                            "), whose process ended; see the end of the output of that rank"));
  }
  // Waits for the collective that begin() starts. Throws LostRank if a connection breaks.
  template <class Begin>
  void collective(const Begin& begin) {
    RECORD_USER_SCOPE("reduce");
    const Wait wait(*this);
    try {
      if (const auto work = begin()) work->wait();
    } catch (const std::exception& e) {
      if (is_local_error(e)) throw;
      std::string what = e.what();
      what = what.substr(0, what.find('\n'));
      if (what[0] == '[' && what.find("] ") != std::string::npos) what = what.substr(what.find("] ") + 2);
      throw LostRank(concat("rank ", info.rank, " lost another rank (", what,
                            "); see the end of the output of that rank"));
    }
  }

  const double seconds;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> processes;
  c10::intrusive_ptr<c10d::Backend> sync_bn;  // on a GPU: the communicator of SyncBN
  std::vector<Peer> peers;                    // by rank; empty before the rendezvous
  int64_t turns = 0;
  double waiting = 0;
  torch::Device device = torch::kCPU;
  std::unique_ptr<SharedMemoryGather> local;
  std::unique_ptr<Watchdog> watchdog;
};

// All-reduces gradients (mean over the ranks) during backward: a bucket is reduced as soon as its last
// gradient is ready. Gradients are views of the buckets. A parameter that no rank used has no gradient. A
// rank that did not use a parameter contributes zero.
class GradientReducer {
 public:
  // params: in the order of use in the forward pass, so that the gradients of a bucket become ready together.
  GradientReducer(Ranks& ranks, const std::vector<Tensor>& params);
  // The same for a process group; null: does nothing.
  GradientReducer(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::vector<Tensor>& params);
  // Prepares the all-reduce. Call it only before the last backward() of an iteration, because the gradients
  // of earlier micro-batches accumulate on each rank without communication. outputs: the tensors that
  // backward() starts from.
  void before_backward(const std::vector<Tensor>& outputs);

 private:
  std::function<void()> may_wait = [] {};
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
};

// Runs program() like run_program() and returns the exit code of the process. program() returns the exit
// code. The exit code is kLostRank if this rank ended because it lost another rank, so that the launcher can
// find the rank that failed first, and kNeedsRestart for NeedsRestart. failed(): called before any other
// error is printed, but not for UsageError.
template <class Program>
int run_rank(
    const Program& program, const std::function<void()>& failed = [] {}) {
  int code = 0;
  const int error = run_program([&] {
    try {
      code = program();
    } catch (const UsageError&) {
      throw;
    } catch (const NeedsRestart&) {
      code = kNeedsRestart;
      throw;
    } catch (const std::exception& e) {
      if (is_lost_rank_error(e))
        code = kLostRank;
      else
        failed();
      throw;
    }
  });
  return code ? code : error;
}

}  // namespace yolox
