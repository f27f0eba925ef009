// A picture of the memory that one step takes, with DTR and without: --dtr-trace.
#pragma once
#include <opencv2/imgproc.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "dtr/dtr.hpp"
#include "run/log.hpp"

namespace yolox {

namespace dtr_trace_detail {

// The round number of which `most` has 4 to 9: 1, 2 or 5 times a power of ten.
double round_part(double most);

}  // namespace dtr_trace_detail

// [480, 960, 3] BGR: memory against time. backward: when that begins, seconds.
cv::Mat draw_memory(const std::vector<MemorySample>& samples, double budget, double backward);

}  // namespace yolox
