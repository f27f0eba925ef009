// SPDX-License-Identifier: Apache-2.0
// Output of a run while it trains: rows of metrics.csv, TensorBoard events, log lines and remarks.
#include "programs.hpp"

#include <optional>

#include "run/progress.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// A run that writes its log, metrics and events to a temporary folder.
struct TestRun {
  TempDir dir;
  Log log{dir / "log.txt"};
  std::optional<Progress> progress;

  explicit TestRun(int64_t first = 0) { progress.emplace(dir.path.string(), log, torch::kCPU, first); }
  void step(int64_t i, double total, double norm = 1, const Plan& plan = {1000, 4, 2, 8}) {
    StepMetrics n{total, {}};
    for (const char* term : {"iou", "obj", "cls", "l1"}) n.values.push_back({term, Losses::Kind::kTerm, 0});
    n.values.push_back({"positives", Losses::Kind::kCount, 6});
    n.values.push_back({"objects", Losses::Kind::kCount, 2});
    n.values.push_back({"grad_norm", Losses::Kind::kLogged, norm});
    quietly([&] { progress->log_steps({{i, learning_rate(plan.schedule, i), {}, n}}, plan); });
  }
  std::vector<std::vector<double>> rows() const { return metric_rows(dir / "metrics.csv"); }
  std::string log_text() const { return contents(dir / "log.txt"); }
  // Returns the contents of all event files.
  std::string events() const {
    std::string all;
    for (const auto& entry : fs::directory_iterator(dir.path))
      if (has(entry.path().string(), "tfevents")) all += contents(entry.path());
    return all;
  }
};

// Returns the bytes of the event that starts a session at this step.
std::string session_event(int step) { return concat('\x10', char(step), "\x3a\x02\x08\x01"); }

constexpr useconds_t kLongWait = 400000;

}  // namespace

TEST_CASE("progress: a row after the first step, every second, and at the end of each epoch and the run") {
  TestRun test_run;
  test_run.step(0, 8);
  test_run.step(1, 1);
  test_run.step(2, 3);
  usleep(1050000);
  test_run.step(3, 5, 1, {1000, 5, 2, 8});  // not the end of an epoch
  test_run.step(4, 2, 1, {1000, 5, 2, 8});
  test_run.step(5, 6);
  test_run.step(6, 7, HUGE_VAL);
  test_run.step(7, 4, 1, {1000, 100, 2, 8});
  const auto rows = test_run.rows();
  REQUIRE(rows.size() == 4);
  const std::vector<std::array<double, 2>> want = {
      {1, 8}, {4, 3}, {5, 2}, {8, 5}};  // the overflow is not in the mean
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(rows[i][kIteration] == want[i][0]);
    CHECK(rows[i][kLoss] == want[i][1]);
    CHECK(rows[i][kPositives] == 3);
    CHECK(rows[i][kSpeed] > 900);  // images
  }
  CHECK(has(test_run.log_text(), "5/5  3.80"));  // the mean of the epoch
  TestRun overflows;
  for (int i = 0; i < 8; ++i) overflows.step(i, 1, HUGE_VAL);
  CHECK(overflows.rows().empty());
}

TEST_CASE("progress: speed and waiting time are those of the steps only; the remaining time ends at 0s") {
  TestRun test_run;
  const auto newest = [&](int64_t i) {
    test_run.step(i, 1, 1, {1000, 1, 8, 8});
    return test_run.rows().back();
  };
  const double fast = 1000 / (0.5e-6 * kLongWait);  // is lower if a wait counts
  usleep(kLongWait);
  test_run.progress->restart_clock();
  CHECK(newest(0)[kSpeed] > fast);
  CHECK(newest(1)[kWaiting] == 0);
  usleep(kLongWait);
  test_run.progress->start_step({1000, 1, 8, 8}, 3, {}, 1e-6 * kLongWait);
  auto row = newest(2);
  CHECK(row[kSpeed] < fast);
  CHECK(row[kWaiting] > 0.5);
  CHECK(row[kWaiting] <= 1);
  usleep(kLongWait);
  test_run.progress->start_step({1000, 1, 8, 8}, 4, {}, 1);
  test_run.progress->restart_clock();  // after an evaluation
  row = newest(7);
  CHECK(row[kSpeed] > fast);
  CHECK(row[kWaiting] == 0);
  CHECK(test_run.log_text().ends_with(" 0s\n"));
}

TEST_CASE(
    "progress: events have the losses, learning rates and speeds of a row, and AP; a resumed run continues") {
  for (const bool evaluates : {false, true}) {
    TestRun test_run(4);
    test_run.step(4, 8);
    Evaluation e;
    e.result.AP = 0.25;
    quietly([&] { test_run.progress->log_evaluation(8, e, {1000, 4, 2, 8}, true); });
    const std::string events = test_run.events();
    CHECK(has(events, session_event(5)));
    for (const char* name : {"train/loss", "train/lr", "speed/images_per_second", "val/AP", "val/AP50"})
      CHECK(has(events, name));
    CHECK(test_run.rows().back()[kEpoch] == 2);
    CHECK(test_run.rows().back()[kIteration] == 8);
    CHECK(test_run.rows().back()[kAP] == 0.25);
    // A resumed run keeps the evaluation at its first step, unless it evaluates again.
    test_run.progress.emplace(test_run.dir.path.string(), test_run.log, torch::kCPU, 8, 0, false, evaluates);
    CHECK(test_run.rows().size() == size_t(2 - evaluates));
    test_run.progress.emplace(test_run.dir.path.string(), test_run.log, torch::kCPU, 6);
    REQUIRE(test_run.rows().size() == 1);  // rows of steps that are repeated are removed
    CHECK(test_run.rows()[0][kIteration] == 5);
  }
}

TEST_CASE("progress: classes without a box and problems are logged once") {
  TestRun test_run;
  Splits splits{shapes_dataset(0, 0, 4), shapes_dataset(0, 1, 4), false};
  for (Dataset* d : {&splits.train, &splits.val}) {
    d->classes = {"cat", "dog", "cow"};
    for (auto& r : d->records) {
      r.boxes.resize(1);
      r.boxes[0].cls = d == &splits.val;
    }
  }
  splits.val.name = "there";
  quietly([&] {
    log_classes(test_run.log, splits);
    for (const char* image : {"a.jpg", "b.jpg"}) {
      splits.val.problems->add("image missing", image);
      test_run.progress->log_problems(splits);
      test_run.progress->log_problems(splits);
    }
    splits.same = true;
    log_classes(test_run.log, splits);
    test_run.progress->log_problems(splits);
  });
  for (const auto& [text, count] : {std::pair("boxes   4 for training: cat 4", 2),
                                    {"images  4 for training, 0 without boxes", 2},
                                    {"note: 2 classes have no box for training: dog, cow", 2},
                                    {"note: 2 classes have no box for evaluation: cat, cow", 1},
                                    {"note: there: image missing: 1", 1},
                                    {"note: there: image missing: 2", 1}})
    CHECK(std::pair(text, count_of(test_run.log_text(), text)) == std::pair(text, size_t(count)));
  CHECK(has(contents(test_run.dir / "problems_val.txt"), "a.jpg"));
}

TEST_CASE("progress: control characters of class names do not reach the log") {
  TestRun test_run;
  Evaluation e;
  e.result.per_class.resize(2);
  for (auto& c : e.result.per_class) {
    c.name = "red\x1b[31m\nnew";
    c.ground_truths = 1;
    c.AP = 0.5;
  }
  quietly([&] { test_run.progress->log_evaluation(400, e, {1000, 4, 2, 8}, true); });
  CHECK(has(test_run.log_text(), "highest red\\x1b[31m\\x0anew 0.50; lowest red\\x1b[31m"));
}

TEST_CASE("progress: with DTR, its peak and its share of the time are logged, the rest is in metrics.csv") {
  TempDir dir;
  Log log{dir / "log.txt"};
  Progress progress(dir.path.string(), log, torch::kCPU, 0, 0, /*dtr=*/true);
  const StepMetrics n{3,
                      {{"iou", Losses::Kind::kTerm, 1},
                       {"l1", Losses::Kind::kTerm, 7.77},
                       {"positives", Losses::Kind::kCount, 6},
                       {"objects", Losses::Kind::kCount, 2},
                       {"grad_norm", Losses::Kind::kLogged, 1}}};
  const DtrStep a{.budget = 1e9,
                  .limit = 1.2e9,
                  .peak = 2e9,
                  .evictions = 10,
                  .rematerialisations = 20,
                  .cost = 3,
                  .remat_cost = 1},
      b{.peak = 1e9, .evictions = 30, .rematerialisations = 40, .cost = 5, .remat_cost = 1};
  const Plan plan{1000, 3, 1, 3};
  quietly([&] {
    progress.log_steps({{0, 0.1, {}, n}}, plan);
    progress.log_steps({{1, 0.1, a, n}, {2, 0.1, b, n}}, plan);
  });
  const std::string log_text = contents(dir / "log.txt");
  for (const char* part : {" dtr ", " peak ", " 20% ", " 2.0G "})
    CHECK_MESSAGE(has(log_text, part), log_text);
  CHECK_FALSE(has(log_text, "7.77"));
  CHECK(has(log_text, "warning: step 1 needed at least 1.2G of memory, more than the 1.0G of --dtr"));
  const auto row = metric_rows(dir / "metrics.csv").back();
  REQUIRE(row.size() == 18);
  CHECK(std::vector<double>(row.begin() + 14, row.end()) == std::vector<double>{2e9, 20, 30, 0.2});
}

TEST_CASE("progress: the flags of the command line are logged") {
  TestRun test_run;
  Config config;
  parse(config, {"--bs", "7", "--data", "my data", "--no-multiscale"});
  quietly([&] { log_flags(test_run.log, config); });
  CHECK(test_run.log_text() == "flags   --data 'my data' --bs 7 --no-multiscale\n");
}
