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
inline void take_apart(std::shared_ptr<Record> record);

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
  ~Cell() {
    leave();
    if (record) take_apart(std::move(record));
    --alive;
  }
  Cell(const Cell&) = delete;

  bool here() const { return own || (!dropped && !program.expired()); }
  bool constant() const { return !record; }
  bool held() const { return constant() && own; }  // because a record reads it
  StoragePtr storage() const { return own ? own : program.lock(); }

  void enter(std::vector<Cell*>& list) {
    if (droppable) return;
    droppable = &list, place = list.size();
    list.push_back(this);
  }
  void leave() {
    if (!droppable) return;
    droppable->back()->place = place;
    (*droppable)[place] = droppable->back();
    droppable->pop_back();
    droppable = nullptr;
  }
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
inline void take_apart(std::shared_ptr<Record> record) {
  std::vector<std::shared_ptr<Record>> left;
  left.push_back(std::move(record));
  while (!left.empty()) {
    const auto last = std::move(left.back());
    left.pop_back();
    if (last.use_count() > 1) continue;
    for (Argument& a : last->arguments)
      if (a.cell && a.cell.use_count() == 1 && a.cell->record) left.push_back(std::move(a.cell->record));
  }
}

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

  explicit About(const OperatorHandle& operation) {
    const auto& schema = operation.schema();
    const std::string& name = schema.name();
    const auto begins = [&](const char* with) { return name.rfind(with, 0) == 0; };
    const auto is_one_of = [&](std::initializer_list<const char*> names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    arguments = schema.arguments().size(), returns = schema.returns().size();
    bool moves = true;
    for (const char* word : {"backward", "no_update", "no_training"})
      moves &= name.find(word) == std::string::npos;
    for (const auto& a : schema.arguments()) {
      written.push_back(a.alias_info() && a.alias_info()->isWrite());
      // torch's batch norms move these, though most schemas do not say so, and in training do not read them.
      statistics.push_back((a.name() == "running_mean" || a.name() == "running_var") && moves);
      if (a.name() == "training" || a.name() == "use_input_stats") training = int(written.size()) - 1;
    }
    unknown = (!begins("aten::") && !begins("yolox::") && !begins("yolox_once::")) ||
              is_one_of({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data",
                         "aten::record_stream"});
    once = unknown ? "what it writes is not known" : begins("yolox_once::") ? "it is done once only" : "";
    empty = begins("aten::empty") || begins("aten::new_empty") || begins("aten::_empty");
    overwrites = is_one_of({"aten::copy_", "aten::fill_", "aten::zero_", "aten::uniform_", "aten::normal_",
                            "aten::bernoulli_", "aten::exponential_"});
    random = operation.hasTag(at::Tag::nondeterministic_seeded);
    // Composite ones, such as reshape, may copy.
    view = begins("aten::") && !unknown && returns > 0 &&
           std::find(written.begin(), written.end(), true) == written.end() &&
           !operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    for (const auto& r : schema.returns()) view &= r.alias_info() && !r.alias_info()->isWrite();
  }
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

inline StorageImpl* storage_of(const Tensor& t) {
  return t.defined() && t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                                        : nullptr;
}
inline c10::impl::SizesAndStrides shape_of(const Tensor& t) {
  c10::impl::SizesAndStrides shape;
  shape.set_sizes(t.sizes()), shape.set_strides(t.strides());
  return shape;
}
inline StoragePtr share(StorageImpl* storage) { return StoragePtr::reclaim_copy(storage); }

// A tensor as an operation was given it, on this storage.
inline Tensor tensor_on(const StoragePtr& storage, const Argument& a) {
  Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), a.keys, a.type);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(a.shape.sizes_arrayref(), a.shape.strides_arrayref(), a.offset);
  if (a.is_number) impl->set_wrapped_number(true);
  if (a.requires_grad) t.set_requires_grad(true);  // kernels choose by it
  return t;
}

inline StoragePtr new_storage(int64_t bytes, c10::Device device) {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                          c10::GetAllocator(device.type()), /*resizable=*/true);
}

inline StoragePtr copy_of(const StoragePtr& storage) {
  const auto bytes = int64_t(storage->nbytes());
  Argument flat;
  flat.type = caffe2::TypeMeta::Make<uint8_t>();
  flat.keys =
      c10::DispatchKeySet(storage->device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  flat.shape.set_sizes({bytes}), flat.shape.set_strides({1});
  const StoragePtr copy = new_storage(bytes, storage->device());
  tensor_on(copy, flat).copy_(tensor_on(storage, flat));
  return copy;
}

// What is done meanwhile is neither recorded nor seen by autograd.
struct Unseen {
  c10::impl::ExcludeDispatchKeyGuard key{kKey};
  at::AutoDispatchBelowADInplaceOrView below;
};

// Sets a generator, if there is one, and puts it back.
struct RandomState {
  RandomState(const at::Generator& g, const Tensor& state) : generator(g) {
    if (!state.defined()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    before = generator.get_state();
    generator.set_state(state);
  }
  ~RandomState() {
    if (!before.defined()) return;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(before);
  }
  at::Generator generator;
  Tensor before;
};

// What the dispatcher takes the arguments of an operation from.
inline Stack stack_of(const Record& r, const std::vector<Tensor>& tensors) {
  Stack stack;
  const Tensor* next = tensors.data();
  for (const auto& slot : r.slots) {
    const c10::ArrayRef<Tensor> these(next, slot.tensors);
    next += slot.tensors;
    if (slot.kind == Record::kValue) stack.push_back(slot.value);
    if (slot.kind == Record::kTensor) stack.emplace_back(these[0]);
    if (slot.kind == Record::kList) stack.emplace_back(c10::List<Tensor>(these));
    if (slot.kind != Record::kOptionalList) continue;
    c10::List<std::optional<Tensor>> list;
    for (const Tensor& t : these) list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
    stack.emplace_back(std::move(list));
  }
  return stack;
}

// The generator that an operation takes its numbers from.
inline at::Generator generator_of(c10::ArrayRef<IValue> given) {
  c10::Device device = c10::kCPU;
  for (const IValue& value : given) {
    if (value.isGenerator()) return value.toGenerator();
    if (value.isDevice()) device = value.toDevice();
    each_tensor(value, [&](const Tensor& t) {
      if (t.defined()) device = t.device();
    });
  }
  return at::globalContext().defaultGenerator(device);
}

}  // namespace dtr_detail

}  // namespace yolox
