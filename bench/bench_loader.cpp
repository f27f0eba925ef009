// SPDX-License-Identifier: Apache-2.0
// Throughput of our data loader in training samples per second, and the time of each stage of a sample.
// Prints JSON; bench/loader.py compares with the Python YOLOX.
//   build/bench_loader DATA SIZE BATCH THREADS SECONDS [none|ram|disk]
#include <cstdlib>
#include <iostream>

#include "base/program.hpp"
#include "data.hpp"
#include "data/store.hpp"
#include "formats.hpp"

using namespace yolox;

// Images of a data set. Adds up the seconds of image_region(), which reads and decodes.
struct Timed {
  const Dataset& data;
  mutable double reading = 0;
  cv::Size size(size_t i) const { return data.size(i); }
  const std::vector<Box>& boxes(size_t i) const { return data.boxes(i); }
  const std::vector<Box>& ignored(size_t i) const { return data.ignored(i); }
  ImageRegion image_region(size_t i, const cv::Rect& part, double scale) const {
    const double start = now();
    ImageRegion p = data.image_region(i, part, scale);
    reading += now() - start;
    return p;
  }
  size_t replacement_index(size_t i, const ImageError& e, size_t tries) const {
    return data.replacement_index(i, e, tries);
  }
};

int main(int argc, char** argv) {
  if (argc < 6) {
    std::cerr << "usage: bench_loader DATA SIZE BATCH THREADS SECONDS [none|ram|disk]\n";
    return 2;
  }
  opencv_single_thread();
  const int side = std::atoi(argv[2]), batch = std::atoi(argv[3]), threads = std::atoi(argv[4]);
  const double seconds = std::atof(argv[5]);
  const cv::Size size(side, side);
  const AugmentConfig config;
  Dataset data = load_splits({argv[1]}).train;
  const size_t n = data.records.size();
  const std::string cache = argc > 6 ? argv[6] : "none";
  if (cache != "none") {
    const auto images = std::make_shared<ImageCache>(data, size);
    if (cache == "ram")
      images->create_in_memory(data, threads, {});
    else
      images->open_on_disk(cache_folder(), data, threads, {});
    use_cache(data, images);
  }

  int64_t images = 0;
  double took = 0;
  {
    const int64_t always = int64_t{1} << 40;
    Loader loader(TrainingItems{data, {.augment = config, .mosaic_iters = always}}, 0, always, batch, size,
                  threads, torch::kCPU);
    for (int i = 0; i < 4; ++i) loader.next();
    const double start = now();
    for (; took < seconds; took = now() - start) images += loader.next().images.size(0);
  }

  // Stages of a sample, on one thread.
  const Timed timed{data};
  Sample sample{Image(size, 0), {}};
  double whole = 0, colour = 0;
  const int samples = 200;
  for (int i = 0; i < samples; ++i) {
    Rng rng(0, 1, i);
    SampleDraw draw = draw_sample(rng, config, n, i % n, size, true);
    draw.hsv.reset();
    double start = now();
    compose(timed, draw, sample);
    whole += now() - start;
    start = now();
    for (int y = 0; y < side; ++y) hsv_jitter(sample.image.ptr(y), side, 3, 10, -10);
    colour += now() - start;
  }
  const auto ms = [&](double s) { return s / samples * 1e3; };
  std::cout << "{\"images_per_second\": " << images / took << ", \"decode_ms\": " << ms(timed.reading)
            << ", \"warp_ms\": " << ms(whole - timed.reading) << ", \"colour_ms\": " << ms(colour)
            << ", \"sample_ms\": " << threads * took / images * 1e3 << "}\n";
}
