// SPDX-License-Identifier: Apache-2.0
// Output of a run while it trains: rows of metrics.csv, TensorBoard events, log lines and remarks.
#include "programs.hpp"

#include <optional>

#include "run/progress.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

using Kind = Losses::Kind;

// Returns the numbers of a step. norm: of the gradient.
StepMetrics numbers(double total, double norm = 1) {
  const std::vector<StepMetrics::Value> values = {
      {"iou", Kind::kTerm, 1},           {"obj", Kind::kTerm, 1},        {"cls", Kind::kTerm, 1},
      {"l1", Kind::kTerm, 7.77},         {"positives", Kind::kCount, 6}, {"objects", Kind::kCount, 2},
      {"grad_norm", Kind::kLogged, norm}};
  return {total, values};
}

// A run that writes its log, metrics and events to a temporary folder.
struct TestRun {
  TempDir dir;
  Log log{dir / "log.txt"};
  std::optional<Progress> progress;

  explicit TestRun(int64_t first = 0, bool dtr = false) { start(first, dtr); }
  void start(int64_t first, bool dtr = false) {
    progress.emplace(dir.path.string(), log, torch::kCPU, first, 0, dtr);
  }
  void step(int64_t i, const StepMetrics& n, const Plan& plan = {1000, 4, 2, 8}, const DtrStep& dtr = {}) {
    quietly([&] { progress->log_steps({{i, 0.1, dtr, n}}, plan); });
  }
  std::vector<std::vector<double>> rows() const { return metric_rows(dir / "metrics.csv"); }
  std::string log_text() const { return contents(dir / "log.txt"); }
};

}  // namespace

TEST_CASE("progress: a row after the first step, every second, and at the end of each epoch and the run") {
  const Plan five{1000, 5, 2, 8};
  TestRun test_run;
  test_run.step(0, numbers(8));
  test_run.step(1, numbers(1));
  test_run.step(2, numbers(3));
  usleep(1050000);
  test_run.step(3, numbers(5), five);  // not the end of an epoch
  test_run.step(4, numbers(2), five);
  test_run.step(5, numbers(6));
  test_run.step(6, numbers(7, HUGE_VAL));
  test_run.step(7, numbers(4), {1000, 100, 2, 8});
  const auto rows = test_run.rows();
  REQUIRE(rows.size() == 4);
  const std::vector<std::array<double, 2>> want = {
      {1, 8}, {4, 3}, {5, 2}, {8, 5}};  // the overflow is not in the mean
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK(rows[i][kIteration] == want[i][0]);
    CHECK(rows[i][kLoss] == want[i][1]);
  }
  CHECK(has(test_run.log_text(), "5/5  3.80"));  // the mean of the epoch
  TestRun overflows;
  for (int i = 0; i < 8; ++i) overflows.step(i, numbers(1, HUGE_VAL));
  CHECK(overflows.rows().empty());
}

TEST_CASE("progress: speed and waiting time are those of the steps only; the remaining time ends at 0s") {
  constexpr useconds_t kLong = 400000;
  const Plan plan{1000, 1, 8, 8};
  TestRun test_run;
  const auto newest = [&](int64_t i, double waited, bool evaluated) {
    usleep(kLong);
    test_run.progress->start_step(plan, i + 1, {}, waited);
    if (evaluated) test_run.progress->restart_clock();
    test_run.step(i, numbers(1), plan);
    return test_run.rows().back();
  };
  const double fast = 1000 / (0.5e-6 * kLong);  // is lower if a wait counts
  for (const auto& [step, evaluated] : {std::pair(2, true), {3, false}, {7, true}}) {
    const auto row = newest(step, 1e-6 * kLong, evaluated);
    CHECK((row[kSpeed] > fast) == evaluated);
    CHECK((evaluated ? row[kWaiting] == 0 : row[kWaiting] > 0.5 && row[kWaiting] <= 1));
  }
  CHECK(test_run.log_text().ends_with(" 0s\n"));
}

TEST_CASE(
    "progress: events have the losses, learning rates and speeds of a row, and AP; a resumed run continues") {
  TestRun test_run(4);
  test_run.step(4, numbers(8));
  Evaluation e;
  e.result.AP = 0.25;
  e.result.per_class.resize(2);
  for (auto& c : e.result.per_class) {
    c.name = "red\x1b[31m\nnew";
    c.ground_truths = 1;
    c.AP = 0.5;
  }
  quietly([&] { test_run.progress->log_evaluation(8, e, {1000, 4, 2, 8}, true); });
  CHECK_HAS(test_run.log_text(), "lowest AP: red\\x1b[31m\\x0anew 0.50, red\\x1b[31m");
  std::string events;
  for (const auto& entry : fs::directory_iterator(test_run.dir.path))
    if (has(entry.path().string(), "tfevents")) events += contents(entry.path());
  CHECK(has(events, std::string("\x10\x05\x3a\x02\x08\x01")));  // a session starts at step 5
  for (const char* name : {"train/loss", "train/lr", "speed/images_per_second", "val/AP", "val/AP50"})
    CHECK(has(events, name));
  CHECK(test_run.rows().back()[kEpoch] == 2);
  CHECK(test_run.rows().back()[kIteration] == 8);
  test_run.start(8);
  CHECK(test_run.rows().size() == 2);
  test_run.start(6);
  REQUIRE(test_run.rows().size() == 1);  // rows of steps that are repeated are removed
  CHECK(test_run.rows()[0][kIteration] == 5);
}

TEST_CASE("events: a file has a version, a session start and a record per row, correct byte for byte") {
  using namespace tensorboard;
  const auto bytes_of = [](const std::string& hex) {
    std::string out;
    std::istringstream in(hex);
    for (std::string two; in >> two;) out += char(std::stoi(two, nullptr, 16));
    return out;
  };
  const Metrics::Row row{
      {"x", 0.5, "lr"}, {"iteration", 300}, {"AP", std::nan(""), "AP"}, {"y", -1e9, "a/b"}, {"z", 7}};
  const std::string version = event(1.5, 0, version_field, "brain.Event:2"),
                    session = event(1.5, 300, session_field, session_start),
                    scalars = event(1.5, 300, summary_field, summary(row));
  // The checksums are those of masked_crc32c in tensorboard/compat/tensorflow_stub.
  CHECK(version == bytes_of("1a 00 00 00 00 00 00 00 12 9b d8 2d 09 00 00 00 00 00 00 f8 3f 10 00 1a 0d") +
                       "brain.Event:2" + bytes_of("d3 dc 53 1e"));
  CHECK(session ==
        bytes_of("10 00 00 00 00 00 00 00 95 fb fe 18 09 00 00 00 00 00 00 f8 3f 10 ac 02 3a 02 08 01 "
                 "71 3b 78 8a"));
  CHECK(scalars ==
        bytes_of("25 00 00 00 00 00 00 00 ea bc 36 f3 09 00 00 00 00 00 00 f8 3f 10 ac 02 2a 17 "
                 "0a 09 0a 02 6c 72 15 00 00 00 3f 0a 0a 0a 03 61 2f 62 15 28 6b 6e ce 17 9d ca 50"));

  const TempDir dir;
  Metrics metrics(dir.path.string(), 299);
  metrics.row({{"epoch", 1}, {"iteration", 300}, {"AP", std::nan(""), "AP"}});  // no event
  metrics.row(row);
  std::string written;
  for (const auto& entry : fs::directory_iterator(dir.path)) {
    // TensorBoard requires "tfevents". The rest of the name is that of SummaryWriter of torch and TensorFlow.
    const std::string path = entry.path().string();
    if (path.rfind(dir / "events.out.tfevents.", 0) == 0 && has(path, concat(".", getpid())))
      written = contents(path);
  }
  const size_t first = version.size(), second = first + session.size();
  REQUIRE(written.size() == second + scalars.size());  // their times differ
  for (const auto& [at, record] : {std::pair(size_t(0), version), {first, session}, {second, scalars}})
    CHECK(written.substr(at + 21, record.size() - 25) == record.substr(21, record.size() - 25));
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
                                    {"note: classes without a box for training: dog, cow", 2},
                                    {"note: classes without a box for evaluation: cat, cow", 1},
                                    {"note: there: image missing: 1", 1},
                                    {"note: there: image missing: 2", 1}})
    CHECK(std::pair(text, count_of(test_run.log_text(), text)) == std::pair(text, size_t(count)));
  CHECK(has(contents(test_run.dir / "problems_val.txt"), "a.jpg"));
}

TEST_CASE("progress: with DTR, its peak and its share of the time are logged, the rest is in metrics.csv") {
  TestRun test_run(0, /*dtr=*/true);
  const DtrStep a{.budget = 1e9,
                  .limit = 1.2e9,
                  .peak = 2e9,
                  .evictions = 10,
                  .rematerialisations = 20,
                  .cost = 3,
                  .remat_cost = 1},
      b{.peak = 1e9, .evictions = 30, .rematerialisations = 40, .cost = 17, .remat_cost = 3};
  const Plan plan{1000, 3, 1, 3};
  test_run.step(0, numbers(3), plan, {.peak = 1.5e9, .cost = 4, .remat_cost = 1});
  quietly([&] { test_run.progress->log_steps({{1, 0.1, a, numbers(3)}, {2, 0.1, b, numbers(3)}}, plan); });
  for (const char* part : {" dtr ", " peak ", " 20% ", " 1.5G ",
                           "warning: step 1 needed at least 1.2G of memory, more than the 1.0G of --dtr"})
    CHECK_HAS(test_run.log_text(), part);
  CHECK_FALSE(has(test_run.log_text(), "7.77"));
  const auto row = test_run.rows().back();
  REQUIRE(row.size() == 21);
  CHECK(std::vector<double>(row.begin() + kDtr, row.begin() + kAPWithDtr) ==
        std::vector<double>{1.5e9, 20, 30, 0.2});
}

TEST_CASE("remarks: means are those of the steps since the last take()") {
  Means means;
  const StepMetrics a{1, {{"iou", Kind::kTerm, 2}, {"positives", Kind::kCount, 4}}},
      b{5, {{"iou", Kind::kTerm, 6}, {"positives", Kind::kCount, 8}}};
  StepMetrics logs = b;  // a value that not all steps log
  logs.values.push_back({"extra", Kind::kLogged, 3});
  logs.values.push_back({"term", Kind::kTerm, 3});
  for (const auto& [second, text] :
       {std::pair(b, "iou 4, positives 6"), {logs, "iou 4, positives 6, extra 3, term 1.5"}}) {
    means.add(a);
    means.add(second);
    CHECK(means.steps == 2);
    const StepMetrics m = means.take();
    CHECK(m.total == 3);
    CHECK(to_string(m) == text);
    CHECK(means.steps == 0);
  }
  CHECK(numbers(1).per_object() == 3);
  CHECK_THROWS_WITH(a["old"], "the step has no number old");
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL})
    CHECK_FALSE((numbers(1, bad).finite() || numbers(bad).finite()));
}

TEST_CASE("remarks: a learning rate that is far from the usual one of the optimizer is reported") {
  CHECK(has(launch_note(13, 20, 0.1), "in 13 of 20 steps the GPU has waited"));
  CHECK(launch_note(11, 20, 0.1) == "");
  CHECK(launch_note(20, 20, 0.5) == "");  // for the data loader
  CHECK(learning_rate_note("sgd", 0.0025, 16, false) == "");
  CHECK(learning_rate_note("adamw", 0.001, 16, false) == "");
  CHECK(has(learning_rate_note("sgd", 0.1, 16, false), "usual for sgd and a batch of 16 is 0.0025"));
  CHECK(has(learning_rate_note("sgd", 1e-6, 16, false), "usual for sgd"));
  CHECK(learning_rate_note("sgd", 1e-6, 16, true) == "");  // fine-tuning
}

TEST_CASE("remarks: a nonfinite loss ends the run, a nonfinite gradient only the 20th time in a row") {
  int64_t skipped = 0;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 19; ++i) CHECK(stop_reason(numbers(1, HUGE_VAL), skipped) == "");
    CHECK(skipped == 19);
    CHECK(stop_reason(numbers(1), skipped) == "");
    CHECK(skipped == 0);
  }
  for (int i = 0; i < 19; ++i) stop_reason(numbers(1, HUGE_VAL), skipped);
  CHECK(has(stop_reason(numbers(1, HUGE_VAL), skipped), "20 times in a row"));
  skipped = 0;
  CHECK(has(stop_reason(numbers(std::nan("")), skipped), "the loss"));
}
