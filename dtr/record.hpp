// What dtr.hpp keeps of operations, to be able to do them again: cells, which are the contents of storages,
// and records, which compute them; and what there is to know of an operation by its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
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
inline std::atomic<int64_t> alive{0};  // cells and records, for tests

struct Record;
void take_apart(std::shared_ptr<Record> record);

struct Cell : std::enable_shared_from_this<Cell> {
  std::shared_ptr<Record> record;     // computes it; null: it cannot be computed again
  WeakStorage program{StoragePtr()};  // where the program has it
  StoragePtr own;                     // where we hold it, where the program does not, or may not
  int64_t bytes = 0;
  c10::Device device = c10::kCPU;
  bool dropped = false;                     // the program's storage is empty
  int locks = 0;                            // above 0: is being read
  double read = 0;                          // when it was last, in costs
  std::vector<Cell*>* droppable = nullptr;  // the list that it is in, and where
  size_t place = 0;

  Cell() { ++alive; }
  ~Cell();
  Cell(const Cell&) = delete;

  bool here() const { return own || (!dropped && !program.expired()); }
  bool constant() const { return !record; }
  bool held() const { return constant() && own; }  // because a record reads it
  StoragePtr storage() const { return own ? own : program.lock(); }

  void enter(std::vector<Cell*>& list);
  void leave();
};

// A tensor that an operation was given.
struct Argument {
  std::shared_ptr<Cell> cell;  // null: new memory of so many bytes, whatever is in it; below 0: `tensor`
  int64_t bytes = -1;
  Tensor tensor;  // undefined, or without a storage
  bool written = false, is_number = false, requires_grad = false;
  c10::Device device = c10::kCPU;
  c10::impl::SizesAndStrides shape;
  int64_t offset = 0;
  caffe2::TypeMeta type;
  c10::DispatchKeySet keys;
};

// A storage that an operation has filled: of a tensor that it gave back, or of one that it was given.
struct Result {
  int returned, item, given;  // -1: none
  c10::impl::SizesAndStrides shape = {};
  int64_t offset = 0;
  std::weak_ptr<Cell> cell = {};
};

struct Record {
  enum Kind : char { kValue, kTensor, kList, kOptionalList };
  struct Slot {  // an argument as the schema counts them
    IValue value;
    Kind kind;
    size_t tensors;
  };
  const OperatorHandle operation;
  const c10::DispatchKeySet keys;
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();  // such as autocast
  const bool grad_mode = c10::GradMode::is_enabled();
  std::vector<Slot> slots;
  std::vector<Argument> arguments;  // the tensors among them
  std::vector<Result> results;
  at::Generator generator;
  Tensor random;  // its state before
  double cost = 0;

  Record(const OperatorHandle& o, c10::DispatchKeySet k) : operation(o), keys(k) { ++alive; }
  ~Record() { --alive; }
};

// One after the other: a chain of records may be longer than the stack is deep.
void take_apart(std::shared_ptr<Record> record);

// What there is to know of an operation.
struct About {
  size_t arguments = 0, returns = 0;
  bool view = false;        // gives views of what it is given, and reads nothing
  bool unknown = false;     // may write to whatever it is given
  bool empty = false;       // gives memory that is not filled
  bool overwrites = false;  // all of its first argument, whatever is there
  bool random = false;
  const char* once = "";         // why it must not be done again
  std::vector<bool> written;     // arguments, by the schema
  std::vector<bool> statistics;  // running statistics of a batch norm
  int training = -1;             // the argument that says whether those are moved; -1: they are

  explicit About(const OperatorHandle& operation);
};

// Calls f(tensor) for each tensor in an argument or result, undefined ones too.
template <class F>
void each_tensor(const IValue& value, const F& f) {
  static const Tensor undefined;
  if (value.isTensor())
    f(value.toTensor());
  else if (value.isTensorList() || value.isOptionalTensorList())
    for (const IValue& v : value.toListRef()) f(v.isTensor() ? v.toTensor() : undefined);
}

StorageImpl* storage_of(const Tensor& t);
c10::impl::SizesAndStrides shape_of(const Tensor& t);
inline StoragePtr share(StorageImpl* storage) { return StoragePtr::reclaim_copy(storage); }

// A tensor as an operation was given it, on this storage.
Tensor tensor_on(const StoragePtr& storage, const Argument& a);

StoragePtr new_storage(int64_t bytes, c10::Device device);

StoragePtr copy_of(const StoragePtr& storage);

// What is done meanwhile is neither recorded nor seen by autograd.
struct Unseen {
  c10::impl::ExcludeDispatchKeyGuard key{kKey};
  at::AutoDispatchBelowADInplaceOrView below;
};

// Sets a generator, if there is one, and puts it back.
struct RandomState {
  RandomState(const at::Generator& g, const Tensor& state);
  ~RandomState();
  at::Generator generator;
  Tensor before;
};

// What the dispatcher takes the arguments of an operation from.
Stack stack_of(const Record& r, const std::vector<Tensor>& tensors);

// The generator that an operation takes its numbers from.
at::Generator generator_of(c10::ArrayRef<IValue> given);

}  // namespace dtr_detail

}  // namespace yolox
