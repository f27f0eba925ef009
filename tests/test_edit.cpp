// SPDX-License-Identifier: Apache-2.0
// Edits that users rely on: the loop of train.cpp has plain calls, and one line adds a term to the loss.
#include "programs.hpp"

#include "checkpoint/load.hpp"
#include "checkpoint/onnx.hpp"
#include "optim.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

std::string edited(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  REQUIRE_MESSAGE(at != std::string::npos, from);
  return text.replace(at, from.size(), to);
}

// Returns the lines of train.cpp from the one that begins with `first` to the one that is `last`.
std::string part_of_train(const std::string& first, const std::string& last) {
  const std::string text = contents(YOLOX_SOURCE_DIR "/train.cpp");
  const size_t begin = text.find("\n" + first) + 1, end = text.find("\n" + last + "\n", begin);
  return text.substr(begin, end + last.size() + 2 - begin);
}

// Checks that a text contains these parts in this order.
void check_order(const std::string& text, const std::vector<std::string>& parts) {
  size_t at = 0;
  for (const auto& part : parts) {
    at = text.find(part, at);
    REQUIRE_MESSAGE(at != std::string::npos, part);
  }
}

// Returns false, with a message, if the commands of the build are not known.
bool has_ninja() {
  const bool known = fs::exists(YOLOX_BINARY_DIR "/build.ninja");
  if (!known) MESSAGE("skipped: the build folder is not one of Ninja");
  return known;
}

// Runs the commands of the build on the copy of train.cpp in the folder, and makes `train` there. Includes
// are searched first in the folder.
void build_train(const TempDir& dir) {
  std::ofstream(dir / "commands.py") << R"(
import re, subprocess, sys
build, source, folder = sys.argv[1:]
commands = subprocess.check_output(['ninja', '-C', build, '-t', 'commands', 'train'], text=True).strip().split('\n')
compiling = [c for c in commands if ' -c ' + source + '/train.cpp' in c][0]
linking = commands[-1]
compiling = compiling.replace(source + '/train.cpp', folder + '/train.cpp')
compiling = compiling.replace(' -I' + source, ' -I' + folder + ' -I' + source, 1)
compiling = re.sub(r' -MF \S+| -MT \S+| -MD', '', compiling)
compiling = re.sub(r' -o (\S+train\.cpp\.o)', ' -o ' + folder + '/train.o', compiling)
linking = re.sub(r'\S+train\.cpp\.o', folder + '/train.o', linking).replace(' -o train ', ' -o ' + folder + '/train ')
for command in compiling, linking:
    subprocess.check_call(command, shell=True, cwd=build)
)";
  const Outcome built = shell(
      dir,
      concat("python3 commands.py '" YOLOX_BINARY_DIR "' '" YOLOX_SOURCE_DIR "' '", dir.path.string(), "'"));
  REQUIRE_MESSAGE(built.code == 0, built.err);
}

}  // namespace

TEST_CASE("train.cpp: forward, loss, backward, clipping, weights, EMA, log and save stand there in order") {
  const std::string gradients = part_of_train("static Losses forward_backward(", "}"),
                    step = part_of_train("  Losses operator()(", "  }"),
                    loop = part_of_train("    while (", "    }");
  check_order(gradients, {"t.model(", "yolox_loss(", "before_backward(", "backward(", "all_reduce("});
  check_order(step, {"forward_backward(", "scaler.unscale(", "gradient_norm(", "clip_gradients(",
                     "optimizer.step(", "ema_update(", "scaler.update()"});
  check_order(loop, {"StepInput next", "batches.next()", "learning_rate(", "graphs.run(next, std::ref(step))",
                     "progress.log_steps(", "end_of_epoch(", "saver.save("});
  CHECK(lines_of(gradients).size() <= 45);
  CHECK(lines_of(step).size() <= 20);
  CHECK(lines_of(loop).size() <= 30);
}

// Compiles train.cpp with one more line in loss.hpp, with the commands of the build. Checks that all outputs
// of a run contain the new term.
PROGRAM_TEST(
    "train: a loss term and a logged scalar, one line each, are in metrics.csv, TensorBoard and the report") {
  if (!has_ninja()) return;
  TempDir dir;
  fs::copy_file(YOLOX_SOURCE_DIR "/train.cpp", dir / "train.cpp");
  std::ofstream(dir / "loss.hpp") << edited(
      contents(YOLOX_SOURCE_DIR "/loss.hpp"), "  return losses;",
      "  losses.add(\"extra\", 0.5 * l1_loss + 0.25);\n  "
      "losses.log(\"double_iou\", 2 * kIouWeight * iou_loss);\n  "
      "losses.add(\"crowd\", (obj.mean(1) * targets.counts_on(obj.device())).mean(), 5, "
      "Losses::Per::kImage);\n"
      "  return losses;");
  build_train(dir);
  write_scenes(dir / "data", 8);
  const std::string truth = dir / "data/annotations/instances_train.json";
  CocoDataset coco = read_coco(truth);
  coco.images.erase(coco.images.begin() + 1);  // has no objects, and the constant is per positive
  write_coco(truth, coco);
  const auto start = [&](const std::string& flags) {
    return shell(dir,
                 concat("./train --data data --model yolox-nano --size 64 --bs 4 --epochs 1 --max-iters 3 "
                        "--device cpu --no-aug-epochs 1 --warmup-epochs 0 --eval-interval 0 ",
                        flags));
  };
  const auto train = [&](const std::string& flags) {
    const Outcome o = start(flags);
    REQUIRE_MESSAGE(o.code == 0, o.err);
    return o.out;
  };
  CHECK(has(train("--procs 2 --out r"), "total  iou  obj  cls   l1 extra"));
  const auto rows = lines_of(contents(dir / "r/metrics.csv"));
  CHECK(has(rows.at(0), "loss,iou,obj,cls,l1,extra,crowd,positives_per_object"));
  CHECK(has(rows.at(0), "waiting_share,double_iou,grad_norm,AP"));
  for (size_t i = 1; i < rows.size(); ++i) {
    const auto row = metric_rows(dir / "r/metrics.csv").at(i - 1);
    const double l1 = row[kL1], extra = row[kL1 + 1];
    CHECK(row[kL1 + 7] == doctest::Approx(2 * row[kIou]).epsilon(1e-4));
    // The mean over two ranks.
    CHECK(extra == doctest::Approx(0.5 * l1 + 0.25).epsilon(1e-4));
    CHECK(row[kLoss] ==
          doctest::Approx(row[kIou] + row[kObj] + row[kCls] + l1 + extra + row[kL1 + 2]).epsilon(1e-4));
  }
  // Two ranks with different numbers of positives make the step of one, also for a term per image, which
  // cannot be computed in micro-batches.
  train("--out one");
  const auto one = metric_rows(dir / "one/metrics.csv"), two = metric_rows(dir / "r/metrics.csv");
  REQUIRE(one.size() == two.size());
  for (size_t i = 0; i < one.size(); ++i)
    for (const size_t column : {size_t(kL1) + 2, size_t(kL1) + 8})  // the term and the gradient norm
      CHECK(two[i][column] == doctest::Approx(one[i][column]).epsilon(1e-3));
  const Outcome refused = start("--accum 3 --out parts");
  CHECK(refused.code == 1);
  CHECK_MESSAGE(has(refused.err, "the loss term crowd is per image"), refused.err);
  std::string events;
  for (const auto& file : fs::directory_iterator(dir / "r"))
    if (has(file.path().filename(), "events.out")) events = contents(file.path());
  const std::string python = cached_python_with("matplotlib, numpy, pycocotools");
  if (!python.empty())
    CHECK(shell(dir, concat(python, " '" YOLOX_SOURCE_DIR "/tools/report.py' r")).code == 0);
  for (const std::string name : {"extra", "double_iou"}) {
    CHECK(has(events, "train/" + name));
    if (!python.empty()) CHECK(has(contents(dir / "r/report.html"), name));
  }
}

// Applies the patch to a copy of train.cpp. It fails when an edit of train.cpp needs an edit of the patch.
PROGRAM_TEST(
    "examples: docs/two_heads.patch trains two heads in turn on two ranks, and resumes to the byte") {
  if (!has_ninja()) return;
  TempDir dir;
  fs::copy_file(YOLOX_SOURCE_DIR "/train.cpp", dir / "train.cpp");
  const Outcome applied = shell(dir, "git apply '" YOLOX_SOURCE_DIR "/docs/two_heads.patch'");
  REQUIRE_MESSAGE(applied.code == 0, applied.err);
  build_train(dir);
  write_scenes(dir / "all", 6);
  write_scenes(dir / "few", 8, 3);
  const auto train = [&](const std::string& flags) {
    const Outcome o = shell(dir, "./train --device cpu " + flags);
    REQUIRE_MESSAGE(o.code == 0, o.err);
  };
  // An epoch has four steps: eight images of each head.
  const std::string flags =
      "--data all --data2 few --procs 2 --model yolox-nano --size 64 --bs 4 --epochs 5 --eval-interval 5 ";
  train(flags + "--out whole");
  CHECK(steps_of(dir, "whole") == 20);
  train(flags + "--max-iters 10 --out cut");
  const auto before = weights_of(dir, "cut", /*averaged=*/false);
  train("--resume cut --max-iters 11");
  const auto after = weights_of(dir, "cut", /*averaged=*/false);
  std::map<std::string, int> all, changed;  // tensors by the first words of their names
  for (const auto& e : before) {
    const std::string name = e.key().toStringRef(), part = name.substr(0, name.find('.', 5));
    ++all[part];
    changed[part] += !torch::equal(e.value().toTensor(), after.at(e.key()).toTensor());
  }
  CHECK(all["head.second"] > 100);
  CHECK(changed["head.second"] == 0);
  CHECK(changed["head.first"] > 100);
  CHECK(changed["backbone"] > 100);
  train("--resume cut --max-iters 20");
  for (const std::string file : {"/last.pth", "/head1.pth", "/head2.pth"})
    CHECK(difference(dir / ("whole" + file), dir / ("cut" + file)) == "");
  CHECK(weights_info(read_pth(dir / "whole/head2.pth"), "").classes.size() == 3);
  CHECK(has(succeed(dir, "eval", "--data few --weights whole/head2.pth"), "AP"));
}

// Own models are rows of model_sizes() with a make function. Every program accepts them by name.
PROGRAM_TEST("examples: a model with a backbone or neck of its own trains, evaluates, draws and exports") {
  for (const std::string name : {"yolox-pico", "yolox-s-p2"}) {
    CAPTURE(name);
    DataDir dir(8);
    const std::string flags =
        " --data data --size 64 --bs 4 --epochs 8 --eval-interval 0 --warmup-epochs 0 --no-aug-epochs 0 "
        "--optimizer adam "
        "--lr 0.002 --mosaic-prob 0 --mixup-prob 0 --no-multiscale ";
    const bool pico = name == "yolox-pico";
    succeed(dir, "train", concat("--model ", name, flags, pico ? "--procs 2" : "", " --out r"));
    const auto rows = metric_rows(dir / "r/metrics.csv");
    CHECK(rows.back()[kObj] > 0);
    CHECK(rows.back()[kObj] < 0.95 * rows.at(0)[kObj]);
    CHECK(weights_info(read_pth(dir / "r/last.pth"), "last.pth").model == name);
    CHECK(has(succeed(dir, "export", "--weights r/last.pth --out m.onnx --dynamic"), name));
    if (!pico) continue;
    CHECK(has(succeed(dir, "eval", "--data data --weights r/last.pth"), "AP"));
    succeed(dir, "demo", "--source data/train --max-images 2 --weights r/last.pth --save pictures");
    CHECK(has(succeed(dir, "export", "--weights r/last.pth --out m.ts"), name));
  }
}

TEST_CASE("examples: official weights load into yolox-s-p2 by name; its fourth level has stride 4") {
  const YOLOX s = make_model("yolox-s", 3);
  YOLOX p2 = make_model("yolox-s-p2", 3);
  const LoadReport report = load_state_dict(*p2, to_dict(state_dict(*s)), "s");
  CHECK(report.unexpected.empty());
  CHECK(report.mismatched.empty());
  for (const std::string& key : report.missing)
    CHECK((has(key, "_conv2") || has(key, "C3_p2") || has(key, ".3.")));
  p2->eval();
  const Predictions p = p2(torch::zeros({1, 3, 64, 96}));
  CHECK(p.reg.size(1) == 8 * 12 + 4 * 6 + 2 * 3 + 16 * 24);
  const Anchors anchors = make_anchors(64, 96, torch::kFloat, p.strides);
  CHECK(anchors.stride[-1].item<double>() == 4);
  CHECK(anchors.centre.select(1, -1).equal(torch::tensor({94.f, 62.f})));
}

TEST_CASE("examples: --freeze backbone of a model without a neck is all before the head") {
  YOLOX pico = make_model("yolox-pico", 3), p2 = make_model("yolox-s-p2", 3);
  const auto frozen = [](const YOLOX& model, const std::string& prefix) {
    for (const auto& p : model->named_parameters())
      if (p.value().requires_grad() == (p.key().rfind(prefix, 0) == 0)) return false;
    return true;
  };
  CHECK(freeze(*pico, {"neck"}) == "neck");
  for (auto [model, part, prefix] : {std::tuple(pico, "stem", "backbone.stem."),
                                     {pico, "backbone", "backbone."},
                                     {p2, "stem", "backbone.backbone.stem."},
                                     {p2, "backbone", "backbone.backbone."},
                                     {p2, "neck", "backbone."}}) {
    const std::string row = concat(part, " ", prefix);
    INFO(row);
    CHECK(freeze(*model, {part}) == "");
    CHECK(frozen(model, prefix));
  }
}

TEST_CASE("export: an operator that ONNX export does not know is named, with a format that takes it") {
  struct Odd : Backbone {
    explicit Odd(std::shared_ptr<Backbone> inner) { this->inner = register_module("inner", inner); }
    std::vector<Tensor> forward(const Tensor& images) override { return inner->forward(images.erf()); }
    std::shared_ptr<Backbone> inner;
  };
  YOLOX model = make_model("yolox-nano", 2);
  YOLOX odd("odd", 2, std::make_shared<Odd>(model->backbone), model->head);
  const std::string error = error_of([&] { to_onnx(odd, {64, 64}, {}); });
  CHECK_MESSAGE(has(error, "aten::erf"), error);
  CHECK(has(error, "--out model.ts"));
}

namespace {

// A backbone behind a batch norm of its own.
template <class Norm>
struct NormFirst : Backbone {
  explicit NormFirst(std::shared_ptr<Backbone> inner) {
    bn = register_module("bn", Norm(nn::BatchNorm2dOptions(3)));
    this->inner = register_module("inner", inner);
  }
  std::vector<Tensor> forward(const Tensor& images) override { return inner->forward(bn(images)); }
  Norm bn{nullptr};
  std::shared_ptr<Backbone> inner;
};

}  // namespace

TEST_CASE("SyncBN: any SyncBatchNorm2d of a model is synchronised; a BatchNorm2d is refused") {
  YOLOX model = make_model("yolox-nano", 2);
  int calls = 0;
  SyncBnCollectives collectives;
  collectives.sum = [&](Tensor&) { ++calls; };
  YOLOX plain("plain", 2, std::make_shared<NormFirst<nn::BatchNorm2d>>(model->backbone), model->head);
  use_sync_bn(*plain, {});
  CHECK(has(error_of([&] { use_sync_bn(*plain, collectives); }), "1 batch norms of type BatchNorm2d"));
  YOLOX own("own", 2, std::make_shared<NormFirst<SyncBatchNorm2d>>(model->backbone), model->head);
  use_sync_bn(*own, collectives);
  const Tensor images = torch::rand({2, 3, 64, 64});
  own->backbone->as<NormFirst<SyncBatchNorm2d>>()->bn(images);
  CHECK(calls == 1);
  use_sync_bn(*own, {});
  own(images);
  CHECK(calls == 1);
}
