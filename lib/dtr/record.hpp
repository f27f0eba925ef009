// SPDX-License-Identifier: Apache-2.0
// Data structures of DTR: cells (versions of storages), records (executed operations, which can be repeated)
// and properties of an operation that follow from its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <vector>

namespace yolox {
namespace dtr_detail {

using c10::IValue;
using c10::OperatorHandle;
using c10::StorageImpl;
using torch::Tensor;
using torch::jit::Stack;
using StoragePtr = c10::intrusive_ptr<StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<StorageImpl>;

constexpr auto kKey = c10::DispatchKey::Fake;
inline std::atomic<int64_t> alive{0};  // number of cells and records that exist, for tests

struct Record;
void destroy_chain(std::shared_ptr<Record> record);

// One version of a storage: its contents from one write to the next.
struct StorageVersion : std::enable_shared_from_this<StorageVersion> {
  std::shared_ptr<Record> record;     // the operation that computes the contents; null: pinned
  WeakStorage program{StoragePtr()};  // the storage in the program, while it has this version
  StoragePtr held_memory;             // the contents, if the cell itself must keep the memory
  int64_t bytes = 0;
  c10::Device device = c10::kCPU;
  bool evicted = false;    // evicted: the program's storage has no memory
  int locks = 0;           // number of locks; a locked cell is not evicted
  double last_access = 0;  // Dtr::clock() at the last access
  std::vector<StorageVersion*>* evictable =
      nullptr;       // the list of evictable cells that has this cell, or null
  size_t place = 0;  // index in this list

  StorageVersion() { ++alive; }
  ~StorageVersion();
  StorageVersion(const StorageVersion&) = delete;

  bool resident() const {
    return held_memory || (!evicted && !program.expired());
  }  // the contents are resident
  bool constant() const { return !record; }
  bool kept_alive() const { return constant() && held_memory; }  // kept alive, because a record reads it
  StoragePtr storage() const { return held_memory ? held_memory : program.lock(); }

  // Adds the cell to the list of evictable cells, or removes it from its list.
  void enter(std::vector<StorageVersion*>& list);
  void leave();
};

// A tensor argument of a record.
struct Argument {
  std::shared_ptr<StorageVersion> cell;  // the contents that the operation reads; null: see `bytes`
  int64_t bytes = -1;      // at least 0: uninitialised memory of this size; -1: `cell` or `tensor`
  Tensor tensor;           // if neither cell nor bytes: an undefined tensor, or one without a storage
  bool written = false;    // the operation writes to the tensor
  bool is_number = false;  // a scalar that torch has wrapped in a tensor
  bool requires_grad = false;
  c10::Device device = c10::kCPU;
  c10::impl::SizesAndStrides shape;
  int64_t offset = 0;
  caffe2::TypeMeta type;
  c10::DispatchKeySet keys;
};

// A storage that an operation has written: of a returned tensor, or of an argument.
struct Result {
  int returned;  // index of the returned value; -1: an argument was written
  int item;      // index in a returned list; -1: not a list
  int given;     // index in Record::arguments; -1: a returned tensor
  c10::impl::SizesAndStrides shape = {};
  int64_t offset = 0;
  std::weak_ptr<StorageVersion> cell = {};
};

// An executed operation, with everything that is needed to repeat it.
struct Record {
  enum Kind : char { kValue, kTensor, kList, kOptionalList };
  struct Slot {    // an argument of the schema
    IValue value;  // of an argument without tensors (kValue)
    Kind kind;
    size_t tensors;  // number of its tensors in `arguments`
  };
  const OperatorHandle operation;
  const c10::DispatchKeySet keys;
  // Thread-local dispatch keys of the call, such as autocast.
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const bool grad_mode = c10::GradMode::is_enabled();
  std::vector<Slot> slots;
  std::vector<Argument> arguments;  // all tensors of the slots
  std::vector<Result> results;
  at::Generator generator;
  Tensor random;    // state of the generator before the operation; undefined: the operation is not random
  double cost = 0;  // in the unit of DtrSettings::cost

  Record(const OperatorHandle& o, c10::DispatchKeySet k) : operation(o), keys(k) { ++alive; }
  ~Record() { --alive; }
};

// Destroys a record and its ancestors that have no other owner. Iterative, because a chain of records may be
// longer than the call stack allows.
void destroy_chain(std::shared_ptr<Record> record);

// Properties of an operation that follow from its schema.
struct OpInfo {
  size_t arguments = 0, returns = 0;
  bool view = false;        // returns views of its arguments and does not read the storages
  bool unknown = false;     // may write to any of its arguments
  bool empty = false;       // returns uninitialised memory
  bool overwrites = false;  // overwrites its whole first argument without reading it
  bool random = false;
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

// Returns the storage of a tensor, or null if it is undefined or has none.
StorageImpl* storage_of(const Tensor& t);
c10::impl::SizesAndStrides shape_of(const Tensor& t);
inline StoragePtr share(StorageImpl* storage) { return StoragePtr::reclaim_copy(storage); }

// Returns a tensor on this storage with shape, type and keys of a recorded argument.
Tensor tensor_on(const StoragePtr& storage, const Argument& a);

// Returns a storage with uninitialised memory.
StoragePtr new_storage(int64_t bytes, c10::Device device);

// Returns a new storage with the same contents.
StoragePtr copy_of(const StoragePtr& storage);

// Disables DTR and autograd on this thread in its scope.
struct NotRecorded {
  c10::impl::ExcludeDispatchKeyGuard key{kKey};
  at::AutoDispatchBelowADInplaceOrView below;
};

// Sets the state of a random number generator, and sets the old state again in the destructor. Does nothing
// if `state` is undefined.
struct RandomState {
  RandomState(const at::Generator& g, const Tensor& state);
  ~RandomState();
  at::Generator generator;
  Tensor before;
};

// Returns the arguments of a record as a stack for the dispatcher. tensors: one for each of
// Record::arguments.
Stack stack_of(const Record& r, const std::vector<Tensor>& tensors);

// Returns the generator of an operation with these arguments: the one given, else the default of the device.
at::Generator generator_of(c10::ArrayRef<IValue> given);

}  // namespace dtr_detail

}  // namespace yolox
