// SPDX-License-Identifier: Apache-2.0
// The cache of decoded images (store.hpp), and the free memory that it may take.
#include <algorithm>
#include <atomic>
#include <functional>
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

}  // namespace

TEST_CASE("cache: N threads decode every image once; another process opens the same memory" * runs_threads) {
  std::atomic<int> inside{0};
  std::vector<std::atomic<int>> times(kGrey);
  const Dataset data = grey_images([&](size_t i) {
    ++times[i];
    ++inside;
    while (inside < 4) std::this_thread::yield();  // until all threads are here
  });
  std::vector<size_t> progress;
  ImageCache cache(data, {64, 64});
  const std::string path =
      cache.create_in_memory(data, 4, [&](size_t done, size_t) { progress.push_back(done); });
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

TEST_CASE("cache: a file is used by later runs, and replaced when the images change" * runs_threads) {
  const TempDir dir;
  const std::string folder = dir / "cache";
  CHECK(decoded_for(folder) == kGrey);
  CHECK(decoded_for(folder) == 0);
  const std::string file = folder + "/" + *entries_of(folder).begin();
  CHECK((fs::status(file).permissions() & fs::perms::all) ==
        (fs::perms::owner_read | fs::perms::owner_write));
  fs::resize_file(file, 1000);  // as a copy that was cut off
  CHECK(decoded_for(folder) == kGrey);
  fs::rename(file, file + ".part");  // what a killed process left is completed
  write_text(folder + "/else", "");
  CHECK(decoded_for(folder) == kGrey);
  CHECK(decoded_for(folder, "changed") == kGrey);
  CHECK_FALSE(fs::exists(file));
  CHECK(entries_of(folder).size() == 2);
  Dataset smaller = grey_images();
  smaller.records.pop_back();
  ImageCache(smaller, {64, 64}).open_on_disk(folder, smaller, 1, {});
  CHECK(entries_of(folder).size() == 3);  // the file of other data stays
}

TEST_CASE("cache: a failed decoding and too little room are errors, and leave no file" * runs_threads) {
  const TempDir dir;
  Dataset data = grey_images([](size_t i) { check(i != 5, "5.jpg is broken"); });
  ImageCache cache(data, {64, 64});
  CHECK(error_of([&] { cache.open_on_disk(dir.path.string(), data, 4, {}); }) == "5.jpg is broken");
  data.records.assign(100000, {"", 1, 20000, 20000, {}});
  ImageCache huge(data, {20000, 20000});
  const std::string ram = error_of([&] { huge.create_in_memory(data, 1, {}); });
  CHECK_HAS(ram, "in memory, of which 10 % are kept free: it needs 159375G, free ");
  const std::string disk = error_of([&] { huge.open_on_disk(dir.path.string(), data, 1, {}); });
  CHECK_HAS(disk, concat("in ", dir.path.string(), ": it needs 159375G, free "));
  CHECK_HAS(disk, "; free some space, use --cache disk with another YOLOX_CACHE_DIR, or leave --cache out");
  CHECK(entries_of(dir.path.string()).empty());
}

TEST_CASE("cache: free memory is 90 % of what is available within limits of cgroups" * runs_threads) {
  const TempDir dir;
  write_text(dir / "meminfo", "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\n");
  // The group of the job and its parents, in versions 1 and 2: the one with the least memory left counts.
  write_text(dir / "self/cgroup", "12:cpu:/x\n5:cpu,memory:/slurm/job_7\n0::/user/job_7\n");
  for (const auto& [file, content, free] :
       {std::tuple("self/other", "", 500 * 1024.),
        {"memory.max", "max\n", 500 * 1024.},
        {"memory.max", "500000\n", 450000.},
        {"memory.current", "200000\n", 250000.},
        {"memory.stat", "anon 1\nfile 50000\nkernel 5\nshmem 20000\n", 280000.},
        {"user/memory.max", "300000\n", 270000.},
        {"user/job_7/memory.max", "280000\n", 252000.},
        {"memory/slurm/memory.limit_in_bytes", "200000\n", 180000.},
        {"memory/slurm/memory.usage_in_bytes", "100000\n", 80000.},
        {"memory/slurm/memory.stat", "cache 1\ntotal_cache 50000\ntotal_shmem 20000\n", 110000.},
        {"memory/memory.limit_in_bytes", "9223372036854771712\n", 110000.},  // no limit
        {"memory/memory.limit_in_bytes", "100000\n", 90000.},
        {"memory.max", "100\n", 0.}}) {
    write_text(dir / file, content);
    const std::string set = file;
    const double wanted = free;
    CHECK_MESSAGE(free_memory(dir.path.string(), dir.path.string()) == doctest::Approx(wanted), set);
  }
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
  CHECK(cache_folder() == "");
}
