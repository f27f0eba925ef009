// Several ranks train as one: they meet, sum what has to be summed, and notice when one of them is missing.
// On torch's own engine, c10d: a TCP store where ranks find each other, NCCL between GPUs, gloo between CPUs,
// and its Reducer, which sums gradients in buckets while backward still computes others.
//
// Every rank runs the same program on its share of each batch. With the sums of SyncBN (sync_bn.hpp), of
// positives (step.hpp) and of gradients, a step is that of one rank with the whole batch, to rounding.
#pragma once
#include <ATen/record_function.h>
#include <c10/util/Logging.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#ifdef YOLOX_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/device.hpp"
#include "base/error.hpp"
#include "ddp/launch.hpp"
#include "ddp/rank_info.hpp"
#include "ddp/rendezvous.hpp"
#include "ddp/shared_memory.hpp"
#include "ddp/watchdog.hpp"
#include "layers/sync_bn.hpp"
#include "run/log.hpp"

namespace yolox {

using torch::Tensor;

// The ranks, as one of them sees them. With one rank everything here does nothing. Throws LostRank where
// another rank has gone.
class Ranks {
 public:
  // Meets the others within `seconds`, and lets none of them be missing for longer later on. Throws where
  // they do not come, naming them. device: of the tensors that are summed.
  Ranks(const Place& place, torch::Device device, double seconds);
  Ranks(const Ranks&) = delete;

  static inline bool met = false;  // this process has connections to others
  const Place place;
  bool first() const { return place.rank == 0; }
  bool alone() const { return place.world == 1; }
  // By what has started them, and by their own word.
  bool same_machine() const;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return processes; }

  // Sums over all ranks, in place. Tensors on the GPU are not waited for.
  void sum(Tensor& t);
  std::vector<double> sum(std::vector<double> values);
  // The largest of all ranks.
  double max(double mine);
  // Their mean over all ranks, in place; whole numbers are left as they are.
  void average(const std::vector<Tensor>& tensors);
  // What rank 0 has.
  bool of_first(bool mine) { return sum({double(first() && mine)})[0] > 0; }
  // The values of all ranks, in the order of ranks; each may have another number of them.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine);
  // All ranks take over what rank 0 has.
  void broadcast(const std::vector<Tensor>& tensors);
  std::string broadcast(const std::string& mine);
  // Waits until all ranks have come here.
  void meet() { max(0); }
  // Throws, naming a rank, if these tensors are not the same on all ranks, to the bit.
  void must_equal(const std::vector<Tensor>& tensors, const std::string& when);
  // Waits for all ranks; throws where one was told otherwise than rank 0: flag, value.
  void must_agree(const std::vector<std::pair<std::string, std::string>>& settings);
  // Does something on one rank of each machine, and then on the others there. For what is made once and then
  // found.
  template <class Work>
  auto first_here_then_others(const Work& work) {
    if (alone()) return work();
    const std::string here = peers[place.rank].host, key = concat("turn/", here, "/", turns++);
    const auto there = [&](const Peer& p) { return p.host == here; };
    const auto first = std::find_if(peers.begin(), peers.end(), there) - peers.begin();
    if (place.rank != first) told(key);
    auto result = work();
    if (place.rank == first) store->set(key, std::vector<uint8_t>{1});
    return result;
  }

  // Tells the launcher of this machine where a checkpoint is to go on from.
  void report(const std::string& run) const;
  // All is done, on every rank.
  void leave();

  // This rank has come to a place that every rank comes to. A rank that does not come within the time limit
  // ends the training.
  void at(const std::string& where) {
    if (watchdog) watchdog->at(where);
  }
  // It goes on, where ranks have unlike amounts of work.
  void still_at_work() {
    if (watchdog) watchdog->still_at_work();
  }
  // It is about to wait for others elsewhere than here: in backward.
  void reducing() {
    if (watchdog) watchdog->waiting = true;
  }
  // Seconds that this rank has waited for others since the last call: the slowest rank waits least.
  double waited() { return std::exchange(waiting, 0.0); }
  // Where a rank runs: "host, process 123".
  std::string who(int rank) const { return peers[rank].text(); }

 private:
  using Milliseconds = std::chrono::milliseconds;
  Milliseconds limit() const { return Milliseconds(int64_t(1000 * seconds)); }
  std::string where() const { return concat(place.host, ":", place.port); }

  c10::intrusive_ptr<c10d::Store> connect_store(bool serves);
  void open_store();
  // What a rank leaves under the key, once it has, or as long as is waited for it; empty: it has not.
  std::string told(const std::string& key, double most = std::numeric_limits<double>::infinity());
  // gpu: where this rank's is, empty for none.
  void wait_for_all(const std::string& gpu);

  // The address of this machine that the machine of rank 0 sees. A name of this machine often stands for the
  // loopback address (127.0.1.1), which no other machine reaches: then that of its first network.
  std::string own_address() const;
  std::string address_towards_first() const;
  void connect(torch::Device where);

  // Waiting for others: for so long, as the watchdog is told, too. At its end the rank has gone on.
  struct Wait {
    explicit Wait(Ranks& ranks)
        : ranks(ranks), within(ranks.watchdog && ranks.watchdog->waiting.exchange(true)) {}
    ~Wait();
    Ranks& ranks;
    const bool within;  // backward, which waits for others as well
    const double start = now();
  };

  // Where all ranks are on this machine.
  void share_memory();
  template <class Take>
  void exchange(const std::vector<double>& mine, const Take& take) {
    RECORD_USER_SCOPE("reduce");
    const Wait wait(*this);
    const int gone = local->exchange(mine.data(), mine.size(), take);
    if (gone >= 0)
      throw LostRank(concat("rank ", place.rank, " lost rank ", gone, " (", who(gone),
                            "), which has ended; what it said last tells why"));
  }
  template <class Begin>
  void collective(const Begin& begin) {
    RECORD_USER_SCOPE("reduce");
    const Wait wait(*this);
    try {
      if (const auto work = begin()) work->wait();
    } catch (const std::exception& e) {
      if (is_own_failure(e)) throw;
      std::string what = e.what();
      what = what.substr(0, what.find('\n'));
      if (what[0] == '[' && what.find("] ") != std::string::npos) what = what.substr(what.find("] ") + 2);
      throw LostRank(
          concat("rank ", place.rank, " lost another rank (", what, "); what that one said last tells why"));
    }
  }

  static uint64_t hash_of(const Tensor& tensor);

  const double seconds;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> processes;
  std::vector<Peer> peers;  // all ranks; empty before they have met
  int64_t texts = 0, turns = 0;
  double waiting = 0;
  torch::Device device = torch::kCPU;
  std::unique_ptr<LocalSums> local;
  std::unique_ptr<Watchdog> watchdog;
};

// Gradients on their way between ranks as 16-bit numbers: half the traffic, and what a sum of them loses.
struct Compress : c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
  Compress(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType type)
      : CppCommHookInterface(std::move(group)), type(type) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override;
  at::ScalarType type;
};

// Two warnings of the Reducer speak of microseconds: that all parameters are used, so that it need not look
// which are, and that weights one channel deep have strides that may be written in two ways.
struct QuietReducer : c10::WarningHandler {
  void process(const c10::Warning& warning) override;
};

// Sums the gradients of all ranks while backward computes them: those of a bucket are on their way as soon as
// the last of them is there. Afterwards they are the mean over the ranks; gradients are views of the buckets.
// A parameter that no rank has used keeps no gradient; one that some have not used has theirs as zero.
class Reduction {
 public:
  // params: in the order in which the model uses them, so that a bucket holds what backward comes to
  // together. compress: float32: none.
  Reduction(Ranks& ranks, const std::vector<Tensor>& params, at::ScalarType compress);
  // Before the backward() that completes the gradients, with what the loss was computed from; not before
  // those of earlier parts, whose gradients add up on each rank.
  void before_backward(const std::vector<Tensor>& outputs);

 private:
  Ranks& ranks;
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
};

// What main() of a program with ranks does: as run_program(), but program() gives the exit code, and by it
// the launcher tells a rank that has lost another from one that has failed. failed(): what is done for the
// latter, a mistake on the command line apart, before its error is said.
template <class Program>
int run_rank(
    const Program& program, const std::function<void()>& failed = [] {}) {
  int code = 0;
  const int error = run_program([&] {
    try {
      code = program();
    } catch (const UsageError&) {
      throw;
    } catch (const std::exception& e) {
      if (is_lost_rank(e))
        code = kLostRank;
      else
        failed();
      throw;
    }
  });
  std::cout.flush();
  // What is under way with ranks that are gone must not be waited for.
  if (error && Ranks::met) _exit(code ? code : error);
  return error ? error : code;
}

}  // namespace yolox
