// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"
#include "base/program.hpp"
#include "data/cache.hpp"
#include "data/packed.hpp"

#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <mutex>
#include <new>
#include <set>
#include <thread>

#include "common.hpp"

using namespace yolox;
namespace fs = std::filesystem;

namespace {

// A child process that runs f(). f() returns a description of the failure, or an empty string. wait() returns
// it.
struct Child {
  pid_t pid;
  int pipe_end;

  template <class F>
  explicit Child(F f) {
    int ends[2];
    if (pipe(ends) != 0) FAIL("no pipe");
    pid = fork();
    if (pid == 0) {
      std::string failure;
      try {
        failure = f();
      } catch (const std::exception& e) {
        failure = concat("exception: ", e.what());
      }
      const bool written = write(ends[1], failure.data(), failure.size()) == ssize_t(failure.size());
      _exit(written ? 0 : 1);
    }
    close(ends[1]);
    pipe_end = ends[0];
  }
  ~Child() {
    if (pid > 0) wait();
  }
  std::string wait() {
    std::string said;
    char part[512];
    for (ssize_t n; (n = read(pipe_end, part, sizeof part)) > 0;) said.append(part, size_t(n));
    close(pipe_end);
    int status = 0;
    waitpid(pid, &status, 0);
    pid = 0;
    return status == 0 ? said : concat(said, " (status ", status, ")");
  }
};

// Counters that child processes share with the test.
struct Shared {
  std::atomic<int> fills, ready, go, most;
};
Shared& shared_counters() {
  static void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return *new (memory) Shared{};
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
template <class F>
bool wait_until(F f) {
  const double end = now() + 10;
  while (!f() && now() < end) pause_ms(2);
  return f();
}

constexpr int kGrey = 150;  // more than a transaction writes

// Returns a data set of grey images of several sizes. decoded(i) is called when image i is decoded.
Dataset grey_images(const std::function<void(size_t i)>& decoded = {}, const std::string& key = "grey") {
  Dataset data;
  data.key = key;
  for (int i = 0; i < kGrey; ++i) data.records.push_back({"", i + 1, 8 + i % 5, 6 + i % 7, {}});
  data.stored = [decoded, records = data.records](size_t i, double) {
    if (decoded) decoded(i);
    return ImageRegion{Image({records[i].width, records[i].height}, uchar(i + 1))};
  };
  return data;
}
void not_decoded(size_t) { throw std::runtime_error("an image is decoded"); }

// A data set that uses a cache, as in one process.
struct User {
  using Decoded = std::function<void(size_t)>;
  Dataset data;
  std::string path;

  explicit User(const CachePlace& place, const Decoded& decoded = {}, const std::string& key = "grey",
                int threads = 1, const std::function<void(size_t, size_t)>& progress = {})
      : data(grey_images(decoded, key)) {
    const std::string line = use_cache(data, place, {64, 64}, threads, progress);
    path = line.substr(line.find(" in ") + 4);
  }
  bool has_images() const {
    for (int i = 0; i < kGrey; ++i) {
      const Image image = read_image(data, i);
      if (image.size() != data.size(i) ||
          cv::norm(image, Image(image.size(), uchar(i + 1)), cv::NORM_INF) > 0)
        return false;
    }
    return true;
  }
};

size_t entries(const std::string& folder) {
  return size_t(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// A RAM place and a disk place in a temporary folder, and the path of the cache of grey_images().
struct Places {
  TempDir dir;
  CachePlace ram{dir.path.string(), false}, disk{dir.path.string(), true};
  std::string path = User(ram).path;

  // The path of a file that a killed process could have left.
  std::string left(const std::string& name) const {
    return concat(dir.path.string(), "/yolox-cache-", geteuid(), "-", name);
  }
};

}  // namespace

TEST_CASE("cache: one or four threads decode every image once" * runs_threads) {
  for (const int threads : {1, 4}) {
    for (const bool keep : {false, true}) {
      const Places places;
      std::atomic<int> inside{0};
      std::vector<std::atomic<int>> per_image(kGrey);
      std::mutex mutex;
      std::set<std::thread::id> ids;
      size_t last = 0;
      bool rising = true;
      const User user(
          keep ? places.disk : places.ram,
          [&](size_t i) {
            ++per_image[i];
            {
              const std::lock_guard<std::mutex> lock(mutex);
              ids.insert(std::this_thread::get_id());
            }
            // Wait until all threads are in this function.
            if (++inside <= threads) wait_until([&] { return inside >= threads; });
          },
          "grey", threads,
          [&](size_t done, size_t n) {
            rising = rising && done > last && n == kGrey;
            last = done;
          });
      CHECK(ids.size() == size_t(threads));
      for (const auto& times : per_image) CHECK(times == 1);
      CHECK(rising);
      CHECK(last == kGrey);
      CHECK(user.path == places.path);
      CHECK(user.has_images());
      CHECK((fs::status(places.path).permissions() & fs::perms::all) ==
            (fs::perms::owner_read | fs::perms::owner_write));
    }
  }
}

TEST_CASE("cache: an existing file is used; on disk it is kept, in RAM the last user removes it" *
          runs_threads) {
  const Places places;
  {
    auto first = std::make_unique<User>(places.ram);
    const User second(places.ram, not_decoded);
    first.reset();
    CHECK(fs::exists(places.path));
    CHECK(second.has_images());
    const User third(places.ram, not_decoded);  // `second` still uses the file
    CHECK(third.has_images());
  }
  CHECK_FALSE(fs::exists(places.path));
  { const User user(places.disk); }
  CHECK(fs::exists(places.path));
  CHECK(User(places.disk, not_decoded).has_images());
  CHECK(User(places.disk, {}, "other").path != places.path);
}

TEST_CASE("cache: of processes that start at the same time, only one decodes" * runs_threads) {
  for (int round = 0; round < 3; ++round) {
    const Places places;
    Shared& all = shared_counters();
    const auto process = [&]() -> std::string {
      ++all.ready;
      while (!all.go) continue;
      int calls = 0;
      const User user(
          places.ram,
          [&](size_t) {
            ++all.fills;
            pause_ms(1);
          },
          "grey", 1, [&](size_t, size_t) { ++calls; });
      ++all.most;
      if (!wait_until([&] { return all.most == 3; })) return "a process is missing";
      if (calls == 0) return "no progress while another process writes";
      return user.has_images() ? "" : "wrong contents";
    };
    Child a(process), b(process), c(process);
    CHECK(wait_until([&] { return all.ready == 3; }));
    all.go = 1;
    CHECK(a.wait() == "");
    CHECK(b.wait() == "");
    CHECK(c.wait() == "");
    CHECK(all.fills == kGrey);
    CHECK(entries(places.ram.folder) == 0);
  }
}

TEST_CASE("cache: an incomplete file of a killed process is not used; a waiting process writes it again" *
          runs_threads) {
  for (const bool keep : {false, true}) {
    for (const bool waits : {false, true}) {
      const Places places;
      const auto& place = keep ? places.disk : places.ram;
      Shared& all = shared_counters();
      Child killed([&] {
        const User user(place, [&](size_t i) {
          if (i < kGrey - 1) return;
          all.ready = 1;
          pause();
        });
        return "";
      });
      CHECK(wait_until([&] { return all.ready == 1; }));
      const auto use = [&]() -> std::string {
        const User user(
            place, [&](size_t) { ++all.fills; }, "grey", 2,
            [&](size_t done, size_t) {
              if (!all.fills) all.most = int(done);  // the progress of the other process
              all.go = 1;
            });
        return all.fills == kGrey && user.has_images() ? "" : "not taken over";
      };
      if (waits) {
        Child waiter(use);
        CHECK(wait_until([&] { return all.go == 1; }));
        CHECK(all.most > 0);
        CHECK(all.most < kGrey);
        CHECK(all.fills == 0);
        kill(killed.pid, SIGKILL);
        killed.wait();
        CHECK(waiter.wait() == "");
      } else {
        kill(killed.pid, SIGKILL);
        killed.wait();
        CHECK(fs::exists(places.path));
        CHECK(use() == "");
      }
    }
  }
}

TEST_CASE("cache: an exception while decoding or in progress is rethrown, and no file is left" *
          runs_threads) {
  for (const int threads : {1, 4}) {
    const Places places;
    std::atomic<int> calls{0};
    const auto bad = [&](size_t i) {
      ++calls;
      if (i == 5) fail("5.jpg is broken");
      pause_ms(2);
    };
    CHECK(error_of([&] { User(places.disk, bad, "grey", threads); }) == "5.jpg is broken");
    CHECK(calls < kGrey / 2);  // the other threads stop
    CHECK(entries(places.disk.folder) == 0);
    const auto stopped = [&] { User(places.ram, {}, "grey", threads, [](size_t, size_t) { fail("stop"); }); };
    CHECK(error_of(stopped) == "stop");
    CHECK(entries(places.disk.folder) == 0);
    CHECK(User(places.disk, {}, "grey", threads).has_images());
  }
}

TEST_CASE("cache: if the space is too small, the error gives both sizes and nothing is written" *
          runs_threads) {
  const Places places;
  const auto said = [&](const CachePlace& place) {
    Dataset huge = grey_images(not_decoded);
    huge.records.assign(100000, {"", 1, 20000, 20000, {}});
    return error_of([&] { use_cache(huge, place, {20000, 20000}, 1, {}); });
  };
  const std::string ram = said(places.ram);
  CHECK_MESSAGE(has(ram, "it needs 159375G, free "), ram);
  CHECK(has(ram, places.ram.folder));
  CHECK(has(ram, "; use --cache disk, or a larger /dev/shm (docker run --shm-size)"));
  CHECK_FALSE(has(ram, "\n"));
  // The limit is the smaller of the free space of the folder and the free memory.
  const double folder = double(fs::space(places.ram.folder).available),
               least = std::min(folder, free_memory());
  CHECK(std::strtod(ram.c_str() + ram.find("free ") + 5, nullptr) < 1.2 * least / 1e9 + 1);
  if (folder > 2 * least) CHECK(has(ram, "G of memory (10 % of the memory are kept free); "));
  CHECK(entries(places.ram.folder) == 0);
  const std::string disk = said(places.disk);
  CHECK(has(disk, "it needs 159375G, free "));
  CHECK(has(disk, "; free some space, set YOLOX_CACHE_DIR, or leave --cache out"));
  CHECK(entries(places.disk.folder) == 0);
}

TEST_CASE("cache: old files count as free space; a disk that becomes full is reported and no file is left" *
          runs_threads) {
  const Places places;
  const std::string& folder = places.ram.folder;
  Child child([&]() -> std::string {
    if (!mount_small_disk(folder, "size=4m")) return "cannot mount";
    for (const auto& place : {places.ram, places.disk}) {
      const auto error = [&](int side, const std::function<void()>& decoded = {}) {
        Dataset data = grey_images();
        data.records.assign(1, {"", 1, side, side, {}});
        data.stored = [=](size_t, double) {
          if (decoded) decoded();
          return ImageRegion{Image({side, side}, 1)};
        };
        return error_of([&] { use_cache(data, place, {side, side}, 1, {}); });
      };
      const std::string refused = error(1200);
      if (!has(refused, "it needs 6M, free 4M; ")) return "refused with " + refused;
      if (entries(folder) != 0) return "something is left";
      write_text(places.left("dead"), std::string(3000000, 'x'));
      if (const std::string said = error(900); said != "") return "swept: " + said;
      for (const auto& entry : fs::directory_iterator(folder)) fs::resize_file(entry.path(), 3000000);
      if (const std::string said = error(900); said != "") return "own file: " + said;
      for (const auto& entry : fs::directory_iterator(folder)) fs::remove(entry.path());
      const std::string full = error(900, [&] { write_text(folder + "/else", std::string(3000000, 'x')); });
      if (!has(full, "cannot be written: ") || !has(full, place.keep ? "; free some" : "; use --cache disk"))
        return "full: " + full;
      if (entries(folder) != 1) return "something is left on the full disk";
      fs::remove(folder + "/else");
    }
    return "";
  });
  const std::string said = child.wait();
  if (said == "cannot mount")
    MESSAGE("not tested: no right to mount a small file system");
  else
    CHECK(said == "");
}

TEST_CASE("cache: free memory is the available memory minus 10 %, within the limits of cgroups" *
          runs_threads) {
  const TempDir dir;
  const auto free = [&] { return free_memory(dir.path.string(), dir.path.string()); };
  write_text(dir / "meminfo", "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n");
  CHECK(free() == 500 * 1024);
  write_text(dir / "memory.max", "max\n");
  CHECK(free() == 500 * 1024);
  write_text(dir / "memory.max", "400000\n");
  write_text(dir / "memory.current", "200000\n");
  write_text(dir / "memory.stat", "anon 1\nfile 50000\nkernel 5\nshmem 20000\nfile_mapped 7\n");
  CHECK(free() == doctest::Approx(360000 - 200000 + 50000 - 20000));
  write_text(dir / "memory.max", "100000\n");
  CHECK(free() == 0);

  fs::remove(dir / "memory.max");
  // The cgroup of the job or one of its parents: the one with the least memory left counts. cgroup v2 and v1.
  write_text(dir / "self/cgroup", "12:cpu:/x\n5:cpu,memory:/slurm/job_7\n0::/user/job_7\n");
  write_text(dir / "user/memory.max", "450000\n");
  CHECK(free() == doctest::Approx(405000));
  write_text(dir / "user/job_7/memory.max", "300000\n");
  write_text(dir / "user/job_7/memory.current", "100000\n");
  CHECK(free() == doctest::Approx(170000));
  write_text(dir / "memory/slurm/memory.limit_in_bytes", "200000\n");
  write_text(dir / "memory/slurm/memory.usage_in_bytes", "100000\n");
  write_text(dir / "memory/slurm/memory.stat", "cache 1\ntotal_cache 50000\ntotal_shmem 20000\n");
  CHECK(free() == doctest::Approx(110000));
  write_text(dir / "memory/memory.limit_in_bytes", "9223372036854771712\n");  // no limit
  CHECK(free() == doctest::Approx(110000));
  const double here = free_memory();
  CHECK(here > 0);
  CHECK(here < 1e15);
}

TEST_CASE("cache: a file that is damaged, of another program or of another data set is written again" *
          runs_threads) {
  const Places places;
  const auto decoded_again = [&] {
    std::atomic<int> decoded{0};
    const User user(places.disk, [&](size_t) { ++decoded; });
    CHECK(user.has_images());
    return decoded == kGrey;
  };
  CHECK(decoded_again());
  CHECK_FALSE(decoded_again());
  const std::string whole = contents(places.path);
  const std::string other = contents(User(places.disk, {}, "other").path);
  for (const std::string& damaged :
       {whole.substr(0, whole.size() - 100), whole.substr(0, 8192), whole.substr(0, 10), std::string(),
        std::string(100000, '\1'), std::string(4096, '\1') + whole.substr(4096), other}) {
    write_text(places.path, damaged);
    CHECK_MESSAGE(decoded_again(), damaged.size());
    CHECK_FALSE(decoded_again());
  }
  // A file that another process uses is replaced; that process keeps its own.
  const User user(places.disk, not_decoded);
  std::fstream(places.path, std::ios::in | std::ios::out | std::ios::binary) << std::string(8192, '\1');
  CHECK(decoded_again());
  CHECK(user.has_images());
}

TEST_CASE("cache: only files left by killed processes are removed" * runs_threads) {
  const Places places;
  const std::string& folder = places.ram.folder;
  const std::string stale = places.left("dead"), link = places.left("1");
  write_text(stale, "x");
  write_text(folder + "/yolox-cache-999999-dead", "of another user");
  write_text(folder + "/else", "x");
  fs::create_symlink(folder + "/else", link);
  const User used(places.ram);
  CHECK_FALSE(fs::exists(stale));
  { const User user(places.ram, {}, "other"); }
  CHECK(fs::exists(used.path));
  CHECK(fs::exists(folder + "/yolox-cache-999999-dead"));
  CHECK(fs::exists(folder + "/else"));
  CHECK(fs::is_symlink(link));
  // On disk, complete files are kept and incomplete ones are removed.
  write_text(stale, "x");
  const std::string third = User(places.disk, {}, "third").path;
  CHECK_FALSE(fs::exists(stale));
  { const User user(places.disk, {}, "fourth"); }
  CHECK(fs::exists(third));
  write_text(stale, "x");
  sweep_caches(places.ram);
  CHECK_FALSE(fs::exists(stale));
  CHECK_FALSE(fs::exists(third));
  CHECK(fs::exists(used.path));
}

TEST_CASE("cache: a link, a pipe and a file of another user are refused" * runs_threads) {
  const Places places;
  const auto said = [&] { return error_of([&] { User(places.ram, not_decoded); }); };
  write_text(places.dir / "precious", "text");
  fs::create_symlink(places.dir / "precious", places.path);
  CHECK(has(said(), "not a regular file of this user"));
  CHECK(has(said(), places.path));
  CHECK(contents(places.dir / "precious") == "text");
  fs::remove(places.path);
  REQUIRE(mkfifo(places.path.c_str(), 0600) == 0);
  CHECK(has(said(), "not a regular file of this user"));
  fs::remove(places.path);
  if (geteuid() == 0) {
    write_text(places.path, "text");
    REQUIRE(chown(places.path.c_str(), 12345, 12345) == 0);
    CHECK(has(said(), "not a regular file of this user"));
    CHECK(contents(places.path) == "text");
  }
  CHECK(has(error_of([&] { User({places.dir / "none", false}); }), "No such file"));
}

TEST_CASE("cache: no process uses a file that another process removes or replaces" * runs_threads) {
  // RAM allows more rounds than a disk.
  const Env memory("TMPDIR", fs::exists("/dev/shm") ? "/dev/shm" : nullptr);
  const Places places;
  Shared& all = shared_counters();
  const auto process = [&](int seed) -> std::string {
    ++all.ready;
    while (all.ready < 3) continue;
    for (int i = 0; i < 100; ++i) {
      // Opening one cache removes the stale file of the other.
      const User user(places.ram, {}, (i + seed) % 4 == 0 ? "a" : "b");
      if (!user.has_images()) return "wrong contents";
      for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
        std::error_code gone;  // the descriptor of this iterator cannot be resolved
        const std::string name = fs::read_symlink(entry.path(), gone).string();
        if (has(name, "yolox-cache") && has(name, "(deleted)")) return "uses a removed file";
      }
    }
    return "";
  };
  Child a([&] { return process(0); }), b([&] { return process(1); }), c([&] { return process(2); });
  CHECK(a.wait() == "");
  CHECK(b.wait() == "");
  CHECK(c.wait() == "");
  CHECK(entries(places.ram.folder) == 0);
}

TEST_CASE("cache: no file descriptor and no mapping is leaked" * runs_threads) {
  const Places places;
  const auto count = [] {
    return entries("/proc/self/fd") * 1000 + count_of(contents("/proc/self/maps"), "yolox-cache");
  };
  const size_t before = count();
  for (int i = 0; i < 50; ++i) {
    const auto& place = i % 2 ? places.ram : places.disk;
    { const User user(place, {}, i % 4 == 0 ? "a" : "b"); }
    error_of([&] { User(place, not_decoded, "c"); });
  }
  CHECK(count() == before);
  // A started program does not inherit the descriptor, which would keep the lock.
  const User user(places.disk);
  FILE* list = popen("ls -l /proc/self/fd", "r");
  REQUIRE(list != nullptr);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), list));
  pclose(list);
  CHECK(has(text, "/proc/"));
  CHECK_FALSE(has(text, "yolox-cache"));
}

TEST_CASE("cache: environment variables set the folders" * runs_threads) {
  const TempDir dir;
  const Env home("HOME", (dir / "home").c_str());
  const Env xdg("XDG_CACHE_HOME", nullptr), own("YOLOX_CACHE_DIR", nullptr), ram("YOLOX_CACHE_RAM", nullptr);
  CHECK(ram_place().folder == "/dev/shm");
  CHECK_FALSE(ram_place().keep);
  CHECK(disk_place().folder == dir / "home" + "/.cache/yolox");
  CHECK(disk_place().keep);
  CHECK(fs::is_directory(dir / "home/.cache/yolox"));
  setenv("XDG_CACHE_HOME", (dir / "xdg").c_str(), 1);
  CHECK(disk_place().folder == dir / "xdg" + "/yolox");
  setenv("YOLOX_CACHE_DIR", (dir / "own").c_str(), 1);
  CHECK(disk_place().folder == dir / "own");
  CHECK(fs::is_directory(dir / "own"));
  setenv("YOLOX_CACHE_RAM", (dir / "ram").c_str(), 1);
  CHECK(ram_place().folder == dir / "ram");
  write_text(dir / "file", "");
  setenv("YOLOX_CACHE_DIR", (dir / "file/below").c_str(), 1);
  CHECK(has(error_of([] { disk_place(); }), "set YOLOX_CACHE_DIR"));
  for (const char* name : {"YOLOX_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) setenv(name, "", 1);
  CHECK(has(error_of([] { disk_place(); }), "HOME is not set"));
}
