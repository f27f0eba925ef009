// SPDX-License-Identifier: Apache-2.0
#include "dtr/record.hpp"

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace yolox {

namespace dtr_detail {

StorageVersion::~StorageVersion() {
  leave();
  if (record) destroy_chain(std::move(record));
  --alive;
}

void StorageVersion::enter(std::vector<StorageVersion*>& list) {
  if (evictable) return;
  evictable = &list;
  place = list.size();
  list.push_back(this);
}

void StorageVersion::leave() {
  if (!evictable) return;
  evictable->back()->place = place;
  (*evictable)[place] = evictable->back();
  evictable->pop_back();
  evictable = nullptr;
}

void destroy_chain(std::shared_ptr<Record> record) {
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

OpInfo::OpInfo(const OperatorHandle& operation) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  const auto begins = [&](const char* with) { return name.rfind(with, 0) == 0; };
  const auto is_one_of = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  arguments = schema.arguments().size();
  returns = schema.returns().size();
  bool moves = true;
  for (const char* word : {"backward", "no_update", "no_training"})
    moves &= name.find(word) == std::string::npos;
  for (const auto& a : schema.arguments()) {
    written.push_back(a.alias_info() && a.alias_info()->isWrite());
    // Batch norms of torch update these in training and do not read them there. Most schemas do not declare
    // the write.
    statistics.push_back((a.name() == "running_mean" || a.name() == "running_var") && moves);
    if (a.name() == "training" || a.name() == "use_input_stats") training = int(written.size()) - 1;
  }
  unknown =
      (!begins("aten::") && !begins("yolox::") && !begins("yolox_once::")) ||
      is_one_of({"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data", "aten::record_stream"});
  once = unknown || begins("yolox_once::");
  empty = begins("aten::empty") || begins("aten::new_empty") || begins("aten::_empty");
  overwrites = is_one_of({"aten::copy_", "aten::fill_", "aten::zero_", "aten::uniform_", "aten::normal_",
                          "aten::bernoulli_", "aten::exponential_"});
  random = operation.hasTag(at::Tag::nondeterministic_seeded);
  // Composite operations, such as reshape, may copy.
  view = begins("aten::") && !unknown && returns > 0 &&
         std::find(written.begin(), written.end(), true) == written.end() &&
         !operation.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  for (const auto& r : schema.returns()) view &= r.alias_info() && !r.alias_info()->isWrite();
}

StorageImpl* storage_of(const Tensor& t) {
  return t.defined() && t.has_storage() ? t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
                                        : nullptr;
}

c10::impl::SizesAndStrides shape_of(const Tensor& t) {
  c10::impl::SizesAndStrides shape;
  shape.set_sizes(t.sizes());
  shape.set_strides(t.strides());
  return shape;
}

Tensor tensor_on(const StoragePtr& storage, const Argument& a) {
  Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), a.keys, a.type);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(a.shape.sizes_arrayref(), a.shape.strides_arrayref(), a.offset);
  if (a.is_number) impl->set_wrapped_number(true);
  if (a.requires_grad) t.set_requires_grad(true);  // some kernels choose an algorithm by this flag
  return t;
}

StoragePtr new_storage(int64_t bytes, c10::Device device) {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                          c10::GetAllocator(device.type()), /*resizable=*/true);
}

StoragePtr copy_of(const StoragePtr& storage) {
  const auto bytes = int64_t(storage->nbytes());
  Argument flat;
  flat.type = caffe2::TypeMeta::Make<uint8_t>();
  flat.keys =
      c10::DispatchKeySet(storage->device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  flat.shape.set_sizes({bytes});
  flat.shape.set_strides({1});
  const StoragePtr copy = new_storage(bytes, storage->device());
  tensor_on(copy, flat).copy_(tensor_on(storage, flat));
  return copy;
}

RandomState::RandomState(const at::Generator& g, const Tensor& state) : generator(g) {
  if (!state.defined()) return;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  before = generator.get_state();
  generator.set_state(state);
}

RandomState::~RandomState() {
  if (!before.defined()) return;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(before);
}

Stack stack_of(const Record& r, const std::vector<Tensor>& tensors) {
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

at::Generator generator_of(c10::ArrayRef<IValue> given) {
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
