// SPDX-License-Identifier: Apache-2.0
// Tests of the training recipes (config.hpp): which one runs, its values, and their dependence on the length
// of the run and the batch size.
#include "config.hpp"
#include "programs.hpp"
#include "run/saving.hpp"
#include "run/setup.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Settings of a run of 26 steps per epoch.
struct Settings26 : Config {
  explicit Settings26(const std::string& flags) {
    ::parse(*this, split_list("--model yolox-nano --bs 8 " + flags, ' '));
    fill_in(*this);
  }
  Plan plan() { return plan_of(*this, 205, 1, {64, 64}); }
};

}  // namespace

TEST_CASE("recipe: weights choose finetune, from scratch it is official, and --recipe chooses itself") {
  CHECK(Settings26("").recipe == "official");
  CHECK(Settings26("--weights x.pth").recipe == "finetune");
  CHECK(Settings26("--weights x.pth --recipe official").recipe == "official");
  CHECK(Settings26("--recipe finetune").recipe == "finetune");
  CHECK(Settings26("").optimizer == "sgd");
  CHECK(Settings26("--weights x.pth").optimizer == "adamw");
}

TEST_CASE("recipe: warm-up and the phase without mosaic fit into the run, so that it can be resumed") {
  for (const std::string flags :
       {"--epochs 2 --no-aug-epochs 2", "--epochs 1 --warmup-epochs 1", "--epochs 3 --warmup-epochs 2.9",
        "--epochs 7 --weights x.pth --no-aug-epochs 6.9"}) {
    CAPTURE(flags);
    Settings26 c(flags);
    c.plan();
    CHECK(error_of([&] { check_config(c); }) == "");
    CHECK(c.warmup_epochs >= 0);
    CHECK(c.no_aug_epochs >= 0);
  }
}

TEST_CASE("recipe: finetune has one input size, unless --multiscale or a resumed run says otherwise") {
  CHECK(Settings26("").multiscale);
  CHECK_FALSE(Settings26("--no-multiscale").multiscale);
  CHECK_FALSE(Settings26("--weights x.pth").multiscale);
  CHECK_FALSE(Settings26("--recipe finetune").multiscale);
  CHECK(Settings26("--weights x.pth --multiscale").multiscale);
  CHECK(Settings26("--weights x.pth --recipe official").multiscale);
  Config resumed;
  resumed.recipe = "finetune";  // of the checkpoint, whose run has several sizes
  fill_in(resumed, /*resumed=*/true);
  CHECK(resumed.multiscale);
}

TEST_CASE(
    "recipe: --freeze follows the recipe, unless it names parts or none, as old checkpoints do with an empty "
    "text") {
  YOLOX model = make_model("yolox-nano", 2);
  const size_t all = trainable_parameters(*model).size();
  const auto frozen = [&](std::string parts, const std::string& of_recipe) {
    freeze_parts(*model, parts, of_recipe);
    return concat(parts, " ", all - trainable_parameters(*model).size());
  };
  CHECK(frozen("recipe", "none") == "none 0");
  CHECK(frozen("none", "stem") == "none 0");
  CHECK(frozen("", "stem") == "none 0");
  CHECK(frozen("recipe", "stem") == "stem 3");
  CHECK(frozen("head.obj_preds", "stem") == "head.obj_preds 9");
}

TEST_CASE("recipe: a flag overrides its value, and the learning rate follows the optimizer of the flag") {
  Settings26 c("--recipe finetune --lr 0.5 --ema 0.9 --warmup-epochs 2");
  const Plan plan = c.plan();
  CHECK(plan.schedule.lr == 0.5);
  CHECK(plan.schedule.warmup == 52);
  CHECK(plan.ema.decay == 0.9);
  Settings26 sgd("--recipe finetune --optimizer sgd");
  CHECK(sgd.plan().schedule.lr == 0.01 / 8);
  CHECK(sgd.weight_decay == 5e-4);
}

TEST_CASE("recipe: lengths are in steps and shrink with the run; official ones are those of 300 epochs") {
  const auto plan = [](const std::string& recipe, int epochs) {
    return Settings26(concat("--recipe ", recipe, " --epochs ", epochs)).plan();
  };
  // The warm-up has at most 5 % of the run, one epoch, and 100 steps.
  CHECK(plan("finetune", 1).schedule.warmup == doctest::Approx(1.3));
  CHECK(plan("finetune", 15).schedule.warmup == doctest::Approx(19.5));
  CHECK(plan("finetune", 300).schedule.warmup == doctest::Approx(26));
  // Without mosaic: at most 35 % of the run and 5 epochs, so that long runs on few images do not over-fit.
  CHECK(plan("finetune", 10).first_no_aug_iteration == 6.5 * 26);
  CHECK(plan("finetune", 15).first_no_aug_iteration == 10 * 26);
  CHECK(plan("finetune", 60).first_no_aug_iteration == 55 * 26);
  const Plan official = plan("official", 300);
  CHECK(official.schedule.warmup == 5 * 26);
  CHECK(official.first_no_aug_iteration == 285 * 26);
  CHECK(official.ema.decay == 0.9998);
  CHECK(official.ema.tau == 2000);
  CHECK(plan("official", 20).schedule.warmup == 26);
  CHECK(plan("official", 20).first_no_aug_iteration == 18 * 26);
}

TEST_CASE("recipe: EMA and batch norms average over a share of the run, and as officially in long runs") {
  const std::pair<double, double> shares[] = {{50, 15}, {750, 15}, {1125, 10}, {1500, 7.5}, {20000, 7.5}};
  for (const auto& [iters, share] : shares) {
    CHECK(1 / (1 - ema_of_run(iters).decay) == doctest::Approx(iters / share));
    CHECK(ema_of_run(iters).tau <= iters / 10);
  }
  CHECK(1 / norm_momentum_of_run(100) == doctest::Approx(5));
  CHECK(norm_momentum_of_run(10) == 0.5);
  CHECK(norm_momentum_of_run(667) == 0.03);
  for (const double iters : {37500.0, 1e6}) {
    CHECK(ema_of_run(iters).decay == doctest::Approx(0.9998).epsilon(1e-12));
    CHECK(ema_of_run(iters).tau == 2000);
  }
  CHECK(ema_of_run(1).decay == 0.5);  // 0 would be no EMA
  YOLOX model = make_model("yolox-nano", 1);
  set_norm_momentum(*model, 0.25);
  for (const auto& module : model->modules())
    if (auto* norm = module->as<torch::nn::BatchNorm2d>()) CHECK(norm->options.momentum() == 0.25);
}

TEST_CASE("recipe: the learning rate is proportional to the batch size for SGD, to its root for Adam") {
  CHECK(default_lr("sgd", 64) == 0.01);
  CHECK(default_lr("sgd", 16) == 0.0025);
  CHECK(default_lr("adamw", 16) / default_lr("adamw", 64) == doctest::Approx(0.5));
  CHECK(default_lr("adam", 4) == default_lr("adamw", 4));
}

PROGRAM_TEST(
    "train: the recipe is logged with its reason, kept in the checkpoint, and not changed by a resume") {
  const TempDir& dir = trained().dir;
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 2 --epochs 2 --eval-interval 0 ";
  CHECK(has(trained().printed, "recipe  official, because training starts from scratch: sgd, lr 0.001234"));
  const std::string printed = succeed(dir, "train", flags + "--weights a/last.pth --max-iters 3 --out tuned");
  CHECK(has(printed, "recipe  finetune, because of --weights: adamw, lr"));
  const std::string again = succeed(dir, "train", "--resume tuned --max-iters 4");
  CHECK(has(again, "recipe  finetune, because of --weights: adamw, lr"));
  const std::string official =
      succeed(dir, "train", flags + "--weights a/last.pth --recipe official --max-iters 1 --out plain");
  CHECK(has(official, "recipe  official, as --recipe says: sgd, lr 0.0003125"));
  CHECK_FALSE(has(official, "frozen"));
  check_refusal(dir, "train", "--resume tuned --recipe official --max-iters 6", 2,
                "--recipe official differs from the run's 'finetune'");
}

PROGRAM_TEST("train: finetune keeps the stem of the weights, and trains one that the weights do not have") {
  const TempDir& dir = trained().dir;
  const auto before = weights_of(dir, "a");
  auto without = empty_dict();
  for (const auto& e : before)
    if (!has(e.key().toStringRef(), "backbone.stem.")) without.insert(e.key(), e.value());
  write_pth(dir / "without_stem.pth", without);
  const std::string flags = "--data data --model yolox-nano --size 64 --bs 4 --epochs 2 --eval-interval 0 ";
  // Tensors of the stem that differ from other weights.
  const auto changed = [&](const std::string& run, const c10::impl::GenericDict& other) {
    int count = 0;
    for (const auto& e : weights_of(dir, run, false))
      if (has(e.key().toStringRef(), "backbone.stem."))
        count += !torch::equal(e.value().toTensor(), other.at(e.key()).toTensor());
    return count;
  };
  // The same command begins a run and resumes it.
  const auto steps = [&](const std::string& flags_of_run, int count) {
    return succeed(dir, "train", concat(flags, "--resume auto ", flags_of_run, " --max-iters ", count));
  };
  const std::string kept = "--weights a/last.pth --out kept";
  const std::string printed = steps(kept, 2);
  CHECK(has(printed, "frozen stem"));
  CHECK_FALSE(has(printed, "--freeze"));
  CHECK(changed("kept", before) == 0);
  CHECK(has(steps(kept + " --freeze recipe --optimizer recipe", 3), "frozen stem"));
  CHECK(changed("kept", before) == 0);
  const std::string moved = "--weights a/last.pth --freeze none --out moved";
  CHECK(has(steps(moved, 2), "--freeze none"));
  CHECK(changed("moved", before) > 4);
  CHECK_FALSE(has(steps(moved, 3), "frozen"));
  CHECK_FALSE(has(steps("--weights without_stem.pth --out fresh", 1), "frozen"));
  const auto first = weights_of(dir, "fresh", false);
  CHECK_FALSE(has(steps("--weights without_stem.pth --out fresh", 3), "frozen"));
  CHECK(changed("fresh", first) > 4);
}

PROGRAM_TEST(
    "train, multitask: finetune scales large filters of the weights down, by powers of two, but not the "
    "stem") {
  const TempDir& dir = trained().dir;
  auto large = empty_dict();  // the same function, but for rounding
  for (const auto& e : weights_of(dir, "a")) {
    const std::string key = e.key().toStringRef();
    const bool times_8 = has(key, ".conv.weight") || has(key, "running_mean");
    large.insert(key, e.value().toTensor() * (times_8 ? 8 : has(key, "running_var") ? 64 : 1));
  }
  write_pth(dir / "large.pth", large);
  const std::string flags =
      "--data data --model yolox-nano --size 64 --bs 4 --max-iters 1 --lr 0 --eval-interval 0 "
      "--weights large.pth --out ";
  succeed(dir, "train", flags + "scaled");
  succeed(dir, "multitask", flags + "heads");
  const auto of_head = read_pth(dir / "heads/head_data.pth").toGenericDict().at("model").toGenericDict();
  int64_t scaled = 0, filters = 0;
  for (const auto& e : weights_of(dir, "scaled", false)) {
    const std::string key = e.key().toStringRef();
    if (!has(key, ".conv.weight")) continue;
    const Tensor now = e.value().toTensor().flatten(1), given = large.at(key).toTensor().flatten(1);
    const Tensor factor = (now.norm(2, 1) / given.norm(2, 1)).log2().round().exp2();  // [O]
    CHECK_MESSAGE(torch::equal(now, given * factor.unsqueeze(1)), key);
    CHECK_MESSAGE(torch::equal(now, of_head.at(key).toTensor().flatten(1)), key);
    if (has(key, "backbone.stem.")) CHECK(torch::equal(now, given));
    scaled += (factor <= 0.25).sum().item<int64_t>();
    filters += factor.numel();
  }
  CHECK(double(scaled) > 0.9 * double(filters));
}

TEST_CASE(
    "resuming: a run of a version without recipes goes on with its learning rate, which was per image") {
  TempDir dir;
  auto settings = empty_dict(), state = empty_dict(), file = empty_dict(), weights = empty_dict();
  weights.insert("w", torch::zeros({1}));
  settings.insert("lr", std::string("0.0001"));
  settings.insert("bs", std::string("32"));
  settings.insert("optimizer", std::string("adamw"));
  state.insert("settings", settings);
  state.insert("model", weights);
  state.insert("iteration", int64_t{5});
  state.insert("images", int64_t{8});
  file.insert("train", state);
  write_pth(dir / "last.pth", file);
  Config c;
  resume_settings(c, dir.path.string());
  fill_in(c);
  CHECK(c.recipe == "official");
  CHECK(c.optimizer == "adamw");
  CHECK(c.lr == doctest::Approx(0.0032));
}

PROGRAM_TEST("train: the validation loss is that of the training code, with batch norms in evaluation mode") {
  const TempDir& dir = trained().dir;
  // Without augmentation, EMA and updates, a step over all images has the loss of the evaluation, but for the
  // batch norms. Frozen batch norms are in evaluation mode, too.
  const std::string flags =
      "--data data --size 64 --bs 8 --epochs 1 --aug none --no-multiscale --lr 0 --ema 0 --no-aug-epochs 0 "
      "--weights a/last.pth --amp fp64 --freeze backbone,neck,head.stems,head.cls_convs,head.reg_convs ";
  const auto losses = [&](const std::string& run) {
    const auto rows = metric_rows(dir / (run + "/metrics.csv"));
    return std::pair(rows.at(0).at(kLoss), rows.at(1).at(kValLoss));
  };
  const std::string printed = succeed(dir, "train", flags + "--eval-interval 1 --out frozen");
  const auto [training, validation] = losses("frozen");
  CHECK(validation == doctest::Approx(training).epsilon(0.003));  // the two letterboxes differ by rounding
  CHECK(has(printed, concat("validation loss ", std::fixed, std::setprecision(3), validation)));
  CHECK(has(contents(dir / "frozen/report.html"), "validation"));
  succeed(dir, "train", flags + "--eval-interval 1 --procs 2 --out frozen_ranks");
  CHECK(losses("frozen_ranks").second == doctest::Approx(validation).epsilon(1e-9));
}
