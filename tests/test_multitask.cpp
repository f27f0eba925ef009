// SPDX-License-Identifier: Apache-2.0
// ./multitask: several heads on one backbone, each with its own data set.
#include "programs.hpp"

#include "models/yolox_multitask.hpp"
#include "optim.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Two data sets: 8 images with seven classes, and 5 images with the first three of these classes.
struct TwoSets {
  TempDir dir;
  TwoSets() {
    write_scenes(dir / "all", 8);
    write_scenes(dir / "few", 5, 3);
  }
};
// Two steps per head and epoch. The first step already has the full learning rate.
const std::string kTwo = "--data all --data few --model yolox-nano --size 64 --bs 4 --epochs 2 ";

// Counts the tensors whose names begin with the prefix. Returns the number that differ, and the number of
// all.
std::pair<int, int> count_changed(const GenericDict& before, const GenericDict& after,
                                  const std::string& prefix) {
  std::pair<int, int> count;
  for (const auto& e : before) {
    if (e.key().toStringRef().rfind(prefix, 0) != 0) continue;
    count.first += !torch::equal(e.value().toTensor(), after.at(e.key()).toTensor());
    ++count.second;
  }
  return count;
}

}  // namespace

PROGRAM_TEST("multitask: with one head the weights equal those of ./train, byte for byte") {
  TwoSets two;
  // With mosaic, warm-up, multi-scale from step 10 on, and L1 without mosaic in the last epoch.
  const std::string flags = "--data all --model yolox-nano --size 64 --bs 4 --epochs 10 --eval-interval 0 ";
  succeed(two.dir, "train", flags + "--out one");
  succeed(two.dir, "multitask", flags + "--out multi");
  const auto head = read_pth(two.dir / "multi/head_all.pth").toGenericDict().at("model");
  CHECK(difference(weights_of(two.dir, "one"), head) == "");

  // Fine-tuning, with a frozen stem.
  const std::string tuned = flags + "--weights one/last.pth ";
  succeed(two.dir, "train", tuned + "--out tuned --max-iters 3");
  succeed(two.dir, "multitask", tuned + "--out multi_tuned --max-iters 2");
  succeed(two.dir, "multitask", "--resume multi_tuned --max-iters 3");
  const auto tuned_head = read_pth(two.dir / "multi_tuned/head_all.pth").toGenericDict().at("model");
  CHECK(difference(weights_of(two.dir, "tuned"), tuned_head) == "");

  // Three of the seven classes of the weights, found by their names.
  const std::string few =
      "--data few --model yolox-nano --size 64 --bs 4 --weights one/last.pth --eval-interval 0 --max-iters "
      "1 ";
  succeed(two.dir, "train", few + "--out few");
  CHECK(has(succeed(two.dir, "multitask", few + "--out multi_few"), "classes 3 of 3 start from"));
  const auto few_head = read_pth(two.dir / "multi_few/head_few.pth").toGenericDict().at("model");
  CHECK(difference(weights_of(two.dir, "few"), few_head) == "");
}

PROGRAM_TEST("multitask: with two heads, two ranks compute the same steps as one rank") {
  TwoSets two;
  const std::string flags = kTwo + "--amp fp64 --lr 4e-6 --eval-interval 0 --out ";
  succeed(two.dir, "multitask", flags + "start --max-iters 1 --lr 0");
  succeed(two.dir, "multitask", flags + "one --max-iters 4");
  succeed(two.dir, "multitask", flags + "two --max-iters 4 --procs 2");
  CHECK(steps_of(two.dir, "two") == 4);
  CHECK(relative_difference(two.dir, "two", "one", "start") < 1e-7);
  const auto start = weights_of(two.dir, "start", false), one = weights_of(two.dir, "one", false);
  for (const std::string part : {"backbone.", "head_all.", "head_few."})
    CHECK(count_changed(start, one, part).first > 0);
}

PROGRAM_TEST("multitask: a step does not change the weights and momentum of a head that it does not use") {
  TwoSets two;
  succeed(two.dir, "multitask", kTwo + "--eval-interval 0 --out r --max-iters 2");  // one step per head
  fs::copy(two.dir / "r", two.dir / "before", fs::copy_options::recursive);
  succeed(two.dir, "multitask", "--resume r --max-iters 3");
  for (const bool averaged : {false, true}) {
    const auto before = weights_of(two.dir, "before", averaged), after = weights_of(two.dir, "r", averaged);
    const auto idle = count_changed(before, after, "head_few.");
    CHECK(idle.first == 0);
    CHECK(idle.second > 100);
    CHECK(count_changed(before, after, "head_all.").first > idle.second / 2);
    CHECK(count_changed(before, after, "backbone.").first > idle.second);
  }
  // The momentum of the unused head is not zero, and stays the same.
  const std::vector<Task> tasks{{"all", shapes_classes()}, {"few", {"circle", "ring", "crescent"}}};
  MultiTask model("yolox-nano", tasks);
  const auto momentum = [&](const std::string& run) {
    Optimizer o("sgd", parameter_groups(*model, 0), false);
    load_state_dict(o, last_checkpoint(two.dir, run).at("optimizer").toGenericDict(), run);
    auto named = empty_dict();
    for (size_t g = 0; g < o.groups.size(); ++g)
      for (size_t i = 0; i < o.first[g].size(); ++i) named.insert(o.groups[g].names[i], o.first[g][i]);
    return named;
  };
  const auto before = momentum("before"), after = momentum("r");
  CHECK(count_changed(before, after, "head_few.").first == 0);
  CHECK(count_changed(before, after, "head_all.").first > 0);
  CHECK(before.at("head_few.obj_preds.0.bias").toTensor().abs().min().item<double>() > 0);
}

PROGRAM_TEST("multitask: the file of a head has the AP of the run and is accepted like any checkpoint") {
  TwoSets two;
  const std::string printed = succeed(
      two.dir, "multitask",
      "--data drawn=all --data few --model yolox-nano --size 64 --bs 8 --epochs 10 --lr 0.0096 --conf 0 "
      "--out r");
  // Columns: epoch, step, then loss and AP of each head.
  const auto last = metric_rows(two.dir / "r/metrics.csv").back();
  REQUIRE(last.size() == 6);
  CHECK(last[3] > 0);
  for (const auto& [name, data, column] : {std::tuple("drawn", "all", 3), {"few", "few", 5}}) {
    succeed(two.dir, "eval",
            concat("--data ", data, " --weights r/head_", name, ".pth --conf 0 --bs 8 --json e.json"));
    CHECK(json_number(two.dir / "e.json", "AP") == doctest::Approx(last[column]).epsilon(1e-8));
    CHECK(has(printed, concat(name, ": loss ")));
    CHECK(fs::exists(two.dir / concat("r/", name, "_val_batch0_pred.jpg")));
  }
  CHECK(has(succeed(two.dir, "eval", "--data all --weights r/head_few.pth"),
            "note: class that the model does not learn: "));
  CHECK(has(succeed(two.dir, "export", "--weights r/head_few.pth --out few.ts"), "3 classes"));
  const auto file = read_pth(two.dir / "r/head_few.pth");
  YOLOX again = make_model("yolox-nano", 3);
  CHECK(load_state_dict(*again, find_weights(file, ""), "").complete());
  CHECK(weights_info(file, "").classes == std::vector<std::string>{"circle", "ring", "crescent"});
}

PROGRAM_TEST("multitask: a stopped and resumed run ends with the same bytes") {
  TwoSets two;
  const std::string flags = kTwo + "--eval-interval 1 --out ";
  succeed(two.dir, "multitask", flags + "whole --max-iters 7");
  succeed(two.dir, "multitask", flags + "cut --resume auto --max-iters 3");  // begins it
  const std::string printed = succeed(two.dir, "multitask", "--resume cut --max-iters 7");
  CHECK(has(printed, "--max-iters 7 instead of the run's 3"));
  for (const std::string file : {"/last.pth", "/head_all.pth", "/head_few.pth"})
    CHECK(difference(two.dir / ("whole" + file), two.dir / ("cut" + file)) == "");
}

PROGRAM_TEST(
    "multitask: stopped during an evaluation, the resumed run repeats it and ends with the same bytes") {
  TwoSets two;
  write_scenes(two.dir / "many", 100);  // an evaluation that takes so long that it can be stopped
  const std::string flags =
      "--data many --data few --model yolox-nano --size 160 --bs 2 --conf 0 --max-iters 2 --out ";
  succeed(two.dir, "multitask", flags + "whole");
  Process p(two.dir, "multitask", flags + "cut");
  // step_0.pth appears when the checkpoint before the evaluation is written.
  REQUIRE(p.until([&] { return fs::exists(two.dir / "cut/step_0.pth"); }));
  kill(p.pid, SIGTERM);
  CHECK(p.wait() == 0);
  CHECK(has(contents(p.out), "resume with: ./multitask --resume cut"));
  CHECK_FALSE(has(contents(p.out), " AP "));
  const std::string printed = succeed(two.dir, "multitask", "--resume cut");
  CHECK(has(printed, "many: AP "));
  CHECK_FALSE(has(printed, " nan"));
  CHECK(has(printed, "done: cut"));
  for (const std::string file : {"/last.pth", "/head_many.pth", "/head_few.pth"})
    CHECK(difference(two.dir / ("whole" + file), two.dir / ("cut" + file)) == "");
  const auto whole = metric_rows(two.dir / "whole/metrics.csv"),
             cut = metric_rows(two.dir / "cut/metrics.csv");
  REQUIRE(cut.size() == 1);
  for (const int column : {0, 1, 3, 5}) CHECK(cut[0].at(column) == whole.at(0).at(column));
}

PROGRAM_TEST("multitask: a full disk is reported and does not end the run early") {
  TwoSets two;
  const Outcome o = run_with_full_disk(two.dir, "multitask", kTwo + "--eval-interval 0 --out r");
  CHECK(o.code == 1);
  CHECK(count_warnings(o, "head_all.pth") == 2);  // before the first step, and after one epoch
  CHECK(has(o.err, "head_all.pth"));
  CHECK(has(contents(two.dir / "r/log.txt"), "epoch 2/2"));
}

PROGRAM_TEST("multitask: invalid flags are refused with a remedy") {
  TwoSets two;
  succeed(two.dir, "multitask", kTwo + "--max-iters 1 --eval-interval 0 --out r");
  succeed(two.dir, "train", kTwo + "--data all --max-iters 1 --eval-interval 0 --out t");
  const auto refuses = [&](const std::string& flags, const std::string& part) {
    const Outcome o = run(two.dir, "multitask", flags);
    CHECK_MESSAGE(o.code != 0, flags);
    CHECK_MESSAGE(has(o.err, part), flags << ": " << o.err);
    const auto lines = lines_of(o.err);  // the error, and for a wrong combination of flags the usage
    CHECK_MESSAGE((lines.size() == 1 || (lines.size() == 2 && lines[1].rfind("usage: ", 0) == 0)), o.err);
  };
  refuses("--model yolox-nano", "--data is needed");
  refuses("--model yolox-nano --data all --data x/all/", "--data x/all/: another head has the name all");
  refuses("--model yolox-nano --data v1.2=all",
          "needs a name without dots, slashes and commas; give NAME=DIR");
  refuses("--model yolox-nano --data nowhere", "nowhere");
  refuses(kTwo + "--amp fp16", "--amp fp16 is not possible here; give off, tf32, bf16 or fp64");
  refuses(kTwo + "--out r", "r already holds a run");
  refuses("--resume r --data few --data all", "has other heads or classes than --data");
  refuses("--resume r --freeze stem --max-iters 2", "--freeze stem differs from the run's 'none'");
  refuses("--resume r", "r is complete: 1 of 1 steps are done; increase --epochs or --max-iters to continue");
  CHECK(has(succeed(two.dir, "multitask", kTwo + "--max-iters 1 --eval-interval 0 --resume auto --out r"),
            "r is complete: 1 of 1 steps are done"));
  refuses(kTwo + "--gpus 99 --bs 99",
          concat("--gpus 99: there are ", int(torch::cuda::device_count()), " GPUs here"));
  refuses("--resume t --data all", "t/last.pth is a checkpoint of ./train");
  check_refusal(two.dir, "train", "--resume r", 2, "r/last.pth is a checkpoint of ./multitask");
  refuses("--resume r --max-iters 2 --bs 1", " steps per epoch, but this --bs and data have ");
}
