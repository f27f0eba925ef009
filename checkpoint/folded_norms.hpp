// SPDX-License-Identifier: Apache-2.0
// Statistics for batch norms that an ONNX exporter folded into their convolutions.
#pragma once
#include <torch/torch.h>

#include "data/dataset.hpp"
#include "images/boxes.hpp"
#include "yolox.hpp"

namespace yolox {

// Batch norm that shares the tensors of `norm` and accumulates the mean and variance of its inputs.
struct StatisticsNorm : torch::nn::BatchNorm2dImpl {
  explicit StatisticsNorm(const torch::nn::BatchNorm2d& norm);
  const torch::nn::BatchNorm2d norm;
  double count = 0;     // number of values per channel
  Tensor sum, squares;  // float64 [C]

 protected:
  void _check_input_dim(const Tensor& x) override;
};

// Restores batch norms that an ONNX exporter folded into their convolutions, so that the model can be
// trained. After the import, such a norm only adds a bias (mean 0, variance 1 - eps). In training it would
// normalise with the statistics of the batch and change the network. This function measures the mean and
// variance of the inputs of these norms on the first `most` images, stores them as running statistics, and
// sets weight and bias so that the output in evaluation mode does not change. Returns the number of images
// used, or 0 if no norm was folded.
int64_t restore_folded_norms(YOLOX& model, const Dataset& data, ImageSize size, bool legacy, int workers,
                             int64_t most = 32);

}  // namespace yolox
