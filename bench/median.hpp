// SPDX-License-Identifier: Apache-2.0
// Median of the timings of a benchmark.
#pragma once
#include <algorithm>
#include <vector>

// Returns the median, of an even number of values the larger middle one. Returns 0 if `values` is empty.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}
