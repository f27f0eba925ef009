// SPDX-License-Identifier: Apache-2.0
// The timeout of a training (--timeout). Each process watches itself alone. If it makes no progress for too
// long, it prints where it is and what it waits for, and ends. Time in which the process is suspended does
// not count, so that a run that was suspended with all its ranks, as by `docker pause`, continues.
#pragma once
#include <string>

namespace yolox {

// Exit codes of a rank that lost another rank, or waited for it in vain, and of one whose NCCL does not
// start.
constexpr int kLostRank = 75, kNcclFailed = 77;

// Sets the timeout. It begins with the first call of made_progress(). When it expires, the process ends: with
// kLostRank if it waits for other ranks, otherwise with 1. process: what this process is, for the message.
// nccl_remedy: what helps, while NCCL connects the GPUs; the process then ends with kNcclFailed.
void start_timeout(double seconds, const std::string& process, const char* nccl_remedy = nullptr);

// Restarts the timeout. Call it after each step, evaluated batch and save. where: what this process does from
// now on, as "step 12", "the evaluation after step 40". Empty: stops the timeout until the next call.
void made_progress(const std::string& where);

// Scope guard: this process waits for `what`: "other ranks", "the data loader", "the GPU", or "the GPU, or
// other ranks". The innermost guard counts. A null pointer: it computes.
struct WaitsFor {
  explicit WaitsFor(const char* what);
  ~WaitsFor();
  WaitsFor(const WaitsFor&) = delete;

 private:
  const char* const before;
};

}  // namespace yolox
