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

PartTime part(const std::vector<PartTime>& parts, const std::string& name) {
  for (const PartTime& p : parts)
    if (p.name == name) return p;
  FAIL("there is no part " << name);
  return {};
}

}  // namespace

TEST_CASE("profile: the table has the time of each part per step, and the trace has marks and operators") {
  TempDir dir;
  Profile profile(torch::kCPU, 1, 2);
  torch::nn::Conv2d model(3, 4, 3);
  CHECK(has(error_of([&] { profile.stop("x"); }), "--profile needs 3 steps; this run has 0"));
  double began = 0;
  for (bool over = false; !over; over = profile.step()) {
    if (began == 0) began = now();
    sleep_ms(3);
    RECORD_USER_SCOPE("loss");
    sleep_ms(5);
    {
      RECORD_USER_SCOPE("assignment");
      sleep_ms(12);
    }
    model(torch::ones({2, 3, 8, 8})).sum().backward();
  }
  write_text(dir / "trace.json", "{\"an\": \"older file\"}");
  const auto parts = profile.stop(dir / "trace.json");
  CHECK_FALSE(torch::profiler::impl::profilerEnabled());
  REQUIRE(parts.size() == 3);
  CHECK(part(parts, "assignment").host >= 11.9);
  CHECK(parts[0].name == "loss");
  CHECK(parts[0].host >= part(parts, "assignment").host + 4.9);
  CHECK(parts[0].device == 0);
  CHECK(parts[2].name == "step");
  CHECK(parts[2].host >= parts[0].host + 2.9);
  CHECK(parts[2].host <= 500 * (now() - began));
  CHECK_HAS(profile_table(parts), formatted("\nloss         %9.2f %9.2f %6.1f%%\n", parts[0].host, 0.0,
                                            100 * parts[0].host / parts[2].host));
  CHECK(count_events(dir / "trace.json", "assignment") == 2);
  CHECK(count_events(dir / "trace.json", "aten::convolution_backward") == 2);
}

TEST_CASE("profile: a trace that cannot be written is an error that names the file") {
  TempDir dir;
  const auto error = [](const std::string& path) {
    Profile profile(torch::kCPU, 1, 1);
    profile.step();
    profile.step();
    return error_of([&] { profile.stop(path); });
  };
  const std::string path = dir / "none/trace.json",
                    failed = " failed; check folder, permissions and disk space";
  CHECK(error(path) == "writing " + path + failed);
  const std::string full = dir / "trace.json";
  CHECK(on_full_disk(1000, [&] { return error(full); }) == "writing " + full + failed);
}

TEST_CASE(
    "profile: on a GPU, times belong to the part that launched the kernels, and the trace contains them" *
    needs_real_gpu) {
  const torch::Tensor x = torch::rand({4096, 4096}, torch::kCUDA);
  TempDir dir;
  Profile profile(torch::kCUDA);
  for (bool over = false; !over; over = profile.step()) {
    {
      RECORD_USER_SCOPE("forward");
      for (int i = 0; i < 20; ++i) x.mm(x);
    }
    RECORD_USER_SCOPE("loss");
    x.view({-1});
  }
  const auto parts = profile.stop(dir / "trace.json");
  CHECK(part(parts, "forward").device > 10 * part(parts, "loss").device);
  CHECK(count_events(dir / "trace.json", "", "kernel") >= 10 * 20);
}
