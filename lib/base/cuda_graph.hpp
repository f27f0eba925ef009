// SPDX-License-Identifier: Apache-2.0
// CUDA graphs: kernels that are recorded once, and then launched together with one call.
#pragma once

#include <functional>

#include "base/torch.hpp"

namespace yolox {

// Launches the kernels of a CUDA graph on the current stream. The graph is freed with the last copy.
using CudaGraph = std::function<void()>;

// Records the kernels that record() launches on the current stream of the device, also those of backward().
// Recording does not run them. record() must not wait for the device and must not copy between host and
// device. Memory that it reads must stay where it is as long as the graph is used. Throws the exception of
// record(), or std::runtime_error if the kernels cannot be recorded, or if the program was built without
// CUDA.
//
// Graphs that exist at the same time share one memory pool, so that a replay overwrites the memory of the
// other graphs. Therefore read the results of a replay, or copy them on the same stream, before the next
// replay.
CudaGraph record_cuda_graph(torch::Device device, const std::function<void()>& record);

// Returns true while a graph is being recorded.
bool is_recording_cuda_graph();

}  // namespace yolox
