// Training within a budget of memory: dynamic tensor rematerialisation (DTR; Kirisame et al., ICLR 2021,
// arXiv 2006.09616). Where a step would take more than the budget, results of earlier operations are dropped,
// those first that are cheap to compute again, large and long unused, and computed again when they are next
// read. The numbers stay the same to the bit; the step takes longer.
//
// How operations are seen. torch's dispatcher takes every operation through a list of keys. A fallback for
// one of them (Fake, which plain tensors do not use; below autograd, above the kernels) is switched on for
// this thread during a step, forward and backward. Outside of a step all tensors are plain, nothing is
// recorded, and nothing here costs anything.
//
// What is kept of them. A *cell* is the contents of a storage from one write to the next; views share it. A
// *record* is an operation that was done: its arguments, with cells in place of tensors, and the state of the
// random generator. A cell knows the record that can compute it again. An operation in place ends one cell
// and begins the next. To drop a cell is to take the memory out of the program's storage, which itself stays
// where it is, so that autograd and the program keep ordinary tensors; to bring it back is to do its record
// again, after those of its arguments that are not here either, and to put the memory back in.
//
// Which one is dropped: the one with the least h = cost / (bytes x staleness). cost: of its record and of
// those that would have to be done again before it; staleness: what was computed since it was last read.
//
// What is never dropped: storages smaller than min_size; parameters, images and whatever else was there
// before the step; and what
//   - backward computes: to compute a gradient again takes all of backward up to it,
//   - operations give that resize what they are given, or write to what is never dropped (not twice),
//   - operations of the namespace yolox_once give: collectives, and those that move running statistics,
//   - operations of unknown namespaces are given or give: they may write to anything,
//   - empty() gives, until an operation overwrites all of it: the program may fill it through data_ptr().
// Of these, what a record reads is held as long as the record is, and copied before it is overwritten.
//
// The program must not keep the data_ptr() of a large tensor over an operation, nor write through it, unless
// it calls dtr_pin() first.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "dtr/counting_allocator.hpp"
#include "dtr/record.hpp"

namespace yolox {

struct DtrSettings {
  // Bytes that the device's allocator may have given out, weights and all; 0: off, infinity: no limit.
  double budget = 0;
  // Instead of it, asked before each step: the budget by the bytes that are given out now, and how often
  // memory has run out in the step before. Where it is not kept, that is no error.
  std::function<double(double, int64_t)> automatic = {};
  bool beyond_start = false;           // the budget is for what a step adds to what is there when it begins
  int64_t min_size = 64 << 10;         // bytes; smaller storages are never dropped
  c10::DeviceType device = c10::kCPU;  // storages elsewhere are never dropped
  double most_again = 4;  // too small a budget: computing again costs so many times the step itself
  std::function<GivenOut()> used = {};  // left out: on the CPU
  // What operations cost, in any unit: called before each with its arguments, and what it gives after it,
  // with its results. Left out: the seconds that the host takes.
  std::function<std::function<double(c10::ArrayRef<c10::IValue>)>(const c10::OperatorHandle&,
                                                                  c10::ArrayRef<c10::IValue>)>
      cost = {};
};

// Memory at a moment of a step.
struct MemorySample {
  double seconds;  // since its beginning
  double with;     // bytes that the device's allocator has given out
  double without;  // what they would be, had nothing been dropped
};

// What a step has done.
struct DtrStep {
  double budget = 0;  // bytes
  double limit = 0;   // above the budget: that was too small, and the step was done within this (bytes)
  double peak = 0;    // bytes that were given out at most
  int64_t operations = 0, recorded = 0, dropped = 0, again = 0;
  double cost = 0, cost_again = 0;  // in the unit of the cost
  double seconds_again = 0;
  int64_t lacks = 0;                           // times that memory has run out, within the budget
  std::map<std::string, int64_t> pinned = {};  // large results of forward that are never dropped: what, why
  std::vector<MemorySample> samples = {};      // after each operation, if asked for
  double backward = 0;                         // when that began, seconds, if so

  // How many times more was computed than without.
  double slowdown() const { return cost > 0 ? (cost + cost_again) / cost : 1; }
};

// What several have done.
struct DtrSteps {
  double steps = 0, peak = 0, dropped = 0, again = 0, cost = 0, cost_again = 0;

  void add(const DtrStep& s);
  // Of what was computed, the part that was computed again.
  double share() const { return cost_again / std::max(cost + cost_again, 1e-30); }
};

// One object for a training; run() is for one step at a time. Threads that autograd has for its devices take
// part by themselves.
class Dtr {
 public:
  // On the CPU, counts what is allocated from here on: weights too, if they are made later.
  explicit Dtr(const DtrSettings& s = {});
  Dtr(const Dtr&) = delete;

  bool on() const { return settings.budget > 0 || settings.automatic; }
  const DtrStep& step() const { return done; }  // the latest
  bool takes_samples = false;

  // Does body() within the budget and gives its result; what is left afterwards are plain tensors. Where the
  // budget is too small the step is done all the same, with more: step().limit tells, and check_budget().
  template <class Body>
  auto run(const Body& body) -> decltype(body()) {
    if (!on()) return body();
    Running running(*this);
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      running.finish();
    } else {
      auto result = body();
      running.finish();
      return result;
    }
  }

  // Drops what it takes to have so many bytes of the budget free.
  void make_room(double bytes);
  // All that can be dropped; for tests.
  void drop_all();
  // This tensor is here and stays, until the step ends.
  void pin(const torch::Tensor& t);

  // An error, naming one that may do, where the budget of the latest step was too small; limit: what that
  // took, bytes, or another rank's.
  void check_budget(double limit) const;
  void check_budget() const { check_budget(done.limit); }

  // An operation that the dispatcher hands over.
  void call(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  static Dtr* running() { return now_running; }

  // What a step may take more than its budget: allocators round, and threads allocate at the same time.
  static constexpr double kSlack = 1.01;

 private:
  using About = dtr_detail::About;
  using Argument = dtr_detail::Argument;
  using Cell = dtr_detail::Cell;
  using IValue = c10::IValue;
  using Record = dtr_detail::Record;
  using Result = dtr_detail::Result;
  using Stack = torch::jit::Stack;
  using StorageImpl = c10::StorageImpl;
  using StoragePtr = dtr_detail::StoragePtr;
  using Tensor = torch::Tensor;
  using Time = std::chrono::steady_clock::time_point;

  // From the begin of a step to its end, also where that is an exception.
  struct Running {
    explicit Running(Dtr& d) : dtr(d) { dtr.begin(); }
    ~Running() {
      if (!finished) dtr.abandon();
    }
    void finish();
    Dtr& dtr;
    bool finished = false;
    c10::impl::IncludeDispatchKeyGuard key{dtr_detail::kKey};
  };

  // A tensor that an operation is about to be given.
  struct Input {
    StorageImpl* storage;  // null: it has none
    Cell* cell;            // null: a constant that no record has read
    const Tensor* tensor;
    size_t bytes;  // of the storage
    bool written, statistics, overwritten;
  };
  using Inputs = c10::SmallVector<Input, 8>;

  // While this lives, make_room() does nothing.
  struct NothingDropped {
    explicit NothingDropped(Dtr& d) : dtr(d), before(std::exchange(d.nothing_dropped, true)) {}
    ~NothingDropped() { dtr.nothing_dropped = before; }
    Dtr& dtr;
    bool before;
  };

  // Cells that must not be dropped while they are read.
  struct Locks {
    c10::SmallVector<Cell*, 8> cells;
    Locks() = default;
    Locks(Locks&&) = default;
    Locks(const Locks&) = delete;
    ~Locks() { release(); }
    void add(Cell& cell) {
      ++cell.locks;
      cells.push_back(&cell);
    }
    void release();
  };

  // ---- a step

  void begin();
  void finish();
  // After an exception: what is left has its contents, or throws when it is read.
  void abandon();
  void end();
  // What the program still has and could be dropped, or is.
  std::vector<std::shared_ptr<Cell>> left() const;

  // ---- cells

  Cell* cell_of(StorageImpl* storage) const;
  std::shared_ptr<Cell> new_cell(StorageImpl* storage);
  // For a record to read. What nothing can compute is held until the record goes.
  std::shared_ptr<Cell> cell_to_read(StorageImpl* storage);
  // The program's storage is about to have other contents, or has them already, if a record computes these.
  void end_cell(StorageImpl* storage);
  // Forgets what the program has dropped, and constants that no record reads any more.
  void sweep();
  double clock() const { return done.cost + done.cost_again; }

  // ---- dropping

  // A GPU's allocator does not say what it is about to take: something is kept ready for it.
  void keep_room() { make_room(on_cpu ? 0 : std::max(largest_before, largest)); }

  // What it would take to compute it, not looking back further than so many records.
  static double cost_of(const Cell& cell, int& most);
  bool drop_one();

  // ---- computing again

  struct Frame {  // a record that waits for its arguments
    explicit Frame(std::shared_ptr<Record> r) : record(std::move(r)) {}
    std::shared_ptr<Record> record;
    size_t next = 0;
    Locks locks;
  };
  // Without recursion: chains may be longer than the stack is deep.
  void restore(const Cell& wanted);

  // Memory with a cell's contents, to be overwritten: its own if nobody else needs that.
  static StoragePtr to_overwrite(Cell& cell, const Record& by);

  void do_again(Record& r);
  void put_back(Cell& cell, const StoragePtr& storage);

  // ---- an operation

  // Where memory runs out, more is dropped than the budget asks for, and the operation is done anew, if it
  // may be: if what it has done before it failed has changed nothing.
  void compute(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
               bool anew, Stack& stack);
  void take_sample();
  const About& about(const c10::OperatorHandle& operation);
  Inputs inputs_of(const About& info, c10::ArrayRef<IValue> given) const;
  bool keep_overwritten(Inputs& inputs);
  void lock(const Inputs& inputs, Locks& locks);
  std::shared_ptr<Record> record_of(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                                    c10::ArrayRef<IValue> given, const Inputs& inputs);
  void note_results(const Inputs& inputs, c10::ArrayRef<IValue> results, bool empty, const std::string& name,
                    const char* why, const std::function<std::shared_ptr<Record>()>& record);

  static double seconds_since(Time start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  inline static std::atomic<Dtr*> now_running{nullptr};

  DtrSettings settings;
  bool on_cpu = false, nothing_dropped = false;
  DtrStep done;
  std::atomic<double> limit{0}, peak{0};   // bytes: the budget, or what it takes; the most so far
  double largest = 0, largest_before = 0;  // what one operation has added at most, bytes; in the step before
  Time started;
  double forgiven = 0;  // cost of computing again, within less than there is now
  std::recursive_mutex mutex;
  std::vector<Cell*> droppable;  // those that are here and may be dropped; outlives `cells`
  std::unordered_map<StorageImpl*, std::shared_ptr<Cell>> cells;  // what storages of the program have
  std::unordered_map<const void*, std::unique_ptr<About>> known;  // by schema
};

// Before code that reads or writes a large tensor through data_ptr(): it is here, and stays until the step
// ends. Does nothing where there is no budget.
inline void dtr_pin(const torch::Tensor& t) {
  if (Dtr* dtr = Dtr::running()) dtr->pin(t);
}

}  // namespace yolox
