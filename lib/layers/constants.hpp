// SPDX-License-Identifier: Apache-2.0
// Tensors that depend on sizes only, such as the positions of anchor points. Computed once and kept.
#pragma once
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <cstddef>
#include <map>

namespace yolox {

// While this is above 0, constant() keeps all results, because CUDA graphs read them at fixed addresses.
inline std::atomic<int> readers_of_constants{0};

// Returns make(), and in the next call with this key and this type of `make` the same result. The key must
// have everything that the result depends on, also device and dtype.
template <class Key, class Make>
auto constant(const Key& key, const Make& make) {
  constexpr size_t kMost = 64;  // of each type; images of arbitrary sizes would use memory without a limit
  // Not destroyed at the end of the program, because CUDA may be gone by then.
  thread_local auto& all = *new std::map<Key, decltype(make())>;
  const auto found = all.find(key);
  if (found != all.end()) return found->second;
  if (all.size() >= kMost && readers_of_constants == 0) all.clear();
  // Plain tensors, although the first caller may be in inference mode or record for --dtr (dispatch key
  // Fake).
  const c10::InferenceMode no_inference_mode(false);
  const c10::impl::ExcludeDispatchKeyGuard no_dtr(c10::DispatchKey::Fake);
  return all[key] = make();
}

}  // namespace yolox
