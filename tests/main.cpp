// SPDX-License-Identifier: Apache-2.0
// The test program. For tests/shards.sh it writes a line at the start and at the end of each test case.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>

#include "base/program.hpp"
#include "base/threads.hpp"

namespace {

int results = -1;  // file descriptor of $YOLOX_TEST_RESULTS, or -1
const pid_t process = getpid();

// Lines of the file: "begin FILE NAME", "end SECONDS passed|failed FILE NAME", separated by tabs.
struct Results : doctest::IReporter {
  const doctest::TestCaseData* now = nullptr;

  explicit Results(const doctest::ContextOptions&) {}
  void write(const std::string& text) const {
    if (results < 0 || getpid() != process) return;  // a case may fork, and the child may crash
    const std::string path = now->m_file.c_str();
    const std::string line = text + "\t" + path.substr(path.rfind('/') + 1) + "\t" + now->m_name + "\n";
    if (::write(results, line.data(), line.size()) < 0) std::abort();
  }
  void test_case_start(const doctest::TestCaseData& data) override {
    now = &data;
    write("begin");
  }
  void test_case_end(const doctest::CurrentTestCaseStats& stats) override {
    write("end\t" + std::to_string(stats.seconds) + (stats.failure_flags == 0 ? "\tpassed" : "\tfailed"));
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};

}  // namespace

REGISTER_LISTENER("results", 1, Results);

int main(int argc, char** argv) {
  // The programs that cases start are also given the device.
  for (int i = 1; i + 1 < argc; ++i)
    if (std::string(argv[i]) == "--device") setenv("YOLOX_TEST_DEVICE", argv[i + 1], 1);
  // Cases start the programs beside this one.
  setenv("YOLOX_PROGRAMS", std::filesystem::read_symlink("/proc/self/exe").parent_path().c_str(), 1);
  setenv("YOLOX_NO_REPORT", "1", 1);  // a report.html takes seconds
  // Not the cache folder of the user.
  if (const char* runs = std::getenv("YOLOX_TEST_RUNS"))
    setenv("YOLOX_CACHE_DIR", (std::string(runs) + "/cache").c_str(), 0);
  if (const char* path = std::getenv("YOLOX_TEST_RESULTS")) {
    results = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    unsetenv("YOLOX_TEST_RESULTS");  // not for test programs that cases start
    std::cout << std::unitbuf;       // a program that is killed has printed all it had to say
  }
  return doctest::Context(argc, argv).run();
}
