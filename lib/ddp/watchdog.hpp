// SPDX-License-Identifier: Apache-2.0
// Watchdog for collectives. If a rank is missing, the other ranks hang in a collective that does not know
// which rank is missing. The watchdog of each rank sends heartbeats with the current barrier of the rank to
// the store. After the timeout, it prints which rank is missing and ends the process.
//
// The timeout counts only the time in which the process runs. A run that was suspended with all its ranks, as
// by `docker pause`, continues.
#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace yolox {

// Heartbeat and timeout threads of a rank.
class Watchdog {
 public:
  // names: host and process of each rank. seconds: timeout at a barrier. connect(): returns a separate
  // connection to the store, which rank 0 hosts. Starts two threads.
  Watchdog(int rank, std::vector<std::string> names, double seconds,
           std::function<c10::intrusive_ptr<c10d::Store>()> connect);

  // Reports that this rank has reached the named barrier and restarts the timeout. The timeout is off before
  // the first call. patient: at this barrier, the run ends only if the process of a rank does not run.
  // Thread-safe.
  void reached(const std::string& where, bool patient = false);
  // Restarts the timeout. Call it in phases in which ranks do different amounts of work. Thread-safe.
  void restart_timeout();

  std::atomic<bool> waiting{false};  // this rank is in a collective, or may be (in backward)

 private:
  // Heartbeat thread: writes a heartbeat to the store about every second, and looks for missing ranks after
  // the timeout.
  void heartbeat_loop(const std::stop_token& stop);
  // Timer thread: counts the time and ends the process if the store does not respond. Needs no connection,
  // because the heartbeat thread hangs if rank 0 hangs, which hosts the store.
  void timeout_loop(const std::stop_token& stop);

  // Returns true if the timeout expires within `time` seconds, or has expired.
  bool expires_within(double time);
  bool expired() { return expires_within(0); }

  // Interval of heartbeats shortly before the timeout, in seconds.
  static constexpr double kInterval = 0.5;
  // Heartbeat of a rank.
  struct Heartbeat {
    int64_t number = 0, count = 0;  // numbers of heartbeats and of barriers reached
    bool waiting = false;           // the rank is in a collective
    double age = 0;                 // seconds since the barrier or the last restart of the timeout
    std::string where;              // name of the barrier
  };
  // Writes the heartbeat of this rank.
  void send_heartbeat(c10d::Store& store);
  // Reads the latest heartbeats of all ranks.
  std::vector<Heartbeat> read_heartbeats(c10d::Store& store) const;
  // Finds the ranks that the others wait for and prints the error: ranks without heartbeat, else ranks at an
  // earlier barrier, else ranks outside of a collective. before: the heartbeats some time ago. Returns false
  // if this rank must continue to wait: the timeout was restarted, or all processes run and another rank
  // makes progress or the barrier is patient.
  bool report_missing(c10d::Store& store, const std::vector<Heartbeat>& before);
  // Ends the process after report_missing(). Waits up to 6 s for the ranks that run, because the end of a
  // process breaks their connections, and the store ends with rank 0. before: as for report_missing().
  [[noreturn]] void leave(c10d::Store& store, const std::vector<Heartbeat>& before,
                          const std::stop_token& stop);
  // Prints the error line. Returns true.
  bool print_error(const std::string& late);

  const int rank;
  const std::vector<std::string> names;
  const double seconds;
  const std::function<c10::intrusive_ptr<c10d::Store>()> connect;
  std::mutex mutex;
  std::atomic<bool> is_patient{false};
  std::string here;
  double age = 0;                 // seconds of run time since the barrier or the last restart of the timeout
  std::atomic<double> silent{0};  // seconds of run time since the last response of the store
  int64_t count = 0, beats = 0;
  // The last members, because the threads use the others until they are joined.
  std::jthread heartbeats, timer;
};

// Returns a thread that ends the process with an error if the thread still exists after `seconds` of run
// time. The constructor of a store and its first calls have no timeout if the other end accepts the
// connection and never answers.
[[nodiscard]] std::jthread start_deadline(double seconds, std::string message);

}  // namespace yolox
