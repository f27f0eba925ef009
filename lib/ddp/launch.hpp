// SPDX-License-Identifier: Apache-2.0
// Launcher of `--gpus N` and `--procs N`: starts one process per rank on this machine and supervises them.
//
// The launcher sets the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT. A rank under torchrun reads the same variables, a rank under `srun` those of
// SLURM (rank_info.hpp). WORLD_SIZE=1 is ignored, because some clusters set it in every process.
#pragma once

namespace yolox {

// Settings of the launcher.
struct Launch {
  int ranks = 1;     // number of ranks
  int restarts = 0;  // maximum number of restarts after a failure
};

// Opens a listening socket on a port of the loopback interface; port 0: a free one. Returns the file
// descriptor.
int listen_on_loopback(int port);

// Opens a listening socket on a free port of the loopback interface. Returns the file descriptor and sets
// `port`.
int listen_on_free_port(int& port);

// Starts the ranks, waits for them and returns the exit code of the run. Forwards the signals that end a run
// to the ranks. Resumes a failed run up to l.restarts times if a checkpoint was saved, and always if a rank
// ended with kNeedsRestart.
int launch(const Launch& l, int argc, char** argv);

}  // namespace yolox
