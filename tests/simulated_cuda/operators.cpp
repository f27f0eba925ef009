// SPDX-License-Identifier: Apache-2.0
// Operators of the simulated device. A fallback for the dispatch key CUDA gives an operator CPU tensors on
// the same bytes, calls it, and turns its results into tensors of the device without a copy.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "state.hpp"

namespace simulated_cuda {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IValue;
using c10::kCPU;
using c10::kCUDA;
using torch::jit::Stack;

// ---- what is known about an operator

struct Operator {
  std::string name;            // without "aten::"
  bool has_kernel = true;      // false: CUDA has no kernel for it
  bool only_metadata = false;  // starts no kernel
  bool takes_indices = false;  // indices may be on the CPU
  std::string why_host_waits;  // empty: the host does not wait
  std::vector<bool> writes;    // for each argument
};

bool one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

const Operator& operator_of(const c10::OperatorHandle& handle) {
  static auto* known = new std::unordered_map<const void*, Operator>;
  const Lock lock(mutex());
  const auto& schema = handle.schema();
  if (const auto at = known->find(&schema); at != known->end()) return at->second;
  Operator o;
  o.name = schema.name();
  o.has_kernel = o.name.rfind("aten::", 0) == 0;
  if (o.has_kernel) o.name.erase(0, 6);
  o.takes_indices = one_of(o.name, {"index", "_unsafe_index", "_index_put_impl_", "index_put_", "index_put"});
  if (one_of(o.name, {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
                      "unique_dim_consecutive", "repeat_interleave", "bincount", "equal"}))
    o.why_host_waits = "size of the result of " + o.name;
  if (o.name == "_local_scalar_dense") o.why_host_waits = "item()";
  bool is_view = !schema.returns().empty();
  for (const auto& r : schema.returns()) is_view = is_view && r.alias_info() && !r.alias_info()->isWrite();
  o.only_metadata = is_view || one_of(o.name, {"set_", "resize_", "resize_as_", "_local_scalar_dense",
                                               "is_set_to", "_unsafe_view"});
  for (const auto& argument : schema.arguments())
    o.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
  // The schema does not say that the running statistics are written.
  if (o.name == "native_batch_norm") o.writes[3] = o.writes[4] = true;
  return known->emplace(&schema, std::move(o)).first->second;
}

// Returns the argument with f(tensor) in place of each tensor.
template <class Function>
IValue map_tensors(const IValue& v, const Function& f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorVector()) list.push_back(f(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : v.toOptionalTensorVector())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return list;
  }
  return v;
}

// ---- one call

struct Call {
  explicit Call(const Operator& op) : op(op) {}

  // Returns the CPU storage on the bytes of a device storage. There is one per storage, so that torch's
  // checks for overlapping memory see the same as on a GPU.
  c10::Storage host(const c10::Storage& s) {
    for (const auto& [device, cpu] : storages)
      if (device.unsafeGetStorageImpl() == s.unsafeGetStorageImpl()) return cpu;
    void* p = s.data() ? bytes_at(s.data()) : nullptr;
    c10::Storage cpu(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), c10::SymInt(int64_t(s.nbytes())), c10::DataPtr(p, kCPU),
        c10::GetCPUAllocator(), true));
    storages.emplace_back(s, cpu);
    return cpu;
  }
  Tensor host(const Tensor& t, bool write) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      given_on_cpu.push_back(t);
      return t;
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].device.is_same(t)) continue;
      tensors[i].written = tensors[i].written || write;
      return tensors[i].cpu;
    }
    tensors.push_back({t, view(host(t.storage()), DispatchKey::CPU, t), write});
    return tensors.back().cpu;
  }
  IValue host(const IValue& v, bool write) {
    if (v.isStorage() && v.toStorage().device_type() == kCUDA) return host(v.toStorage());
    if (v.isDevice() && v.toDevice().is_cuda()) return Device(kCPU);
    return map_tensors(v, [&](const Tensor& t) { return host(t, write); });
  }
  IValue device(const IValue& v) {
    return map_tensors(v, [&](const Tensor& t) { return device(t); });
  }

  // Applies to the device tensors what the operator did to the sizes and storages of their CPU tensors.
  void update_arguments() {
    const size_t given = storages.size();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].written) continue;
      auto* mine = tensors[i].device.unsafeGetTensorImpl();
      const Tensor cpu = tensors[i].cpu;
      const c10::Storage storage = device(cpu.storage());
      if (storage.unsafeGetStorageImpl() != mine->unsafe_storage().unsafeGetStorageImpl())
        mine->set_storage_keep_dtype(storage);
      if (mine->sizes() != cpu.sizes() || mine->strides() != cpu.strides() ||
          mine->storage_offset() != cpu.storage_offset())
        mine->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
    for (size_t i = 0; i < given; ++i) {
      auto* mine = storages[i].first.unsafeGetStorageImpl();
      auto* cpu = storages[i].second.unsafeGetStorageImpl();
      const void* before = mine->data() ? bytes_at(mine->data()) : nullptr;
      const size_t size = cpu->nbytes();
      if (cpu->data() != before) mine->set_data_ptr_noswap(take_memory(cpu));
      if (mine->nbytes() != size) mine->set_nbytes(size);
    }
  }

  void run_on_stream() {
    const Lock lock(mutex());
    std::vector<Use> uses;
    for (const Pair& t : tensors)
      if (t.device.numel() > 0) uses.push_back({block_at(t.device.storage().data()), t.written});
    simulated_cuda::run_on_stream(op.name, uses);
  }
  struct Pair {
    Tensor device, cpu;
    bool written;
  };
  const Operator& op;
  std::vector<Pair> tensors;

  static Tensor view(c10::Storage s, DispatchKey key, const Tensor& like) {
    Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(key), like.dtype());
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
    return t;
  }

 private:
  // Moves the memory of a CPU storage to the device.
  static c10::DataPtr take_memory(c10::StorageImpl* cpu) {
    return to_device(cpu->set_data_ptr(c10::DataPtr(nullptr, kCPU)), cpu->nbytes());
  }
  c10::Storage device(const c10::Storage& cpu) {
    for (const auto& [mine, host] : storages)
      if (host.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) return mine;
    const int64_t size = int64_t(cpu.nbytes());
    c10::Storage mine(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), c10::SymInt(size), take_memory(cpu.unsafeGetStorageImpl()),
        device_allocator(), true));
    storages.emplace_back(mine, cpu);
    return mine;
  }
  Tensor device(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (const Pair& pair : tensors)
      if (pair.cpu.is_same(t)) return pair.device;
    for (const Tensor& given : given_on_cpu)
      if (given.is_same(t)) return t;
    const Tensor result = view(device(t.storage()), DispatchKey::CUDA, t);
    tensors.push_back({result, t, true});
    return result;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // of the device, of the CPU
  std::vector<Tensor> given_on_cpu;
};

// Returns the argument with tensors on the same memory that do not keep the autograd graph alive.
IValue without_autograd(const IValue& v) {
  return map_tensors(v, [](const Tensor& t) {
    return t.defined() && t.is_cuda() ? Call::view(t.storage(), DispatchKey::CUDA, t) : t;
  });
}

// Copies a result of a replay to the memory of the recorded result.
void overwrite(const IValue& recorded, const IValue& now, const std::string& name) {
  if (recorded.isTensorList()) {
    const auto to = recorded.toTensorVector(), from = now.toTensorVector();
    for (size_t i = 0; i < to.size(); ++i) overwrite(to[i], from[i], name);
    return;
  }
  if (!recorded.isTensor() || !recorded.toTensor().defined()) return;
  const Tensor to = recorded.toTensor(), from = now.toTensor();
  if (!to.is_cuda() || to.numel() == 0 || to.storage().data() == from.storage().data()) return;
  TORCH_CHECK(to.sizes() == from.sizes() && to.strides() == from.strides(), name,
              " of a replay has another shape");
  const Lock lock(mutex());
  run_on_stream(name, {{block_at(to.storage().data()), true}});
  std::memcpy(bytes_at(to.storage().data()), bytes_at(from.storage().data()),
              std::min(to.storage().nbytes(), from.storage().nbytes()));
}

void run_on_cpu(const c10::OperatorHandle& handle, const Operator& op, Stack* stack) {
  Call call(op);
  const size_t n = op.writes.size(), base = stack->size() - n;
  const bool starts_kernel = !op.only_metadata || !op.why_host_waits.empty();
  Stack given_to_graph;
  if (starts_kernel && recording())
    for (size_t i = 0; i < n; ++i) given_to_graph.push_back(without_autograd((*stack)[base + i]));
  for (size_t i = 0; i < n; ++i) (*stack)[base + i] = call.host((*stack)[base + i], op.writes[i]);
  const size_t given = call.tensors.size();
  do_copies_before(clock_of(current_stream()));
  if (starts_kernel) call.run_on_stream();
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(stack);
  }
  call.update_arguments();
  // A view of a normal tensor is a normal tensor, even if inference mode is on.
  std::optional<c10::InferenceMode> no_inference_mode;
  if (op.only_metadata && given > 0 && !call.tensors[0].device.is_inference())
    no_inference_mode.emplace(false);
  for (size_t i = stack->size() - handle.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = call.device((*stack)[i]);
  if (given_to_graph.empty()) return;
  Stack results;
  for (size_t i = stack->size() - handle.schema().returns().size(); i < stack->size(); ++i)
    results.push_back(without_autograd((*stack)[i]));
  record_only([handle, &op, given_to_graph, results] {
    Stack again = given_to_graph;
    run_on_cpu(handle, op, &again);
    for (size_t i = 0; i < results.size(); ++i)
      overwrite(results[i], again[again.size() - results.size() + i], op.name);
  });
}

void fallback(const c10::OperatorHandle& handle, Stack* stack) {
  const Operator& op = operator_of(handle);
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_kernel, "Could not run '", handle.schema().name(),
                              "' with arguments from the 'CUDA' backend: it has no kernel for CUDA");
  throw_if_failed();
  const size_t base = stack->size() - op.writes.size();
  std::string why = op.why_host_waits;
  const auto check = [&](const Tensor& t) {
    if (!t.defined()) return t;
    const bool mask = t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    if (op.takes_indices && mask) why = "size of the result of " + op.name + " with a mask";
    if (op.takes_indices && t.is_cpu()) why = op.name + " with indices on the CPU";
    TORCH_CHECK(
        !t.is_cpu() || op.takes_indices || t.dim() == 0 || op.only_metadata,
        "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu (",
        op.name, ", ", t.sizes(), ")");
    return t;
  };
  for (size_t i = base; i < stack->size(); ++i)
    if (!op.takes_indices || (*stack)[i].isOptionalTensorList()) map_tensors((*stack)[i], check);
  if (!op.only_metadata) count_call();
  if (!why.empty()) host_waits_for(why);
  run_on_cpu(handle, op, stack);
}

// ---- operators about memory

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(),
                                   c10::DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(type),
                                   format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), c10::DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(type));
}

Tensor& copy(Tensor& self, const Tensor& src, bool non_blocking) {
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  const Operator& op = operator_of(handle);
  throw_if_failed();
  if (self.is_same(src) || self.numel() == 0) return self;
  const bool to_device = src.is_cpu(), to_host = self.is_cpu(), across = to_device || to_host;
  count_call();
  // CUDA could record a copy from pinned memory, but a replay would read this memory again.
  if (across) refuse_in_recording("copy between host and device");
  const Tensor& on_host = to_device ? src : self;
  const bool same_layout = self.dtype() == src.dtype() && self.sizes() == src.sizes() &&
                           self.strides() == src.strides() && self.is_non_overlapping_and_dense();
  if (across && non_blocking && same_layout && is_pinned(on_host.const_data_ptr())) {
    const Lock lock(mutex());
    Call call(op);
    auto* device_bytes = static_cast<char*>(call.host(to_device ? self : src, to_device).data_ptr());
    auto* host_bytes = static_cast<char*>(const_cast<void*>(on_host.const_data_ptr()));
    const int stream = current_stream();
    if (to_host) do_copies_before(clock_of(stream));
    call.run_on_stream();
    if (to_host) std::memset(host_bytes, 0xFF, self.nbytes());  // NaN until the copy is done
    start_copy({to_device ? device_bytes : host_bytes, to_device ? host_bytes : device_bytes, self.nbytes(),
                stream, known(clock_of(stream), stream)});
    return self;
  }
  Stack stack{self, src, non_blocking};
  run_on_cpu(handle, op, &stack);
  if (across) host_waits_for("copy between host and device");
  return self;
}

void record_stream(Tensor& self, c10::Stream s) { record_on_stream(self.storage().data_ptr(), s); }

// ---- kernels of batch norm that torch has for CUDA only. Statistics are float32 for 16-bit types.

using OptionalTensor = std::optional<Tensor>;

const std::vector<int64_t> kAllButChannels{0, 2, 3};
Tensor per_channel(const Tensor& t) { return t.view({1, -1, 1, 1}); }
Tensor widened(const Tensor& t) { return t.scalar_type() == at::kDouble ? t : t.to(at::kFloat); }

std::tuple<Tensor, Tensor> batch_norm_stats(const Tensor& x, double eps) {
  const Tensor wide = widened(x);
  return {wide.mean(kAllButChannels), (wide.var(kAllButChannels, false) + eps).rsqrt()};
}
std::tuple<Tensor, Tensor> batch_norm_gather_stats_with_counts(
    const Tensor&, const Tensor& mean, const Tensor& inverse, const OptionalTensor& running_mean,
    const OptionalTensor& running_var, double momentum, double eps, const Tensor& counts) {
  const Tensor n = counts.unsqueeze(1), total = n.sum(), all_mean = (mean * n).sum(0) / total;
  const Tensor squares = ((inverse.pow(-2) - eps + (mean - all_mean).square()) * n).sum(0);
  running_mean->mul_(1 - momentum).add_(all_mean, momentum);
  running_var->mul_(1 - momentum).add_(squares / (total - 1), momentum);
  return {all_mean, (squares / total + eps).rsqrt()};
}
Tensor batch_norm_elemt(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                        const Tensor& mean, const Tensor& inverse, double) {
  const Tensor y = (widened(x) - per_channel(mean)) * per_channel(inverse);
  return (y * per_channel(widened(*weight)) + per_channel(widened(*bias))).to(x.scalar_type());
}
std::tuple<Tensor, Tensor, Tensor, Tensor> batch_norm_backward_reduce(const Tensor& grad, const Tensor& x,
                                                                      const Tensor& mean,
                                                                      const Tensor& inverse,
                                                                      const OptionalTensor& weight, bool,
                                                                      bool, bool) {
  const Tensor g = widened(grad), sum = g.sum(kAllButChannels);
  const Tensor product = (g * (widened(x) - per_channel(mean))).sum(kAllButChannels);
  const auto type = weight->scalar_type();
  return {sum, product, (product * inverse).to(type), sum.to(type, false, true)};
}
Tensor batch_norm_backward_elemt(const Tensor& grad, const Tensor& x, const Tensor& mean,
                                 const Tensor& inverse, const OptionalTensor& weight, const Tensor& sum,
                                 const Tensor& product, const Tensor& count) {
  const Tensor n = count.sum().to(mean.scalar_type());
  const Tensor d = widened(grad) - per_channel(sum / n) -
                   (widened(x) - per_channel(mean)) * per_channel(product / n * inverse * inverse);
  return (d * per_channel(inverse * widened(*weight))).to(x.scalar_type());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("record_stream", &record_stream);
  // Composite kernels precede a fallback. Where CUDA has a kernel of its own, which is where the CPU has one,
  // the fallback is registered by name.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    const std::string& overload = name.overload_name;
    const bool out = overload.size() >= 3 && overload.compare(overload.size() - 3, 3, "out") == 0;
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool by_name = name.name.rfind("aten::_foreach_", 0) == 0 || name.name == "aten::convolution" ||
                         name.name == "aten::convolution_backward";
    if ((composite && op->hasKernelForDispatchKey(DispatchKey::CPU)) || (by_name && !out))
      m.impl((name.name + (overload.empty() ? "" : "." + overload)).c_str(),
             torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace

Tensor host_view(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  const Lock lock(mutex());
  do_copies_before(clock_of(current_stream()));
  static const auto& op = *new Operator{"host_view"};
  Call call(op);
  Tensor cpu = call.host(t, /*write=*/true);
  call.run_on_stream();
  // The view keeps the device tensor alive.
  auto* storage = cpu.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(
      {storage->mutable_data(), new Tensor(t), [](void* p) { delete static_cast<Tensor*>(p); }, kCPU});
  return cpu;
}

}  // namespace simulated_cuda
