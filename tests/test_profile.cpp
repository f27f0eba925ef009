// SPDX-License-Identifier: Apache-2.0
// run/profile.hpp. Measured times are at least the sleeps within a part, and at most the time around all of
// it. Both bounds hold on a busy machine.
#include "run/profile.hpp"

#include <rapidjson/document.h>

#include <chrono>
#include <map>
#include <thread>

#include "programs.hpp"

using namespace yolox;
using namespace yolox::test;
using torch::Tensor;

namespace {

constexpr double kSlept = 0.999;  // shortest sleep of 1 ms, in milliseconds

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

// One step: 3 ms outside of parts, 17 ms in "loss", of which 12 ms are in two "assignment" parts.
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

TEST_CASE("profile: the table has the time and the calls of each part per step, and ends with the speed") {
  Profile profile(torch::kCPU, 1, 2, 1);
  const auto mark = [](const char* name) {
    RECORD_USER_SCOPE(name);
    sleep_ms(1);
  };
  CHECK(profile.steps() == 4);
  mark("before");
  profile.start();
  mark("warming up");
  CHECK(has(error_of([&] { profile.times(); }), "--profile needs more than 3 steps; this run has 0"));
  CHECK_FALSE(profile.step());
  const double started = now();
  step_with_loss();
  CHECK_FALSE(profile.step());
  step_with_loss();
  mark("telling");
  const double ended = now();
  CHECK_FALSE(profile.step());
  mark("traced");
  CHECK(profile.step());
  CHECK(names(profile) == Names{"loss", "assignment", "telling", "step"});
  auto t = by_name(profile);
  CHECK(t["loss"].host >= 17 * kSlept);
  CHECK(t["assignment"].host >= 12 * kSlept);
  CHECK(t["telling"].host >= 0.5 * kSlept);
  CHECK(t["telling"].host <= 500 * (ended - started));
  CHECK(t["loss"].host >= t["assignment"].host + 5 * kSlept);
  CHECK(t["step"].host >= 500 * (ended - started));
  CHECK(t["step"].host >= t["loss"].host + 3 * kSlept);
  CHECK(t["loss"].device == 0);
  CHECK(t["loss"].calls == 1);
  CHECK(t["assignment"].calls == 2);
  CHECK(t["telling"].calls == 0.5);
  CHECK(t["step"].calls == 1);

  const std::string text = profile.table(16);
  const auto rows = lines_of(text);
  REQUIRE(rows.size() == 6);
  for (size_t k = 0; k < profile.times().size(); ++k) {
    CHECK(rows[k + 1].size() == rows[0].size());
    CHECK(rows[k + 1].starts_with(profile.times()[k].name + " "));
  }
  const std::string loss =
      formatted("%9.2f %9.2f %6.1f%% %6g", t["loss"].host, 0.0, 100 * t["loss"].host / t["step"].host, 1.0);
  CHECK_MESSAGE(has(rows[1], loss), text);
  CHECK(has(rows[5], "images/s, mean of 2 steps of 16 images on cpu"));
  CHECK(std::abs(std::stod(rows[5]) - 16e3 / t["step"].host) <= 0.0501);
  CHECK(text.back() != '\n');
}

TEST_CASE("profile: the profiler of torch is off after the end, also without a trace") {
  {
    Profile profile(torch::kCPU, 0, 1, 1);
    profile.start();
    CHECK(torch::profiler::impl::profilerEnabled());
    CHECK(has(error_of([&] { profile.write_trace("none.json"); }), "no step was traced for none.json"));
  }
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
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
  CHECK(names(profile) == Names{"measured", "forward", "backward", "on another thread", "step"});
  CHECK(by_name(profile)["forward"].calls == 1);
  write_text(path, "{\"an\": \"older file\"}");
  profile.write_trace(path);
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
    Profile profile(torch::kCPU, 0, 1, 1);
    profile.start();
    profile.step();
    { RECORD_USER_SCOPE("forward"); }
    profile.step();
    return error_of([&] { profile.write_trace(path); });
  };
  TempDir dir;
  const std::string path = dir / "trace.json", failed = " failed; check folder, permissions and disk space";
  CHECK(error(dir / "none/trace.json") == "writing " + (dir / "none/trace.json") + failed);
  CHECK(error(path) == "");
  CHECK(named(read_trace(path), "forward").size() == 1);
  const std::string full = on_full_disk(1000, [&] { return error(path); });
  CHECK(full == "writing " + path + failed);
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
  CHECK(by_name(profile)["forward"].device > 10 * by_name(profile)["loss"].device);
  profile.write_trace(dir / "trace.json");
  int64_t kernels = 0;
  for (const auto& e : read_trace(dir / "trace.json")) kernels += e.category == "kernel";
  CHECK(kernels >= 3 * 20);
}
