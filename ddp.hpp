// Several ranks train as one: they meet, sum what has to be summed, and notice when one of them is missing.
// On torch's own engine, c10d: a TCP store where ranks find each other, NCCL between GPUs, gloo between CPUs,
// and its Reducer, which sums gradients in buckets while backward still computes others.
//
// Every rank runs the same program on its share of each batch. With the sums of SyncBN (sync_bn.hpp), of
// positives (step.hpp) and of gradients, a step is that of one rank with the whole batch, to rounding.
#pragma once
#include <ATen/record_function.h>
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
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "error.hpp"
#include "launch.hpp"
#include "run.hpp"
#include "sync_bn.hpp"

namespace yolox {

using torch::Tensor;

// Another rank has gone: this one is not to blame.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What torch throws when a connection to another rank breaks.
inline bool is_lost_rank(const std::exception& e) {
  const std::string what = e.what();
  for (const char* words : {"third_party/gloo", "Connection closed by peer", "Connection reset by peer",
                            "Broken pipe", "NCCL error", "NCCL communicator was aborted"})
    if (what.find(words) != std::string::npos) return true;
  return dynamic_cast<const LostRank*>(&e) != nullptr;
}

// The ranks, as one of them sees them. With one rank everything here does nothing. Throws LostRank where
// another rank has gone.
class Ranks {
 public:
  // Meets the others within `seconds`, and lets none of them be missing for longer later on. Throws where
  // they do not come, naming them. device: of the tensors that are summed.
  Ranks(const Place& place, torch::Device device, double seconds) : place(place), seconds(seconds) {
    if (place.world == 1) return;
    open_store();
    wait_for_all();
    connect(device);
    watchdog = std::thread([this] { watch(); });
  }
  // Only where all is well: what is under way with a rank that has gone would be waited for.
  ~Ranks() {
    {
      std::lock_guard lock(mutex);
      ended = true;
    }
    wake.notify_all();
    if (watchdog.joinable()) watchdog.join();
  }
  Ranks(const Ranks&) = delete;

  const Place place;
  bool first() const { return place.rank == 0; }
  bool alone() const { return place.world == 1; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return processes; }

  // Sums over all ranks, in place. Tensors on the GPU are not waited for.
  void sum(Tensor& t) {
    if (alone()) return;
    collective([&] {
      std::vector<Tensor> one{t};
      return processes->allreduce(one);
    });
  }
  std::vector<double> sum(std::vector<double> values) {
    if (alone()) return values;
    Tensor t = torch::from_blob(values.data(), {int64_t(values.size())}, torch::kDouble);
    sum(t);
    return values;
  }
  // The largest of all ranks.
  double max(double mine) {
    if (alone()) return mine;
    Tensor t = torch::full({1}, mine, torch::kDouble);
    collective([&] {
      std::vector<Tensor> one{t};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::MAX;
      return processes->allreduce(one, options);
    });
    return t.item<double>();
  }
  // What rank 0 has.
  bool of_first(bool mine) { return sum({double(first() && mine)})[0] > 0; }
  // The values of all ranks, in the order of ranks; each may have another number of them.
  std::vector<std::vector<double>> gather(const std::vector<double>& mine) {
    if (alone()) return {mine};
    std::vector<double> sizes(place.world);
    sizes[place.rank] = double(mine.size());
    sizes = sum(sizes);
    const auto most = int64_t(*std::max_element(sizes.begin(), sizes.end()));
    Tensor padded = torch::zeros({std::max<int64_t>(1, most)}, torch::kDouble);
    std::copy(mine.begin(), mine.end(), padded.data_ptr<double>());
    std::vector<std::vector<Tensor>> all(1);
    for (int r = 0; r < place.world; ++r) all[0].push_back(torch::empty_like(padded));
    collective([&] {
      std::vector<Tensor> one{padded};
      return processes->allgather(all, one);
    });
    std::vector<std::vector<double>> values;
    for (int r = 0; r < place.world; ++r) {
      const double* v = all[0][r].data_ptr<double>();
      values.emplace_back(v, v + int64_t(sizes[r]));
    }
    return values;
  }
  // All ranks take over what rank 0 has.
  void broadcast(const std::vector<Tensor>& tensors) {
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
  std::string broadcast(const std::string& mine) {
    if (alone()) return mine;
    const std::string key = concat("text/", texts++);
    if (first()) store->set(key, std::vector<uint8_t>(mine.begin(), mine.end()));
    wait_for(key, seconds);
    const auto bytes = store->get(key);
    return {bytes.begin(), bytes.end()};
  }
  // Throws, naming a rank, if these tensors are not the same on all ranks, to the bit.
  void must_equal(const std::vector<Tensor>& tensors, const std::string& when) {
    if (alone()) return;
    uint64_t hash = 0;
    for (const Tensor& t : tensors) hash = (hash ^ hash_of(t)) * 0x100000001b3;
    const auto all = gather({double(hash >> 32), double(hash & 0xffffffff)});
    for (int r = 0; r < place.world; ++r)
      check(all[r] == all[0], when, " rank ", r,
            " has other weights than rank 0: the ranks have not trained as one");
  }
  // Does something rank by rank on each machine: the first one there, then the others. For what is made once
  // and then found.
  template <class Work>
  auto first_here_then_others(const Work& work) {
    const std::string key = concat("turn/", place.rank - place.local_rank, "/", turns++);
    if (!alone() && place.local_rank > 0) wait_for(key, HUGE_VAL);  // checking images can take long
    auto result = work();
    if (!alone() && place.local_rank == 0) store->set(key, std::vector<uint8_t>{1});
    return result;
  }

  // Tells the launcher where the run is, so that it can resume it.
  void report(const std::string& run) const {
    const std::string fd = variable("YOLOX_REPORTS");
    if (!first() || fd.empty()) return;
    if (write(std::atoi(fd.c_str()), run.data(), run.size()) < 0) return;
    close(std::atoi(fd.c_str()));
  }
  // All is done, on every rank.
  void leave() {
    max(0);
    delete this;
  }

  // This rank is at a new step, batch or the like. From the first call on a rank that does not come within
  // the time limit ends the training.
  void at(const std::string& where) {
    if (alone()) return;
    std::lock_guard lock(mutex);
    here = where, moved = now(), ++count;
  }
  // Seconds that this rank has waited for others since the last call: the slowest rank waits least.
  double waited() { return std::exchange(waiting, 0.0); }
  // Where a rank runs: "host, process 123".
  const std::string& who(int rank) const { return names[rank]; }

 private:
  using Milliseconds = std::chrono::milliseconds;
  Milliseconds limit() const { return Milliseconds(int64_t(1000 * seconds)); }
  std::string where() const { return concat(place.host, ":", place.port); }

  c10::intrusive_ptr<c10d::Store> connect_store(bool serves) {
    c10d::TCPStoreOptions options;
    options.port = uint16_t(place.port), options.isServer = serves;
    options.waitWorkers = false, options.timeout = limit();
    if (serves && place.listening >= 0) options.masterListenFd = place.listening;
    auto tcp = c10::make_intrusive<c10d::TCPStore>(place.host, options);
    // Other attempts of torchrun may have left their keys.
    return c10::make_intrusive<c10d::PrefixStore>("yolox/" + variable("TORCHELASTIC_RESTART_COUNT"), tcp);
  }
  void open_store() {
    const bool serves = first() && !place.of_agent;
    try {
      store = connect_store(serves);
    } catch (const std::exception& e) {
      const std::string what = e.what();
      check(!serves, "rank 0 cannot listen on port ", place.port,
            ": is it taken? Give another --master HOST:PORT or MASTER_PORT (",
            what.substr(0, what.find('\n')), ")");
      fail("rank ", place.rank, " found no rank 0 at ", where(), " within ", seconds,
           " s: is it started, is the name right, does a firewall close the port?");
    }
  }
  // Until rank 0, or the first rank of this machine, has left something under the key.
  void wait_for(const std::string& key, double most) {
    for (const double start = now(); !store->check({key}); std::this_thread::sleep_for(Milliseconds(20)))
      if (now() - start > most) throw LostRank(concat(key, " did not come within ", most, " s"));
  }
  void wait_for_all() {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    const std::string me = concat(host, ", process ", getpid());
    store->set(concat("here/", place.rank), std::vector<uint8_t>(me.begin(), me.end()));
    const double start = now();
    for (int r = 0; r < place.world; ++r) {
      while (!store->check({concat("here/", r)}) && now() - start < seconds)
        std::this_thread::sleep_for(Milliseconds(20));
    }
    std::vector<std::string> missing;
    names.resize(place.world);
    for (int r = 0; r < place.world; ++r) {
      const std::string key = concat("here/", r);
      if (!store->check({key})) {
        missing.push_back(concat(r));
        continue;
      }
      const auto bytes = store->get(key);
      names[r] = {bytes.begin(), bytes.end()};
    }
    if (missing.empty()) return;
    std::string list;
    for (const auto& m : missing) list += (list.empty() ? "" : ", ") + m;
    fail(missing.size() == 1 ? "rank " : "ranks ", list, " of ", place.world, " did not come to ", where(),
         " within ", seconds, " s; rank 0 is on ", names[0],
         ". Are they started, with the same number of ranks?");
  }

  // The address of this machine that the machine of rank 0 sees.
  std::string own_address() const {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_DGRAM;
    if (getaddrinfo(place.host.c_str(), concat(place.port).c_str(), &hints, &found) != 0) return "127.0.0.1";
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
  void connect(torch::Device device) {
    using Kind = c10d::ProcessGroup::BackendType;
    processes = c10::make_intrusive<c10d::ProcessGroup>(store, place.rank, place.world);
    // The watchdog knows more of who is missing: it comes first.
    auto options = c10d::ProcessGroupGloo::Options::create(2 * limit());
    const std::string interface = variable("GLOO_SOCKET_IFNAME");
    options->devices.push_back(interface.empty()
                                   ? c10d::ProcessGroupGloo::createDeviceForHostname(own_address())
                                   : c10d::ProcessGroupGloo::createDeviceForInterface(interface));
    collective([&] {
      processes->setBackend(
          torch::kCPU, Kind::GLOO,
          c10::make_intrusive<c10d::ProcessGroupGloo>(store, place.rank, place.world, options));
      return c10::intrusive_ptr<c10d::Work>();
    });
    processes->setDefaultBackend(Kind::GLOO);
#ifdef YOLOX_CUDA
    if (device.is_cuda()) {
      auto nccl = c10d::ProcessGroupNCCL::Options::create();
      nccl->timeout = 2 * limit();
      processes->setBackend(
          torch::kCUDA, Kind::NCCL,
          c10::make_intrusive<c10d::ProcessGroupNCCL>(store, place.rank, place.world, nccl));
      processes->setDefaultBackend(Kind::NCCL);
    }
#endif
    (void)device;
  }

  template <class Begin>
  void collective(const Begin& begin) {
    RECORD_USER_SCOPE("reduce");
    const double start = now();
    in_collective = true;
    try {
      if (const auto work = begin()) work->wait();
    } catch (const std::exception& e) {
      const std::string what = e.what();
      throw LostRank(concat("rank ", place.rank, " lost another rank: ", what.substr(0, what.find('\n'))));
    }
    in_collective = false;
    waiting += now() - start;
  }

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

  // A thread of its own, with a connection of its own: the one that trains may be waiting for a rank that
  // never comes. Tells the others every second that this process runs, and where it is.
  void watch() {
    std::unique_lock lock(mutex);
    c10::intrusive_ptr<c10d::Store> own;
    for (int64_t beat = 0; !ended; ++beat) {
      wake.wait_for(lock, Milliseconds(std::min<int64_t>(1000, int64_t(200 * seconds))));
      if (ended || moved == 0) continue;
      const std::string text = concat(beat, " ", count, " ", in_collective, " ", here);
      const bool late = now() - moved > seconds;
      lock.unlock();
      try {
        if (!own) own = connect_store(/*serves=*/false), own->setTimeout(Milliseconds(5000));
        own->set(concat("at/", place.rank), std::vector<uint8_t>(text.begin(), text.end()));
        if (late) report_missing(*own);
      } catch (const std::exception&) {
        if (late) say(concat("rank 0 (", names[0], "), which does not answer"));
      }
      if (late) _exit(kLostRank);
      lock.lock();
    }
  }
  struct Beat {
    int64_t beat = 0, count = 0;
    bool in_collective = false;
    std::string where;
  };
  std::vector<Beat> beats(c10d::Store& own) const {
    std::vector<Beat> all(place.world);
    for (int r = 0; r < place.world; ++r) {
      if (!own.check({concat("at/", r)})) continue;
      const auto bytes = own.get(concat("at/", r));
      std::istringstream in(std::string(bytes.begin(), bytes.end()));
      in >> all[r].beat >> all[r].count >> all[r].in_collective >> std::ws;
      std::getline(in, all[r].where);
    }
    return all;
  }
  // Who keeps the others waiting: a process that does not run; else who is behind; else who does not wait.
  void report_missing(c10d::Store& own) {
    const auto before = beats(own);
    std::this_thread::sleep_for(Milliseconds(2500));
    const auto after = beats(own);
    int64_t least = count, most = 0;
    for (const Beat& b : after) least = std::min(least, b.count), most = std::max(most, b.count);
    const std::function<bool(int)> dead =
                                       [&](int r) {
                                         return r != place.rank && after[r].beat == before[r].beat;
                                       },
                                   behind = [&](int r) { return after[r].count == least && least < most; },
                                   busy = [&](int r) { return !after[r].in_collective; };
    for (const auto& [is, what] :
         {std::pair(dead, "which does not run any more"), std::pair(behind, "which is behind"),
          std::pair(busy, "which does not wait")}) {
      std::string late;
      for (int r = 0; r < place.world; ++r)
        if (is(r))
          late += concat(late.empty() ? "" : ", ", "rank ", r, " (", names[r], "; ", after[r].where, ")");
      if (!late.empty()) return say(concat(late, ", ", what));
    }
    say("one of the ranks, which all wait");
  }
  void say(const std::string& late) {
    std::string text;
    {
      std::lock_guard lock(mutex);
      text = concat("error: rank ", place.rank, " has been at ", here, " for ", seconds,
                    " s (--timeout), waiting for ", late, "\n");
    }
    if (write(2, text.data(), text.size()) < 0) return;
  }

  const double seconds;
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::ProcessGroup> processes;
  std::vector<std::string> names;
  int64_t texts = 0, turns = 0, count = 0;
  double waiting = 0;
  std::thread watchdog;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<bool> in_collective{false};
  bool ended = false;
  double moved = 0;  // when this rank was last at a new place; 0: never
  std::string here;
};

// Gradients on their way between ranks as 16-bit numbers: half the traffic, and what a sum of them loses.
struct Compress : c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
  Compress(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType type)
      : CppCommHookInterface(std::move(group)), type(type) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const Tensor whole = bucket.getBufferRef();
    std::vector<Tensor> small{(whole / state_->getSize()).to(type)};
    return state_->allreduce(small)->getFuture()->then(
        [whole](c10::ivalue::Future& done) -> c10::IValue {
          whole.copy_(done.value().toTensorVector()[0]);
          return std::vector<Tensor>{whole};
        },
        c10::ListType::ofTensors());
  }
  at::ScalarType type;
};

// Two warnings of the Reducer speak of microseconds: that all parameters are used, so that it need not look
// which are, and that weights one channel deep have strides that may be written in two ways.
struct QuietReducer : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    const std::string text = warning.msg();
    if (text.find("find_unused_parameters=True") == std::string::npos &&
        text.find("Grad strides do not match") == std::string::npos)
      c10::WarningHandler::process(warning);
  }
};

// Sums the gradients of all ranks while backward computes them: those of a bucket are on their way as soon as
// the last of them is there. Afterwards they are the mean over the ranks; gradients are views of the buckets.
// A parameter that no rank has used keeps no gradient; one that some have not used has theirs as zero.
class Reduction {
 public:
  // compress: float32: none.
  Reduction(const Ranks& ranks, const std::vector<Tensor>& params, at::ScalarType compress) {
    if (ranks.alone()) return;
    static QuietReducer quiet;
    c10::WarningUtils::set_warning_handler(&quiet);
    const size_t first = 1 << 20, others = 25 << 20;  // bytes of a bucket; a small one is on its way sooner
    const std::vector<bool> sparse(params.size(), false);
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(params, {first, others}, sparse));
    std::reverse(buckets.begin(), buckets.end());  // backward begins at the end
    reducer = std::make_shared<c10d::Reducer>(
        params, std::move(buckets), ranks.group(), sparse, others, /*find_unused_parameters=*/true,
        /*gradient_as_bucket_view=*/true, std::unordered_map<size_t, std::string>{}, first,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<int64_t>{});
    logger = std::make_shared<c10d::Logger>(reducer);  // the Reducer takes for granted that it has one
    reducer->set_logger(logger);
    if (compress != torch::kFloat)
      reducer->register_comm_hook(std::make_unique<Compress>(ranks.group(), compress));
  }
  // Before the backward() that completes the gradients, with what the loss was computed from; not before
  // those of earlier parts, whose gradients add up on each rank.
  void before_backward(const std::vector<Tensor>& outputs) {
    if (reducer) reducer->prepare_for_forward(), reducer->prepare_for_backward(outputs);
  }

 private:
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
};

}  // namespace yolox
