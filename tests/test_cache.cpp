// SPDX-License-Identifier: Apache-2.0
// The cache of decoded images (store.hpp), and the free memory that it may take.
#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "base/memory.hpp"
#include "data/store.hpp"

#include "common.hpp"

using namespace yolox;

namespace {

constexpr int kGrey = 150;

// A data set of grey images of several sizes. decoded(i) is called when image i is decoded.
Dataset grey_images(const std::function<void(size_t)>& decoded = {}, const std::string& key = "grey") {
  Dataset data;
  data.key = key;
  for (int i = 0; i < kGrey; ++i) data.records.push_back({"", i + 1, 8 + i % 5, 6 + i % 7, {}});
  data.stored = [decoded, records = data.records](size_t i, double) {
    if (decoded) decoded(i);
    return ImageRegion{Image({records[i].width, records[i].height}, uchar(i + 1))};
  };
  return data;
}
void not_decoded(size_t) { fail("an image is decoded"); }

bool has_images(const ImageCache& cache) {
  for (int i = 0; i < kGrey; ++i) {
    for (const double scale : {1.0, 0.5}) {
      const ImageRegion part = cache.read(i, scale);
      const cv::Size size(int((8 + i % 5) * scale), int((6 + i % 7) * scale));
      if (part.image.size() != size || cv::norm(part.image, Image(size, uchar(i + 1)), cv::NORM_INF) > 0)
        return false;
    }
  }
  return true;
}

// Returns the number of images that are decoded to open the cache of a data set in `folder`.
int decoded_for(const std::string& folder, const std::string& key = "grey") {
  int count = 0;
  const Dataset data = grey_images([&](size_t) { ++count; }, key);
  ImageCache cache(data, {64, 64});
  cache.open_on_disk(folder, data, 1, {});
  CHECK(has_images(cache));
  return count;
}

std::set<std::string> entries(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

}  // namespace

TEST_CASE("cache: N threads decode every image once; another process opens the same memory" * runs_threads) {
  for (const int threads : {1, 4}) {
    std::atomic<int> inside{0};
    std::vector<std::atomic<int>> times(kGrey);
    std::mutex mutex;
    std::set<std::thread::id> ids;
    const Dataset data = grey_images([&](size_t i) {
      ++times[i];
      {
        const std::lock_guard lock(mutex);
        ids.insert(std::this_thread::get_id());
      }
      ++inside;
      while (inside < threads) std::this_thread::yield();  // until all threads are here
    });
    std::vector<size_t> progress;
    ImageCache cache(data, {64, 64});
    const std::string path = cache.create_in_memory(data, threads, [&](size_t done, size_t n) {
      CHECK(n == kGrey);
      progress.push_back(done);
    });
    CHECK(ids.size() == size_t(threads));
    CHECK(std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; }));
    CHECK(progress == std::vector<size_t>{64, 128, 150});
    CHECK(has_images(cache));
    const std::string child = in_child([&]() -> std::string {
      ImageCache shared(grey_images(not_decoded), {64, 64});
      shared.open_memory(path);
      return has_images(shared) ? "same" : "other";
    });
    CHECK(child == "same");
    ImageCache other(grey_images({}, "other"), {64, 64});
    for (const std::string& wrong : {path, std::string("/proc/1/fd/77777")})
      CHECK_HAS(error_of([&] { other.open_memory(wrong); }), "cannot open " + wrong + ", the memory of");
  }
}

TEST_CASE("cache: a file is used by later runs, and replaced when the images change" * runs_threads) {
  const TempDir dir;
  const std::string folder = dir / "cache";
  CHECK(decoded_for(folder) == kGrey);
  CHECK(decoded_for(folder) == 0);
  const std::string file = *entries(folder).begin();
  CHECK((fs::status(folder + "/" + file).permissions() & fs::perms::all) ==
        (fs::perms::owner_read | fs::perms::owner_write));
  fs::resize_file(folder + "/" + file, 1000);  // as a copy that was cut off
  CHECK(decoded_for(folder) == kGrey);
  CHECK(entries(folder) == std::set{file});
  // What a killed process left is completed; the file of changed images and of other data stays away or
  // stays.
  fs::rename(folder + "/" + file, folder + "/" + file + ".part");
  write_text(folder + "/else", "");
  CHECK(decoded_for(folder) == kGrey);
  CHECK(entries(folder) == std::set<std::string>{"else", file});
  CHECK(decoded_for(folder, "changed") == kGrey);
  CHECK(entries(folder).size() == 2);
  CHECK_FALSE(fs::exists(folder + "/" + file));
  Dataset smaller = grey_images();
  smaller.records.pop_back();
  ImageCache(smaller, {64, 64}).open_on_disk(folder, smaller, 1, {});
  CHECK(entries(folder).size() == 3);
}

TEST_CASE("cache: an error while decoding or in progress is thrown, and no file is left" * runs_threads) {
  for (const int threads : {1, 4}) {
    const TempDir dir;
    const auto error = [&](const std::function<void(size_t)>& decoded, const ImageCache::Progress& progress) {
      const Dataset data = grey_images(decoded);
      return error_of([&] {
        ImageCache(data, {64, 64}).open_on_disk(dir.path.string(), data, threads, progress);
      });
    };
    CHECK(error([](size_t i) { check(i != 5, "5.jpg is broken"); }, {}) == "5.jpg is broken");
    CHECK(error({}, [](size_t, size_t) { fail("stop"); }) == "stop");
    CHECK(entries(dir.path.string()).empty());
  }
}

TEST_CASE("cache: if there is too little room, the error has both sizes and the remedy" * runs_threads) {
  const TempDir dir;
  Dataset data = grey_images(not_decoded);
  data.records.assign(100000, {"", 1, 20000, 20000, {}});
  ImageCache huge(data, {20000, 20000});
  const std::string ram = error_of([&] { huge.create_in_memory(data, 1, {}); });
  CHECK_HAS(ram, "it needs 159375G, free ");
  CHECK_HAS(ram, "G (10 % of the memory are kept free); use --cache disk");
  const std::string disk = error_of([&] { huge.open_on_disk(dir.path.string(), data, 1, {}); });
  CHECK_HAS(disk, "it needs 159375G, free ");
  CHECK_HAS(disk, "; free some space, set YOLOX_CACHE_DIR, or leave --cache out");
  CHECK(entries(dir.path.string()).empty());
  // A disk that becomes full. What a killed process left counts as free.
  const std::string folder = dir.path.string();
  const std::string said = in_child([&]() -> std::string {
    if (!mount_small_disk(folder, "size=4m")) return "cannot mount";
    Dataset one = grey_images();
    one.records.assign(1, {"", 1, 900, 900, {}});
    one.stored = [](size_t, double) { return ImageRegion{Image({900, 900}, 1)}; };
    std::string path;
    { path = ImageCache(one, {900, 900}).open_on_disk(folder, one, 1, {}); }
    fs::rename(path, path + ".part");
    { ImageCache(one, {900, 900}).open_on_disk(folder, one, 1, {}); }
    fs::remove(path);
    one.stored = [&](size_t, double) {
      write_text(folder + "/else", std::string(3000000, 'x'));
      return ImageRegion{Image({900, 900}, 1)};
    };
    return error_of([&] { ImageCache(one, {900, 900}).open_on_disk(folder, one, 1, {}); });
  });
  if (said != "cannot mount") CHECK_HAS(said, "cannot write the image cache: No space left on device; free");
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
  CHECK(free_memory() > 0);
}

TEST_CASE("cache: environment variables set the folder" * runs_threads) {
  const Env home("HOME", "/h"), xdg("XDG_CACHE_HOME", nullptr), own("YOLOX_CACHE_DIR", nullptr);
  CHECK(cache_folder() == "/h/.cache/yolox");
  setenv("XDG_CACHE_HOME", "/x", 1);
  CHECK(cache_folder() == "/x/yolox");
  setenv("YOLOX_CACHE_DIR", "/own", 1);
  CHECK(cache_folder() == "/own");
  for (const char* name : {"YOLOX_CACHE_DIR", "XDG_CACHE_HOME", "HOME"}) setenv(name, "", 1);
  const Dataset data = grey_images();
  CHECK_HAS(error_of([&] {
              ImageCache(data, {64, 64}).open_on_disk(cache_folder(), data, 1, {});
            }),
            "HOME is not set");
}
