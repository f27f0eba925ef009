// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace c10::cuda {
inline void set_device(DeviceIndex i) { impl::VirtualGuardImpl(kCUDA).setDevice({kCUDA, i}); }
inline DeviceIndex current_device() { return impl::VirtualGuardImpl(kCUDA).getDevice().index(); }
}  // namespace c10::cuda
