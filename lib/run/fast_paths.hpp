// SPDX-License-Identifier: Apache-2.0
// Fast paths of a GPU (--fast): fused kernels of batch norm and SiLU in place of operations of torch (norm),
// and CUDA graphs in place of single launches (graph). ./gpu-check compares both with what they replace. If
// it has passed, it writes a note, and --fast auto uses the paths that the note names.
#pragma once
#include <torch/torch.h>

#include <string>

#include "config.hpp"
#include "ddp.hpp"

namespace yolox {

// Returns the line of fast-paths.txt for this GPU and program: "GPU; driver; LibTorch; revision: norm graph".
// The names are those of all fast paths that this program contains. several: with "ranks", which means that
// graphs were checked on several GPUs.
std::string fast_path_note(torch::Device device, bool several);

// Selects the fast paths of a run and turns them on. Sets config.fast to their names, so that a resumed run
// uses the same. auto: those of fast-paths.txt in ~/.cache/yolox ($XDG_CACHE_HOME/yolox, $YOLOX_CACHE_DIR),
// if it has the line fast_path_note() on the machines of all ranks. Names: these paths, without a check.
// Returns a line for the log, or "". graphs: the training loop can use CUDA graphs. Throws UsageError if
// --fast names a path that does not exist here. All ranks must call it together.
std::string use_fast_paths(Config& config, torch::Device device, Ranks& ranks, bool graphs);

// Returns true if use_fast_paths() has decided to use this path.
bool uses_fast_path(const Config& config, const std::string& name);

}  // namespace yolox
