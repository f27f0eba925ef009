// SPDX-License-Identifier: Apache-2.0
// NCCL of the simulated device: gloo on the bytes of its tensors. A collective that is recorded in a graph
// communicates in the replays only.
#pragma once
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "simulated_cuda.hpp"

namespace c10d {

class ProcessGroupNCCL : public Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  struct Options : Backend::Options {
    Options() : Backend::Options("nccl") {}
    static c10::intrusive_ptr<Options> create(bool = false) { return c10::make_intrusive<Options>(); }
  };

  ProcessGroupNCCL(const c10::intrusive_ptr<Store>& store, int rank, int size,
                   const c10::intrusive_ptr<Options>& options)
      : Backend(rank, size) {
    const char* error = std::getenv("SIMULATED_NCCL_ERROR");
    if (error) throw std::runtime_error(error);
    auto gloo_options = ProcessGroupGloo::Options::create(options->timeout);
    gloo_options->devices.push_back(ProcessGroupGloo::createDefaultDevice());
    gloo = c10::make_intrusive<ProcessGroupGloo>(c10::make_intrusive<PrefixStore>("simulated_nccl", store),
                                                 rank, size, gloo_options);
  }
  const std::string getBackendName() const override { return "nccl"; }
  void shutdown() override {
    TORCH_CHECK(!simulated_cuda::has_graphs(), "NCCL would wait for the end of graphs with its collectives");
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, tensors, [this, tensors, options] {
      auto host = host_views(tensors);
      return gloo->allreduce(host, options);
    });
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run(OpType::BROADCAST, tensors, [this, tensors, options] {
      auto host = host_views(tensors);
      return gloo->broadcast(host, options);
    });
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, {output}, [this, output, input, options] {
      std::vector<Tensors> rows{host_views(output.unbind())};
      auto mine = host_views({input});
      return gloo->allgather(rows, mine, options);
    });
  }

 private:
  struct Done : Work {
    Done(int rank, OpType type, const Tensors& tensors) : Work(rank, type) {
      future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                        std::vector<c10::Device>{tensors[0].device()});
      future->markCompleted(c10::IValue(tensors));
      finish();
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
    bool wait(std::chrono::milliseconds) override { return true; }
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  static Tensors host_views(const Tensors& tensors) {
    Tensors host;
    for (const auto& t : tensors) host.push_back(simulated_cuda::host_view(t));
    return host;
  }
  // start(): starts the collective.
  template <class Start>
  c10::intrusive_ptr<Work> run(OpType type, const Tensors& tensors, const Start& start) {
    const auto work = [start] {
      try {
        start()->wait();
      } catch (...) {  // as NCCL's watchdog thread does
        const char* handling = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
        if (!handling || *handling != '0') std::abort();
        throw;
      }
    };
    if (!simulated_cuda::record_only(work)) work();
    return c10::make_intrusive<Done>(rank_, type, tensors);
  }
  c10::intrusive_ptr<ProcessGroupGloo> gloo;
};

}  // namespace c10d
