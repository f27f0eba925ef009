// SPDX-License-Identifier: Apache-2.0
// run/profile.hpp. Measured times are at least the sleeps within a part, and at most the time around all of
// it. Both bounds hold on a busy machine.
#include "run/profile.hpp"

#include <rapidjson/document.h>

#include <chrono>
#include <thread>

#include "programs.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Returns the number of events of a trace with this name, or of this category.
int64_t count_events(const std::string& path, const std::string& name, const std::string& category = "") {
  rapidjson::Document json;
  json.Parse(contents(path).c_str());
  REQUIRE_FALSE(json.HasParseError());
  int64_t count = 0;
  for (const auto& e : json["traceEvents"].GetArray())
    count += e["name"].GetString() == name || (e.HasMember("cat") && e["cat"].GetString() == category);
  return count;
}

// Returns the milliseconds per step of a part in the table: on the host, and on the GPU.
std::array<double, 2> part(const std::string& table, const std::string& name) {
  std::istringstream rest(table.substr(table.find("\n" + name + " ") + 1 + name.size()));
  std::array<double, 2> times{-1, -1};
  rest >> times[0] >> times[1];
  return times;
}

}  // namespace

TEST_CASE("profile: the table has the time of each part per step, and the trace has marks and operators") {
  TempDir dir;
  Profile profile(torch::kCPU);
  torch::nn::Conv2d model(3, 4, 3);
  CHECK_THROWS_WITH(profile.stop("x"), "--profile needs 13 steps; this run has 0");
  const double began = now();
  for (int i = 0; i < 13; ++i) {
    {
      RECORD_USER_SCOPE("loss");
      sleep_ms(2);
      {
        RECORD_USER_SCOPE("assignment");
        sleep_ms(4);
      }
    }
    model(torch::ones({2, 3, 8, 8})).sum().backward();
    profile.step();
  }
  write_text(dir / "trace.json", "{\"an\": \"older file\"}");
  const std::string table = profile.stop(dir / "trace.json");
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
  const auto loss = part(table, "loss"), assignment = part(table, "assignment"), step = part(table, "step");
  CHECK(table.find("\nloss") < table.find("\nassignment"));
  CHECK(assignment[0] >= 3.9);
  CHECK(loss[0] >= assignment[0] + 1.9);
  CHECK(loss[1] == 0);
  CHECK(step[0] >= loss[0] - 0.1);
  CHECK(step[0] <= 100 * (now() - began));
  CHECK(count_events(dir / "trace.json", "assignment") == 10);
  CHECK(count_events(dir / "trace.json", "aten::convolution_backward") == 10);
}

TEST_CASE(
    "profile: on a GPU, times belong to the part that launched the kernels, and the trace contains them" *
    needs_real_gpu) {
  const torch::Tensor x = torch::rand({4096, 4096}, torch::kCUDA);
  TempDir dir;
  Profile profile(torch::kCUDA);
  for (int i = 0; i < 13; ++i) {
    {
      RECORD_USER_SCOPE("forward");
      for (int k = 0; k < 20; ++k) x.mm(x);
    }
    {
      RECORD_USER_SCOPE("loss");
      x.view({-1});
    }
    profile.step();
  }
  const std::string table = profile.stop(dir / "trace.json");
  CHECK(part(table, "forward")[1] > 10 * part(table, "loss")[1]);
  CHECK(count_events(dir / "trace.json", "", "kernel") >= 10 * 20);
}
