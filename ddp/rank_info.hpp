// Which rank this process is: from the variables of torchrun, SLURM or the launcher here.
#pragma once
#include <sched.h>
#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>

#include "base/error.hpp"

namespace yolox {

struct Place {
  int rank = 0, world = 1;              // among all
  int local_rank = 0, local_world = 1;  // on this machine
  std::string host;                     // where all find each other: the machine of rank 0
  int port = 0;
  bool of_agent = false;  // torchrun itself listens there, else rank 0 does
  int listening = -1;     // socket that the launcher has opened for rank 0; -1: rank 0 opens one
  bool launched = false;  // by the launcher here

  // Others have started the ranks.
  bool given() const { return world > 1 && !launched; }
};

// The exit code of a rank that another one's end has ended: not the one to look at.
constexpr int kLostRank = 75;

std::string variable(const char* name);

// "gpu[003-007,12]-ib,login" -> "gpu003-ib"
std::string first_host(const std::string& list);

// The entry of a list as SLURM writes them: "2(x3),1", 3 -> "1"; its last one where it is shorter.
std::string slurm_entry(const std::string& list, int index);

// From the variables of torchrun or SLURM; one rank where there are none. Throws UsageError, naming the
// variable, where they make no sense.
Place place_of_this_process();

// Cores that this process may use.
int usable_cores();

}  // namespace yolox
