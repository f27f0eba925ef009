// SPDX-License-Identifier: Apache-2.0
// --dtr-trace: a chart of the memory of one step, with and without DTR.
#pragma once
#include <opencv2/imgproc.hpp>

#include <vector>

#include "dtr/dtr.hpp"

namespace yolox {

// Draws memory over time as a BGR picture of 960x480 pixels. budget: bytes. backward: start of backward,
// seconds since the start of the step.
cv::Mat draw_memory_chart(const std::vector<MemorySample>& samples, double budget, double backward);

}  // namespace yolox
