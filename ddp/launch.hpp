// SPDX-License-Identifier: Apache-2.0
// Launcher of `--gpus N` and `--procs N`: starts one process per rank on this machine and supervises them.
//
// The launcher sets the environment variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT. A rank under torchrun reads the same variables, a rank under `srun` those of
// SLURM (rank_info.hpp). WORLD_SIZE=1 is ignored, because some clusters set it in every process.
#pragma once

#include <string>
#include <vector>

namespace yolox {

// Settings of the launcher.
struct Launch {
  int ranks = 1;       // number of ranks on this node
  int nodes = 1;       // number of nodes (machines)
  int node = 0;        // index of this node
  std::string master;  // HOST:PORT of node 0, see parse_address(); empty with a single node
  int restarts = 0;    // maximum number of restarts after a failure
};

// Returns the command line that resumes a run as it was begun: with --resume auto --out RUN.
std::vector<std::string> resume_command_line(const std::vector<std::string>& words, const std::string& run);

namespace launch_detail {

// Child process of the launcher: one rank.
struct Child {
  pid_t pid = 0;            // 0: the process has ended
  int status = 0;           // from waitpid()
  int output = -1;          // pipe of stdout and stderr; only stderr for the first rank of the node
  std::string output_tail;  // the end of the output
};

// Opens a listening socket on a port of the loopback interface; port 0: a free one. Returns the file
// descriptor.
int listen_on_loopback(int port);

// Opens a listening socket on a free port of the loopback interface. Returns the file descriptor and sets
// `port`.
int listen_on_free_port(int& port);

// Replaces this process by this program with another command line. Ends the process if that fails.
[[noreturn]] void start_again(const std::vector<std::string>& words);

// Starts this program again as a rank. listening: socket for the store, or -1. reports: pipe for
// Ranks::report() of the first rank of the node. words: command line.
Child start_rank(const Launch& l, int local_rank, int port, int listening, int reports,
                 const std::vector<std::string>& words);

// Returns a description of a status from waitpid(): "failed with exit code 1", "was killed by SIGKILL".
std::string describe_exit_status(int status);

// Returns true if the process is stopped (SIGSTOP), so that it cannot end by itself.
bool is_stopped(pid_t process);

// Returns the last `most` lines of a text, indented, without empty lines.
std::string last_lines(const std::string& text, size_t most);

// Runs the ranks until all have ended. Returns 0, or the exit code of the first rank that failed, which is
// printed with its last lines. Sets `run` to the run folder if a checkpoint was saved.
int run_ranks(const Launch& l, const std::vector<std::string>& words, std::string& run);

}  // namespace launch_detail

// Starts the ranks, waits for them and returns the exit code of the run. Forwards the signals that end a run
// to the ranks. Resumes a failed run up to l.restarts times if a checkpoint was saved, and on a single node
// always if a rank ended with kNeedsRestart.
int launch(const Launch& l, int argc, char** argv);

}  // namespace yolox
