// The figure that benchmarks give of several timings.
#pragma once
#include <algorithm>
#include <vector>

// Of an even number the larger of the two in the middle; 0 of none.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}
