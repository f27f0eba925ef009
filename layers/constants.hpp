// SPDX-License-Identifier: Apache-2.0
// Tensors that depend on sizes only, such as the positions of anchor points. Computed once and kept.
#pragma once
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>

namespace yolox {

// Returns make(), and in the next call with this key and this type of `make` the same result. The key must
// have everything that the result depends on, also device and dtype. Results are never freed, because CUDA
// graphs read them at fixed addresses.
template <class Key, class Make>
auto constant(const Key& key, const Make& make) {
  // Not destroyed at the end of the program, because CUDA may be gone by then.
  thread_local auto& all = *new std::map<Key, decltype(make())>;
  const auto found = all.find(key);
  if (found != all.end()) return found->second;
  // Plain tensors, although the first caller may be in inference mode or record for --dtr (dispatch key
  // Fake).
  const c10::InferenceMode no_inference_mode(false);
  const c10::impl::ExcludeDispatchKeyGuard no_dtr(c10::DispatchKey::Fake);
  return all[key] = make();
}

}  // namespace yolox
