// SPDX-License-Identifier: Apache-2.0
// --dtr-trace: a chart of the memory of one step, with and without DTR.
#pragma once
#include <opencv2/imgproc.hpp>

#include <vector>

#include "dtr/dtr.hpp"

namespace yolox {

namespace dtr_trace_detail {

// Returns the distance of ticks on an axis from 0 to `most`: 1, 2 or 5 times a power of ten, so that the axis
// has 4 to 9 of them.
double tick_distance(double most);

}  // namespace dtr_trace_detail

// Draws memory over time as a BGR picture of 960x480 pixels. budget: bytes. backward: start of backward,
// seconds since the start of the step.
cv::Mat draw_memory_chart(const std::vector<MemorySample>& samples, double budget, double backward);

}  // namespace yolox
