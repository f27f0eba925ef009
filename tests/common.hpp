// SPDX-License-Identifier: Apache-2.0
// Included by every test file: doctest, temporary folders, and the folder of reference data. Tests that need
// the reference data are declared with SHARED_TEST or SHARED_PROGRAM_TEST, and are skipped if the folder does
// not exist. Files that use torch include tensors.hpp first.
#pragma once
#include <doctest/doctest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/flags.hpp"
#include "base/program.hpp"

// Returns the folder of reference data, with fixtures/ and data/: $YOLOX_SHARED, or ../shared beside the
// repository.
inline std::string shared_dir() {
  const char* env = std::getenv("YOLOX_SHARED");
  return env && *env ? env : YOLOX_SOURCE_DIR "/../shared";
}
inline std::string shared(const std::string& path) { return shared_dir() + "/" + path; }
inline bool shared_exists() { return std::filesystem::exists(shared("fixtures/README.md")); }

// Returns the device of the cases that run on any device: that of `tests --device cpu|cuda`, by default cpu.
inline std::string test_device() {
  const char* env = std::getenv("YOLOX_TEST_DEVICE");
  return env ? env : "cpu";
}

// Cases that start another program. ./test.sh quick and the sanitizers leave them out.
inline const doctest::test_suite starts_programs("programs");
#define PROGRAM_TEST(name) TEST_CASE(name* starts_programs)
#define SHARED_TEST(name) TEST_CASE(name* doctest::skip(!shared_exists()))
#define SHARED_PROGRAM_TEST(name) PROGRAM_TEST(name* doctest::skip(!shared_exists()))

// Cases of the loader and the cache. tests/checks.sh runs them under the thread sanitizer.
inline const doctest::test_suite runs_threads("threads");

// Sanitizers replace the allocator. Cases that need ours are skipped under them.
#ifdef YOLOX_SANITIZED
inline const doctest::skip not_sanitized(true);
// Divides the number of random inputs: sanitized tests are compiled without optimisation.
constexpr int kFewer = 4;
#else
inline const doctest::skip not_sanitized(false);
constexpr int kFewer = 1;
#endif

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
// Checks that the text contains the part, and prints both if not. Evaluates `text` before the check: doctest
// holds a lock while it formats a message, so a check inside `text` would deadlock.
#define CHECK_HAS(text, part)                                                                        \
  do {                                                                                               \
    const std::string in_text = text, in_part = part; /* clang 14 captures no structured bindings */ \
    CHECK_MESSAGE(has(in_text, in_part), "in: " << in_text << "\nwanted: " << in_part);              \
  } while (false)
inline size_t count_of(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}
inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the names of what is in a folder.
inline std::set<std::string> entries_of(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

// Writes a file, and creates its folder if needed.
inline void write_text(const std::string& path, const std::string& text = "") {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

// Mounts an empty file system, such as "size=4m", at `folder`, which only this process sees from here on.
// Returns false without the right to do so. To be called in a child process.
inline bool mount_small_disk(const std::string& folder, const std::string& size) {
  const std::string uids = "0 " + std::to_string(geteuid()) + " 1",
                    gids = "0 " + std::to_string(getegid()) + " 1";
  const bool root = geteuid() == 0;
  if (unshare(root ? CLONE_NEWNS : CLONE_NEWNS | CLONE_NEWUSER) != 0) return false;
  if (!root) {
    write_text("/proc/self/uid_map", uids);
    write_text("/proc/self/setgroups", "deny");
    write_text("/proc/self/gid_map", gids);
  }
  return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", folder.c_str(), "tmpfs", 0, size.c_str()) == 0;
}

// Returns the Python of yolox::python_with(). tests/shards.sh gives a folder in which the answer is kept,
// because imports take seconds.
inline std::string cached_python_with(const std::string& modules) {
  const char* folder = std::getenv("YOLOX_TEST_RUNS");
  const std::string answer = std::string(folder ? folder : "") + "/python with " + modules;
  if (folder && std::filesystem::exists(answer)) return contents(answer);
  const std::string found = yolox::python_with(modules);
  if (folder) std::ofstream(answer) << found;
  return found;
}

// Calls f(). Returns the message of its exception, or "" if f() does not throw.
template <class Function>
std::string error_of(Function f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// Calls f() at the end of its scope.
template <class Function>
struct AtEnd {
  explicit AtEnd(Function f) : f(std::move(f)) {}
  AtEnd(const AtEnd&) = delete;
  ~AtEnd() { f(); }
  const Function f;
};

// Calls f(). Returns what it writes to the stream. f() must not contain a CHECK, because the output of
// doctest would be part of it.
template <class Function>
std::string output_of(std::ostream& stream, Function f) {
  std::ostringstream text;
  const AtEnd back([&, terminal = stream.rdbuf(text.rdbuf())] { stream.rdbuf(terminal); });
  f();
  return text.str();
}
template <class Function>
void quietly(Function f) {
  output_of(std::cout, f);
}

// Returns f(), during which no file can grow beyond this number of bytes. This simulates a full disk: write()
// fails partway.
template <class Function>
auto on_full_disk(rlim_t bytes, Function f) {
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{bytes, old.rlim_max};
  const AtEnd back([&, handler = std::signal(SIGXFSZ, SIG_IGN)] {
    setrlimit(RLIMIT_FSIZE, &old);
    std::signal(SIGXFSZ, handler);
  });
  setrlimit(RLIMIT_FSIZE, &small);
  return f();
}

// Parses the command line of a program.
inline void parse(yolox::Flags& flags, std::vector<std::string> words) {
  words.insert(words.begin(), "/some/where/train");
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  flags.parse(int(words.size()), argv.data(), "trains");
}

// Returns the exit code of run_program() and its output on stderr.
template <class Program>
std::pair<int, std::string> outcome(Program program) {
  int code = 0;
  const std::string errors = output_of(std::cerr, [&] { code = yolox::run_program(program); });
  return {code, errors};
}

// Prints a fact or the result of a measurement, which gpu-check shows.
inline void report_fact(const std::string& name, const std::string& value) {
  std::cout << "fact: " << name << ": " << value << std::endl;
}
// Checks that value <= limit, and reports both.
inline void check_figure(const std::string& name, double value, double limit) {
  report_fact(name, yolox::concat(value, " (limit ", limit, ")"));
  CHECK_MESSAGE(value <= limit, name);
}

// Sets or, if value is null, unsets an environment variable. The destructor restores the old value.
struct Env {
  std::string name, old;
  bool had;
  Env(const std::string& name, const char* value) : name(name), had(std::getenv(name.c_str()) != nullptr) {
    if (had) old = std::getenv(name.c_str());
    value ? setenv(name.c_str(), value, 1) : unsetenv(name.c_str());
  }
  ~Env() { had ? setenv(name.c_str(), old.c_str(), 1) : unsetenv(name.c_str()); }
};

// Temporary folder. The destructor deletes it.
struct TempDir {
  std::filesystem::path path;
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "yolox_test_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
};

// Runs f() in a child process. Returns its text, or the message of its exception.
template <class Function>
std::string in_child(Function f) {
  const TempDir dir;
  const pid_t child = fork();
  if (child == 0) {
    std::string text;
    if (const std::string error = error_of([&] { text = f(); }); !error.empty()) text = error;
    write_text(dir / "text", text);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? contents(dir / "text") : "status " + std::to_string(status);
}
