// The ranks of a training, one process each: where a process stands among them, and `--gpus N` or `--procs
// N`, which starts them on this machine and watches over them.
//
// A rank learns its place from the variables of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
// MASTER_ADDR, MASTER_PORT. The launcher here sets them too. Under `srun` those of SLURM serve. A WORLD_SIZE
// of 1, which some clusters set everywhere, says nothing.
#pragma once
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/flags.hpp"
#include "ddp/rank_info.hpp"
#include "run/log.hpp"

namespace yolox {

// ---- where a process stands

// ---- the launcher

struct Launch {
  int ranks = 1;       // on this machine
  int nodes = 1;       // machines
  int node = 0;        // which of them this one is
  std::string master;  // HOST:PORT where machine 0 is found; empty: there is one machine
  int restarts = 0;    // how often a training that has failed is resumed
};

// The words of a command line that resumes a run: what belongs to its beginning goes, and with --bs auto what
// that has found.
std::vector<std::string> resumed_words(const std::vector<std::string>& words, const std::string& run);

namespace launch_detail {

// A rank as the launcher sees it.
struct Child {
  pid_t pid = 0;     // 0: it has ended
  int status = 0;    // of waitpid()
  int output = -1;   // what it says; of rank 0 only its errors
  std::string said;  // the end of that
};

// A socket on a free port of this machine, which other machines cannot reach.
int listen_here(int& port);

// Starts this program again as a rank. `reports`: where the first rank here tells the run folder.
Child start_rank(const Launch& l, int local_rank, int port, int listening, int reports,
                 const std::vector<std::string>& words);

std::string how_it_ended(int status);

// The last lines of a text, indented.
std::string last_lines(const std::string& text, size_t most);

// Runs the ranks to their end. Gives the exit code: 0 when all ended well, else that of the first that
// failed, which it names. run: their folder, when they have saved a checkpoint there.
int run_ranks(const Launch& l, const std::vector<std::string>& words, std::string& run);

}  // namespace launch_detail

// Starts the ranks and gives the exit code of the training when they have ended. Signals that end a training
// are passed on to them. A training that fails is resumed `restarts` times, if it has saved anything.
int launch(const Launch& l, int argc, char** argv);

}  // namespace yolox
