// Where a rank does not come, the others wait in a collective that knows neither who is missing nor when to
// give up. A watchdog beside each rank does: it tells the others where its rank is, and when that has been at
// one place for too long, it says who keeps it waiting and ends the process.
//
// Too long is measured while the process runs: one that was suspended with all others, as by `docker pause`,
// goes on.
#pragma once
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "ddp/rank_info.hpp"
#include "run/log.hpp"

namespace yolox {

class Watchdog {
 public:
  // names: where each rank runs. A rank may be at one place for so many seconds. connect() gives a connection
  // of its own to the store that all ranks share, which lives with rank 0.
  Watchdog(int rank, std::vector<std::string> names, double seconds,
           std::function<c10::intrusive_ptr<c10d::Store>()> connect);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  // The rank has come to a place that every rank comes to. Before the first call nothing is watched. patient:
  // others may take long to come, as long as their processes run.
  void at(const std::string& where, bool patient = false);
  // It goes on, where ranks have unlike amounts of work.
  void still_at_work();

  std::atomic<bool> waiting{false};  // the rank waits for others, as far as one can tell from within

 private:
  // Tells the others every second that this process runs, and where; and looks for who is missing.
  void tell_and_look();
  // Where rank 0 hangs, and with it the store, so does the thread above; this one needs no connection. It
  // counts the time, too.
  void end_in_time();

  // False: this object is at its end.
  bool pause(double time);
  bool late();

  // What a rank tells of itself.
  struct Beat {
    int64_t number = 0, count = 0;  // of these; of places that it has come to
    bool waiting = false;
    double age = 0;  // seconds that it is there, or since it last went on
    std::string where;
  };
  void tell(c10d::Store& store);
  std::vector<Beat> all_told(c10d::Store& store) const;
  // Who keeps the others waiting: a process that does not run; else who is behind; else who does not wait.
  // False: nobody, yet; a rank that goes on is not late itself, and some places are patiently waited at.
  bool report_missing(c10d::Store& store);
  bool say(const std::string& late);

  const int rank;
  const std::vector<std::string> names;
  const double seconds;
  const std::function<c10::intrusive_ptr<c10d::Store>()> connect;
  std::thread threads[2];
  std::mutex mutex;
  std::condition_variable wake;
  bool ended = false, patiently = false;
  std::string here;
  double age = 0;  // seconds that the process has run since the rank came to where it is, or last went on
  std::atomic<double> silent{0};  // and since the store last answered
  int64_t count = 0, beats = 0;
};

}  // namespace yolox
