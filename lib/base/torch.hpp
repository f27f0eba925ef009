// SPDX-License-Identifier: Apache-2.0
// The parts of LibTorch that our files use, and what differs between 2.10 and 2.15. A model with other
// modules includes their headers, such as torch/nn/modules/rnn.h. All of torch/torch.h compiles more slowly.
#pragma once
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/version.h>
#if defined(YOLOX_CUDA) && !defined(YOLOX_SIMULATED_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

#include <memory>
#include <utility>

#define YOLOX_TORCH_AT_LEAST(minor) (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= (minor))

namespace yolox {

// Returns a new node of the autograd graph, as torch::autograd::set_history() takes it. From 2.13 on, nodes
// have their own reference count.
template <class Node, class... Args>
auto make_node(Args&&... args) {
#if YOLOX_TORCH_AT_LEAST(13)
  return c10::make_intrusive<Node>(std::forward<Args>(args)...);
#else
  return std::make_shared<Node>(std::forward<Args>(args)...);
#endif
}

// Returns the cudaStream_t of a stream.
inline void* native_stream(const c10::Stream& stream) {
#if YOLOX_TORCH_AT_LEAST(11)
  return stream.native_handle();
#elif defined(YOLOX_CUDA) && !defined(YOLOX_SIMULATED_CUDA)
  return c10::cuda::CUDAStream(stream).stream();
#else
  (void)stream;
  return nullptr;
#endif
}

}  // namespace yolox
