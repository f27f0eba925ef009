// SPDX-License-Identifier: Apache-2.0
// Time of each kernel of lib/layers/bn_silu.cu on a GPU, and bytes of its matrices divided by the time, as
// lines of JSON, for the largest layers of yolox-s at 640 x 640. Matrices below 50 MB fit into the L2 cache
// of an H100. With --check it runs all kernels on small matrices of many sizes instead, for
// compute-sanitizer. It compares no result.
//   compute-sanitizer --tool memcheck bench_bn_silu --check     (also racecheck and initcheck)
// Does not use torch, which takes minutes to start under compute-sanitizer.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "layers/bn_silu_kernels.hpp"

using namespace yolox::bn_silu_kernels;

static void succeed(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

// Device memory that ends where the data end, so that compute-sanitizer finds an access behind it.
struct Memory {
  explicit Memory(size_t bytes) : bytes(bytes) { succeed(cudaMalloc(&data, std::max<size_t>(bytes, 1))); }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data); }
  operator float*() const { return static_cast<float*>(data); }
  void* data = nullptr;
  const size_t bytes;
};

// Fills a matrix with random numbers: float32 and bfloat16 from -2 to 2, float16 with random bits below 1.75.
static void fill(const Memory& memory, Type type) {
  static std::mt19937 random(0);
  std::vector<float> numbers(memory.bytes / 4 + 1);
  for (float& x : numbers) x = random() / 1073741824.0F - 2;
  std::vector<uint16_t> halves(memory.bytes / 2 + 1);
  for (size_t i = 0; i < halves.size() && type != Type::float32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &numbers[i / 2], 4);
    // The upper half of a float32 is a bfloat16.
    halves[i] = type == Type::bfloat16 ? bits >> 16 : uint16_t(random() % 0x3f00 | (bits >> 16 & 0x8000));
  }
  const void* from = type == Type::float32 ? static_cast<void*>(numbers.data()) : halves.data();
  succeed(cudaMemcpy(memory.data, from, memory.bytes, cudaMemcpyHostToDevice));
}

// One layer of a network, forward and backward.
struct Layer {
  Layer(Shape s, int64_t pitch)
      : s(s),
        pitch(pitch),
        size(s.type == Type::float32 ? 4 : 2),
        x(s.rows * s.channels * size),
        y(x.bytes),
        dx(x.bytes),
        g(((s.rows - 1) * pitch + s.channels) * size),
        moments_of_parts(parts_of(s) * (2 * s.channels + 1) * 4),
        sums_of_parts(parts_of(s) * 2 * s.channels * 4),
        merged((2 * s.channels + 1) * 4),
        saved(4 * s.channels * 4),
        sums(2 * s.channels * 4),
        vectors(6 * s.channels * 4),
        count(sizeof(double)) {
    fill(x, s.type);
    fill(g, s.type);
    fill(vectors, Type::float32);
  }
  float* vector(int i) const { return vectors + int64_t{i} * s.channels; }

  // Calls call(name, number of matrices that it reads or writes, function) for each kernel of matrices, in
  // order.
  template <class Call>
  void each(const Call& call) {
    call("moments", 1, [&] { moments(s, x.data, moments_of_parts, nullptr); });
    finish_moments(s.channels, moments_of_parts, parts_of(s), vector(0), vector(1), vector(2), vector(3),
                   0.03, 1e-3, saved, static_cast<double*>(count.data), nullptr);
    call("normalise", 2, [&] { normalise(s, x.data, saved, y.data, nullptr); });
    call("gradient_sums", 2, [&] { gradient_sums(s, g.data, pitch, x.data, saved, sums_of_parts, nullptr); });
    add_gradient_sums(s.channels, sums_of_parts, parts_of(s), saved, sums, vector(4), vector(5), nullptr);
    call("gradient", 3, [&] {
      gradient(s, g.data, pitch, x.data, saved, sums, static_cast<double*>(count.data), dx.data, nullptr);
    });
  }

  const Shape s;
  const int64_t pitch;
  const int size;  // of an element
  const Memory x, y, dx, g, moments_of_parts, sums_of_parts, merged, saved, sums, vectors, count;
};

static void check_all() {
  int64_t layers = 0;
  for (const Type type : {Type::float32, Type::float16, Type::bfloat16})
    for (const int64_t rows : {1, 5, 400, 9001})
      for (const int channels : {1, 3, 4, 16, 31, 80, 256, 264, 513})
        for (const int64_t pitch : {channels, channels + 8}) {
          Layer layer({type, rows, channels}, pitch);
          layer.each([](const char*, int, const auto& run) { run(); });
          // As of one rank of several with SyncBN.
          merge_moments(channels, layer.moments_of_parts, parts_of(layer.s), layer.merged, nullptr);
          succeed(cudaDeviceSynchronize());
          // So that initcheck finds an element that was not written.
          std::vector<char> y(layer.y.bytes), dx(layer.dx.bytes);
          succeed(cudaMemcpy(y.data(), layer.y.data, y.size(), cudaMemcpyDeviceToHost));
          succeed(cudaMemcpy(dx.data(), layer.dx.data, dx.size(), cudaMemcpyDeviceToHost));
          ++layers;
        }
  std::cout << layers << " layers\n";
}

static void measure() {
  cudaEvent_t start, end;
  succeed(cudaEventCreate(&start));
  succeed(cudaEventCreate(&end));
  for (const int batch : {16, 64})
    for (const auto& [side, channels] : {std::pair{320, 32}, {160, 64}, {80, 128}, {40, 256}, {20, 512}}) {
      Layer layer({Type::bfloat16, int64_t{batch} * side * side, channels}, channels);
      std::cout << "{\"batch\": " << batch << ", \"side\": " << side << ", \"channels\": " << channels;
      layer.each([&](const char* name, int passes, const auto& run) {
        constexpr int kTimes = 20;
        std::vector<float> times;
        for (int i = 0; i < kTimes; ++i) {
          succeed(cudaEventRecord(start));
          run();
          succeed(cudaEventRecord(end));
          succeed(cudaEventSynchronize(end));
          times.emplace_back();
          succeed(cudaEventElapsedTime(&times.back(), start, end));
        }
        std::sort(times.begin(), times.end());
        const double seconds = times[kTimes / 2] / 1e3;
        std::cout << ", \"" << name << "\": {\"us\": " << seconds * 1e6
                  << ", \"TB_per_s\": " << double(passes) * double(layer.x.bytes) / seconds / 1e12 << "}";
      });
      std::cout << "}\n";
    }
}

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::string(argv[1]) == "--check")
      check_all();
    else
      measure();
  } catch (const std::exception& e) {
    std::cerr << "error: " << e.what() << "\n";
    return 1;
  }
}
