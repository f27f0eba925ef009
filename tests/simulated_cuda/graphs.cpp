// SPDX-License-Identifier: Apache-2.0
// CUDA graphs of the simulated device. While a graph is recorded, the work of its stream runs, because its
// results have the shapes of the next operations. At the end of the recording, memory is as it was before,
// and memory that was allocated meanwhile is NaN, as on a GPU, where nothing has run. A replay calls the same
// operators on the same memory. First it fills the memory of all graphs of the pool with NaN, because another
// graph may have overwritten it.
#include <ATen/cuda/CUDAGraph.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "state.hpp"

namespace simulated_cuda {

struct Graph {
  int stream;
  std::vector<std::function<void()>> work;
  std::set<Block*> blocks;  // allocated while it was recorded
  std::set<Block*> freed;   // those of them that tensors no longer use
  std::map<Block*, std::vector<char>> before;
  std::string failure;

  ~Graph();
};

static std::set<Graph*>& graphs() {  // all use the same pool
  static auto* all = new std::set<Graph*>;
  return *all;
}
bool has_graphs() {
  const Lock lock(mutex());
  return !graphs().empty();
}

static std::shared_ptr<Graph>& recorded() {
  static auto* one = new std::shared_ptr<Graph>;
  return *one;
}

Graph::~Graph() {
  const Lock lock(mutex());
  graphs().erase(this);
  for (Block* b : blocks) {
    if (freed.count(b)) {
      erase(b);
      continue;
    }
    b->stream = stream / kStreams * kStreams;
    b->written_by = -1;
    b->read_at.clear();
  }
}

bool recording() {
  const Lock lock(mutex());
  return recorded() && recorded()->stream == current_stream();
}

void refuse_in_recording(const std::string& what) {
  const Lock lock(mutex());
  if (!recording()) return;
  recorded()->failure = what;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

bool record_only(std::function<void()> work) {
  const Lock lock(mutex());
  if (!recording()) return false;
  recorded()->work.push_back(std::move(work));
  return true;
}

void note_allocation(Block* block) {
  if (!recording()) return;
  block->graph = recorded();
  recorded()->blocks.insert(block);
}

bool keeps(Block* block) {
  const auto graph = block->graph.lock();
  if (graph) graph->freed.insert(block);
  return graph != nullptr;
}

}  // namespace simulated_cuda

namespace at::cuda {

using namespace simulated_cuda;

c10::MempoolId_t graph_pool_handle() { return {0, 1}; }

void CUDAGraph::capture_begin(c10::MempoolId_t, cudaStreamCaptureMode) {
  const Lock lock(mutex());
  throw_if_failed();
  TORCH_CHECK(current_stream() % kStreams != 0, "CUDA graphs must be captured on a non-default stream");
  TORCH_CHECK(!recorded(), "another graph is being recorded");
  graph = std::make_shared<Graph>();
  graph->stream = current_stream();
  for (const auto& [bytes, b] : blocks())
    if (b->graph.expired()) graph->before[b].assign(bytes, bytes + b->size);
  graphs().insert(graph.get());
  recorded() = graph;
}

void CUDAGraph::capture_end() {
  const Lock lock(mutex());
  TORCH_CHECK(recorded() && recorded() == graph, "no recording of this graph");
  recorded().reset();
  for (const auto& [bytes, b] : blocks()) {
    const auto at = graph->before.find(b);
    if (at != graph->before.end() && at->second.size() == b->size)
      std::memcpy(bytes, at->second.data(), b->size);
  }
  graph->before.clear();
  for (Block* b : graph->blocks) std::memset(b->bytes(), 0xFF, b->size);
  TORCH_CHECK(graph->failure.empty(), "CUDA error: operation failed due to a previous error during capture (",
              graph->failure, ")");
}

void CUDAGraph::replay() {
  throw_if_failed();
  TORCH_CHECK(graph, "Called CUDAGraph::replay without a preceding successful capture.");
  count_call();
  {
    const Lock lock(mutex());
    do_copies_before(clock_of(current_stream()));
    for (const Graph* other : graphs())
      for (Block* b : other->blocks) std::memset(b->bytes(), 0xFF, b->size);
  }
  // With SIMULATED_CUDA_GRAPHS=incomplete, the last quarter of the work is missing.
  const size_t n = graph->work.size(), missing = std::getenv("SIMULATED_CUDA_GRAPHS") ? n / 4 : 0;
  for (size_t i = 0; i < n - missing; ++i) graph->work[i]();
}

}  // namespace at::cuda
