// SPDX-License-Identifier: Apache-2.0
// The folder dtr/ trains within a memory budget: dynamic tensor rematerialisation (DTR; Kirisame et al., ICLR
// 2021, arXiv 2006.09616). When a step would exceed the budget, DTR evicts storages, and rematerialises an
// evicted storage when an operation reads it. All results are the same bit for bit; the step takes longer.
//
// Dispatch. torch's dispatcher passes every operation through a list of dispatch keys. DTR registers a
// fallback for the key Fake, which ordinary tensors do not use and which lies below autograd and above the
// kernels. The key is enabled on this thread during a step, in forward and in backward. Outside of a step all
// tensors are ordinary, nothing is recorded, and DTR costs nothing.
//
// Data structures. A *cell* is one version of a storage: its contents from one write to the next. All views
// (aliases) of a storage share its cell. A *record* is an executed operation and its arguments, with cells in
// place of tensors. A cell points to the record that computes it. Only operations whose results depend on
// their arguments alone are recorded. An in-place operation ends the cell of its storage, which is pinned
// from then on.
//
// Eviction frees the memory of the program's storage, while the StorageImpl object stays, so that autograd
// and the program keep ordinary tensors. Rematerialisation repeats the cell's record, after it has
// rematerialised the evicted arguments of this record, and puts the memory back into the storage.
//
// Heuristic. DTR evicts the cell with the smallest h = cost / (size x staleness). cost: of the cell's record,
// plus the records that would have to be repeated before it. This is the evicted neighbourhood of the paper,
// limited to ancestors, at most 16. size: bytes of the storage. staleness: cost of all operations since the
// cell was last read.
//
// Pinned (never evicted): storages smaller than min_size; parameters, images and all other tensors that are
// older than the step; and
//   - outputs of backward operations, because repeating one would repeat all of backward up to it,
//   - storages that an operation has written in place, and outputs of random operations and of empty(),
//   - outputs of operations of the namespace yolox_once: collectives, and operations that update running
//     statistics,
//   - inputs and outputs of operations of unknown namespaces, which may write to any of them,
//   - inputs and outputs of operations on tensors without a storage, such as sparse ones.
// A pinned storage that a record reads stays alive as long as the record. If the program overwrites the
// storage, DTR copies the old contents first.
//
// Between two operations the program must not keep the data_ptr() of a large tensor nor write through it,
// unless it has called Dtr::running()->pin() on this tensor.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "base/device.hpp"
#include "base/torch.hpp"

namespace yolox {

namespace dtr_detail {  // record.hpp
struct Cell;
struct OpInfo;
struct Record;
constexpr auto kKey = c10::DispatchKey::Fake;
}  // namespace dtr_detail

// Settings of a Dtr object.
struct DtrSettings {
  // The budget: bytes that the device's allocator may have allocated, including the weights. 0: DTR is off;
  // infinity: no limit.
  double budget = 0;
  // If set, returns the budget in bytes before each step and replaces `budget`. Arguments: the bytes
  // allocated now, and the number of out-of-memory errors in the previous step. Exceeding this budget is not
  // an error.
  std::function<double(double, int64_t)> automatic = {};
  int64_t min_size = 64 << 10;         // bytes; smaller storages are pinned
  c10::DeviceType device = c10::kCPU;  // storages on other devices are pinned
  // Returns the allocated bytes. Default: those of CountingAllocator, on the CPU.
  std::function<AllocatedBytes()> used = {};
  // Estimates the cost of an operation, in any unit, from its arguments and results. Default: the measured
  // seconds on the host.
  std::function<double(const c10::OperatorHandle&, c10::ArrayRef<c10::IValue>, c10::ArrayRef<c10::IValue>)>
      cost = {};
};

// Statistics of one step.
struct DtrStep {
  double budget = 0;  // bytes
  double limit = 0;  // bytes; above `budget` if the step did not fit in the budget and used this much instead
  double peak = 0;   // maximum of the allocated bytes
  int64_t operations = 0;           // executed, without repetitions
  int64_t evictions = 0;            // evictions
  int64_t rematerialisations = 0;   // operations repeated to rematerialise a storage
  double cost = 0, remat_cost = 0;  // of all operations and of all repetitions, in the unit of the cost
  int64_t out_of_memory_count = 0;  // out-of-memory errors that happened within the budget

  // Returns the cost of the step relative to a step without DTR, at least 1.
  double slowdown() const { return cost > 0 ? (cost + remat_cost) / cost : 1; }
};

// The DTR runtime. A training has one object, and only one run() may be active in the process. The device
// threads of autograd take part, because autograd passes the enabled dispatch key on to these threads.
class Dtr {
 public:
  // On the CPU, installs CountingAllocator. Memory allocated before is not counted, so construct this object
  // before the model.
  explicit Dtr(const DtrSettings& s = {});
  Dtr(const Dtr&) = delete;
  ~Dtr();

  bool on() const { return settings.budget > 0 || settings.automatic; }
  const DtrStep& step() const { return done; }  // statistics of the latest step
  // Returns "N times the computation", and says if the costs behind this factor are estimates.
  std::string slowdown_text(double slowdown) const;
  // Names the operations of the latest step whose results are pinned although backward may read them:
  // in-place, random and unknown ones. Returns the end of a line for the log, or "".
  std::string pinned_operations() const;

  // Runs body(), a step within the budget, and returns its result. All tensors that exist afterwards are
  // ordinary tensors with their contents. If the budget is too small, the step uses more memory instead of
  // failing: step().limit is then above the budget, and check_budget() throws. Without a budget, only calls
  // body(). If body() throws, tensors of the step may have lost their contents.
  template <class Body>
  auto run(const Body& body) -> decltype(body()) {
    if (!on()) return body();
    const c10::impl::IncludeDispatchKeyGuard key(dtr_detail::kKey);
    begin();
    try {
      if constexpr (std::is_void_v<decltype(body())>) {
        body();
        finish();
      } else {
        auto result = body();
        finish();
        return result;
      }
    } catch (...) {
      end_after_exception();
      throw;
    }
  }

  // Evicts until `bytes` of the budget are free. Raises the limit of the step if nothing more can be evicted.
  void make_room(double bytes);
  // Evicts all evictable cells; for tests.
  void evict_all();
  // Rematerialises the storage of `t` and pins it until the step ends.
  void pin(const torch::Tensor& t);

  // Throws UsageError with a budget that is probably sufficient if the latest step exceeded its budget.
  // limit: bytes that the step needed, on this rank or on another one.
  void check_budget(double limit) const;

  // Executes an operation: makes its arguments resident, calls the kernel and records the operation. Called
  // by the fallback of the dispatcher, on any thread of the step.
  void call(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack);

  // Returns the object whose run() is active, or null.
  static Dtr* running() { return now_running; }

  // Factor by which a step may exceed its budget, because allocators round sizes up and threads allocate at
  // the same time.
  static constexpr double kSlack = 1.01;
  // Ratio of the costs of rematerialisation and of the step at which a step raises its limit.
  static constexpr double kMaxRematRatio = 4;

 private:
  using Cell = dtr_detail::Cell;
  using IValue = c10::IValue;
  using OpInfo = dtr_detail::OpInfo;
  using Record = dtr_detail::Record;
  using Stack = torch::jit::Stack;
  using StorageImpl = c10::StorageImpl;
  using StoragePtr = c10::intrusive_ptr<StorageImpl>;
  using Tensor = torch::Tensor;

  // A tensor argument of an operation that is about to run.
  struct Input {
    StorageImpl* storage;  // null: the tensor has no storage
    const Tensor* tensor;
    bool written;     // the operation writes to the tensor
    bool statistics;  // running statistics of a batch norm, which the operation updates
  };
  using Inputs = c10::SmallVector<Input, 8>;

  // Locks cells in its scope. A locked cell is not evicted, because an operation reads it.
  struct Locks {
    c10::SmallVector<Cell*, 8> cells;
    Locks() = default;
    Locks(const Locks&) = delete;
    ~Locks();
  };

  // ---- a step

  void begin();
  // Rematerialises all evicted storages that the program still holds, and ends the step.
  void finish();
  // Ends a step after an exception. Rematerialises the storages that the program still holds; a storage for
  // which this fails throws when the program reads it.
  void end_after_exception();
  void end();
  // Returns the cells that have a record and whose storage the program still holds.
  std::vector<std::shared_ptr<Cell>> program_cells() const;

  // ---- cells

  // Returns the current cell of a storage, or null.
  Cell* cell_of(StorageImpl* storage) const;
  std::shared_ptr<Cell> new_cell(StorageImpl* storage);
  // Returns the cell that a new record reads. A pinned cell, which has no record, holds its storage until the
  // last record that reads the cell is destroyed.
  std::shared_ptr<Cell> cell_to_read(StorageImpl* storage);
  // Detaches the cell from its storage, because an operation writes new contents. Copies the old contents of
  // a pinned cell that a record reads, so call it before the write. For a cell with a record, which can be
  // rematerialised, call it after the write.
  void end_cell(StorageImpl* storage);
  // Erases the cells of storages that the program has freed, and pinned cells that no record reads any more.
  void sweep();
  // Returns the time that staleness is measured in: the cost of all operations since the start of the step.
  double clock() const { return done.cost + done.remat_cost; }

  // ---- eviction

  // Keeps as many bytes of the budget free as the largest allocation of an operation needs. Only for a GPU,
  // whose allocator does not call make_room() before it allocates.
  void keep_reserve() { make_room(on_cpu ? 0 : std::max(largest_allocation_before, largest_allocation)); }

  // Returns the cost of rematerialising a cell: of its record and of its evicted ancestors. Visits at most
  // `most` ancestors.
  static double recompute_cost(const Cell& cell, int& most);
  // Evicts the cell with the smallest h. Returns false if no cell is evictable.
  bool evict_one();

  // ---- rematerialisation

  // Rematerialises a cell and its evicted ancestors.
  void make_resident(Cell& cell);
  // Rematerialises a cell and locks it.
  void use(Cell& cell, Locks& locks);
  // Repeats an operation whose arguments are resident. Moves the memory of its evicted results into the
  // program's storages, or into the cells of those that the program has freed.
  void rematerialise(Record& r);

  // ---- an operation

  // Calls the kernel with the arguments on top of the stack. given: the same arguments. If memory runs out,
  // evicts more than the budget requires and calls the kernel again, unless `repeatable` is false.
  // repeatable: a failed call changes nothing but `statistics`, which get their old values back before the
  // next call.
  void compute(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
               bool repeatable, c10::ArrayRef<Tensor> statistics, Stack& stack);
  // Returns the properties of an operation; cached.
  const OpInfo& info_of(const c10::OperatorHandle& operation);
  // Returns the tensor arguments. Ends pinned cells that the operation is about to overwrite.
  Inputs inputs_of(const OpInfo& info, c10::ArrayRef<IValue> given);
  std::shared_ptr<Record> record_of(const c10::OperatorHandle& operation, c10::DispatchKeySet keys,
                                    c10::ArrayRef<IValue> given, const Inputs& inputs, double cost);
  // Returns true if a cell of this storage could be evicted.
  bool is_large(StorageImpl* storage) const {
    return storage && storage->device_type() == settings.device &&
           int64_t(storage->nbytes()) >= settings.min_size;
  }

  inline static std::atomic<Dtr*> now_running{nullptr};

  DtrSettings settings;
  bool on_cpu = false;
  DtrStep done;
  std::map<std::string, double> pinned_bytes;  // of this step, by operation; see pinned_operations()
  std::atomic<double> limit{0};  // bytes; the budget, or more if the step does not fit in the budget
  std::atomic<double> peak{0};   // bytes; maximum in this step
  double largest_allocation = 0,
         largest_allocation_before = 0;  // bytes; largest allocation of an operation, and in the last step
  double cost_at_last_raise = 0;         // done.remat_cost when the limit was last raised
  std::recursive_mutex mutex;
  std::vector<Cell*> evictable;  // evictable cells, locked ones included; must outlive `cells`
  std::unordered_map<StorageImpl*, std::shared_ptr<Cell>> cells;   // the current cell of each storage
  std::unordered_map<const void*, std::unique_ptr<OpInfo>> known;  // by schema
};

// Returns the settings for --dtr. bytes: the budget; infinity: the free memory of the device, with a margin;
// 0: DTR is off. ranks_here: number of ranks that share the memory of this machine.
DtrSettings dtr_settings(double bytes, torch::Device device, int ranks_here);

}  // namespace yolox
