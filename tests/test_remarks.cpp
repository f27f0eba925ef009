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

std::string remarks_of(Remarks& remarks, const StepMetrics& n, int steps) {
  std::string all;
  for (int i = 0; i < steps; ++i) all += remarks.check_step(n);
  return all;
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

TEST_CASE("remarks: 100 steps in a row without positives are reported once") {
  Remarks remarks(true);
  CHECK(remarks_of(remarks, step_with_loss_of(1, 0), 99) == "");
  CHECK(remarks_of(remarks, step_with_loss_of(1, 1), 1) == "");
  CHECK(remarks_of(remarks, step_with_loss_of(1, 0), 99) == "");
  CHECK(has(remarks_of(remarks, step_with_loss_of(1, 0), 1), "nothing is learnt"));
  CHECK(remarks_of(remarks, step_with_loss_of(1, 0), 500) == "");
}

TEST_CASE("remarks: a loss that does not fall in the first 1000 steps is reported; a later plateau is not") {
  Remarks flat(true), falling(true), tuned(false);
  CHECK(remarks_of(flat, step_with_loss_of(10), 999) == "");
  CHECK(has(remarks_of(flat, step_with_loss_of(10), 1), "the loss has not fallen in 1000 steps"));
  CHECK(remarks_of(flat, step_with_loss_of(10), 3000) == "");
  CHECK(remarks_of(falling, step_with_loss_of(10), 300) == "");
  CHECK(remarks_of(falling, step_with_loss_of(9), 3000) == "");
  CHECK(remarks_of(tuned, step_with_loss_of(10), 3000) == "");
  Remarks late(true), again(true);
  CHECK(remarks_of(late, step_with_loss_of(10), 900) == "");
  CHECK(remarks_of(late, step_with_loss_of(9), 100) == "");  // only the latest steps count
  CHECK(remarks_of(again, step_with_loss_of(10), 300) == "");
  CHECK(remarks_of(again, step_with_loss_of(9), 800) == "");
  CHECK(remarks_of(again, step_with_loss_of(10), 1000) == "");  // checked once
}

TEST_CASE("remarks: waiting for data half of the time is reported once, after half a minute") {
  Remarks remarks(true);
  CHECK(remarks.check_waiting(20, 29) == "");
  CHECK(remarks.check_waiting(20, 41) == "");
  CHECK(has(remarks.check_waiting(31, 60), "51 % of the time; use more --workers"));
  CHECK(remarks.check_waiting(31, 60) == "");
}

TEST_CASE("remarks: a learning rate that is far from the usual one of the optimizer is reported") {
  CHECK(Remarks::check_learning_rate("sgd", 0.0025, 16, false) == "");
  CHECK(Remarks::check_learning_rate("adamw", 0.001, 16, false) == "");
  CHECK(
      has(Remarks::check_learning_rate("sgd", 0.1, 16, false), "usual for sgd and a batch of 16 is 0.0025"));
  CHECK(has(Remarks::check_learning_rate("adam", 0.04, 16, false),
            "usual for adam and a batch of 16 is 0.0028"));
  CHECK(has(Remarks::check_learning_rate("sgd", 1e-6, 16, false), "usual for sgd"));
  CHECK(Remarks::check_learning_rate("sgd", 1e-6, 16, true) == "");  // fine-tuning
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
