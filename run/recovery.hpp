// A step that went wrong: kept, gone back from.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/dataset.hpp"
#include "data/pictures.hpp"
#include "run/saving.hpp"
#include "step.hpp"

namespace yolox {

// A step that went wrong, to look at: nonfinite.pth with the batch as it was loaded, the size it was then
// brought to, the weights and what was computed; and nonfinite.jpg. Gives where they are, or why they are
// not.
std::string save_bad_step(const std::string& run, Training& t, const Batch& batch, const Dataset& data,
                          const StepNumbers& n, double lr, ImageSize size, bool use_l1, int rank = 0);

}  // namespace yolox
