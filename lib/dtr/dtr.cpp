// SPDX-License-Identifier: Apache-2.0
#include "dtr/dtr.hpp"

#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/program.hpp"
#include "base/text.hpp"
#include "dtr/budget.hpp"
#include "dtr/record.hpp"

namespace yolox {

namespace dtr_detail {

Cell::~Cell() {
  leave();
  --alive;
}

void Cell::enter(std::vector<Cell*>& list) {
  if (evictable) return;
  evictable = &list;
  list.push_back(this);
}

void Cell::leave() {
  if (evictable) std::erase(*evictable, this);
  evictable = nullptr;
}

OpInfo::OpInfo(const OperatorHandle& operation) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  arguments = schema.arguments().size();
  returns = schema.returns().size();
  bool moves = true;
  for (const char* word : {"backward", "no_update", "no_training"})
    moves &= name.find(word) == std::string::npos;
  for (const auto& a : schema.arguments()) {
    // Batch norms of torch update these in training and do not read them there. Most schemas do not declare
    // the write.
    statistics.push_back((a.name() == "running_mean" || a.name() == "running_var") && moves);
    written.push_back(a.alias_info() && a.alias_info()->isWrite() && !statistics.back());
    if (a.name() == "training" || a.name() == "use_input_stats") training = int(written.size()) - 1;
  }
  unknown = !name.starts_with("aten::") && !name.starts_with("yolox::") && !name.starts_with("yolox_once::");
  changes = unknown || operation.hasTag(at::Tag::nondeterministic_seeded) ||
            std::find(written.begin(), written.end(), true) != written.end();
  // The program may fill the memory of empty() through data_ptr().
  once = changes || name.starts_with("yolox_once::") || name.starts_with("aten::empty") ||
         name.starts_with("aten::new_empty") || name.starts_with("aten::_empty");
  // Composite operations, such as reshape, may copy.
  view = name.starts_with("aten::") && !changes && returns > 0 &&
         !operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  for (const auto& r : schema.returns()) view &= r.alias_info() && !r.alias_info()->isWrite();
}

StorageImpl* storage_of(const Tensor& t) {
  return t.defined() && t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                                        : nullptr;
}

Tensor on_storage(const Tensor& t, const StoragePtr& storage) {
  static const c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU));
  Tensor copy(t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  copy.unsafeGetTensorImpl()->set_storage_keep_dtype(storage ? c10::Storage(storage) : none);
  return copy.set_requires_grad(t.requires_grad());  // some kernels choose an algorithm by it
}

StoragePtr copy_of(const StoragePtr& storage) {
  const NotRecorded unseen;
  const auto bytes = int64_t(storage->nbytes());
  const Tensor flat = torch::empty({0}, torch::TensorOptions(torch::kByte).device(storage->device()));
  flat.set_(c10::Storage(storage), 0, {bytes}, {1});
  return share(storage_of(flat.clone()));
}

}  // namespace dtr_detail

using dtr_detail::Result;

Dtr::Dtr(const DtrSettings& s) : settings(s) {
  if (!on() || settings.used) return;
  auto& allocator = CountingAllocator::get();
  settings.used = [&allocator] { return AllocatedBytes{double(allocator.live())}; };
  on_cpu = true;
}

Dtr::~Dtr() = default;

Dtr::Locks::~Locks() {
  for (Cell* cell : cells) --cell->locks;
}

void Dtr::make_room(double bytes) {
  const double used = settings.used().now;
  if (used > peak) peak = used;
  if (used + bytes <= limit) return;
  // If another thread holds the mutex, an operation is running, and this thread may be one of its workers.
  // Waiting for the mutex would be a deadlock.
  const std::unique_lock<std::recursive_mutex> lock(mutex, std::try_to_lock);
  if (!lock) return;
  while (settings.used().now + bytes > limit && evict_one()) continue;
  // On a GPU, `bytes` is a reserve and not an allocation, so that the limit does not include it.
  limit = std::max(limit.load(), settings.used().now + (on_cpu ? bytes : 0));
}

void Dtr::evict_all() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  while (evict_one()) continue;
}

void Dtr::pin(const torch::Tensor& t) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  const auto found = cells.find(dtr_detail::storage_of(t));
  if (found == cells.end()) return;
  Cell& cell = *found->second;
  make_resident(cell);
  cell.leave();
  cell.record.reset();
  if (found->second.use_count() > 1)
    cell.held_memory = cell.program.lock();
  else
    cells.erase(found);
}

void Dtr::check_budget(double limit) const {
  const auto mb = [](double bytes) { return std::ceil(bytes / 1e5) / 10; };
  usage_check(settings.automatic || limit <= kSlack * done.budget, "the memory budget of ", mb(done.budget),
              " MB is too small for this step; ", mb(1.02 * limit), " MB may be enough");
}

std::string Dtr::slowdown_text(double slowdown) const {
  return concat(rounded(slowdown), " times the computation", settings.cost ? " by estimated costs" : "");
}

std::string Dtr::pinned_operations() const {
  std::string text;
  for (const auto& [name, bytes] : pinned_bytes)
    text += concat(text.empty() ? "; never evicted: results of " : ", ", name, " (", short_bytes(bytes), ")");
  return text;
}

void Dtr::begin() {
  check(!now_running, "a step with --dtr began while another one was running");
  const int64_t out_of_memory = std::exchange(done, {}).out_of_memory_count;
  const double used = settings.used().now;
  done.budget = settings.automatic ? settings.automatic(used, out_of_memory) : settings.budget;
  limit = done.budget;
  peak = used;
  cost_at_last_raise = 0;
  largest_allocation_before = std::exchange(largest_allocation, 0);
  pinned_bytes.clear();
  now_running = this;
  if (!on_cpu) return;
  CountingAllocator::get().before_allocation = [](int64_t bytes) {
    // Other threads, such as those of the data loader, allocate at any time and must not evict.
    Dtr* dtr = now_running;
    if (dtr && c10::impl::tls_is_dispatch_key_included(dtr_detail::kKey)) dtr->make_room(double(bytes));
  };
}

void Dtr::finish() {
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    Locks kept;  // so that rematerialising one cell does not evict another one
    for (const auto& cell : program_cells()) use(*cell, kept);
  }
  end();
}

void Dtr::end_after_exception() {
  {
    const std::lock_guard<std::recursive_mutex> lock(mutex);
    limit = std::numeric_limits<double>::infinity();
    for (const auto& cell : program_cells()) try {
        make_resident(*cell);
      } catch (const std::exception&) {
        if (const auto storage = cell->program.lock())
          storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
              "this tensor was evicted by DTR in a step that has failed");
      }
  }
  end();
}

void Dtr::end() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (on_cpu) CountingAllocator::get().before_allocation = nullptr;
  now_running = nullptr;
  cells.clear();
  done.peak = peak;
  done.limit = std::max<double>(limit, peak);
}

std::vector<std::shared_ptr<Dtr::Cell>> Dtr::program_cells() const {
  std::vector<std::shared_ptr<Cell>> all;
  for (const auto& [storage, cell] : cells)
    if (!cell->pinned() && !cell->program.expired()) all.push_back(cell);
  return all;
}

Dtr::Cell* Dtr::cell_of(StorageImpl* storage) const {
  const auto found = cells.find(storage);
  return found == cells.end() ? nullptr : found->second.get();
}

std::shared_ptr<Dtr::Cell> Dtr::new_cell(StorageImpl* storage) {
  auto cell = std::make_shared<Cell>();
  cell->program = dtr_detail::WeakStorage(dtr_detail::share(storage));
  cell->bytes = int64_t(storage->nbytes());
  cell->last_access = clock();
  return cells[storage] = cell;
}

std::shared_ptr<Dtr::Cell> Dtr::cell_to_read(StorageImpl* storage) {
  Cell* cell = cell_of(storage);
  const auto shared = cell ? cell->shared_from_this() : new_cell(storage);
  if (!shared->pinned() || shared->held_memory) return shared;
  // Memory of from_blob() may be freed before its storage, so that the record needs a copy.
  const bool borrowed = storage->nbytes() > 0 && !storage->data_ptr().get_context();
  shared->held_memory =
      borrowed ? dtr_detail::copy_of(dtr_detail::share(storage)) : dtr_detail::share(storage);
  return shared;
}

void Dtr::end_cell(StorageImpl* storage) {
  const auto found = cells.find(storage);
  if (found == cells.end()) return;
  const auto cell = std::move(found->second);
  cells.erase(found);
  if (cell.use_count() > 1 && cell->pinned()) cell->held_memory = dtr_detail::copy_of(cell->storage());
  cell->program = dtr_detail::WeakStorage(StoragePtr());
  cell->leave();
}

void Dtr::sweep() {
  for (auto i = cells.begin(); i != cells.end();) {
    const Cell& cell = *i->second;
    const bool over = cell.kept_alive() ? i->second.use_count() == 1 : cell.program.expired();
    i = over && cell.locks == 0 ? cells.erase(i) : std::next(i);
  }
}

double Dtr::recompute_cost(const Cell& cell, int& most) {
  double cost = cell.record->cost;
  for (const auto& argument : cell.record->cells)
    if (argument && !argument->resident() && argument->record && --most >= 0)
      cost += recompute_cost(*argument, most);
  return cost;
}

bool Dtr::evict_one() {
  Cell* best = nullptr;
  double least = 0;
  for (size_t i = 0; i < evictable.size();) {
    Cell& cell = *evictable[i];
    if (!cell.resident()) {
      cell.leave();  // the program has freed the storage
      continue;
    }
    ++i;
    if (cell.locks > 0) continue;
    int most = 16;
    const double staleness = std::max(clock() - cell.last_access, 1e-9);
    const double h = recompute_cost(cell, most) / (double(cell.bytes) * staleness);
    if (best && h >= least) continue;
    best = &cell;
    least = h;
  }
  if (!best) return false;
  ++done.evictions;
  best->leave();
  if (best->held_memory) {
    best->held_memory.reset();
  } else if (const auto storage = best->program.lock()) {
    best->evicted = true;
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  }
  return true;
}

void Dtr::make_resident(Cell& cell) {
  if (cell.resident()) return;
  const dtr_detail::NotRecorded unseen;
  const std::shared_ptr<Record> record = cell.record;
  check(record != nullptr, "DTR: an argument of an operation is evicted and has no record");
  Locks locks;
  for (const auto& argument : record->cells)
    if (argument) use(*argument, locks);
  rematerialise(*record);
  check(cell.resident(), "DTR: a repeated operation did not return the evicted result");
}

void Dtr::use(Cell& cell, Locks& locks) {
  make_resident(cell);
  ++cell.locks;
  locks.cells.push_back(&cell);
  cell.last_access = clock();
}

void Dtr::rematerialise(Record& r) {
  keep_reserve();
  size_t next = 0;
  const auto argument = [&](const Tensor& t) {
    const Cell* cell = r.cells[next++].get();
    return cell ? dtr_detail::on_storage(t, cell->storage()) : t.defined() ? at::empty_like(t) : t;
  };
  Stack stack;
  for (const IValue& value : r.given) stack.push_back(dtr_detail::with_tensors(value, argument));
  {
    const c10::impl::ForceDispatchKeyGuard local(r.local);
    const c10::AutoGradMode grad_mode(r.grad_mode);
    compute(r.operation, r.keys, Stack(stack), /*repeatable=*/true, {}, stack);
  }
  std::vector<Tensor> returned;
  for (size_t i = stack.size() - r.operation.schema().returns().size(); i < stack.size(); ++i)
    dtr_detail::each_tensor(stack[i], [&](const Tensor& t) { returned.push_back(t); });
  for (const Result& result : r.results) {
    const auto cell = result.cell.lock();
    if (!cell || cell->resident()) continue;
    const Tensor& t = returned.at(result.index);
    const StoragePtr storage = dtr_detail::share(dtr_detail::storage_of(t));
    check(t.sizes() == result.layout.sizes() && t.strides() == result.layout.strides() &&
              t.storage_offset() == result.layout.storage_offset() &&
              int64_t(storage->nbytes()) == cell->bytes,
          "DTR: ", r.operation.schema().name(), ", repeated, returned a result with another memory layout");
    if (const auto of_program = cell->program.lock()) {
      of_program->set_data_ptr_noswap(std::move(storage->_mutable_data_ptr_no_checks()));
      cell->evicted = false;
    } else {
      cell->held_memory = storage;
    }
    cell->last_access = clock();
    cell->enter(evictable);
  }
  ++done.rematerialisations;
  done.remat_cost += r.cost;
  // If the limit is much too small, every evicted storage is needed again at once, and the step would not
  // end.
  if (done.remat_cost - cost_at_last_raise > kMaxRematRatio * done.cost && done.rematerialisations > 1000) {
    limit = 1.2 * limit;
    cost_at_last_raise = done.remat_cost;
  }
}

void Dtr::compute(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
                  bool repeatable, c10::ArrayRef<Tensor> statistics, Stack& stack) {
  const size_t below = stack.size() - given.size();
  std::vector<Tensor> before;
  for (double wanted = 64e6;; wanted *= 2) {
    const auto [used, most] = settings.used();
    try {
      while (before.size() < statistics.size()) {
        const dtr_detail::NotRecorded unseen;
        before.push_back(statistics[before.size()].clone());
      }
      operation.redispatchBoxed(keys, &stack);
      const AllocatedBytes after = settings.used();
      // A new peak includes the temporary memory of the kernel.
      const double reached = after.peak > most ? after.peak : after.now;
      largest_allocation = std::max(largest_allocation, reached - used);
      peak = std::max(peak.load(), reached);
      return;
    } catch (const std::exception& e) {
      if (!is_out_of_memory(e)) throw;
      ++done.out_of_memory_count;
      if (!repeatable) throw;
      const dtr_detail::NotRecorded unseen;
      bool any = false;
      while (settings.used().now > used - wanted && evict_one()) any = true;
      if (!any) throw;
      for (size_t i = 0; i < before.size(); ++i) statistics[i].copy_(before[i]);
    }
    limit = std::min(limit.load(), used);
    stack.resize(below);
    stack.insert(stack.end(), given.begin(), given.end());
  }
}

const dtr_detail::OpInfo& Dtr::info_of(const c10::OperatorHandle& operation) {
  auto& one = known[&operation.schema()];
  if (!one) one = std::make_unique<OpInfo>(operation);
  return *one;
}

Dtr::Inputs Dtr::inputs_of(const OpInfo& info, c10::ArrayRef<IValue> given) {
  const bool moves = info.training < 0 || (given[info.training].isBool() && given[info.training].toBool());
  Inputs inputs;
  for (size_t i = 0; i < given.size(); ++i)
    dtr_detail::each_tensor(given[i], [&](const Tensor& t) {
      StorageImpl* storage = dtr_detail::storage_of(t);
      const bool statistics = info.statistics[i] && moves;
      const bool written = info.written[i] || info.unknown || statistics;
      inputs.push_back({storage, &t, written, statistics});
      if (const Cell* cell = written ? cell_of(storage) : nullptr; cell && cell->pinned()) end_cell(storage);
    });
  return inputs;
}

std::shared_ptr<dtr_detail::Record> Dtr::record_of(const c10::OperatorHandle& operation,
                                                   c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
                                                   const Inputs& inputs, double cost) {
  auto r = std::make_shared<Record>(operation, keys);
  r->cost = cost;
  const auto argument = [&](const Tensor& t) {
    const Input& in = inputs[r->cells.size()];
    r->cells.push_back(in.storage && !in.statistics ? cell_to_read(in.storage) : nullptr);
    return r->cells.back() ? dtr_detail::on_storage(t, nullptr) : t;
  };
  for (const IValue& value : given) r->given.push_back(dtr_detail::with_tensors(value, argument));
  return r;
}

void Dtr::call(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::lock_guard<std::recursive_mutex> guard(mutex);
  const OpInfo& info = info_of(operation);
  if (++done.operations % 64 == 0) sweep();
  if (info.view) return operation.redispatchBoxed(keys, stack);

  const c10::SmallVector<IValue, 12> given(stack->end() - int64_t(info.arguments), stack->end());
  const Inputs inputs = inputs_of(info, given);
  // A collective cannot be repeated after an error, because the other ranks may have taken part in it.
  const bool collective =
      info.once && std::any_of(given.begin(), given.end(), [](const IValue& v) { return v.isObject(); });
  const bool repeatable = !info.changes && !collective;
  std::vector<Tensor> statistics;
  for (const Input& in : inputs)
    if (repeatable && in.statistics) statistics.push_back(*in.tensor);
  double cost = 0;
  {
    Locks locks;
    for (const Input& in : inputs)
      if (Cell* cell = cell_of(in.storage)) use(*cell, locks);
    const double start = now();
    compute(operation, keys, given, repeatable, statistics, *stack);
    cost = now() - start;
  }
  const c10::ArrayRef<IValue> results(stack->data() + stack->size() - info.returns, info.returns);
  if (settings.cost) cost = settings.cost(operation, given, results);
  done.cost += cost;

  for (const Input& in : inputs)
    if (in.written) end_cell(in.storage);
  const bool backward = torch::autograd::get_current_node() != nullptr;
  // A tensor without a storage, such as a sparse one, may hold other tensors in a way that DTR cannot see.
  bool any_opaque = false;
  for (const auto& values : {c10::ArrayRef<IValue>(given), results})
    for (const IValue& value : values)
      dtr_detail::each_tensor(value, [&](const Tensor& t) { any_opaque |= t.defined() && !t.has_storage(); });
  if (any_opaque)
    for (const Input& in : inputs) pin(*in.tensor);
  const bool pinned = info.once || any_opaque || backward;
  const bool note = (info.changes || any_opaque) && !backward && c10::GradMode::is_enabled();

  std::shared_ptr<Record> record;
  const auto add_result = [&](const Tensor& t, size_t index) {
    StorageImpl* storage = dtr_detail::storage_of(t);
    const auto same = [&](const Input& in) { return in.storage == storage; };
    if (!is_large(storage)) return;
    if (note) pinned_bytes[operation.schema().name()] += double(storage->nbytes());
    if (pinned || cell_of(storage) || std::any_of(inputs.begin(), inputs.end(), same)) return;
    if (t.storage().use_count() > 1) return;  // another object may hold the storage
    if (!record) record = record_of(operation, keys, given, inputs, cost);
    const auto cell = new_cell(storage);
    cell->record = record;
    cell->enter(evictable);
    record->results.push_back({index, dtr_detail::on_storage(t, nullptr), cell});
  };
  size_t index = 0;
  for (const IValue& value : results)
    dtr_detail::each_tensor(value, [&](const Tensor& t) { add_result(t, index++); });
  keep_reserve();
}

namespace dtr_detail {

// Receives every operation of a step from the dispatcher.
void fallback(const OperatorHandle& operation, c10::DispatchKeySet keys, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  keys = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  if (Dtr* dtr = Dtr::running())
    dtr->call(operation, keys, stack);
  else
    operation.redispatchBoxed(keys, stack);
}

// Registers the fallback for the whole process. Only threads that have enabled the key call it.
static const torch::Library library = [] {
  torch::Library l(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  l.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return l;
}();

}  // namespace dtr_detail

}  // namespace yolox
