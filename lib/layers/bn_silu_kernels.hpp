// SPDX-License-Identifier: Apache-2.0
// The CUDA kernels of bn_silu(), as plain functions. bn_silu.cu defines them and does not include torch.
//
// x, y, g (gradient of y) and dx (gradient of x) are matrices [rows, channels] in device memory: tensors [B,
// C, H, W] channels-last, with B x H x W rows. All other arrays are float32, except `count`. A function
// starts one kernel on `stream` (a cudaStream_t) of the current device and returns. It throws
// std::runtime_error if the kernel cannot be started.
//
// A kernel that sums over rows writes one row of results per part of the matrix, because the blocks of a
// kernel cannot wait for each other. A second, small kernel adds the parts in float64 and in a fixed order,
// so that the results of two runs have the same bits. The number of parts depends on the sizes alone.
#pragma once
#include <algorithm>
#include <cstdint>

namespace yolox {
namespace bn_silu_kernels {

// Set by use_fused_norm(), see bn_silu.hpp.
inline bool enabled = false;

enum class Type { float32, float16, bfloat16 };

struct Shape {
  Type type;  // of x, y, g and dx
  int64_t rows;
  int channels;  // at least 1
};

// Returns the number of parts: about 16,000 elements each, at most 512 blocks of 256 channels. Four blocks
// for each multiprocessor of an H200.
inline int64_t parts_of(const Shape& s) {
  const int64_t most = std::max(1, 512 / ((s.channels + 255) / 256));
  return std::clamp(s.rows * s.channels / 16384, int64_t{1}, most);
}

// Moments of a set of rows: a row [2 channels + 1] of means, sums of squared distances from the mean, and the
// number of rows.

// Writes the moments of each part. parts: [parts_of(s), 2 channels + 1].
void moments(const Shape& s, const void* x, float* parts, void* stream);
// Merges `count` rows of moments into one, [2 channels + 1].
void merge_moments(int channels, const float* parts, int64_t count, float* merged, void* stream);
// Merges `parts_count` rows of moments, updates the running statistics with them, and writes `saved`, [4,
// channels] (mean, 1 / standard deviation, weight / standard deviation, bias), and the number of rows.
void finish_moments(int channels, const float* parts, int64_t parts_count, const float* weight,
                    const float* bias, float* running_mean, float* running_var, double momentum, double eps,
                    float* saved, double* count, void* stream);
// Writes y = silu((x - mean) * scale + bias).
void normalise(const Shape& s, const void* x, const float* saved, void* y, void* stream);

// g_pitch: the distance of the rows of g in elements. It is larger than `channels` if g is a part of the
// gradient of a concatenation.

// Writes the sums of dz and of dz (x - mean) of each part, where dz is the gradient of the batch norm output.
// parts: [parts_of(s), 2 channels].
void gradient_sums(const Shape& s, const void* g, int64_t g_pitch, const void* x, const float* saved,
                   float* parts, void* stream);
// Adds the parts. sums: [2 channels]. Writes the gradients of weight and bias, too.
void add_gradient_sums(int channels, const float* parts, int64_t parts_count, const float* saved, float* sums,
                       float* d_weight, float* d_bias, void* stream);
// Writes dx. sums, count: over all ranks.
void gradient(const Shape& s, const void* g, int64_t g_pitch, const void* x, const float* saved,
              const float* sums, const double* count, void* dx, void* stream);

}  // namespace bn_silu_kernels
}  // namespace yolox
