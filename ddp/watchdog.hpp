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
           std::function<c10::intrusive_ptr<c10d::Store>()> connect)
      : rank(rank), names(std::move(names)), seconds(seconds), connect(std::move(connect)) {
    threads[0] = std::thread([this] { tell_and_look(); });
    threads[1] = std::thread([this] { end_in_time(); });
  }
  ~Watchdog() {
    {
      std::lock_guard lock(mutex);
      ended = true;
    }
    wake.notify_all();
    for (auto& thread : threads) thread.join();
  }
  Watchdog(const Watchdog&) = delete;

  // The rank has come to a place that every rank comes to. Before the first call nothing is watched. patient:
  // others may take long to come, as long as their processes run.
  void at(const std::string& where, bool patient = false) {
    std::lock_guard lock(mutex);
    here = where, age = 0, ++count, waiting = false, patiently = patient;
  }
  // It goes on, where ranks have unlike amounts of work.
  void still_at_work() {
    std::lock_guard lock(mutex);
    age = 0;
  }

  std::atomic<bool> waiting{false};  // the rank waits for others, as far as one can tell from within

 private:
  // Tells the others every second that this process runs, and where; and looks for who is missing.
  void tell_and_look() {
    c10::intrusive_ptr<c10d::Store> store;
    while (pause(std::min(1.0, seconds / 5))) {
      try {
        if (!store) store = connect();
        tell(*store);
        silent = 0;
        if (!late() || !report_missing(*store)) continue;
        store->set(concat("left/", rank), std::vector<uint8_t>{1});
        pause(rank == 0 ? 6 : 3);        // the others still look, in this process's store
      } catch (const std::exception&) {  // the store has gone; at the end of a training it may go first
        if (!late() && !pause(5)) return;
        say(concat("rank 0 (", names[0], "), which has gone"));
      }
      _exit(kLostRank);
    }
  }
  // Where rank 0 hangs, and with it the store, so does the thread above; this one needs no connection. It
  // counts the time, too.
  void end_in_time() {
    for (double before = now(); pause(0.2); before = now()) {
      {
        std::lock_guard lock(mutex);
        const double ran = std::min(1.0, now() - before);  // more: the process was suspended
        age += ran, silent = silent + ran;
      }
      if (!late() || silent < 12) continue;
      say(concat("rank 0 (", names[0], "), which does not answer"));
      _exit(kLostRank);
    }
  }

  // False: this object is at its end.
  bool pause(double time) {
    std::unique_lock lock(mutex);
    return !wake.wait_for(lock, std::chrono::milliseconds(int64_t(1000 * time)), [this] { return ended; });
  }
  bool late() {
    std::lock_guard lock(mutex);
    return count > 0 && age > seconds;
  }

  // What a rank tells of itself.
  struct Beat {
    int64_t number = 0, count = 0;  // of these; of places that it has come to
    bool waiting = false;
    double age = 0;  // seconds that it is there, or since it last went on
    std::string where;
  };
  void tell(c10d::Store& store) {
    std::string text;
    {
      std::lock_guard lock(mutex);
      text = concat(++beats, " ", count, " ", waiting, " ", age, " ", here);
    }
    store.set(concat("at/", rank), std::vector<uint8_t>(text.begin(), text.end()));
  }
  std::vector<Beat> all_told(c10d::Store& store) const {
    std::vector<Beat> all(names.size());
    for (size_t r = 0; r < all.size(); ++r) {
      if (!store.check({concat("at/", r)})) continue;
      const auto bytes = store.get(concat("at/", r));
      std::istringstream in(std::string(bytes.begin(), bytes.end()));
      in >> all[r].number >> all[r].count >> all[r].waiting >> all[r].age >> std::ws;
      std::getline(in, all[r].where);
    }
    return all;
  }
  // Who keeps the others waiting: a process that does not run; else who is behind; else who does not wait.
  // False: nobody, yet; a rank that goes on is not late itself, and some places are patiently waited at.
  bool report_missing(c10d::Store& store) {
    bool patient;
    {
      std::lock_guard lock(mutex);
      patient = patiently;
    }
    const auto before = all_told(store);
    for (int i = 0; i < (patient ? 20 : 5); ++i) pause(0.5), tell(store), silent = 0;  // the others look, too
    const auto after = all_told(store);
    if (!late()) return false;
    int64_t least = after[rank].count, most = least;
    for (const Beat& b : after) least = std::min(least, b.count), most = std::max(most, b.count);
    using Is = std::function<bool(size_t)>;
    const char* dead_is = "which does not run any more";
    const Is dead = [&](size_t r) {
      return after[r].number == before[r].number && !store.check({concat("left/", r)});
    };
    const Is behind = [&](size_t r) { return after[r].count == least && least < most; };
    const Is busy = [&](size_t r) { return !after[r].waiting; };
    const Is going_on = [&](size_t r) { return !dead(r) && after[r].age <= seconds; };
    for (const auto& [is, what] : {std::pair(dead, dead_is), std::pair(behind, "which is behind"),
                                   std::pair(busy, "which does not wait")}) {
      std::vector<size_t> found;
      bool goes_on = patient;
      for (size_t r = 0; r < after.size(); ++r) {
        if (is(r)) found.push_back(r);
        goes_on |= going_on(r);
      }
      if (what != dead_is && goes_on) return false;
      // On a GPU ranks wait for others unseen: then all seem to be at work.
      if (found.empty() || found.size() == after.size()) continue;
      if (is(rank)) return say("nothing: the others wait for this rank");
      std::string list;
      for (const size_t r : found)
        list += concat(list.empty() ? "" : ", ", "rank ", r, " (", names[r], "; ", after[r].where, ")");
      return say(concat(list, ", ", what));
    }
    return say("one of the ranks, which all seem to wait");
  }
  bool say(const std::string& late) {
    std::string text;
    {
      std::lock_guard lock(mutex);
      text = concat("error: rank ", rank, " has been at ", here, " for ", int64_t(age), " s (--timeout ",
                    seconds, "), waiting for ", late, "\n");
    }
    return write(2, text.data(), text.size()) != 0;
  }

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
