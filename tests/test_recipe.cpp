// SPDX-License-Identifier: Apache-2.0
// Tests of the training recipes (config.hpp): which one runs, its values, and their dependence on the length
// of the run and the batch size.
#include "config.hpp"
#include "programs.hpp"
#include "run/run.hpp"

using namespace yolox;
using namespace yolox::test;

namespace {

// Settings of a run of 26 steps per epoch.
struct Settings26 : Config {
  explicit Settings26(const std::string& flags) {
    ::parse(*this, split_list("--model yolox-nano --bs 8 " + flags, ' '));
    fill_in(*this);
  }
  Plan plan(int64_t images = 205) { return plan_of(*this, images, 1, {64, 64}); }
};

}  // namespace

TEST_CASE("recipe: weights choose finetune, from scratch it is official, and flags override both") {
  const auto of = [](const std::string& flags) {
    const Settings26 c(flags);
    return concat(c.recipe, " ", c.optimizer, c.multiscale ? " multi-scale" : "");
  };
  CHECK(of("") == "official sgd multi-scale");
  CHECK(of("--no-multiscale") == "official sgd");
  CHECK(of("--weights x.pth") == "finetune adamw");
  CHECK(of("--weights x.pth --multiscale") == "finetune adamw multi-scale");
  CHECK(of("--weights x.pth --recipe official") == "official sgd multi-scale");
  CHECK(of("--recipe finetune") == "finetune adamw");
  Config resumed;
  resumed.recipe = "finetune";  // of the checkpoint, whose run has several sizes
  fill_in(resumed, /*resumed=*/true);
  CHECK(resumed.multiscale);
  const Plan plan = Settings26("--recipe finetune --lr 0.5 --ema 0.9 --warmup-epochs 2").plan();
  CHECK(plan.schedule.lr == 0.5);
  CHECK(plan.schedule.warmup == 52);
  CHECK(plan.ema.decay == 0.9);
  Settings26 sgd("--recipe finetune --optimizer sgd");
  CHECK(sgd.plan().schedule.lr == 0.01 / 8);
  CHECK(sgd.weight_decay == 5e-4);
  CHECK(default_lr("adamw", 16) / default_lr("adamw", 64) == doctest::Approx(0.5));
  YOLOX model = make_model("yolox-nano", 2);
  const size_t all = trainable_parameters(*model).size();
  for (const auto& [parts, of_recipe, frozen] :
       {std::tuple("none", "stem", 0), {"recipe", "stem", 3}, {"head.obj_preds", "stem", 9}}) {
    std::string text = parts;
    freeze_parts(*model, text, of_recipe);
    CHECK(all - trainable_parameters(*model).size() == size_t(frozen));
  }
}

TEST_CASE("recipe: lengths are in steps and shrink with the run; official ones are those of 300 epochs") {
  const auto plan = [](const std::string& recipe, int epochs) {
    return Settings26(concat("--recipe ", recipe, " --epochs ", epochs)).plan();
  };
  for (const auto& [epochs, warmup] : {std::pair(15, 0.75), {300, 1}})
    CHECK(plan("finetune", epochs).schedule.warmup == doctest::Approx(warmup * 26));
  for (const auto& [images, warmup] : {std::pair(12, 2), {25, 24}, {150, 19}})  // of 120, 240 and 1140 steps
    CHECK(Settings26("--recipe finetune --epochs 60").plan(images).schedule.warmup == warmup);
  for (const auto& [epochs, with_mosaic] : {std::pair(10, 6.5), {60, 55}})
    CHECK(plan("finetune", epochs).first_no_aug_iteration == with_mosaic * 26);
  for (const auto& [epochs, warmup, with_mosaic] : {std::tuple(300, 5, 285), {20, 1, 18}}) {
    CHECK(plan("official", epochs).schedule.warmup == warmup * 26);
    CHECK(plan("official", epochs).first_no_aug_iteration == with_mosaic * 26);
  }
  // The EMA and the batch norms average over a share of the run, and as officially in long runs.
  for (const auto& [iters, share] : {std::pair(50.0, 15.0), {750, 15}, {1125, 10}, {1500, 7.5}, {20000, 7.5}})
    CHECK(1 / (1 - ema_of_run(iters).decay) == doctest::Approx(iters / share));
  CHECK(ema_of_run(37500).decay == doctest::Approx(0.9998).epsilon(1e-12));
  CHECK(ema_of_run(37500).tau == 2000);
  CHECK(ema_of_run(1).decay == 0.5);  // 0 would be no EMA
  CHECK(1 / norm_momentum_of_run(100) == doctest::Approx(5));
  CHECK(norm_momentum_of_run(667) == 0.03);
  torch::nn::BatchNorm2d norm(2);
  set_norm_momentum(*norm, 0.25);
  CHECK(norm->options.momentum() == 0.25);
  // Warm-up and the phase without mosaic fit into the run, so that it can be resumed.
  for (const std::string flags : {"--epochs 2 --no-aug-epochs 2", "--epochs 3 --warmup-epochs 2.9",
                                  "--epochs 7 --weights x.pth --no-aug-epochs 6.9"}) {
    Settings26 c(flags);
    c.plan();
    CHECK(error_of([&] { check_config(c); }) == "");
  }
}

PROGRAM_TEST("train: finetune is logged, keeps and freezes the stem, and stays in a resumed run") {
  const TempDir& dir = trained().dir;
  CHECK(has(trained().printed, "recipe  official, because training starts from scratch: sgd, lr 0.001234"));
  const auto before = weights_of(dir, "a");
  auto without = empty_dict();
  for (const auto& e : before)
    if (!has(e.key().toStringRef(), "backbone.stem.")) without.insert(e.key(), e.value());
  write_pth(dir / "without_stem.pth", without);
  const auto train = [&](const std::string& flags) {
    return succeed(
        dir, "train",
        "--data data --model yolox-nano --size 64 --bs 4 --epochs 2 --eval-interval 0 --resume auto " +
            flags);
  };
  // Returns the number of tensors of the stem that differ from other weights.
  const auto changed = [&](const std::string& run, const c10::impl::GenericDict& other) {
    int count = 0;
    for (const auto& e : weights_of(dir, run, false))
      if (has(e.key().toStringRef(), "backbone.stem."))
        count += !torch::equal(e.value().toTensor(), other.at(e.key()).toTensor());
    return count;
  };
  for (const int steps : {2, 3}) {  // the same command begins a run and resumes it
    const std::string printed = train(concat("--weights a/last.pth --out kept --max-iters ", steps));
    CHECK(has(printed, "recipe  finetune, because of --weights: adamw, lr"));
    CHECK(has(printed, "frozen stem"));
    CHECK(changed("kept", before) == 0);
  }
  CHECK(has(train("--weights a/last.pth --freeze none --out moved --max-iters 2"), "--freeze none"));
  CHECK(changed("moved", before) > 4);
  CHECK_FALSE(has(train("--weights without_stem.pth --out fresh --max-iters 1"), "frozen"));
  const auto first = weights_of(dir, "fresh", false);
  CHECK_FALSE(has(train("--weights without_stem.pth --out fresh --max-iters 3"), "frozen"));
  CHECK(changed("fresh", first) > 4);
  check_refusal(dir, "train", "--resume kept --recipe official --max-iters 6", 2,
                "--recipe official differs from the run's 'finetune'");
}

PROGRAM_TEST("train: finetune scales large filters of the weights down, by powers of two, but not the stem") {
  const TempDir& dir = trained().dir;
  auto large = empty_dict();  // the same function, but for rounding
  for (const auto& e : weights_of(dir, "a")) {
    const std::string key = e.key().toStringRef();
    const bool times_8 = has(key, ".conv.weight") || has(key, "running_mean");
    large.insert(key, e.value().toTensor() * (times_8 ? 8 : has(key, "running_var") ? 64 : 1));
  }
  write_pth(dir / "large.pth", large);
  succeed(dir, "train",
          "--data data --model yolox-nano --size 64 --bs 4 --max-iters 1 --lr 0 --eval-interval 0 "
          "--weights large.pth --out scaled");
  int64_t scaled = 0, filters = 0;
  for (const auto& e : weights_of(dir, "scaled", false)) {
    const std::string key = e.key().toStringRef();
    if (!has(key, ".conv.weight")) continue;
    const Tensor now = e.value().toTensor().flatten(1), given = large.at(key).toTensor().flatten(1);
    const Tensor factor = (now.norm(2, 1) / given.norm(2, 1)).log2().round().exp2();  // [O]
    CHECK_MESSAGE(torch::equal(now, given * factor.unsqueeze(1)), key);
    if (has(key, "backbone.stem.")) CHECK(torch::equal(now, given));
    scaled += (factor <= 0.25).sum().item<int64_t>();
    filters += factor.numel();
  }
  CHECK(double(scaled) > 0.9 * double(filters));
}
