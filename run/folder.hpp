// The folder of a run: made, taken, found again.
#pragma once
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "checkpoint/pth.hpp"
#include "run/state.hpp"

namespace yolox {

// Its checkpoints, newest first: last.pth, then those before it, step_N.pth.
std::vector<std::string> checkpoints_of(const std::string& run);

// The newest run below runs/ that has a checkpoint; empty if there is none.
std::string newest_run();

// A run that has not done a step makes room for another one in its folder.
void forget_unstarted(const std::string& run);

// What writing was killed amid leaves behind.
void remove_torn_files(const std::string& run);

// One training at a time works in a folder: until this process ends, however it ends. Throws where another
// one does. Where a file system knows no locks, nothing is checked.
void take_run_folder(const std::string& run);

// Makes the folder of a new run and takes it: `wanted`, or runs/<name>, runs/<name>-2, ... when that is
// empty.
std::string make_run_folder(const std::string& wanted, const std::string& name);

}  // namespace yolox
