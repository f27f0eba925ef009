// SPDX-License-Identifier: Apache-2.0
#include "tensors.hpp"

#include "run/progress.hpp"

using namespace yolox;

namespace {

using Kind = Losses::Kind;

StepMetrics step_with_loss_of(double total, double positives = 5, double norm = 1) {
  return {total,
          {{"positives", Kind::kCount, positives},
           {"objects", Kind::kCount, 2},
           {"grad_norm", Kind::kLogged, norm}}};
}

}  // namespace

TEST_CASE("remarks: means are those of the steps since the last take()") {
  Means means;
  const StepMetrics a{1, {{"iou", Kind::kTerm, 2}, {"positives", Kind::kCount, 4}}},
      b{5, {{"iou", Kind::kTerm, 6}, {"positives", Kind::kCount, 8}}};
  means.add(a);
  means.add(b);
  CHECK(means.steps == 2);
  const StepMetrics m = means.take();
  CHECK(m.total == 3);
  CHECK(to_string(m) == "iou 4, positives 6");
  CHECK(means.steps == 0);
  means.add(b);
  CHECK(to_string(means.take()) == "iou 6, positives 8");
  StepMetrics logs = b;  // a value that not all steps log
  logs.values.push_back({"extra", Kind::kLogged, 3});
  logs.values.push_back({"term", Kind::kTerm, 3});
  means.add(a);
  means.add(logs);
  CHECK(to_string(means.take()) == "iou 4, positives 6, extra 3, term 1.5");
  CHECK(step_with_loss_of(1).per_object() == 2.5);
  CHECK(StepMetrics().per_object() == 0);
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    CHECK(step_with_loss_of(1).finite());
    CHECK_FALSE(step_with_loss_of(1, 5, bad).finite());
    CHECK_FALSE(step_with_loss_of(bad).finite());
  }
}

TEST_CASE("remarks: waiting for data half of the time is reported once, after half a minute") {
  bool noted = false;
  CHECK(waiting_note(20, 29, noted) == "");
  CHECK(waiting_note(20, 41, noted) == "");
  CHECK(has(waiting_note(31, 60, noted), "51 % of the time; use more --workers"));
  CHECK(waiting_note(31, 60, noted) == "");
}

TEST_CASE("remarks: a learning rate that is far from the usual one of the optimizer is reported") {
  CHECK(has(launch_note(13, 20, 0.1), "in 13 of 20 steps the GPU has waited"));
  CHECK(launch_note(11, 20, 0.1) == "");
  CHECK(launch_note(20, 20, 0.5) == "");  // for the data loader
  CHECK(learning_rate_note("sgd", 0.0025, 16, false) == "");
  CHECK(learning_rate_note("adamw", 0.001, 16, false) == "");
  CHECK(has(learning_rate_note("sgd", 0.1, 16, false), "usual for sgd and a batch of 16 is 0.0025"));
  CHECK(has(learning_rate_note("adam", 0.04, 16, false), "usual for adam and a batch of 16 is 0.0028"));
  CHECK(has(learning_rate_note("sgd", 1e-6, 16, false), "usual for sgd"));
  CHECK(learning_rate_note("sgd", 1e-6, 16, true) == "");  // fine-tuning
}

TEST_CASE("remarks: a nonfinite loss ends the run, a nonfinite gradient only the 20th time in a row") {
  int64_t skipped = 0;
  const StepMetrics overflow = step_with_loss_of(1, 5, HUGE_VAL), broken = step_with_loss_of(std::nan(""));
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 19; ++i) CHECK(stop_reason(overflow, skipped) == "");
    CHECK(skipped == 19);
    CHECK(stop_reason(step_with_loss_of(1), skipped) == "");
    CHECK(skipped == 0);
  }
  for (int i = 0; i < 19; ++i) stop_reason(overflow, skipped);
  CHECK(has(stop_reason(overflow, skipped), "20 times in a row"));
  skipped = 0;
  CHECK(has(stop_reason(broken, skipped), "the loss"));
}
