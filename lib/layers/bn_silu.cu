// SPDX-License-Identifier: Apache-2.0
// The kernels of bn_silu_kernels.hpp. nvcc compiles this file for GPUs. The tests compile it as plain C++
// with tests/emulated_cuda.hpp and compare the results with torch in float64.
//
// The comment of a kernel states its traffic with device memory, and the time that it takes on an H100 (3.35
// TB/s) in the largest layer of yolox-s at 640 x 640 and batch 16: 1,638,400 rows of 32 channels, 105 MB in
// bf16. bench/bench_bn_silu.cpp measures it.
#include "layers/bn_silu_kernels.hpp"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif

namespace yolox {
namespace bn_silu_kernels {

#ifdef __CUDACC__
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, int threads, void* stream, Arguments... arguments) {
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error) +
                             " (a kernel of lib/layers/bn_silu.cu)");
}
#endif

namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // that a multiprocessor can run at a time: at most 64 registers per thread
constexpr int kMostLanes = 32;
constexpr int kRowsPerThread = 16;  // of kernels without sums; fewer would load the statistics too often

// Consecutive elements of a row, which are loaded and stored at once.
template <class T, int V>
struct alignas(sizeof(T) * V) Vector {
  T at[V];
};

// The part of the matrix that a thread works on: V channels from `channel` on, in every step-th row from
// `first` on. A block covers `lanes` x V channels and `height` rows at a time. Its threads are numbered along
// the row, so that neighbours access neighbouring memory.
template <int V>
struct Place {
  __device__ explicit Place(int channels) {
    const int vectors = channels / V;
    lanes = (vectors + int(gridDim.y) - 1) / int(gridDim.y);
    height = kThreads / lanes;
    row = int(threadIdx.x) / lanes;
    const int vector = int(blockIdx.y) * lanes + int(threadIdx.x) % lanes;
    channel = vector * V;
    works = row < height && vector < vectors;
    first = int64_t(blockIdx.x) * height + row;
    step = int64_t(gridDim.x) * height;
  }
  int lanes, height, row, channel;
  int64_t first, step;
  bool works;
};

// A matrix whose rows have a distance of `pitch` elements.
template <class T>
struct Input {
  const T* data;
  int64_t pitch;
};

// Calls use(row, vectors) for the rows of a thread, where vectors[i] is loaded from inputs[i]. Loads kAtOnce
// rows before the first use, because one load per thread would not keep the memory busy.
template <int kAtOnce, class T, int V, int N, class Use>
__device__ void for_rows(const Place<V>& place, int64_t rows, const Input<T> (&inputs)[N], const Use& use) {
  for (int64_t first = place.first; first < rows; first += kAtOnce * place.step) {
    Vector<T, V> loaded[kAtOnce][N];
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t row = first + k * place.step;
      if (row < rows)
        for (int i = 0; i < N; ++i)
          loaded[k][i] =
              *reinterpret_cast<const Vector<T, V>*>(inputs[i].data + row * inputs[i].pitch + place.channel);
    }
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t row = first + k * place.step;
      if (row < rows) use(row, loaded[k]);
    }
  }
}

// Copies the values of a thread's channels.
template <int V>
__device__ void load(float (&to)[V], const float* from, int channel) {
  for (int v = 0; v < V; ++v) to[v] = from[channel + v];
}

// Merges the values of the threads of a block that have the same position in their row. Afterwards, the
// threads of row 0 have the result. A row has `lanes` threads. All threads of the block must call it.
template <int N, class Number, class Merge>
__device__ void merge_rows(Number (&mine)[N], int lanes, int height, const Merge& merge) {
  __shared__ Number slots[N][kThreads];
  const int thread = int(threadIdx.x), row = thread / lanes;
  for (int left = height; left > 1;) {
    const int half = (left + 1) / 2;
    if (row >= half && row < left) {
      for (int i = 0; i < N; ++i) slots[i][thread] = mine[i];
    }
    __syncthreads();
    if (row + half < left) {
      Number other[N];
      for (int i = 0; i < N; ++i) other[i] = slots[i][thread + half * lanes];
      merge(mine, other);
    }
    left = half;
  }
}
struct Add {
  template <int N, class Number>
  __device__ void operator()(Number (&mine)[N], const Number (&other)[N]) const {
    for (int i = 0; i < N; ++i) mine[i] += other[i];
  }
};

// With -ftz=true, exp2f() is a multiplication and one instruction, expf() is eight.
__device__ inline float sigmoid(float z) {
  constexpr float kLog2E = 1.44269504f;
  return __fdividef(1.0f, 1.0f + exp2f(-kLog2E * z));
}

// ---- forward

// Reads x: 2 bytes per element in bf16, 105 MB, 45 us.
//
// Welford's method, with float32 and few rows per thread; then the threads are merged (Chan et al. 1979).
template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    moments_kernel(const T* __restrict__ x, int64_t rows, int channels, float* __restrict__ parts) {
  const Place<V> place(channels);
  float mine[2 * V + 1] = {};  // means, sums of squared distances, number of rows
  const Input<T> inputs[] = {{x, channels}};
  if (place.works)
    for_rows<2>(place, rows, inputs, [&](int64_t, const Vector<T, V>(&row)[1]) {
      mine[2 * V] += 1;
      const float share = 1 / mine[2 * V];
      for (int v = 0; v < V; ++v) {
        const float value = float(row[0].at[v]), distance = value - mine[v];
        mine[v] += distance * share;
        mine[V + v] += distance * (value - mine[v]);
      }
    });
  merge_rows(mine, place.lanes, place.height, [](float(&into)[2 * V + 1], const float(&other)[2 * V + 1]) {
    const float count = into[2 * V] + other[2 * V];
    if (other[2 * V] == 0) return;
    const float share = other[2 * V] / count;
    for (int v = 0; v < V; ++v) {
      const float distance = other[v] - into[v];
      into[v] += distance * share;
      into[V + v] += other[V + v] + distance * distance * (into[2 * V] * share);
    }
    into[2 * V] = count;
  });
  if (place.row != 0 || !place.works) return;
  float* part = parts + int64_t(blockIdx.x) * (2 * channels + 1);
  for (int v = 0; v < V; ++v) {
    part[place.channel + v] = mine[v];
    part[channels + place.channel + v] = mine[V + v];
  }
  if (place.channel == 0) part[2 * channels] = mine[2 * V];
}

// The kernels that add parts: a block has 8 channels, and 32 threads for each of them.
constexpr int kColumns = 8, kGroups = kThreads / kColumns;

// The moments of one channel over all parts. In float64, sums of squares do not lose precision.
struct Merged {
  __device__ Merged(const float* parts, int64_t parts_count, int channels, int channel) {
    double sums[3] = {};
    if (channel < channels)
      for (int64_t p = int(threadIdx.x) / kColumns; p < parts_count; p += kGroups) {
        const float* part = parts + p * (2 * channels + 1);
        const double n = part[2 * channels], m = part[channel];
        sums[0] += n;
        sums[1] += n * m;
        sums[2] += part[channels + channel] + n * m * m;
      }
    merge_rows(sums, kColumns, kGroups, Add());
    count = sums[0];
    mean = count > 0 ? sums[1] / count : 0;
    squares = sums[2] - count * mean * mean;
    if (squares < 0) squares = 0;  // by rounding; NaN stays NaN
  }
  double count, mean, squares;
};
__device__ inline int channel_of_thread() { return int(blockIdx.x) * kColumns + int(threadIdx.x) % kColumns; }

// Reads the parts: 512 x 65 x 4 bytes, 0.1 MB. The latency of memory decides, some microseconds.
__global__ void __launch_bounds__(kThreads, kBlocks)
    merge_moments_kernel(int channels, const float* __restrict__ parts, int64_t parts_count,
                         float* __restrict__ merged) {
  const int c = channel_of_thread();
  const Merged m(parts, parts_count, channels, c);
  if (int(threadIdx.x) >= kColumns || c >= channels) return;
  merged[c] = float(m.mean);
  merged[channels + c] = float(m.squares);
  if (c == 0) merged[2 * channels] = float(m.count);
}

// As merge_moments_kernel. With SyncBN, there is one part per rank.
__global__ void __launch_bounds__(kThreads, kBlocks)
    finish_moments_kernel(int channels, const float* __restrict__ parts, int64_t parts_count,
                          const float* __restrict__ weight, const float* __restrict__ bias,
                          float* __restrict__ running_mean, float* __restrict__ running_var, double momentum,
                          double eps, float* __restrict__ saved, double* __restrict__ count) {
  const int c = channel_of_thread();
  const Merged m(parts, parts_count, channels, c);
  if (int(threadIdx.x) >= kColumns || c >= channels) return;
  const double variance = m.count > 0 ? m.squares / m.count : 0;
  const float inverse = float(1 / sqrt(variance + eps));
  saved[c] = float(m.mean);
  saved[channels + c] = inverse;
  saved[2 * channels + c] = weight[c] * inverse;
  saved[3 * channels + c] = bias[c];
  const double unbiased = m.squares / (m.count > 2 ? m.count - 1 : 1);
  running_mean[c] = float((1 - momentum) * running_mean[c] + momentum * m.mean);
  running_var[c] = float((1 - momentum) * running_var[c] + momentum * unbiased);
  if (c == 0) *count = m.count;
}

// Reads x and writes y: 4 bytes per element in bf16, 210 MB, 82 us.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    normalise_kernel(const T* __restrict__ x, int64_t rows, int channels, const float* __restrict__ saved,
                     T* __restrict__ y) {
  const Place<V> place(channels);
  if (!place.works) return;
  float mean[V], scale[V], bias[V];
  load(mean, saved, place.channel);
  load(scale, saved + 2 * channels, place.channel);
  load(bias, saved + 3 * channels, place.channel);
  const Input<T> inputs[] = {{x, channels}};
  for_rows<2>(place, rows, inputs, [&](int64_t row, const Vector<T, V>(&in)[1]) {
    Vector<T, V> out;
    for (int v = 0; v < V; ++v) {
      const float z = (float(in[0].at[v]) - mean[v]) * scale[v] + bias[v];
      out.at[v] = T(z * sigmoid(z));
    }
    *reinterpret_cast<Vector<T, V>*>(y + row * channels + place.channel) = out;
  });
}

// ---- backward

// Returns dz, the gradient of z. y = z * sigmoid(z).
__device__ inline float gradient_of_silu(float g, float z) {
  const float s = sigmoid(z);
  return g * s * (1 + z * (1 - s));
}

// Reads g and x: 4 bytes per element in bf16, 210 MB, 90 us.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_sums_kernel(const T* __restrict__ g, int64_t g_pitch, const T* __restrict__ x, int64_t rows,
                         int channels, const float* __restrict__ saved, float* __restrict__ parts) {
  const Place<V> place(channels);
  float mine[2 * V] = {};  // sums of dz and of dz (x - mean)
  if (place.works) {
    float mean[V], scale[V], bias[V];
    load(mean, saved, place.channel);
    load(scale, saved + 2 * channels, place.channel);
    load(bias, saved + 3 * channels, place.channel);
    const Input<T> inputs[] = {{g, g_pitch}, {x, channels}};
    for_rows<2>(place, rows, inputs, [&](int64_t, const Vector<T, V>(&in)[2]) {
      for (int v = 0; v < V; ++v) {
        const float distance = float(in[1].at[v]) - mean[v];
        const float dz = gradient_of_silu(float(in[0].at[v]), distance * scale[v] + bias[v]);
        mine[v] += dz;
        mine[V + v] += dz * distance;
      }
    });
  }
  merge_rows(mine, place.lanes, place.height, Add());
  if (place.row != 0 || !place.works) return;
  float* part = parts + int64_t(blockIdx.x) * 2 * channels;
  for (int v = 0; v < V; ++v) {
    part[place.channel + v] = mine[v];
    part[channels + place.channel + v] = mine[V + v];
  }
}

// Reads the parts: 512 x 64 x 4 bytes, 0.1 MB. The latency of memory decides, some microseconds.
__global__ void __launch_bounds__(kThreads, kBlocks)
    add_gradient_sums_kernel(int channels, const float* __restrict__ parts, int64_t parts_count,
                             const float* __restrict__ saved, float* __restrict__ sums,
                             float* __restrict__ d_weight, float* __restrict__ d_bias) {
  const int c = channel_of_thread();
  double mine[2] = {};
  if (c < channels)
    for (int64_t p = int(threadIdx.x) / kColumns; p < parts_count; p += kGroups) {
      mine[0] += parts[p * 2 * channels + c];
      mine[1] += parts[p * 2 * channels + channels + c];
    }
  merge_rows(mine, kColumns, kGroups, Add());
  if (int(threadIdx.x) >= kColumns || c >= channels) return;
  sums[c] = float(mine[0]);
  sums[channels + c] = float(mine[1]);
  d_bias[c] = float(mine[0]);
  d_weight[c] = float(mine[1] * saved[channels + c]);
}

// Reads g and x and writes dx: 6 bytes per element in bf16, 315 MB, 130 us. Computing dz again costs
// less than writing and reading it.
template <class T, int V>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gradient_kernel(const T* __restrict__ g, int64_t g_pitch, const T* __restrict__ x, int64_t rows,
                    int channels, const float* __restrict__ saved, const float* __restrict__ sums,
                    const double* __restrict__ count, T* __restrict__ dx) {
  const Place<V> place(channels);
  if (!place.works) return;
  float mean[V], scale[V], bias[V], mean_dz[V], slope[V];
  load(mean, saved, place.channel);
  load(slope, saved + channels, place.channel);
  load(scale, saved + 2 * channels, place.channel);
  load(bias, saved + 3 * channels, place.channel);
  const float share = 1 / float(*count);
  for (int v = 0; v < V; ++v) {
    mean_dz[v] = sums[place.channel + v] * share;
    slope[v] *= sums[channels + place.channel + v] * share * slope[v];
  }
  const Input<T> inputs[] = {{g, g_pitch}, {x, channels}};
  for_rows<2>(place, rows, inputs, [&](int64_t row, const Vector<T, V>(&in)[2]) {
    Vector<T, V> out;
    for (int v = 0; v < V; ++v) {
      const float distance = float(in[1].at[v]) - mean[v];
      const float dz = gradient_of_silu(float(in[0].at[v]), distance * scale[v] + bias[v]);
      out.at[v] = T(scale[v] * (dz - mean_dz[v] - distance * slope[v]));
    }
    *reinterpret_cast<Vector<T, V>*>(dx + row * channels + place.channel) = out;
  });
}

// ---- launches

// The elements of a vector, or one element if the matrices do not allow more: 16 bytes in forward. In
// backward, at most 4 elements, because 8 need more than 64 registers.
template <int V>
struct Width {
  static constexpr int value = V;
};
// Calls run(T(), Width<V>()) for the type of the matrices and the vectors that fit them.
template <int kMost, class Run>
void for_type(const Shape& s, int64_t pitch, std::initializer_list<const void*> matrices, const Run& run) {
  uintptr_t addresses = 0;
  for (const void* m : matrices) addresses |= reinterpret_cast<uintptr_t>(m);
  const int width = s.type == Type::float32 ? 4 : kMost;
  const bool vectors = addresses % 16 == 0 && s.channels % width == 0 && pitch % width == 0;
  if (s.type == Type::float32) vectors ? run(float(), Width<4>()) : run(float(), Width<1>());
  if (s.type == Type::float16) vectors ? run(__half(), Width<kMost>()) : run(__half(), Width<1>());
  if (s.type == Type::bfloat16)
    vectors ? run(__nv_bfloat16(), Width<kMost>()) : run(__nv_bfloat16(), Width<1>());
}

// Returns a grid: parts of the rows x parts of the channels.
dim3 grid(int64_t parts, int vectors) {
  return dim3(unsigned(parts), unsigned((vectors + kMostLanes - 1) / kMostLanes));
}
int64_t parts_without_sums(const Shape& s, int width) {
  const int64_t elements = int64_t(kThreads) * kRowsPerThread * width;
  return (s.rows * s.channels + elements - 1) / elements;
}
unsigned blocks_of_columns(int channels) { return unsigned((channels + kColumns - 1) / kColumns); }

}  // namespace

void moments(const Shape& s, const void* x, float* parts, void* stream) {
  for_type<8>(s, s.channels, {x}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int V = decltype(width)::value;
    launch(&moments_kernel<T, V>, grid(parts_of(s), s.channels / V), kThreads, stream,
           static_cast<const T*>(x), s.rows, s.channels, parts);
  });
}

void merge_moments(int channels, const float* parts, int64_t count, float* merged, void* stream) {
  launch(&merge_moments_kernel, dim3(blocks_of_columns(channels)), kThreads, stream, channels, parts, count,
         merged);
}

void finish_moments(int channels, const float* parts, int64_t parts_count, const float* weight,
                    const float* bias, float* running_mean, float* running_var, double momentum, double eps,
                    float* saved, double* count, void* stream) {
  launch(&finish_moments_kernel, dim3(blocks_of_columns(channels)), kThreads, stream, channels, parts,
         parts_count, weight, bias, running_mean, running_var, momentum, eps, saved, count);
}

void normalise(const Shape& s, const void* x, const float* saved, void* y, void* stream) {
  if (s.rows == 0) return;
  for_type<8>(s, s.channels, {x, y}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int V = decltype(width)::value;
    launch(&normalise_kernel<T, V>, grid(parts_without_sums(s, V), s.channels / V), kThreads, stream,
           static_cast<const T*>(x), s.rows, s.channels, saved, static_cast<T*>(y));
  });
}

void gradient_sums(const Shape& s, const void* g, int64_t g_pitch, const void* x, const float* saved,
                   float* parts, void* stream) {
  for_type<4>(s, g_pitch, {g, x}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int V = decltype(width)::value;
    launch(&gradient_sums_kernel<T, V>, grid(parts_of(s), s.channels / V), kThreads, stream,
           static_cast<const T*>(g), g_pitch, static_cast<const T*>(x), s.rows, s.channels, saved, parts);
  });
}

void add_gradient_sums(int channels, const float* parts, int64_t parts_count, const float* saved, float* sums,
                       float* d_weight, float* d_bias, void* stream) {
  launch(&add_gradient_sums_kernel, dim3(blocks_of_columns(channels)), kThreads, stream, channels, parts,
         parts_count, saved, sums, d_weight, d_bias);
}

void gradient(const Shape& s, const void* g, int64_t g_pitch, const void* x, const float* saved,
              const float* sums, const double* count, void* dx, void* stream) {
  if (s.rows == 0) return;
  for_type<4>(s, g_pitch, {g, x, dx}, [&](auto type, auto width) {
    using T = decltype(type);
    constexpr int V = decltype(width)::value;
    launch(&gradient_kernel<T, V>, grid(parts_without_sums(s, V), s.channels / V), kThreads, stream,
           static_cast<const T*>(g), g_pitch, static_cast<const T*>(x), s.rows, s.channels, saved, sums,
           count, static_cast<T*>(dx));
  });
}

}  // namespace bn_silu_kernels
}  // namespace yolox
