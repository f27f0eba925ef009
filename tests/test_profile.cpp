// SPDX-License-Identifier: Apache-2.0
// run/profile.hpp. Measured times are at least the sleeps within a part, and at most the time around all of
// it. Both bounds hold on a busy machine.
#include "run/profile.hpp"

#include <fcntl.h>
#include <rapidjson/document.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <map>
#include <sstream>
#include <thread>

#include "tensors.hpp"

using namespace yolox;
using torch::Tensor;

namespace {

constexpr double kSlept = 0.999e-3;  // shortest sleep of 1 ms, in seconds

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

std::vector<std::string> names(const Profile& profile) {
  std::vector<std::string> names;
  for (const auto& t : profile.times()) names.push_back(t.name);
  return names;
}
std::map<std::string, PartTime> by_name(const Profile& profile) {
  std::map<std::string, PartTime> rows;
  for (const auto& t : profile.times()) rows[t.name] = t;
  return rows;
}

using Names = std::vector<std::string>;

// One step: 3 ms outside of parts, 5 ms in "loss", and 12 ms in two "assignment" parts inside "loss".
void step_with_loss() {
  sleep_ms(3);
  RECORD_USER_SCOPE("loss");
  sleep_ms(4);
  for (int i = 0; i < 2; ++i) {
    RECORD_USER_SCOPE("assignment");
    sleep_ms(6);
  }
  sleep_ms(1);
}

// Runs f on a thread with the thread-local state of torch of this thread, as autograd runs its threads.
template <class F>
void on_autograd_like_thread(F f) {
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    f();
  }).join();
}

// An event of a trace with a duration.
struct Event {
  std::string name, category;
  int64_t pid, tid;
  double from, to;  // microseconds

  bool contains_event(const Event& e) const { return tid == e.tid && from <= e.from && e.to <= to; }
};
// Returns the events with a duration. Checks the fields that trace viewers need.
std::vector<Event> read_trace(const std::string& path) {
  rapidjson::Document json;
  json.Parse(contents(path).c_str());
  REQUIRE_FALSE(json.HasParseError());
  REQUIRE(json.IsObject());
  REQUIRE(json.HasMember("traceEvents"));
  std::vector<Event> events;
  for (const auto& e : json["traceEvents"].GetArray()) {
    REQUIRE(e["name"].IsString());
    REQUIRE(e["ph"].IsString());
    REQUIRE(e["ts"].IsNumber());
    if (std::string(e["ph"].GetString()) != "X" || !e["tid"].IsInt64()) continue;
    REQUIRE(e["dur"].IsNumber());
    REQUIRE(e["dur"].GetDouble() >= 0);
    REQUIRE(e["pid"].IsInt64());
    const double from = e["ts"].GetDouble();
    events.push_back({e["name"].GetString(), e["cat"].GetString(), e["pid"].GetInt64(), e["tid"].GetInt64(),
                      from, from + e["dur"].GetDouble()});
  }
  return events;
}
std::vector<Event> named(const std::vector<Event>& events, const std::string& name) {
  std::vector<Event> found;
  for (const auto& e : events)
    if (e.name == name) found.push_back(e);
  return found;
}

}  // namespace

TEST_CASE("profile: a part does not include the parts inside it; all parts add up to the step") {
  Profile profile(torch::kCPU, 0, 2, 0);
  const double before = now();
  profile.start();
  const double started = now();
  step_with_loss();
  CHECK_FALSE(profile.step());
  step_with_loss();
  {
    RECORD_USER_SCOPE("telling");
    sleep_ms(8);
  }
  const double ended = now();
  CHECK(profile.step());
  const double after = now();

  CHECK(names(profile) == Names{"loss", "assignment", "telling", "other", "step"});
  auto t = by_name(profile);
  CHECK(t["loss"].mean >= 5 * kSlept);
  CHECK(t["assignment"].mean >= 12 * kSlept);
  CHECK(t["telling"].mean >= 4 * kSlept);
  CHECK(t["other"].mean >= 3 * kSlept);
  CHECK(t["step"].mean * 2 >= ended - started);
  CHECK(t["step"].mean * 2 <= after - before);
  CHECK(t["loss"].calls == 1);
  CHECK(t["assignment"].calls == 2);
  CHECK(t["telling"].calls == 0.5);
  CHECK(t["other"].calls == 0);
  CHECK(t["step"].calls == 1);
  double seconds = 0, shares = 0;
  for (const auto& row : profile.times()) {
    CHECK(row.share == doctest::Approx(row.mean / t["step"].mean));
    if (row.name != "step") {
      seconds += row.mean;
      shares += row.share;
    }
  }
  CHECK(seconds == doctest::Approx(t["step"].mean));
  CHECK(shares == doctest::Approx(1));
  CHECK(t["step"].share == doctest::Approx(1));
}

TEST_CASE("profile: the median is over all steps, also those without the part") {
  Profile profile(torch::kCPU, 0, 3, 0);
  std::vector<double> whole;
  profile.start();
  for (const int ms : {40, 2, 3}) {
    const double before = now();
    {
      RECORD_USER_SCOPE("forward");
      sleep_ms(ms);
    }
    if (ms == 40) {
      RECORD_USER_SCOPE("saving");
      sleep_ms(6);
    }
    profile.step();
    whole.push_back(now() - before);
  }
  auto t = by_name(profile);
  std::sort(whole.begin(), whole.end());
  CHECK(t["forward"].median >= 3 * kSlept);
  CHECK(t["forward"].median <= whole[1]);
  CHECK(t["forward"].mean >= 15 * kSlept);
  CHECK(t["saving"].median == 0);
  CHECK(t["saving"].mean >= 2 * kSlept);
  CHECK(t["step"].median >= t["forward"].median);

  Profile even(torch::kCPU, 0, 2, 0);
  even.start();
  for (const int ms : {20, 2}) {
    RECORD_USER_SCOPE("forward");
    sleep_ms(ms);
    even.step();
  }
  CHECK(by_name(even)["forward"].median == doctest::Approx(by_name(even)["forward"].mean));
}

TEST_CASE("profile: marks may span several steps and end in any order") {
  Profile profile(torch::kCPU, 0, 2, 0);
  profile.start();
  at::RecordFunction epoch(at::RecordScope::USER_SCOPE), copy(at::RecordScope::USER_SCOPE);
  epoch.before("epoch");
  sleep_ms(4);
  profile.step();
  sleep_ms(4);
  copy.before("copy");
  epoch.end();
  sleep_ms(6);
  copy.end();
  sleep_ms(8);
  profile.step();
  CHECK(names(profile) == Names{"epoch", "copy", "other", "step"});
  auto t = by_name(profile);
  CHECK(t["epoch"].mean >= 4 * kSlept);
  CHECK(t["epoch"].median >= 4 * kSlept);
  CHECK(t["epoch"].calls == 0.5);
  CHECK(t["copy"].mean >= 3 * kSlept);
  CHECK(t["other"].mean >= 4 * kSlept);
}

TEST_CASE("profile: marks of other threads and of collective operations are not counted") {
  Profile profile(torch::kCPU, 0, 1, 0);
  profile.start();
  const auto other_marks = [] {
    RECORD_USER_SCOPE("elsewhere");
    sleep_ms(2);
  };
  {
    RECORD_USER_SCOPE("backward");
    std::thread(other_marks).join();
    on_autograd_like_thread(other_marks);
  }
  {
    RECORD_USER_SCOPE("reduce");
    at::RecordFunction work(at::RecordScope::USER_SCOPE);  // as ProcessGroup marks its operations
    work._setAsync();
    work.before("gloo:all_reduce");
    sleep_ms(3);
    on_autograd_like_thread([&] { work.end(); });
  }
  profile.step();
  CHECK(names(profile) == Names{"backward", "reduce", "other", "step"});
  CHECK(by_name(profile)["backward"].mean >= 4 * kSlept);
  CHECK(by_name(profile)["reduce"].mean >= 3 * kSlept);
}

TEST_CASE("profile: only complete steps after the warm-up are measured") {
  const auto mark = [](const char* name) {
    RECORD_USER_SCOPE(name);
    sleep_ms(1);
  };
  at::RecordFunction before(at::RecordScope::USER_SCOPE);
  before.before("open before");
  Profile profile(torch::kCPU, 2, 3, 0);
  CHECK(profile.steps() == 5);
  mark("before");
  CHECK(has(error_of([&] { profile.step(); }), "before start()"));
  profile.start();
  for (int i = 0; i < 2; ++i) {
    mark("warming up");
    CHECK_FALSE(profile.step());
  }
  CHECK(has(error_of([&] { profile.times(); }), "--profile needs more than 2 steps; this run has 2"));
  before.end();
  mark("measured");
  profile.step();
  mark("measured");
  CHECK(has(error_of([&] { Profile(torch::kCPU, 0).start(); }), "already"));
  mark("measured");
  CHECK_FALSE(profile.step());
  const double seconds = by_name(profile)["step"].mean;
  mark("unfinished");
  CHECK(names(profile) == Names{"measured", "other", "step"});
  CHECK(by_name(profile)["measured"].calls == 1.5);
  CHECK(by_name(profile)["step"].mean == seconds);
  CHECK(profile.step());
  mark("after");
  CHECK(profile.step());
  CHECK(names(profile) == Names{"measured", "unfinished", "other", "step"});
  CHECK(has(error_of([&] { profile.stop_and_write("none.json"); }), "no step was traced for none.json"));
  CHECK(has(error_of([&] { profile.step(); }), "after stop_and_write()"));

  profile.start();  // a second start clears all times
  for (int i = 0; i < 2; ++i) profile.step();
  mark("again");
  profile.step();
  CHECK(names(profile) == Names{"again", "other", "step"});
}

// The simulated GPU has a callback of its own.
TEST_CASE("profile: callbacks are for marks only, while steps are measured, and are removed at the end" *
          doctest::skip(kSimulated)) {
  const auto active = [](at::RecordScope scope) { return at::RecordFunction(scope).isActive(); };
  const auto mark = at::RecordScope::USER_SCOPE, op = at::RecordScope::FUNCTION;
  REQUIRE_FALSE(at::hasThreadLocalCallbacks());
  auto profile = std::make_unique<Profile>(torch::kCPU, 1, 2, 2);
  CHECK_FALSE(active(mark));
  profile->start();
  CHECK_FALSE(active(mark));
  profile->step();
  CHECK(active(mark));
  CHECK_FALSE(active(op));
  std::thread([&] { CHECK_FALSE(active(mark)); }).join();
  {
    RECORD_USER_SCOPE("outlives the profile");
    profile.reset();
  }
  CHECK_FALSE(active(mark));
  CHECK_FALSE(at::hasThreadLocalCallbacks());

  profile = std::make_unique<Profile>(torch::kCPU, 0, 1, 2);
  profile->start();
  {
    RECORD_USER_SCOPE("outlives the table");
    profile->step();
  }
  CHECK(active(op));  // the trace has started
  CHECK(torch::profiler::impl::profilerEnabled());
  profile->step();
  profile.reset();
  CHECK_FALSE(active(op));
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
  CHECK_FALSE(at::hasThreadLocalCallbacks());
  CHECK_FALSE(at::hasGlobalCallbacks());
}

TEST_CASE("profile: a mark that began in another profile is ignored") {
  std::optional<at::RecordFunction> old;
  {
    Profile first(torch::kCPU, 0, 1, 0);
    first.start();
    old.emplace(at::RecordScope::USER_SCOPE).before("old");
  }
  Profile second(torch::kCPU, 0, 1, 0);
  second.start();
  {
    RECORD_USER_SCOPE("new");
    old.reset();
    sleep_ms(3);
  }
  second.step();
  CHECK(names(second) == Names{"new", "other", "step"});
  CHECK(by_name(second)["new"].mean >= 3 * kSlept);
}

TEST_CASE("profile: a GPU is synchronized before the clock is read, a CPU is not") {
  CHECK_FALSE(Profile(torch::kCPU).synchronize);
  CHECK(Profile(torch::kCUDA).synchronize);

  // A simulated device: milliseconds of queued work.
  int pending = 0;
  std::string log;
  Profile profile(torch::kCPU, 1, 1, 1);
  profile.synchronize = [&] {
    log += "wait ";
    sleep_ms(std::exchange(pending, 0));
  };
  profile.start();
  CHECK(log.empty());  // no synchronization during the warm-up
  pending = 50;        // done by the first synchronization, before the measured step
  const double before = now();
  profile.step();
  {
    RECORD_USER_SCOPE("forward");
    log += "forward ";
    pending = 12;
  }
  pending = 7;
  {
    RECORD_USER_SCOPE("loss");
    log += "loss ";
  }
  pending = 5;
  log += "end ";
  profile.step();
  CHECK(by_name(profile)["forward"].mean >= 12 * kSlept);
  CHECK(by_name(profile)["other"].mean >= 12 * kSlept);
  CHECK(by_name(profile)["step"].mean <= now() - before - 50 * kSlept);
  // At the start, twice per part, at the end of the step, and at the start of the trace.
  CHECK(log == "wait wait forward wait wait loss wait end wait wait ");
  { RECORD_USER_SCOPE("forward"); }
  profile.step();
  TempDir dir;
  profile.stop_and_write(dir / "trace.json");
  CHECK(log == "wait wait forward wait wait loss wait end wait wait wait ");
  CHECK(has(profile.table(4), "synchronises"));
}

TEST_CASE("profile: the table contains the measured times and ends with the speed") {
  Profile profile(torch::kCPU, 0, 4, 0);
  profile.start();
  for (int i = 0; i < 4; ++i) {
    step_with_loss();
    if (i == 0) {
      RECORD_USER_SCOPE("backward");
      sleep_ms(5);
    }
    profile.step();
  }
  const auto times = profile.times();
  const std::string text = profile.table(16);
  CHECK(text.back() != '\n');
  std::istringstream lines(text);
  std::string line;
  std::getline(lines, line);
  std::istringstream head(line);
  for (const std::string column : {"ms/step", "median", "share", "calls"}) {
    std::string word;
    head >> word;
    CHECK(word == column);
  }
  const size_t width = line.size();
  double shares = 0;
  for (const auto& row : times) {
    REQUIRE(std::getline(lines, line));
    CHECK(line.size() == width);
    std::istringstream in(line);
    std::string name, percent;
    double mean = 0, median = 0, share = 0, calls = 0;
    in >> name >> mean >> median >> share >> percent >> calls;
    CHECK(name == row.name);
    CHECK(std::abs(mean - 1e3 * row.mean) <= 0.00501);
    CHECK(std::abs(median - 1e3 * row.median) <= 0.00501);
    CHECK(std::abs(share - 100 * row.share) <= 0.0501);
    CHECK(percent == "%");
    CHECK(calls == row.calls);
    if (name != "step") shares += share;
  }
  CHECK(std::abs(shares - 100) <= 0.0501 * (times.size() - 1));
  REQUIRE(std::getline(lines, line));
  CHECK(has(line, "images/s, mean of 4 steps of 16 images on cpu"));
  CHECK(std::abs(std::stod(line) - 16 / times.back().mean) <= 0.0501);
  CHECK_FALSE(has(text, "synchronises"));
  CHECK_FALSE(std::getline(lines, line));
}

TEST_CASE("profile: the trace contains marks and operators of forward, backward and autograd's threads") {
  torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
  TempDir dir;
  const std::string path = dir / "trace.json";
  Profile profile(torch::kCPU, 1, 2, 3);
  profile.start();
  for (int i = 0, over = false; !over; ++i) {
    const std::string phase = i < 1 ? "warming up" : i < 3 ? "measured" : "traced";
    RECORD_USER_SCOPE(phase);
    Tensor loss;
    {
      RECORD_USER_SCOPE("forward");
      loss = model->forward(torch::ones({2, 3, 8, 8})).square().sum();
    }
    {
      RECORD_USER_SCOPE("backward");
      loss.backward();
      on_autograd_like_thread([] {
        RECORD_USER_SCOPE("on another thread");
        torch::ones({2}).cos();
      });
    }
    over = profile.step();
    CHECK(over == (i == 5));
  }
  CHECK(names(profile) == Names{"measured", "forward", "backward", "other", "step"});
  CHECK(by_name(profile)["forward"].calls == 1);
  write_text(path, "{\"an\": \"older file\"}");
  profile.stop_and_write(path);
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
  torch::ones({2}).sin();

  const auto events = read_trace(path);
  CHECK(named(events, "warming up").empty());
  CHECK(named(events, "measured").empty());
  CHECK(named(events, "aten::sin").empty());
  const auto forward = named(events, "forward"), backward = named(events, "backward"),
             convolution = named(events, "aten::convolution"), norm = named(events, "aten::batch_norm"),
             gradient = named(events, "aten::convolution_backward"),
             node = named(events, "ConvolutionBackward0"), other = named(events, "on another thread"),
             cosine = named(events, "aten::cos");
  for (const auto* found : {&forward, &backward, &convolution, &norm, &gradient, &node, &other, &cosine})
    REQUIRE(found->size() == 3);
  for (int i = 0; i < 3; ++i) {
    CHECK(forward[i].category == "user_annotation");
    CHECK(convolution[i].category == "cpu_op");
    CHECK(forward[i].contains_event(convolution[i]));
    CHECK(forward[i].contains_event(norm[i]));
    CHECK(backward[i].contains_event(node[i]));
    CHECK(node[i].contains_event(gradient[i]));
    CHECK(forward[i].to <= backward[i].from);
    CHECK(other[i].contains_event(cosine[i]));
    CHECK(other[i].tid != backward[i].tid);
    CHECK(forward[i].pid == getpid());
  }
}

TEST_CASE("profile: a trace that cannot be written is an error that names the file") {
  const auto error = [](const std::string& path) {
    Profile profile(torch::kCPU, 0, 0, 1);
    profile.start();
    { RECORD_USER_SCOPE("forward"); }
    profile.step();
    return error_of([&] { profile.stop_and_write(path); });
  };
  TempDir dir;
  const std::string path = dir / "trace.json", pipe = dir / "pipe";
  CHECK(has(error(dir / "none/trace.json"), "cannot write " + (dir / "none/trace.json")));
  CHECK(has(error(dir.path.string()), dir.path.string() + " is not a regular file"));
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  CHECK(has(error(pipe), pipe + " is not a regular file"));
  CHECK(std::filesystem::is_fifo(pipe));
  close(reader);

  CHECK(error(path) == "");
  CHECK(named(read_trace(path), "forward").size() == 1);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{1000, old.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);  // simulates a full disk: write() fails half-way
  const std::string full = error(path);
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  CHECK(full == "writing " + path + " failed; is the disk full?");
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
}

TEST_CASE(
    "profile: on a GPU, times belong to the part that launched the kernels, and the trace contains them" *
    needs_real_gpu) {
  const Tensor x = torch::rand({4096, 4096}, torch::kCUDA);
  TempDir dir;
  Profile profile(torch::kCUDA);
  profile.start();
  for (bool over = false; !over; over = profile.step()) {
    {
      RECORD_USER_SCOPE("forward");
      for (int i = 0; i < 20; ++i) x.mm(x);
    }
    RECORD_USER_SCOPE("loss");
    x.view({-1});
  }
  CHECK(by_name(profile)["forward"].median > 10 * by_name(profile)["loss"].median);
  profile.stop_and_write(dir / "trace.json");
  int64_t kernels = 0;
  for (const auto& e : read_trace(dir / "trace.json")) kernels += e.category == "kernel";
  CHECK(kernels >= 3 * 20);
}
