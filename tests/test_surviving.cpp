// SPDX-License-Identifier: Apache-2.0
// Failures of a run: signals, closed terminals, SIGKILL at any moment, damaged files, nonfinite losses, and
// crashes.
#include "programs.hpp"

#include <random>

#include "data/shapes.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Four epochs of four steps with warm-up, mosaic, MixUp, multi-scale, EMA, a last epoch without augmentation,
// and an evaluation after each epoch. A checkpoint at every step, so that many kills hit a file that is being
// written.
const std::string kCrossing =
    "--data data --model yolox-nano --size 64 --bs 2 --epochs 4 --no-aug-epochs 1 --warmup-epochs 1 "
    "--mixup-prob 1 --mosaic-prob 1 --eval-interval 1 --conf 0 --nms 0.9 --deterministic --save-minutes "
    "0.00001 "
    "--out r ";

// Returns the folder of an undisturbed run of kCrossing.
const TempDir& undisturbed() {
  struct Run : TempDir {
    Run() {
      fill_from_reference(*this, "undisturbed", [&] {
        write_scenes(*this / "data", 8);
        succeed(*this, "train", kCrossing);
      });
    }
  };
  static const Run made;
  return made;
}
// A temporary folder with the same data.
struct Folder : TempDir {
  Folder() { fs::copy(undisturbed() / "data", *this / "data", fs::copy_options::recursive); }
  // Returns the checkpoints that differ from those of the undisturbed run, or "".
  std::string different_files() const {
    std::string found;
    for (const char* name : {"r/last.pth", "r/best.pth"})
      if (contents(*this / name) != contents(undisturbed() / name))
        found += concat(name, difference(*this / name, undisturbed() / name), " ");
    return found;
  }
};

const std::string kLong =
    "--data data --model yolox-nano --size 64 --bs 2 --epochs 1000 --eval-interval 0 --out r ";

// Checks that a text has all these parts.
void check_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) CHECK_MESSAGE(has(text, part), part << " in " << text);
}
// Waits until a training in r has made a step.
void wait_for_step(const TempDir& dir, Process& p) {
  REQUIRE(p.until([&] { return metric_rows(dir / "r/metrics.csv").size() >= 2; }));
}

}  // namespace

PROGRAM_TEST("train: a run that is killed at random moments and resumed each time ends with the same bytes") {
  const char* kills_given = std::getenv("YOLOX_KILLS");
  const int kills = kills_given ? std::atoi(kills_given) : 5;
  const Folder dir;
  std::mt19937 random(7);
  const auto runs_started = [&] { return count_of(contents(dir / "r/log.txt"), "  epoch      iter"); };
  std::set<int64_t> seen;  // steps of the kills
  int done = 0;
  for (int runs = 0; done < kills; ++runs) {
    REQUIRE(runs < 10 + 4 * kills);
    const size_t before = runs_started();
    Process p(dir, "train", fs::exists(dir / "r/last.pth") ? "--resume r" : kCrossing);
    if (runs % 3) p.until([&] { return runs_started() > before; });  // otherwise also during the start
    usleep(useconds_t(random() % 1500000));
    if (!p.ended()) {
      kill(p.pid, SIGKILL);
      p.wait();
      ++done;
      if (fs::exists(dir / "r/last.pth")) seen.insert(steps_of(dir));
      continue;
    }
    const bool ended_well = p.wait() == 0 || has(contents(p.err), "is complete");
    CHECK_MESSAGE(ended_well, contents(p.err));
    CHECK(dir.different_files() == "");
    fs::remove_all(dir / "r");
  }
  CHECK(seen.size() > 1);
  const Outcome rest = run(dir, "train", "--resume r");
  CHECK_MESSAGE((rest.code == 0 || has(rest.err, "is complete")), rest.err);
  CHECK(dir.different_files() == "");
  for (const auto& entry : fs::directory_iterator(dir / "r"))
    CHECK_FALSE(has(entry.path().filename().string(), ".tmp"));
}

PROGRAM_TEST("train: SIGHUP is ignored; SIGTERM, SIGUSR1 and Ctrl-C end the run after its step and save") {
  const Folder dir;
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT}) {
    fs::remove_all(dir / "r");
    Process p(dir, "train", kLong);
    const auto rows = [&] { return contents(dir / "r/metrics.csv").size(); };
    REQUIRE(p.until([&] { return rows() > 200; }));
    kill(p.pid, SIGHUP);
    const size_t before = rows();
    REQUIRE(p.until([&] { return rows() > before; }));
    kill(p.pid, signal);
    CHECK(p.wait() == 0);
    check_parts(lines_of(contents(p.out)).back(), {strsignal(signal), "resume with: ./train --resume r",
                                                   concat("at step ", steps_of(dir)).c_str()});
    CHECK(contents(p.err) ==
          (signal == SIGINT ? "\nstops after this step; again = leave without saving\n" : ""));
  }
  CHECK(
      has(succeed(dir, "train", concat("--resume r --max-iters ", steps_of(dir) + 1)), "resuming r at step"));
}

PROGRAM_TEST("train: a signal before the first step ends the run with a message") {
  const Folder dir;
  Process p(dir, "train", kLong);
  REQUIRE(p.until([&] { return fs::exists(dir / "r"); }));
  kill(p.pid, SIGTERM);
  const int code = p.wait();
  if (code == 0)  // the training loop had started
    CHECK(has(contents(p.out), "stopped by"));
  else
    CHECK_MESSAGE((code == 128 + SIGTERM && contents(p.err) == "stopped by SIGTERM before the first step\n"),
                  contents(p.err));
}

PROGRAM_TEST("train: a second Ctrl-C ends the run at once; a lost terminal or a closed pipe does not") {
  const Folder dir;
  {
    Process p(dir, "train", kLong + "--size 416 --bs 32 --no-multiscale ");  // more than a second a step
    wait_for_step(dir, p);
    usleep(300000);  // within the next step
    kill(p.pid, SIGINT);
    usleep(20000);
    kill(p.pid, SIGINT);  // within 0.5 s, counts as the same Ctrl-C
    usleep(400000);
    CHECK_FALSE(p.ended());
    usleep(200000);
    kill(p.pid, SIGINT);
    CHECK(p.wait() == 128 + SIGINT);
  }
  fs::remove_all(dir / "r");
  // head closes the pipe after one line.
  shell(dir, "($YOLOX_PROGRAMS/train " + kLong + "--max-iters 12; echo $? > code) | head -n 1");
  CHECK(contents(dir / "code") == "0\n");
  CHECK(steps_of(dir) == 12);
}

PROGRAM_TEST(
    "train: a damaged checkpoint is reported; with the previous one, the run ends with the same bytes") {
  const Folder dir;
  succeed(dir, "train", kCrossing + "--max-iters 7");
  const std::string previous = contents(dir / "r/last.pth");
  succeed(dir, "train", "--resume r --max-iters 8");
  const std::string whole = contents(dir / "r/last.pth");
  std::string damaged = whole;
  damaged[damaged.size() / 2] ^= 1;  // a single bit
  for (const std::string& bytes : {whole.substr(0, 100000), damaged}) {
    write_text(dir / "r/last.pth", bytes);
    write_text(dir / "r/last.bak.pth", previous);
    const std::string printed = succeed(dir, "train", "--resume r --max-iters 8");
    check_parts(printed, {"last.pth", "using r/last.bak.pth", "resuming r at step 7"});
  }
  succeed(dir, "train", "--resume r --max-iters 0");
  CHECK(contents(dir / "r/last.pth") == contents(undisturbed() / "r/last.pth"));
  // best.pth may be from before the resume, with other settings.
  CHECK(difference(dir / "r/best.pth", undisturbed() / "r/best.pth") == "");
}

PROGRAM_TEST("train: a nonfinite loss ends the run; terms, images, lr are printed, batch and weights saved") {
  const Folder dir;
  const Outcome o = run(dir, "train", kLong + "--lr 1e30 --warmup-epochs 0");
  CHECK(o.code == 1);
  check_parts(o.err, {"the loss is not finite at step", "iou", "obj", "cls", "grad_norm", "lr 1e+30",
                      "shapes_", "nonfinite.pth", "./train --resume r --lr 5e+29"});
  const auto saved = read_pth(dir / "r/nonfinite.pth").toGenericDict();
  CHECK(saved.at("images").toTensor().sizes() == c10::IntArrayRef{2, 64, 64, 3});
  for (const char* name : {"boxes", "classes"}) CHECK(saved.at(name).toTensor().size(0) == 2);
  CHECK_HAS(saved.at("names").toListRef()[1].toStringRef(), "shapes_");
  CHECK(saved.at("model").toGenericDict().size() > 100);
  CHECK_FALSE(std::isfinite(saved.at("losses").toGenericDict().at("total").toDouble()));
  CHECK(saved.at("lr").toDouble() == doctest::Approx(1e30));
  CHECK(saved.at("scale").toDouble() == 1);
  CHECK((saved.at("height").toInt() == 64 && saved.at("width").toInt() == 64));
  CHECK_HAS(o.err, concat("not finite at step ", saved.at("iteration").toInt()));
  CHECK_FALSE(cv::imread(dir / "r/nonfinite.jpg").empty());
  // The checkpoint before the failure is valid.
  for (const auto& e : weights_of(dir, "r", false))
    CHECK(torch::isfinite(e.value().toTensor()).all().item<bool>());

  check_parts(contents(dir / "r/crash.txt"),
              {"not finite", "step ", "shapes_", "\"model\":\"yolox-nano\"", TORCH_VERSION});
  // The folder of a run without a step is used again.
  CHECK(steps_of(dir) == 0);
  succeed(dir, "train", kLong + "--max-iters 2");
  CHECK(steps_of(dir) == 2);
}

PROGRAM_TEST("train: steps whose gradient overflows are skipped and counted; 20 in a row end the run") {
  const Folder dir;
  // The scales cancel in the forward pass, so that the loss is finite, but the gradient overflows.
  torch::manual_seed(0);
  const YOLOX model = make_model("yolox-nano", int(shapes_classes().size()));
  auto params = model->named_parameters();
  {
    const torch::NoGradGuard no_grad;
    params["backbone.backbone.stem.conv.bn.weight"].mul_(1e20);
    params["backbone.backbone.dark2.0.dconv.conv.weight"].mul_(1e-20);
  }
  write_pth(dir / "steep.pth", to_dict(state_dict(*model)));
  const Outcome o = run(dir, "train", kLong + "--weights steep.pth");
  CHECK(o.code == 1);
  check_parts(o.err,
              {"the gradient was not finite 20 times in a row at step 19", "grad_norm inf", "nonfinite.pth"});
  CHECK(fs::exists(dir / "r/nonfinite.pth"));
  succeed(dir, "train", kLong + "--out s --weights steep.pth --max-iters 19 --save-minutes 0.00001");
  const auto state = read_pth(dir / "s/last.pth").toGenericDict().at("train").toGenericDict();
  CHECK(state.at("skipped").toInt() == 19);
  CHECK(state.at("ema_updates").toInt() == 19);  // the warm-up of the EMA counts all steps
  CHECK(has(contents(dir / "s/log.txt"), "19 steps skipped: their gradients overflowed"));
  const auto weights = weights_of(dir, "s", false);
  for (const auto& p : model->named_parameters())
    CHECK(torch::equal(weights.at(p.key()).toTensor(), p.value()));
}

PROGRAM_TEST("train: a step that runs out of memory is repeated in parts, and training continues") {
  const Folder dir;
  const Env one_arena("MALLOC_ARENA_MAX", "1");  // otherwise the limit depends on which threads allocate
  const std::string flags =
      kLong + "--device cpu --threads 1 --bs 8 --size 416 --no-multiscale --max-iters 2 --save-minutes 0 ";
  const int64_t whole = peak_address_space(dir, flags),
                halves = peak_address_space(dir, flags + "--accum 2 ");
  REQUIRE(whole - halves > 200000);
  const Outcome o =
      shell(dir, concat("ulimit -v ", (whole + halves) / 2, "; ", "$YOLOX_PROGRAMS/train ", flags));
  CHECK_MESSAGE(o.code == 0, o.out << o.err);
  CHECK_HAS(o.out, " with 416x416 pixels; repeated in 2 micro-batches");
  CHECK(steps_of(dir) == 2);
}

PROGRAM_TEST("train: a run with fp16 and Adam that is stopped and resumed ends with the same bytes") {
  const Folder dir;
  const std::string flags = kCrossing + "--amp fp16 --optimizer adamw --out ";
  succeed(dir, "train", flags + "a");
  succeed(dir, "train", flags + "b --max-iters 7");
  succeed(dir, "train", "--resume b --max-iters 0");
  for (const std::string name : {"/last.pth", "/best.pth"})
    CHECK(difference(dir / "a" + name, dir / "b" + name) == "");
}

PROGRAM_TEST("train: a second training cannot use the run folder of a running one") {
  const Folder dir;
  Process p(dir, "train", kLong);
  wait_for_step(dir, p);
  for (const std::string& flags : {kLong, std::string("--resume r")})
    check_refusal(dir, "train", flags, 1, "another training uses r");
  kill(p.pid, SIGKILL);
  p.wait();
  succeed(dir, "train", concat("--resume r --max-iters ", steps_of(dir) + 1));
}

PROGRAM_TEST("train: a run that is stopped on a full disk fails with a message, and can be resumed later") {
  const Folder dir;
  succeed(dir, "train", kLong + "--max-iters 2");
  const std::string before = contents(dir / "r/last.pth");
  // The limit of 2 MB per file is less than a checkpoint. SIGTERM stops the run after its first step.
  const Outcome o = shell(
      dir,
      "trap '' XFSZ; ulimit -f 2000; (until [ $(grep -c '  epoch      iter' r/log.txt) = 2 ]; do sleep 0.1; "
      "done; pkill -TERM -P $$ -x train) & $YOLOX_PROGRAMS/train --resume r --max-iters 0");
  CHECK(o.code == 1);
  CHECK_MESSAGE(has(o.err, "last.pth"), o.out << o.err);
  CHECK_FALSE(has(o.out, "stopped by"));
  CHECK(contents(dir / "r/last.pth") == before);
  succeed(dir, "train", "--resume r --max-iters 4");
  CHECK(steps_of(dir) == 4);
}

PROGRAM_TEST("train: --debug names the operation whose gradient is NaN, and saves the batch") {
  const Folder dir;
  const Outcome o = run(dir, "train", kLong + "--lr 1e30 --warmup-epochs 0 --debug");
  CHECK(o.code == 1);
  check_parts(o.err,
              {"returned nan values", "Backward", "; images data/train/shapes_", "./train --resume r"});
  CHECK(fs::exists(dir / "r/nonfinite.pth"));
}

PROGRAM_TEST("train: a crash writes crash.txt and exits with its signal") {
  const Folder dir;
  Process p(dir, "train", kLong);
  wait_for_step(dir, p);
  kill(p.pid, SIGSEGV);
  CHECK(p.wait() == 128 + SIGSEGV);
  check_parts(contents(dir / "r/crash.txt"),
              {"SIGSEGV", "step ", "of epoch", "shapes_", "\"bs\":2,", "\"revision\"", TORCH_VERSION});
  CHECK(has(contents(p.err), "crash.txt"));
}

PROGRAM_TEST("train: AP in training equals the AP of eval on the saved file, digit for digit") {
  const TempDir& dir = trained().dir;
  const double last = last_ap(dir, "a");
  double best = -1;
  for (const auto& row : metric_rows(dir / "a/metrics.csv")) best = std::fmax(best, row[kAP]);
  CHECK(best > 0);
  for (const auto& [file, ap] : {std::pair("last", last), std::pair("best", best)}) {
    succeed(dir, "eval",
            concat("--data data --weights a/", file, ".pth --conf 0 --nms 0.9 --bs 2 --json ap.json"));
    CHECK(formatted("%.9g", json_number(dir / "ap.json", "AP")) == formatted("%.9g", ap));
  }
}

PROGRAM_TEST("train: --profile prints where the time goes and writes a trace; --debug passes") {
  const Folder dir;
  const std::string printed = succeed(dir, "train", kLong + "--profile");
  check_parts(printed, {"data", "copy", "forward", "assignment", "loss", "backward", "optimizer", "EMA",
                        "step", "trace.json"});
  CHECK(has(contents(dir / "r/trace.json"), "aten::convolution"));
  CHECK_FALSE(fs::exists(dir / "r/last.pth"));  // --profile saves no checkpoint
  fs::remove_all(dir / "r");
  succeed(dir, "train", kCrossing + "--debug --max-iters 2");
}

PROGRAM_TEST("train: --bs auto prints the batch size, trains with it and resumes with it") {
  DataDir dir(49);
  // --resume auto begins the run, resumes it with the same bytes, and ends quietly when it is complete.
  const std::string
      flags =
          "--data data --model yolox-nano --size 64 --bs auto --epochs 1 --eval-interval 0 --deterministic ",
      same = flags + "--out r --resume auto ";
  check_parts(succeed(dir, "train", same + "--max-iters 4"),
              {"--bs auto: 4 (at least ten steps in an epoch)", "batch size 4 ",
               "sgd, lr 0.000625 for a batch of 4"});  // scaled with the batch size
  const std::string resumed = succeed(dir, "train", same + "--max-iters 0");
  check_parts(resumed, {"resuming r at step 4", "batch size 4 "});
  CHECK_FALSE(has(resumed, "--bs auto: "));  // which might find another size now
  succeed(dir, "train", flags + "--out whole");
  CHECK(difference(dir / "r/last.pth", dir / "whole/last.pth") == "");
  CHECK_HAS(succeed(dir, "train", same + "--max-iters 0"), "r is complete: 13 of 13 steps are done");
  check_refusal(dir, "train", flags + "--resume auto", 2, "--resume auto needs --out DIR");
}
