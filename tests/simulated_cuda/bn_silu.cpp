// SPDX-License-Identifier: Apache-2.0
// The kernels of layers/bn_silu.cu on the simulated device. Each launch counts as one operator call. With the
// environment variable SIMULATED_CUDA_KERNELS=incomplete they leave out the last block.
#include <cstdlib>
#include <string>
#include <type_traits>

#include "emulated_cuda.hpp"
#include "state.hpp"

namespace yolox::bn_silu_kernels {
namespace {

using namespace simulated_cuda;

template <class T>
Use use_of(T argument) {
  if constexpr (std::is_pointer_v<T>)
    return {block_at(argument), !std::is_const_v<std::remove_pointer_t<T>>};
  else
    return {nullptr, false};
}
template <class T>
T on_host(T argument) {
  if constexpr (std::is_pointer_v<T>)
    return block_at(argument) ? reinterpret_cast<T>(bytes_at(argument)) : nullptr;
  else
    return argument;
}

}  // namespace

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, int threads, void* stream, Arguments... arguments) {
  const std::string name = "kernel of bn_silu.cu";
  if (std::getenv("SIMULATED_CUDA_KERNELS")) --blocks.x;
  throw_if_failed();
  count_call();
  if (stream != native_handle(current_stream())) report_error(name + " not on the current stream");
  const auto work = [=] {
    do_copies_before(clock_of(current_stream()));
    run_on_stream(name, {use_of(static_cast<Parameters>(arguments))...});
    emulated_cuda::run(kernel, blocks, threads, on_host(static_cast<Parameters>(arguments))...);
  };
  work();
  record_only(work);
}

}  // namespace yolox::bn_silu_kernels

#include "layers/bn_silu.cu"
