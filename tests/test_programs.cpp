// SPDX-License-Identifier: Apache-2.0
// The programs as users run them: files, output and exit codes. Each program runs as its own process in a
// temporary folder.
#include "programs.hpp"

#include "base/threads.hpp"
#include "config.hpp"
#include "data/shapes.hpp"
#include "run/run.hpp"

using namespace yolox;
using namespace yolox::test;

PROGRAM_TEST("train: a run folder has settings, log, metrics and two checkpoints") {
  const TempDir& dir = trained().dir;
  for (const std::string& part :
       {std::string(R"("model":"yolox-nano")"), std::string(R"("bs":2,)"), std::string(R"("device":"auto")"),
        concat(R"("device_name":")", device_name(parse_device("auto"))), std::string(R"("clip":10,)")})
    CHECK_HAS(contents(dir / "a/config.json"), part);
  CHECK(contents(dir / "a/log.txt") == trained().printed);
  for (const char* part : {"--bs 2", "--lr 0.00123456789", "0.897M parameters", "8 images for training",
                           "for evaluation (the same images)",
                           "warning: AP is measured on the training images", "; best so far; lowest AP: "})
    CHECK_HAS(trained().printed, part);
  // Flags with their defaults are in config.json only. The progress line is for terminals.
  for (const char* part : {"--clip", "--mosaic-prob", "\r", "\033"})
    CHECK_FALSE_MESSAGE(has(trained().printed, part), part);
  CHECK_FALSE(fs::exists(dir / "a/problems.txt"));

  const auto rows = metric_rows(dir / "a/metrics.csv");
  CHECK(
      lines_of(contents(dir / "a/metrics.csv")).at(0) ==
      "epoch,iteration,loss,iou,obj,cls,l1,positives_per_object,lr,images_per_second,waiting_share,grad_norm,"
      "AP,AP50,AP75,val_loss,eval_seconds");
  int evaluations = 0;
  for (const auto& row : rows) {
    REQUIRE(row.size() == 17);
    CHECK(row[kEpoch] == std::floor((row[kIteration] - 1) / 4) + 1);
    evaluations += !std::isnan(row[kAP]);
    if (!std::isnan(row[kAP])) continue;
    CHECK(row[kLoss] == doctest::Approx(row[kIou] + row[kObj] + row[kCls] + row[kL1]).epsilon(1e-4));
    CHECK((row[kL1] > 0) == (row[kEpoch] == 3));
  }
  CHECK(evaluations == 3);
  CHECK(rows.back()[kIteration] == 12);

  const auto last = last_checkpoint(dir, "a");
  CHECK((last.at("start_epoch").toInt() == 3 && last.contains("optimizer")));
  const WeightsInfo info = weights_info(last, "last.pth");
  CHECK((info.model == "yolox-nano" && info.classes == shapes_classes() && info.height == 64));
  CHECK(fs::exists(dir / "a/best.pth"));
  for (const char* name : {"labels", "train_batch0", "train_batch1", "train_batch2", "val_batch0_pred"})
    CHECK_FALSE(cv::imread(dir / concat("a/", name, ".jpg")).empty());
}

PROGRAM_TEST("train: a run that was stopped within an epoch and resumed equals an undisturbed run") {
  const TempDir& dir = trained().dir;
  succeed(dir, "train", kTrain + "--max-iters 6");  // into runs/yolox-nano-data
  const std::string run_folder = "runs/yolox-nano-data";
  CHECK(steps_of(dir, run_folder) == 6);

  const Outcome complete =
      run(dir, "train", "--resume " + run_folder);  // --max-iters of the run still applies
  CHECK(complete.code == 2);
  CHECK(has(complete.err, "--max-iters"));  // the flag that continues the run

  const std::string printed =
      succeed(dir, "train", "--resume --max-iters 0 --workers 5");  // the newest run, without limit
  CHECK(has(printed, "resuming " + run_folder + " at step 6"));
  CHECK(has(printed, "--max-iters 0 instead of the run's 6"));
  const auto whole = last_checkpoint(dir, "a"), resumed = last_checkpoint(dir, run_folder);
  for (const char* part : {"model", "optimizer", "train", "yolox", "start_epoch"})
    CHECK(difference(whole.at(part), resumed.at(part), part) == "");

  const auto rows = metric_rows(dir / (run_folder + "/metrics.csv"));
  CHECK(rows.back()[kIteration] == 12);
  for (size_t i = 1; i < rows.size(); ++i) CHECK(rows[i][kIteration] >= rows[i - 1][kIteration]);
  const std::string log = contents(dir / (run_folder + "/log.txt"));
  CHECK(log.find("run runs/") < log.find("resuming runs/"));
}

PROGRAM_TEST("train: the evaluation of a run stopped within an epoch does not count for --patience") {
  const TempDir& dir = trained().dir;
  // Without a detection, AP stays 0.
  const std::string flags =
      "--data data --model yolox-nano --size 64 --eval-interval 1 --conf 1 --epochs 9 --bs ";
  succeed(dir, "train", flags + "5 --max-iters 3 --out amid");
  const auto last = last_checkpoint(dir, "amid");
  CHECK(last.at("train").toGenericDict().at("evals_without_gain").toInt() == 0);
  CHECK(last.at("best_ap").toDouble() == 0);
  CHECK_HAS(succeed(dir, "train", flags + "8 --patience 2 --out patient"),
            "stopping: 2 evaluations without a better AP");
  CHECK(metric_rows(dir / "patient/metrics.csv").back()[kIteration] == 3);
  CHECK(has(run(dir, "train", "--resume patient").err, "or --patience (0 = off)"));
  succeed(dir, "train", "--resume patient --patience 3 --max-iters 4");
}

PROGRAM_TEST("train: two runs with --deterministic on two threads end with the same bytes") {
  const TempDir& dir = trained().dir;
  for (const char* out : {"d1", "d2"}) {
    const Outcome o = shell(dir, concat("OMP_NUM_THREADS=2 $YOLOX_PROGRAMS/train ", kTrain,
                                        "--max-iters 6 --eval-interval 0 --deterministic --out ", out));
    REQUIRE_MESSAGE(o.code == 0, o.err);
  }
  CHECK(difference(weights_of(dir, "d1", false), weights_of(dir, "d2", false)) == "");
}

TEST_CASE("train: only --deterministic turns on torch's deterministic algorithms") {
  for (const bool on : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      Config config;
      config.deterministic = on;
      prepare_process(config, RankInfo());
      _exit(at::globalContext().deterministicAlgorithms());
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == on);
  }
}

PROGRAM_TEST("train: all epochs run on the same threads; each loader worker is one thread") {
  const TempDir& dir = trained().dir;
  size_t with_one = 0;
  for (const int workers : {1, 4}) {
    INFO(workers << " workers");
    fs::remove_all(dir / "lasting");
    Process p(dir, "train",
              concat("--data data --model yolox-nano --size 64 --bs 4 --epochs 1000 --eval-interval 0 "
                     "--save-minutes 1000 --no-multiscale --out lasting --workers ",
                     workers));
    // Two steps per epoch. Waits for a row of metrics.csv of this epoch or a later one.
    const auto reaches = [&](double epoch) {
      return p.until([&] {
        const auto rows = metric_rows(dir / "lasting/metrics.csv");
        return !rows.empty() && rows.back().size() > kEpoch && rows.back()[kEpoch] >= epoch;
      });
    };
    REQUIRE(reaches(2));
    const std::string threads = concat("/proc/", p.pid, "/task");
    const auto early = entries_of(threads);
    for (const double epoch : {4, 7, 10}) {
      REQUIRE(reaches(epoch));
      CHECK(entries_of(threads) == early);
    }
    if (workers == 1)
      with_one = early.size();
    else
      CHECK(early.size() == with_one + 3);
  }
}

PROGRAM_TEST("train: the eps of Adam is 1e-3 with --amp fp16 and 1e-8 without") {
  const TempDir& dir = trained().dir;
  // Without EMA, the weights are the trained ones.
  CHECK(difference(weights_of(dir, "a", true), weights_of(dir, "a", false)) != "");
  for (const auto& [amp, eps, ema] :
       {std::tuple("fp16", 1e-3, true), {"off", 1e-8, true}, {"bf16", 1e-8, false}}) {
    const std::string out = concat("eps_", amp);
    succeed(dir, "train",
            concat(kTrain, "--max-iters 1 --eval-interval 0 --optimizer adam --amp ", amp, " --out ", out,
                   ema ? "" : " --ema 0 --aug none --clip 0"));
    if (!ema) CHECK(difference(weights_of(dir, out, true), weights_of(dir, out, false)) == "");
    CHECK_FALSE(fs::exists(dir / (out + "/best.pth")));  // nothing was evaluated
    const auto optimizer = last_checkpoint(dir, out).at("optimizer").toGenericDict();
    const auto groups = optimizer.at("param_groups").toListRef();
    CHECK(groups.size() == 3);
    for (const auto& group : groups) CHECK(group.toGenericDict().at("eps").toDouble() == eps);
  }
}

PROGRAM_TEST("pack: invalid flags are refused; a packed data set trains to the same weights") {
  const TempDir& dir = trained().dir;
  for (const std::string flags : {"", "--data data", "--data data --out x.zip", "--data shapes --out x.lmdb"})
    CHECK(run(dir, "pack", flags).code == 2);
  CHECK(run(dir, "pack", "--data nowhere --out x.lmdb").code == 1);
  CHECK(has(succeed(dir, "pack", "--data data --out data.lmdb"), "8 images"));
  succeed(dir, "train", kTrain + "--out from_packed --data data.lmdb");
  CHECK(difference(weights_of(dir, "a", false), weights_of(dir, "from_packed", false)) == "");
  CHECK(has(error_of([&] { load_splits({dir / "data.lmdb", {}, 0.25}, false); }), "give it to ./pack"));
  succeed(dir, "pack", "--data data --val-fraction 0.25 --out held_out.lmdb");
  CHECK(load_splits({dir / "held_out.lmdb"}).val.records.size() == 2);
}

PROGRAM_TEST("train: bad images are counted, listed and skipped; --strict stops, and --dry-run ends with 1") {
  DataDir dir(4);
  const std::string bad = dir / "data/train/shapes_2.png",
                    flags = "--data data --model yolox-nano --size 64 --bs 2 --epochs 3 --eval-interval 3 ";
  const std::string plan = succeed(dir, "train", flags + "--dry-run --out r");
  for (const char* part : {"images  4 for training", "\nthe data has no problems\n",
                           "steps   6; epochs 3 of 2 steps; batch size 2 (2 per rank)"})
    CHECK_HAS(plan, part);
  write_text(bad, "this is no image");
  const Outcome dry = run(dir, "train", flags + "--dry-run --out r");
  CHECK(dry.code == 1);
  CHECK_HAS(dry.out, "image cannot be used: data/train/shapes_2.png");
  CHECK_FALSE(fs::exists(dir / "r"));
  const std::string printed = succeed(dir, "train", flags + "--out a");
  CHECK(has(printed, "image cannot be used: 1"));
  CHECK(has(printed, " 3 images"));  // used in the evaluation
  CHECK(has(contents(dir / "a/problems.txt"), "shapes_2.png"));
  const std::string judged = succeed(dir, "eval", "--data data --weights a/last.pth");
  CHECK((has(judged, "3 images in") && has(judged, "shapes_2.png")));
  check_refusal(dir, "train", flags + "--strict --out b", 1, "shapes_2.png");
  fs::remove(bad);
  check_refusal(dir, "train", flags + "--strict --out c", 1, "image missing");
  check_refusal(dir, "train", flags + "--dry-run --bs auto", 2, "--dry-run needs a number for --bs");
}

PROGRAM_TEST("eval: --json has all keys; --save-dt has the ids of the data set and the AP; other ids") {
  const TempDir& dir = trained().dir;
  // Category ids in another order, some of them negative: classes are matched by name.
  CocoDataset other = read_coco(dir / "data/annotations/instances_train.json");
  for (CocoCategory& c : other.categories) c.id = 3 - c.id;
  for (CocoAnnotation& a : other.annotations) a.category_id = 3 - a.category_id;
  write_coco(dir / "other.json", other);
  const std::string printed =
      succeed(dir, "eval",
              "--data other.json --images data/train --weights a/best.pth --bs 2 --conf 0 --nms 0.9 --speed "
              "--json e.json --save-dt dt.json");
  CHECK_FALSE(has(printed, "\r"));
  for (const char* part :
       {"yolox-nano, 4 classes, 8 images", "\n  preprocess ", "\n  forward ", "\n  decode ", "\n  NMS "})
    CHECK_HAS(printed, part);
  for (const char* key : {"AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"})
    json_number(dir / "e.json", key);
  CHECK(has(contents(dir / "e.json"), R"("per_class":[{"id":)"));
  CHECK(has(contents(dir / "dt.json"), R"("file_name":"shapes_1.png")"));
  succeed(dir, "eval", "--gt other.json --dt dt.json --json again.json");
  const double ap = read_pth(dir / "a/best.pth").toGenericDict().at("curr_ap").toDouble();
  CHECK(ap > 0);
  for (const char* file : {"e.json", "again.json"})
    CHECK(json_number(dir / file, "AP") == doctest::Approx(ap).epsilon(1e-6));
}

SHARED_PROGRAM_TEST(
    "eval: the official nano reaches its AP; the wrong --preproc gives an AP near zero and a warning") {
  TempDir dir;
  const std::string weights = "--weights '" + shared("data/weights/yolox_nano_coco_v011_rebuilt.pth") + "' ";
  const std::string printed =
      succeed(dir, "eval", "--data '" + shared("data/coco_val2017_union") + "' --json e.json " + weights);
  CHECK(std::abs(json_number(dir / "e.json", "AP") - 0.2839) < 5e-4);
  CHECK_FALSE(has(printed, "near zero"));

  CocoDataset part = read_coco(shared("data/coco_val2017_union/annotations/instances_val2017_union.json"));
  part.images.resize(30);
  for (auto& image : part.images)
    image.file_name = shared("data/coco_val2017_union/val2017/" + image.file_name);
  write_coco(dir / "part.json", part);
  const std::string legacy =
      succeed(dir, "eval", "--data part.json --preproc imagenet --json e.json " + weights);
  CHECK(json_number(dir / "e.json", "AP") < 0.01);
  CHECK(has(legacy, "warning: AP is near zero"));
  CHECK(has(legacy, "--preproc bgr"));

  // The same classes in another order. The file of the weights has no names; those of COCO are meant.
  succeed(dir, "eval", "--data part.json --json e.json " + weights);
  const double ap = json_number(dir / "e.json", "AP");
  for (CocoCategory& c : part.categories) c.id = -c.id;
  for (CocoAnnotation& a : part.annotations) a.category_id = -a.category_id;
  write_coco(dir / "part.json", part);
  succeed(dir, "eval", "--data part.json --json e.json " + weights);
  CHECK(json_number(dir / "e.json", "AP") == doctest::Approx(ap).epsilon(1e-6));
}

SHARED_PROGRAM_TEST("eval: the official nano of YOLOX 0.1.0 reaches its AP with --preproc legacy") {
  TempDir dir;
  succeed(
      dir, "eval",
      concat("--data '", shared("data/coco_val2017_union"), "' --preproc legacy --json e.json --weights '",
             shared("data/weights/yolox_nano_coco_v010_legacy.pth"), "'"));
  CHECK(std::abs(json_number(dir / "e.json", "AP") - 0.2786) < 5e-4);
  CHECK(std::abs(json_number(dir / "e.json", "AP50") - 0.4382) < 5e-4);
  CHECK(std::abs(json_number(dir / "e.json", "AP75") - 0.2955) < 5e-4);
}

PROGRAM_TEST("programs: exit with 1 if their results do not fit on stdout, but training goes on") {
  const TempDir& dir = trained().dir;
  const auto onto_full_disk = [&](const std::string& command) {
    return shell(dir, "($YOLOX_PROGRAMS/" + command + " > /dev/full)");
  };
  for (const std::string command :
       {"eval --data data --weights a/best.pth",
        "demo --weights a/best.pth --source shapes --max-images 1 --save full",
        "export --weights a/best.pth --out full.onnx", "pack --data data --out full.lmdb", "eval --help"}) {
    CAPTURE(command);
    const Outcome o = onto_full_disk(command);
    CHECK(o.code == 1);
    CHECK(has(o.err, "cannot write to stdout"));
  }
  CHECK(onto_full_disk("train " + kTrain + "--max-iters 1 --eval-interval 0 --out goes_on").code == 0);
}

PROGRAM_TEST(
    "programs: what is printed to a closed stdout gets into no file; a deleted working folder is named") {
  const TempDir& dir = trained().dir;
  for (const std::string stdio : {"", " <&- >&- 2>&-"}) {
    const std::string out = stdio.empty() ? "open" : "closed";
    for (const std::string& command :
         {"pack --data data --out " + out + ".lmdb",
          "demo --weights a/last.pth --source shapes --max-images 1 --save x --json " + out + ".json"})
      CHECK(shell(dir, "($YOLOX_PROGRAMS/" + command + stdio + ")").code == 0);
  }
  for (const std::string end : {".lmdb", ".json"})
    CHECK_MESSAGE(contents(dir / ("open" + end)) == contents(dir / ("closed" + end)), end);
  for (const std::string program : {"train", "eval", "demo", "export", "pack"}) {
    const Outcome o = shell(dir, "mkdir gone && cd gone && rmdir ../gone && $YOLOX_PROGRAMS/" + program);
    CHECK(o.code == 1);
    CHECK_HAS(o.err, "error: the working folder was deleted");
  }
}

PROGRAM_TEST(
    "eval: names in a ground truth are printed without control characters; equal names and ids are noted") {
  TempDir dir;
  const std::string boxes = R"([{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9]},)"
                            R"( {"id": 1, "image_id": 1, "category_id": 2, "bbox": [20, 20, 9, 9]}])";
  write_text(dir / "gt.json",
             R"({"images": [{"id": 1, "width": 64, "height": 64}], "categories": [)"
             R"({"id": 1, "name": "cat\u001b[31m\nAP 1.0"}, {"id": 2, "name": "dog\u001b[31m"},)"
             R"({"id": 3, "name": "dog\u001b[31m"}], "annotations": )" +
                 boxes + "}");
  write_text(dir / "dt.json", R"([{"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "score": 0.5}])");
  const std::string out = succeed(dir, "eval", "--gt gt.json --dt dt.json --max-dets 150");
  CHECK(has(out, "maxDets=150 ] = "));
  CHECK_FALSE(has(out, "\x1b"));
  CHECK_FALSE(has(out, "\nAP 1.0"));
  CHECK_MESSAGE(has(out, "cat\\x1b[31m\\x0aAP 1.0 "), out);
  CHECK(has(out, "annotations with the id of another one: gt.json: 1, "));
  CHECK(has(out, "classes with equal names: gt.json: dog\\x1b[31m (id 3)\n"));
}

PROGRAM_TEST("programs: --help lists every flag; OpenMP threads spin briefly, unless another policy is set") {
  const TempDir dir;
  const auto is_brief = [&](const std::string& program, const std::string& set) {
    const std::string command = " OMP_DISPLAY_ENV=VERBOSE $YOLOX_PROGRAMS/" + program + " --help";
    const Outcome o = shell(dir, "env " + set + command);
    CHECK_MESSAGE(has(o.out, "\n  -h, --help "), program);
    return has(o.err, "GOMP_SPINCOUNT = '10000'");
  };
  for (const char* program : {"train", "eval", "demo"})
    CHECK_MESSAGE(is_brief(program, "-u GOMP_SPINCOUNT"), program);
  for (const char* program : {"export", "pack"}) CHECK_FALSE(is_brief(program, "GOMP_SPINCOUNT=77"));
  CHECK_FALSE(is_brief("eval", "-u GOMP_SPINCOUNT OMP_WAIT_POLICY=active"));
  const std::string help = succeed(dir, "train", "-h");
  for (const auto& [name, value] : Config().values())  // those that are on by default as --no-NAME
    CHECK_HAS(help, concat("\n      --", value == "true" ? "no-" : "", name, " "));
}

TEST_CASE("train: no flags are yolox-s on shapes; an invalid one gives a line with its name and code 2") {
  Config defaults;
  fill_in(defaults);
  check_config(defaults);
  CHECK((defaults.data == "shapes" && defaults.model == "yolox-s"));
  CHECK_THROWS_WITH_AS(parse_device("tpu"), doctest::Contains("--device"), UsageError);
  for (const std::string flags :
       {"--bogus 1", "--bs 0", "--bs 5 --accum 6", "--cache floppy", "--workers 0", "--epochs 0",
        "--epochs 3 --warmup-epochs 4", "--lr -1", "--ema 1", "--amp x", "--aug x", "--optimizer x",
        "--preproc x", "--mosaic-prob 2", "--model yolo", "--clip 1e308"}) {
    INFO(flags);
    const auto [code, said] = outcome([&] {
      Config config;
      parse(config, split_list("--data data --max-iters 1 " + flags, ' '));
      fill_in(config);
      check_config(config);
    });
    CHECK(code == 2);
    CHECK(said.starts_with("error: "));
    CHECK(count_of("\n" + said, "\nerror: ") == 1);
    CHECK(has(said, split_list(flags.substr(flags.rfind("--")), ' ')[0]));  // the last flag
    if (flags == "--mosaic-prob 2") CHECK_HAS(said, "--mosaic-prob must be in 0..1, got 2");
  }
}

PROGRAM_TEST("train: without objects to find there is no AP; best.pth is the latest; --patience goes on") {
  DataDir dir(4);
  CocoDataset crowds = read_coco(dir / "data/annotations/instances_train.json");
  for (CocoAnnotation& a : crowds.annotations) a.crowd = true;
  fs::copy(dir / "data/train", dir / "data/val");
  write_coco(dir / "data/annotations/instances_val.json", crowds);
  const std::string printed = succeed(
      dir, "train",
      "--data data --model yolox-nano --size 64 --bs 4 --epochs 4 --eval-interval 1 --patience 1 --out r");
  CHECK_HAS(printed, "no image for evaluation has an object to find");
  CHECK(has(printed, "AP - AP50 - "));
  CHECK_FALSE((has(printed, "-1.0000") || has(printed, "stopping")));
  const auto weights = [&](const std::string& name) {
    return c10::IValue(find_weights(read_pth(dir / ("r/" + name)), ""));
  };
  CHECK(difference(weights("best.pth"), weights("last.pth")) == "");
}

PROGRAM_TEST("programs: invalid input gives one line that names it, and the right exit code") {
  const TempDir& dir = trained().dir;
  fs::create_directories(dir / "nothing");
  fs::copy(dir / "a", dir / "h");
  write_text(dir / "text.txt", "words\n");
  write_text(dir / "none.json", "[]");
  write_text(dir / "cut.pth", contents(dir / "a/last.pth").substr(0, 100000));
  CocoDataset truth;
  truth.images = {{1, "a.png", 160, 120}};
  truth.categories = {{1, "a"}};
  for (const auto& [name, x, y, w, h] : {std::tuple("pixels", 80., 60., 40., 50.),
                                         {"fractions", 0.5, 0.5, 0.25, 0.42},
                                         {"corners", 80, 60, 120, 110}}) {
    truth.annotations = {{1, 1, 1, x, y, w, h, w * h, false}};
    write_coco(dir / concat(name, "_gt.json"), truth);
    write_detections(dir / concat(name, "_dt.json"), {{1, 1, x, y, w, h, 0.9}});
  }
  const std::string train =
      "--data data --model yolox-nano --size 64 --bs 2 --max-iters 1 --eval-interval 0 ";
  const std::string eval = "--data data --weights a/last.pth ",
                    demo = "--source data/train --weights a/last.pth ";
  const std::vector<std::tuple<std::string, std::string, int, std::string>> rows = {
      {"train", "--gpus 2 --procs 2", 2, "usage: ./train --data DIR --weights yolox-s --bs 16 --epochs 30"},
      {"train", train + "--bs 100000000", 1, "--bs"},
      {"train", train + "--data nowhere", 1, "nowhere"},
      {"train", train + "--data nothing", 1, "nothing"},
      {"train", train + "--weights nowhere.pth", 1, "nowhere.pth"},
      {"train", train + "--weights cut.pth", 1, "cut.pth"},
      {"train", train + "--freeze backbone,nek --out g", 2, "--freeze nek"},
      {"train", train + "--freeze backbone,neck,head --out g", 2, "nothing to train"},
      {"train", train + "--bs 1 --size 32 --out n", 2, "--size 32 with one image at a time"},
      {"train", train + "--bs 4 --accum 4 --size 32 --out m", 2, "--size 32 with one image at a time"},
      {"train", train + "--out text.txt/run", 1, "text.txt/run"},
      {"train", train + "--out a", 1, "--resume"},
      {"train", "--resume=nowhere", 1, "nowhere"},
      {"train", "--resume=h", 2, "--epochs"},  // the run is complete
      {"train", "--resume=h --epochs 4 --weights a/best.pth", 2, "--weights"},
      {"train", "--resume=h --epochs 4 --out g", 2, "--out"},
      {"eval", "--gt a.json", 2, "usage: ./eval --data DIR --weights runs/NAME/best.pth"},
      {"eval", "--data data", 2, "--weights"},
      {"eval", "--data data --weights nothing", 1, "is a folder without best.pth and last.pth"},
      {"eval", "--gt a.json --dt b.json --save-dt c.json", 2, "--save-dt cannot be combined with --gt"},
      {"eval", "--gt nowhere.json --dt none.json", 1, "nowhere.json"},
      {"eval", "--gt fractions_gt.json --dt pixels_dt.json", 1,
       "fractions_gt.json: 1 of 1 boxes are fractions"},
      {"eval", "--gt pixels_gt.json --dt fractions_dt.json", 1,
       "fractions_dt.json: 1 of 1 boxes are fractions"},
      {"eval", "--gt pixels_gt.json --dt corners_dt.json", 1, "corners_dt.json: 1 of 1 boxes reach beyond"},
      {"eval", eval + "--split test", 1, "test"},
      {"eval", eval + "--conf 2", 2, "--conf"},
      {"eval", eval + "--model yolox-s", 1, "yolox-nano"},
      {"eval", eval + "--json nowhere/e.json", 1, "nowhere/e.json"},
      {"demo", "", 2, "usage: ./demo --source photo.jpg --weights yolox-s"},
      {"demo", demo + "--save text.txt", 1, "text.txt"},
      {"demo", demo + "--max-images -1", 2, "--max-images"},
      {"export", "", 2, "usage: ./export --weights runs/NAME/best.pth --out model.onnx"},
  };
  std::vector<Outcome> outcomes(rows.size());
  parallel_for(
      int64_t(rows.size()),
      [&](int64_t i) { outcomes[i] = run(dir, std::get<0>(rows[i]), std::get<1>(rows[i])); }, 2);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Outcome& o = outcomes[i];
    const auto& [program, arguments, code, named] = rows[i];
    const std::string row = concat(program, " ", arguments);  // clang 14 captures no structured bindings
    INFO(row, "\n", o.out, o.err);
    CHECK((o.code == code && has(o.err, named)));
    CHECK(count_of("\n" + o.err, "\nerror: ") == 1);
    if (has(named, "usage: ")) CHECK(lines_of(o.err).size() == 2);
    for (const char* trace : {"Exception raised from", "terminate called", "frame #"})
      CHECK_MESSAGE(!has(o.out + o.err, trace), trace);
  }
  check_refusal(TempDir(), "train", "--resume", 2, "--resume");  // no runs/ there
  CHECK_FALSE(fs::exists(dir / "h/crash.txt"));                  // resuming a complete run is no crash
}

PROGRAM_TEST("train: --model follows from --weights, and names need no \"yolox-\"") {
  DataDir dir(4);
  const std::string flags = "--data data --size 32 --bs 2 --max-iters 1 --eval-interval 0 --device cpu ";
  CHECK_HAS(succeed(dir, "train", flags + "--model nano --out a"), "model   yolox-nano ");
  CHECK(has(contents(dir / "a/config.json"), R"("model":"yolox-nano")"));
  CHECK_HAS(succeed(dir, "train", flags + "--out b --weights a"), "model yolox-nano, as in a");
  // Evaluation and export take the folder of a run and a name without "yolox-", too.
  CHECK(has(succeed(dir, "eval", "--data data --size 32 --model YOLOX_Nano --weights a --device cpu"),
            "weights a/last.pth\n"));
  fs::copy(dir / "a/last.pth", dir / "a/best.pth");
  write_text(dir / "a/last.pth", "");  // must not be read
  CHECK(
      has(succeed(dir, "export", "--model nano --weights a --size 32 --out m.onnx"), "weights a/best.pth\n"));
}

PROGRAM_TEST("train: --resume takes last.pth or finds the newest run, and refuses some settings") {
  DataDir dir(6);
  succeed(dir, "train",
          "--data data --model nano --size 32 --bs 2 --max-iters 1 --eval-interval 0 --device cpu "
          "--freeze backbone --out runs/a");
  CHECK(has(succeed(dir, "train", "--resume runs/a/last.pth --max-iters 2"), "resuming runs/a at step 1"));
  // With the missing evaluation at the end.
  const std::string printed =
      succeed(dir, "train", "--resume --max-iters 2 --eval-interval 1 --deterministic");
  for (const char* part :
       {"resuming runs/a at step 2", "--deterministic true instead of the run's false", "  AP "})
    CHECK_HAS(printed, part);
  write_scenes(dir / "other", 6, /*classes=*/2);
  fs::create_directory(dir / "elsewhere");
  const std::string from_weights = "start a new run from its weights: ./train ";
  for (const auto& [flags, message] :
       {std::pair("--model tiny", std::string("--model yolox-tiny differs from the run's 'yolox-nano'")),
        {"--optimizer adamw",
         "--optimizer adamw differs from the run's 'sgd', which a resumed run keeps; leave --optimizer out"},
        {"--out runs/b", "--out runs/b differs from the run's 'runs/a'"},
        {"--freeze neck", "--freeze neck differs from the run's 'backbone'"},
        {"--data other", from_weights + "--data other --weights runs/a/last.pth"},
        {"--bs 3", "so the run cannot be resumed with them; leave --bs, --data and --val-fraction out, or " +
                       from_weights + "--data ... --weights runs/a/last.pth"}}) {
    check_refusal(dir, "train", concat("--resume runs/a ", flags), 2, message);
    CHECK_FALSE(fs::exists(dir / "runs/a/crash.txt"));
  }
  CHECK_HAS(
      shell(dir, "cd elsewhere && $YOLOX_PROGRAMS/train --resume ../runs/a --max-iters 4").err,
      "--data data of the run ../runs/a does not exist; it counts from the folder where the run was started");
  check_refusal(dir, "train", "--resume auto --out runs/a --weights runs/a/best.pth", 2, "best.pth differs");
  check_refusal(dir, "eval", "--data data --weights runs/a --json runs/a/best.pth", 2,
                "--json would overwrite");
  check_refusal(dir, "train", "--resume runs/a/best.pth", 1,
                "To start a new run from another file, give it to --weights");
  write_scenes(dir / "data", 5);  // another number of images with the same number of steps
  CHECK_HAS(succeed(dir, "train", "--resume=runs/a --max-iters 3 --preproc legacy --size 96x128"),
            "the training set is another one: it has 5 images, ");
  const WeightsInfo info = weights_info(last_checkpoint(dir, "runs/a"), "last.pth");
  CHECK((info.legacy_preproc && info.height == 96 && info.width == 128));
}
