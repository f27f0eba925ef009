// SPDX-License-Identifier: Apache-2.0
#include "ddp/watchdog.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "base/error.hpp"
#include "ddp/rank_info.hpp"

namespace yolox {

Watchdog::Watchdog(int rank, std::vector<std::string> names, double seconds,
                   std::function<c10::intrusive_ptr<c10d::Store>()> connect)
    : rank(rank), names(std::move(names)), seconds(seconds), connect(std::move(connect)) {
  threads[0] = std::thread([this] { heartbeat_loop(); });
  threads[1] = std::thread([this] { timeout_loop(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex);
    ended = true;
  }
  wake.notify_all();
  for (auto& thread : threads) thread.join();
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

void Watchdog::heartbeat_loop() {
  c10::intrusive_ptr<c10d::Store> store;
  bool reported = false;
  while (pause(std::min(1.0, seconds / 5))) {
    try {
      if (!store) store = connect();
      send_heartbeat(*store);
      if (!expired()) continue;
      const std::vector<Heartbeat> before = read_heartbeats(*store);
      for (int i = is_patient ? 20 : 5; i > 0 && expired(); --i) {
        if (!pause(0.5)) return;
        send_heartbeat(*store);
      }
      if (!report_missing(before, read_heartbeats(*store))) continue;
      reported = true;
      // The end of this process breaks its connections, and the store ends with rank 0. Until then, the other
      // ranks have time to find the missing rank, too.
      for (int i = 0; i < 8; ++i) {
        pause(0.5);
        send_heartbeat(*store);
      }
      _exit(kLostRank);
    } catch (const std::exception&) {  // the store ended; at the end of a run it may end before this thread
      if (!reported) {
        if (!expired() && !pause(5)) return;
        print_error(concat("rank 0 (", names[0], "), whose process ended"));
      }
      _exit(kLostRank);
    }
  }
}

void Watchdog::timeout_loop() {
  constexpr double kStep = 0.2;  // also if the pause is longer, because the process was suspended
  while (pause(kStep)) {
    {
      std::lock_guard lock(mutex);
      age += kStep;
      silent = silent + kStep;
    }
    if (!expired() || silent < std::clamp(seconds, 5.0, 12.0)) continue;
    print_error(concat("rank 0 (", names[0], "), which does not respond"));
    _exit(kLostRank);
  }
}

bool Watchdog::pause(double time) {
  std::unique_lock lock(mutex);
  return !wake.wait_for(lock, std::chrono::milliseconds(int64_t(1000 * time)), [this] { return ended; });
}

bool Watchdog::expired() {
  std::lock_guard lock(mutex);
  return count > 0 && age > seconds;
}

void Watchdog::send_heartbeat(c10d::Store& store) {
  std::string text;
  {
    std::lock_guard lock(mutex);
    text = concat(++beats, " ", count, " ", waiting, " ", age, " ", here);
  }
  const std::string key = concat("at/", rank);
  store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  store.check({key});  // set() does not wait for an answer, check() does
  silent = 0;
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

bool Watchdog::report_missing(const std::vector<Heartbeat>& before, const std::vector<Heartbeat>& after) {
  if (!expired()) return false;
  int64_t least = after[rank].count, most = least;
  for (const Heartbeat& b : after) {
    least = std::min(least, b.count);
    most = std::max(most, b.count);
  }
  using Is = std::function<bool(size_t)>;
  const char* dead_is = "whose process does not run";
  const Is dead = [&](size_t r) { return after[r].number == before[r].number; };
  const Is behind = [&](size_t r) { return after[r].count == least && least < most; };
  const Is busy = [&](size_t r) { return !after[r].waiting; };
  bool goes_on = is_patient;
  for (size_t r = 0; r < after.size(); ++r) goes_on |= !dead(r) && after[r].age <= seconds;
  for (const auto& [is, what] : {std::pair(dead, dead_is), std::pair(behind, "which is behind"),
                                 std::pair(busy, "which is not in a collective")}) {
    if (what != dead_is && goes_on) return false;
    std::vector<size_t> found;
    for (size_t r = 0; r < after.size(); ++r)
      if (is(r)) found.push_back(r);
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

}  // namespace yolox
