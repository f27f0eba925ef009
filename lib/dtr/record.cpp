// SPDX-License-Identifier: Apache-2.0
#include "dtr/record.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace yolox {
namespace dtr_detail {

Cell::~Cell() {
  leave();
  if (record) destroy_chain(std::move(record));
  --alive;
}

void Cell::enter(std::vector<Cell*>& list) {
  if (evictable) return;
  evictable = &list;
  place = list.size();
  list.push_back(this);
}

void Cell::leave() {
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
  unknown = !begins("aten::") && !begins("yolox::") && !begins("yolox_once::");
  changes = unknown || operation.hasTag(at::Tag::nondeterministic_seeded) ||
            std::find(written.begin(), written.end(), true) != written.end();
  // The program may fill the memory of empty() through data_ptr().
  once = changes || begins("yolox_once::") || begins("aten::empty") || begins("aten::new_empty") ||
         begins("aten::_empty");
  // Composite operations, such as reshape, may copy.
  view = begins("aten::") && !changes && returns > 0 &&
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
  return copy;
}

StoragePtr copy_of(const StoragePtr& storage) {
  const NotRecorded unseen;
  const auto bytes = int64_t(storage->nbytes());
  const Tensor flat = torch::empty({0}, torch::TensorOptions(torch::kByte).device(storage->device()));
  flat.set_(c10::Storage(storage), 0, {bytes}, {1});
  return share(storage_of(flat.clone()));
}

}  // namespace dtr_detail
}  // namespace yolox
