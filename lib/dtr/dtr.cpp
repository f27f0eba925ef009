// SPDX-License-Identifier: Apache-2.0
#include "dtr/dtr.hpp"

#include <torch/library.h>

#include <cmath>
#include <limits>

#include "base/error.hpp"
#include "base/program.hpp"
#include "dtr/budget.hpp"

namespace yolox {

void DtrSteps::add(const DtrStep& s) {
  ++steps;
  peak = std::max(peak, s.peak);
  evictions += double(s.evictions);
  rematerialisations += double(s.rematerialisations);
  cost += s.cost;
  remat_cost += s.remat_cost;
}

Dtr::Dtr(const DtrSettings& s) : settings(s) {
  if (!on() || settings.used) return;
  auto& allocator = CountingAllocator::get();
  settings.used = [&allocator] { return AllocatedBytes{double(allocator.live())}; };
  on_cpu = true;
}

void Dtr::make_room(double bytes) {
  const double used = settings.used().now;
  if (used > peak) peak = used;
  if (used + bytes <= limit) return;
  // If another thread holds the mutex, an operation is running, and this thread may be one of its workers.
  // Waiting for the mutex would be a deadlock.
  const std::unique_lock<std::recursive_mutex> lock(mutex, std::try_to_lock);
  if (!lock || no_eviction) return;
  const NoEviction once(*this);
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
  if (cell.record) dtr_detail::destroy_chain(std::move(cell.record));
  if (found->second.use_count() > 1)
    cell.held_memory = cell.program.lock();
  else
    cells.erase(found);
}

void Dtr::check_budget(double limit) const {
  const auto mb = [](double bytes) { return std::ceil(bytes / 1e5) / 10; };
  const double enough = 1.02 * limit, before = done.budget - settings.budget;
  usage_check(settings.automatic || limit <= kSlack * done.budget, "the memory budget of ", mb(done.budget),
              " MB is too small for this step; ", mb(enough), " MB may be enough",
              settings.relative_to_start ? concat(" (", mb(enough - before), " of them for the step)") : "");
}

void Dtr::Locks::release() {
  for (Cell* cell : cells) --cell->locks;
  cells.clear();
}

void Dtr::begin() {
  check(!now_running, "a step with --dtr began while another one was running");
  const int64_t out_of_memory = std::exchange(done, {}).out_of_memory_count;
  const double used = settings.used().now;
  done.budget = settings.automatic ? settings.automatic(used, out_of_memory)
                                   : settings.budget + (settings.relative_to_start ? used : 0);
  limit = done.budget;
  peak = used;
  cost_at_last_raise = 0;
  largest_allocation_before = std::exchange(largest_allocation, 0);
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
    for (const auto& cell : program_cells()) {
      make_resident(*cell);
      kept.add(*cell);
    }
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
    if (!cell->constant() && !cell->program.expired()) all.push_back(cell);
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
  cell->device = storage->device();
  cell->last_access = clock();
  return cells[storage] = cell;
}

std::shared_ptr<Dtr::Cell> Dtr::cell_to_read(StorageImpl* storage) {
  Cell* cell = cell_of(storage);
  const auto shared = cell ? cell->shared_from_this() : new_cell(storage);
  if (!shared->constant() || shared->held_memory) return shared;
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
  if (cell.use_count() > 1 && cell->constant()) cell->held_memory = dtr_detail::copy_of(cell->storage());
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
  for (const Argument& a : cell.record->arguments)
    if (a.cell && !a.cell->resident() && a.cell->record && --most >= 0) cost += recompute_cost(*a.cell, most);
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
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, best->device));
  }
  return true;
}

void Dtr::make_resident(const Cell& wanted) {
  if (wanted.resident()) return;
  const dtr_detail::NotRecorded unseen;
  std::vector<Frame> waiting;
  waiting.emplace_back(wanted.record);
  while (!waiting.empty()) {
    Frame& top = waiting.back();
    check(top.record != nullptr, "DTR: an argument of an operation is evicted and has no record");
    const auto& arguments = top.record->arguments;
    const auto here = [&] {
      Cell* cell = arguments[top.next].cell.get();
      if (cell && !cell->resident()) return false;
      if (cell) {
        top.locks.add(*cell);
        cell->last_access = clock();
      }
      return true;
    };
    while (top.next < arguments.size() && here()) ++top.next;
    if (top.next < arguments.size()) {
      const auto needed = arguments[top.next].cell->record;
      waiting.emplace_back(needed);
    } else {
      rematerialise(*top.record);
      waiting.pop_back();
    }
  }
  check(wanted.resident(), "DTR: a repeated operation did not return the evicted result");
}

Dtr::StoragePtr Dtr::to_overwrite(Cell& cell, const Record& by) {
  const auto reads = [&](const Argument& a) { return a.cell.get() == &cell; };
  const auto mine = std::count_if(by.arguments.begin(), by.arguments.end(), reads);
  if (!cell.held_memory || cell.constant() || cell.locks > mine) return dtr_detail::copy_of(cell.storage());
  cell.leave();
  return std::move(cell.held_memory);
}

void Dtr::rematerialise(Record& r) {
  keep_reserve();
  std::vector<StoragePtr> storages(r.arguments.size());
  const auto all = [&](const auto& f) {
    for (size_t i = 0; i < storages.size(); ++i) f(r.arguments[i], storages[i]);
  };
  all([&](const Argument& a, StoragePtr& storage) {
    if (a.bytes >= 0) storage = dtr_detail::new_storage(a.bytes, a.device);
    if (!a.cell || !a.written || storage) return;
    const StoragePtr memory = to_overwrite(*a.cell, r);
    all([&](const Argument& b, StoragePtr& same) {  // several arguments may share the storage
      if (b.cell == a.cell) same = memory;
    });
  });
  std::vector<Tensor> tensors;
  all([&](const Argument& a, StoragePtr& storage) {
    if (a.cell && !storage) storage = a.cell->storage();
    tensors.push_back(storage ? dtr_detail::tensor_on(storage, a) : a.tensor);
  });
  Stack stack = dtr_detail::stack_of(r, tensors);
  {
    const dtr_detail::RandomState random(r.generator, r.random);
    const c10::impl::ForceDispatchKeyGuard local(r.local);
    const c10::AutoGradMode grad_mode(r.grad_mode);
    const auto writes = [](const Argument& a) { return a.written; };
    const bool anew = std::none_of(r.arguments.begin(), r.arguments.end(), writes) && !r.random.defined();
    compute(r.operation, r.keys, Stack(stack), anew, {}, stack);
  }
  const size_t first = stack.size() - r.operation.schema().returns().size();
  for (const Result& result : r.results) {
    const auto cell = result.cell.lock();
    if (!cell || cell->resident()) continue;
    if (result.given >= 0) {
      attach_memory(*cell, storages[size_t(result.given)]);
    } else {
      const IValue& value = stack[first + size_t(result.returned)];
      const Tensor t = result.item < 0 ? value.toTensor() : value.toListRef()[size_t(result.item)].toTensor();
      check(t.sizes() == result.shape.sizes_arrayref() && t.strides() == result.shape.strides_arrayref() &&
                t.storage_offset() == result.offset,
            "DTR: ", r.operation.schema().name(), ", repeated, returned a result with another memory layout");
      attach_memory(*cell, dtr_detail::share(dtr_detail::storage_of(t)));
    }
  }
  ++done.rematerialisations;
  done.remat_cost += r.cost;
  // If the limit is much too small, every evicted storage is needed again at once, and the step would not
  // end.
  if (done.remat_cost - cost_at_last_raise > settings.max_remat_ratio * done.cost &&
      done.rematerialisations > 1000) {
    limit = 1.2 * limit;
    cost_at_last_raise = done.remat_cost;
  }
}

void Dtr::attach_memory(Cell& cell, const StoragePtr& storage) {
  check(int64_t(storage->nbytes()) == cell.bytes,
        "DTR: a repeated operation returned a result of another size");
  if (const auto of_program = cell.program.lock()) {
    of_program->set_data_ptr_noswap(std::move(storage->_mutable_data_ptr_no_checks()));
    cell.evicted = false;
  } else {
    cell.held_memory = storage;
  }
  cell.last_access = clock();
  cell.enter(evictable);
}

void Dtr::compute(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
                  bool anew, c10::ArrayRef<Tensor> statistics, Stack& stack) {
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
      if (!anew) throw;
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

const Dtr::About& Dtr::info_of(const c10::OperatorHandle& operation) {
  auto& one = known[&operation.schema()];
  if (!one) one = std::make_unique<About>(operation);
  return *one;
}

Dtr::Inputs Dtr::inputs_of(const About& info, c10::ArrayRef<IValue> given) const {
  const bool moves = info.training < 0 || (given[info.training].isBool() && given[info.training].toBool());
  Inputs inputs;
  for (size_t i = 0; i < given.size(); ++i)
    dtr_detail::each_tensor(given[i], [&](const Tensor& t) {
      StorageImpl* storage = dtr_detail::storage_of(t);
      const bool statistics = info.statistics[i] && moves;
      inputs.push_back({storage, storage ? cell_of(storage) : nullptr, &t, storage ? storage->nbytes() : 0,
                        info.written[i] || info.unknown || statistics, statistics, false});
    });
  if (!info.overwrites || !inputs[0].cell || inputs[0].cell->kept_alive()) return inputs;
  const Tensor& t = *inputs[0].tensor;
  inputs[0].overwritten = t.is_non_overlapping_and_dense() && t.nbytes() == inputs[0].storage->nbytes();
  for (size_t i = 1; i < inputs.size(); ++i) inputs[0].overwritten &= inputs[i].storage != inputs[0].storage;
  return inputs;
}

bool Dtr::detach_constants(Inputs& inputs) {
  bool any = false;
  for (const Input& in : inputs) {
    if (!in.storage || !in.written || in.overwritten || (in.cell && !in.cell->constant())) continue;
    any |= !in.statistics;
    if (!in.cell) continue;
    const dtr_detail::NotRecorded unseen;
    end_cell(in.storage);
    for (Input& other : inputs)
      if (other.storage == in.storage) other.cell = nullptr;
  }
  return any;
}

void Dtr::lock(const Inputs& inputs, Locks& locks) {
  const auto lock_one = [&](Cell& cell) {
    make_resident(cell);
    locks.add(cell);
    cell.last_access = clock();
  };
  for (const Input& in : inputs)
    if (in.cell && !in.overwritten) lock_one(*in.cell);
  // All inputs that are read are resident now, so that no rematerialisation needs the old contents of a
  // storage that is overwritten. An evicted one of these gets uninitialised memory.
  for (const Input& in : inputs) {
    if (!in.cell || !in.overwritten) continue;
    if (in.cell->evicted) {
      auto memory = dtr_detail::new_storage(in.cell->bytes, in.cell->device);
      in.storage->set_data_ptr_noswap(std::move(memory->_mutable_data_ptr_no_checks()));
      in.cell->evicted = false;
    }
    lock_one(*in.cell);
  }
}

std::shared_ptr<dtr_detail::Record> Dtr::record_of(const c10::OperatorHandle& operation,
                                                   c10::DispatchKeySet keys, c10::ArrayRef<IValue> given,
                                                   const Inputs& inputs) {
  auto r = std::make_shared<Record>(operation, keys);
  r->slots.reserve(given.size());
  r->arguments.reserve(inputs.size());
  for (const IValue& value : given) {
    if (value.isTensor())
      r->slots.push_back({IValue(), Record::kTensor, 1});
    else if (value.isTensorList())
      r->slots.push_back({IValue(), Record::kList, value.toListRef().size()});
    else if (value.isOptionalTensorList())
      r->slots.push_back({IValue(), Record::kOptionalList, value.toListRef().size()});
    else
      r->slots.push_back({value, Record::kValue, 0});
  }
  for (const Input& in : inputs) {
    Argument& a = r->arguments.emplace_back();
    const Tensor& t = *in.tensor;
    if (!in.storage) {
      a.tensor = t;
      continue;
    }
    if (in.statistics || in.overwritten)  // the result does not depend on the contents
      a.bytes = int64_t(in.storage->nbytes());
    else
      a.cell = cell_to_read(in.storage);
    a.written = in.written && !in.statistics;
    a.is_number = t.unsafeGetTensorImpl()->is_wrapped_number();
    a.requires_grad = t.requires_grad();
    a.device = t.device();
    a.offset = t.storage_offset();
    a.type = t.dtype();
    a.keys = t.key_set();
    a.shape = dtr_detail::shape_of(t);
  }
  return r;
}

void Dtr::record_results(const Inputs& inputs, c10::ArrayRef<IValue> results, bool empty, bool once,
                         const std::function<std::shared_ptr<Record>()>& record) {
  const auto computed = [&](StorageImpl* storage, Result result) {
    const auto by = record();  // before end_cell(), because the record may read the old cell
    if (result.given >= 0) end_cell(storage);
    const auto cell = new_cell(storage);
    cell->record = by;
    cell->enter(evictable);
    result.cell = cell;
    by->results.push_back(std::move(result));
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Input& in = inputs[i];
    if (!in.written || !in.cell) continue;
    const auto same = [&](const Input& other) { return other.written && other.storage == in.storage; };
    if (std::any_of(inputs.begin(), inputs.begin() + i, same)) continue;
    if (once || in.statistics)
      end_cell(in.storage);
    else
      computed(in.storage, {-1, -1, int(i), {}, 0, {}});
  }
  for (size_t r = 0; r < results.size(); ++r) {
    int item = results[r].isTensor() ? -1 : 0;
    dtr_detail::each_tensor(results[r], [&](const Tensor& t) {
      const int this_item = item < 0 ? -1 : item++;
      StorageImpl* storage = dtr_detail::storage_of(t);
      if (!storage || storage->device_type() != settings.device || cell_of(storage) ||
          int64_t(storage->nbytes()) < settings.min_size)
        return;
      for (const Input& in : inputs)
        if (in.storage == storage) return;  // a view of an input
      if (empty)
        new_cell(storage);
      else if (!once && t.storage().use_count() == 1)  // else another object may hold the storage
        computed(storage, {int(r), this_item, -1, dtr_detail::shape_of(t), t.storage_offset()});
    });
  }
}

void Dtr::call(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::lock_guard<std::recursive_mutex> guard(mutex);
  const About& info = info_of(operation);
  if (++done.operations % 64 == 0) sweep();
  if (info.view) return operation.redispatchBoxed(keys, stack);

  const c10::SmallVector<IValue, 12> given(stack->end() - int64_t(info.arguments), stack->end());
  Inputs inputs = inputs_of(info, given);
  const bool writes_constant = detach_constants(inputs);
  Locks locks;
  lock(inputs, locks);
  const bool backward = torch::autograd::get_current_node() != nullptr;
  at::Generator generator;
  Tensor random;
  if (info.random && !backward) {
    generator = dtr_detail::generator_of(given);
    const std::lock_guard<std::mutex> lock_generator(generator.mutex());
    random = generator.get_state();
  }

  const double start = now();
  const auto cost_by = settings.cost ? settings.cost(operation, given) : nullptr;
  const auto writes = [](const Input& in) { return in.written && !in.statistics; };
  // A collective cannot be repeated after an error, because the other ranks may have taken part in it.
  const bool collective =
      info.once && std::any_of(given.begin(), given.end(), [](const IValue& v) { return v.isObject(); });
  const bool anew =
      std::none_of(inputs.begin(), inputs.end(), writes) && !info.random && !info.unknown && !collective;
  std::vector<Tensor> statistics;
  for (const Input& in : inputs)
    if (anew && in.statistics) statistics.push_back(*in.tensor);
  compute(operation, keys, given, anew, statistics, *stack);

  const c10::ArrayRef<IValue> results(stack->data() + stack->size() - info.returns, info.returns);
  const double cost = cost_by ? cost_by(results) : now() - start;
  done.cost += cost;
  locks.release();
  std::optional<NoEviction> noting(*this);  // the cells of written storages are still the old ones
  if (backward) {
    for (const Input& in : inputs)
      if (in.storage && in.written) end_cell(in.storage);
  } else {
    std::shared_ptr<Record> record;
    const auto resized = [](const Input& in) { return in.storage && in.storage->nbytes() != in.bytes; };
    const bool once = info.once || writes_constant || std::any_of(inputs.begin(), inputs.end(), resized);
    record_results(inputs, results, info.empty, once, [&] {
      if (record) return record;
      record = record_of(operation, keys, given, inputs);
      record->cost = cost;
      record->generator = generator;
      record->random = random;
      return record;
    });
  }
  noting.reset();
  for (const IValue& value : results)
    dtr_detail::each_tensor(value, [&](const Tensor& t) {
      // A tensor without a storage, such as a sparse one, may hold the inputs in a way that DTR cannot see.
      if (t.defined() && !t.has_storage())
        for (const Input& in : inputs) pin(*in.tensor);
    });
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
