// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"
#include "base/program.hpp"
#include "data/cache.hpp"

#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <new>

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

// Irregular blob sizes, including 0.
std::vector<size_t> some_sizes(size_t n = 40) {
  std::vector<size_t> sizes(n);
  for (size_t i = 0; i < n; ++i) sizes[i] = i * i * 37 % 3001;
  return sizes;
}
unsigned char value(size_t i, size_t k) { return static_cast<unsigned char>(i * 31 + k * 7 + 1); }
BlobCache::Fill filler(const std::vector<size_t>& sizes, std::atomic<int>* count = nullptr) {
  return [sizes, count](size_t i, unsigned char* out) {
    for (size_t k = 0; k < sizes[i]; ++k) out[k] = value(i, k);
    if (count) ++*count;
  };
}
void no_fill(size_t, unsigned char*) { throw std::runtime_error("fill is called"); }

bool has_values(const BlobCache& cache, const std::vector<size_t>& sizes) {
  for (size_t i = 0; i < sizes.size(); ++i)
    for (size_t k = 0; k < sizes[i]; ++k)
      if (cache.blob(i)[k] != value(i, k)) return false;
  return true;
}

std::string file_of(const std::string& folder, const std::string& key) {
  return concat(folder, "/yolox-cache-", geteuid(), "-", key);
}
size_t entries(const std::string& folder) {
  return size_t(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// A RAM place and a disk place in a temporary folder.
struct Places {
  TempDir dir;
  BlobCache::Place ram{dir.path.string(), false}, disk{dir.path.string(), true};
  std::string path = file_of(dir.path.string(), "c0ffee");
};

}  // namespace

TEST_CASE("cache: one or four threads fill every blob once, and blobs are aligned to 64 bytes" *
          runs_threads) {
  const auto sizes = some_sizes();
  for (const int threads : {1, 4}) {
    for (const bool keep : {false, true}) {
      const Places places;
      std::atomic<int> fills{0}, inside{0};
      std::vector<std::atomic<int>> per_blob(sizes.size());
      std::mutex mutex;
      std::vector<std::thread::id> ids;
      const auto fill = filler(sizes, &fills);
      const BlobCache cache(
          keep ? places.disk : places.ram, "c0ffee", sizes,
          [&](size_t i, unsigned char* out) {
            ++per_blob[i];
            {
              const std::lock_guard<std::mutex> lock(mutex);
              if (std::find(ids.begin(), ids.end(), std::this_thread::get_id()) == ids.end())
                ids.push_back(std::this_thread::get_id());
            }
            // Wait until all threads are in this function.
            if (++inside <= threads) wait_until([&] { return inside >= threads; });
            fill(i, out);
          },
          threads);
      CHECK(ids.size() == size_t(threads));
      CHECK(fills == int(sizes.size()));
      for (const auto& times : per_blob) CHECK(times == 1);
      CHECK(cache.filled_here());
      CHECK(has_values(cache, sizes));
      for (size_t i = 0; i < sizes.size(); ++i) CHECK(reinterpret_cast<uintptr_t>(cache.blob(i)) % 64 == 0);
      CHECK(cache.bytes() == fs::file_size(places.path));
      CHECK((fs::status(places.path).permissions() & fs::perms::all) ==
            (fs::perms::owner_read | fs::perms::owner_write));
    }
  }
  const Places places;
  const BlobCache none(places.ram, "c0ffee", {}, no_fill, 2);
  CHECK(none.bytes() == 64);
  // The space is allocated even if nothing is written.
  const BlobCache large(
      places.ram, "abc", {1000000}, [](size_t, unsigned char*) {}, 1);
  struct stat s;
  REQUIRE(stat(file_of(places.ram.folder, "abc").c_str(), &s) == 0);
  CHECK(size_t(s.st_blocks) * 512 >= large.bytes());
}

TEST_CASE("cache: progress is reported by one thread at a time and ends with the number of blobs" *
          runs_threads) {
  const Places places;
  const auto sizes = some_sizes(30);
  std::atomic<int> inside{0}, calls{0};
  size_t last = 0;
  bool good = true;
  const auto fill = filler(sizes);
  const BlobCache cache(
      places.ram, "c0ffee", sizes,
      [&](size_t i, unsigned char* out) {
        pause_ms(15);
        fill(i, out);
      },
      3,
      [&](size_t done, size_t n) {
        good = good && ++inside == 1 && done > last && n == 30;
        last = done;
        ++calls;
        pause_ms(5);
        --inside;
      });
  CHECK(good);
  CHECK(last == 30);
  CHECK(calls > 1);
  CHECK(calls < 15);  // fewer calls than blobs
}

TEST_CASE("cache: an existing file is used; on disk it is kept, in RAM the last user removes it" *
          runs_threads) {
  const auto sizes = some_sizes();
  const Places places;
  {
    auto first = std::make_unique<BlobCache>(places.ram, "c0ffee", sizes, filler(sizes), 2);
    const BlobCache second(places.ram, "c0ffee", sizes, no_fill, 2);
    CHECK(first->filled_here());
    CHECK_FALSE(second.filled_here());
    first.reset();
    CHECK(fs::exists(places.path));
    CHECK(has_values(second, sizes));
    const BlobCache third(places.ram, "c0ffee", sizes, no_fill, 2);  // `second` still uses the file
    CHECK(has_values(third, sizes));
  }
  CHECK_FALSE(fs::exists(places.path));
  { const BlobCache cache(places.disk, "c0ffee", sizes, filler(sizes), 2); }
  CHECK(fs::exists(places.path));
  const BlobCache again(places.disk, "c0ffee", sizes, no_fill, 2);
  CHECK_FALSE(again.filled_here());
  CHECK(has_values(again, sizes));
}

TEST_CASE("cache: a forked child does not remove the file of its parent" * runs_threads) {
  const auto sizes = some_sizes();
  const Places places;
  auto cache = std::make_unique<BlobCache>(places.ram, "c0ffee", sizes, filler(sizes), 1);
  Child child([&] {
    const bool same = has_values(*cache, sizes);
    cache.reset();
    return same && fs::exists(places.path) ? "" : "the child removed it";
  });
  CHECK(child.wait() == "");
  const Child other([&] {  // the parent still holds the lock
    const BlobCache sweeper(places.ram, "bad", sizes, filler(sizes), 1);
    return "";
  });
  const BlobCache second(places.ram, "c0ffee", sizes, no_fill, 1);
  CHECK(has_values(second, sizes));
}

TEST_CASE("cache: of processes that start at the same time, only one fills" * runs_threads) {
  const auto sizes = some_sizes();
  for (int round = 0; round < 3; ++round) {
    const Places places;
    Shared& all = shared_counters();
    const auto process = [&]() -> std::string {
      ++all.ready;
      while (!all.go) continue;
      const auto fill = filler(sizes, &all.fills);
      size_t seen = 0;
      const BlobCache cache(
          places.ram, "c0ffee", sizes,
          [&](size_t i, unsigned char* out) {
            pause_ms(3);
            fill(i, out);
          },
          1, [&](size_t done, size_t) { seen = done; });
      ++all.most;
      if (!wait_until([&] { return all.most == 3; })) return "a process is missing";
      if (!cache.filled_here() && seen == 0) return "no progress while another process fills";
      return has_values(cache, sizes) ? "" : "wrong contents";
    };
    Child a(process), b(process), c(process);
    CHECK(wait_until([&] { return all.ready == 3; }));
    all.go = 1;
    CHECK(a.wait() == "");
    CHECK(b.wait() == "");
    CHECK(c.wait() == "");
    CHECK(all.fills == int(sizes.size()));
    CHECK(entries(places.ram.folder) == 0);
  }
}

TEST_CASE("cache: a partly filled file of a killed process is not used; a waiting process fills it again" *
          runs_threads) {
  const auto sizes = some_sizes();
  for (const bool keep : {false, true}) {
    const Places places;
    const auto& place = keep ? places.disk : places.ram;
    Shared& all = shared_counters();
    const auto killed = [&] {
      const BlobCache cache(
          place, "c0ffee", sizes,
          [&](size_t i, unsigned char* out) {
            std::memset(out, 255, sizes[i]);
            if (i == sizes.size() - 1) {
              all.ready = 1;
              pause();
            }
          },
          1);
      return "";
    };
    // No other process waits.
    Child first(killed);
    CHECK(wait_until([&] { return all.ready == 1; }));
    kill(first.pid, SIGKILL);
    first.wait();
    CHECK(fs::exists(places.path));
    {
      const BlobCache cache(place, "c0ffee", sizes, filler(sizes), 2);
      CHECK(cache.filled_here());
      CHECK(has_values(cache, sizes));
    }
    fs::remove(places.path);

    // Another process waits.
    all.ready = 0;
    Child second(killed);
    CHECK(wait_until([&] { return all.ready == 1; }));
    Child waiter([&]() -> std::string {
      const BlobCache cache(place, "c0ffee", sizes, filler(sizes), 2, [&](size_t done, size_t) {
        all.most = int(done);
        all.go = 1;
      });
      return cache.filled_here() && has_values(cache, sizes) ? "" : "not taken over";
    });
    CHECK(wait_until([&] { return all.go == 1; }));
    CHECK(all.most == int(sizes.size()) - 1);  // progress of the other process
    CHECK(all.fills == 0);
    kill(second.pid, SIGKILL);
    second.wait();
    CHECK(waiter.wait() == "");
  }
}

TEST_CASE("cache: an exception in fill or progress is rethrown, and no file is left" * runs_threads) {
  const auto sizes = some_sizes();
  for (const int threads : {1, 4}) {
    const Places places;
    const auto bad = [&] {
      BlobCache(
          places.disk, "c0ffee", sizes,
          [](size_t i, unsigned char*) {
            if (i == 5) fail("5.jpg is broken");
          },
          threads);
    };
    CHECK(error_of(bad) == "5.jpg is broken");
    std::atomic<int> calls{0};
    const auto slow = [&](size_t i, unsigned char*) {
      ++calls;
      if (i == 0) fail("0.jpg is broken");
      pause_ms(2);
    };
    CHECK(error_of([&] { BlobCache(places.disk, "c0ffee", sizes, slow, threads); }) == "0.jpg is broken");
    CHECK(calls < int(sizes.size()) / 2);  // the other threads stop
    CHECK(entries(places.disk.folder) == 0);
    const auto stopped = [&] {
      BlobCache(places.ram, "c0ffee", sizes, filler(sizes), threads, [](size_t, size_t) { fail("stop"); });
    };
    CHECK(error_of(stopped) == "stop");
    CHECK(entries(places.disk.folder) == 0);
    const BlobCache cache(places.disk, "c0ffee", sizes, filler(sizes), threads);
    CHECK(has_values(cache, sizes));
  }
}

TEST_CASE("cache: if the space is too small, the error gives both sizes and nothing is written" *
          runs_threads) {
  const Places places;
  const std::vector<size_t> huge{size_t(1) << 50};
  const std::string ram = error_of([&] { BlobCache(places.ram, "c0ffee", huge, no_fill, 1); });
  CHECK(has(ram, "it needs 1125900G, free "));
  CHECK(has(ram, places.ram.folder));
  CHECK(has(ram, "; use --cache disk, or a larger /dev/shm (docker run --shm-size)"));
  CHECK_FALSE(has(ram, "\n"));
  // The limit is the smaller of the free space of the folder and the free memory.
  const double folder = double(fs::space(places.ram.folder).available),
               least = std::min(folder, free_memory());
  CHECK(std::strtod(ram.c_str() + ram.find("free ") + 5, nullptr) < 1.2 * least / 1e9 + 1);
  if (folder > 2 * least) CHECK(has(ram, "G of memory (10 % of the memory are kept free); "));
  CHECK(entries(places.ram.folder) == 0);
  const std::string disk = error_of([&] { BlobCache(places.disk, "c0ffee", huge, no_fill, 1); });
  CHECK(has(disk, "it needs 1125900G, free "));
  CHECK(has(disk, "; free some space, set YOLOX_CACHE_DIR, or leave --cache out"));
  CHECK(entries(places.disk.folder) == 0);
}

TEST_CASE("cache: files of the same key and of killed processes count as free space" * runs_threads) {
  const Places places;
  const std::string& folder = places.ram.folder;
  Child child([&]() -> std::string {
    if (!mount_small_disk(folder, "size=4m")) return "cannot mount";
    const std::string path = file_of(folder, "c0ffee"), other = file_of(folder, "bad");
    for (const auto& place : {places.ram, places.disk}) {
      const auto filled = [&](size_t bytes) {
        return error_of([&] {
          BlobCache(
              place, "c0ffee", {bytes}, [&](size_t, unsigned char* out) { std::memset(out, 1, bytes); }, 1);
        });
      };
      const std::string refused = filled(5000000);
      if (!has(refused, "it needs 5M, free 4M; ")) return "refused with " + refused;
      if (entries(folder) != 0) return "something is left";
      write_text(path, std::string(3000000, 'x'));
      if (const std::string said = filled(3500000); said != "") return "own file: " + said;
      fs::remove(path);
      write_text(other, std::string(3000000, 'x'));
      if (const std::string said = filled(3500000); said != "") return "swept: " + said;
      fs::remove(other);
      fs::remove(path);
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

TEST_CASE("cache: a file that is damaged, of another program or of other sizes is filled again" *
          runs_threads) {
  const auto sizes = some_sizes();
  const Places places;
  const auto fill_again = [&](const std::vector<size_t>& wanted) {
    std::atomic<int> fills{0};
    const BlobCache cache(places.disk, "c0ffee", wanted, filler(wanted, &fills), 2);
    return fills > 0 && cache.filled_here() && has_values(cache, wanted);
  };
  CHECK(fill_again(sizes));
  CHECK_FALSE(fill_again(sizes));
  fs::resize_file(places.path, fs::file_size(places.path) - 100);
  CHECK(fill_again(sizes));
  fs::resize_file(places.path, fs::file_size(places.path) + 4096);
  CHECK(fill_again(sizes));
  fs::resize_file(places.path, 10);
  CHECK(fill_again(sizes));
  write_text(places.path, std::string(100000, '\1'));
  CHECK(fill_again(sizes));
  std::string text = contents(places.path);
  text[0] ^= 1;
  write_text(places.path, text);
  CHECK(fill_again(sizes));

  auto other = sizes;
  std::swap(other[3], other[4]);
  CHECK(fill_again(other));
  CHECK(fill_again(sizes));

  const BlobCache user(places.disk, "c0ffee", sizes, no_fill, 1);
  CHECK(has(error_of([&] { fill_again(other); }), "in use by another process"));
  CHECK(has_values(user, sizes));
}

TEST_CASE("cache: only files left by killed processes are removed" * runs_threads) {
  const auto sizes = some_sizes();
  const Places places;
  const std::string& folder = places.ram.folder;
  const std::string stale = file_of(folder, "dead"), link = file_of(folder, "1");
  write_text(stale, "x");
  write_text(folder + "/yolox-cache-999999-dead", "of another user");
  write_text(folder + "/else", "x");
  fs::create_symlink(folder + "/else", link);
  const BlobCache used(places.ram, "aaaa", sizes, filler(sizes), 1);
  CHECK_FALSE(fs::exists(stale));
  { const BlobCache cache(places.ram, "bbbb", sizes, filler(sizes), 1); }
  CHECK(fs::exists(file_of(folder, "aaaa")));
  CHECK(fs::exists(folder + "/yolox-cache-999999-dead"));
  CHECK(fs::exists(folder + "/else"));
  CHECK(fs::is_symlink(link));
  // On disk, complete files are kept and incomplete ones are removed.
  write_text(stale, "x");
  { const BlobCache cache(places.disk, "cccc", sizes, filler(sizes), 1); }
  CHECK_FALSE(fs::exists(stale));
  { const BlobCache cache(places.disk, "dddd", sizes, filler(sizes), 1); }
  CHECK(fs::exists(file_of(folder, "cccc")));
  write_text(stale, "x");
  BlobCache::sweep(places.ram);
  CHECK_FALSE(fs::exists(stale));
  CHECK(fs::exists(used.path()));
}

TEST_CASE("cache: a link, a pipe, a file of another user and a key that is a path are refused" *
          runs_threads) {
  const auto sizes = some_sizes();
  const Places places;
  const auto said = [&] { return error_of([&] { BlobCache(places.ram, "c0ffee", sizes, no_fill, 1); }); };
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
  CHECK(has(error_of([&] { BlobCache(places.ram, "../x", sizes, no_fill, 1); }), "hex"));
  CHECK(has(error_of([&] {
              BlobCache({places.dir / "none", false}, "1", sizes, no_fill, 1);
            }),
            "No such file"));
}

TEST_CASE("cache: no process uses a file that another process removes or replaces" * runs_threads) {
  const auto sizes = some_sizes(3);
  // RAM allows more rounds than a disk.
  const Env memory("TMPDIR", fs::exists("/dev/shm") ? "/dev/shm" : nullptr);
  const Places places;
  Shared& all = shared_counters();
  const auto process = [&](int seed) -> std::string {
    ++all.ready;
    while (all.ready < 3) continue;
    const double end = now() + 0.6;
    for (int i = 0; now() < end; ++i) {
      const bool own = (i + seed) % 4 == 0;  // creating one cache removes the stale file of the other
      const BlobCache cache(places.ram, own ? "aa" : "bb", sizes, filler(sizes), 1);
      if (!has_values(cache, sizes)) return "wrong contents";
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
  const auto sizes = some_sizes(5);
  const Places places;
  const auto count = [] {
    const std::string maps = contents("/proc/self/maps");
    size_t mapped = 0;
    for (size_t at = 0; (at = maps.find("yolox-cache", at)) != std::string::npos; ++at) ++mapped;
    return entries("/proc/self/fd") * 1000 + mapped;
  };
  const size_t before = count();
  for (int i = 0; i < 50; ++i) {
    const auto& place = i % 2 ? places.ram : places.disk;
    { const BlobCache cache(place, i % 4 == 0 ? "aa" : "bb", sizes, filler(sizes), 2); }
    error_of([&] { BlobCache(place, "cc", sizes, no_fill, 2); });
    error_of([&] { BlobCache(place, "dd", {size_t(1) << 50}, no_fill, 2); });
  }
  CHECK(count() == before);
  // A started program does not inherit the descriptor, which would keep the lock.
  const BlobCache cache(places.disk, "aa", sizes, filler(sizes), 1);
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
