// SPDX-License-Identifier: Apache-2.0
#include "ddp/watchdog.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <sstream>

#include "base/error.hpp"
#include "base/program.hpp"
#include "ddp/launch.hpp"

namespace yolox {

// Sleeps for `time` seconds. Returns false if a stop has been requested.
static bool pause(double time, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  wake.wait_for(lock, stop, std::chrono::milliseconds(int64_t(1000 * time)), [] { return false; });
  return !stop.stop_requested();
}

Watchdog::Watchdog(int rank, std::vector<std::string> names, double seconds,
                   std::function<c10::intrusive_ptr<c10d::Store>()> connect)
    : rank(rank), names(std::move(names)), seconds(seconds), connect(std::move(connect)) {
  heartbeats = std::jthread([this](const std::stop_token& stop) { heartbeat_loop(stop); });
  timer = std::jthread([this](const std::stop_token& stop) { timeout_loop(stop); });
}

void Watchdog::reached(const std::string& where, bool patient) {
  std::lock_guard lock(mutex);
  here = where;
  age = 0;
  ++count;
  waiting = false;
  is_patient = patient;
}

void Watchdog::restart_timeout() {
  std::lock_guard lock(mutex);
  age = 0;
}

void Watchdog::heartbeat_loop(const std::stop_token& stop) {
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<Heartbeat> before;  // of all ranks at the start of the comparison; empty: not comparing
  int compared = 0;               // intervals of kInterval since then
  while (pause(before.empty() ? std::min(1.0, seconds / 5) : kInterval, stop)) {
    try {
      if (!store) store = connect();
      send_heartbeat(*store);
      store->check({concat("at/", rank)});  // set() does not wait for an answer, check() does
      silent = 0;
      // The first of the two readings that report_missing() compares lies this many intervals before the
      // timeout, so that the run ends when the timeout expires.
      const int intervals = is_patient ? 20 : 5;
      if (!expires_within(kInterval * intervals)) {
        before.clear();
      } else if (before.empty()) {
        before = read_heartbeats(*store);
        compared = 0;
      } else if (++compared >= intervals && expired()) {
        if (report_missing(*store, before)) leave(*store, before, stop);
        before.clear();
      }
    } catch (const std::exception&) {  // the store ended; at the end of a run it may end before this thread
      if (!expired() && !pause(5, stop)) return;
      print_error(concat("rank 0 (", names[0], "), whose process ended"));
      _exit(kLostRank);
    }
  }
}

void Watchdog::leave(c10d::Store& store, const std::vector<Heartbeat>& before, const std::stop_token& stop) {
  try {
    store.set(concat("left/", rank), std::vector<uint8_t>{1});
    const auto after = read_heartbeats(store);
    const auto is_reading = [&](size_t r) {
      return int(r) != rank && after[r].number != before[r].number && !store.check({concat("left/", r)});
    };
    for (int i = 0; i < 30; ++i) {
      size_t reading = 0;
      for (size_t r = 0; r < after.size(); ++r) reading += is_reading(r);
      if (reading == 0) break;
      pause(0.2, stop);
    }
    if (rank == 0 && names.size() > 2) pause(0.5, stop);  // ranks that have left still look for the others
  } catch (const std::exception&) {                       // rank 0 has ended first
  }
  _exit(kLostRank);
}

void Watchdog::timeout_loop(const std::stop_token& stop) {
  for (double before = now(); pause(0.2, stop); before = now()) {
    {
      std::lock_guard lock(mutex);
      const double ran = std::min(1.0, now() - before);  // a longer interval means a suspended process
      age += ran;
      silent = silent + ran;
    }
    if (!expired() || silent < std::clamp(seconds, 5.0, 12.0)) continue;
    print_error(concat("rank 0 (", names[0], "), which does not respond"));
    _exit(kLostRank);
  }
}

bool Watchdog::expires_within(double time) {
  std::lock_guard lock(mutex);
  return count > 0 && age > seconds - time;
}

void Watchdog::send_heartbeat(c10d::Store& store) {
  std::string text;
  {
    std::lock_guard lock(mutex);
    text = concat(++beats, " ", count, " ", waiting, " ", age, " ", here);
  }
  store.set(concat("at/", rank), std::vector<uint8_t>(text.begin(), text.end()));
}

std::vector<Watchdog::Heartbeat> Watchdog::read_heartbeats(c10d::Store& store) const {
  std::vector<Heartbeat> all(names.size());
  for (size_t r = 0; r < all.size(); ++r) {
    if (!store.check({concat("at/", r)})) continue;
    const auto bytes = store.get(concat("at/", r));
    std::istringstream in(std::string(bytes.begin(), bytes.end()));
    in >> all[r].number >> all[r].count >> all[r].waiting >> all[r].age >> std::ws;
    std::getline(in, all[r].where);
  }
  return all;
}

bool Watchdog::report_missing(c10d::Store& store, const std::vector<Heartbeat>& before) {
  const auto after = read_heartbeats(store);
  if (!expired()) return false;
  int64_t least = after[rank].count, most = least;
  for (const Heartbeat& b : after) {
    least = std::min(least, b.count);
    most = std::max(most, b.count);
  }
  using Is = std::function<bool(size_t)>;
  const char* dead_is = "whose process does not run";
  const Is dead = [&](size_t r) {
    return after[r].number == before[r].number && !store.check({concat("left/", r)});
  };
  const Is behind = [&](size_t r) { return after[r].count == least && least < most; };
  const Is busy = [&](size_t r) { return !after[r].waiting; };
  const Is going_on = [&](size_t r) { return !dead(r) && after[r].age <= seconds; };
  for (const auto& [is, what] : {std::pair(dead, dead_is), std::pair(behind, "which is behind"),
                                 std::pair(busy, "which is not in a collective")}) {
    std::vector<size_t> found;
    bool goes_on = is_patient;
    for (size_t r = 0; r < after.size(); ++r) {
      if (is(r)) found.push_back(r);
      goes_on |= going_on(r);
    }
    if (what != dead_is && goes_on) return false;
    // On a GPU, the host does not see that a kernel waits for other ranks: no rank seems to be in a
    // collective.
    if (found.empty() || found.size() == after.size()) continue;
    if (is(rank)) return print_error("nothing: the other ranks wait for this rank");
    std::string list;
    for (const size_t r : found)
      list += concat(list.empty() ? "" : ", ", "rank ", r, " (", names[r], "; ", after[r].where, ")");
    return print_error(concat(list, ", ", what));
  }
  return print_error("an unknown rank: all ranks are at the same barrier");
}

bool Watchdog::print_error(const std::string& late) {
  std::string text;
  {
    std::lock_guard lock(mutex);
    text = concat("error: rank ", rank, " has been at ", here, " for ", int64_t(age), " s (--timeout ",
                  seconds, "), waiting for ", late, "\n");
  }
  return write(2, text.data(), text.size()) != 0;
}

std::jthread start_deadline(double seconds, std::string message) {
  return std::jthread(
      [seconds, message = "error: " + std::move(message) + "\n"](const std::stop_token& stop) {
        double age = 0;
        for (double before = now(); pause(0.2, stop); before = now()) {
          age += std::min(1.0, now() - before);  // as in timeout_loop()
          if (age < seconds) continue;
          if (write(2, message.data(), message.size()) < 0) _exit(1);
          _exit(kLostRank);
        }
      });
}

}  // namespace yolox
