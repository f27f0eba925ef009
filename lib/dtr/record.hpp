// SPDX-License-Identifier: Apache-2.0
// Data structures of DTR: cells (versions of storages), records (executed operations, which can be repeated)
// and properties of an operation that follow from its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "base/torch.hpp"
#include "dtr/dtr.hpp"

namespace yolox {
namespace dtr_detail {

using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using torch::Tensor;
using torch::jit::Stack;
using StoragePtr = c10::intrusive_ptr<StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

inline std::atomic<int64_t> alive{0};  // number of cells and records that exist, for tests

// One version of a storage: its contents from one write to the next.
struct Cell : std::enable_shared_from_this<Cell> {
  std::shared_ptr<Record> record;     // the operation that computes the contents; null: pinned
  WeakStorage program{StoragePtr()};  // the storage in the program, while it has this version
  StoragePtr held_memory;             // the contents, if the cell itself must keep the memory
  int64_t bytes = 0;
  bool evicted = false;                     // the program's storage has no memory
  int locks = 0;                            // number of locks; a locked cell is not evicted
  double last_access = 0;                   // Dtr::clock() at the last access
  std::vector<Cell*>* evictable = nullptr;  // the list of evictable cells that has this cell, or null

  Cell() { ++alive; }
  ~Cell();
  Cell(const Cell&) = delete;

  // Returns true if the contents are in memory.
  bool resident() const { return held_memory || (!evicted && !program.expired()); }
  bool pinned() const { return !record; }
  bool kept_alive() const { return pinned() && held_memory; }  // kept alive, because a record reads it
  StoragePtr storage() const { return held_memory ? held_memory : program.lock(); }

  // Adds the cell to the list of evictable cells, or removes it from its list.
  void enter(std::vector<Cell*>& list);
  void leave();
};

// A tensor that an operation has returned.
struct Result {
  size_t index;   // among all returned tensors
  Tensor layout;  // shape, without contents
  std::weak_ptr<Cell> cell;
};

// An executed operation, with everything that is needed to repeat it.
struct Record {
  const OperatorHandle operation;
  const c10::DispatchKeySet keys;
  // Thread-local dispatch keys of the call, such as autocast.
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const bool grad_mode = c10::GradMode::is_enabled();
  Stack given;  // the arguments; their tensors are on an empty storage
  // The contents of each tensor of `given`. Null: an undefined tensor, or running statistics, which `given`
  // has as they are, because the operation does not read them.
  std::vector<std::shared_ptr<Cell>> cells;
  std::vector<Result> results;
  double cost = 0;  // in the unit of DtrSettings::cost

  Record(const OperatorHandle& o, c10::DispatchKeySet k) : operation(o), keys(k) { ++alive; }
  ~Record() { --alive; }
};

// Properties of an operation that follow from its schema.
struct OpInfo {
  size_t arguments = 0, returns = 0;
  bool view = false;             // returns views of its arguments and does not read the storages
  bool unknown = false;          // of another namespace: may write to any of its arguments
  bool changes = false;          // writes to a tensor other than statistics, is random, or unknown
  bool once = false;             // must not be repeated, so that its results are pinned
  std::vector<bool> written;     // per argument: the schema says that the operation writes to it
  std::vector<bool> statistics;  // per argument: batch norm statistics that the operation updates
  int training = -1;             // index of the flag that enables this update; -1: it is always enabled

  explicit OpInfo(const OperatorHandle& operation);
};

// Calls f(tensor) for each tensor in an argument or result, also for undefined tensors.
template <class F>
void each_tensor(const IValue& value, const F& f) {
  static const Tensor undefined;
  if (value.isTensor())
    f(value.toTensor());
  else if (value.isTensorList() || value.isOptionalTensorList())
    for (const IValue& v : value.toListRef()) f(v.isTensor() ? v.toTensor() : undefined);
}

// Returns an argument with f(tensor) in place of each tensor.
template <class F>
IValue with_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    each_tensor(value, [&](const Tensor& t) { list.push_back(f(t)); });
    return list;
  }
  if (!value.isOptionalTensorList()) return value;
  c10::List<std::optional<Tensor>> list;
  each_tensor(value, [&](const Tensor& t) {
    const Tensor item = f(t);
    list.push_back(item.defined() ? std::optional(item) : std::nullopt);
  });
  return list;
}

// Returns the storage of a tensor, or null if it is undefined or has none.
StorageImpl* storage_of(const Tensor& t);
inline StoragePtr share(StorageImpl* storage) { return StoragePtr::reclaim_copy(storage); }

// Returns a tensor with shape, type and dispatch keys of `t` on another storage; null: on an empty one.
Tensor on_storage(const Tensor& t, const StoragePtr& storage);

// Returns a new storage with the same contents.
StoragePtr copy_of(const StoragePtr& storage);

// Disables DTR and autograd on this thread in its scope.
struct NotRecorded {
  c10::impl::ExcludeDispatchKeyGuard key{kKey};
  at::AutoDispatchBelowADInplaceOrView below;
};

}  // namespace dtr_detail
}  // namespace yolox
